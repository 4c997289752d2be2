"""The matrix products of backward, between a tile of queries and a panel of keys.

Products says what each kind of them does: InRegisters (here, by products.py), and Tiled
(grad_tiles.py). A number of a matrix is one word of 32 bits: a float32, or two bfloat16 that lie
one after the other along the axis that is summed over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .call import Args
from .grad_packing import KEYS, STEP, Grid, Packer
from .grad_weights import Head, Spec, Tile
from .ir import Function, Module, Value, Variable
from .products import ROWS, Matrix, Sums, product
from .target import Target

HALF = KEYS // 2
COLUMNS = {"avx512": 4, "avx2": 2, "neon": 4}  # vectors of c beside each other in registers
Where = tuple[Value, Value, Value, Value]  # a, b, c, depth


class Products(ABC):
    """Emits them, from and to the scratch memory of a worker; dk and dv are sums over the tiles of
    a panel, dq over panels."""

    def __init__(self, f: Function, s: Spec, args: Args, pack: Packer, target: Target) -> None:
        self.f, self.s, self.form, self.args, self.target = f, s, s.form, args, target
        self.pack, self.room, self.at = pack, pack.room, pack.at
        self.seen = self.at["seen"].pointing_at("i64")
        # name, numbers of a row, and words of it in scratch
        self.sides = (("q", self.form.D, self.room.q_row), ("do", self.form.E, self.room.do_row))
        self.rows: dict[str, Grid] = {}  # of the tile at hand

    @abstractmethod
    def begin(self) -> None:
        """At the beginning of an item."""

    @abstractmethod
    def end(self) -> None:
        """At its end."""

    @abstractmethod
    def clear(self) -> None:
        """Before the query heads of a key head."""

    @abstractmethod
    def prepare(self, head: Head) -> None:
        """For each of these, before any panel."""

    def panel(self) -> None:
        """k and v, whose rows are in scratch, as the products take them."""
        for name, row, depth in (
            ("k", self.room.q_row, self.room.q_depth),
            ("v", self.room.do_row, self.room.do_depth),
        ):
            source = Grid.rows(self.at[f"{name}_rows"], row)
            self.pack.turn(source, (KEYS, depth), self.grid(f"{name}_turned", KEYS))
        self.keys()

    def keys(self) -> None:
        """k as dq takes it."""
        if self.s.pairs:
            self.pack.pair(self.at["k_rows"], self.grid("k_pairs", self.room.D), KEYS, self.room.D)

    def grid(self, name: str, width: int) -> Grid:
        """How words that are multiplied from the right lie in scratch: here in rows."""
        return Grid.rows(self.at[name], width)

    def fetch(self, tile: Tile) -> None:
        """Where q and do of a tile are: in the caller's memory, when the tile is whole and their
        rows can be multiplied as they lie there, else in scratch: the rows that see a key, the
        others as 0."""
        f, args, head, in_place = self.f, self.args, tile.head, tile.whole
        for name, width, row in self.sides:
            fits = self.fits(width, row, getattr(args, f"{name}_m"))
            in_place = in_place & (False if fits is None else fits)
        with f.when(~in_place):
            for name, width, row in self.sides:
                with f.loop(tile.first, tile.last) as r:
                    there = f.variable(tile.whole)
                    with f.when(~tile.whole):
                        there.value = f.load(self.seen + r) != 0
                    source = args.row(name, head.b, head.h, tile.i0 + r)
                    self.pack.row(source, there.value, width, self.at[name] + r * row, row)
        for name, _, row in self.sides:
            source = args.row(name, head.b, head.h, tile.i0).pointing_at("f32")
            at = f.select(in_place, source, self.at[name])
            words = getattr(args, f"{name}_m") // (2 if self.s.pairs else 1)
            self.rows[name] = Grid.rows(at, f.select(in_place, words, row))

    @abstractmethod
    def fits(self, width: int, row: int, stride: Value) -> Value | None:
        """Whether rows of the caller's, `stride` numbers apart, can be multiplied as they lie; None
        where they never can. width: numbers of a row; row: words of it in scratch."""

    @contextmanager
    def parts(self, tile: Tile) -> Iterator[Tile]:
        """The rows of a tile whose scores are in scratch at a time: here all."""
        yield tile

    @abstractmethod
    def scores(self, part: Tile) -> None:
        """s = q k^T"""

    @abstractmethod
    def slopes(self, part: Tile) -> None:
        """dp = do v^T"""

    @abstractmethod
    def gradients(self, tile: Tile) -> None:
        """dv += p^T do       dk += ds^T q        dq += ds k"""

    def sums(self, name: str) -> Value:
        """Where dk or dv of a panel lie, row by row."""
        return self.at[name]


class InRegisters(Products):
    """Products in vector registers."""

    def begin(self) -> None:
        """Nothing."""

    end = clear = begin

    def prepare(self, head: Head) -> None:
        """Nothing."""

    def fits(self, width: int, row: int, stride: Value) -> Value | None:
        """Where they lie as they would in scratch."""
        numbers = row * (2 if self.s.pairs else 1)
        same = width == numbers and (self.s.pairs or self.form.dtype == "f32")
        return stride == numbers if same else None

    def scores(self, part: Tile) -> None:
        """s = q k^T"""
        kernel = Product(self.room.q_row, 1, KEYS, STEP, False, self.s.pairs)
        where = (self.rows["q"].at, self.at["k_turned"], part.s)
        self._panel(kernel, part, where, self.room.q_depth)

    def slopes(self, part: Tile) -> None:
        """dp = do v^T"""
        kernel = Product(self.room.do_row, 1, KEYS, STEP, False, self.s.pairs)
        where = (self.rows["do"].at, self.at["v_turned"], part.dp)
        self._panel(kernel, part, where, self.room.do_depth)

    def _panel(
        self, kernel: Product, tile: Tile, where: tuple[Value, Value, Value], words: int
    ) -> None:
        """Rows of a tile against all keys, group by group; of a tile that is not whole, the halves
        that a group sees."""
        f, (a, b, c), depth = self.f, where, self.f.value(words, "i64")
        for width in (KEYS, HALF):
            with (
                f.when(tile.whole if width == KEYS else ~tile.whole),
                f.loop(tile.first, tile.last, ROWS) as r,
            ):
                some = self._some(r) if width == HALF else f.value(-1, "i64")
                for x in range(0, KEYS, width):
                    with f.when((some & ((1 << width) - 1 << x)) != 0):
                        at = (a + r * kernel.a_row, b + x, c + (r * kernel.c_row + x), depth)
                        kernel.columns(f, self.target, width, ROWS, at)

    def _some(self, first: Value) -> Value:
        """The keys that some row of a group sees, a bit each."""
        found = self.f.load(self.seen + first)
        for r in range(1, ROWS):
            found = found | self.f.load(self.seen + (first + r))
        return found

    def gradients(self, tile: Tile) -> None:
        """dv += p^T do       dk += ds^T q        dq += ds k"""
        at, room, pairs = self.at, self.room, self.s.pairs
        q, do = self.rows["q"].at, self.rows["do"].at
        if pairs:
            for name, width in (("q", room.D), ("do", room.E)):
                to = self.grid(f"{name}_pairs", width)
                self.pack.pair(self.rows[name].at, to, room.tile, width)
            q, do = at["q_pairs"], at["do_pairs"]
        names = "p_pairs ds_pairs ds_rows k_pairs" if pairs else "s dp dp k_rows"
        p, ds, ds_rows, k = (at[name] for name in names.split())
        ranges = self._ranges(tile)
        self._keys(ranges, (p, do, at["dv"]), room.E)
        self._keys(ranges, (ds, q, at["dk"]), room.D)
        self._queries(tile, ds_rows, k)

    def _ranges(self, tile: Tile) -> list[tuple[Variable, Variable]]:
        """For each half of the keys, the rows [first, last) outside of which none sees any."""
        f = self.f
        ranges = [(f.variable(tile.first), f.variable(tile.last)) for _ in range(KEYS // HALF)]
        with f.when(~tile.whole):
            for first, last in ranges:
                first.value, last.value = tile.last, tile.first
            with f.loop(tile.first, tile.last, 2) as r:
                both = f.load(self.seen + r) | f.load(self.seen + (r + 1))
                for half, (first, last) in enumerate(ranges):
                    sees = (both & ((1 << HALF) - 1 << half * HALF)) != 0
                    first.value = f.select(sees, f.min(first.value, r), first.value)
                    last.value = f.select(sees, r + 2, last.value)
        return ranges

    def _keys(
        self,
        ranges: list[tuple[Variable, Variable]],
        where: tuple[Value, Value, Value],
        width: int,
    ) -> None:
        """c += a^T b for dk or dv: 6 keys at a time, over the rows that see their half."""
        f, per, (a, b, c) = self.f, 2 if self.s.pairs else 1, where
        kernel = Product(1, STEP, width, width, True, self.s.pairs)
        (low, low_end), (high, high_end) = ((x.value, y.value) for x, y in ranges)
        across = f.min(low, high), f.max(low_end, high_end)
        own = HALF // ROWS * ROWS  # 6 keys lie across the middle
        most = KEYS // ROWS * ROWS
        for start, stop, (first, last) in (
            (0, own, (low, low_end)),
            (own, own + ROWS, across),
            (own + ROWS, most, (high, high_end)),
            (most, KEYS, (high, high_end)),
        ):
            skip, rows = first // per, min(stop - start, ROWS)
            with f.loop(start, stop, rows) as r:
                at = (a + (skip * STEP + r), b + skip * width, c + r * width, last // per - skip)
                kernel.columns(f, self.target, width, rows, at)

    def _queries(self, tile: Tile, ds: Value, k: Value) -> None:
        """dq += ds k: 6 queries at a time, over the keys from the first that they see to the
        last."""
        f, per, room = self.f, 2 if self.s.pairs else 1, self.room
        kernel = Product(STEP // per, 1, room.D, room.D, True, self.s.pairs)
        dq = tile.head.dq + tile.i0 * room.D
        with f.loop(tile.first, tile.last, ROWS) as r:
            first, last = f.variable(0, "i64"), f.variable(KEYS, "i64")
            with f.when(~tile.whole):
                some, none = self._some(r), f.value(0, "i1")
                first.value = f.call("llvm.cttz.i64", "i64", 0, some, none) // per
                last.value = KEYS - f.call("llvm.ctlz.i64", "i64", 0, some, none)
            depth = (last.value + (per - 1)) // per - first.value
            at = (ds + (r * kernel.a_row + first.value), k + first.value * room.D, dq + r * room.D)
            kernel.columns(f, self.target, room.D, ROWS, (*at, depth))


@dataclass(frozen=True)
class Product:
    """c (rows, n) = a (rows, depth) b (depth, n), or c += a b, as functions of one module.

    a_row       words from one row of a to the next; a_step from one term of the sum to the next
    b_step      words from one row of b to the next; c_row of c
    adds        whether c is added to
    pairs       whether a word of a and b is two bfloat16
    """

    a_row: int
    a_step: int
    b_step: int
    c_row: int
    adds: bool
    pairs: bool

    def kernel(self, module: Module, target: Target, rows: int, columns: int) -> str:
        """The function (a, b, c, depth), a, b and c pointers to words, of `rows` rows by `columns`
        vectors; written once."""
        steps = f"{self.a_row}_{self.a_step}_{self.b_step}_{self.c_row}_{self.adds:d}"
        name, w = f"product_{rows}x{columns}_{steps}", target.lanes
        if any(f.name == name for f in module.functions):
            return name
        f = module.function(name, a="f32*", b="f32*", c="f32*", depth="i64")
        a, b, c, depth = f.parameters
        left, sums = Matrix(a, self.a_row, self.a_step), Sums(columns * w, w, self.pairs)
        sums = sums._replace(rows=rows, fresh=not self.adds)
        product(f, left, Matrix(b, self.b_step), Matrix(c, self.c_row), depth, sums)
        return name

    def columns(self, f: Function, target: Target, n: int, rows: int, where: Where) -> None:
        """All n columns (a multiple of the lanes) of `rows` rows."""
        w, most = target.lanes, COLUMNS[target.isa]
        a, b, c, depth = where
        for x in range(0, n, most * w):
            kernel = self.kernel(f.module, target, rows, min(most, (n - x) // w))
            words = ", ".join(f"{v.type} {v.name}" for v in (a, b + x, c + x, depth))
            # copies of it would take most of the time to compile
            f.emit(f"call void @{kernel}({words}) noinline")
