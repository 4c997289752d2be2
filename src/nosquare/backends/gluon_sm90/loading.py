"""The warp that loads: q of each tile of rows, then k and v of the tiles that its rows see."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .packed import hand_over, next_packed
from .pipe import EMPTY_K, EMPTY_V, empty_q, load, load_slot
from .places import alive_of, sizes_of, span_of, start_of, tiles_of_keys, work_of
from .scores import ROWS
from .shim import bar_sync


@gluon.jit
def _load_tiles(
    inputs, where, state, here, key_head, mask,
    F: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """q of a tile of rows, and the tiles of k and v that they see."""
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, v_full = inputs
    tile, head, b, q_0, k_0 = where
    number, done = state
    THREADS: gl.constexpr = GROUPS * 128 + 32
    WIDE: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    K_BYTES: gl.constexpr = TILE_N * F.D * WIDE
    V_BYTES: gl.constexpr = TILE_N * F.E * WIDE
    alive = alive_of(here, mask, F, TILE_N)
    lo, hi, _, _ = span_of(tile * TILE_M, here, mask, F, TILE_M)
    first, last = tiles_of_keys(lo, hi, alive, TILE_N)
    slot = done % Q_STAGES
    bar_sync(empty_q(slot), THREADS)
    for c in gl.static_range(GROUPS):
        row = q_0 + (tile * TILE_M + c * ROWS) // F.group
        mine = slot * GROUPS + c
        at = [b, row, head * F.group, 0]
        load(q_desc, at, q_smem.index(mine), q_full.index(mine), ROWS * F.D * WIDE)
    # k one tile ahead of v, as they are used
    at = [b, k_0 + start_of(last - 1, alive, F, TILE_N), key_head, 0]
    load_slot(k_desc, at, k_smem, k_full, number, EMPTY_K, STAGES, THREADS, K_BYTES)
    for back in range(last - 1 - first):
        at = [b, k_0 + start_of(last - 2 - back, alive, F, TILE_N), key_head, 0]
        load_slot(k_desc, at, k_smem, k_full, number + 1, EMPTY_K, STAGES, THREADS, K_BYTES)
        at = [b, k_0 + start_of(last - 1 - back, alive, F, TILE_N), key_head, 0]
        load_slot(v_desc, at, v_smem, v_full, number, EMPTY_V, STAGES, THREADS, V_BYTES)
        number += 1
    at = [b, k_0 + start_of(first, alive, F, TILE_N), key_head, 0]
    load_slot(v_desc, at, v_smem, v_full, number, EMPTY_V, STAGES, THREADS, V_BYTES)
    return number + 1, done + 1


@gluon.jit
def load_all(
    loads,
    F: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):
    inputs, work_smem, work_full = loads[0]
    order, turns, grid, sizes, lengths, packed, mask = loads[1]
    number = 0
    done = 0
    if F.packed:
        tile, head, b, q_0, k_0, m, n = next_packed(packed, grid, sizes, TILE_M)
        while tile >= 0:
            hand_over((tile, head, b, q_0, k_0, m, n), work_smem, work_full, done, GROUPS)
            where = (tile, head, 0, q_0, k_0)
            number, done = _load_tiles(
                inputs, where, (number, done), (m, n, n), head // sizes[2], mask,
                F, TILE_M, TILE_N, STAGES, Q_STAGES, GROUPS,
            )  # fmt: skip
            tile, head, b, q_0, k_0, m, n = next_packed(packed, grid, sizes, TILE_M)
        hand_over((tile, head, b, q_0, k_0, m, n), work_smem, work_full, done, GROUPS)
    else:
        for turn in range(turns):
            tile, head, b = work_of(turn, turns, order, grid)
            if tile >= 0:
                here = sizes_of(b, sizes, lengths, F)
                number, done = _load_tiles(
                    inputs, (tile, head, b, 0, 0), (number, done), here, head // sizes[2], mask,
                    F, TILE_M, TILE_N, STAGES, Q_STAGES, GROUPS,
                )  # fmt: skip
