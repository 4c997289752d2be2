"""Backward on Hopper: dk and dv of a tile of keys stay in registers while its queries go by.

    s = k q'    p = exp2(s c2 - lse2)    dv += p do
    dp = v do'  ds = p (dp - delta)      dk += ds q    dq += ds' k

Tiles are turned, keys down and queries across, so that p and ds go from the registers where they
arise into the next product. One warp loads by TMA; two groups of four warps have 64 keys each. A
group writes its ds to shared memory too, for dq, of which each group computes one half, over all
keys; a second warp adds it to sums in memory (grad_adding.py). They do so one tile late, so that
no group waits for ds of the other.

    queries   origin .. first .. | hidden at low | nothing hidden | hidden at high | .. last .. m

Heads that share a key head come one after the other: dk and dv of the group arise in registers.
Rows beyond m are read as 0, and add nothing.
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

from .grad_adding import ADDING, FULL_DQ, add_all
from .grad_places import WHO_COMPUTES, WHO_LOADS, key_tile, place_of, queries_of
from .pipe import await_slot, full_signals, tiles_for
from .places import sizes_of
from .shim import (
    bar_arrive,
    bar_sync,
    group_barrier,
    load_tile,
    one_by_one,
    store_tile,
    unknown,
)

ROWS = gl.constexpr(64)  # of keys that a warp group has
BOTH = gl.constexpr(256)  # threads of the groups
ALL = gl.constexpr(288)  # and of who loads
# Numbers of named barriers: see pipe.py.
SLOPES = gl.constexpr(5)  # 5 to 8: ds of the other group is there; by parity of the tile, reader
EMPTY_Q = gl.constexpr(9)  # 9, 10: a slot each
EMPTY_DO = gl.constexpr(11)  # 11, 12
DONE = gl.constexpr(13)


@gluon.jit
def _load(
    inputs, where, seen, group,
    F: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """q and do of the tiles of queries, with the facts of their rows."""
    q_desc, do_desc, ref_desc, delta_desc, q_smem, do_smem, ref_smem, delta_smem = inputs[0]
    q_full, do_full = inputs[1]
    hk, b, heads, origin, shift = where
    first, last = seen
    WIDE: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    Q_BYTES: gl.constexpr = TILE_M * (F.D * WIDE + 4)
    DO_BYTES: gl.constexpr = TILE_M * (F.E * WIDE + 4)
    number = 0
    for g in range(group):
        h = hk * group + g
        for x in range(first, last):
            row = origin + place_of(x, first, last, F) * TILE_M
            slot = number % STAGES
            bar_sync(EMPTY_Q + slot, ALL)
            mbarrier.expect(q_full.index(slot), Q_BYTES)
            at = [b * heads + h, row + shift]
            load_tile(ref_desc, at, q_full.index(slot), ref_smem.index(slot))
            load_tile(q_desc, [b, row, h, 0], q_full.index(slot), q_smem.index(slot))
            bar_sync(EMPTY_DO + slot, ALL)
            mbarrier.expect(do_full.index(slot), DO_BYTES)
            load_tile(delta_desc, at, do_full.index(slot), delta_smem.index(slot))
            load_tile(do_desc, [b, row, h, 0], do_full.index(slot), do_smem.index(slot))
            number += 1


@gluon.jit
def _load_all(
    loads, F: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """k and v of the program's keys, then what _load() brings."""
    k_desc, v_desc, k_smem, v_smem, keys_full = loads[0]
    grid, sizes, lengths, mask = loads[2]
    tile, hk, b = key_tile(grid)
    WIDE: gl.constexpr = k_desc.dtype.primitive_bitwidth // 8
    mbarrier.expect(keys_full.index(0), 2 * ROWS * (F.D + F.E) * WIDE)
    for c in gl.static_range(2):
        at = [b, (2 * tile + c) * ROWS, hk, 0]
        load_tile(k_desc, at, keys_full.index(0), k_smem.index(c))
        load_tile(v_desc, at, keys_full.index(0), v_smem.index(c))
    here = sizes_of(b, sizes, lengths, F)
    first, _, _, last = queries_of(
        tile * 2 * ROWS, here, sizes[3], mask, F, TILE_M, 2 * ROWS, AT_ONCE, WHO_LOADS
    )
    where = (hk, b, sizes[4], sizes[3], sizes[5])
    _load(loads[1], where, (first, last), sizes[2], F, TILE_M, STAGES)


