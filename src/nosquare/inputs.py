"""One call as the user made it: its tensors, its words, and the checks that both go together."""

from __future__ import annotations

import math
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .axes import broadcasts
from .bound import Bound
from .dropout import Dropout
from .errors import ArgumentError
from .mask import Mask
from .spelling import parse

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Shape = tuple[int, ...]


class Inputs(NamedTuple):
    """The tensors of one call, as the user gave them; what is absent is None.

    q (..., Hq, M, D)  k (..., Hk, N, D)  v (..., Hk, N, E); packed: (total, H, width) each
    bias  (..., Hq, M, N), every axis broadcasts      sinks (..., Hq)      alibi (..., Hq) slopes
    seed  0-d int64      cu_q, cu_k (B + 1,) int      arrays  what the mask refers to
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    seed: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    arrays: tuple[Tensor, ...] = ()


class Spec(NamedTuple):
    """All of one call that is not a tensor. Hashable: it is part of the key of a warm call."""

    mask: str = "full()"
    scale: float | None = None
    softcap: float | None = None
    p: float = 0.0
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0)
    backend: str | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    exact_delta: bool = False


def check(x: Inputs, spec: Spec) -> tuple[Shape, Mask]:
    """Check a call; return its batch axes (packed: the number of sequences) and its mask.

    Raises ArgumentError naming the tensors and the values at fault.
    """
    _check_tensors(x)
    packed = x.cu_q is not None
    sequences = _check_packed(x) if packed else 0
    _check_shapes(x, packed)
    if packed:
        batch: Shape = (sequences,)
        m, hq, n = x.q.shape[0], x.q.shape[1], x.k.shape[0]
    else:
        batch = tuple(x.q.shape[:-3])
        hq, m, n = x.q.shape[-3], x.q.shape[-2], x.k.shape[-2]
    _check_extras(x, spec, batch, hq, m, n)
    mask = parse(spec.mask, x.arrays)
    _check_mask(mask, batch, hq, m, n, packed, x.q.device)
    return batch, mask


def line(x: Tensor, axes: str) -> str:
    """A tensor in the documentation's letters: `B=2 Hq=16 M=4096 D=128  bfloat16 cuda:0`."""
    names = axes.split()
    lead = [str(n) for n in x.shape[: max(x.dim() - len(names), 0)]]
    tail = [f"{a}={n}" for a, n in zip(names, x.shape[-len(names) :], strict=False)]
    head = [f"batch=({', '.join(lead)})"] if lead else []
    return f"{' '.join(head + tail)}  {str(x.dtype).removeprefix('torch.')} {x.device}"


def lines(x: Inputs) -> dict[str, object]:
    """q, k and v for an error message."""
    order = ("M Hq D", "N Hk D", "N Hk E") if x.cu_q is not None else ("Hq M D", "Hk N D", "Hk N E")
    return {
        name: line(t, axes) for name, t, axes in zip("qkv", (x.q, x.k, x.v), order, strict=True)
    }


def check_types(x: Inputs) -> None:
    """Raise ArgumentError when something that must be a tensor is none."""
    given: tuple[Any, ...] = x[:9]  # of any type, as yet
    for i, t in enumerate(given):  # what is absent costs the least: every call passes here
        if (t is not None or i < 3) and not isinstance(t, Tensor):
            name = Inputs._fields[i]
            raise ArgumentError(
                f"{name} is not a tensor.", {name: type(t).__name__}, f"torch.as_tensor({name})."
            )


def _check_tensors(x: Inputs) -> None:
    check_types(x)
    if x.cu_q is None and min(t.dim() for t in x[:3]) < 3:
        raise ArgumentError(
            "q, k and v have at least three axes: (..., heads, length, width).",
            {name: tuple(t.shape) for name, t in zip("qkv", x[:3], strict=True)},
            "q[None] for a single head.",
        )
    if not x.q.dtype == x.k.dtype == x.v.dtype:
        raise ArgumentError(
            "q, k and v must share one dtype.", lines(x), "cast them, for example k.to(q.dtype)."
        )
    if x.q.dtype not in DTYPES:
        raise ArgumentError(
            "Attention is computed in float64, float32, bfloat16 or float16.",
            lines(x),
            "q.float(), k.float(), v.float().",
        )
    if not x.q.device == x.k.device == x.v.device:
        raise ArgumentError(
            "q, k and v must be on one device.", lines(x), "k.to(q.device), v.to(q.device)."
        )


