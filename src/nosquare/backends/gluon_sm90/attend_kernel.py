"""Forward on Hopper: a tile of rows against the keys it sees, by online softmax.

    s = q k'    new = max(ref, rowmax s)    p = exp2((s - new) c2)    alpha = exp2((ref - new) c2)
    l = alpha l + rowsum p                  u = alpha u + p v         o = u / l    lse = new + ln l

One warp loads tiles of q, k and v by TMA; groups of four warps, each with 64 rows, compute. A group
has two products under way, scores of the next tile and values of the one before, while it makes
weights; groups take turns to begin theirs, so that one makes weights while another multiplies.

    keys   first .. mine .. | low |  nothing hidden  | high | .. top .. last
    rows   64 a group       <------- from the last tile to the first

Tiles [first, last) are loaded, since some group sees them; a group lets those by that it does not
see itself. The reference moves only where the maximum grew by more than 2^8 (LAZY): until then
alpha is exactly 1 and u need not be multiplied. Weights reach 2^8 at most; no digit of o or lse
depends on it.

A program works off the tiles of rows that `order` names (order.py), or every so manieth. Row R of
a tile is query R // F.group of head R % F.group of those that share a key head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .loading import load_all
from .packed import (
    all_handed_over,
    cleared,
    room_for_work,
    store_rows,
    taken,
)
from .pipe import (
    EMPTY_K,
    EMPTY_V,
    TURN,
    all_empty,
    await_slot,
    empty_q,
    full_signals,
    tiles_for,
)
from .places import alive_of, sizes_of, span_of, tiles_of_keys, work_of
from .scores import INF, ROWS, part_sums, row_max, scored, with_nothing
from .shim import bar_arrive, bar_sync, group_barrier, scaled_rows, store_tile

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
LAZY = gl.constexpr(8.0)


@gluon.jit
def _turn(
    state, t, q, k_smem, v_smem, k_full, v_full, rows, bounds, alive, here, numbers, mask,
    C: gl.constexpr, F: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, BUFFER: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One more tile of keys, t, while the values of the tile before it are summed."""
    u, ref, l, weights, number = state
    THREADS: gl.constexpr = GROUPS * 128 + 32
    s_layout: gl.constexpr = rows.type.layout.parent
    p_layout: gl.constexpr = weights.type.layout
    c2 = numbers[0]
    slot = await_slot(k_full, number + 1, STAGES)
    bar_sync(TURN + C, 256)
    zeros = gl.zeros([ROWS, TILE_N], gl.float32, s_layout)
    k = k_smem.index(slot).reshape([TILE_N, F.D]).permute((1, 0))
    s_next = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    v_slot = await_slot(v_full, number, STAGES)
    v = v_smem.index(v_slot).reshape([TILE_N, F.E])
    u_next = warpgroup_mma(weights, v, u, is_async=True)
    bar_arrive(TURN + (C + 1) % GROUPS, 256)
    s = warpgroup_mma_wait(1, deps=(s_next,))
    bar_arrive(EMPTY_K + slot, THREADS)
    s = scored(s, t, rows, bounds, alive, here, numbers, mask, F, TILE_N, MASKED)
    top = gl.convert_layout(row_max(s), rows.type.layout, assert_trivial=True)
    grown = (ref - top) * c2
    far = grown < -LAZY  # not where nobody has seen a key: -inf less -inf
    alpha = gl.where(far, gl.exp2(grown), 1.0)
    ref = gl.where(far, top, ref)
    shift = ref * c2
    if MASKED:
        shift = gl.where(ref == -INF, 0.0, shift)
    p = gl.exp2(s * c2 - shift[:, None])
    parts = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)
    l = l * parts[:, None] + part_sums(p)
    rows_of_u: gl.constexpr = gl.SliceLayout(1, u.type.layout)
    factor = gl.convert_layout(alpha, rows_of_u, assert_trivial=True)
    if BUFFER:  # registers of their own, so that rounding need not wait for the product that reads
        fresh = gl.convert_layout(p.to(weights.dtype), p_layout, assert_trivial=True)
        u, fresh, weights = warpgroup_mma_wait(0, deps=(u_next, fresh, weights))
        weights = fresh
    else:
        u = warpgroup_mma_wait(0, deps=(u_next,))
    bar_arrive(EMPTY_V + v_slot, THREADS)
    if not BUFFER:
        weights = gl.convert_layout(p.to(weights.dtype), p_layout, assert_trivial=True)
    u = scaled_rows(u, factor, F.E // 2)
    return u, ref, l, weights, number + 1


@gluon.jit
def _pass(number, k_full, v_full, C: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Let a tile of keys go by that other groups see."""
    THREADS: gl.constexpr = GROUPS * 128 + 32
    slot = await_slot(k_full, number, STAGES)
    bar_sync(TURN + C, 256)
    bar_arrive(TURN + (C + 1) % GROUPS, 256)
    bar_arrive(EMPTY_K + slot, THREADS)
    await_slot(v_full, number, STAGES)
    bar_arrive(EMPTY_V + slot, THREADS)
    return number + 1


@gluon.jit
def _rows(
    memory, call, where, here, number, done, turn,
    C: gl.constexpr, F: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, GROUPS: gl.constexpr, ALIAS: gl.constexpr,
    BUFFER: gl.constexpr,
):  # fmt: skip
    """o and lse of this group's rows of a tile; where the next tile is."""
    o_desc, q_smem, k_smem, v_smem, o_smem, work_smem = memory[0]
    q_full, k_full, v_full, work_full = memory[1]
    lse, sinks, order, turns, grid, numbers, o_rows, mask = call
    tile, head, b, q_0 = where
    THREADS: gl.constexpr = GROUPS * 128 + 32
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16])
    u_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.E, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, u_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    # of a group whose rows see no more than half of their last tile of keys
    HALF: gl.constexpr = F.half and C % 2 == 0
    SEEN: gl.constexpr = TILE_N // 2 if HALF else TILE_N
    first_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SEEN, 16])
    WIDTH: gl.constexpr = F.E
    dtype: gl.constexpr = o_desc.dtype
    l_layout: gl.constexpr = part_sums(gl.zeros([ROWS, TILE_N], gl.float32, s_layout)).type.layout
    c2 = numbers[0]
    # ---- tiles [first, last), of which this group sees [mine, top), all of [low, high)
    alive = alive_of(here, mask, F, TILE_N)
    lo, hi, c_lo, c_hi = span_of(tile * TILE_M, here, mask, F, TILE_M)
    first, last = tiles_of_keys(lo, hi, alive, TILE_N)
    row = tile * TILE_M + C * ROWS
    lo, hi, c_lo, c_hi = span_of(row, here, mask, F, ROWS)
    mine, top = tiles_of_keys(lo, hi, alive, TILE_N)
    top = gl.maximum(gl.minimum(top, last), first + 1)
    mine = gl.maximum(gl.minimum(mine, top - 1), first)
    bounds = (lo, hi)
    high = top - 1
    low = gl.minimum(gl.maximum(gl.cdiv(c_lo - alive[2], TILE_N), mine), high)
    if F.more:
        high = gl.maximum(gl.minimum((c_hi - alive[2]) // TILE_N, high), low)
    rows = row + gl.arange(0, ROWS, row_layout)
    for _other in range(last - top):
        number = _pass(number, k_full, v_full, C, STAGES, GROUPS)

    # ---- the last of them
    q_slot = done % Q_STAGES
    mbarrier.wait(q_full.index(q_slot * GROUPS + C), (done // Q_STAGES) & 1)
    q = q_smem.index(q_slot * GROUPS + C).reshape([ROWS, F.D])
    slot = await_slot(k_full, number, STAGES)
    bar_sync(TURN + C, 256)
    k = k_smem.index(slot).reshape([TILE_N, F.D])
    if HALF:
        k = k.slice(0, SEEN)
    zeros = gl.zeros([ROWS, SEEN], gl.float32, first_layout)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    bar_arrive(TURN + (C + 1) % GROUPS, 256)
    s = warpgroup_mma_wait(0, deps=(s,))
    bar_arrive(EMPTY_K + slot, THREADS)
    first_rows = gl.convert_layout(rows, gl.SliceLayout(1, first_layout), assert_trivial=True)
    s = scored(s, top - 1, first_rows, bounds, alive, here, numbers, mask, F, TILE_N, F.hidden)
    largest = row_max(s)
    shift = gl.convert_layout(largest, first_rows.type.layout, assert_trivial=True) * c2
    if F.hidden:
        shift = gl.where(shift == -INF, 0.0, shift)
    p = gl.exp2(s * c2 - shift[:, None])
    ref = gl.convert_layout(largest, row_layout, assert_trivial=True)
    l = gl.convert_layout(part_sums(p), l_layout, assert_trivial=True)
    weights = p.to(dtype)
    if HALF:
        weights = with_nothing(weights)
    weights = gl.convert_layout(weights, p_layout, assert_trivial=True)
    u = gl.zeros([ROWS, WIDTH], gl.float32, u_layout)

    # ---- the others: hidden keys at the high end, none, hidden keys at the low end
    if F.more:
        for back in range(top - 1 - high):
            u, ref, l, weights, number = _turn(
                (u, ref, l, weights, number), top - 2 - back, q, k_smem, v_smem, k_full,
                v_full, rows, bounds, alive, here, numbers, mask,
                C, F, TILE_N, STAGES, GROUPS, BUFFER, True,
            )  # fmt: skip
    for back in range(high - low):
        u, ref, l, weights, number = _turn(
            (u, ref, l, weights, number), high - 1 - back, q, k_smem, v_smem, k_full,
            v_full, rows, bounds, alive, here, numbers, mask,
            C, F, TILE_N, STAGES, GROUPS, BUFFER, False,
        )  # fmt: skip
    if F.mask.low:
        for back in range(low - mine):
            u, ref, l, weights, number = _turn(
                (u, ref, l, weights, number), low - 1 - back, q, k_smem, v_smem, k_full,
                v_full, rows, bounds, alive, here, numbers, mask,
                C, F, TILE_N, STAGES, GROUPS, BUFFER, True,
            )  # fmt: skip

    # ---- the values of the first tile
    if not ALIAS:
        bar_arrive(empty_q(q_slot), THREADS)
    slot = await_slot(v_full, number, STAGES)
    v = v_smem.index(slot).reshape([TILE_N, F.E])
    if F.packed:
        count = alive[1] - alive[2]
        if count < TILE_N:  # the next sequence's keys follow
            cleared(v, count)
    u = warpgroup_mma(weights, v, u, is_async=True)
    if not F.packed:
        coming = work_of(turn + 1, turns, order, grid)
    total = gl.convert_layout(gl.sum(l, 1), row_layout, assert_trivial=True)
    u = warpgroup_mma_wait(0, deps=(u,))
    bar_arrive(EMPTY_V + slot, THREADS)
    number += 1
    for _other in range(mine - first):
        number = _pass(number, k_full, v_full, C, STAGES, GROUPS)
    if F.packed:  # not before the last tile has gone by: until then who loads waits for that
        coming = taken(work_smem, work_full, done + 1, GROUPS)

    # ---- o and lse
    i = rows // F.group
    h = head * F.group + rows % F.group
    largest = ref * c2 * LN2
    if F.sinks:
        sink = gl.load(sinks[0] + b * sinks[1] + h * sinks[2]).to(gl.float32)
        new = gl.maximum(largest, sink)
        safe = gl.where(new == -INF, 0.0, new)
        alpha = gl.exp2((largest - safe) * LOG2E)
        total = total * alpha + gl.exp2((sink - safe) * LOG2E)
        share = gl.where(total > 0, alpha / total, 0.0)
        largest = new
    else:
        share = gl.where(total > 0, 1.0 / total, 0.0)
    share = gl.convert_layout(share, gl.SliceLayout(1, u_layout), assert_trivial=True)
    out = (u * share[:, None]).to(dtype)
    lse_at = lse[0] + b * lse[1] + h * lse[2] + q_0 + i
    gl.store(lse_at, largest + gl.log(total), mask=i < here[0])
    tma.store_wait(0)
    group_barrier()
    o_tile = q_smem.index(q_slot * GROUPS + C) if ALIAS else o_smem.index(C)
    o_tile.reshape([ROWS, WIDTH]).store(out)
    fence_async_shared()
    if F.packed:
        if row + ROWS <= here[0] * F.group:
            store_tile(o_desc, [0, q_0 + row // F.group, head * F.group, 0], o_tile)
        else:  # TMA would write over the next sequence's rows
            store_rows(out, i, h, q_0, here[0], o_rows)
    else:
        store_tile(o_desc, [b, row // F.group, head * F.group, 0], o_tile)
    if ALIAS:
        tma.store_wait(0)
        bar_arrive(empty_q(q_slot), THREADS)
    return number, coming


@gluon.jit
def _compute(
    work,
    C: gl.constexpr, F: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, GROUPS: gl.constexpr, ALIAS: gl.constexpr,
    BUFFER: gl.constexpr,
):  # fmt: skip
    memory, call = work[0], work[1]
    sizes, lengths = work[2]
    order, turns, grid = call[2], call[3], call[4]
    THREADS: gl.constexpr = GROUPS * 128 + 32
    number = 0
    done = 0
    for tile_of_q in gl.static_range(Q_STAGES):
        bar_arrive(empty_q(tile_of_q), THREADS)
    all_empty(EMPTY_K, STAGES, THREADS)
    all_empty(EMPTY_V, STAGES, THREADS)
    if C == GROUPS - 1:
        bar_arrive(TURN + 0, 256)
    if F.packed:
        all_handed_over(GROUPS)
        tile, head, b, q_0, _, m, n = taken(memory[0][5], memory[1][3], 0, GROUPS)
        while tile >= 0:
            where = (tile, head, b, q_0)
            number, coming = _rows(
                memory, call, where, (m, n, n), number, done, 0,
                C, F, TILE_M, TILE_N, STAGES, Q_STAGES, GROUPS, ALIAS, BUFFER,
            )  # fmt: skip
            tile, head, b, q_0, _, m, n = coming
            done += 1
    else:
        tile, head, b = work_of(0, turns, order, grid)
        for turn in range(turns):
            if tile >= 0:
                here = sizes_of(b, sizes, lengths, F)
                number, coming = _rows(
                    memory, call, (tile, head, b, 0), here, number, done, turn,
                    C, F, TILE_M, TILE_N, STAGES, Q_STAGES, GROUPS, ALIAS, BUFFER,
                )  # fmt: skip
                tile, head, b = coming
                done += 1
    tma.store_wait(0)


@gluon.jit
def attend(
    q_desc, k_desc, v_desc, o_desc, lse, sinks, lengths, order, turns, grid, sizes, numbers, packed,
    o_rows, mask,
    F: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr, ALIAS: gl.constexpr,
    BUFFER: gl.constexpr,
):  # fmt: skip
    """q_desc, k_desc, v_desc, o_desc: (entry, row, head, width); those of q and o load rows and
    heads whose product is ROWS. lse, sinks: (pointer, stride of entry, of head). order: (pointer,)
    to numbers of tiles, [turns, programs]. grid: (tiles of rows, heads that do not share them, all
    tiles, whether `order` is to be read). sizes: (m, n, such heads of a key head). lengths:
    (pointer, stride of entry). numbers: (c2, softcap, factor of its exponential). packed, o_rows:
    see packed.py."""
    q_smem = tiles_for(q_desc, Q_STAGES * GROUPS)
    o_smem = q_smem if ALIAS else tiles_for(o_desc, GROUPS)  # o takes the place of q
    k_smem = tiles_for(k_desc, STAGES)
    v_smem = tiles_for(v_desc, STAGES)
    q_full = full_signals(Q_STAGES * GROUPS)
    k_full = full_signals(STAGES)
    v_full = full_signals(STAGES)
    work_smem = room_for_work()
    work_full = full_signals(2)
    inputs = (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, v_full)
    loads = (
        (inputs, work_smem, work_full),
        (order[0], turns, grid, sizes, lengths, packed, mask),
    )
    signals = (q_full, k_full, v_full, work_full)
    memory = ((o_desc, q_smem, k_smem, v_smem, o_smem, work_smem), signals)
    call = (lse, sinks, order[0], turns, grid, numbers, o_rows, mask)
    work = (memory, call, (sizes, lengths))
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (work, 0, F, TILE_M, TILE_N, STAGES, Q_STAGES, GROUPS, ALIAS, BUFFER)),
                (_compute, (work, 1, F, TILE_M, TILE_N, STAGES, Q_STAGES, GROUPS, ALIAS, BUFFER)),
                (load_all, (loads, F, TILE_M, TILE_N, STAGES, Q_STAGES, GROUPS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (work, 0, F, TILE_M, TILE_N, STAGES, Q_STAGES, GROUPS, ALIAS, BUFFER)),
                (_compute, (work, 1, F, TILE_M, TILE_N, STAGES, Q_STAGES, GROUPS, ALIAS, BUFFER)),
                (_compute, (work, 2, F, TILE_M, TILE_N, STAGES, Q_STAGES, GROUPS, ALIAS, BUFFER)),
                (load_all, (loads, F, TILE_M, TILE_N, STAGES, Q_STAGES, GROUPS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
