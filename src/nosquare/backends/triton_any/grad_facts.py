"""What backward knows of rows before it begins, and what it does after it.

    delta = rowsum(do * o) - dlse, or sum over keys of p * dp - dlse

facts, float32 (B, Hq, M) each (packed: (1, Hq, M)), contiguous along M:
    ref    -lse in the units of the scores (times log2 e where they are plain products); -inf in
           rows that see no key, so that their weights are 0 and q and do need not be read
    delta  see above
    share  1 / sum of the weights of the row, where rounding of a large lse may have made that sum
           other than 1 (EXACT)
    keys   int32 (B, Hq, M, 2): the two keys of dropout
"""

import triton
import triton.language as tl

from .drops import row_keys
from .grad_tile import (
    LOG2E,
    across,
    head_facts,
    place,
    queries_at,
    row_facts,
    rows_at,
    slopes,
    undropped,
    weights,
)

LARGE_LSE: tl.constexpr = tl.constexpr(
    1024.0
)  # float32 keeps such an lse, and its weights, to 6e-5


@triton.jit
def delta_kernel(
    o, lse, do, dlse, facts, sizes, numbers, bias, sinks, alibi, drop, mask, cu,
    F: tl.constexpr, TILE_M: tl.constexpr, PART: tl.constexpr, HAS_DLSE: tl.constexpr,
    SUMMED: tl.constexpr,
):  # fmt: skip
    """The facts of all rows but `share`. E is gone through in parts. SUMMED: delta is what the
    products kernel is still to add to."""
    b, h, i0, m, _n, q0, _k0 = place(sizes, cu, False, TILE_M, F)
    if i0 >= m:
        return
    i = i0 + tl.arange(0, TILE_M)
    there = i < m
    row = (q0 + i).to(tl.int64)[:, None]
    total = tl.zeros([TILE_M], tl.float32)
    largest = tl.zeros([TILE_M], tl.float32)
    E_PAD: tl.constexpr = F.E_PAD
    for e0 in tl.static_range(0, E_PAD, PART):
        e = e0 + tl.arange(0, PART)
        inside = there[:, None] & (e < F.E)[None, :]
        o_at = o[0] + b * o[1] + h * o[2] + row * o[3] + e[None, :]
        do_at = do[0] + b * do[1] + h * do[2] + row * do[3] + e[None, :]
        out = tl.load(o_at, mask=inside, other=0.0).to(tl.float32)
        cot = tl.load(do_at, mask=inside, other=0.0).to(tl.float32)
        # a row that sees nothing has o = 0, and its do may hold anything
        total += tl.sum(tl.where(out == 0.0, 0.0, out * cot), 1)
        largest = tl.maximum(largest, tl.max(tl.abs(out), 1))
    log = tl.load(lse[0] + b * lse[1] + h * lse[2] + (q0 + i) * lse[3], mask=there, other=0.0)
    if SUMMED:
        total = tl.zeros([TILE_M], tl.float32)
    if HAS_DLSE:
        at = dlse[0] + b * dlse[1] + h * dlse[2] + (q0 + i) * dlse[3]
        total -= tl.load(at, mask=there, other=0.0)
    nothing = log == float("-inf")
    total = tl.where(nothing, 0.0, total)
    if F.sinks:
        # all of the weight is the sink's: a row without keys, or one whose weights are below u / 2
        sink = tl.load(sinks[0] + b * sinks[1] + h * sinks[2])
        nothing = nothing | ((log == sink) & (largest == 0.0))
    ref = -log
    if F.plain:
        ref = ref * LOG2E
    ours = head_facts(facts, b, h, q0)
    tl.store(ours[0] + i, tl.where(nothing, float("-inf"), ref), mask=there)
    tl.store(ours[1] + i, total, mask=there)
    if F.dropout:
        k0, k1 = row_keys(drop, b, h, i, F)
        tl.store(ours[3] + 2 * i, k0.to(tl.int32, bitcast=True), mask=there)
        tl.store(ours[3] + 2 * i + 1, k1.to(tl.int32, bitcast=True), mask=there)


