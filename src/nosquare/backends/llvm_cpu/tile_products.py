"""The products of prefill on AMX tiles, of a group of rows (32) and a block of keys.

Both are emitted in steps, so that vectors have something else to do between two of them: scores by
16 keys, values by 32 keys and up to 32 columns of u. Between values of a lone group nothing comes,
and all keys of these columns are one run.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from .ir import Value
from .prefill_packing import GROUP, PANEL, Sizes, v_place
from .prefill_rows import NONE, Scratch
from .products import Matrix
from .tiles import COUNT, ROWS, WORDS, Tiles

HIGH, WIDE = GROUP // ROWS, 2  # tiles of u in registers: below each other, side by side


class Columns:
    """Emits s = q k^T, for one function; a step is a column of 16 keys.

    Tiles 0 and 1 hold s, 2 holds k, and the rest holds q where all of it has room.
    """

    def __init__(self, tiles: Tiles, sizes: Sizes) -> None:
        self.f, self.tiles, self.sizes = tiles.f, tiles, sizes
        self.count = sizes.block // WORDS
        self.places = {
            (row, word): 3 + n
            for n, (word, row) in enumerate(product(range(0, sizes.depth, WORDS), range(HIGH)))
        }
        self.stays = len(self.places) <= COUNT - 3

    def load(self, x: Scratch) -> None:
        """Before the first column."""
        if self.stays:
            for place, tile in self.places.items():
                self._load(tile, x, *place)

    def multiply(self, x: Scratch, panel: Value, c: Value) -> None:
        """Column c of the block whose first panel of k is given, unless nobody sees it."""
        f, tiles, sizes = self.f, self.tiles, self.sizes
        with f.when(f.load(x.live + c // (PANEL // WORDS)) != NONE):
            at = panel + c * (WORDS * sizes.depth)
            f.prefetch(at + WORDS * sizes.depth, WORDS * sizes.depth)
            for row in range(HIGH):
                tiles.zero(row)
            for word in range(0, sizes.depth, WORDS):
                tiles.load(2, at + word * WORDS, WORDS)
                for row in range(HIGH):
                    tile = self.places[row, word] if self.stays else 3 + row
                    if not self.stays:
                        self._load(tile, x, row, word)
                    tiles.product(row, tile, 2)
            for row in range(HIGH):
                tiles.store(row, x.s + (c * WORDS + row * ROWS * sizes.s_stride), sizes.s_stride)

    def _load(self, tile: int, x: Scratch, row: int, word: int) -> None:
        stride = self.sizes.q_stride
        self.tiles.load(tile, x.q + (row * ROWS * stride + word), stride)


class Values:
    """Emits u += p v, for one function; a step is 32 keys of two columns of tiles of u.

    Tiles 0 to 3 hold u while the keys pass by, from the first step of these columns to the last,
    whatever vectors do meanwhile; 4 and 5 hold p, 6 and 7 v. The last column may be alone.
    """

    def __init__(self, tiles: Tiles, sizes: Sizes) -> None:
        self.f, self.tiles, self.sizes = tiles.f, tiles, sizes
        self.keys = sizes.block // (2 * WORDS)  # steps until all have passed by
        self.columns = sizes.u_stride // WORDS
        self.count = -(-self.columns // WIDE) * self.keys
        self.run = self.keys if sizes.lone else 1  # steps that are emitted together

    def multiply(self, x: Scratch, panel: Callable[[Value], Value], n: Value) -> None:
        """The run from step n on; panel(p): where the p-th panel of v of the block is."""
        column = n // self.keys * WIDE
        for wide in sorted({min(WIDE, self.columns), self.columns % WIDE or WIDE}):
            with self.f.when(self.f.min(self.columns - column, WIDE) == wide):
                for more in range(self.run):  # the first and the last one are known as such
                    self._step(x, panel, column * WORDS, n % self.keys + more, wide)

    def _step(
        self, x: Scratch, panel: Callable[[Value], Value], column: Value, n: Value, wide: int
    ) -> None:
        f, tiles, sizes = self.f, self.tiles, self.sizes
        p, word = n // (PANEL // 2 // WORDS), n % (PANEL // 2 // WORDS) * WORDS
        u = Matrix(x.u + column, sizes.u_stride)
        places = {
            wide * row + side: u.row(row * ROWS) + side * WORDS
            for row, side in product(range(HIGH), range(wide))
        }
        with f.when(n == 0):
            for tile, at in places.items():
                tiles.load(tile, at, u.stride)
        with f.when(f.load(x.live + p) != NONE):
            weights = Matrix(x.s + p * PANEL + word, sizes.s_stride)
            left, right = HIGH * wide, COUNT - wide
            for row in range(HIGH):
                tiles.load(left + row, weights.row(row * ROWS), weights.stride)
            for side in range(wide):
                at = v_place(sizes, panel(p), word, column + side * WORDS)
                tiles.load(right + side, at, WORDS)
                for row in range(HIGH):
                    tiles.product(wide * row + side, left + row, right + side)
        with f.when(n == self.keys - 1):
            for tile, at in places.items():
                tiles.store(tile, at, u.stride)
