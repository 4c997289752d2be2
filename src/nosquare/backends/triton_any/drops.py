"""Dropout inside kernels: the bits of nosquare.dropout.

    key    = mix64(mix64(mix64(mix64(seed + W) + b W) + h W) + i W)     once a row
    x      = hash of (j >> 1) with the two halves of key                once for two neighbours
    kept   where (x << 16 where j is even, x where it is odd) >= level, as signed 32-bit integers

which is the comparison of 16 bits with threshold - 32768, both shifted up by 16. Neighbouring keys
share x: a tile that has keys across makes one for two columns (kept_across), and one that has them
down is put in an order in which the compiler sees it (down).

drop = (seed, level, offsets of b, h, i, j)
"""

import triton
import triton.language as tl


@triton.jit
def _mix64(x):
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_keys(drop, b, h, i, F: tl.constexpr):
    """Two uint32 keys for each row, of the shapes of b, h and i (int32) broadcast together."""
    W: tl.constexpr = 0x9E3779B97F4A7C15
    seed = tl.load(drop[0]) if F.seed_ptr else drop[0]
    key = _mix64(seed.to(tl.uint64) + W)
    key = _mix64(key + (b + drop[2]).to(tl.uint64) * W)
    key = _mix64(key + (h + drop[3]).to(tl.uint64) * W)
    key = _mix64(key + (i + drop[4]).to(tl.uint64) * W)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _hashed(x, keys):
    k0, k1 = keys
    x ^= k0
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x ^= k1
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(keys, drop, start, step, F: tl.constexpr):
    """Which of the keys start + step are kept by rows with these keys.

    start  first key of a tile, an even scalar; step: int32, from 0 on; broadcast with the keys
    """
    first = start + drop[5]
    if F.odd:
        place = first + step
        x = (place >> 1).to(tl.uint32)
        even = (place & 1) == 0
    else:
        x = (first >> 1).to(tl.uint32) + (step >> 1).to(tl.uint32)
        even = (step & 1) == 0
    x = _hashed(x, keys)
    return tl.where(even, x << 16, x).to(tl.int32, bitcast=True) >= drop[1]


@triton.jit
def kept_across(keys, drop, start, F: tl.constexpr, TILE: tl.constexpr):
    """Which of the keys [start, start + TILE) are kept, keys across: one hash for two of them."""
    if F.odd:
        stays = kept(keys, drop, start, tl.arange(0, TILE)[None, :], F)
    else:
        pair = tl.arange(0, TILE // 2)[None, :].to(tl.uint32)
        x = _hashed(((start + drop[5]) >> 1).to(tl.uint32) + pair, keys)
        stays = tl.interleave(x << 16, x).to(tl.int32, bitcast=True) >= drop[1]
    return stays


@triton.jit
def down(F: tl.constexpr, TILE: tl.constexpr):
    """The keys of a tile that has them down, row by row, from 0 on. Under dropout the two keys of a
    hash stand in rows r and r + 8, which a thread of the matrix units has both of: it hashes once.
    """
    row = tl.arange(0, TILE)
    if F.dropout:
        return (row & -16) | ((row & 7) << 1) | ((row >> 3) & 1)
    else:
        return row
