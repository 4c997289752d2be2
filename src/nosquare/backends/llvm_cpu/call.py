"""The argument block: one call as the kernels see it, an array of 8-byte fields.

A field is a pointer, an int64 or a double, by these names (host: Call, device: Args.<name>):

    q k v o lse do dlse delta dq dk dv dbias dsinks bias sinks alibi   where the array starts
    <array>_<axis>    its strides in elements, 0 along an axis that broadcasts: AXES says which
    numbers           int64 of the kinds of the mask, leaf after leaf
    arrays            of the mask: 5 int64 each: address, stride of b, h, m, n
    work, work2       workspace
    B Hq Hk G M N D E sizes
    seed threshold off_b off_h off_i off_j     of dropout
    scale softcap kept                         double; kept = 1 - rate
    x0 ... x7         int64 of a kernel's own

q, k, v, bias and arrays of a mask keep the user's memory and dtype; sinks and alibi come as
float32, ids of a mask in uint8 as int64. What the code (not the data) depends on is a Form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...axes import lay_out_bias, per_head
from ...bound import Bound
from ...dropout import realised_rate, threshold
from ...inputs import Inputs
from ...mask import Both, Full, Mask
from ...problem import Problem
from ...spelling import parse
from .ir import Function, Value

_Plan = TypeVar("_Plan")
_Made = TypeVar("_Made")

KINDS = {
    **{torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"},
    **{torch.bool: "bool", torch.int8: "i8", torch.int16: "i16"},
    **{torch.int32: "i32", torch.int64: "i64"},
}

AXES = {
    **{"q": "bhm", "k": "bhn", "v": "bhn", "o": "bhm", "lse": "bhm", "do": "bhm", "dlse": "bhm"},
    **{"delta": "bhm", "dq": "bhm", "dk": "bhn", "dv": "bhn", "dbias": "bhmn", "dsinks": "bh"},
    **{"bias": "bhmn", "sinks": "bh", "alibi": "bh"},
}
_STRIDES_OF = {array: [f"{array}_{axis}" for axis in axes] for array, axes in AXES.items()}
_STRIDES = [name for names in _STRIDES_OF.values() for name in names]
_SIZES = "B Hq Hk G M N D E".split()
_DROPOUT = "seed threshold off_b off_h off_i off_j".split()
_REALS = "scale softcap kept".split()
_OWN = [f"x{n}" for n in range(8)]
FIELDS = [
    *(*AXES, "numbers", "arrays", "work", "work2"),
    *(*_STRIDES, *_SIZES, *_DROPOUT, *_REALS, *_OWN),
]
_AT = {name: at for at, name in enumerate(FIELDS)}
OUTLINES = 256  # problems whose outlines are remembered: each may hold a few integers a query


class Call(ctypes.Structure):
    """The block. Unset fields are 0."""

    _fields_ = [(name, ctypes.c_double if name in _REALS else ctypes.c_int64) for name in FIELDS]


class ArrayForm(NamedTuple):
    """An array of a mask: its kind of element; whether it varies along keys, and if so whether
    neighbouring keys lie side by side."""

    kind: str
    along_keys: bool
    side_by_side: bool


class LeafForm(NamedTuple):
    """One kind of mask, its arrays and how many numbers it has."""

    kind: type[Mask]
    block: int
    numbers: int
    arrays: tuple[ArrayForm, ...]


class JoinForm(NamedTuple):
    """Parts joined by & or |."""

    sign: str
    parts: tuple[Any, ...]


MaskForm = LeafForm | JoinForm


@dataclass(frozen=True)
class Form:
    """What code depends on, with the target: part of the key of a kernel.

    dtype   of q, k, v and o: "f32", "bf16", "f16"
    bias    the kind of its elements, None without one; bias_keys whether it varies along keys,
            bias_unit whether neighbouring keys then lie side by side
    """

    dtype: str
    D: int
    E: int
    mask: MaskForm
    softcap: bool
    bias: str | None
    bias_keys: bool
    bias_unit: bool
    sinks: bool
    alibi: bool
    dropout: bool

    @property
    def pointers(self) -> dict[str, str]:
        """Elements that the arrays of the block have; float32 where nothing is said."""
        given = dict.fromkeys("q k v o do dq dk dv".split(), self.dtype)
        return given | ({"bias": self.bias} if self.bias else {})


class Filled(NamedTuple):
    """A block, what its code depends on, the tensors that must live as long as it, the mask, and
    what the call has in common with others."""

    call: Call
    form: Form
    alive: list[Any]
    bound: Bound
    outline: Outline

    def point(self, name: str, t: Tensor) -> None:
        """Let an array of the block be this tensor, with an axis for each of AXES[name] (and one
        more for the width)."""
        point(self.call, name, t)
        self.alive.append(t)

    @property
    def address(self) -> int:
        """Where the block lies."""
        return ctypes.addressof(self.call)


def point(call: Call, name: str, t: Tensor) -> None:
    """See Filled.point."""
    setattr(call, name, t.data_ptr())
    for field, stride in steps(name, t.shape, t.stride()):
        setattr(call, field, stride)


def steps(name: str, sizes: Sequence[int], strides: Sequence[int]) -> Iterator[tuple[str, int]]:
    """The fields that say how an array of the block is stepped through, and their values."""
    for field, size, stride in zip(_STRIDES_OF[name], sizes, strides, strict=False):
        yield field, stride if size > 1 else 0


def even(problem: Problem) -> bool:
    """Whether one stride steps through the batch axes of each of q, k and v, so that none of them
    has to be copied."""
    return all(
        outer == inner * size
        for strides in problem.strides
        for (_, outer), (size, inner) in pairwise(_varying(problem, strides))
    )


def _varying(p: Problem, strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Size and stride of the batch axes that have more than one entry."""
    return [(n, s) for n, s in zip(p.batch, strides, strict=False) if n > 1]


