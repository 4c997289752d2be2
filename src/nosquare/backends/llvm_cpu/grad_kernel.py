"""The kernel of backward, as LLVM IR. An item is a key head of a batch entry, or a share of its
panels of keys; or several heads or entries, where they add to one gradient of a bias.

    for every panel of 64 keys:
        for every tile of queries that sees some of them, of every head of the group:
            s = q k^T            dp = do v^T
            p = exp(score - lse)          ds = p * (dp - delta)      row by row
            dv += p^T do         dk += ds^T q         dq += ds k
        dk and dv of the panel are complete

delta = rowsum(do * o) - dlse. Sums are float32. dq is summed over panels in one order, and each
share has a dq of its own, so the result does not depend on which worker does what. The matrix
products are those of grad_product.py or, on tiles, of grad_tiles.py; what lies between them is in
grad_weights.py.

What no row of a tile sees, and rows that see nothing in it, may hold NaN: they enter as 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from .call import FIELDS, Args
from .elementary import exp2_gradual
from .grad_packing import KEYS, TILES, Packer, Room
from .grad_product import InRegisters, Products
from .grad_tiles import Tiled
from .grad_weights import FACTS, LOG2E, Head, Panel, Spec, Tile, Weights
from .ir import Function, Module, Operand, Value, Variable
from .target import Target
from .visible import Place, visible

TABLE = 4  # int64 of a tile of queries: keys it may see [lo, hi), keys all of it sees [lo, hi)
# numbers of a kernel's own in the block, by their use here; rows: of workspace of a head; share:
# those of all heads and entries
OWN = ("splits", "rows", "table", "entries", "heads", "scratch", "share")


def write(s: Spec, target: Target) -> Module:
    """The module, with functions (block, number, worker): item; total of a head, where dq is in
    shares; and both with blocks instead of a block, one for each entry: item_of, total_of."""
    module = Module()
    _Kernel(_function(module, "item"), s, target).item()
    _Kernel(_function(module, "total"), s, target).total()
    for name in ("item", "total"):
        f = _function(module, f"{name}_of")
        blocks, number, worker = f.parameters
        args = Args(f, blocks, s.form)
        heads, splits = (getattr(args, f"x{OWN.index(own)}") for own in ("heads", "splits"))
        each = args.Hk // heads * splits if name == "item" else args.Hq
        block = blocks + number // each * len(FIELDS)
        words = f"ptr {block.name}, i64 {number.name}, i64 {worker.name}"
        f.emit(f"call void @{name}({words}) noinline")
    return module


def _function(module: Module, name: str) -> Function:
    return module.function(name, block="i64*", number="i64", worker="i64")


class _Kernel:
    """Emits the kernel; see the top of this file."""

    def __init__(self, f: Function, s: Spec, target: Target) -> None:
        self.f, self.s, self.form, self.target = f, s, s.form, target
        block, self.number, worker = f.parameters
        self.args = Args(f, block, s.form)
        self.w, self.room = target.lanes, Room(s.form.D, s.form.E, target, s.products, s.tile)
        base = self.args.work + worker * self.own("scratch")
        self.pack = Packer(f, base, self.room, self.w, s.pairs)
        self.at = self.pack.at
        self.seen = self.at["seen"].pointing_at("i64")
        self.weights = Weights(f, s, self.args, self.at, self.w)
        kind = Tiled if s.products == TILES else InRegisters
        self.products: Products = kind(f, s, self.args, self.pack, target)

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
        self.products.begin()
        with (
            f.loop(b0, b0 + self.own("entries")) as b,
            f.loop(h0, h0 + self.own("heads")) as hk,
        ):
            self.products.clear()
            with self.heads(split, b, hk) as head:
                self.facts(head)
                self.pack.zero(head.dq, self.own("rows") * self.room.D)
                self.products.prepare(head)
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
            with f.when(self.own("splits") == 1), self.heads(split, b, hk) as head:
                self.queries(head.b, head.h, head.dq)
        self.products.end()

    def total(self) -> None:
        """dq of a head from all shares."""
        b, h = self.number // self.args.Hq, self.number % self.args.Hq
        self.queries(b, h, self.share(self.f.value(0, "i64"), b, h))

    def share(self, split: Value, b: Value, h: Value) -> Value:
        """Where the sums dq of a head begin in a share."""
        args = self.args
        row = (b * args.delta_b + h * args.delta_h) // FACTS + split * self.own("share")
        return args.work2 + row * self.room.D

    @contextmanager
    def heads(self, split: Value, b: Value, hk: Value) -> Iterator[Head]:
        """The query heads of a key head. What is theirs alone lies behind the scratch memory; so
        does dq, unless other items add to it."""
        f, args, room, rows = self.f, self.args, self.room, self.own("rows")
        with f.loop(0, args.G) as g:
            h = hk * args.G + g
            facts = args.row("delta", b, h) + split * self.own("share") * FACTS
            turned = self.pack.end + g * rows * room.turned
            own = self.pack.end + (args.G * room.turned + g * room.D) * rows
            dq = f.select(self.own("splits") == 1, own, self.share(split, b, h))
            yield Head(b, h, hk, facts, dq, turned)

    @contextmanager
    def panels(self, first: Operand, step: Operand, b: Value, hk: Value) -> Iterator[Panel]:
        """Panels of keys, with k and v in scratch."""
        f = self.f
        start, by = f.value(first, "i64") * KEYS, f.value(step, "i64") * KEYS
        with f.loop(start, self.args.N, by) as j0:
            n = f.min(self.args.N - j0, KEYS)
            there = f.select(n == KEYS, -1, (f.value(1, "i64") << n) - 1)
            self.key_rows("k", b, hk, j0, there)
            self.key_rows("v", b, hk, j0, there)
            self.products.panel()
            per = 2 if self.s.pairs else 1
            odd = self.pack.odd(self.at["k_rows"], KEYS * self.room.q_row * per)
            yield Panel(j0, n, f.variable(odd))

    def key_rows(self, name: str, b: Value, hk: Value, j0: Value, there: Value) -> None:
        """The rows of k or v of a panel whose bit of `there` is set; the others as 0."""
        f, room = self.f, self.room
        width, row = (self.form.D, room.q_row) if name == "k" else (self.form.E, room.do_row)
        with f.loop(0, KEYS) as j:
            source, to = self.args.row(name, b, hk, j0 + j), self.at[f"{name}_rows"] + j * row
            self.pack.row(source, ((there >> j) & 1) != 0, width, to, row)

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
        f, j0, size, group = self.f, panel.j0, self.room.tile, self.room.group
        with f.loop(0, self.own("rows") // size) as t:
            table = self.address("table", "i64") + t * TABLE
            lo, hi, core_lo, core_hi = (f.load(table + c) for c in range(TABLE))
            with f.when((j0 < hi) & (j0 + KEYS > lo)):
                i0 = t * size
                count = f.min(self.args.M - i0, size)
                whole = (core_lo <= j0) & (j0 + KEYS <= core_hi) & (panel.n == KEYS)
                whole = whole & (count == size)  # rows that are not there see nothing
                rows = (count + (group - 1)) // group * group
                first, last = f.variable(0, "i64"), f.variable(rows)
                s, dp = self.at["s"], self.at["dp"]
                tile = Tile(head, panel, i0, f.value(0, "i64"), rows, whole, s, dp)
                with f.when(~whole):
                    self.look(tile, first, last)
                with f.when(first.value < last.value):
                    self.tile(replace(tile, first=first.value, last=last.value), summing)

    def look(self, tile: Tile, first: Variable, last: Variable) -> None:
        """Which keys of the panel each row sees, and the groups of rows that see any."""
        f, w, head, j0 = self.f, self.w, tile.head, tile.panel.j0
        group = self.room.group
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
                first.value = f.min(first.value, r // group * group)
                last.value = r // group * group + group

    def tile(self, tile: Tile, summing: bool) -> None:
        """The rows of a tile that see any key of the panel."""
        f, products = self.f, self.products
        products.fetch(tile)
        with products.parts(tile) as part:
            products.scores(part)
            if not summing:
                products.slopes(part)
            for masked in (False, True):
                with f.when(~tile.whole if masked else tile.whole):
                    self.weights.rows(part, masked, summing)
        if not summing:
            with f.when(tile.panel.odd.value):
                self.hide(tile)
            products.gradients(tile)

    def hide(self, tile: Tile) -> None:
        """k of the keys that no row of the tile sees as 0: their ds is, and 0 * NaN is not."""
        f = self.f
        seen = f.variable(-1, "i64")
        with f.when(~tile.whole):
            seen.value = 0
            with f.loop(tile.first, tile.last) as r:
                seen.value = seen.value | f.load(self.seen + r)
        self.key_rows("k", tile.head.b, tile.head.hk, tile.panel.j0, seen.value)
        self.products.keys()

    # ---- the end ----

    def finish(self, b: Value, hk: Value, panel: Panel) -> None:
        """dk and dv of the panel to their arrays, rounded once."""
        f, args, form = self.f, self.args, self.form
        for name, width, row in (("dk", form.D, self.room.D), ("dv", form.E, self.room.E)):
            factor, sums = args.scale if name == "dk" else 1.0, self.products.sums(name)
            with f.loop(0, panel.n) as j:
                self.out(sums + j * row, args.row(name, b, hk, panel.j0 + j), width, factor)

    def out(self, source: Value, to: Value, width: int, factor: Value | float) -> None:
        """A row of sums times a factor, to the caller's memory."""
        f, w = self.f, self.w
        self.pack.across(
            width, lambda x, where: f.store(to + x, f.load(source + x, w) * factor, where)
        )

    def queries(self, b: Value, h: Value, first: Value) -> None:
        """dq of a head to its array: the sum of its shares, rounded once."""
        f, args, w = self.f, self.args, self.w
        step = self.own("share") * self.room.D
        with f.loop(0, args.M) as i:
            at, to = first + i * self.room.D, args.row("dq", b, h, i)

            def sum_of(x: Operand, where: Value | None, at: Value = at, to: Value = to) -> None:
                total = f.variable(f.load(at + x, w))
                with f.loop(1, self.own("splits")) as share:
                    total.value = total.value + f.load(at + share * step + x, w)
                f.store(to + x, total.value * args.scale, where)

            self.pack.across(self.form.D, sum_of)
