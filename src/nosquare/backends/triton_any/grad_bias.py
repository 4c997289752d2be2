"""The gradient of a bias that varies along queries and keys.

    dbias = ds = p (dp - delta), summed over the entries and heads along which the bias broadcasts

A program owns a tile of pairs of one bias and goes through those entries and heads, so the sum
needs no atomics, has one order, and every number of dbias is written once.
"""

import triton
import triton.language as tl

from .grad_tile import across, head_facts, row_facts, rows_at, slopes, undropped, weights
from .sight import some, visible


@triton.jit
def _pairs(
    total, q, k, v, do, facts, b, h, hk, tile, seen, extras,
    F: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The tile of pairs of one head added to total. tile = (i0, j0, m, n)

    seen: its visible pairs, where the caller has asked for them (F.mask.looks)
    """
    numbers, bias, alibi, drop, mask = extras
    i0, j0, m, n = tile
    i = i0 + tl.arange(0, TILE_M)
    j = j0 + tl.arange(0, TILE_N)
    d = tl.arange(0, F.D_PAD)
    e = tl.arange(0, F.E_PAD)
    ref, delta, share, k0, k1 = row_facts(head_facts(facts, b, h, 0), i, m, MASKED, F, EXACT)
    row = i.to(tl.int64)[:, None]
    col = j.to(tl.int64)[:, None]
    q_at = q[0] + b * q[1] + h * q[2] + row * q[3] + across(d, q[4], F)[None, :]
    do_at = do[0] + b * do[1] + h * do[2] + row * do[3] + e[None, :]
    k_at = k[0] + b * k[1] + hk * k[2] + col * k[3] + across(d, k[4], F)[None, :]
    v_at = v[0] + b * v[1] + hk * v[2] + col * v[3] + across(e, v[4], F)[None, :]
    q_tile = rows_at(q_at, (i < m)[:, None], d, F.D, F.D_PAD, MASKED)
    do_tile = rows_at(do_at, (i < m)[:, None], e, F.E, F.E_PAD, MASKED)
    k_tile = rows_at(k_at, (j < n)[:, None], d, F.D, F.D_PAD, MASKED)
    v_tile = rows_at(v_at, (j < n)[:, None], e, F.E, F.E_PAD, MASKED)
    i = i[:, None]
    j = j[None, :]
    raw = tl.dot(q_tile, tl.trans(k_tile), input_precision=F.precision)
    p = weights(raw, ref[:, None], b, h, i, j, m, n, numbers, bias, alibi, F, MASKED)
    keep = j < n
    if MASKED:
        keep = seen if F.mask.looks else F.mask.keep(mask, b, h, i, j, m, n) & (i < m) & (j < n)
        p = tl.where(keep, p, 0.0)
    if EXACT:
        p = p * share[:, None]
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=F.precision)
    keys = (k0, k1)
    if F.dropout:
        keys = (k0[:, None], k1[:, None])
    _, ds = slopes(p, dp, delta[:, None], keys, keep, j0, numbers, drop, F, MASKED, TILE_N, False)
    return total + ds


@triton.jit
def bias_kernel(
    q, k, v, do, facts, dbias, sizes, numbers, bias, sinks, alibi, drop, mask, cu,
    F: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr, BY_ENTRY: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """dbias (B | 1, Hq | 1, M, N), contiguous but for rows: (pointer, b, h, m).

    BY_ENTRY, BY_HEAD  whether the bias varies along entries and heads
    """
    m = sizes[4]
    n = sizes[5]
    across_n = tl.cdiv(n, TILE_N)
    tiles = tl.cdiv(m, TILE_M) * across_n
    tile = tl.program_id(0) % tiles
    owner = tl.program_id(0) // tiles
    i0 = tile // across_n * TILE_M
    j0 = tile % across_n * TILE_N
    b0 = 0
    h0 = 0
    entries = sizes[0]
    heads = sizes[1]
    if BY_HEAD:
        h0 = owner % heads
        owner = owner // heads
        heads = 1
    if BY_ENTRY:
        b0 = owner
        entries = 1
    i_hi = tl.minimum(i0 + TILE_M, m)
    j_hi = tl.minimum(j0 + TILE_N, n)
    lo, hi = F.mask.span(mask, i0, i_hi, m, n)
    masked = tl.where((lo < j_hi) & (hi > j0), entries * heads, 0)
    whole = masked * 0
    if F.mask.has_core:
        lo, hi = F.mask.core(mask, i0, i_hi, m, n)
        every = (lo <= j0) & (hi >= j0 + TILE_N) & (i0 + TILE_M <= m)
        whole = tl.where(every, masked, 0)
        masked = masked - whole
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    extras = (numbers, bias, alibi, drop, mask)
    for at in tl.range(0, whole, num_stages=STAGES):
        b = (b0 + at // heads).to(tl.int64)
        h = (h0 + at % heads).to(tl.int64)
        total = _pairs(
            *(total, q, k, v, do, facts, b, h, h // sizes[3], (i0, j0, m, n), True, extras),
            *(F, TILE_M, TILE_N, False, EXACT),
        )
    own = (i0 + tl.arange(0, TILE_M))[:, None]
    for at in tl.range(0, masked, num_stages=STAGES):
        b = (b0 + at // heads).to(tl.int64)
        h = (h0 + at % heads).to(tl.int64)
        seen, work = True, True
        if F.mask.looks:
            seen = visible(j0, own, b, h, (0, n, m, n), mask, F, TILE_N, True)
            work = some(seen)
        if work:
            total = _pairs(
                *(total, q, k, v, do, facts, b, h, h // sizes[3], (i0, j0, m, n), seen, extras),
                *(F, TILE_M, TILE_N, True, EXACT),
            )
    i = i0 + tl.arange(0, TILE_M)
    j = j0 + tl.arange(0, TILE_N)
    to = dbias[0] + b0 * dbias[1] + h0 * dbias[2] + i.to(tl.int64)[:, None] * dbias[3] + j[None, :]
    total *= undropped(numbers, F)
    tl.store(to, total.to(dbias[0].dtype.element_ty), mask=(i < m)[:, None] & (j < n)[None, :])
