"""Where a program of backward works: its keys, and the queries that see them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WHO_LOADS = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
WHO_COMPUTES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
NOBODY = gl.constexpr(1 << 30)


@gluon.jit
def key_tile(grid):
    """(tile of keys, key head, entry) of this program. grid: (tiles of keys, key heads, those of
    all entries, how many of these come together, a tile of each in turn)."""
    tiles, heads, total, together = grid
    program = gl.program_id(0)
    first = program // (tiles * together) * together
    some = gl.minimum(together, total - first)
    place = program - first * tiles
    head = first + place % some
    return place // some, head % heads, head // heads


@gluon.jit
def place_of(x, first, last, F: gl.constexpr):
    """The x-th place of [first, last), from the last on where tiles of keys take turns: those under
    a causal mask have their last queries in common, and so begin together."""
    place = x
    if F.ordered:
        place = first + last - 1 - x
    return place


@gluon.jit
def queries_of(
    k_lo, here, origin, mask,
    F: gl.constexpr, TILE_M: gl.constexpr, COUNT: gl.constexpr, AT_ONCE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """(first, low, high, last): tiles of queries [first, last) outside which nobody sees a key of
    the COUNT from k_lo on, and of those [low, high) that see all of them.

    Tile t has rows from origin + t TILE_M on. here: see places.sizes_of. Looks at AT_ONCE tiles
    together.
    """
    m, n, end = here
    tiles = gl.cdiv(m - origin, TILE_M)
    first = NOBODY + 0
    last = 0
    low = NOBODY + 0
    high = 0
    whole_tiles = 0
    for start in range(0, tiles, AT_ONCE):
        t = start + gl.arange(0, AT_ONCE, LAYOUT)
        i_lo = origin + t * TILE_M
        i_hi = gl.minimum(i_lo + TILE_M, m)
        lo, hi = F.mask.span(mask, i_lo, i_hi, m, n)
        some = (lo < k_lo + COUNT) & (gl.minimum(hi, end) > k_lo) & (t < tiles)
        first = gl.minimum(first, gl.min(gl.where(some, t, NOBODY), 0))
        last = gl.maximum(last, gl.max(gl.where(some, t + 1, 0), 0))
        if F.hidden:
            lo, hi = F.mask.core(mask, i_lo, i_hi, m, n)
            whole = some & (lo <= k_lo) & (gl.minimum(hi, end) >= k_lo + COUNT)
            low = gl.minimum(low, gl.min(gl.where(whole, t, NOBODY), 0))
            high = gl.maximum(high, gl.max(gl.where(whole, t + 1, 0), 0))
            whole_tiles += gl.sum(whole.to(gl.int32), 0)
    first = gl.minimum(first, last)
    if F.hidden:
        apart = (whole_tiles == 0) | (high - low != whole_tiles)  # none, or not in one row
        if not F.mask.low:  # no code is written for tiles after them
            apart = apart | (high != last)
        low = gl.where(apart, last, low)
        high = gl.where(apart, last, high)
    else:
        low = first
        high = last
    return first, low, high, last