def _check_shapes(x: Inputs, packed: bool) -> None:
    q, k, v = x.q, x.k, x.v
    heads = 1 if packed else -3
    if q.shape[-1] != k.shape[-1]:
        raise ArgumentError(
            "q and k disagree on D, the width of a head.",
            lines(x),
            "look at the projection that makes k; D is the last axis of both.",
        )
    if q.shape[-1] == 0:
        raise ArgumentError("q and k have width D = 0.", lines(x), "a width of at least 1.")
    if k.shape[:-1] != v.shape[:-1]:
        raise ArgumentError(
            "k and v disagree on their heads or on N, the number of keys.",
            lines(x),
            "one value vector for each key: v has k's shape but for the last axis.",
        )
    if not packed and q.shape[:-3] != k.shape[:-3]:
        raise ArgumentError(
            "q and k disagree on the batch axes.", lines(x), "expand the smaller one to the other."
        )
    hq, hk = q.shape[heads], k.shape[heads]
    if hq != hk and (hk == 0 or hq % hk):
        raise ArgumentError(
            "The query heads must be a whole multiple of the key heads.",
            lines(x),
            "query head h reads key head h // G with G = Hq / Hk; check the axis order "
            f"({'total, head, width' if packed else 'batch, head, length, width'}).",
        )


def _check_packed(x: Inputs) -> int:
    """Check the packed form, return the number of sequences."""
    if x.cu_k is None or x.cu_q is None:
        raise ArgumentError("A packed call needs cu_q and cu_k.", {}, "give both.")
    if any(t.dim() != 3 for t in (x.q, x.k, x.v)):
        raise ArgumentError(
            "Packed q, k and v have three axes: (total, heads, width).",
            {n: tuple(t.shape) for n, t in zip("qkv", (x.q, x.k, x.v), strict=True)},
            "x.flatten(0, 1) for a padded (batch, length, heads, width) array.",
        )
    for name, cu in (("cu_q", x.cu_q), ("cu_k", x.cu_k)):
        if cu.dim() != 1 or cu.numel() < 1 or cu.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(
                f"{name} must be a 1-d int32 or int64 tensor of B + 1 offsets.",
                {name: f"{tuple(cu.shape)} {cu.dtype}"},
                "torch.tensor([0, 5, 9], dtype=torch.int32) for two sequences of 5 and 4 tokens.",
            )
    if x.cu_q.numel() != x.cu_k.numel():
        raise ArgumentError(
            "cu_q and cu_k disagree on the number of sequences.",
            {"cu_q": f"{x.cu_q.numel() - 1} sequences", "cu_k": f"{x.cu_k.numel() - 1} sequences"},
            "one entry more than sequences in both.",
        )
    return x.cu_q.numel() - 1


def check_offsets(name: str, cu: list[int], total: int) -> None:
    """Check the values of cu_q or cu_k, which needs the data. Raises ArgumentError."""
    rising = all(a <= b for a, b in pairwise(cu))
    if not rising or cu[0] != 0 or cu[-1] > total:
        few = cu if len(cu) <= 12 else [*cu[:6], "...", *cu[-5:]]
        shown = f"[{', '.join(map(str, few))}]"
        raise ArgumentError(
            f"{name} must rise from 0 to at most the number of tokens.",
            {name: shown, "tokens": total},
            "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).",
        )