@gluon.jit
def _half(ds, C: gl.constexpr, TILE_M: gl.constexpr):
    """Of ds (keys, queries) in shared memory, turned, the queries of a group's half of dq."""
    turned = ds.permute((1, 0))
    if TILE_M == 2 * ROWS:
        turned = turned.slice(C * ROWS, ROWS, dim=0)
    return turned


@gluon.jit
def _columns(k, C: gl.constexpr, TILE_M: gl.constexpr, F: gl.constexpr):
    """Of k (keys, width), the columns of a group's half of dq."""
    k = k.reshape([ROWS, F.D])
    if TILE_M == ROWS:
        k = k.slice(C * (F.D // 2), F.D // 2, dim=1)
    return k


@gluon.jit
def _queries_sum(ds_smem, k_smem, buffer, C: gl.constexpr, F: gl.constexpr, TILE_M: gl.constexpr):
    """Begin this group's half of dq = ds' k, of the tile whose ds is in a buffer."""
    WIDTH: gl.constexpr = F.D // 2 if TILE_M == ROWS else F.D
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    near, far = ds_smem.index(buffer * 2), ds_smem.index(buffer * 2 + 1)
    first = unknown(0)
    keys, others = k_smem.index(first), k_smem.index(first + 1)
    dq = warpgroup_mma(
        _half(near, C, TILE_M), _columns(keys, C, TILE_M, F), zeros, use_acc=False, is_async=True
    )
    return warpgroup_mma(_half(far, C, TILE_M), _columns(others, C, TILE_M, F), dq, is_async=True)


@gluon.jit
def _hand_over(dq, dq_smem, C: gl.constexpr):
    """Give this group's half of dq to who adds it up (grad_adding.py), where there is room."""
    dq_smem.index(C).reshape(dq.shape).store(dq)
    fence_async_shared()
    bar_arrive(FULL_DQ + C, ADDING)


@gluon.jit
def _tile(
    state, row, memory, signals, here, keys, numbers, mask,
    C: gl.constexpr, F: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """One more tile of queries, and dq of the one before.

    state: dk, dv, its number. row: its first. keys: (the first of this group, those before which
    and from which on none is seen)."""
    dk, dv, number = state
    q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, ref_smem, delta_smem = memory
    q_full, do_full, free = signals
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    k_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    v_layout: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = q_smem.dtype
    c2, cap, factor = numbers
    zeros = gl.zeros([ROWS, TILE_M], gl.float32, s_layout)
    own = unknown(C)
    k = k_smem.index(own).reshape([ROWS, F.D])
    v = v_smem.index(own).reshape([ROWS, F.E])
    slot = await_slot(q_full, number, STAGES)
    q = q_smem.index(slot).reshape([TILE_M, F.D])
    s_next = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    await_slot(do_full, number, STAGES)
    do = do_smem.index(slot).reshape([TILE_M, F.E])
    dp_next = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_next,))
    ref = ref_smem.index(slot).reshape([TILE_M]).load(columns)
    if F.softcap:  # cap tanh(x), and what its slope takes off
        tanh = 1.0 - 2.0 / (1.0 + gl.exp2(s * factor))
        p = gl.exp2(tanh * (cap * c2) + ref[None, :])
    else:
        p = gl.exp2(s * c2 + ref[None, :])
    if MASKED:
        first, lo, hi = keys
        j = one_by_one(first + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout)))[:, None]
        i = (row + gl.arange(0, TILE_M, columns))[None, :]
        seen = F.mask.keep(mask, 0, 0, i, j, here[0], here[1]) & (j >= lo) & (j < hi)
        p = gl.where(seen, p, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp_next,))
    delta = delta_smem.index(slot).reshape([TILE_M]).load(columns)
    slopes = p * (dp - delta[None, :])
    if F.softcap:
        slopes = slopes * (1.0 - tanh * tanh)
    if MASKED:  # what is hidden may have met a value that is not finite
        slopes = gl.where(seen, slopes, 0.0)
    ds = slopes.to(dtype)
    # The other group said that its ds of the tile before is there once it had read that of two
    # tiles before: its room is free.
    buffer = number & 1
    bar_sync(SLOPES + 2 * (1 - buffer) + C, BOTH)
    ds_smem.index(buffer * 2 + C).store(ds)
    fence_async_shared()
    turned = gl.convert_layout(ds, k_layout, assert_trivial=True)
    dq_next = _queries_sum(ds_smem, k_smem, 1 - buffer, C, F, TILE_M)
    mbarrier.wait(free.index(C), buffer ^ 1)
    weights = gl.convert_layout(p.to(dtype), v_layout, assert_trivial=True)
    dv_next = warpgroup_mma(weights, do, dv, is_async=True)
    dk_next = warpgroup_mma(turned, q, dk, is_async=True)
    dq = warpgroup_mma_wait(2, deps=(dq_next,))
    bar_arrive(SLOPES + 2 * buffer + (1 - C), BOTH)
    _hand_over(dq, dq_smem, C)
    dv = warpgroup_mma_wait(1, deps=(dv_next,))
    bar_arrive(EMPTY_DO + slot, ALL)
    dk = warpgroup_mma_wait(0, deps=(dk_next,))
    bar_arrive(EMPTY_Q + slot, ALL)
    return dk, dv, number + 1


