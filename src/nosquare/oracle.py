"""Dense attention, row by row as the definition says: the only square in the house.

`attention` is the reference of every test, in float64 on the tensors exactly as stored, for all
rows or for a sample of them. `rows` is the same formula for a block of rows in plain
differentiable torch operations; it has derivatives of any order, and the higher derivatives of
the house are taken from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import score
from .axes import lay_out_bias, per_head
from .bound import Bound, Index, Rectangle, cut, per_key_head, positions
from .dropout import Dropout, keep_tile, realised_rate, row_keys
from .inputs import Inputs, Spec
from .mask import Full, Mask
from .problem import Problem
from .spelling import parse
from .state import State

BLOCK_ELEMENTS = 1 << 24  # scores held at once by `attention`, all heads together


class Fixed(NamedTuple):
    """What a block of rows needs besides the arrays that have derivatives.

    bound    the mask, bound to the problem
    alibi    slopes (B | 1, Hq, 1, 1) or None
    seed     0-d int64 on the device, or None
    """

    problem: Problem
    bound: Bound
    alibi: Tensor | None
    seed: Tensor | None

    @staticmethod
    def of(problem: Problem, x: Inputs) -> Fixed:
        """Bind the mask and lay out the slopes of a call that is not packed."""
        p = problem
        bound = Bound(parse(p.mask, x.arrays), p.batch, p.Hq, p.M, p.N, p.device)
        alibi = None if x.alibi is None else per_head(x.alibi, p.batch, p.Hq)
        seed = None if x.seed is None else x.seed.to(p.device)
        return Fixed(p, bound, alibi, seed)


def rows(
    fixed: Fixed,
    index: Index,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of some query rows over all keys, in the dtype of q.

    index  which queries: a slice or a 1-d tensor of m of them
    q (B, Hq, m, D)  k (B, Hk, N, D)  v (B, Hk, N, E)
    bias (B | 1, Hq | 1, m | 1, N | 1)  sinks (B | 1, Hq, 1, 1)
    returns o (B, Hq, m, E), lse (B, Hq, m)
    """
    p, bound = fixed.problem, fixed.bound
    every = Rectangle(slice(0, p.B), slice(0, p.Hq), index, slice(0, p.N))
    keep = bound.keep(every)
    # keys that no row sees and rows that see no key reach nothing: 0 * NaN is NaN, so their numbers
    # are replaced
    q = q.masked_fill(~keep.any(-1, keepdim=True), 0)
    unseen = ~per_key_head(keep, p.G).any(3).any(2)[..., None]
    k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    m = q.shape[-2]
    z = _fold(q, p) @ k.transpose(-1, -2) * p.scale
    s = z.reshape(p.B, p.Hq, m, p.N)
    if p.softcap is not None:
        s = p.softcap * torch.tanh(s / p.softcap)
    if fixed.alibi is not None:
        place = positions(index, p.device) + (p.N - p.M)
        s = s + score.alibi(fixed.alibi.to(s.dtype), place, torch.arange(p.N, device=p.device))
    if bias is not None:
        s = s + bias
    s = s.masked_fill(~keep, float("-inf"))
    top = s.detach().amax(-1, keepdim=True) if p.N else s.new_full((*s.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        top = torch.maximum(top, sinks.detach())
    top = top.masked_fill(torch.isneginf(top), 0)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    alive = total > 0
    safe = torch.where(alive, total, torch.ones_like(total))
    lse = torch.where(alive, top + safe.log(), torch.full_like(total, -torch.inf)).squeeze(-1)
    if fixed.seed is not None:
        e = e * _kept(fixed, index)
        safe = safe * (1 - realised_rate(p.p))
    o = _fold(e, p) @ v
    return o.reshape(p.B, p.Hq, m, p.E) / safe, lse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
    sample: Tensor | None = None,
) -> State:
    """Attention in float64, differentiable to any order, in blocks of rows.

    Arguments as in ns.attention, any float dtype; k and v may have any number of key heads that
    divides Hq. sample: 1-d tensor of the query rows wanted, all of them by default.
    returns State(o (..., Hq, M, E), lse (..., Hq, M)) in float64, of the sampled rows

    Raises ArgumentError as ns.attention does.
    """
    mask = mask or Full()
    seed = dropout.seed_tensor() if dropout else None
    x = Inputs(q, k, v, bias, sinks, alibi, seed, None, None, mask.tensors)
    rate = dropout.p if dropout else 0.0
    offsets = dropout.offsets if dropout else (0, 0, 0, 0)
    spec = Spec(str(mask), scale, softcap, rate, offsets)
    p = Problem.of(x, spec)
    fixed = Fixed.of(p, x)
    fq, fk, fv = (t.double().reshape(p.B, *t.shape[-3:]) for t in (q, k, v))
    wide = None if bias is None else lay_out_bias(bias, p.batch).double()
    sink = None if sinks is None else per_head(sinks, p.batch, p.Hq).double()
    wanted = torch.arange(p.M, device=q.device) if sample is None else sample
    step = max(BLOCK_ELEMENTS // max(p.B * p.Hq * p.N, 1), 1)
    outs = []
    for index in wanted.split(step) if wanted.numel() else [wanted]:
        block = Rectangle(slice(0, p.B), slice(0, p.Hq), index, slice(0, p.N))
        piece = None if wide is None else cut(wide, block)
        outs.append(rows(fixed, index, fq.index_select(2, index), fk, fv, piece, sink))
    o, lse = (torch.cat(list(part), 2) for part in zip(*outs, strict=True))
    return State(o.reshape(*p.batch, *o.shape[1:]), lse.reshape(*p.batch, *lse.shape[1:]))


def _fold(t: Tensor, p: Problem) -> Tensor:
    """(B, Hq, m, width) -> (B, Hk, G * m, width): the group becomes rows, k is not repeated."""
    return t.reshape(p.B, p.Hk, p.G * t.shape[-2], t.shape[-1])


def _kept(fixed: Fixed, index: Index) -> Tensor:
    """1 where dropout keeps the pair, else 0: (B, Hq, m, N) bool."""
    p, (ob, oh, oi, oj) = fixed.problem, fixed.problem.offsets
    assert fixed.seed is not None
    b = torch.arange(p.B, device=p.device)[:, None, None] + ob
    h = torch.arange(p.Hq, device=p.device)[:, None] + oh
    i = positions(index, p.device) + oi
    return keep_tile(row_keys(fixed.seed, b, h, i), oj, oj + p.N, p.p)
