"""dk and dv: a program owns a tile of keys of a key head and goes through the queries that see it,
of all heads of the group.

    for every head of the group, for every tile of queries that sees some of the keys:
        s = k q^T       p = exp(s - lse)       dv += p do
        dp = v do^T     ds = p (dp - delta)    dk += ds q       [dq += ds^T k, by atomics]

Tiles are turned (keys down, queries across), so that p and ds go from the registers where they
arise into the next product. The sum over the group stays in registers: no atomics, no copies of k
and v. Whole tiles, which nothing hides a pair of, come first, without masks and bounds.
"""

import triton
import triton.language as tl

from .drops import down
from .grad_tile import (
    across,
    head_facts,
    place,
    row_facts,
    rows_at,
    slopes,
    tiles_seeing,
    uncapped,
    undropped,
    weights,
)
from .sight import some, told, visible


@triton.jit
def _queries(
    sums, k, v, q, do, dq, facts, at, seen, extras,
    F: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
    EXACT: tl.constexpr, ADD: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """One tile of queries added to sums = (dk, dv, dbias).

    k (TILE_N, D_PAD), v (TILE_N, E_PAD)   q, do, dq: (pointer to row 0 of the head, stride of m, d)
    at = (b, h, i0, j0, m, n)              extras = (numbers, bias, alibi, drop, mask)
    seen: the visible pairs, where the caller has asked for them (F.mask.by_head)
    """
    dk, dv, dbias = sums
    b, h, i0, j0, m, n = at
    numbers, bias, alibi, drop, mask = extras
    kind = k.dtype
    step = down(F, TILE_N)[:, None]
    j = j0 + step
    i = i0 + tl.arange(0, TILE_M)
    ref, delta, share, k0, k1 = row_facts(facts, i, m, MASKED, F, EXACT)
    d = tl.arange(0, F.D_PAD)
    e = tl.arange(0, F.E_PAD)
    row = tl.arange(0, TILE_M)[:, None]
    q_at = (q[0] + i0 * q[1]) + (row * q[1] + across(d, q[2], F)[None, :])
    do_at = (do[0] + i0 * do[1]) + (row * do[1] + e[None, :])
    # rows that see no key may hold NaN: they are not read at all
    live = (ref > float("-inf"))[:, None]
    rows_q = rows_at(q_at, live, d, F.D, F.D_PAD, MASKED)
    rows_do = rows_at(do_at, live, e, F.E, F.E_PAD, MASKED)
    i = i[None, :]
    raw = tl.dot(k, tl.trans(rows_q), input_precision=F.precision)
    p = weights(raw, ref[None, :], b, h, i, j, m, n, numbers, bias, alibi, F, MASKED)
    keep = i < m
    if MASKED:
        keep = seen if F.mask.by_head else F.mask.keep(mask, b, h, i, j, m, n) & (i < m) & (j < n)
        p = tl.where(keep, p, 0.0)
    if EXACT:
        p = p * share[None, :]
    dp = tl.dot(v, tl.trans(rows_do), input_precision=F.precision)
    keys = (k0, k1)
    if F.dropout:
        keys = (k0[None, :], k1[None, :])
    dropped, ds = slopes(
        *(p, dp, delta[None, :], keys, keep, j0, numbers, drop, F, MASKED, TILE_N, True)
    )
    dv = tl.dot(dropped.to(kind), rows_do, dv, input_precision=F.precision)
    if BY_KEY:
        dbias += tl.sum(ds, 1)
    ds = uncapped(ds, raw, keep, numbers, F, MASKED).to(kind)
    dk = tl.dot(ds, rows_q, dk, input_precision=F.precision)
    if ADD:
        if MASKED and not F.mask.tight:  # a key that none of these rows sees may hold NaN
            k = tl.where(tl.max(keep.to(tl.int32), 1)[:, None] > 0, k, 0.0)
        part = tl.dot(tl.trans(ds), k, input_precision=F.precision)
        inside = (d < F.D)[None, :]
        if MASKED:
            inside = inside & live
        to = (dq[0] + i0 * dq[1]) + (row * dq[1] + d[None, :])
        tl.atomic_add(to, part * undropped(numbers, F), mask=inside, sem="relaxed")
    return dk, dv, dbias


@triton.jit
def keys_kernel(
    q, k, v, do, facts, dk, dv, dq, dbias, sights, sizes, numbers, bias, sinks, alibi, drop,
    mask, cu,
    F: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, STAGES: tl.constexpr,
    AT_ONCE: tl.constexpr, EXACT: tl.constexpr, ADD: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """dk (Hk, N, D) and dv (Hk, N, E) of every entry, each written once, in their own dtype.

    facts   see grad_facts.py        dq     float32 sums (ADD)
    sights  see sight.py             dbias  (B, Hq, N) float32 sums (BY_KEY)
    """
    b, hk, j0, m, n, q0, k0 = place(sizes, cu, True, TILE_N, F)
    if j0 >= n:
        return
    d = tl.arange(0, F.D_PAD)
    e = tl.arange(0, F.E_PAD)
    j = j0 + down(F, TILE_N)
    col = (k0 + j).to(tl.int64)[:, None]
    there = (j < n)[:, None]
    k_at = k[0] + b * k[1] + hk * k[2] + col * k[3] + across(d, k[4], F)[None, :]
    v_at = v[0] + b * v[1] + hk * v[2] + col * v[3] + across(e, v[4], F)[None, :]
    k_tile = rows_at(k_at, there, d, F.D, F.D_PAD, True)
    v_tile = rows_at(v_at, there, e, F.E, F.E_PAD, True)
    D_PAD: tl.constexpr = F.D_PAD
    E_PAD: tl.constexpr = F.E_PAD
    sums = (
        tl.zeros([TILE_N, D_PAD], tl.float32),
        tl.zeros([TILE_N, E_PAD], tl.float32),
        tl.zeros([TILE_N], tl.float32),
    )
    j_hi = tl.minimum(j0 + TILE_N, n)
    here = (j0, n, m, n)
    if F.mask.looks:
        first, last, full, end = told(sights, b, hk * sizes[3], k0, j0, F, TILE_N)
    else:
        first, last, full, end = tiles_seeing(mask, j0, j_hi, m, n, F, TILE_M, AT_ONCE)
        if j0 + TILE_N > n:  # the last keys are fewer than a tile
            full = first
            end = first
    extras = (numbers, bias, alibi, drop, mask)
    for g in range(0, sizes[3]):
        h = hk * sizes[3] + g
        q_h = (q[0] + b * q[1] + h * q[2] + q0 * q[3], q[3], q[4])
        do_h = (do[0] + b * do[1] + h * do[2] + q0 * do[3], do[3])
        dq_h = do_h
        if ADD:
            dq_h = (dq[0] + b * dq[1] + h * dq[2] + q0 * dq[3], dq[3])
        facts_h = head_facts(facts, b, h, q0)
        if F.mask.along_h:
            first, last, full, end = told(sights, b, h, k0, j0, F, TILE_N)
        if F.mask.has_core or F.mask.looks:
            for t in tl.range(full, end, num_stages=STAGES):
                at = (b, h, t * TILE_M, j0, m, n)
                sums = _queries(
                    *(sums, k_tile, v_tile, q_h, do_h, dq_h, facts_h, at, True, extras),
                    *(F, TILE_M, TILE_N, False, EXACT, ADD, BY_KEY),
                )
        for t in tl.range(first, last - (end - full), num_stages=STAGES):
            i0 = tl.where(t < full, t, t + (end - full)) * TILE_M
            seen, work = True, True
            if F.mask.by_head:  # others have no branch here: what it holds is not fetched ahead
                seen = visible(i0, j[:, None], b, h, here, mask, F, TILE_M, False)
                work = some(seen)
            if work:
                sums = _queries(
                    *(sums, k_tile, v_tile, q_h, do_h, dq_h, facts_h, (b, h, i0, j0, m, n)),
                    *(seen, extras, F, TILE_M, TILE_N, True, EXACT, ADD, BY_KEY),
                )
        if BY_KEY:
            to = dbias[0] + b * dbias[1] + h * dbias[2] + j
            tl.store(to, sums[2] * undropped(numbers, F), mask=j < n)
            sums = (sums[0], sums[1], tl.zeros([TILE_N], tl.float32))
    kind = k_tile.dtype
    more = undropped(numbers, F)
    dk_at = dk[0] + b * dk[1] + hk * dk[2] + col * dk[3] + d[None, :]
    dv_at = dv[0] + b * dv[1] + hk * dv[2] + col * dv[3] + e[None, :]
    tl.store(dk_at, (sums[0] * (numbers[2] * more)).to(kind), mask=there & (d < F.D)[None, :])
    tl.store(dv_at, (sums[1] * more).to(kind), mask=there & (e < F.E)[None, :])
