"""What is right, and how far from it an answer may be.

The truth is the definition in float64, dense, written here once more and without nosquare's own
pieces: nosquare is judged by it too. The room that rounding gets is measured, not typed:

    3 * (error of the same dense formula in the dtype under test)
    + (4 u + (sqrt(n) + 4 S) u_sum) * reach

The first term is how far an ordinary evaluation is off; flash_attn's own tests allow 2 times that
forward and 3 times backward. The second is what remains where the formula happens to be exact: at
most four roundings to the dtype (unit roundoff u, or 2^-20, what the shortest exponential in use
keeps), a running sum of n terms and scores up to S, both in the accumulation type (u_sum = 2^-24),
relative to reach, the largest sum of the absolute values of the terms that an element is made of:
P |v| for o, P^T |do| for dv, and with A = P (|do| |v|^T + rowsum(|do| P |v|)), scale A |k| for dq.
In float64 the formula is evaluated in float32, its error is scaled by 2^-29, u = u_sum = 2^-53.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ALLOWED, ROUNDINGS = 3, 4
EXP_ERROR = 2.0**-20
FLOAT32_TO_64 = 2.0**-29
# Kernels for 16-bit types may shorten the exponential to what their weights can hold: torch's own
# for CPUs keeps 2^-14 (docs/log.md).
LSE_EXP_ERROR_16 = 2.0**-13


Triple = tuple[Tensor, Tensor, Tensor]  # q, k, v


def cast(x: Sequence[Tensor], dtype: torch.dtype) -> Triple:
    """q, k, v in another dtype, without history."""
    q, k, v = (t.detach().to(dtype) for t in x[:3])
    return q, k, v


class Options(NamedTuple):
    """What a dense evaluation needs besides q, k, v.

    keep    bool, broadcasts to (..., M, N); None: every pair
    bias    added to the scores; None: nothing
    factor  multiplies the weights (dropout: keep / (1 - p)); None: nothing
    """

    keep: Tensor | None = None
    bias: Tensor | None = None
    scale: float | None = None
    factor: Tensor | None = None


NOTHING = Options()


class Dense(NamedTuple):
    """o (..., Hq, M, E), lse (..., Hq, M), p (..., Hq, M, N) the weights that met v, and size, the
    largest |score| that counts."""

    o: Tensor
    lse: Tensor
    p: Tensor
    size: float


def dense(q: Tensor, k: Tensor, v: Tensor, options: Options = NOTHING) -> Dense:
    """Attention by its definition, in the dtype of q; o = 0 in rows that see no key."""
    keep, bias, scale, factor = options
    k, v = _spread(k, q), _spread(v, q)
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        s = s + bias.to(s.dtype)
    if keep is not None:
        s = s.masked_fill(~keep, -torch.inf)
    shape = (*s.shape[:-1], 1)
    top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full(shape, -torch.inf)
    top = top.masked_fill(top.isneginf(), 0)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    p = e / torch.where(total > 0, total, torch.ones_like(total))
    p = p if factor is None else p * factor.to(p.dtype)
    counted = s.detach()[s.detach().isfinite()].abs()
    size = float(counted.max()) if counted.numel() else 0.0
    return Dense(p @ v, (top + total.log()).squeeze(-1), p.detach(), size)


@dataclass(frozen=True)
class Gap:
    """How far one array is from the truth. NaN: it holds a NaN where the truth does not."""

    name: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= self.bound

    @property
    def nearness(self) -> float:
        """error / bound; infinite for NaN."""
        if self.error != self.error:
            return float("inf")
        if not self.bound:
            return float("inf") if self.error else 0.0
        ratio: float = self.error / self.bound
        return ratio

    def __str__(self) -> str:
        if self.error != self.error:
            return f"{self.name} holds NaN"
        return f"{self.name} is off by {self.error:.1e}, bound {self.bound:.1e}"


def yard_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the formula shows how far an ordinary evaluation is off."""
    return torch.float32 if dtype == torch.float64 else dtype


def room(dtype: torch.dtype, yardstick: float, n: int, size: float, reach: float) -> float:
    """The bound of the module's docstring."""
    if dtype == torch.float64:
        yardstick, u, u_sum = yardstick * FLOAT32_TO_64, 2.0**-53, 2.0**-53
    else:
        u, u_sum = max(EXP_ERROR, torch.finfo(dtype).eps / 2), 2.0**-24
    if not yardstick < float("inf"):  # the 16-bit formula overflowed where a kernel must not
        yardstick = 0.0
    return ALLOWED * yardstick + (ROUNDINGS * u + (math.sqrt(n) + 4 * size) * u_sum) * reach


