"""Rings of tiles in shared memory, between the warp that loads and the warp groups that compute.

A slot is full when its barrier in memory has counted the bytes that TMA brought, and empty when all
who compute have said so at its named barrier.

    who loads      wait for empty -> load, which fills
    who computes   wait for full -> products -> say empty

Both count the tiles they have passed: number n is in slot n % STAGES, for the (n // STAGES)th time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .shim import bar_arrive, bar_sync, load_tile

# Numbers of named barriers: a multiprocessor has 16, of which Triton takes the first.
TURN = gl.constexpr(6)  # 6, 7, 8: whose turn it is to multiply
EMPTY_K = gl.constexpr(9)  # 9, 10, and so on: a slot each
EMPTY_V = gl.constexpr(12)
EMPTY_Q = gl.constexpr(15)  # 15 and 5


@gluon.jit
def load(desc, at, tile, full, BYTES: gl.constexpr):
    """Begin to load a tile; `full` completes when all BYTES are there."""
    mbarrier.expect(full, BYTES)
    load_tile(desc, at, full, tile)


@gluon.jit
def load_slot(
    desc, at, ring, full, number, EMPTY: gl.constexpr, STAGES: gl.constexpr,
    THREADS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Tile `number` of a ring, once its slot is empty."""
    slot = number % STAGES
    bar_sync(EMPTY + slot, THREADS)
    load(desc, at, ring.index(slot), full.index(slot), BYTES)


@gluon.jit
def await_slot(full, number, STAGES: gl.constexpr):
    """Wait until tile `number` of a ring is there; its slot."""
    slot = number % STAGES
    mbarrier.wait(full.index(slot), (number // STAGES) & 1)
    return slot


@gluon.jit
def empty_q(slot):
    """The number of the barrier at which a slot of q is said to be empty."""
    return EMPTY_Q - 10 * slot


@gluon.jit
def all_empty(EMPTY: gl.constexpr, STAGES: gl.constexpr, THREADS: gl.constexpr):
    """Say of all slots of a ring that they are empty: how it begins."""
    for slot in gl.static_range(STAGES):
        bar_arrive(EMPTY + slot, THREADS)


@gluon.jit
def full_signals(COUNT: gl.constexpr):
    """Barriers in memory, one for each slot."""
    signals = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(COUNT):
        mbarrier.init(signals.index(slot), count=1)
    return signals


@gluon.jit
def tiles_for(desc, COUNT: gl.constexpr):
    """Room for so many tiles of a descriptor."""
    shape: gl.constexpr = [COUNT] + desc.block_shape  # noqa: RUF005 (Gluon has no unpacking)
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
