"""Packed sequences: their lengths lie on the card, so who loads finds out what there is to do.

packed = (counter, cu_q, cu_k): programs claim slots one by one from a counter that begins at 0. A
head has total // TILE_M + entries + 1 slots: sequence b has those from cu_q[b] // TILE_M + b on,
which is room for its tiles, and the tokens after the last sequence are one more, without keys.
What has been claimed is handed over in shared memory, as (tile, head, b, q_0, k_0, m, n): the first
tokens of the sequence, and how many there are of each kind; tile < 0: nothing is left.

sizes = (tokens of q, tokens of k, heads of a key head, sequences) here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .pipe import await_slot
from .shim import arrived_with, bar_arrive, bar_sync, claimed, group_barrier

FIELDS = gl.constexpr(8)
AT_ONCE = gl.constexpr(256)  # sequences whose offsets are read together
HANDED = gl.constexpr(11)  # 11 and 14: named barriers that rings of two slots leave free
WHO_LOADS = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))
WHO_COMPUTES = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))


# ---- who loads ----


@gluon.jit
def _within(offset, total):
    """An offset, kept within the tokens there are whatever it is."""
    return gl.minimum(gl.maximum(offset, 0), total).to(gl.int32)


@gluon.jit
def _sequence_of(slot, cu, total, count, TILE_M: gl.constexpr):
    """The last sequence that begins at or before a slot; `count` for the tokens after the last."""
    found = 0
    for start in range(0, count + 1, AT_ONCE):
        b = start + gl.arange(0, AT_ONCE, WHO_LOADS)
        begin = _within(gl.load(cu + b, mask=b <= count, other=0), total)
        before = (begin // TILE_M + b <= slot) & (b <= count)
        found += gl.sum(before.to(gl.int32), 0)
    return found - 1


@gluon.jit
def _tokens_of(cu, b, total, count, REST: gl.constexpr):
    """(first token, how many) of sequence b; of b = count those that are left over, if REST."""
    first = _within(gl.load(cu + b), total)
    last = _within(gl.load(cu + gl.minimum(b + 1, count)), total)
    if REST:
        last = gl.where(b < count, last, total)
    return first, gl.maximum(last - first, 0)


@gluon.jit
def next_packed(packed, grid, sizes, TILE_M: gl.constexpr):
    """The next tile that nobody has claimed, as it is handed over."""
    counter, cu_q, cu_k = packed
    slots, all_slots = grid[0], grid[2]
    total_q, total_k, count = sizes[0], sizes[1], sizes[3]
    number = claimed(counter)
    tile = number * 0 - 1
    head = number * 0
    b, q_0, k_0, m, n = head + 0, head + 0, head + 0, head + 0, head + 0
    while (tile < 0) & (number < all_slots):
        head = number // slots
        slot = number % slots
        b = _sequence_of(slot, cu_q, total_q, count, TILE_M)
        q_0, m = _tokens_of(cu_q, b, total_q, count, True)
        k_0, n = _tokens_of(cu_k, b, total_k, count, False)
        # the last rows first: under a causal mask they have the most to do
        tile = gl.cdiv(m, TILE_M) - 1 - (slot - q_0 // TILE_M - b)
        if tile < 0:
            number = claimed(counter)
    return tile, head, b, q_0, k_0, m, n


@gluon.jit
def room_for_work():
    """Room for what is handed over, and what is next."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [2, FIELDS], layout)


@gluon.jit
def hand_over(work, work_smem, work_full, number, GROUPS: gl.constexpr):
    """Give all groups their work, once they have taken what was there before."""
    tile, head, b, q_0, k_0, m, n = work
    slot = number % 2
    bar_sync(HANDED + 3 * slot, GROUPS * 128 + 32)
    field = gl.arange(0, FIELDS, WHO_LOADS)
    x = gl.where(field == 0, tile, gl.where(field == 1, head, gl.where(field == 2, b, q_0)))
    y = gl.where(field == 4, k_0, gl.where(field == 5, m, n))
    work_smem.index(slot).store(gl.where(field < 4, x, y))
    mbarrier.arrive(work_full.index(slot), count=1)


# ---- who computes ----


@gluon.jit
def all_handed_over(GROUPS: gl.constexpr):
    """Say that there is room for work: how it begins."""
    bar_arrive(HANDED + 0, GROUPS * 128 + 32)
    bar_arrive(HANDED + 3, GROUPS * 128 + 32)


@gluon.jit
def _field(x, NUMBER: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, FIELDS, WHO_COMPUTES) == NUMBER, x, 0), 0)


@gluon.jit
def taken(work_smem, work_full, number, GROUPS: gl.constexpr):
    """Work `number` of those handed over: (tile, head, b, q_0, k_0, m, n)."""
    slot = await_slot(work_full, number, 2)
    x = work_smem.index(slot).load(WHO_COMPUTES)
    tile = arrived_with(HANDED + 3 * slot, _field(x, 0), GROUPS * 128 + 32)
    return (
        tile, _field(x, 1), _field(x, 2), _field(x, 3), _field(x, 4), _field(x, 5), _field(x, 6)
    )  # fmt: skip


@gluon.jit
def cleared(v, count):
    """Write 0 over all rows of a tile of values from `count` on, which are another sequence's."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = v.load(layout)
    row = gl.arange(0, v.shape[0], gl.SliceLayout(1, layout))
    v.store(gl.where(row[:, None] < count, x, gl.zeros_like(x)))
    fence_async_shared()
    group_barrier()


@gluon.jit
def store_rows(out, i, h, q_0, m, o_rows):
    """Store the rows of a tile that exist. o_rows: (pointer, stride of row and head, width)."""
    layout: gl.constexpr = out.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    i = gl.convert_layout(i, rows, assert_trivial=True)
    h = gl.convert_layout(h, rows, assert_trivial=True)
    e = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))[None, :]
    at = o_rows[0] + ((q_0 + i) * o_rows[1] + h * o_rows[2])[:, None] + e
    gl.store(at, out, mask=(i < m)[:, None] & (e < o_rows[3]))
