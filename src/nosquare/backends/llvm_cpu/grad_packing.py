"""Scratch memory of backward, and how rows of the caller's arrays come into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .ir import Function, Operand, Value
from .target import Target

# how matrices are multiplied: float32 by float32; two bfloat16 of a word at a time; whole tiles of
# such words (AMX)
WIDE, PAIRS, TILES = "float32", "pairs of bfloat16", "tiles of bfloat16"
GROUP = {WIDE: 6, PAIRS: 6, TILES: 32}  # rows that are multiplied together
TILE = {WIDE: 48, PAIRS: 48, TILES: 64}  # queries of a tile
LONG, LONG_TILE = 512, 128  # queries of a head from which on AMX takes tiles of more (docs/log.md)
KEYS = 64  # of a panel
STEP = 80  # words between rows of a score tile: 64 keys, and not a power of two
SQUARE = 16  # words of a row, and rows, of what AMX multiplies


def padded(n: int, lanes: int) -> int:
    """n rounded up to whole vectors."""
    return -(-n // lanes) * lanes


class Grid(NamedTuple):
    """Words in rows and columns, by squares of 16: the square at row r and column x begins at
    `at` + r * down + x * across, and its lines are `line` apart."""

    at: Value
    line: Operand
    down: Operand
    across: Operand

    @staticmethod
    def rows(at: Value, row: Operand) -> Grid:
        """As in memory, `row` words from one row to the next."""
        return Grid(at, row, row, 1)

    @staticmethod
    def squares(at: Value, width: int) -> Grid:
        """Every square in one piece: `width` columns of them beside each other."""
        return Grid(at, SQUARE, width, SQUARE)

    def word(self, r: Operand, x: Operand, n: Operand = 0) -> Value:
        """Where line n of the square at (r, x) begins."""
        value = self.at.f.value
        down, across, line = (value(step, "i64") for step in (self.down, self.across, self.line))
        return self.at + (down * r + across * x + line * n)


class Room:
    """Where the arrays of one worker lie in its scratch memory, in words of 32 bits.

    A word is a float32, or two bfloat16 that follow each other along the axis that is summed over.

    D, E               the widths, to whole vectors, or to pairs of tiles
    q_row, do_row      words of a row of q and k, of do and v
    q_depth, do_depth  those of them that are summed over
    turned             words for each query, in tiles: q and do once more, turned
    """

    def __init__(self, d: int, e: int, target: Target, products: str, tile: int) -> None:
        self.tile, self.group = tile, GROUP[products]
        pairs, tiled = products != WIDE, products == TILES
        per, whole = 2 if pairs else 1, 2 * SQUARE if tiled else target.lanes
        self.D, self.E = padded(d, whole), padded(e, whole)
        self.q_row, self.do_row = self.D // per, self.E // per
        self.q_depth, self.do_depth = -(-d // per), -(-e // per)
        self.turned = self.q_row + self.do_row if tiled else 0
        rows = self.group if tiled else self.tile  # of scores that are there at a time
        sizes = {
            "k_rows": KEYS * self.q_row,  # as in memory
            "v_rows": KEYS * self.do_row,
            "k_turned": padded(self.q_depth, target.lanes) * KEYS,
            "v_turned": padded(self.do_depth, target.lanes) * KEYS,
            "dk": KEYS * self.D,
            "dv": KEYS * self.E,
            "q": self.tile * self.q_row,
            "do": self.tile * self.do_row,
            "s": rows * STEP,
            "dp": rows * STEP,
            "seen": self.tile * 2,  # 64 bits a row: the keys of the panel that it sees
        }
        if pairs:
            sizes |= {
                "k_pairs": KEYS // 2 * self.D,
                "p_pairs": self.tile // 2 * STEP,
                "ds_pairs": self.tile // 2 * STEP,
                "ds_rows": self.tile * STEP // 2,
            }
        if products == PAIRS:
            sizes |= {"q_pairs": self.tile // 2 * self.D, "do_pairs": self.tile // 2 * self.E}
        if tiled:
            sizes |= {"rows": KEYS * max(self.D, self.E), "turned": self.tile * self.turned}
            sizes |= {"odd": 2}  # an i64
        self.at: dict[str, int] = {}
        self.words = 0
        for name, count in sizes.items():
            self.at[name] = self.words
            self.words += padded(count, SQUARE)


class Packer:
    """Emits copies into the scratch memory of one worker."""

    def __init__(self, f: Function, base: Value, room: Room, lanes: int, pairs: bool) -> None:
        self.f, self.room, self.lanes, self.pairs = f, room, lanes, pairs
        self.at = {name: base + words for name, words in room.at.items()}
        self.end = base + room.words

    def across(self, width: int, body: Callable[[Operand, Value | None], None]) -> None:
        """body(column, lanes that exist or None for all) over the vectors of a row."""
        f, w = self.f, self.lanes
        whole = width // w * w
        with f.loop(0, whole, w) as x:
            body(x, None)
        if whole < width:
            body(whole, f.tail(width - whole, w))

    def zero(self, to: Value, count: Operand) -> None:
        """Words set to 0: whole vectors."""
        with self.f.loop(0, count, self.lanes) as x:
            self.f.store(to + x, self.f.splat(0.0, self.lanes))

    def row(self, source: Value, there: Value, width: int, to: Value, words: int) -> None:
        """A row of the caller's into scratch, to so many words; zeros where it is not there. In
        pairs it keeps its bits, else it is widened to float32."""
        f, w = self.f, self.lanes
        kind, count = ("i16", 2 * words) if self.pairs else ("f32", words)
        if self.pairs:
            source, to = source.pointing_at(kind), to.pointing_at(kind)
        with f.when(there):
            self.across(width, lambda x, where: f.store(to + x, f.load(source + x, w, where)))
            with f.loop(padded(width, w), count, w) as x:
                f.store(to + x, f.splat(0, w, kind))
        with f.when(~there), f.loop(0, count, w) as x:
            f.store(to + x, f.splat(0, w, kind))

    def turn(self, source: Grid, shape: tuple[int, int], to: Grid) -> None:
        """(rows, columns) words as (columns, rows), in squares of whole vectors."""
        f, w, (rows, columns) = self.f, self.lanes, shape
        with f.loop(0, columns, w) as x, f.loop(0, rows, w) as j:
            square = [f.load(source.word(j, x, n), w) for n in range(w)]
            for n, line in enumerate(transposed(f, square)):
                f.store(to.word(x, j, n), line)

    def pair(self, source: Value, to: Grid, rows: int, width: int) -> None:
        """(rows, width) bfloat16 as (rows / 2, width) words of two rows."""
        f, w = self.f, self.lanes
        source = source.pointing_at("i16")
        with f.loop(0, rows // 2) as r, f.loop(0, width, w) as x:
            low, high = (f.load(source + ((r * 2 + c) * width + x), w) for c in (0, 1))
            f.store(to.word(r // SQUARE * SQUARE, x, r % SQUARE), two(low, high))

    def odd(self, source: Value, count: Operand) -> Value:
        """Whether some of so many numbers in scratch is not finite: its exponent is all ones."""
        f, w = self.f, self.lanes
        bits, ones = ("i16", 0x7F80) if self.pairs else ("i32", 0x7F800000)
        found = f.variable(f.splat(0, w, "i1"))
        with f.loop(0, count, w) as x:
            found.value = found.value | ((f.load(source.pointing_at(bits) + x, w) & ones) == ones)
        return f.count(found.value) > 0


def transposed(f: Function, square: list[Value]) -> list[Value]:
    """As many vectors as they have lanes, with rows and columns exchanged."""
    w = len(square)
    low = [n // 2 + n % 2 * w for n in range(w)]  # lanes of two vectors in turn
    high = [n + w // 2 for n in low]
    for _ in range(w.bit_length() - 1):
        halves = zip(square[: w // 2], square[w // 2 :], strict=True)
        square = [f.shuffle(a, lanes, b) for a, b in halves for lanes in (low, high)]
    return square


def two(low: Value, high: Value) -> Value:
    """Words of two 16-bit numbers."""
    return (low.unsigned("i32") | (high.unsigned("i32") << 16)).bits("f32")