def one_batch(problem: Problem, t: Tensor) -> Tensor:
    """(..., H, M, width) of q, k, v, o or a gradient as a view (B, H, M, width)."""
    return t if t.dim() == 4 else t.view(problem.B, *t.shape[-3:])


def bind(p: Problem, arrays: tuple[Tensor, ...] = ()) -> Bound:
    """The mask of a call, bound to its sizes; without arrays, remembered."""
    if not arrays:
        return _bind(p.mask, p.batch, p.Hq, p.M, p.N)
    return Bound(parse(p.mask, arrays), p.batch, p.Hq, p.M, p.N)


@lru_cache(maxsize=256)
def _bind(mask: str, batch: tuple[int, ...], heads: int, m: int, n: int) -> Bound:
    return Bound(parse(mask), batch, heads, m, n)


class Outline(NamedTuple):
    """What all calls of a problem have in common.

    image  the block without addresses: sizes, numbers, strides of q, k and v, and of o and lse as
           `outputs` makes them
    form   without what a bias and the arrays of a mask say of themselves
    bound  the mask, None where it has arrays; table: its numbers, which the image points at
    bare   whether q, k and v are all that a call adds
    o, lse shape and strides of each
    ready  what kernels have made: see `prepared`
    """

    image: bytes
    form: Form
    bound: Bound | None
    table: list[Any]
    bare: bool
    o: tuple[tuple[int, ...], tuple[int, ...]]
    lse: tuple[tuple[int, ...], tuple[int, ...]]
    ready: dict[Any, Any]


@lru_cache(maxsize=OUTLINES)
def outline(p: Problem) -> Outline:
    """See Outline; of a problem that is not packed."""
    call, no_mask = Call(), LeafForm(Full, 1, 0, ())
    table: list[Any] = []
    m, n = (p.Hq, p.M), (p.Hk, p.N)
    strides_of: list[tuple[str, int]] = []
    for name, sizes, strides in zip("qkv", (m, n, n), p.strides, strict=True):
        entry = [stride for _, stride in _varying(p, strides)] or [0]
        strides_of += steps(name, (p.B, *sizes), (entry[-1], *strides[-3:-1]))
    new = replace(p, device=torch.device("meta")).empty_o()
    lse = torch.empty(p.lse_shape, device="meta")
    for name, t in (("o", one_batch(p, new)), ("lse", lse.view(p.B, *m))):
        strides_of += steps(name, t.shape, t.stride())
    for field, value in strides_of:
        setattr(call, field, value)
    for name in _SIZES:
        setattr(call, name, getattr(p, name))
    call.scale, call.softcap = p.scale, p.softcap or 0.0
    call.kept = 1.0 - realised_rate(p.p)
    if p.p > 0:
        call.threshold = threshold(p.p)
        call.off_b, call.off_h, call.off_i, call.off_j = p.offsets
    bound = None if "t0" in p.mask else bind(p)
    form = Form(
        dtype=KINDS[p.dtype],
        D=p.D,
        E=p.E,
        mask=no_mask if bound is None else _fill_mask(bound, call, table),
        softcap=p.softcap is not None,
        bias=None,
        bias_keys=False,
        bias_unit=False,
        sinks=p.sinks is not None,
        alibi=p.alibi is not None,
        dropout=p.p > 0,
    )
    bare = bound is not None and p.p == 0 and p.bias is p.sinks is p.alibi is None
    shapes = (p.o_shape, new.stride()), (p.lse_shape, lse.stride())
    return Outline(bytes(call), form, bound, table, bare, *shapes, {})


def fill(problem: Problem, x: Inputs) -> Filled:
    """The block of a call, without outputs and cotangents: `outputs` and `point` add them."""
    known = outline(problem)
    call = Call.from_buffer_copy(known.image)
    call.q, call.k, call.v = x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr()
    if known.bare and known.bound is not None:
        return Filled(call, known.form, [], known.bound, known)
    return _fill_more(problem, x, call, known)