@triton.jit
def share_kernel(
    q, k, facts, sizes, numbers, bias, sinks, alibi, drop, mask, cu,
    F: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """share of all rows. Tiles without a large lse, that is all but a few of all calls, end at
    once: a bias of finfo.min over a whole row leaves lse no digit of ln N, and the weights would
    be N times too large."""
    b, h, i0, m, n, q0, k0 = place(sizes, cu, False, TILE_M, F)
    if i0 >= m:
        return
    i = i0 + tl.arange(0, TILE_M)
    ours = head_facts(facts, b, h, q0)
    ref = tl.load(ours[0] + i, mask=i < m, other=float("-inf"))
    share = tl.full([TILE_M], 1.0, tl.float32)
    large = (tl.abs(ref) > LARGE_LSE) & (ref > float("-inf"))
    if tl.max(large.to(tl.int32), 0) > 0:
        hk = h // sizes[3]
        d = tl.arange(0, F.D_PAD)
        live = (ref > float("-inf"))[:, None]
        row = (q0 + i).to(tl.int64)[:, None]
        q_at = q[0] + b * q[1] + h * q[2] + row * q[3] + across(d, q[4], F)[None, :]
        q_tile = rows_at(q_at, live, d, F.D, F.D_PAD, True)
        total = tl.zeros([TILE_M], tl.float32)
        if F.sinks:
            sink = tl.load(sinks[0] + b * sinks[1] + h * sinks[2])
            total += tl.exp2((sink + ref) * LOG2E)
        lo, hi = F.mask.span(mask, i0, tl.minimum(i0 + TILE_M, m), m, n)
        for j0 in range(lo, hi, TILE_N):
            j = j0 + tl.arange(0, TILE_N)
            col = (k0 + j).to(tl.int64)[:, None]
            k_at = k[0] + b * k[1] + hk * k[2] + col * k[3] + across(d, k[4], F)[None, :]
            k_tile = rows_at(k_at, (j < hi)[:, None], d, F.D, F.D_PAD, True)
            raw = tl.dot(q_tile, tl.trans(k_tile), input_precision=F.precision)
            j = j[None, :]
            p = weights(raw, ref[:, None], b, h, i[:, None], j, m, n, numbers, bias, alibi, F, True)
            keep = F.mask.keep(mask, b, h, i[:, None], j, m, n) & (i < m)[:, None] & (j < hi)
            total += tl.sum(tl.where(keep, p, 0.0), 1)
        share = tl.where(total > 0.0, 1.0 / total, 1.0)
    tl.store(ours[2] + i, share, mask=i < m)


@triton.jit
def products_kernel(
    q, k, v, do, facts, sizes, numbers, bias, sinks, alibi, drop, mask, cu,
    F: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds the sum over keys of p * dp to delta: rowsum(do * o), but for the rounding of o."""
    b, h, i0, m, n, q0, k0 = place(sizes, cu, False, TILE_M, F)
    if i0 >= m:
        return
    hk = h // sizes[3]
    d = tl.arange(0, F.D_PAD)
    e = tl.arange(0, F.E_PAD)
    i = i0 + tl.arange(0, TILE_M)
    row = (q0 + i).to(tl.int64)[:, None]
    ours = head_facts(facts, b, h, q0)
    ref, before, share, key0, key1 = row_facts(ours, i, m, True, F, EXACT)
    live = (ref > float("-inf"))[:, None]
    q_tile, do_tile = queries_at(q, do, b, h, row, live, d, e, F)
    lo, hi = F.mask.span(mask, i0, tl.minimum(i0 + TILE_M, m), m, n)
    keys = (key0, key1)
    if F.dropout:
        keys = (key0[:, None], key1[:, None])
    nothing = tl.zeros([TILE_M], tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    for j0 in range(lo // TILE_N * TILE_N, hi, TILE_N):  # dropout counts keys from such places on
        j = j0 + tl.arange(0, TILE_N)
        col = (k0 + j).to(tl.int64)[:, None]
        k_at = k[0] + b * k[1] + hk * k[2] + col * k[3] + across(d, k[4], F)[None, :]
        v_at = v[0] + b * v[1] + hk * v[2] + col * v[3] + across(e, v[4], F)[None, :]
        k_tile = rows_at(k_at, (j < hi)[:, None], d, F.D, F.D_PAD, True)
        v_tile = rows_at(v_at, (j < hi)[:, None], e, F.E, F.E_PAD, True)
        j = j[None, :]
        raw = tl.dot(q_tile, tl.trans(k_tile), input_precision=F.precision)
        p = weights(raw, ref[:, None], b, h, i[:, None], j, m, n, numbers, bias, alibi, F, True)
        keep = F.mask.keep(mask, b, h, i[:, None], j, m, n) & (i < m)[:, None] & (j < hi)
        p = tl.where(keep, p, 0.0)
        if EXACT:
            p = p * share[:, None]
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=F.precision)
        _, ds = slopes(
            p, dp, nothing[:, None], keys, keep, j0, numbers, drop, F, True, TILE_N, False
        )
        total += tl.sum(ds, 1)
    tl.store(ours[1] + i, before + total * undropped(numbers, F), mask=i < m)
