"""The kernel of backward, as LLVM IR. An item is a key head of a batch entry, or a share of its
panels of keys; or several heads or entries, where they add to one gradient of a bias.

    for every panel of 64 keys:
        for every tile of 48 queries that sees some of them, of every head of the group:
            s = q k^T            dp = do v^T                   by products in registers
            p = exp(score - lse)          ds = p * (dp - delta)      row by row
            dv += p^T do         dk += ds^T q         dq += ds k
        dk and dv of the panel are complete

delta = rowsum(do * o) - dlse. Sums are float32. dq is summed over panels in one order, and each
share has a dq of its own, so the result does not depend on which worker does what.

What no row of a tile sees, and rows that see nothing in it, may hold NaN: they enter as 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from .call import FIELDS, Args
from .elementary import exp2_gradual
from .grad_packing import KEYS, STEP, TILE, Packer, Room
from .grad_product import ROWS, Product
from .grad_weights import FACTS, LOG2E, Head, Panel, Spec, Tile, Weights
from .ir import Function, Module, Operand, Value, Variable
from .target import Target
from .visible import Place, visible

TABLE = 4  # int64 of a tile of queries: keys it may see [lo, hi), keys all of it sees [lo, hi)
# numbers of a kernel's own in the block, by their use here; share: rows of workspace of one split
OWN = ("splits", "rows", "table", "entries", "heads", "scratch", "share")


def write(s: Spec, target: Target) -> Module:
    """The module, with the function item(block, number, worker); and packed(blocks, ...), where
    every entry has a block of its own."""
    module = Module()
    f = module.function("item", block="i64*", number="i64", worker="i64")
    _Kernel(f, s, target).item()
    f = module.function("packed", blocks="i64*", number="i64", worker="i64")
    blocks, number, worker = f.parameters
    args = Args(f, blocks, s.form)
    heads, splits = (getattr(args, f"x{OWN.index(name)}") for name in ("heads", "splits"))
    block = blocks + number // (args.Hk // heads * splits) * len(FIELDS)
    f.emit(f"call void @item(ptr {block.name}, i64 {number.name}, i64 {worker.name}) noinline")
    return module


class _Kernel:
    """Emits the kernel; see the top of this file."""

    def __init__(self, f: Function, s: Spec, target: Target) -> None:
        self.f, self.s, self.form, self.target = f, s, s.form, target
        block, self.number, worker = f.parameters
        self.args = Args(f, block, s.form)
        self.w, self.room = target.lanes, Room(s.form.D, s.form.E, target, s.pairs)
        base = self.args.work + worker * self.own("scratch")
        self.pack = Packer(f, base, self.room, self.w, s.pairs)
        self.at = self.pack.at
        self.seen = self.at["seen"].pointing_at("i64")
        self.weights = Weights(f, s, self.args, self.at, self.w)

    def own(self, name: str) -> Value:
        """A number of this kernel's own."""
        return getattr(self.args, f"x{OWN.index(name)}")  # type: ignore[no-any-return]

    def address(self, name: str, kind: str) -> Value:
        """A pointer that is a number of this kernel's own."""
        return self.f.emit(f"inttoptr i64 {self.own(name).name} to ptr", f"{kind}*")

    # ---- the item ----

    def item(self) -> None:
        """All of one item."""
        f, args = self.f, self.args
        split, unit = self.number % self.own("splits"), self.number // self.own("splits")
        across = args.Hk // self.own("heads")
        b0, h0 = unit // across * self.own("entries"), unit % across * self.own("heads")
        with (
            f.loop(b0, b0 + self.own("entries")) as b,
            f.loop(h0, h0 + self.own("heads")) as hk,
        ):
            with self.heads(split, b, hk) as head:
                self.facts(head)
            if self.s.exact:
                with self.panels(0, 1, b, hk) as panel, self.heads(split, b, hk) as head:
                    self.tiles(head, panel, True)
                with self.heads(split, b, hk) as head:
                    self.shares(head)
            with self.panels(split, self.own("splits"), b, hk) as panel:
                self.pack.zero(self.at["dk"], KEYS * self.room.D)
                self.pack.zero(self.at["dv"], KEYS * self.room.E)
                with self.heads(split, b, hk) as head:
                    self.tiles(head, panel, False)
                self.finish(b, hk, panel)

    @contextmanager
    def heads(self, split: Value, b: Value, hk: Value) -> Iterator[Head]:
        """The query heads of a key head."""
        args = self.args
        with self.f.loop(0, args.G) as g:
            h = hk * args.G + g
            before = split * self.own("share")
            facts = args.row("delta", b, h) + before * FACTS
            yield Head(b, h, hk, facts, args.row("dq", b, h) + before * self.room.D)

    @contextmanager
    def panels(self, first: Operand, step: Operand, b: Value, hk: Value) -> Iterator[Panel]:
        """Panels of keys, with k and v in scratch."""
        f, room = self.f, self.room
        start, by = f.value(first, "i64") * KEYS, f.value(step, "i64") * KEYS
        with f.loop(start, self.args.N, by) as j0:
            n = f.min(self.args.N - j0, KEYS)
            there = f.select(n == KEYS, -1, (f.value(1, "i64") << n) - 1)
            self.key_rows("k", b, hk, j0, there)
            self.key_rows("v", b, hk, j0, there)
            self.pack.turn("k_rows", room.q_row, room.q_depth, "k_turned")
            self.pack.turn("v_rows", room.do_row, room.do_depth, "v_turned")
            if self.s.pairs:
                self.pack.pair("k_rows", "k_pairs", KEYS, room.D)
            yield Panel(j0, n, self.odd())

    def key_rows(self, name: str, b: Value, hk: Value, j0: Value, there: Value) -> None:
        """The rows of k or v of a panel whose bit of `there` is set; the others as 0."""
        f, room = self.f, self.room
        width, row = (self.form.D, room.q_row) if name == "k" else (self.form.E, room.do_row)
        with f.loop(0, KEYS) as j:
            source, to = self.args.row(name, b, hk, j0 + j), self.at[f"{name}_rows"] + j * row
            self.pack.row(source, ((there >> j) & 1) != 0, width, to)

    def odd(self) -> Variable:
        """Whether some number of k in scratch is not finite: its exponent is all ones."""
        f, w = self.f, self.w
        bits, ones = ("i16", 0x7F80) if self.s.pairs else ("i32", 0x7F800000)
        found = f.variable(f.splat(0, w, "i1"))
        words = self.at["k_rows"].pointing_at(bits)
        with f.loop(0, KEYS * self.room.D, w) as x:
            found.value = found.value | ((f.load(words + x, w) & ones) == ones)
        return f.variable(f.count(found.value) > 0)

    def facts(self, head: Head) -> None:
        """What is known of every row of a head before its scores; 0 in rows that are not there."""
        f, args, w = self.f, self.args, self.w
        with f.loop(0, args.M) as i:
            o, do = (args.row(name, head.b, head.h, i) for name in ("o", "do"))
            total = f.variable(f.splat(0.0, w))

            def add(x: Operand, where: Value | None) -> None:
                out, cot = f.load(o + x, w, where), f.load(do + x, w, where)
                # a row that sees nothing has o = 0, and its do may hold anything
                total.value = f.fma(out, f.select(out == 0.0, 0.0, cot), total.value)

            self.pack.across(self.form.E, add)
            lse = f.load(args.row("lse", head.b, head.h, i))
            lse = f.select(lse == float("-inf"), 0.0, lse)
            delta = f.reduce_add(total.value) - f.load(args.row("dlse", head.b, head.h, i))
            share: Operand = 1.0
            if self.s.exact:
                share = 0.0
                if self.form.sinks:
                    sink = f.load(args.row("sinks", head.b, head.h))
                    share = exp2_gradual(f, (sink - lse) * LOG2E)
            for n, fact in enumerate(
                (-lse if self.weights.natural else lse * -LOG2E, delta, share)
            ):
                f.store(head.facts + (i * FACTS + n), fact)
        with f.loop(args.M * FACTS, self.own("rows") * FACTS) as i:
            f.store(head.facts + i, 0.0)

    def shares(self, head: Head) -> None:
        """1 / the sum of the weights of each row, in place of that sum."""
        f = self.f
        with f.loop(0, self.args.M) as i:
            at = head.facts + (i * FACTS + 2)
            total = f.load(at)
            f.store(at, f.select(total > 0.0, 1.0 / total, 1.0))

    # ---- one tile ----

    def tiles(self, head: Head, panel: Panel, summing: bool) -> None:
        """Every tile of queries of a head against the panel; `summing`: only sums of weights."""
        f, j0 = self.f, panel.j0
        with f.loop(0, self.own("rows") // TILE) as t:
            table = self.address("table", "i64") + t * TABLE
            lo, hi, core_lo, core_hi = (f.load(table + c) for c in range(TABLE))
            with f.when((j0 < hi) & (j0 + KEYS > lo)):
                i0 = t * TILE
                count = f.min(self.args.M - i0, TILE)
                whole = (core_lo <= j0) & (j0 + KEYS <= core_hi) & (panel.n == KEYS)
                whole = whole & (count == TILE)  # rows that are not there see nothing
                rows = (count + (ROWS - 1)) // ROWS * ROWS
                first, last = f.variable(0, "i64"), f.variable(rows)
                tile = Tile(head, panel, i0, f.value(0, "i64"), rows, whole)
                with f.when(~whole):
                    self.look(tile, first, last)
                with f.when(first.value < last.value):
                    self.tile(replace(tile, first=first.value, last=last.value), summing)

    def look(self, tile: Tile, first: Variable, last: Variable) -> None:
        """Which keys of the panel each row sees, and the groups of rows that see any."""
        f, w, head, j0 = self.f, self.w, tile.head, tile.panel.j0
        first.value, last.value = tile.last, 0
        with f.loop(0, tile.last) as r:
            i = tile.i0 + r
            seen = f.variable(0, "i64")
            with f.when(i < self.args.M):
                for c in range(0, KEYS, w):
                    where = f.tail(self.args.N - (j0 + c), w)
                    place = Place(head.b, head.h, i, j0 + c, w, where)
                    keep = visible(f, self.args, self.form.mask, place) & where
                    packed = f.emit(f"bitcast {keep.type} {keep.name} to i{w}", f"i{w}")
                    seen.value = seen.value | (packed.unsigned("i64") << c)
            f.store(self.seen + r, seen.value)
            with f.when(seen.value != 0):
                first.value = f.min(first.value, r // ROWS * ROWS)
                last.value = r // ROWS * ROWS + ROWS

    def tile(self, tile: Tile, summing: bool) -> None:
        """The rows of a tile that see any key of the panel."""
        f, at, room, pairs = self.f, self.at, self.room, self.s.pairs
        for name, width, row in (("q", self.form.D, room.q_row), ("do", self.form.E, room.do_row)):
            with f.loop(tile.first, tile.last) as r:
                there = f.variable(tile.whole)
                with f.when(~tile.whole):
                    there.value = f.load(self.seen + r) != 0
                source = self.args.row(name, tile.head.b, tile.head.h, tile.i0 + r)
                self.pack.row(source, there.value, width, at[name] + r * row)
        s = Product(room.q_row, 1, KEYS, STEP, False, pairs)
        self.down(s, tile, KEYS, (at["q"], at["k_turned"], at["s"], room.q_depth))
        if not summing:
            dp = Product(room.do_row, 1, KEYS, STEP, False, pairs)
            self.down(dp, tile, KEYS, (at["do"], at["v_turned"], at["dp"], room.do_depth))
        for masked in (False, True):
            with f.when(~tile.whole if masked else tile.whole):
                self.weights.rows(tile, masked, summing)
        if not summing:
            with f.when(tile.panel.odd.value):
                self.hide(tile)
            self.multiply(tile)

    def hide(self, tile: Tile) -> None:
        """k of the keys that no row of the tile sees as 0: their ds is, and 0 * NaN is not."""
        f = self.f
        seen = f.variable(-1, "i64")
        with f.when(~tile.whole):
            seen.value = 0
            with f.loop(tile.first, tile.last) as r:
                seen.value = seen.value | f.load(self.seen + r)
        self.key_rows("k", tile.head.b, tile.head.hk, tile.panel.j0, seen.value)
        if self.s.pairs:
            self.pack.pair("k_rows", "k_pairs", KEYS, self.room.D)

    def multiply(self, tile: Tile) -> None:
        """dv, dk and dq += of a tile."""
        f, at, room, pairs = self.f, self.at, self.room, self.s.pairs
        if pairs:
            self.pack.pair("q", "q_pairs", TILE, room.D)
            self.pack.pair("do", "do_pairs", TILE, room.E)
        per = 2 if pairs else 1
        names = (
            "p_pairs ds_pairs ds_rows q_pairs do_pairs k_pairs" if pairs else "s dp dp q do k_rows"
        )
        p, ds, ds_rows, q, do, k = (at[name] for name in names.split())
        skip, depth = tile.first // per, (tile.last - tile.first) // per
        body = KEYS // ROWS * ROWS
        for name, a, b, width in (("dv", p, do, room.E), ("dk", ds, q, room.D)):
            product = Product(1, STEP, width, width, True, pairs)
            a, b, c = a + skip * STEP, b + skip * width, at[name]
            with f.loop(0, body, ROWS) as r:
                where = (a + r, b, c + r * width, depth)
                product.columns(f, self.target, width, ROWS, where)
            where = (a + body, b, c + body * width, depth)
            product.columns(f, self.target, width, KEYS - body, where)
        back = Product(STEP // per, 1, room.D, room.D, True, pairs)
        dq = tile.head.dq + tile.i0 * room.D
        self.down(back, tile, room.D, (ds_rows, k, dq, KEYS // per))

    def down(
        self, product: Product, tile: Tile, width: int, where: tuple[Value, Value, Value, int]
    ) -> None:
        """A product for the groups of rows of a tile; where: a, b, c and the depth."""
        a, b, c, depth = where
        with self.f.loop(tile.first, tile.last, ROWS) as r:
            places = (a + r * product.a_row, b, c + r * product.c_row, self.f.value(depth, "i64"))
            product.columns(self.f, self.target, width, ROWS, places)

    # ---- the end of a panel ----

    def finish(self, b: Value, hk: Value, panel: Panel) -> None:
        """dk and dv of the panel to their arrays, rounded once."""
        f, args, form = self.f, self.args, self.form
        for name, width, row in (("dk", form.D, self.room.D), ("dv", form.E, self.room.E)):
            factor = args.scale if name == "dk" else 1.0
            with f.loop(0, panel.n) as j:
                self.out(
                    self.at[name] + j * row, args.row(name, b, hk, panel.j0 + j), width, factor
                )

    def out(self, source: Value, to: Value, width: int, factor: Value | float) -> None:
        """A row of sums times a factor, to the caller's memory."""
        f, w = self.f, self.w
        self.pack.across(
            width, lambda x, where: f.store(to + x, f.load(source + x, w) * factor, where)
        )
