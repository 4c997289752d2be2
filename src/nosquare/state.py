"""The state of a row of attention, and its algebra.

Inside kernels and splits a row is (u, m, l): the un-normalised output sum_j exp(s_j - m) v_j, the
largest score m, and the sum l = sum_j exp(s_j - m). In public it is State(o, lse) with o = u / l
and lse = m + ln l, which says the same: u e^m = o e^lse and l e^m = e^lse. Merging is associative
and commutative, and State.empty_like is its unit, so any split of the keys gives one answer
(Milakov and Gimelshein 2018; Rabe and Staats 2021).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ArgumentError


@dataclass(frozen=True)
class State:
    """Attention over some of the keys.

    o    (..., Hq, M, E)  normalised over these keys; 0 in a row that has seen none
    lse  (..., Hq, M)     float32 (float64 for float64), natural logarithm; -inf in such a row
    """

    o: Tensor
    lse: Tensor

    @staticmethod
    def empty_like(state: State) -> State:
        """The state of having seen no key: the unit of merge."""
        return State(torch.zeros_like(state.o), torch.full_like(state.lse, float("-inf")))


def merge(a: State, b: State) -> State:
    """Attention over the keys of both, which must be disjoint; differentiable through all four.

    a, b     State with equal shapes; o may differ in dtype, the wider one is returned
    returns  State: lse = ln(e^lse_a + e^lse_b), o weighted by e^(lse_a - lse) and e^(lse_b - lse)

    Raises ArgumentError when the shapes differ.
    """
    if a.o.shape != b.o.shape or a.lse.shape != b.lse.shape:
        raise ArgumentError(
            "Two states can be merged only when their shapes agree.",
            {
                "a": f"o {tuple(a.o.shape)}  lse {tuple(a.lse.shape)}",
                "b": f"o {tuple(b.o.shape)}  lse {tuple(b.lse.shape)}",
            },
            "compute both states from the same queries, over different keys.",
        )
    top = torch.maximum(a.lse, b.lse)
    # a row neither has seen stays (0, -inf); the reference 0 keeps -inf - -inf out of the sum
    # and out of its derivative
    reference = torch.where(torch.isneginf(top), torch.zeros_like(top), top).detach()
    wa, wb = torch.exp(a.lse - reference), torch.exp(b.lse - reference)
    total = wa + wb
    seen = total > 0
    safe = torch.where(seen, total, torch.ones_like(total))
    lse = torch.where(seen, reference + safe.log(), torch.full_like(total, float("-inf")))
    dtype = torch.promote_types(a.o.dtype, b.o.dtype)
    share = (wa / safe).unsqueeze(-1), (wb / safe).unsqueeze(-1)
    o = share[0] * a.o.to(share[0].dtype) + share[1] * b.o.to(share[1].dtype)
    return State(o.to(dtype), lse)


def finish(u: Tensor, m: Tensor, total: Tensor, kept: float = 1.0) -> tuple[Tensor, Tensor]:
    """(u, m, l) -> (o, lse). `kept` = 1 - dropout rate: it scales o, while lse stays undropped.

    u (..., E), m (..., 1), total = l (..., 1); a row with l = 0 becomes (0, -inf)
    """
    o = u / torch.where(total > 0, total * kept, torch.ones_like(total))
    return o, (m + total.log()).squeeze(-1)
