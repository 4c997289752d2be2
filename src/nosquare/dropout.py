"""Dropout that can be replayed: whether pair (b, h, i, j) is kept depends on (seed, b, h, i, j)
alone.

Semantics of record (every backend reproduces these bits):

    key    = mix64(mix64(mix64(mix64(seed + W) + b * W) + h * W) + i * W)     64 bits a row
    k0, k1 = low and high half of key
    x      = (j >> 1) ^ k0                                                     32 bits, wrapping
    x     ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x ^= k1;  x *= 0x846ca68b;  x ^= x >> 16
    bits   = low half of x if j is even, else its high half, as a signed 16-bit integer
    the pair is dropped when  bits < threshold - 32768,   threshold = round(p * 65536)

So the rate is threshold / 65536 exactly (within 2^-17 of p), and what is kept is scaled by
1 / (1 - that rate). One 32-bit hash serves two neighbouring keys. Both mixers are the published
finalisers of splitmix64 (Steele, Lea, Flood 2014) and of the hash-prospector search (lowbias32).
Tiles, backends, devices, strides, packing and sharding do not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from .errors import ArgumentError

LEVELS = 1 << 16
_W64 = 0x9E3779B97F4A7C15
_MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None))
_A32, _B32 = 0x7FEB352D, 0x846CA68B


def threshold(p: float) -> int:
    """Of 65536 equally likely values, how many drop the pair; 0 for p = 0, at most 65535."""
    return min(round(p * LEVELS), LEVELS - 1)


def realised_rate(p: float) -> float:
    """The exact drop rate that `p` is served with: threshold(p) / 65536."""
    return threshold(p) / LEVELS


@dataclass(frozen=True)
class Dropout:
    """Drop each weight with probability p, replayably.

    p        in [0, 1); served as realised_rate(p)
    seed     an int, or a 0-d int64 tensor (then new seeds need no recompilation)
    offsets  (b, h, i, j) added to the indices: where this shard begins in the whole problem

    Raises ArgumentError when p is outside [0, 1) or the seed or the offsets are not integers.
    """

    p: float
    seed: int | Tensor
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0)

    def __post_init__(self) -> None:
        if not (isinstance(self.p, float | Real) and 0.0 <= self.p < 1.0):
            raise ArgumentError(
                "Dropout needs a probability p with 0 <= p < 1.",
                {"p": self.p},
                "p=0.1, or no dropout at all; p = 1 would drop every weight.",
            )
        seed = self.seed
        good = (
            (seed.dim() == 0 and seed.dtype == torch.int64)
            if isinstance(seed, Tensor)
            else isinstance(seed, int)
            # a traced integer is not looked at: that would tie the graph to its value
            and (torch.compiler.is_compiling() or -(1 << 63) <= seed < 1 << 63)
        )
        if not good:
            raise ArgumentError(
                "The dropout seed is not an integer of 64 bits.",
                {"seed": repr(seed)},
                "seed=7, or a 0-d int64 tensor such as torch.tensor(7).",
            )
        object.__setattr__(self, "offsets", tuple(self.offsets))
        if len(self.offsets) != 4 or not all(isinstance(o, int | Integral) for o in self.offsets):
            raise ArgumentError(
                "Dropout offsets are four integers, one each for b, h, i and j.",
                {"offsets": self.offsets},
                "offsets=(0, 0, 4096, 0) for a shard whose first query is number 4096.",
            )

    def seed_tensor(self) -> Tensor:
        """The seed as a 0-d int64 tensor."""
        if isinstance(self.seed, Tensor):
            return self.seed
        # a third of the time of torch.tensor; tracers know only that one of an integer of theirs
        make = torch.tensor if torch.compiler.is_compiling() else torch.scalar_tensor
        return make(self.seed, dtype=torch.int64, device="cpu")


def keep_scalar(seed: int, b: int, h: int, i: int, j: int, p: float) -> bool:
    """The semantics of record in plain integers, one pair at a time; for tests and for reading."""
    m64, m32 = (1 << 64) - 1, (1 << 32) - 1

    def mix64(x: int) -> int:
        for shift, factor in _MIX64:
            x ^= x >> shift
            x = x * (factor or 1) & m64
        return x

    key = mix64((seed + _W64) & m64)
    for index in (b, h, i):
        key = mix64((key + index * _W64) & m64)
    x = ((j >> 1) ^ key) & m32
    x = (x ^ x >> 16) * _A32 & m32
    x = (x ^ x >> 15 ^ key >> 32) * _B32 & m32
    x ^= x >> 16
    bits = x >> 16 if j & 1 else x & 0xFFFF
    return _signed(bits, 16) >= threshold(p) - LEVELS // 2


def row_keys(seed: Tensor, b: Tensor, h: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys for each row; the shape is that of b, h and i (int64) broadcast together."""
    key = _mix64(seed + _signed(_W64, 64))
    for index in (b, h, i):
        key = _mix64(key + index * _signed(_W64, 64))
    return _low32(key), _low32(key >> 32)


def keep_tile(keys: tuple[Tensor, Tensor], j_lo: int, j_hi: int, p: float) -> Tensor:
    """Which keys j_lo <= j < j_hi the rows keep.

    keys  two int32 tensors of shape (...), from row_keys
    returns a bool tensor (..., j_hi - j_lo)
    """
    k0, k1 = (key.unsqueeze(-1) for key in keys)
    first = j_lo >> 1
    pair = torch.arange(first, (j_hi + 1) >> 1, dtype=torch.int64, device=k0.device)
    x = _low32(pair) ^ k0
    x.bitwise_xor_(x.bitwise_right_shift(16).bitwise_and_(0xFFFF)).mul_(_A32)
    x.bitwise_xor_(x.bitwise_right_shift(15).bitwise_and_(0x1FFFF)).bitwise_xor_(k1)
    x.mul_(_signed(_B32, 32))
    x.bitwise_xor_(x.bitwise_right_shift(16).bitwise_and_(0xFFFF))
    # little endian: the low half of each 32-bit word comes first, that of the even key
    # (flat, because the last stride of an array without elements need not be 1)
    bits = x.reshape(-1).view(torch.int16).reshape(*x.shape[:-1], 2 * x.shape[-1])
    bits = bits[..., j_lo - 2 * first :][..., : j_hi - j_lo]
    return bits >= threshold(p) - LEVELS // 2


def dropout_keep(
    seed: int | Tensor,
    b: int | Sequence[int] | Tensor,
    h: int | Sequence[int] | Tensor,
    rows: int | Sequence[int] | Tensor,
    cols: int | Sequence[int] | Tensor,
    p: float,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Any rectangle of the dropout mask, on any device: True where the weight is kept.

    seed        as in Dropout
    b, h        batch and head indices; an int drops its axis
    rows, cols  query and key indices: an int, a range, a list or a 1-d tensor
    returns     bool, one axis for each of b, h, rows, cols that is not an int

    Raises ArgumentError as Dropout does.
    """
    drop = Dropout(p, seed)
    base = drop.seed_tensor().to(device)
    index = []
    for given in (b, h, rows, cols):
        if isinstance(given, Tensor):
            index.append(given.to(device=base.device, dtype=torch.int64))
        else:
            index.append(
                torch.tensor(
                    given if isinstance(given, int) else list(given),
                    dtype=torch.int64,
                    device=base.device,
                )
            )
    vb, vh, vi, vj = (axis.reshape(-1) for axis in index)
    keys = row_keys(base, vb[:, None, None], vh[:, None], vi)
    if vj.numel() == 0:
        keep = torch.ones(*keys[0].shape, 0, dtype=torch.bool, device=base.device)
    else:
        lo, hi = int(vj.min()), int(vj.max()) + 1
        keep = keep_tile(keys, lo, hi, p)[..., vj - lo]
    shape = [n for axis, n in zip(index, keep.shape, strict=True) if axis.dim() > 0]
    return keep.reshape(shape)


def _mix64(x: Tensor) -> Tensor:
    for shift, factor in _MIX64:
        x = x ^ (x >> shift & (1 << (64 - shift)) - 1)  # a logical shift of an int64
        if factor is not None:
            x = x * _signed(factor, 64)
    return x


def _low32(x: Tensor) -> Tensor:
    """The low half of an int64, as int32 with the same bits (the conversion wraps)."""
    return x.to(torch.int32)


def _signed(x: int, bits: int) -> int:
    """The integer with the same low `bits` bits, in two's complement."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x
