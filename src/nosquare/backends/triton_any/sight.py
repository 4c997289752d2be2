"""Which tiles of a row of tiles have a visible pair, where a mask's arrays alone know it.

A program owns some queries or keys and goes through tiles of the others. Both lie across one
another as the program has them: what it owns down, the tiles across. `own` and the head h are
shaped so; bounds = (lo, hi, m, n), of which queries below m and keys in [lo, hi) exist.
"""

import triton
import triton.language as tl

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
    first, last, own, b, h, bounds, mask,
    F: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """narrowed(), by COUNT tiles at a time."""
    SIDE: tl.constexpr = TILE * COUNT
    # both sides of & are run, whatever the left one says
    while (first + COUNT <= last) & ~some(
        visible(tl.maximum(last - COUNT, 0) * TILE, own, b, h, bounds, mask, F, SIDE, KEYS)
    ):
        last -= COUNT
    while (first + COUNT <= last) & ~some(
        visible(first * TILE, own, b, h, bounds, mask, F, SIDE, KEYS)
    ):
        first += COUNT
    return first, last


@triton.jit
def narrowed(
    first, last, own, b, h, bounds, mask, F: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr
):
    """The tiles [first, last) without those at both ends that have nothing to see, as in padding
    or other documents. Before a program loads what it owns: the registers are then still free."""
    COUNT: tl.constexpr = AT_A_LOOK // (own.numel * TILE)
    if COUNT > 1:
        first, last = _narrowed(first, last, own, b, h, bounds, mask, F, TILE, KEYS, COUNT)
    return _narrowed(first, last, own, b, h, bounds, mask, F, TILE, KEYS, 1)
