"""Where a program works: which tile of rows of which head, and which keys its rows see."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import order as ways

LISTED = gl.constexpr(ways.LISTED)
LONGEST_FIRST = gl.constexpr(ways.LONGEST_FIRST)


@gluon.jit
def work_of(turn, turns, order, grid):
    """The tile of rows of a turn as (tile, head, entry); tile < 0: none. See order.py."""
    tiles, heads, total, way = grid
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    back = (way == LONGEST_FIRST) & (turn % 2 == 1)
    at = turn * programs + gl.where(back, programs - 1 - program, program)
    if way == LISTED:
        number = gl.load(order + at, mask=turn < turns, other=-1)
    else:
        number = gl.where(at < total, at, -1)
    across = way == LONGEST_FIRST
    side = gl.where(across, total // tiles, tiles)
    whole = number // side
    rest = number % side
    tile = tiles - 1 - gl.where(across, whole, rest)
    which = gl.where(across, rest, whole)
    return gl.where(number < 0, -1, tile), which % heads, which // heads


@gluon.jit
def sizes_of(b, sizes, lengths, F: gl.constexpr):
    """(m, n, end) of a batch entry: of its n keys those before `end` are not padding."""
    m, n = sizes[0], sizes[1]
    end = n
    if F.lengths:
        own = gl.load(lengths[0] + b * lengths[1]).to(gl.int32)
        end = gl.minimum(gl.maximum(own, 0), n)
    return m, n, end


@gluon.jit
def span_of(row, here, mask, F: gl.constexpr, COUNT: gl.constexpr):
    """Keys [lo, hi) outside which COUNT rows from `row` on see none, and [c_lo, c_hi) of which each
    of them sees all. here: see sizes_of."""
    m, n, end = here
    i_lo = row // F.group
    i_hi = gl.minimum((row + COUNT - 1) // F.group + 1, m)
    lo, hi = F.mask.span(mask, i_lo, i_hi, m, n)
    c_lo, c_hi = F.mask.core(mask, i_lo, i_hi, m, n)
    return lo, gl.minimum(hi, end), c_lo, gl.minimum(c_hi, end)


@gluon.jit
def tiles_of_keys(lo, hi, alive, TILE_N: gl.constexpr):
    """[first, last): the tiles that hold keys [lo, hi); at least one."""
    first = gl.maximum(lo - alive[2], 0) // TILE_N
    return first, gl.maximum(gl.cdiv(hi - alive[2], TILE_N), first + 1)


@gluon.jit
def alive_of(here, mask, F: gl.constexpr, TILE_N: gl.constexpr):
    """(lo, hi, origin): keys [lo, hi) of an entry outside which nobody sees any; where tile 0
    begins, which is key 0 unless a packed sequence has so few of them that one tile holds all."""
    m, n, end = here
    lo, hi = F.mask.span(mask, 0, m, m, n)
    hi = gl.minimum(hi, end)
    origin = 0
    if F.packed:
        origin = gl.where(hi - lo < TILE_N, lo, 0)
    return lo, hi, origin


@gluon.jit
def start_of(t, alive, F: gl.constexpr, TILE_N: gl.constexpr):
    """Where tile t is loaded from: within the keys that somebody sees, since a weight of 0 does not
    hide a value that is not finite. Keys that another tile has too are hidden in this one."""
    start = alive[2] + t * TILE_N
    if not F.even:
        latest = alive[1] - TILE_N
        if F.packed:  # what comes before a sequence is another's; what comes after is cleared
            latest = gl.maximum(latest, alive[2])
        start = gl.minimum(gl.maximum(start, alive[0]), latest)
    return start
