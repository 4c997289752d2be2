"""The products of prefill on AMX tiles: scores column by column, and the function `values`.

A product is made in blocks of c: a few tiles of it stay in registers while the axis summed over
passes by, and what is left of the eight holds a and b.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from .ir import Module, Operand, Value
from .prefill_packing import GROUP, PANEL, Sizes, v_place
from .prefill_rows import Scratch
from .products import Matrix
from .tiles import COUNT, ROWS, WORDS, Tiles

HIGH = GROUP // ROWS


class Block(NamedTuple):
    """Tiles of c: `high` below each other, `wide` side by side."""

    high: int
    wide: int

    def tile(self, row: int, column: int) -> int:
        """The register of a tile of c."""
        return row * self.wide + column


def blocks(width: int, block: Block) -> dict[int, Block]:
    """First column -> block, of all columns."""
    step = block.wide * WORDS
    return {
        x: block._replace(wide=min(block.wide, -(-(width - x) // WORDS)))
        for x in range(0, width, step)
    }


def step(tiles: Tiles, block: Block, a: Matrix, b: Value) -> None:
    """c += a b, over WORDS words of the axis summed over; b in tiles, one after the other."""
    first = block.high * block.wide
    for row in range(block.high):
        tiles.load(first + row, a.row(row * ROWS), a.stride)
    free = range(first + block.high, COUNT)
    for column in range(block.wide):
        right = free[column % len(free)]
        tiles.load(right, b + column * (ROWS * WORDS), WORDS)
        for row in range(block.high):
            tiles.product(block.tile(row, column), first + row, right)


def each(block: Block, c: Matrix, do: Callable[[int, Value, Operand], None]) -> None:
    """do(register, place, stride) for every tile of c."""
    for row in range(block.high):
        for column in range(block.wide):
            do(block.tile(row, column), c.row(row * ROWS) + column * WORDS, c.stride)


class Columns:
    """Emits s = q k^T of a group of rows and 16 keys at a time, for one function.

    Tiles 0 and 1 hold s, 2 holds k, and the rest holds q where all of it has room.
    """

    def __init__(self, tiles: Tiles, sizes: Sizes, q: Value) -> None:
        self.f, self.tiles, self.sizes, self.q = tiles.f, tiles, sizes, q
        self.count = sizes.block // WORDS
        self.places = {
            (row, word): 3 + n
            for n, (word, row) in enumerate(product(range(0, sizes.depth, WORDS), range(HIGH)))
        }
        self.stays = len(self.places) <= COUNT - 3

    def load(self) -> None:
        """Before the first column of a block."""
        if self.stays:
            for place, tile in self.places.items():
                self._load(tile, *place)

    def multiply(self, x: Scratch, panel: Value, c: Value) -> None:
        """Column c of the block whose first panel of k is given, unless nobody sees it."""
        f, tiles, sizes = self.f, self.tiles, self.sizes
        p = c // (PANEL // WORDS)
        with f.when(f.load(x.live + p) != 0):
            at = panel + c * (WORDS * sizes.depth)
            f.prefetch(at + WORDS * sizes.depth, WORDS * sizes.depth)
            for row in range(HIGH):
                tiles.zero(row)
            for word in range(0, sizes.depth, WORDS):
                tiles.load(2, at + word * WORDS, WORDS)
                for row in range(HIGH):
                    tile = self.places[row, word] if self.stays else 3 + row
                    if not self.stays:
                        self._load(tile, row, word)
                    tiles.product(row, tile, 2)
            for row in range(HIGH):
                tiles.store(row, x.s + (c * WORDS + row * ROWS * sizes.s_stride), sizes.s_stride)

    def _load(self, tile: int, row: int, word: int) -> None:
        stride = self.sizes.q_stride
        self.tiles.load(tile, self.q + (row * ROWS * stride + word), stride)


def write_values(made: Module, sizes: Sizes) -> None:
    """values(live, p, v, u, count): u += p v of a group of rows and the live ones of `count` panels
    in a row."""
    f = made.function("values", live="i64*", p="f32*", v="f32*", u="f32*", count="i64")
    live, p, v, u, count = f.parameters
    tiles, rows = Tiles(f, sizes.target), sizes.v_rows
    some = f.variable(0, "i64")
    with f.loop(0, count) as n:
        some.value = some.value | f.load(live + n)
    with f.when(some.value == 0):
        f.leave()
    for x, block in blocks(sizes.E, Block(HIGH, 2)).items():
        c = Matrix(u + x, sizes.u_stride)
        each(block, c, tiles.load)
        with f.loop(0, count) as n, f.when(f.load(live + n) != 0):
            for word in range(0, rows, WORDS):
                left = Matrix(p + (n * PANEL + word), sizes.s_stride)
                step(tiles, block, left, v_place(sizes, v, n * rows + word, x))
        each(block, c, tiles.store)
