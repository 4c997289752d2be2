"""dq: a program owns a tile of queries of a head and goes through the keys that they see.

    for every tile of keys that some of the queries see:
        s = q k^T       p = exp(s - lse)
        dp = do v^T     ds = p (dp - delta)     dq += ds k

So dq needs no atomics: a sum has one owner and one order. The second pass recomputes s and dp, two
of seven products. Whole tiles come first, without masks and bounds.
"""

import triton
import triton.language as tl

from .grad_tile import (
    across,
    head_facts,
    place,
    queries_at,
    row_facts,
    rows_at,
    slopes,
    uncapped,
    undropped,
    weights,
)
from .sight import some, told, visible


@triton.jit
def _keys(
    sums, q, do, rows, k, v, dbias_h, at, seen, extras,
    F: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
    BY_QUERY: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """One tile of keys added to sums = (dq, dbias).

    q (TILE_M, F.D_PAD), do (TILE_M, F.E_PAD)   rows: their facts   k, v: (pointer to key 0, n, d)
    at = (b, h, i, j0, hi, m, n): keys from hi on are seen by none of the rows
    seen: the visible pairs, where the caller has asked for them (F.mask.holes)
    """
    dq, dbias = sums
    b, h, i, j0, hi, m, n = at
    numbers, bias, alibi, drop, mask = extras
    ref, delta, share, k0, k1 = rows
    kind = q.dtype
    step = tl.arange(0, TILE_N)
    j = j0 + step
    d = tl.arange(0, F.D_PAD)
    e = tl.arange(0, F.E_PAD)
    col = step[:, None]
    k_at = (k[0] + j0 * k[1]) + (col * k[1] + across(d, k[2], F)[None, :])
    v_at = (v[0] + j0 * v[1]) + (col * v[1] + across(e, v[2], F)[None, :])
    k_tile = rows_at(k_at, (j < hi)[:, None], d, F.D, F.D_PAD, MASKED)
    v_tile = rows_at(v_at, (j < hi)[:, None], e, F.E, F.E_PAD, MASKED)
    j = j[None, :]
    raw = tl.dot(q, tl.trans(k_tile), input_precision=F.precision)
    p = weights(raw, ref[:, None], b, h, i, j, m, n, numbers, bias, alibi, F, MASKED)
    keep = j < hi
    if MASKED:
        keep = seen if F.mask.holes else F.mask.keep(mask, b, h, i, j, m, n) & (i < m) & (j < hi)
        p = tl.where(keep, p, 0.0)
        if not F.mask.tight:  # a key that none of these rows sees may hold NaN
            k_tile = tl.where(tl.max(keep.to(tl.int32), 0)[:, None] > 0, k_tile, 0.0)
    if EXACT:
        p = p * share[:, None]
    dp = tl.dot(do, tl.trans(v_tile), input_precision=F.precision)
    keys = (k0, k1)
    if F.dropout:
        keys = (k0[:, None], k1[:, None])
    _, ds = slopes(p, dp, delta[:, None], keys, keep, j0, numbers, drop, F, MASKED, TILE_N, False)
    if BY_QUERY:
        dbias += tl.sum(ds, 1)
    if OWN:
        to = (dbias_h[0] + j0) + (i * dbias_h[1] + step[None, :])
        own = (ds * undropped(numbers, F)).to(dbias_h[0].dtype.element_ty)
        if MASKED:
            tl.store(to, own, mask=(i < m) & (j < n))
        else:
            tl.store(to, own)
    ds = uncapped(ds, raw, keep, numbers, F, MASKED).to(kind)
    return tl.dot(ds, k_tile, dq, input_precision=F.precision), dbias


@triton.jit
def queries_kernel(
    q, k, v, do, facts, dq, dbias, sights, sizes, numbers, bias, sinks, alibi, drop, mask, cu,
    F: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr, BY_QUERY: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """dq (Hq, M, D) of every entry, written once, in its own dtype; dbias: (B, Hq, M) float32 sums
    of the gradient of a bias that does not vary along keys (BY_QUERY), or (B, Hq, M, N), that of a
    bias of which every pair has its own number: what no tile with a visible pair covers is left."""
    b, h, i0, m, n, q0, k0 = place(sizes, cu, False, TILE_M, F)
    if i0 >= m:
        return
    hk = h // sizes[3]
    d = tl.arange(0, F.D_PAD)
    e = tl.arange(0, F.E_PAD)
    i = i0 + tl.arange(0, TILE_M)
    i_hi = tl.minimum(i0 + TILE_M, m)
    lo, hi = F.mask.span(mask, i0, i_hi, m, n)
    here = (lo, hi, m, n)
    row = (q0 + i).to(tl.int64)[:, None]
    rows = row_facts(head_facts(facts, b, h, q0), i, m, True, F, EXACT)
    live = (rows[0] > float("-inf"))[:, None]
    q_tile, do_tile = queries_at(q, do, b, h, row, live, d, e, F)
    k_h = (k[0] + b * k[1] + hk * k[2] + k0 * k[3], k[3], k[4])
    v_h = (v[0] + b * v[1] + hk * v[2] + k0 * v[3], v[3], v[4])
    if F.mask.looks:
        first, last, whole, rest = told(sights, b, h, q0, i0, F, TILE_M)
        lo = first * TILE_N
        hi = tl.minimum(hi, last * TILE_N)
        full = whole * TILE_N
        end = tl.where(i0 + TILE_M <= m, rest, whole) * TILE_N
    else:
        lo = lo // TILE_N * TILE_N
        full = lo
        end = lo
        if F.mask.has_core and i0 + TILE_M <= m:
            first, last = F.mask.core(mask, i0, i_hi, m, n)
            full = tl.maximum(tl.cdiv(first, TILE_N) * TILE_N, lo)
            end = tl.maximum(tl.minimum(last, hi) // TILE_N * TILE_N, full)
    extras = (numbers, bias, alibi, drop, mask)
    dbias_h = (dbias[0] + b * dbias[1] + h * dbias[2], dbias[3])
    D_PAD: tl.constexpr = F.D_PAD
    sums = (tl.zeros([TILE_M, D_PAD], tl.float32), tl.zeros([TILE_M], tl.float32))
    for j0 in tl.range(full, end, TILE_N, num_stages=STAGES):
        sums = _keys(
            *(sums, q_tile, do_tile, rows, k_h, v_h, dbias_h, (b, h, i[:, None], j0, hi, m, n)),
            *(True, extras, F, TILE_N, False, EXACT, BY_QUERY, OWN),
        )
    for at in tl.range(lo, hi - (end - full), TILE_N, num_stages=STAGES):
        j0 = tl.where(at < full, at, at + (end - full))
        seen, work = True, True
        if F.mask.holes:  # others have no branch here: what it holds is not fetched ahead
            seen = visible(j0, i[:, None], b, h, here, mask, F, TILE_N, True)
            work = some(seen)
        if work:
            sums = _keys(
                *(sums, q_tile, do_tile, rows, k_h, v_h, dbias_h, (b, h, i[:, None], j0, hi, m, n)),
                *(seen, extras, F, TILE_N, True, EXACT, BY_QUERY, OWN),
            )
    dq_at = dq[0] + b * dq[1] + h * dq[2] + row * dq[3] + d[None, :]
    inside = (i < m)[:, None] & (d < F.D)[None, :]
    more = undropped(numbers, F)
    tl.store(dq_at, (sums[0] * (numbers[2] * more)).to(q_tile.dtype), mask=inside)
    if BY_QUERY:
        tl.store(dbias[0] + b * dbias[1] + h * dbias[2] + i, sums[1] * more, mask=i < m)
