"""Problem: one attention problem, frozen, checked once at the public edge.

It says everything a backend needs to decide and to plan: sizes, dtype, device, layout, features. It
holds no data, so equal problems share one decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .axes import broadcasts
from .bound import Bound
from .dropout import Dropout
from .errors import ArgumentError
from .mask import Mask, parse

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


@dataclass(frozen=True)
class Problem:
    """One attention problem.

    batch   leading axes; packed problems have (B,) sequences, with M and N the total lengths
    strides of q, k, v in elements
    scale   a number, never None
    bias, sinks, alibi   shape of the array, or None where absent
    grads   which of q, k, v, bias, sinks want a gradient: "qkvbs" or part of it; "" for inference

    p, offsets  of dropout
    aligned  q, k and v start at multiples of 16 bytes (looked at on CUDA only)
    """

    batch: Shape
    Hq: int
    Hk: int
    M: int
    N: int
    D: int
    E: int
    dtype: torch.dtype
    device: torch.device
    strides: tuple[Shape, Shape, Shape]
    scale: float
    mask: str = "full()"
    kinds: frozenset[str] = frozenset({"full"})
    softcap: float | None = None
    bias: Shape | None = None
    sinks: Shape | None = None
    alibi: Shape | None = None
    p: float = 0.0
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0)
    packed: bool = False
    grads: str = ""
    deterministic: bool = False
    batch_invariant: bool = False
    aligned: bool = True

    @property
    def B(self) -> int:
        """Batch entries: the product of the batch axes."""
        return math.prod(self.batch)

    @property
    def G(self) -> int:
        """Query heads that share one key head."""
        return self.Hq // self.Hk if self.Hk else 1

    @property
    def o_shape(self) -> Shape:
        """Shape of o."""
        if self.packed:
            return (self.M, self.Hq, self.E)
        return (*self.batch, self.Hq, self.M, self.E)

    @property
    def lse_shape(self) -> Shape:
        """Shape of lse: that of o without its last axis; packed, (Hq, M)."""
        return (self.Hq, self.M) if self.packed else self.o_shape[:-1]

    @property
    def lse_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def token_major(self) -> bool:
        """Whether q keeps the heads of a token together: (..., M, Hq, D) in memory. o then does too."""
        return self.strides[0][-3] < self.strides[0][-2]

    def empty_o(self) -> Tensor:
        """An empty o in the memory order that is promised: heads inside tokens where q has it so."""
        if self.packed or not self.token_major:
            return torch.empty(self.o_shape, dtype=self.dtype, device=self.device)
        order = (*self.batch, self.M, self.Hq, self.E)
        return torch.empty(order, dtype=self.dtype, device=self.device).transpose(-2, -3)

    def promised(self, o: Tensor) -> Tensor:
        """o in the promised memory order; a copy only where it has another."""
        if self.packed or not self.token_major:
            return o.contiguous()
        return o.transpose(-2, -3).contiguous().transpose(-2, -3)

    def describe(self) -> str:
        """One line in the letters of the documentation."""
        lead = f"{self.B} packed sequences" if self.packed else f"B={self.B}"
        extras = [
            f"{name}={value}"
            for name, value in (
                ("softcap", self.softcap),
                ("bias", self.bias),
                ("sinks", self.sinks),
                ("alibi", self.alibi),
                ("dropout", self.p or None),
            )
            if value is not None
        ]
        sizes = f"Hq={self.Hq} Hk={self.Hk} M={self.M} N={self.N} D={self.D} E={self.E}"
        dtype = str(self.dtype).removeprefix("torch.")
        want = f" gradients of {self.grads}" if self.grads else ""
        return " ".join([lead, sizes, dtype, str(self.device), f"mask {self.mask}", *extras]) + want

    @staticmethod
    def of(x: Inputs, spec: Spec, grads: str = "") -> Problem:
        """Check a call and describe it. Raises ArgumentError naming the tensors and values at fault."""
        _check_tensors(x)
        packed = x.cu_q is not None
        q, k, v = x.q, x.k, x.v
        if packed:
            batch: Shape = (_check_packed(x),)
            (m, hq, d), (n, hk), e = q.shape, k.shape[:2], v.shape[-1]
        else:
            batch = tuple(q.shape[:-3])
            hq, m, d = q.shape[-3:]
            hk, n = k.shape[-3:-1]
            e = v.shape[-1]
        _check_shapes(x, packed)
        _check_extras(x, spec, batch, hq, m, n)
        mask = parse(spec.mask, x.arrays)
        _check_mask(mask, batch, hq, m, n, packed, q.device)
        return Problem(
            batch=batch,
            Hq=hq,
            Hk=hk,
            M=m,
            N=n,
            D=d,
            E=e,
            dtype=q.dtype,
            device=q.device,
            strides=(tuple(q.stride()), tuple(k.stride()), tuple(v.stride())),
            scale=d**-0.5 if spec.scale is None else spec.scale,
            mask=spec.mask,
            kinds=frozenset(kinds_of(mask)),
            softcap=spec.softcap,
            bias=None if x.bias is None else tuple(x.bias.shape),
            sinks=None if x.sinks is None else tuple(x.sinks.shape),
            alibi=None if x.alibi is None else tuple(x.alibi.shape),
            p=spec.p,
            offsets=spec.offsets,
            packed=packed,
            grads=grads,
            deterministic=spec.deterministic,
            batch_invariant=spec.batch_invariant,
            aligned=not q.is_cuda or all(t.data_ptr() % 16 == 0 for t in (q, k, v)),
        )


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
    return {name: line(t, axes) for name, t, axes in zip("qkv", (x.q, x.k, x.v), order, strict=True)}


def _check_tensors(x: Inputs) -> None:
    for name, t in zip("qkv", (x.q, x.k, x.v), strict=True):
        if not isinstance(t, Tensor):
            raise ArgumentError(
                f"{name} is not a tensor.", {name: type(t).__name__}, f"torch.as_tensor({name})."
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
    rising = all(a <= b for a, b in zip(cu, cu[1:], strict=False))
    if not rising or cu[0] != 0 or cu[-1] > total:
        shown = cu if len(cu) <= 12 else [*cu[:6], "...", *cu[-5:]]
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
            _check_broadcast(name, t, (hq,) if x.cu_q is not None else (*batch, hq), where, x.q.device)
    if x.alibi is not None and x.alibi.requires_grad:
        raise ArgumentError(
            "The ALiBi slopes have no gradient here.",
            {"alibi": "requires_grad=True"},
            "alibi.detach(), or the same numbers as bias= which has a gradient.",
        )
    if spec.softcap is not None and not spec.softcap > 0:
        raise ArgumentError(
            "softcap must be positive.", {"softcap": spec.softcap}, "softcap=None for none."
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
            "Causal, Window, Prefix and Lengths work on each sequence; cu_q and cu_k separate them.",
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
