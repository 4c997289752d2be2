"""Scratch memory of backward, and how rows of the caller's arrays come into it."""

from __future__ import annotations

from collections.abc import Callable

from .ir import Function, Operand, Value
from .target import Target

KEYS, TILE = 64, 48  # keys of a panel, queries of a tile
STEP = 80  # words between rows of a score tile: 64 keys, and not a power of two


def padded(n: int, lanes: int) -> int:
    """n rounded up to whole vectors."""
    return -(-n // lanes) * lanes


class Room:
    """Where the arrays of one worker lie in its scratch memory, in words of 32 bits.

    A word is a float32, or with `pairs` two bfloat16 that follow each other along the axis that is
    summed over.

    D, E               the widths, to whole vectors
    q_row, do_row      words of a row of q and k, of do and v
    q_depth, do_depth  those of them that are summed over
    """

    def __init__(self, d: int, e: int, target: Target, pairs: bool) -> None:
        per = 2 if pairs else 1
        self.D, self.E = padded(d, target.lanes), padded(e, target.lanes)
        self.q_row, self.do_row = self.D // per, self.E // per
        self.q_depth, self.do_depth = -(-d // per), -(-e // per)
        sizes = {
            "k_rows": KEYS * self.q_row,  # as in memory
            "v_rows": KEYS * self.do_row,
            "k_turned": padded(self.q_depth, target.lanes) * KEYS,
            "v_turned": padded(self.do_depth, target.lanes) * KEYS,
            "dk": KEYS * self.D,
            "dv": KEYS * self.E,
            "q": TILE * self.q_row,
            "do": TILE * self.do_row,
            "s": TILE * STEP,
            "dp": TILE * STEP,
            "seen": TILE * 2,  # 64 bits a row: the keys of the panel that it sees
        }
        if pairs:
            sizes |= {
                "k_pairs": KEYS // 2 * self.D,
                "q_pairs": TILE // 2 * self.D,
                "do_pairs": TILE // 2 * self.E,
                "p_pairs": TILE // 2 * STEP,
                "ds_pairs": TILE // 2 * STEP,
                "ds_rows": TILE * STEP // 2,
            }
        self.at: dict[str, int] = {}
        self.words = 0
        for name, count in sizes.items():
            self.at[name] = self.words
            self.words += padded(count, 16)


class Packer:
    """Emits copies into the scratch memory of one worker."""

    def __init__(self, f: Function, base: Value, room: Room, lanes: int, pairs: bool) -> None:
        self.f, self.room, self.lanes, self.pairs = f, room, lanes, pairs
        self.at = {name: base + words for name, words in room.at.items()}

    def across(self, width: int, body: Callable[[Operand, Value | None], None]) -> None:
        """body(column, lanes that exist or None for all) over the vectors of a row."""
        f, w = self.f, self.lanes
        whole = width // w * w
        with f.loop(0, whole, w) as x:
            body(x, None)
        if whole < width:
            body(whole, f.tail(width - whole, w))

    def zero(self, to: Value, count: int) -> None:
        """Words set to 0: whole vectors."""
        with self.f.loop(0, count, self.lanes) as x:
            self.f.store(to + x, self.f.splat(0.0, self.lanes))

    def row(self, source: Value, there: Value, width: int, to: Value) -> None:
        """A row of the caller's into scratch, to whole vectors; zeros where it is not there. In
        pairs it keeps its bits, else it is widened to float32."""
        f, w = self.f, self.lanes
        kind = "i16" if self.pairs else "f32"
        if self.pairs:
            source, to = source.pointing_at(kind), to.pointing_at(kind)
        with f.when(there):
            self.across(width, lambda x, where: f.store(to + x, f.load(source + x, w, where)))
        with f.when(~there), f.loop(0, padded(width, w), w) as x:
            f.store(to + x, f.splat(0, w, kind))

    def turn(self, name: str, row: int, depth: int, to: str) -> None:
        """(64, row) words as (depth, 64), in squares of whole vectors."""
        f, w = self.f, self.lanes
        low = [n // 2 + n % 2 * w for n in range(w)]  # lanes of two vectors in turn
        high = [n + w // 2 for n in low]
        with f.loop(0, depth, w) as x, f.loop(0, KEYS, w) as j:
            square = [f.load(self.at[name] + ((j + n) * row + x), w) for n in range(w)]
            for _ in range(w.bit_length() - 1):
                halves = zip(square[: w // 2], square[w // 2 :], strict=True)
                square = [f.shuffle(a, lanes, b) for a, b in halves for lanes in (low, high)]
            for n, line in enumerate(square):
                f.store(self.at[to] + ((x + n) * KEYS + j), line)

    def pair(self, name: str, to: str, rows: int, width: int) -> None:
        """(rows, width) bfloat16 as (rows / 2, width) words of two rows."""
        f, w = self.f, self.lanes
        source = self.at[name].pointing_at("i16")
        with f.loop(0, rows // 2) as r, f.loop(0, width, w) as x:
            low, high = (f.load(source + ((r * 2 + c) * width + x), w) for c in (0, 1))
            f.store(self.at[to] + (r * width + x), two(low, high))


def two(low: Value, high: Value) -> Value:
    """Words of two 16-bit numbers."""
    return (low.unsigned("i32") | (high.unsigned("i32") << 16)).bits("f32")
