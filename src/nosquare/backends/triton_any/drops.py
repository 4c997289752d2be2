"""Dropout inside kernels: the bits of nosquare.dropout.

    key    = mix64(mix64(mix64(mix64(seed + W) + b W) + h W) + i W)     once a row
    x      = hash of (j >> 1) with the two halves of key                once for two neighbours
    kept   where (x << 16 where j is even, x where it is odd) >= level, as signed 32-bit integers

which is the comparison of 16 bits with threshold - 32768, both shifted up by 16. Neighbouring keys
share x; it is written for each of them, on (j >> 1), and the compiler sees that they are equal.

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
def kept(keys, drop, start, step, F: tl.constexpr):
    """Which of the keys start + step are kept by rows with these keys.

    start  first key of a tile, an even scalar; step: int32, from 0 on; broadcast with the keys
    """
    k0, k1 = keys
    first = start + drop[5]
    if F.odd:
        place = first + step
        x = (place >> 1).to(tl.uint32)
        even = (place & 1) == 0
    else:
        x = (first >> 1).to(tl.uint32) + (step >> 1).to(tl.uint32)
        even = (step & 1) == 0
    x ^= k0
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x ^= k1
    x *= 0x846CA68B
    x ^= x >> 16
    bits = tl.where(even, x << 16, x)
    return bits.to(tl.int32, bitcast=True) >= drop[1]
