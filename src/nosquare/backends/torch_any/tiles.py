"""Forward and backward in tiles of plain torch operations.

For a tile of queries, over its tiles of keys (online softmax: Milakov and Gimelshein 2018; tiles:
Rabe and Staats 2021, Dao et al. 2022):

    m' = max(m, rowmax s)     alpha = exp(m - m')     p = exp(s - m')
    l  = alpha l + rowsum p   u = alpha u + p v       o = u / l, lse = m + ln l

Backward recomputes p = exp(s - lse) tile by tile, with delta = rowsum(do * o) - dlse:

    dv += p^T do      dp = do v^T      ds = p * (dp - delta)
    dq += ds k        dk += ds^T q     dbias += ds

The group of query heads that shares a key head becomes rows, so k and v are read once a group.
Products and state are float32 (float64 for float64). m is in natural units here: a bias of
finfo.min must stay finite, and times log2(e) it would not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ... import score
from ...bound import Rectangle, cut
from ...dropout import keep_tile, realised_rate, row_keys
from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from ...state import finish
from .. import Grads
from . import side_by_side
from .layout import Work, bytes_of, gradients, heads_first, ieee_float32, outputs, pieces
from .tiling import Plan

MINUS_INF = float("-inf")
Group = tuple[slice, slice]  # batch entries, key heads
LARGE_LSE = 1024.0  # float32 keeps an lse of this size to 6e-5, and p is as exact as its lse


class Tile(NamedTuple):
    """One tile of queries, all of `where.b` and of the heads of `where.h`, against all keys.

    key_heads  the slice of key heads that where.h (query heads) belongs to
    q          (R, G * m, D) scaled, R = batch entries * key heads
    shape      (b, h, G, m): R = b * h
    drop       the two dropout keys of each row, (b, h * G, m), or None
    """

    where: Rectangle
    key_heads: slice
    q: Tensor
    shape: tuple[int, int, int, int]
    drop: tuple[Tensor, Tensor] | None


def forward(problem: Problem, plan: Plan, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o, lse and what ran. The plan is made anew for each packed sequence."""
    o, lse = outputs(problem)
    by_head, lse_rows = heads_first(problem, o), lse.unsqueeze(-1)
    workspace = 0
    copies: tuple[str, ...] = ()
    with ieee_float32(problem.device):
        for work in pieces(problem, plan, x):

            def one(group: Group, work: Work = work) -> int:
                (scratch,) = work.scratch(1)
                for tile in _query_tiles(work, group):
                    out, log = _forward_tile(work, tile, scratch)
                    work.rows(by_head, tile.where).copy_(out)
                    work.rows(lse_rows, tile.where).copy_(log)
                return bytes_of([scratch])

            widest, threads = side_by_side.run(one, _groups(work), work.plan.threads)
            workspace = max(workspace, threads * max(widest, default=0))
            copies = work.copies or copies
    return o, lse, Ran(("torch tiles",), workspace, copies)


