"""Who adds dq up in memory: a warp of backward's programs, which does nothing else.

The groups that compute write their halves of a tile of dq to shared memory, from where TMA adds
them to the sums. The order of sums is that of the clock, so they repeat up to rounding. Or
F.ordered: the tiles of keys that see a tile of queries take turns, the first keys first, and sums
repeat bit by bit. For each tile of queries a number in memory says which has had its turn. Those
that see it lie in one row (the host has looked), so a program waits for the tile of keys before its
own, or for nobody; and programs start in the order of their numbers, so nobody waits for one that
may never start.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .grad_places import WHO_LOADS, key_tile, place_of, queries_of
from .places import sizes_of
from .shim import add_tile, added_up, await_turn, bar_sync, give_turn, group_barrier

ROWS = gl.constexpr(64)  # of a group
FULL_DQ = gl.constexpr(14)  # 14, 15: named barriers, a half each
ADDING = gl.constexpr(160)  # threads: a group, and who adds
ANY = gl.constexpr(-(1 << 31))  # what every number has come to


@gluon.jit
def _add_half(dq_desc, dq_smem, head, row, C: gl.constexpr, F: gl.constexpr, TILE_M: gl.constexpr):
    if TILE_M == ROWS:
        add_tile(dq_desc, [head, row, C * (F.D // 2)], dq_smem.index(C))
    else:
        add_tile(dq_desc, [head, row + C * ROWS, 0], dq_smem.index(C))


@gluon.jit
def add_all(adds, F: gl.constexpr, TILE_M: gl.constexpr, AT_ONCE: gl.constexpr):
    """Add up dq of all tiles of queries, in the order in which they are computed. A half is free
    again when it has been read; a turn is given away half a tile later, when all of it has come to
    memory. turns: see grad_kernel.gradients."""
    dq_desc, dq_smem, free = adds[0]
    turns, grid, sizes, lengths, mask = adds[1]
    tile, hk, b = key_tile(grid)
    here = sizes_of(b, sizes, lengths, F)
    origin = sizes[3]
    k_lo = tile * 2 * ROWS
    first, _, _, last = queries_of(
        k_lo, here, origin, mask, F, TILE_M, 2 * ROWS, AT_ONCE, WHO_LOADS
    )
    if F.ordered:
        since, _, _, until = queries_of(
            k_lo - 2 * ROWS, here, origin, mask, F, TILE_M, 2 * ROWS, AT_ONCE, WHO_LOADS
        )
        if tile == 0:
            until = tile
    # the first that the groups compute is no tile's: see grad_kernel._compute
    for c in gl.static_range(2):
        bar_sync(FULL_DQ + c, ADDING)
        mbarrier.arrive(free.index(c), count=1)
    added = 0
    turn_before = turns[0]
    for g in range(sizes[2]):
        head = b * sizes[4] + hk * sizes[2] + g
        for x in range(first, last):
            t = place_of(x, first, last, F)
            turn = turns[0] + head * turns[1] + t
            if F.ordered:
                await_turn(turn, gl.where((t >= since) & (t < until), tile, ANY))
            for c in gl.static_range(2):
                bar_sync(FULL_DQ + c, ADDING)
                _add_half(dq_desc, dq_smem, head, origin + t * TILE_M, c, F, TILE_M)
                if F.ordered and c == 0:
                    added_up(1)
                    if added > 0:
                        give_turn(turn_before, tile + 1)
                tma.store_wait(0)
                group_barrier()
                mbarrier.arrive(free.index(c), count=1)
            turn_before = turn
            added += 1
    if F.ordered:
        added_up(0)
        if added > 0:
            give_turn(turn_before, tile + 1)