def _check_extras(x: Inputs, spec: Spec, batch: Shape, hq: int, m: int, n: int) -> None:
    where = {"batch": batch, "Hq": hq, "M": m, "N": n}
    if x.bias is not None:
        if x.cu_q is not None:
            raise ArgumentError(
                "A packed call takes no bias: its rows and keys have no common axes.",
                {"bias": tuple(x.bias.shape)},
                "attention on a padded batch with ns.Lengths, or alibi=.",
            )
        if not x.bias.is_floating_point():
            raise ArgumentError(
                "bias holds numbers that are added to the scores.",
                {"bias": f"{tuple(x.bias.shape)} {x.bias.dtype}"},
                "mask=ns.Dense(keep) for a bool tensor.",
            )
        _check_broadcast("bias", x.bias, (*batch, hq, m, n), where, x.q.device)
    for name, t in (("sinks", x.sinks), ("alibi", x.alibi)):
        if t is not None:
            if t.is_complex():
                raise ArgumentError(f"{name} must be real.", {name: t.dtype}, f"{name}.real.")
            _check_broadcast(
                name, t, (hq,) if x.cu_q is not None else (*batch, hq), where, x.q.device
            )
    if x.alibi is not None and x.alibi.requires_grad:
        raise ArgumentError(
            "The ALiBi slopes have no gradient here.",
            {"alibi": "requires_grad=True"},
            "alibi.detach(), or the same numbers as bias= which has a gradient.",
        )
    for name, number in (("scale", spec.scale), ("softcap", spec.softcap)):
        if number is not None and not isinstance(number, float | Real):
            # a tensor, above all: it would have no gradient
            raise ArgumentError(
                f"{name} is one number for the whole call, without a gradient.",
                {name: type(number).__name__},
                "float(...), or multiply q by a learned scale: it has a gradient there.",
            )
    if spec.softcap is not None and not 0 < spec.softcap < math.inf:
        raise ArgumentError(
            "softcap must be positive and finite.",
            {"softcap": spec.softcap},
            "softcap=None for none.",
        )
    if spec.scale is not None and not math.isfinite(spec.scale):
        raise ArgumentError(
            "scale must be a finite number.", {"scale": spec.scale}, "scale=None for 1 / sqrt(D)."
        )
    if (x.seed is None) != (spec.p == 0.0):
        Dropout(spec.p, 0 if x.seed is None else x.seed)
        if x.seed is None:
            raise ArgumentError("Dropout needs a seed.", {"p": spec.p}, "ns.Dropout(p, seed=7).")


def _check_broadcast(
    name: str, t: Tensor, full: Shape, where: dict[str, object], device: torch.device
) -> None:
    if not broadcasts(tuple(t.shape), full):
        raise ArgumentError(
            f"{name} does not broadcast to the problem.",
            {name: tuple(t.shape), "needed": full, **where},
            f"axes of {name} are the last ones of (batch, Hq, M, N); size 1 broadcasts.",
        )
    if t.device != device:
        raise ArgumentError(
            f"{name} and q must be on one device.",
            {name: t.device, "q": device},
            f"{name}.to(q.device).",
        )


def _check_mask(
    mask: Mask, batch: Shape, hq: int, m: int, n: int, packed: bool, device: torch.device
) -> None:
    if packed and (bad := {"documents", "dense", "blocksparse"} & kinds_of(mask)):
        raise ArgumentError(
            "A packed call has no common query and key axes for this mask.",
            {"mask": mask, "not for packed calls": ", ".join(sorted(bad))},
            "Causal, Window, Prefix and Lengths, which work on each sequence by itself.",
        )
    for array in mask.tensors:
        if array.device != device:
            raise ArgumentError(
                "The mask's arrays and q must be on one device.",
                {"mask": mask, "its array": array.device, "q": device},
                "move the array before building the mask.",
            )
    if packed:
        for leaf in mask.leaves:
            for array in leaf.tensors:
                if not broadcasts(tuple(array.shape), batch):
                    raise ArgumentError(
                        "Lengths in a packed call has one number a sequence.",
                        {"n_keys": tuple(array.shape), "sequences": batch[0]},
                        "leave it out: cu_k already says how long each sequence is.",
                    )
    else:
        Bound(mask, batch, hq, m, n, device)  # raises where an array does not fit


def kinds_of(mask: Mask) -> set[str]:
    """The names of the kinds in a mask."""
    return {type(leaf).__name__.lower() for leaf in mask.leaves}