def _fill_more(p: Problem, x: Inputs, call: Call, known: Outline) -> Filled:
    form, bound, alive = known.form, known.bound, []
    for name, given in (("sinks", x.sinks), ("alibi", x.alibi)):
        if given is not None:
            alive.append(per_head(given, p.batch, p.Hq)[..., 0, 0].float())
            point(call, name, alive[-1])
    if x.bias is not None:
        bias = lay_out_bias(x.bias, p.batch)
        alive.append(bias)
        point(call, "bias", bias)
        kind, keys, unit = KINDS[bias.dtype], bias.shape[3] > 1, bias.stride(3) == 1
        form = replace(form, bias=kind, bias_keys=keys, bias_unit=unit)
    if p.p > 0 and x.seed is not None:
        call.seed = int(x.seed)
    if bound is None:
        bound = bind(p, x.arrays)
        form = replace(form, mask=_fill_mask(bound, call, alive))
    return Filled(call, form, alive, bound, known)


def outputs(p: Problem, filled: Filled) -> tuple[Tensor, Tensor]:
    """o and lse of a problem that is not packed, empty; the block of `fill` points at them."""
    call, known = filled.call, filled.outline
    # by its strides: that is the fastest way to have a tensor made
    o = torch.empty_strided(*known.o, dtype=p.dtype, device=p.device)
    lse = torch.empty_strided(*known.lse, dtype=torch.float32, device=p.device)
    call.o, call.lse = o.data_ptr(), lse.data_ptr()
    return o, lse


def prepared(
    make: Callable[[Problem, _Plan, Filled], _Made], p: Problem, plan: _Plan, filled: Filled
) -> _Made:
    """What `make` prepares for all calls of a plan and a form: make(p, plan, filled), remembered.
    It may hold nothing of the one call that it was made for."""
    kept, whole = filled.outline.ready, filled.form is filled.outline.form
    key = plan if whole else (plan, filled.form)
    found: _Made | None = kept.get(key)
    if found is None:
        found = kept[key] = make(p, plan, filled)
    return found


def _fill_mask(whole: Bound, call: Call, alive: list[Any]) -> MaskForm:
    numbers: list[int] = []
    words: list[int] = []
    found = _mask_form(whole, numbers, words, alive)
    call.numbers, call.arrays = _table(numbers, alive), _table(words, alive)
    return found


def _mask_form(bound: Bound, numbers: list[int], words: list[int], alive: list[Any]) -> MaskForm:
    """The form of a mask; its numbers, the words of its arrays and these arrays are appended.

    Not a function inside another one: that would refer to itself, and what it has seen (the
    tensors of the call among it) would wait for Python's collector of cycles.
    """
    if bound.parts:
        assert isinstance(bound.mask, Both)
        parts = tuple(_mask_form(part, numbers, words, alive) for part in bound.parts)
        return JoinForm(bound.mask.sign, parts)
    numbers.extend(bound.numbers)
    arrays = [a.long() if a.dtype == torch.uint8 else a for a in bound.arrays]
    alive.extend(arrays)
    for a in arrays:
        steps = [s if n > 1 else 0 for n, s in zip(a.shape, a.stride(), strict=True)]
        words.extend((a.data_ptr(), *steps))
    forms = (
        ArrayForm(KINDS[a.dtype], a.shape[3] > 1, a.stride(3) == 1 and bound.block == 1)
        for a in arrays
    )
    return LeafForm(type(bound.mask), bound.block, len(bound.numbers), tuple(forms))


def _table(values: Iterable[int], alive: list[Any]) -> int:
    values = list(values) or [0]
    table = (ctypes.c_int64 * len(values))(*values)
    alive.append(table)
    return ctypes.addressof(table)


class Args:
    """The block inside a kernel: args.M is the field M, loaded where it is asked for. Nothing
    writes to the block while a kernel runs, so LLVM may load a field once for all."""

    def __init__(self, f: Function, block: Value, form: Form) -> None:
        self._f, self._block = f, block.pointing_at("i64")
        self._pointers = form.pointers

    def __getattr__(self, name: str) -> Value:
        if name not in _AT:
            raise AttributeError(name)
        at = self._block + _AT[name]
        if name in AXES:
            return self._f.constant(at.pointing_at("ptr"), f"{self._pointers.get(name, 'f32')}*")
        if name in ("numbers", "arrays"):
            return self._f.constant(at, "i64*")
        if name in ("work", "work2"):
            return self._f.constant(at, "f32*")
        if name in _REALS:
            return self._f.constant(at, "f64").to("f32")
        return self._f.constant(at, "i64")

    def row(self, name: str, *index: Value) -> Value:
        """A pointer to the element or row of an array at these indices along AXES[name]."""
        start = getattr(self, name)
        for axis, i in zip(AXES[name], index, strict=False):
            start = start + self._f.value(i, "i64") * getattr(self, f"{name}_{axis}")
        return start  # type: ignore[no-any-return]
