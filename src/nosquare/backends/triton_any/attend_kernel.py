"""Forward: a tile of rows against the keys it sees, by online softmax.

    new = max(ref, rowmax s)    p = exp2((s - new) c2)    alpha = exp2((ref - new) c2)
    l   = alpha l + rowsum p    u = alpha u + p v         o = u / l    lse = new + ln l

          keys     lo .. | masked |   core: no mask, no bounds   | masked | .. hi
          rows  TILE_M   +--------+------+------+------+---------+--------+
                                    TILE_N

First the tiles that all rows see whole, then those at both ends, in one loop. Rows are queries of
one head, or (F.folded) the queries of all heads that share a key head: row R is query R // group of
head R % group. What reaches exp2 is s c2 - ref c2 for plain scores, one fused product, with the
reference rounded once so that alpha is 1 where nothing grew.

With F.split, programs share the keys of a tile; each leaves o and lse of what it saw, in float32.
"""

import triton
import triton.language as tl

from .drops import kept_across, row_keys
from .places import sequence_of, tile_of, tokens_of
from .scores import scored
from .sight import narrowed, some, told, visible

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _weights(s, ref, numbers, SAFE: tl.constexpr, F: tl.constexpr):
    """p, alpha and the new reference. SAFE: rows may have seen no key yet."""
    c2 = numbers[1]
    top = tl.max(s, 1)
    if F.plain:
        new = tl.maximum(ref, top * c2)
        shift = tl.where(new == float("-inf"), 0.0, new) if SAFE else new
        p = tl.exp2(s * c2 - shift[:, None])
        alpha = tl.exp2(ref - shift)
    else:
        new = tl.maximum(ref, top)
        shift = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2((s - shift[:, None]) * c2)
        alpha = tl.exp2((ref - shift) * c2)
    return p, alpha, new