def largest(t: Tensor) -> float:
    """max |t|; 0 for an empty tensor, NaN where it holds one."""
    return float(t.detach().double().abs().max()) if t.numel() else 0.0


def off(got: Tensor, right: Tensor) -> float:
    """max |got - right|; NaN where either holds one, infinite where shapes differ."""
    if got.shape != right.shape:
        return float("inf")
    return largest(got.detach().double() - right.detach().double())


def gap_of_o(got: Tensor, x: Sequence[Tensor], options: Options, dtype: torch.dtype) -> Gap:
    """An output against the truth about q, k, v = x."""
    right, plain = (dense(*cast(x, kind), options) for kind in (torch.float64, yard_dtype(dtype)))
    n = max(x[0].shape[-2], x[1].shape[-2])
    reach = largest(right.p @ _spread(x[2].double(), right.p).abs())
    bound = room(dtype, off(plain.o, right.o), n, right.size, reach)
    if got.shape != right.o.shape:
        return Gap(f"o has shape {tuple(got.shape)}, not {tuple(right.o.shape)}: it", torch.inf, 0)
    return Gap("o", off(got, right.o), bound)


def gap_of_lse(got: Tensor, x: Sequence[Tensor], options: Options, dtype: torch.dtype) -> Gap:
    """An lse against the truth about q, k, v = x; rows that see nothing are left out."""
    right = dense(*cast(x, torch.float64), options)
    live = right.lse.isfinite()
    if got.shape != right.lse.shape:
        return Gap(f"lse has shape {tuple(got.shape)}, not {tuple(right.lse.shape)}: it",
                   torch.inf, 0)  # fmt: skip
    n, reach = x[1].shape[-2], max(1.0, largest(right.lse[live]))
    bound = room(torch.float32, 0.0, n, right.size, reach)
    bound += LSE_EXP_ERROR_16 if torch.finfo(dtype).bits == 16 else 0.0
    return Gap("lse", off(got[live], right.lse[live]), bound)


def gaps_of_gradients(
    got: Sequence[Tensor], x: Sequence[Tensor], do: Tensor, options: Options, dtype: torch.dtype
) -> list[Gap]:
    """Gradients of q, k, v (and of bias, where x has a fourth) against the truth."""
    found, size = [], 0.0
    reaches: dict[str, float] = {}
    for kind in (torch.float64, yard_dtype(dtype)):
        leaves = [t.detach().to(kind).requires_grad_() for t in x]
        own = options._replace(bias=leaves[3]) if len(leaves) > 3 else options
        answer = dense(leaves[0], leaves[1], leaves[2], own)
        size = max(size, answer.size if kind == torch.float64 else 0.0)
        found.append(torch.autograd.grad(answer.o, leaves, do.detach().to(kind)))
        reaches = reaches or _reaches(answer.p, leaves, do.detach().double(), options.scale)
    n = x[0].shape[-2] + x[1].shape[-2]
    gaps = []
    for name, mine, right, plain in zip(reaches, got, *found, strict=False):
        bound = room(dtype, off(plain, right), n, size, reaches[name])
        gaps.append(Gap(name, off(mine, right), bound))
    return gaps


def _reaches(p: Tensor, x: Sequence[Tensor], do: Tensor, scale: float | None) -> dict[str, float]:
    """The reach of each gradient: see the module's docstring. All in float64."""
    q, k, v = (_spread(t.detach(), p).abs() for t in x[:3])
    do = do.abs()
    a = p * (do @ v.mT + (do * (p @ v)).sum(-1, keepdim=True))
    factor = abs(q.shape[-1] ** -0.5 if scale is None else scale)
    group = q.shape[-3] // max(x[1].shape[-3], 1) if q.dim() > 2 else 1
    return {
        "dq": factor * largest(a @ k),
        "dk": factor * largest(a.mT @ q) * group,
        "dv": largest(p.mT @ do) * group,
        "dbias": largest(a) * a.shape[-1],  # what a broadcast axis sums
    }


def _spread(t: Tensor, like: Tensor) -> Tensor:
    """Key heads repeated as often as `like`, which has the query heads, needs them."""
    if t.dim() < 3 or t.shape[-3] in (0, like.shape[-3]):
        return t
    return t.repeat_interleave(like.shape[-3] // t.shape[-3], -3)
