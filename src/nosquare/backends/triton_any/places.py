"""Where a program works: which tile of which head of which batch entry, or packed sequence.

The grid has one axis, so that it may be long; tiles of one head are neighbours, and so share keys
in the caches, the last tile first: under a causal mask it has the most to do.

In a packed problem nobody on the host knows the lengths. Sequence b begins at program
cu[b] // TILE + b, which leaves each sequence room for its tiles; what is beyond them does nothing.
The tokens after the last sequence are one more, without keys.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(program, tiles, heads):
    """(tile, head, entry) of a program of a grid of tiles * heads * entries."""
    tile = tiles - 1 - program % tiles
    head = (program // tiles) % heads
    return tile, head, program // tiles // heads


@triton.jit
def _offset(cu, b, total):
    """cu[b], kept within the tokens there are whatever it holds."""
    return tl.minimum(tl.maximum(tl.load(cu + b), 0), total).to(tl.int32)


@triton.jit
def sequence_of(slot, cu, entries, total, TILE: tl.constexpr):
    """(b, tile) of slot `slot` of a packed axis with offsets cu: the tile may lie beyond it; b =
    entries for the tokens that no sequence owns."""
    low = 0
    high = entries
    while low < high:  # the last b that begins at or before the slot
        middle = (low + high + 1) // 2
        if _offset(cu, middle, total) // TILE + middle <= slot:
            low = middle
        else:
            high = middle - 1
    return low, slot - (_offset(cu, low, total) // TILE + low)


@triton.jit
def tokens_of(cu, b, entries, total, REST: tl.constexpr):
    """(first token, how many) of sequence b; of b = entries those that are left over, if REST."""
    first = _offset(cu, b, total)
    last = total if REST else first
    if b < entries:
        last = _offset(cu, b + 1, total)
    return first, tl.maximum(last - first, 0)
