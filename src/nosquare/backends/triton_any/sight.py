"""Which tiles of a row of tiles have a visible pair, where a mask's arrays alone know it.

A program owns some queries or keys and goes through tiles of the others. Both lie across one
another as the program has them: what it owns down, the tiles across. `own` and the head h are
shaped so; bounds = (lo, hi, m, n), of which queries below m and keys in [lo, hi) exist.

The kernel `sight` asks once for all heads that see alike, before the kernels that go through the
tiles, and finds for what each of their programs owns

    tiles   .. nothing | some | every pair | some | nothing ..
                     first  whole        rest  last

of all runs in which every pair is visible the longest. Where rows are few, a program asks itself:
`narrowed`.
"""

import triton
import triton.language as tl

from .grad_tile import tiles_seeing
from .places import sequence_of, tile_of, tokens_of

# Pairs that are looked at together, where that is more than a tile: the answer is waited for longer
# than it is worked on, but more would not stay in registers.
AT_A_LOOK: tl.constexpr = tl.constexpr(1 << 14)


@triton.jit
def visible(
    start, own, b, h, bounds, mask, F: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr
):
    """The visible pairs of `own` and the keys (KEYS) or queries in [start, start + TILE)."""
    lo, hi, m, n = bounds
    others = start + tl.arange(0, TILE)[None, :]
    i, j = (own, others) if KEYS else (others, own)
    inside = (i < m) & (j >= lo) & (j < hi)
    return F.mask.keep(mask, b, h, i, j, m, n) & inside


@triton.jit
def some(pairs):
    """Whether any of them is visible."""
    return tl.max(tl.max(pairs.to(tl.int32), 1), 0) > 0


@triton.jit
def _narrowed(
    first, last, own, b, h, bounds, mask, F: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr
):
    """narrowed(), by COUNT tiles at a time."""
    SIDE: tl.constexpr = TILE * COUNT
    # both sides of & are run, whatever the left one says
    while (first + COUNT <= last) & ~some(
        visible(tl.maximum(last - COUNT, 0) * TILE, own, b, h, bounds, mask, F, SIDE, True)
    ):
        last -= COUNT
    while (first + COUNT <= last) & ~some(
        visible(first * TILE, own, b, h, bounds, mask, F, SIDE, True)
    ):
        first += COUNT
    return first, last


@triton.jit
def narrowed(first, last, own, b, h, bounds, mask, F: tl.constexpr, TILE: tl.constexpr):
    """The tiles of keys [first, last) without those at both ends that have nothing to see, as in
    padding or other documents. Before a program loads what it owns: the registers are then still
    free."""
    COUNT: tl.constexpr = AT_A_LOOK // (own.numel * TILE)
    if COUNT > 1:
        first, last = _narrowed(first, last, own, b, h, bounds, mask, F, TILE, COUNT)
    return _narrowed(first, last, own, b, h, bounds, mask, F, TILE, 1)


@triton.jit
def told(sights, b, h, token, start, F: tl.constexpr, TILE: tl.constexpr):
    """(first, last, whole, rest) for the tile that begins at `start`, in a packed problem of the
    sequence b whose first token is given. sights: (pointer, stride of b, h)."""
    tile = start // TILE
    if F.packed:  # the slot of places.py
        tile += token // TILE + b
    at = sights[0] + b * sights[1] + h * sights[2] + 4 * tile
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _looked(
    first, last, pairs, own, b, h, bounds, mask,
    F: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(first, last, whole, rest) among the tiles [first, last); pairs: of a tile with every pair
    visible."""
    PAIRS: tl.constexpr = own.numel * TILE
    COUNT: tl.constexpr = AT_A_LOOK // PAIRS if PAIRS < AT_A_LOOK else 1
    n = tl.arange(0, COUNT)
    begin = last
    end = first
    whole = first
    rest = first
    run = first  # where one begins that goes on to the tile that is looked at
    for at in tl.range(first, last, COUNT):
        seen = visible(at * TILE, own, b, h, bounds, mask, F, TILE * COUNT, KEYS).to(tl.int32)
        found = tl.sum(tl.reshape(tl.sum(seen, 0), [COUNT, TILE]), 1)
        tile = at + n
        begin = tl.minimum(begin, tl.min(tl.where(found > 0, tile, last), 0))
        end = tl.maximum(end, tl.max(tl.where(found > 0, tile + 1, first), 0))
        # a run up to a tile begins after the last one, up to it, that is not whole
        after = tl.where(found == pairs, run, tile + 1)
        starts = tl.max(tl.where(n[None, :] <= n[:, None], after[None, :], first), 1)
        lengths = tile + 1 - starts
        longest = tl.max(lengths, 0)
        if longest > rest - whole:
            whole = tl.max(tl.where(lengths == longest, starts, first), 0)
            rest = whole + longest
        run = tl.max(starts, 0)
    return tl.minimum(begin, end), end, whole, rest


@triton.jit
def sight(
    sights, grid, sizes, numbers, bias, sinks, alibi, drop, mask, cu,
    F: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, KEYS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """What `told` reads: tiles of keys for each tile of rows (KEYS), or the other way round.
    sights: (pointer to int32, stride of b, h); grid: (tiles, heads), with one head where all see
    alike."""
    entries, m, n = sizes[0], sizes[4], sizes[5]
    tile, h, b = tile_of(tl.program_id(0), grid[0], grid[1])
    to = sights[0] + b * sights[1] + h * sights[2] + 4 * tile
    if F.packed:
        if KEYS:
            b, tile = sequence_of(tile, cu[0], entries, m, TILE_M)
        else:
            b, tile = sequence_of(tile, cu[1], entries, n, TILE_N)
        _, m = tokens_of(cu[0], b, entries, m, KEYS)
        _, n = tokens_of(cu[1], b, entries, n, not KEYS)
    if KEYS:
        start = tile * TILE_M
        stop = tl.minimum(start + TILE_M, m)
        own = start + tl.arange(0, TILE_M)
        lo, hi = F.mask.span(mask, start, stop, m, n)
        first = lo // TILE_N
        last = tl.where(start < m, tl.cdiv(hi, TILE_N), first)
        # rows beyond m are nobody's: a tile may be whole without them
        found = _looked(
            *(first, last, (stop - start) * TILE_N, own[:, None], b, h, (lo, hi, m, n)),
            *(mask, F, TILE_N, True),
        )
    else:
        start = tile * TILE_N
        stop = tl.minimum(start + TILE_N, n)
        own = start + tl.arange(0, TILE_N)
        first, last, _, _ = tiles_seeing(mask, start, stop, m, n, F, TILE_M, AT_ONCE)
        last = tl.where(start < n, last, first)
        found = _looked(
            *(first, last, TILE_M * TILE_N, own[:, None], b, h, (start, n, m, n)),
            *(mask, F, TILE_M, False),
        )
    tl.store(to, found[0])
    tl.store(to + 1, found[1])
    tl.store(to + 2, found[2])
    tl.store(to + 3, found[3])