@triton.jit
def _rows(x, start, there, WIDTH: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values from `start` on. x: (pointer, offsets in a tile, stride of a key)."""
    at = x[0] + start * x[2] + x[1]
    if MASKED:
        return tl.load(at, mask=there & (tl.arange(0, PAD)[None, :] < WIDTH), other=0.0)
    elif PAD != WIDTH:
        return tl.load(at, mask=tl.arange(0, PAD)[None, :] < WIDTH, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _visit(
    state, q, k, v, drop_keys, place, sizes, tile, seen, numbers, bias, alibi, drop, mask,
    F: tl.constexpr, MASKED: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The state (u, ref, l) after one more tile of keys. k, v: see _rows; place: (b, h, i); sizes:
    (lo, hi, m, n); seen: the visible pairs, where the caller has asked for them (F.mask.holes)."""
    u, ref, l = state
    b, h, i = place
    lo, hi, m, n = sizes
    step = tl.arange(0, TILE_N)
    start = tile * TILE_N
    j = start + step
    there = ((j >= lo) & (j < hi))[:, None]
    keys = _rows(k, start, there, F.D, F.D_PAD, MASKED)
    raw = tl.dot(q, keys.T, input_precision=F.precision)
    s = scored(raw, b, h, i[:, None], j[None, :], m, n, numbers, bias, alibi, F, MASKED)
    values = _rows(v, start, there, F.E, F.E_PAD, MASKED)
    if MASKED:
        if not F.mask.holes:
            seen = visible(start, i[:, None], b, h, sizes, mask, F, TILE_N, True)
        s = tl.where(seen, s, float("-inf"))
        if not F.mask.tight:  # a weight of 0 does not hide a value that is not finite
            somebody = tl.max(s, 0) > float("-inf")
            values = tl.where(somebody[:, None], values, 0.0)
    p, alpha, ref = _weights(s, ref, numbers, MASKED, F)
    l = l * alpha + tl.sum(p, 1)
    if F.dropout:
        p = tl.where(kept_across(drop_keys, drop, start, F, TILE_N), p, 0.0)
    u = u * alpha[:, None]
    u = tl.dot(p.to(values.dtype), values, u, input_precision=F.precision)
    return u, ref, l


@triton.jit
def finished(u, ref, l, sink, kept_share, F: tl.constexpr):
    """o and lse from the state; sink: a logit for each row, of use where F.sinks."""
    top = ref * LN2 if F.plain else ref
    if F.sinks and not F.split:
        new = tl.maximum(top, sink)
        safe = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2((top - safe) * LOG2E)
        l = l * alpha + tl.exp2((sink - safe) * LOG2E)
        u = u * alpha[:, None]
        top = new
    share = l * kept_share if F.dropout and not F.split else l
    return u / tl.where(l > 0, share, 1.0)[:, None], top + tl.log(l)


@triton.jit
def attend(
    q, k, v, o, lse, grid, sights, sizes, numbers, bias, sinks, alibi, drop, mask, cu,
    F: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """q, k, v: (pointer, stride of b, h, row, width). o: (pointer, stride of b, h, row, part), lse
    without the row's; a part is one of a split. grid: (tiles, heads, group, splits);
    sights: what sight.py has found for these tiles of rows (F.sighted)."""
    entries, G, m, n = sizes[0], sizes[3], sizes[4], sizes[5]
    tiles, heads, group, splits = grid
    program = tl.program_id(0)
    part = 0
    if F.split:
        part = program % splits
        program = program // splits
    tile, head, b = tile_of(program, tiles, heads)
    q_0 = 0
    k_0 = 0
    if F.packed:
        b, tile = sequence_of(tile, cu[0], entries, m, TILE_M)
        k_0, n = tokens_of(cu[1], b, entries, n, False)
        q_0, m = tokens_of(cu[0], b, entries, m, True)
    row_0 = tile * TILE_M
    rows = row_0 + tl.arange(0, TILE_M)
    if F.folded:
        i = rows // group
        h = head * group + rows % group
        h_pairs = h[:, None]
        i_lo = row_0 // group
        i_hi = tl.minimum((row_0 + TILE_M - 1) // group + 1, m)
        key_head = head
    else:
        i = rows
        h = head
        h_pairs = head
        i_lo = row_0
        i_hi = tl.minimum(row_0 + TILE_M, m)
        key_head = head // G

    # ---- which tiles of keys: [first, last), of which [whole, rest) are seen by all rows
    lo, hi = F.mask.span(mask, i_lo, i_hi, m, n)
    place, here = (b, h_pairs, i), (lo, hi, m, n)
    if F.sighted:
        first, last, whole, rest = told(sights, b, head, q_0, row_0, F, TILE_M)
    else:
        first = lo // TILE_N
        last = tl.where(i_lo < m, tl.cdiv(hi, TILE_N), first)
        if F.split:
            share = tl.cdiv(last - first, splits)
            first = tl.minimum(first + part * share, last)
            last = tl.minimum(first + share, last)
        if F.mask.looks and not F.mask.holes:
            # tokens of no sequence have no tiles, but are asked for all that
            known = tl.minimum(b, entries - 1)
            first, last = narrowed(first, last, i[:, None], known, h_pairs, here, mask, F, TILE_N)
        c_lo, c_hi = F.mask.core(mask, i_lo, i_hi, m, n)
        whole = tl.minimum(tl.maximum(tl.cdiv(c_lo, TILE_N), first), last)
        rest = tl.maximum(tl.minimum(c_hi // TILE_N, last), whole)

    # ---- what stays
    d = tl.arange(0, F.D_PAD)[None, :]
    e = tl.arange(0, F.E_PAD)[None, :]
    j = tl.arange(0, TILE_N)[:, None]
    if F.unit:
        q_d, k_d, v_e = 1, 1, 1
    else:
        q_d, k_d, v_e = q[4], k[4], v[4]
    live = (i < m)[:, None]
    q_at = q[0] + b * q[1] + (h * q[2] + (q_0 + i) * q[3])[:, None] + d * q_d
    q_rows = tl.load(q_at, mask=live & (d < F.D), other=0.0)
    if F.flip:  # not always: q that comes straight from memory needs no registers
        q_rows = (q_rows.to(tl.float32) * numbers[4]).to(q_rows.dtype)
    keys = (k[0] + b * k[1] + key_head * k[2] + k_0 * k[3], j * k[3] + d * k_d, k[3])
    values = (v[0] + b * v[1] + key_head * v[2] + k_0 * v[3], j * v[3] + e * v_e, v[3])
    drop_keys = (0, 0)
    if F.dropout:
        k0, k1 = row_keys(drop, b, h, i, F)
        drop_keys = (k0[:, None], k1[:, None])
    E_PAD: tl.constexpr = F.E_PAD
    u = tl.zeros([TILE_M, E_PAD], tl.float32)
    ref = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M], tl.float32)

    # ---- the tiles
    if F.mask.has_core or F.sighted:
        for at in tl.range(whole, rest):
            u, ref, l = _visit(
                (u, ref, l), q_rows, keys, values, drop_keys, place, here, at, True,
                numbers, bias, alibi, drop, mask, F, False, TILE_N,
            )  # fmt: skip
    else:
        rest = whole
    head_tiles = whole - first
    for t in tl.range(0, head_tiles + last - rest):
        at = tl.where(t < head_tiles, first + t, rest + t - head_tiles)
        seen, work = True, True
        if F.mask.holes:
            seen = visible(at * TILE_N, i[:, None], b, h_pairs, here, mask, F, TILE_N, True)
            work = some(seen)
        if work:
            u, ref, l = _visit(
                (u, ref, l), q_rows, keys, values, drop_keys, place, here, at, seen,
                numbers, bias, alibi, drop, mask, F, True, TILE_N,
            )  # fmt: skip

    # ---- o and lse
    sink = 0.0
    if F.sinks and not F.split:
        sink = tl.load(sinks[0] + b * sinks[1] + h * sinks[2]).to(tl.float32)
    out, log = finished(u, ref, l, sink, numbers[5], F)
    o_at = o[0] + part * o[4] + b * o[1] + (h * o[2] + (q_0 + i) * o[3])[:, None] + e
    tl.store(o_at, out.to(o[0].dtype.element_ty), mask=live & (e < F.E))
    lse_at = lse[0] + part * lse[4] + b * lse[1] + h * lse[2] + (q_0 + i) * lse[3]
    tl.store(lse_at, log, mask=i < m)
