"""What the code of a kernel depends on (Form), and the arguments of a call."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...axes import lay_out_bias, per_head
from ...bound import Bound
from ...dropout import LEVELS, realised_rate, threshold
from ...inputs import Inputs
from ...mask_text import MaskCode, arguments, form_of
from ...problem import Problem
from ...spelling import parse
from . import masks
from .compiled import INTERPRETED, Count, Small

LOG2E = math.log2(math.e)
META = torch.device("meta")  # of stand-ins: arrays without memory
NOTHING = (Small(0),)  # an argument that is not used: tuples may not be empty


@dataclass(frozen=True)
class Form:
    """What code depends on; the constant F of every kernel. `if F.softcap:` there.

    D, E         widths; D_PAD, E_PAD powers of 2 that hold them, at least 16
    unit         neighbours along the last axis of q, k and v lie side by side
    plain        a score is scale * q.k alone: kernels then leave the scale to the exponential
    flip         q is to be multiplied by numbers' sign: plain, and the scale is not above 0
    bias         along which of "m" and "n" it varies; None without one
    bias_unit    numbers of a bias of neighbouring keys lie side by side
    seed_ptr     the seed lies on the device
    odd          the key offset of dropout is odd, so hash pairs straddle tiles
    precision    of products, in Triton's words: float32 by six products of bfloat16, three of which
                 hold all 24 bits of a number; its interpreter has float32
    packed       sequences side by side, with cu
    folded       the query heads of a group are rows of one tile
    split        keys are shared among programs: what each saw is merged later
    sighted      a kernel before it has looked at the mask's arrays: see sight.py
    """

    D: int
    E: int
    D_PAD: int
    E_PAD: int
    mask: MaskCode
    unit: bool
    softcap: bool
    alibi: bool
    bias: str | None
    sinks: bool
    dropout: bool
    seed_ptr: bool
    odd: bool
    precision: str
    packed: bool
    flip: bool
    folded: bool = False
    split: bool = False
    sighted: bool = False
    bias_unit: bool = False

    @property
    def plain(self) -> bool:
        """No softcap, alibi or bias."""
        return not (self.softcap or self.alibi or self.bias is not None)


class Seed(Count):
    """A seed that the host knows."""


class Call(NamedTuple):
    """The arguments of a call that all kernels share, each a tuple of a kernel's parameters.

    sizes    (B, Hq, Hk, G, M, N) int32
    numbers  (unit, c2, scale, softcap, sign, kept) float32: see scores.py
    bias     (pointer, stride of b, h, m, n)      sinks, alibi  (pointer, stride of b, h)
    drop     (seed, level, offset of b, h, i, j)  see drops.py
    mask     see mask_text.py                     cu  (cu_q, cu_k)
    """

    form: Form
    sizes: tuple[Any, ...]
    numbers: tuple[Any, ...]
    bias: tuple[Any, ...]
    sinks: tuple[Any, ...]
    alibi: tuple[Any, ...]
    drop: tuple[Any, ...]
    mask: tuple[Any, ...]
    cu: tuple[Any, ...]

    @property
    def shared(self) -> tuple[tuple[Any, ...], ...]:
        """The arguments in the order that every kernel takes them."""
        return (*self[1:],)

    @property
    def given(self) -> tuple[Any, ...]:
        """What calls of a problem differ in: arrays and a Seed, in the order of arrays_of."""
        own = (value for values in self[3:] for value in values)
        return tuple(value for value in own if isinstance(value, Tensor | Seed))


def padded(width: int) -> int:
    """The power of 2, at least 16, that holds a width: tiles have no other sides."""
    return max(16, 1 << (width - 1).bit_length())


def even(problem: Problem) -> bool:
    """Whether one stride steps through the batch axes of each of q, k and v."""
    return all(
        len(sizes) < 2 or all(a[1] == b[1] * b[0] for a, b in itertools.pairwise(sizes))
        for strides in problem.strides
        for sizes in [[(n, s) for n, s in zip(problem.batch, strides, strict=False) if n > 1]]
    )


def rows_of(problem: Problem, t: Tensor) -> tuple[Any, ...]:
    """An array (..., H, rows, width), or packed (total, H, width), as (pointer, stride of b, h,
    row, width); strides of axes with one element are 0."""
    sizes, steps = tuple(t.shape), tuple(t.stride())
    if problem.packed:
        return (t, 0, _step(sizes[1], steps[1]), _step(sizes[0], steps[0]), steps[2])
    b = next((s for n, s in zip(sizes[-4::-1], steps[-4::-1], strict=True) if n > 1), 0)
    return (t, b, _step(sizes[-3], steps[-3]), _step(sizes[-2], steps[-2]), steps[-1])


def lse_of(problem: Problem, t: Tensor) -> tuple[Any, ...]:
    """lse, (..., Hq, M) or packed (Hq, M), contiguous, as (pointer, stride of b, h, m, 0)."""
    b = 0 if problem.packed else problem.Hq * problem.M
    return (t, Count(b), Count(problem.M), 1, 0)


def _step(size: int, stride: int) -> int:
    return stride if size > 1 else 0


def stand_ins(p: Problem, x: Inputs | None = None) -> Inputs:
    """x with stand-ins, without memory, for q, k and v as the problem describes them."""
    sizes = (p.Hq, p.M, p.D), (p.Hk, p.N, p.D), (p.Hk, p.N, p.E)
    q, k, v = (
        torch.empty_strided(
            (n, h, w) if p.packed else (*p.batch, h, n, w), s, dtype=p.dtype, device="meta"
        )
        for (h, n, w), s in zip(sizes, p.strides, strict=True)
    )
    return (x or Inputs(q, k, v))._replace(q=q, k=k, v=v)


def arrays_of(x: Inputs) -> tuple[Tensor, ...]:
    """The arrays of a call beside q, k and v, as the user gave them."""
    if x.bias is x.sinks is x.alibi is x.seed is x.cu_q is None and not x.arrays:
        return ()
    every = (x.bias, x.sinks, x.alibi, x.seed, *x.arrays, x.cu_q, x.cu_k)
    return tuple([t for t in every if t is not None])


def layouts(arrays: Sequence[Tensor]) -> tuple[Any, ...]:
    """What a problem does not say of arrays, and code and arguments depend on."""
    return tuple([(t.dtype, t.shape, t.stride(), t.is_cpu) for t in arrays])


def apart(x: Inputs) -> Inputs:
    """The same arrays, each an object of its own: q may be k, or the ids of queries those of keys,
    in one call and not in the next."""
    own: tuple[Any, ...] = tuple(t if t is None else t.detach() for t in x[:-1])
    return Inputs._make((*own, tuple(t.detach() for t in x.arrays)))


class Taken(NamedTuple):
    """How the values of a call follow from its arrays.

    copied  some are laid out anew in each call, so that call_of must be asked
    seed    where among arrays_of a seed is that the host knows
    """

    copied: bool
    seed: int | None

    @staticmethod
    def of(p: Problem, x: Inputs, call: Call) -> Taken:
        """From a call of the problem."""
        given, arrays = call.given, arrays_of(x)
        names = [f"t{n}" for n in range(len(x.arrays))]
        same = len(given) == len(arrays) and re.findall(r"\bt\d+\b", p.mask) == names
        copied = not same or any(
            isinstance(a, Tensor) and (a.dtype != t.dtype or a.data_ptr() != t.data_ptr())
            for a, t in zip(given, arrays, strict=True)
        )
        seed = next((n for n, value in enumerate(given) if isinstance(value, Seed)), None)
        return Taken(copied, seed)


def call_of(problem: Problem, x: Inputs) -> Call:
    """The arguments of a call."""
    seed_ptr = x.seed is not None and x.seed.device.type != "cpu"
    call = _with_mask(problem, x.arrays, seed_ptr)
    more: dict[str, Any] = {}
    if x.bias is not None:
        laid = lay_out_bias(x.bias, problem.batch)
        if laid.dtype == torch.float64:  # tiles of it would take twice the fast memory
            laid = laid.float()
        more["bias"] = (laid, *_steps(laid))
        more["form"] = replace(call.form, bias_unit=laid.stride(-1) == 1)
    if x.sinks is not None:
        more["sinks"] = _per_head(problem, x.sinks)
    if x.alibi is not None:
        more["alibi"] = _per_head(problem, x.alibi)
    if x.seed is not None:
        seed = x.seed if seed_ptr else Seed(int(x.seed))
        more["drop"] = (seed, *call.drop[1:])
    if x.cu_q is not None and x.cu_k is not None:
        more["cu"] = tuple(_on(problem, t) for t in (x.cu_q, x.cu_k))
    return call._replace(**more)


def _with_mask(p: Problem, arrays: Sequence[Tensor], seed_ptr: bool) -> Call:
    bound = Bound(parse(p.mask, arrays), p.batch, p.Hq, p.M, p.N, p.device)
    along = None
    if p.bias is not None:
        along = "".join(c for c, n in zip("mn", (1, 1, *p.bias)[-2:], strict=True) if n > 1)
    plain = p.softcap is None and p.alibi is None and along is None
    form = Form(
        D=p.D,
        E=p.E,
        D_PAD=padded(p.D),
        E_PAD=padded(p.E),
        mask=masks.code(form_of(bound)),
        unit=all(s[-1] == 1 for s in p.strides),
        softcap=p.softcap is not None,
        alibi=p.alibi is not None,
        bias=along,
        sinks=p.sinks is not None,
        dropout=p.p > 0,
        seed_ptr=seed_ptr,
        odd=p.offsets[3] % 2 == 1,
        precision="bf16x6" if p.dtype == torch.float32 and not INTERPRETED else "ieee",
        packed=p.packed,
        flip=plain and p.scale <= 0,
    )
    unit = (abs(p.scale) or 1.0) if form.plain else 1.0
    sign = 1.0 if not form.plain else math.copysign(1.0, p.scale) if p.scale else 0.0
    level = (threshold(p.p) - LEVELS // 2) << 16  # compared with a hash of 32 bits, signed
    kept = 1.0 - realised_rate(p.p)
    return Call(
        form,
        sizes=tuple(Small(n) for n in (p.B, p.Hq, p.Hk, p.G, p.M, p.N)),
        numbers=(unit, unit * LOG2E, p.scale, p.softcap or 1.0, sign, kept),
        bias=NOTHING,
        sinks=NOTHING,
        alibi=NOTHING,
        drop=(Count(0), Small(level), *map(Count, p.offsets)) if p.p > 0 else NOTHING,
        mask=tuple(arguments(bound, Count)) or NOTHING,
        cu=NOTHING,
    )


def _steps(t: Tensor) -> tuple[int, ...]:
    return tuple(_step(n, s) for n, s in zip(t.shape, t.stride(), strict=True))


def _on(p: Problem, cu: Tensor) -> Tensor:
    """Offsets where the kernel can read them; those of a compilation ahead have no memory."""
    return cu.contiguous() if cu.device.type == "meta" else cu.to(p.device).contiguous()


def _per_head(p: Problem, t: Tensor) -> tuple[Any, ...]:
    laid = per_head(t, () if p.packed else p.batch, p.Hq)
    return (laid, *_steps(laid)[:2])