@gluon.jit
def _only(tile, first, lo, hi):
    """Write 0 over the rows of a tile of keys or values outside [lo, hi): nobody sees them, and a
    slope of 0 does not hide what is not finite."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = tile.load(layout)
    j = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    tile.store(gl.where((j >= lo) & (j < hi), x, gl.zeros_like(x)))


@gluon.jit
def _compute(
    work,
    C: gl.constexpr, F: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr,
    AT_ONCE: gl.constexpr,
):  # fmt: skip
    memory, signals, keys_full = work[0]
    dk_desc, dv_desc = work[1]
    grid, sizes, lengths, numbers, mask, scale = work[2]
    k_smem, v_smem, ds_smem, dq_smem = memory[1], memory[2], memory[4], memory[5]
    dtype: gl.constexpr = k_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    D: gl.constexpr = F.D
    E: gl.constexpr = F.E
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    for slot in gl.static_range(STAGES):
        bar_arrive(EMPTY_Q + slot, ALL)
        bar_arrive(EMPTY_DO + slot, ALL)
    tile, hk, b = key_tile(grid)
    here = sizes_of(b, sizes, lengths, F)
    group, origin = sizes[2], sizes[3]
    first, low, high, last = queries_of(
        tile * 2 * ROWS, here, origin, mask, F, TILE_M, 2 * ROWS, AT_ONCE, WHO_COMPUTES
    )
    mine = (2 * tile + C) * ROWS
    lo, hi = F.mask.span(mask, 0, here[0], here[0], here[1])
    hi = gl.minimum(hi, here[2])
    mbarrier.wait(keys_full.index(0), 0)
    if F.hidden:  # noqa: SIM102 (one is asked of the code, the other of the numbers)
        if (mine < lo) | (mine + ROWS > hi):
            _only(k_smem.index(C).reshape([ROWS, F.D]), mine, lo, hi)
            _only(v_smem.index(C).reshape([ROWS, F.E]), mine, lo, hi)
    # before the first tile comes one without slopes, so that no tile is a special case
    ds_smem.index(2 + C).store(gl.zeros([ROWS, TILE_M], dtype, s_layout))
    fence_async_shared()
    bar_arrive(SLOPES + 2 + (1 - C), BOTH)
    dk = gl.zeros([ROWS, D], gl.float32, k_layout)
    dv = gl.zeros([ROWS, E], gl.float32, v_layout)
    keys = (mine, lo, hi)
    number = 0
    if F.ordered:  # from the last on: see place_of()
        begin, end = (high, last), (first, low)
    else:
        begin, end = (first, low), (high, last)
    AT_BEGIN: gl.constexpr = F.mask.low if F.ordered else F.hidden
    AT_END: gl.constexpr = F.hidden if F.ordered else F.mask.low
    for _ in range(group):
        if AT_BEGIN:
            for x in range(begin[0], begin[1]):
                dk, dv, number = _tile(
                    (dk, dv, number), origin + place_of(x, begin[0], begin[1], F) * TILE_M,
                    memory, signals, here, keys, numbers, mask, C, F, TILE_M, STAGES, True,
                )  # fmt: skip
        for x in range(low, high):
            dk, dv, number = _tile(
                (dk, dv, number), origin + place_of(x, low, high, F) * TILE_M,
                memory, signals, here, keys, numbers, mask, C, F, TILE_M, STAGES, False,
            )  # fmt: skip
        if AT_END:
            for x in range(end[0], end[1]):
                dk, dv, number = _tile(
                    (dk, dv, number), origin + place_of(x, end[0], end[1], F) * TILE_M,
                    memory, signals, here, keys, numbers, mask, C, F, TILE_M, STAGES, True,
                )  # fmt: skip
    before = (number & 1) ^ 1
    bar_sync(SLOPES + 2 * before + C, BOTH)
    mbarrier.wait(signals[2].index(C), before)
    dq_next = _queries_sum(ds_smem, k_smem, before, C, F, TILE_M)
    dq = warpgroup_mma_wait(0, deps=(dq_next,))
    _hand_over(dq, dq_smem, C)
    bar_sync(DONE, BOTH)  # the other group has read this one's keys
    k_smem.index(C).reshape([ROWS, F.D]).store((dk * scale).to(dtype))
    v_smem.index(C).reshape([ROWS, F.E]).store(dv.to(dtype))
    fence_async_shared()
    group_barrier()
    store_tile(dk_desc, [b, mine, hk, 0], k_smem.index(C))
    store_tile(dv_desc, [b, mine, hk, 0], v_smem.index(C))
    tma.store_wait(0)


@gluon.jit
def gradients(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_desc, ref_desc, delta_desc,
    lengths, turns, grid, sizes, numbers, scale, mask,
    F: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    AT_ONCE: gl.constexpr,
):  # fmt: skip
    """q_desc to dv_desc: (entry, row, head, width). dq_desc: sums, float32 (entry and head, row,
    width). ref_desc, delta_desc: (entry and head, row), see grad_rows.py. lengths: (pointer, stride
    of entry). turns: (pointer, room for a head), a number for each tile of queries, 0 to begin
    with. grid: see key_tile(). sizes: (m, n, heads of a key head, the first row that sees a key,
    heads, places of the facts before the first). numbers: (c2, softcap, factor of its exponential).
    AT_ONCE: see queries_of()."""
    q_smem = tiles_for(q_desc, STAGES)
    do_smem = tiles_for(do_desc, STAGES)
    ref_smem = tiles_for(ref_desc, STAGES)
    delta_smem = tiles_for(delta_desc, STAGES)
    k_smem = tiles_for(k_desc, 2)
    v_smem = tiles_for(v_desc, 2)
    dq_smem = tiles_for(dq_desc, 2)
    dtype: gl.constexpr = q_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILE_M], dtype)
    ds_smem = gl.allocate_shared_memory(dtype, [4, ROWS, TILE_M], ds_layout)
    q_full = full_signals(STAGES)
    do_full = full_signals(STAGES)
    keys_full = full_signals(1)
    dq_free = full_signals(2)
    loads = (
        (k_desc, v_desc, k_smem, v_smem, keys_full),
        (
            (q_desc, do_desc, ref_desc, delta_desc, q_smem, do_smem, ref_smem, delta_smem),
            (q_full, do_full),
        ),
        (grid, sizes, lengths, mask),
    )
    memory = (q_smem, k_smem, v_smem, do_smem, ds_smem, dq_smem, ref_smem, delta_smem)
    work = (
        (memory, (q_full, do_full, dq_free), keys_full),
        (dk_desc, dv_desc),
        (grid, sizes, lengths, numbers, mask, scale),
    )
    adds = ((dq_desc, dq_smem, dq_free), (turns, grid, sizes, lengths, mask))
    gl.warp_specialize(
        [
            (_compute, (work, 0, F, TILE_M, STAGES, AT_ONCE)),
            (_compute, (work, 1, F, TILE_M, STAGES, AT_ONCE)),
            (_load_all, (loads, F, TILE_M, STAGES, AT_ONCE)),
            (add_all, (adds, F, TILE_M, AT_ONCE)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )
