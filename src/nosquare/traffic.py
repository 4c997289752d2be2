"""Bytes that a tiled schedule moves, by a model; and two yardsticks beside it, in elements.

Nothing here is measured. The model follows the loops of a kernel: a tile of queries, with the query
heads of a key head's group folded into its rows, streams the tiles of keys that it visits through
fast memory. Two levels are counted: what passes between fast memory and the last cache, and what
passes between that and main memory, where an array is read once when the part of it that is in use
fits half of the cache, and else once for each wave of tiles that run together.

The yardsticks know one level only, with a fast memory of S elements (that level's "M"):

    paper   the loops of Algorithms 1 and 4 of Dao et al. 2022, counted, not bounded:
            Theta(N^2 d^2 / S) for d <= S <= N d, for a dense square
    floor   Saha and Ye 2024: with whole rows of q and k in fast memory, a phase of S loads sees at
            most (S / d)^2 pairs, so at least pairs d^2 / S - S elements move, for S >= d^2. Below
            that only the order pairs d / sqrt(S) is known, and no number is given
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from .device import Device
from .pairs import Visits, reached, visits
from .problem import Problem

KIB = 1024
# registers of a streaming multiprocessor: 64 Ki of 4 bytes on all cards since compute capability
# 8.0. Of these a kernel may fill the share below; the rest is for addresses and the compiler
REGISTER_BYTES, FILLED = 256 * KIB, 0.85
ROWS, KEYS = (256, 192, 128, 64), (128, 64, 32, 16)

# how backward sums dq, dk and dv
ATOMIC = "dq by atomic adds"  # key tiles outside; dq in float32, read and written for each
SEPARATE = "dq by a pass of its own"  # key tiles outside, then query tiles outside; repeatable
KEYS_OUTSIDE = "dq summed in memory"  # the same traffic, in one order: repeatable
QUERIES_OUTSIDE = "dk and dv summed in memory"  # query tiles outside


@dataclass(frozen=True)
class Tiling:
    """Tiles of a schedule: `rows` of scores (queries times the query heads of a group) by keys.

    splits    parts of the keys that are worked on side by side and merged
    backward  ATOMIC, SEPARATE, KEYS_OUTSIDE or QUERIES_OUTSIDE
    source    where these tiles come from, in words
    """

    rows: int
    tile_n: int
    splits: int = 1
    backward: str = ATOMIC
    source: str = ""

    def queries(self, p: Problem) -> int:
        """Query positions of a tile."""
        return max(self.rows // max(p.G, 1), 1)

    def passes(self, p: Problem) -> int:
        """How often a tile of queries is gone through: above 1 where a group has more heads than
        a tile has rows."""
        return max(-(-p.G * self.queries(p) // self.rows), 1)

    def __str__(self) -> str:
        words = f"{self.rows} rows x {self.tile_n} keys"
        return words + (f", keys in {self.splits} parts" if self.splits > 1 else "")


@dataclass(frozen=True)
class Traffic:
    """Bytes that a schedule moves, by the model of this file.

    l2_bytes   between fast memory and the last cache
    hbm_bytes  between the last cache and main memory; None where the cache's size is not known
    parts      what l2_bytes is made of
    """

    tiling: Tiling
    l2_bytes: int
    hbm_bytes: int | None
    parts: Mapping[str, int]


def default_tiling(
    p: Problem, device: Device, decode: bool = False, backward: bool = False
) -> Tiling | None:
    """The largest usual tiles that fit the device's fast memory; None where that is not known.

    What streams through, in two stages, and what stays (forward: q; backward: k and v) lies in fast
    memory; sums, scores and weights in registers, on a CPU in the same cache. Where `decode` would
    leave units idle, the keys are split among them.
    """
    if not device.fast_bytes:
        return None
    b, wide, both = p.dtype.itemsize, p.lse_dtype.itemsize, p.D + p.E

    def fits(rows: int, tile_n: int) -> bool:
        if backward:  # dk and dv; s, dp and p
            held = (tile_n + 2 * rows) * both * b
            sums = tile_n * both * wide + rows * tile_n * (2 * wide + b)
        else:  # o; s and p
            held = rows * p.D * b + 2 * tile_n * both * b
            sums = rows * p.E * wide + rows * tile_n * (wide + b)
        if device.kind == "cuda":
            return held <= device.fast_bytes and sums <= FILLED * REGISTER_BYTES
        return held + sums <= device.fast_bytes

    sizes = ((rows, tile_n) for tile_n, rows in product(KEYS, ROWS) if fits(rows, tile_n))
    rows, tile_n = next(sizes, (16, 16))
    needed = -(-max(p.G * p.M, 1) // 16) * 16
    tiling = Tiling(
        min(rows, needed),
        min(tile_n, max(p.N, 1)),
        backward=SEPARATE if p.deterministic else ATOMIC,
        source="the largest usual tiles that fit the device's fast memory",
    )
    busy = _entries(p) * p.Hk * _query_tiles(p, tiling)
    if not decode or not 0 < busy < device.units:
        return tiling
    splits = min(device.units // busy, -(-p.N // tiling.tile_n))
    return Tiling(*(tiling.rows, tiling.tile_n, max(splits, 1), tiling.backward, tiling.source))


def forward(p: Problem, device: Device, tiling: Tiling, arrays: Sequence[Tensor] = ()) -> Traffic:
    """What a forward pass moves."""
    s = _Sizes.of(p, arrays)
    v = visits(p, tiling.queries(p), tiling.tile_n, arrays)
    stream = v.keys // s.group * tiling.passes(p) * s.kv
    state = 0  # (u, m, l) of each split, written and read again
    if tiling.splits > 1:
        state = 2 * s.rows * tiling.splits * s.wide * (p.E + 2)
    parts = {
        "q": s.rows_read * p.D * s.b * tiling.splits,
        "k+v": stream,
        "o+lse": s.rows * (p.E * s.b + s.wide),
        "bias": _bias_stream(p, v) * s.b,
        "parts of splits": state,
    }
    tiles = _query_tiles(p, tiling) * tiling.splits
    far = _once_or_waves(device, tiles, s.keys_read * s.kv, stream, p.N * s.kv)
    other = s.rows_read * p.D * s.b + parts["o+lse"] + state + s.bias
    return _traffic(tiling, parts, None if far is None else far + other)


def backward(p: Problem, device: Device, tiling: Tiling, arrays: Sequence[Tensor] = ()) -> Traffic:
    """What a backward pass moves; the sums of dbias are left out."""
    s = _Sizes.of(p, arrays)
    v = visits(p, tiling.queries(p), tiling.tile_n, arrays)
    kv_once, kv_stream = s.keys_read * s.kv, v.keys // s.group * tiling.passes(p) * s.kv
    row = (p.D + p.E) * s.b + 2 * s.wide  # q, do, lse, delta
    gradients = s.keys * s.kv
    delta = s.rows * (2 * p.E * s.b + s.wide)  # reads o and do, writes delta
    dq = s.rows * p.D * s.b
    if tiling.backward == QUERIES_OUTSIDE:
        sums = 2 * s.wide * (p.D + p.E)  # of a key: dk and dv in float32, read and written
        parts = {
            "q+o+do+lse": s.rows_read * ((p.D + 2 * p.E) * s.b + s.wide),
            "k+v": kv_stream,
            "sums of dk+dv": v.keys // s.group * sums,
            "dq+dk+dv": dq + gradients + s.keys * s.wide * (p.D + p.E),
            "bias": _bias_stream(p, v) * s.b,
        }
        stream = kv_stream + parts["sums of dk+dv"]
        once = kv_once + s.keys_read * sums
        far = _once_or_waves(device, _query_tiles(p, tiling), once, stream, p.N * (s.kv + sums))
        other = parts["q+o+do+lse"] + parts["dq+dk+dv"] + s.bias
        return _traffic(tiling, parts, None if far is None else far + other)
    summed = tiling.backward in (ATOMIC, KEYS_OUTSIDE) and "q" in p.grads
    held = row + (2 * s.wide * p.D if summed else 0)  # of a row, for each key tile that it visits
    parts = {
        "delta": delta,
        "k+v": kv_once,
        "q+do+lse+delta": v.queries * row,
        "sums of dq": v.queries * (held - row),
        "dk+dv": gradients,
        "bias": _bias_stream(p, v) * s.b,
    }
    if summed:  # zeroed before, rounded after
        parts["dq"] = dq + 2 * s.rows * s.wide * p.D
    elif "q" in p.grads:
        parts["dq"] = dq + s.rows_read * row + kv_stream
    tiles = -(-p.N // tiling.tile_n)
    far = _once_or_waves(device, tiles, s.rows_read * held, v.queries * held, p.G * p.M * held)
    other = delta + kv_once + gradients + s.bias + parts.get("dq", 0)
    if not summed and "q" in p.grads:
        other += kv_once - kv_stream
    return _traffic(tiling, parts, None if far is None else far + other)


def paper_elements(p: Problem, elements: int) -> tuple[int, int] | None:
    """(forward, backward) accesses to main memory of the FlashAttention paper's Algorithms 1 and 4.

    elements  of the fast memory; None below one row of it. Dense and without grouped heads: masks
              do not shorten the loops, and each query head reads its own k and v
    """
    width = max(p.D, p.E)
    if elements < width:
        return None
    # line 1: B_c = ceil(S / 4d), and T_c blocks of keys outside, all queries inside
    blocks = -(-p.N // -(-elements // (4 * width)))
    keys = p.N * (p.D + p.E)
    heads = _entries(p) * p.Hq
    # init of O, l, m; K, V once; for each block of keys Q, O, l, m are read and O, l, m written
    forward = p.M * (p.E + 2) + keys + blocks * p.M * (p.D + 2 * p.E + 4)
    # init of dQ, dK, dV; K, V; for each block Q, O, dO, dQ, l, m are read and dQ written; dK, dV
    backward = p.M * p.D + 3 * keys + blocks * p.M * (3 * p.D + 2 * p.E + 2)
    return heads * forward, heads * backward


def fast_elements(p: Problem, device: Device) -> tuple[int, int, int]:
    """Elements of (fast memory, the same with a unit's registers, all caches and fast memories of
    the device); 0 where not known. The paper blocks for the first; a lower bound has to grant all
    that could hold an element."""
    b = p.dtype.itemsize
    if not device.fast_bytes:
        return 0, 0, 0
    unit = device.fast_bytes + (REGISTER_BYTES if device.kind == "cuda" else 0)
    every = device.cache_bytes + device.units * unit if device.cache_bytes else 0
    return device.fast_bytes // b, unit // b, every // b


def floor_elements(p: Problem, pairs: int, elements: int, units: int = 1) -> int | None:
    """Least number of elements that pass into fast memories of `elements`, one for each unit, when
    scores are made from whole rows of q and k; None where no constant is known (S < D^2)."""
    if elements < p.D**2 or not elements:
        return None
    return max(pairs * p.D**2 // elements - units * elements, 0)


# ---- the pieces of the model --------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """Totals over batch entries and heads. rows, keys: all; _read: those that see or are seen.

    kv  bytes of a key and its value;  b, wide  bytes of an input element, of a sum
    """

    b: int
    wide: int
    group: int
    kv: int
    rows: int
    keys: int
    rows_read: int
    keys_read: int
    bias: int

    @staticmethod
    def of(p: Problem, arrays: Sequence[Tensor]) -> _Sizes:
        b, group, entries = p.dtype.itemsize, max(p.G, 1), _entries(p)
        rows_read, keys_read = reached(p, arrays)
        return _Sizes(
            b=b,
            wide=p.lse_dtype.itemsize,
            group=group,
            kv=(p.D + p.E) * b,
            rows=entries * p.Hq * p.M,
            keys=entries * p.Hk * p.N,
            rows_read=rows_read,
            keys_read=keys_read // group,
            bias=0 if p.bias is None else math.prod(p.bias) * b,
        )


def _entries(p: Problem) -> int:
    return 1 if p.packed else p.B  # the sequences of a packed problem share M and N


def _query_tiles(p: Problem, tiling: Tiling) -> int:
    """Tiles of queries of one key head."""
    return -(-p.M // tiling.queries(p)) * tiling.passes(p)


def _bias_stream(p: Problem, v: Visits) -> int:
    """Elements of the bias that the visited tiles read."""
    if p.bias is None:
        return 0
    heads, m, n = (1, 1, 1, *p.bias)[-3:]
    of_a_head = {(True, True): v.entries, (False, True): v.keys, (True, False): v.queries}
    read = of_a_head.get((m > 1, n > 1), v.tiles)
    return read if heads > 1 else read // max(p.G, 1)


def _once_or_waves(
    device: Device, tiles: int, once: int, stream: int, head_bytes: int
) -> int | None:
    """Bytes from main memory of what `tiles` of one head each stream through.

    once, stream  bytes when it is read once, and when every tile reads its own
    head_bytes    of one head: what the cache must hold of it
    """
    if not device.cache_bytes or not device.units:
        return None
    together = max(device.units // max(tiles, 1), 1)  # heads that are worked on at a time
    if tiles <= device.units or 2 * together * head_bytes <= device.cache_bytes:
        return once
    return max(once, stream // device.units)


def _traffic(tiling: Tiling, parts: dict[str, int], hbm_bytes: int | None) -> Traffic:
    kept = {name: n for name, n in parts.items() if n}
    return Traffic(tiling, sum(kept.values()), hbm_bytes, kept)
