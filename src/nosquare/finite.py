"""check_finite: is every number that attention would use finite?"""

from __future__ import annotations

import torch
from torch import Tensor

from .axes import lay_out_bias
from .bound import Bound, Rectangle, cut, per_key_head
from .errors import ArgumentError
from .inputs import Inputs, Spec
from .problem import Problem
from .spelling import parse

BLOCK_ELEMENTS = 1 << 22


@torch.no_grad()
def check_finite(x: Inputs, spec: Spec) -> None:
    """Raise ArgumentError naming the first position of q, k, v or bias that is not finite and is
    used.

    What no query of the call can see is not looked at, nor are queries that see no key; in a packed
    call, tokens beyond the last sequence are not.
    """
    p = Problem.of(x, spec)
    if p.packed:
        assert x.cu_q is not None and x.cu_k is not None
        _first(x.q[: int(x.cu_q[-1])], "q")
        for name, t in (("k", x.k), ("v", x.v)):
            _first(t[: int(x.cu_k[-1])], name)
        return
    rows, keys, bias = _used(p, x)
    for name, t, used in (("q", x.q, rows), ("k", x.k, keys), ("v", x.v, keys)):
        flat = t.reshape(p.B, *t.shape[-3:])
        _first(flat.masked_fill(~used[..., None], 0).reshape(t.shape), name)
    if bias is not None:
        where = dict(zip(("b", "h", "i", "j"), bias, strict=True))
        raise ArgumentError(
            "bias holds NaN or +inf at a visible pair.",
            {"first at": where},
            "-inf in bias hides a pair; NaN and +inf have no meaning.",
        )


def _used(p: Problem, x: Inputs) -> tuple[Tensor, Tensor, list[int] | None]:
    """Which rows see a key (B, Hq, M), which keys are seen (B, Hk, N), a bad place of bias."""
    bound = Bound(parse(p.mask, x.arrays), p.batch, p.Hq, p.M, p.N, p.device)
    rows = torch.zeros(p.B, p.Hq, p.M, dtype=torch.bool, device=p.device)
    keys = torch.zeros(p.B, p.Hk, p.N, dtype=torch.bool, device=p.device)
    wide = None if x.bias is None else lay_out_bias(x.bias, p.batch)
    step = max(BLOCK_ELEMENTS // max(p.B * p.Hq * p.N, 1), 1)
    for lo in range(0, p.M, step):
        i = slice(lo, min(lo + step, p.M))
        where = Rectangle(slice(0, p.B), slice(0, p.Hq), i, slice(0, p.N))
        keep = bound.keep(where)
        rows[:, :, i] = keep.any(3)
        keys |= per_key_head(keep, p.G).any(3).any(2)
        if wide is not None:
            part = cut(wide, where)
            bad = (torch.isnan(part) | torch.isposinf(part)) & keep
            if bool(bad.any()):
                b, h, r, j = bad.nonzero()[0].tolist()
                return rows, keys, [b, h, r + lo, j]
    return rows, keys, None


def _first(t: Tensor, name: str) -> None:
    bad = ~torch.isfinite(t)
    if bool(bad.any()):
        at = tuple(bad.nonzero()[0].tolist())
        raise ArgumentError(
            f"{name} is not finite.",
            {"first at": f"{name}[{', '.join(map(str, at))}] = {t[at].item()}"},
            "look at the layer that makes it; padding that no query sees may hold anything.",
        )