def _forward_tile(work: Work, tile: Tile, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """o (b, h * G, m, E) and lse (b, h * G, m, 1) of a tile of queries."""
    b, h, g, m = tile.shape
    r = b * h
    u = tile.q.new_zeros(r, g * m, work.problem.E)
    if work.sinks is None:
        top = tile.q.new_full((r, g * m, 1), MINUS_INF)
        total = tile.q.new_zeros(r, g * m, 1)
    else:  # the sink is a key seen before all others, with value zero
        sink = cut(work.sinks, tile.where).expand(b, h * g, m, 1)
        top = sink.reshape(r, g * m, 1).to(tile.q.dtype)
        total = torch.ones_like(top)
    for j, keep in _key_tiles(work, tile):
        s, _ = _scores(work, tile, j, keep, scratch)
        v = _values(work, tile, j, keep)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        reference = new.masked_fill(new == MINUS_INF, 0)  # keeps -inf - -inf out
        s.sub_(reference).exp_()
        alpha = (top - reference).exp_()
        total.mul_(alpha).add_(s.sum(-1, keepdim=True))
        if tile.drop is not None:
            s.view(b, h * g, m, j.stop - j.start).mul_(_kept(work, tile, j))
        u.mul_(alpha).baddbmm_(s, v)
        top = new
    kept = 1 - realised_rate(work.problem.p)
    o, lse = finish(u, top, total, kept)
    return o.view(b, h * g, m, work.problem.E), lse.view(b, h * g, m, 1)


def backward(
    problem: Problem,
    plan: Plan,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v, bias, sinks (None where not wanted), and what ran."""
    grads = gradients(problem, x)
    workspace, widest = bytes_of(t for t in grads.sums[1:] if t is not None), 0
    copies: tuple[str, ...] = ()
    o, lse = saved
    do, dlse = cotangents
    facts = (
        heads_first(problem, o),
        lse.unsqueeze(-1),
        None if do is None else heads_first(problem, do),
        None if dlse is None else dlse.unsqueeze(-1),
    )
    with ieee_float32(problem.device):
        for work in pieces(problem, plan, x):
            sums = grads.of(work)

            def one(group: Group, work: Work = work, sums: list[Tensor | None] = sums) -> int:
                scratch = work.scratch(2)
                for tile in _query_tiles(work, group):
                    rows = _renormalised(work, tile, scratch[0], _row_facts(work, tile, *facts))
                    if problem.exact_delta:
                        rows = _with_exact_delta(work, tile, scratch, rows)
                    _backward_tile(work, tile, scratch, rows, sums)
                return bytes_of(scratch)

            found, threads = side_by_side.run(one, _groups(work), work.plan.threads)
            widest = max(widest, threads * max(found, default=0))
            copies = work.copies or copies
    return grads.finish(), Ran(("torch tiles backward",), workspace + widest, copies)


class _Rows(NamedTuple):
    """What backward knows of a tile's rows, each (R, G * m, width).

    share  1 / sum of exp(s - lse), where rounding may have made that sum other than 1; else None
    """

    do: Tensor
    lse: Tensor
    delta: Tensor
    share: Tensor | None = None


def _row_facts(
    work: Work, tile: Tile, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None
) -> _Rows:
    b, h, g, m = tile.shape
    dtype = tile.q.dtype

    def rows(t: Tensor) -> Tensor:
        return work.rows(t, tile.where).to(dtype).reshape(b * h, g * m, t.shape[-1])

    o, lse = rows(o), rows(lse)
    do = torch.zeros_like(o) if do is None else rows(do)
    # a row that sees nothing has o = 0, and its do may hold anything: 0 * NaN must not reach dsinks
    delta = (do * o).masked_fill_(o == 0, 0).sum(-1, keepdim=True)
    if work.problem.exact_delta:
        delta.zero_()  # its sum is still to come
    if dlse is not None:
        delta = delta - rows(dlse)
    return _Rows(do, lse.masked_fill(lse == MINUS_INF, 0), delta)


def _renormalised(work: Work, tile: Tile, scratch: Tensor, rows: _Rows) -> _Rows:
    """Rows whose lse is so large that its rounding is felt in p = exp(s - lse), with their share.

    A bias of finfo.min over a whole row leaves lse no digit of ln N: p would be N times too large.
    """
    if rows.lse.dtype == torch.float64 or not bool((rows.lse.abs() > LARGE_LSE).any()):
        return rows
    b, h, g, m = tile.shape
    total = torch.zeros_like(rows.lse)
    if work.sinks is not None:
        sink = cut(work.sinks, tile.where).expand(b, h * g, m, 1).reshape(total.shape)
        total += torch.exp(sink - rows.lse)
    for j, keep in _key_tiles(work, tile):
        s, _ = _scores(work, tile, j, keep, scratch)
        total += s.sub_(rows.lse).exp_().sum(-1, keepdim=True)
    return rows._replace(share=torch.where(total > 0, total, 1).reciprocal_())


def _with_exact_delta(work: Work, tile: Tile, scratch: list[Tensor], rows: _Rows) -> _Rows:
    """delta with the sum over keys of p dp, as which rowsum(do * o) would come without rounding."""
    b, h, g, m = tile.shape
    total = torch.zeros_like(rows.delta)
    for j, keep in _key_tiles(work, tile):
        s, _ = _scores(work, tile, j, keep, scratch[0])
        p = s.sub_(rows.lse).exp_()
        dp = scratch[1][: p.numel()].view_as(p)
        torch.bmm(rows.do, _values(work, tile, j, keep).transpose(1, 2), out=dp)
        if tile.drop is not None:
            dp.view(b, h * g, m, j.stop - j.start).mul_(_kept(work, tile, j))
        dp.mul_(p)
        if isinstance(keep, Tensor):  # dp of a hidden pair may be anything
            dp.view(b, h, g, m, -1).masked_fill_(~_grouped(keep, tile), 0)
        total += dp.sum(-1, keepdim=True)
    if tile.drop is not None:
        total /= 1 - realised_rate(work.problem.p)
    if rows.share is not None:
        total *= rows.share
    return rows._replace(delta=rows.delta + total)


def _backward_tile(
    work: Work, tile: Tile, scratch: list[Tensor], rows: _Rows, sums: list[Tensor | None]
) -> None:
    b, h, g, m = tile.shape
    r = b * h
    dq, dk, dv, dbias, dsinks = sums
    acc = torch.zeros_like(tile.q)
    # what dropout keeps is scaled up, in dp and in dv: once here, by way of do
    scaled_do = rows.do / (1 - realised_rate(work.problem.p)) if tile.drop else rows.do
    for j, keep in _key_tiles(work, tile):
        n = j.stop - j.start
        s, slope = _scores(work, tile, j, keep, scratch[0], slope=True)
        p = s.sub_(rows.lse).exp_()
        if rows.share is not None:
            p.mul_(rows.share)
        q, do = tile.q, scaled_do
        if isinstance(keep, Tensor):
            # rows that see nothing here may hold anything: 0 * NaN must not enter dk and dv
            blind = ~keep.any(-1, keepdim=True)
            blind = _grouped(blind, tile).expand(b, h, g, m, 1).reshape(r, g * m, 1)
            q, do = q.masked_fill(blind, 0), do.masked_fill(blind, 0)
        k, v = work.keys(tile, j), _values(work, tile, j, keep)
        dp = scratch[1][: p.numel()].view_as(p)
        torch.bmm(do, v.transpose(1, 2), out=dp)
        if tile.drop is not None:
            kept = _kept(work, tile, j)
            dp.view(b, h * g, m, n).mul_(kept)
        dp.sub_(rows.delta).mul_(p)  # ds, as yet without softcap's slope
        if isinstance(keep, Tensor):
            dp.view(b, h, g, m, n).masked_fill_(~_grouped(keep, tile), 0)
            k = k.masked_fill(_unseen(keep, tile), 0)
        if dv is not None:
            if tile.drop is not None:
                p.view(b, h * g, m, n).mul_(kept)
            _key_rows(dv, tile, j).baddbmm_(p.transpose(1, 2), do)
        if dbias is not None:
            part = _grouped(cut(dbias, tile.where._replace(j=j)), tile)
            part.add_(score.sum_to(dp.view(b, h, g, m, n), part.shape))
        if slope is not None:
            dp.mul_(slope)
        if dq is not None:
            acc.baddbmm_(dp, k)
        if dk is not None:
            _key_rows(dk, tile, j).baddbmm_(dp.transpose(1, 2), q)
    if dq is not None:
        out = acc.mul_(work.problem.scale).view(b, h * g, m, work.problem.D)
        work.rows(dq, tile.where).copy_(out)
    if dsinks is not None and work.sinks is not None:
        sink = cut(work.sinks, tile.where)
        weight = torch.exp(sink - rows.lse.view(b, h * g, m, 1))
        if rows.share is not None:
            weight = weight * rows.share.view(b, h * g, m, 1)
        part = cut(dsinks, tile.where)
        part.sub_(score.sum_to(weight * rows.delta.view(b, h * g, m, 1), part.shape))


def _groups(work: Work) -> list[Group]:
    """The batch entries and key heads that are worked on at a time."""
    p, plan = work.problem, work.plan
    return [
        (slice(b, min(b + plan.entries, p.B)), slice(h, min(h + plan.heads, p.Hk)))
        for b in range(0, p.B, plan.entries)
        for h in range(0, p.Hk, plan.heads)
    ]


def _query_tiles(work: Work, group: Group) -> Iterator[Tile]:
    """Every tile of queries of a group of heads, with its scaled q and its dropout keys."""
    p, plan = work.problem, work.plan
    b, key_heads = group
    h = slice(key_heads.start * p.G, key_heads.stop * p.G)
    for i0 in range(0, p.M, plan.tile_m):
        i = slice(i0, min(i0 + plan.tile_m, p.M))
        where = Rectangle(b, h, i, slice(0, p.N))
        shape = (b.stop - b.start, key_heads.stop - key_heads.start, p.G, i.stop - i0)
        q = work.rows(work.q, where).to(work.dtype) * p.scale
        q = q.reshape(shape[0] * shape[1], shape[2] * shape[3], p.D)
        yield Tile(where, key_heads, q, shape, _drop_keys(work, where))


def _key_tiles(work: Work, tile: Tile) -> Iterator[tuple[slice, Tensor | bool]]:
    """The tiles of keys that some query of the tile sees, and what of each is visible."""
    i = tile.where.i
    assert isinstance(i, slice)
    lo, hi = work.bound.span(i.start, i.stop)
    for j0 in range(lo, hi, work.plan.tile_n):
        j = slice(j0, min(j0 + work.plan.tile_n, hi))
        keep = work.bound.tile(tile.where._replace(j=j))
        if keep is not False:
            yield j, keep


def _scores(
    work: Work,
    tile: Tile,
    j: slice,
    keep: Tensor | bool,
    scratch: Tensor,
    slope: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Scores of a tile (R, G * m, n) in the scratch buffer, -inf where hidden; softcap's slope."""
    p = work.problem
    b, h, g, m = tile.shape
    n = j.stop - j.start
    s = scratch[: b * h * g * m * n].view(b * h, g * m, n)
    torch.bmm(tile.q, work.keys(tile, j).transpose(1, 2), out=s)
    steep = None
    if p.softcap is not None:
        score.cap_(s, p.softcap)
        steep = score.cap_slope(s, p.softcap) if slope else None
    where = tile.where._replace(j=j)
    if work.alibi is not None:
        assert isinstance(where.i, slice)
        place = torch.arange(where.i.start, where.i.stop, device=s.device) + (p.N - p.M)
        key = torch.arange(j.start, j.stop, device=s.device)
        s.view(b, h * g, m, n).add_(score.alibi(cut(work.alibi, where), place, key))
    if work.bias is not None:
        s.view(b, h, g, m, n).add_(_grouped(cut(work.bias, where), tile))
    if isinstance(keep, Tensor):
        s.view(b, h, g, m, n).masked_fill_(~_grouped(keep, tile), MINUS_INF)
        if steep is not None:  # a hidden key may hold NaN, and so may its slope
            steep.view(b, h, g, m, n).masked_fill_(~_grouped(keep, tile), 0)
    return s, steep


def _values(work: Work, tile: Tile, j: slice, keep: Tensor | bool) -> Tensor:
    """v of a tile of keys (R, n, E); keys that no row of it sees are 0, whatever they hold."""
    v = work.values(tile, j)
    return v.masked_fill(_unseen(keep, tile), 0) if isinstance(keep, Tensor) else v


def _unseen(keep: Tensor, tile: Tile) -> Tensor:
    """Which keys of a tile no row of it sees: bool (R | 1, n | 1, 1)."""
    seen = _grouped(keep, tile).any(3).any(2)  # (b | 1, h | 1, n | 1)
    if seen.shape[0] == seen.shape[1] == 1:
        return ~seen.reshape(1, -1, 1)
    return ~seen.expand(tile.shape[0], tile.shape[1], -1).reshape(-1, seen.shape[2], 1)


def _grouped(t: Tensor, tile: Tile) -> Tensor:
    """(b | 1, h * G | 1, ...) -> (b | 1, h | 1, G | 1, ...), a view."""
    if t.shape[1] == 1:
        return t.unsqueeze(2)
    return t.view(t.shape[0], tile.shape[1], tile.shape[2], *t.shape[2:])


def _key_rows(t: Tensor, tile: Tile, j: slice) -> Tensor:
    """The part of a (B, Hk, N, width) sum that a tile of keys owns, as (R, n, width): a view."""
    part = t[tile.where.b, tile.key_heads, j]
    return part.view(part.shape[0] * part.shape[1], *part.shape[2:])


def _drop_keys(work: Work, where: Rectangle) -> tuple[Tensor, Tensor] | None:
    if work.seed is None:
        return None
    ob, oh, oi, _ = work.offsets
    device = work.seed.device
    assert isinstance(where.i, slice)
    b = torch.arange(where.b.start + ob, where.b.stop + ob, device=device)[:, None, None]
    h = torch.arange(where.h.start + oh, where.h.stop + oh, device=device)[:, None]
    i = torch.arange(where.i.start + oi, where.i.stop + oi, device=device)
    return row_keys(work.seed, b, h, i)


def _kept(work: Work, tile: Tile, j: slice) -> Tensor:
    """Which pairs of a tile dropout keeps: bool (b, h * G, m, n)."""
    assert tile.drop is not None
    return keep_tile(tile.drop, j.start + work.offsets[3], j.stop + work.offsets[3], work.problem.p)
