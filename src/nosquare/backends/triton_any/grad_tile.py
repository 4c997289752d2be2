"""Device helpers of backward: what a tile of pairs gives, in either orientation.

    p = exp(s - lse)      ds = p * (dp - delta)      both after the mask and dropout

The caller shapes i, j and the facts of rows: queries down and keys across, or the other way round.
"""

import triton
import triton.language as tl

from .drops import down, kept, kept_across
from .places import sequence_of, tokens_of
from .scores import cap_slope, capped, scored

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOBODY: tl.constexpr = tl.constexpr(1 << 30)  # beyond every tile


@triton.jit
def place(sizes, cu, KEYS: tl.constexpr, TILE: tl.constexpr, F: tl.constexpr):
    """(b, head, first position of the tile, m, n, first query, first key) of a program, which owns
    a tile of keys of a key head, or of queries of a head. The tile may lie beyond the end. Those
    with the most to do under a causal mask come first in each head."""
    total = sizes[4]
    heads = sizes[1]
    if KEYS:
        total = sizes[5]
        heads = sizes[2]
    tiles = tl.cdiv(total, TILE)
    if F.packed:
        tiles = total // TILE + sizes[0] + 1
    program = tl.program_id(0)
    tile = program % tiles
    head = (program // tiles) % heads
    b = program // tiles // heads
    m = sizes[4]
    n = sizes[5]
    first_q = 0
    first_k = 0
    if F.packed:
        if KEYS:
            b, tile = sequence_of(tile, cu[1], sizes[0], total, TILE)
        else:
            b, tile = sequence_of(tile, cu[0], sizes[0], total, TILE)
        # tokens that no sequence owns have gradients too: 0
        first_q, m = tokens_of(cu[0], b, sizes[0], m, not KEYS)
        first_k, n = tokens_of(cu[1], b, sizes[0], n, KEYS)
    elif not KEYS:
        tile = tiles - 1 - tile
    return b, head, tile * TILE, m, n, first_q, first_k


@triton.jit
def rows_at(at, there, x, WIDTH: tl.constexpr, PAD: tl.constexpr, BOUNDED: tl.constexpr):
    """A tile of rows of q, k, v or do; 0 in rows that are not `there` and beyond the width."""
    if BOUNDED:
        if WIDTH == PAD:
            tile = tl.load(at, mask=there, other=0.0)
        else:
            tile = tl.load(at, mask=there & (x < WIDTH)[None, :], other=0.0)
    elif WIDTH == PAD:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(x < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def across(x, stride, F: tl.constexpr):
    """Offsets of the numbers x of a row of q, k or v."""
    if F.unit:
        return x
    else:
        return x * stride


@triton.jit
def queries_at(q, do, b, h, row, live, d, e, F: tl.constexpr):
    """Tiles of q and do, those rows alone that are live: what others hold, also NaN, is not read.
    row: (rows, 1), counted from the start of the arrays."""
    q_at = q[0] + b * q[1] + h * q[2] + row * q[3] + across(d, q[4], F)[None, :]
    do_at = do[0] + b * do[1] + h * do[2] + row * do[3] + e[None, :]
    q_tile = rows_at(q_at, live, d, F.D, F.D_PAD, True)
    do_tile = rows_at(do_at, live, e, F.E, F.E_PAD, True)
    return q_tile, do_tile


@triton.jit
def head_facts(facts, entry, h, first):
    """Pointers to what is known of the rows of a head, from row `first` on."""
    at = entry * facts[4] + h * facts[5] + first
    return facts[0] + at, facts[1] + at, facts[2] + at, facts[3] + 2 * at


@triton.jit
def row_facts(facts, i, m, BOUNDED: tl.constexpr, F: tl.constexpr, EXACT: tl.constexpr):
    """What is known of rows i of a head: -lse in the units of the scores (-inf in rows that see
    nothing, and beyond m), delta, share, and the two keys of dropout."""
    there = i < m
    if BOUNDED:
        ref = tl.load(facts[0] + i, mask=there, other=float("-inf"))
        delta = tl.load(facts[1] + i, mask=there, other=0.0)
    else:
        ref = tl.load(facts[0] + i)
        delta = tl.load(facts[1] + i)
    share = delta
    if EXACT:
        share = tl.load(facts[2] + i, mask=there, other=1.0)
    k0 = i
    k1 = i
    if F.dropout:
        k0 = tl.load(facts[3] + 2 * i, mask=there, other=0)
        k1 = tl.load(facts[3] + 2 * i + 1, mask=there, other=0)
    return ref, delta, share, k0, k1


@triton.jit
def weights(
    raw, ref, b, h, i, j, m, n, numbers, bias, alibi, F: tl.constexpr, BOUNDED: tl.constexpr
):
    """exp(s - lse) from the raw product q.k; anything where the pair is hidden."""
    if F.plain:
        p = tl.exp2(raw * (numbers[2] * LOG2E) + ref)
    else:  # in natural units, so that a bias of finfo.min stays finite
        s = scored(raw, b, h, i, j, m, n, numbers, bias, alibi, F, BOUNDED)
        p = tl.exp2((s + ref) * LOG2E)
    return p


@triton.jit
def slopes(
    p, dp, delta, keys, keep, j0, numbers, drop,
    F: tl.constexpr, MASKED: tl.constexpr, TILE_N: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """p after dropout, and ds of the score after softcap; `undropped` times them is what they are.
    Keys from j0 on lie across, or DOWN as drops.down has them."""
    dropped = p
    if F.dropout:
        if DOWN:
            stays = kept(keys, drop, j0, down(F, TILE_N)[:, None], F)
        else:
            stays = kept_across(keys, drop, j0, F, TILE_N)
        dropped = tl.where(stays, p, 0.0)
        ds = dropped * dp - p * (delta * numbers[5])
    else:
        ds = p * (dp - delta)
    if MASKED:  # dp of a hidden pair may be anything
        ds = tl.where(keep, ds, 0.0)
    return dropped, ds


@triton.jit
def undropped(numbers, F: tl.constexpr):
    """What sums of what `slopes` gives are multiplied by, once: 1 / (1 - rate)."""
    return 1.0 / numbers[5] if F.dropout else 1.0


@triton.jit
def uncapped(ds, raw, keep, numbers, F: tl.constexpr, MASKED: tl.constexpr):
    """ds of scale * q.k from ds of the score after softcap."""
    if F.softcap:
        ds = ds * cap_slope(capped(raw, numbers), numbers)
        if MASKED:
            ds = tl.where(keep, ds, 0.0)
    return ds


@triton.jit
def _least(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return (
        tl.minimum(a0, b0),
        tl.minimum(a1, b1),
        tl.minimum(a2, b2),
        tl.minimum(a3, b3),
        a4 + b4,
    )


@triton.jit
def tiles_seeing(
    mask, j_lo, j_hi, m, n, F: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Tiles of queries [first, last) outside which nobody sees a key of j_lo <= j < j_hi, and in
    them [full, end) of whole tiles that see all of these keys."""
    tiles = tl.cdiv(m, TILE)
    first = NOBODY + 0
    last = 0
    full = NOBODY + 0
    end = 0
    count = 0
    for start in range(0, tiles, AT_ONCE):
        t = start + tl.arange(0, AT_ONCE)
        i_lo = t * TILE
        i_hi = tl.minimum(i_lo + TILE, m)
        lo, hi = F.mask.span(mask, i_lo, i_hi, m, n)
        some = (lo < j_hi) & (hi > j_lo) & (t < tiles)
        whole = some
        if F.mask.has_core:
            lo, hi = F.mask.core(mask, i_lo, i_hi, m, n)
            whole = some & (lo <= j_lo) & (hi >= j_hi) & (i_lo + TILE <= m) & (j_hi <= n)
        else:
            whole = some & False
        a, z, c, e, k = tl.reduce(
            (
                tl.where(some, t, NOBODY),
                tl.where(some, -t - 1, 0),
                tl.where(whole, t, NOBODY),
                tl.where(whole, -t - 1, 0),
                whole.to(tl.int32),
            ),
            0,
            _least,
        )
        first = tl.minimum(first, a)
        last = tl.maximum(last, -z)
        full = tl.minimum(full, c)
        end = tl.maximum(end, -e)
        count += k
    first = tl.minimum(first, last)
    apart = (count == 0) | (end - full != count)  # no whole tile, or not in one row
    full = tl.where(apart, first, full)
    end = tl.where(apart, first, end)
    return first, last, full, end
