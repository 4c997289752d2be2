"""The matrix products of backward on AMX tiles: see tiles.py for these.

    s  (queries, keys)  = q k^T         dp = do v^T             32 queries at a time
    dv^T (E, keys)     += do^T p        dk^T (D, keys) += q^T ds
    dq (queries, D)    += ds k

q and do are multiplied where they are, when all of a tile is there and sees the panel, and their
rows are whole tiles wide. do^T and q^T are made once a head, for all panels: groups of 32 queries,
each (D, 16) and (E, 16) words of two queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from .grad_packing import KEYS, SQUARE, STEP, Grid, transposed, two
from .grad_product import Products
from .grad_weights import Head, Tile
from .ir import Operand, Value
from .tiles import COUNT, Tiles

HIGH, ACROSS = 2, 2  # tiles of c in registers at a time
TURNED = 2 * SQUARE  # queries whose pairs fill the lines of a tile


class Tiled(Products):
    """Products of tiles."""

    def begin(self) -> None:
        """The shape of the tiles."""
        Tiles(self.f, self.target).configure()

    def end(self) -> None:
        """No tiles any more."""
        Tiles(self.f, self.target).release()

    # ---- q and do ----

    def clear(self) -> None:
        """No head is known to hold a number that is not finite."""
        self.f.store(self.at["odd"].pointing_at("i64"), self.f.value(0, "i64"))

    def prepare(self, head: Head) -> None:
        """q^T and do^T of a head."""
        f, args, room, odd = self.f, self.args, self.room, self.at["odd"].pointing_at("i64")
        with f.loop(0, args.M, TURNED) as i0:
            for name, width, row in self.sides:
                with f.loop(0, TURNED) as r:
                    source = args.row(name, head.b, head.h, i0 + r)
                    there, to = i0 + r < args.M, self.at[name] + r * row
                    self.pack.row(source, there, width, to, row)
                found = self.pack.odd(self.at[name], TURNED * 2 * row)
                f.store(odd, f.load(odd) | found.unsigned("i64"))
            self._turn(f.value(0, "i64"), head.turned + i0 * room.turned)

    def fits(self, width: int, row: int, stride: Value) -> Value | None:
        """Where they are whole tiles wide, and begin at whole words."""
        return (stride & 1) == 0 if width == 2 * row else None

    def _turn(self, first: Value, to: Value) -> None:
        """32 rows in scratch, from row `first` on, turned."""
        f, name = self.f, "turn"
        if all(g.name != name for g in f.module.functions):
            g = f.module.function(name, rows="i16*", width="i64", to="f32*")
            rows, width, out = g.parameters
            with g.loop(0, width, SQUARE) as x:
                lines = [g.load(rows + (width * n + x), SQUARE) for n in range(TURNED)]
                square = [two(a, b) for a, b in zip(lines[::2], lines[1::2], strict=True)]
                for n, line in enumerate(transposed(g, square)):
                    g.store(out + (x + n) * SQUARE, line)
        for side, _, row in self.sides:
            rows = self.at[side] + first * row
            words = f"ptr {rows.name}, i64 {2 * row}, ptr {to.name}"
            f.emit(f"call void @{name}({words}) noinline")
            to = to + 2 * row * SQUARE

    def fetch(self, tile: Tile) -> None:
        """Where q and do of a tile are, as rows and turned. What sees nothing enters as 0, so where
        a row is not finite, what is turned is made anew for a tile that is not whole."""
        super().fetch(tile)
        f, room = self.f, self.room
        turned = f.variable(tile.head.turned + tile.i0 * room.turned)
        with f.when(~tile.whole & (f.load(self.at["odd"].pointing_at("i64")) != 0)):
            with f.loop(tile.first, tile.last, TURNED) as r:
                self._turn(r, self.at["turned"] + r * room.turned)
            turned.value = self.at["turned"]
        self.turned = turned.value

    # ---- products ----

    @contextmanager
    def parts(self, tile: Tile) -> Iterator[Tile]:
        """Groups of rows, whose scores replace each other."""
        f = self.f
        with f.loop(tile.first, tile.last, self.room.group) as r:
            back = r * -STEP
            s, dp = self.at["s"] + back, self.at["dp"] + back
            yield replace(tile, first=r, last=r + self.room.group, s=s, dp=dp)

    def grid(self, name: str, width: int) -> Grid:
        """Tiles, one after the other."""
        return Grid.squares(self.at[name], width)

    def scores(self, part: Tile) -> None:
        """s = q k^T"""
        self._across("q", "k_turned", part, self.at["s"])

    def slopes(self, part: Tile) -> None:
        """dp = do v^T"""
        self._across("do", "v_turned", part, self.at["dp"])

    def _across(self, name: str, turned: str, part: Tile, c: Value) -> None:
        rows, depth = self.rows[name], self.room.q_row if name == "q" else self.room.do_row
        a = rows._replace(at=rows.word(part.first, 0))
        size = (self.room.group, KEYS, depth)
        self._multiply(False, a, self.grid(turned, KEYS), Grid.rows(c, STEP), size)

    def gradients(self, tile: Tile) -> None:
        """dv^T += do^T p     dk^T += q^T ds      dq += ds k"""
        at, room = self.at, self.room
        rows, turned = tile.last - tile.first, self.turned + tile.first * room.turned
        for name, start, width, pairs in (
            ("dv", turned + room.D * SQUARE, room.E, "p_pairs"),
            ("dk", turned, room.D, "ds_pairs"),
        ):
            a = Grid(start, SQUARE, SQUARE, 2 * room.turned)  # a word is two queries
            b = Grid.rows(at[pairs] + tile.first // 2 * STEP, STEP)
            self._multiply(True, a, b, self.grid(name, KEYS), (width, KEYS, rows // 2))
        a = Grid.rows(at["ds_rows"] + tile.first * (STEP // 2), STEP // 2)
        dq = Grid.rows(tile.head.dq + (tile.i0 + tile.first) * room.D, room.D)
        self._multiply(True, a, self.grid("k_pairs", room.D), dq, (rows, room.D, KEYS // 2))

    def sums(self, name: str) -> Value:
        """dk or dv of a panel, turned back."""
        width = self.room.D if name == "dk" else self.room.E
        self.pack.turn(self.grid(name, KEYS), (width, KEYS), Grid.rows(self.at["rows"], width))
        return self.at["rows"]

    def _multiply(
        self, adds: bool, a: Grid, b: Grid, c: Grid, size: tuple[Operand, Operand, Operand]
    ) -> None:
        """c = a b or c += a b; size: rows and columns of c, and words of the axis summed over."""
        f, name = self.f, "tiles_more" if adds else "tiles_fresh"
        if all(g.name != name for g in f.module.functions):
            self._write(name, adds)
        numbers = [*a[1:], *b[1:], *c[1:], *size]
        values = [a.at, b.at, c.at, *(f.value(n, "i64") for n in numbers)]
        words = ", ".join(f"{v.type} {v.name}" for v in values)
        f.emit(f"call void @{name}({words}) noinline")

    def _write(self, name: str, adds: bool) -> None:
        """The function that _multiply calls."""
        numbers = [f"{m}_{step}" for m in "abc" for step in ("line", "down", "across")]
        kinds = dict.fromkeys([*numbers, "rows", "columns", "depth"], "i64")
        f = self.f.module.function(name, **dict.fromkeys("abc", "f32*"), **kinds)
        given, (rows, columns, depth) = f.parameters[:-3], f.parameters[-3:]
        a, b, c = (Grid(given[n], *given[3 * n + 3 : 3 * n + 6]) for n in range(3))
        tiles = Tiles(f, self.target)

        def sums(do: Callable[[int, Value, Operand], None]) -> None:
            for n in range(HIGH * ACROSS):
                row, column = n // ACROSS * SQUARE, n % ACROSS * SQUARE
                do(n, c.word(r + row, x + column), c.line)

        with f.loop(0, rows, HIGH * SQUARE) as r, f.loop(0, columns, ACROSS * SQUARE) as x:
            sums(tiles.load if adds else lambda n, at, line: tiles.zero(n))
            with f.loop(0, depth, SQUARE) as k:
                free = iter(range(HIGH * ACROSS, COUNT))
                left = [next(free) for _ in range(HIGH)]
                for n, tile in enumerate(left):
                    tiles.load(tile, a.word(r + n * SQUARE, k), a.line)
                others = list(free)
                for n in range(ACROSS):
                    right = others[n % len(others)]
                    tiles.load(right, b.word(k, x + n * SQUARE), b.line)
                    for m, tile in enumerate(left):
                        tiles.product(m * ACROSS + n, tile, right)
            sums(tiles.store)
