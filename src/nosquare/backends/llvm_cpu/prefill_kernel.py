"""Prefill: forward for many queries, as code.

One item of work is a tile of rows of one key head, the group of query heads folded into rows (row r
is query r // G of head r % G). Its keys come in blocks of a few panels of 64:

    s = factor q k^T         a group of rows at a time, k packed beforehand as panels of k^T
    m' = max(m, rowmax s)    only where it moves: l, u = alpha l, alpha u, alpha = 2^(m - m')
    p = 2^(s - m')           l += rowsum p
    u += p v                 v in place (16-bit v packed beforehand)

and at the end o = u / l, lse = m + ln l (Milakov and Gimelshein 2018; Dao et al. 2022). A group is
6 rows, whose sums stay in vector registers, or 32, multiplied by AMX (tile_products.py), and then
two groups take turns. What a group sees of a panel is known before the product: nothing (skipped),
all, or 64 bits a row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from . import elementary, scores
from .bits import to_bf16, word_of
from .call import Args, Form, LeafForm
from .ir import Function, Module, Value
from .prefill_packing import PANEL, Sizes, copy_row, v_place, vectors, write_pack
from .prefill_rows import ALL, MINUS_INF, NONE, SOME, Rows, Scratch
from .products import Matrix, Sums, column_blocks, product
from .tile_products import Columns, Values
from .tiles import Tiles
from .visible import Place, visible

SIGNS = -0x7FFF8000  # of two bfloat16 in a word


def write(form: Form, sizes: Sizes) -> Module:
    """Functions pack and tile for pool.run: items are panels of key heads, and tiles of them.

    Own fields of the block: x0 ranges of the row groups, x1 tiles a key head, x2 panels a key head;
    work, work2: packed k and v.
    """
    made = Module()
    write_pack(made, form, sizes)
    if not sizes.tiled:
        _write_products(made, sizes)
    f = made.function("tile", block="i64*", item="i64", worker="i64")
    block, item, _ = f.parameters
    _Tile(f, Args(f, block, form), form, sizes).write(item)
    return made


def _write_products(made: Module, sizes: Sizes) -> None:
    """scores(q, k, s) of a group and a panel; values_<columns>(p, v, stride, u, count) of a group
    and `count` rows of v."""
    target = sizes.target
    f = made.function("scores", q="f32*", k="f32*", s="f32*")
    q, k, s = f.parameters
    for x, columns in column_blocks(PANEL, target).items():
        a, b, c = Matrix(q, sizes.q_stride), Matrix(k + x, PANEL), Matrix(s + x, sizes.s_stride)
        product(f, a, b, c, sizes.depth, Sums(columns, target.lanes, sizes.pairs, fresh=True))
    for columns in sorted(set(column_blocks(sizes.E, target).values())):
        f = made.function(
            f"values_{columns}", p="f32*", v="f32*", stride="i64", u="f32*", count="i64"
        )
        p, v, stride, u, count = f.parameters
        a, b, c = Matrix(p, sizes.s_stride), Matrix(v, stride), Matrix(u, sizes.u_stride)
        product(f, a, b, c, count, Sums(columns, target.lanes, sizes.pairs))


class _Range(NamedTuple):
    """Keys outside lo <= j < hi are visible to no row of a group, those inside the core to all."""

    lo: Value
    hi: Value
    core_lo: Value
    core_hi: Value


class _Turn(NamedTuple):
    """A group of rows, the first key of a block, and the group's own part of scratch memory."""

    g: Value
    j: Value
    x: Scratch


@dataclass
class _Tile:
    """Writes the function `tile`."""

    f: Function
    args: Args
    form: Form
    sizes: Sizes

    def write(self, item: Value) -> None:
        """All of it."""
        f, args, sizes = self.f, self.args, self.sizes
        self.w = sizes.target.lanes
        # whether a span may hold keys that nobody sees, whose values must not be read: where it is
        # not exact, and where the odd last key of a span shares its word with the next
        exact = isinstance(self.form.mask, LeafForm) and not self.form.mask.arrays
        self.strangers = sizes.pairs or not exact
        self.x = Scratch.of(f, sizes, self.strangers)
        self.key_head = item // args.x1
        self.b, self.hk = self.key_head // args.Hk, self.key_head % args.Hk
        self.rows = Rows(f, args, self.form, sizes, self.b)
        # the last rows first: under a causal mask they have most to do
        self.first = (args.x1 - 1 - item % args.x1) * self.sizes.rows
        total = args.G * args.M
        count = f.min(total - self.first, self.sizes.rows)
        groups = (count + (sizes.group - 1)) // sizes.group
        self.groups = f.value(1, "i64") if sizes.lone else groups  # written as a constant
        with f.loop(0, self.groups * sizes.group) as r:
            # the rows that fill up a group are the last one again
            self._begin(r, f.min(self.first + r, total - 1))
        lo, hi = f.variable(args.N), f.variable(0, "i64")
        with f.loop(0, self.groups) as g:
            keys = self._range(g)
            with f.when(keys.lo < keys.hi):
                lo.value, hi.value = f.min(lo.value, keys.lo), f.max(hi.value, keys.hi)
        first, end = lo.value // PANEL * PANEL, hi.value
        if sizes.tiled:
            self._turns(first, end)
        else:
            self._blocks(first, end)
        with f.loop(0, count) as r:
            self._finish(r)

    def _blocks(self, first: Value, end: Value) -> None:
        f, x, sizes = self.f, self.x, self.sizes
        with f.loop(first, end, sizes.block) as j:
            self._forget(x)
            with f.loop(0, self.groups) as g:
                self._look(_Turn(g, j, x.group(sizes, g, g)._replace(seen=x.seen)))
            self._products(j)
            with f.loop(0, self.groups * sizes.group, 2) as r:
                self.rows.softmax(x, r, j)
            with f.loop(0, sizes.panels) as p:
                self._values(p, j + p * PANEL)

    def _turns(self, first: Value, end: Value) -> None:
        """The blocks on AMX, which has a unit of its own: while vectors make the weights of one
        group, it multiplies for the other, first the values of the turn before, then the scores of
        the turn after. A step of a product and a few rows alternate.

            turn         -1      0       1       2       3       4
            group                0       1       0       1
            block                0       0       1       1
            vectors              p 0     p 1     p 2     p 3             weights p of scores s
            AMX                          u 0     u 1     u 2     u 3     u += p v
                         s 0     s 1     s 2     s 3                     s = q k^T

        What turn t has of its block is in slot t & 1: it has been used up just before that of turn
        t + 2 comes. A turn that is not there sees nothing. A group alone needs its values before
        its next weights, which may rescale u: then all rows are left to the time of the scores, and
        where no tile has two groups, values are written as runs that nothing interrupts.
        """
        f, sizes = self.f, self.sizes
        tiles = Tiles(f, sizes.target)
        scores, values = Columns(tiles, sizes), Values(tiles, sizes)
        panels = self.args.work + self.key_head * self.args.x2 * (PANEL * sizes.depth)
        count = (end - first + (sizes.block - 1)) // sizes.block * self.groups
        tiles.configure()
        with f.loop(0, sizes.slots * sizes.panels) as n:
            f.store(self.x.live + n, f.value(NONE, "i64"))
        with f.loop(-1, count + 1) as t:
            before, now, after = (self._turn(first, t + n) for n in (-1, 0, 1))
            v, sees = self._known_block(before), self._sees(before)
            rows = f.select(self._sees(now), f.value(sizes.group, "i64"), 0)
            early = f.select(self.groups == 1, 0, rows // 2)
            with f.loop(0, values.count, values.run) as n:
                with f.when(sees):
                    values.multiply(before.x, v, n)
                self._weights(now, f.value(0, "i64"), early, (n, values.count))
            self._forget(after.x)
            self._look(after)
            scores.load(after.x)
            with f.loop(0, scores.count) as n:
                scores.multiply(after.x, panels + after.j * sizes.depth, n)
                self._weights(now, early, rows, (n, scores.count))
        tiles.release()

    def _turn(self, first: Value, t: Value) -> _Turn:
        others = self.groups - 1  # none or one
        g, block = t & others, t >> others
        return _Turn(g, first + block * self.sizes.block, self.x.group(self.sizes, g, t & 1))

    def _sees(self, turn: _Turn) -> Value:
        """Whether a group sees anything of a block."""
        live = [self.f.load(turn.x.live + p) for p in range(self.sizes.panels)]
        return reduce(operator.or_, live) != NONE

    def _weights(self, turn: _Turn, lo: Value, hi: Value, step: tuple[Value, int]) -> None:
        """Those of rows lo to hi that come after the n-th of so many steps, which share them."""
        n, steps = step
        pairs = (hi - lo) // 2
        start, stop = (lo + pairs * at // steps * 2 for at in (n, n + 1))
        with self.f.loop(start, stop, 2) as r:
            self.rows.softmax(turn.x, r, turn.j)

    def _range(self, g: Value) -> _Range:
        start = self.f.emit(f"inttoptr i64 {self.args.x0.name} to ptr", "i64*")
        at = start + (self.first // self.sizes.group + g) * 4
        return _Range(*(self.f.load(at + n) for n in range(4)))

    # ---- before ----

    def _begin(self, r: Value, line: Value) -> None:
        f, args, x, sizes = self.f, self.args, self.x, self.sizes
        i, h = line // args.G, self.hk * args.G + line % args.G
        f.store(x.query + r, i)
        f.store(x.head + r, h)
        m, total = f.value(MINUS_INF, "f32"), f.value(0.0, "f32")
        if self.form.sinks:  # a key seen before all others, with value zero
            m, total = f.load(args.row("sinks", self.b, h)), f.value(1.0, "f32")
        f.store(x.m + r, m)
        f.store(x.l + r * self.w, f.splat(0.0, self.w))
        f.store(x.l + r * self.w, total)
        if self.form.dropout:
            k0, k1 = scores.row_keys(args, self.b, h, i)
            f.store(x.k0 + r, k0)
            f.store(x.k1 + r, k1)
        q, to = args.row("q", self.b, h, i), x.q + r * sizes.q_stride
        copy_row(f, q.pointing_at("f32") if sizes.pairs else q, to, sizes.words, self.w)
        for at, _ in vectors(f, sizes.q_stride, self.w):
            if not sizes.pairs:
                f.store(to + at, f.load(to + at, self.w) * self.rows.factor)
            elif self.rows.raw:
                sign = f.select(self.rows.negative, f.value(SIGNS, "i32"), 0)
                words = (to + at).pointing_at("i32")
                f.store(words, f.load(words, self.w) ^ sign)
        for at, _ in vectors(f, sizes.u_stride, self.w):
            f.store(x.u + r * sizes.u_stride + at, f.splat(0.0, self.w))

    def _forget(self, x: Scratch) -> None:
        """No key of a block has been seen."""
        for n in range(self.sizes.panels):
            self.f.store(x.seen + n, self.f.value(0, "i64"))

    def _look(self, turn: _Turn) -> None:
        """What a group of rows sees of each panel of a block; `seen` keeps what others saw."""
        f, x, keys = self.f, turn.x, self._range(turn.g)
        with f.loop(0, self.sizes.panels) as p:
            j, live, seen = turn.j + p * PANEL, x.live + p, x.seen + p
            whole = (keys.core_lo <= j) & (j + PANEL <= keys.core_hi)
            f.store(live, f.select(whole, f.value(ALL, "i64"), NONE))
            f.store(seen, f.load(seen) | f.select(whole, f.value(-1, "i64"), 0))
            with f.when((j < keys.hi) & (j + PANEL > keys.lo) & ~whole):
                some = self._bits(x, p, j)
                f.store(live, f.select(some == 0, f.value(NONE, "i64"), SOME))
                f.store(seen, f.load(seen) | some)

    def _bits(self, x: Scratch, p: Value, j: Value) -> Value:
        """Store which keys of a panel a group sees, a word a row; the keys that some row sees."""
        f, w = self.f, self.w
        some = f.variable(0, "i64")
        with f.loop(0, self.sizes.group) as r:
            word = f.value(0, "i64")
            for v in range(0, PANEL, w):
                inside = f.tail(self.args.N - j - v, w)
                at = Place(self.b, f.load(x.head + r), f.load(x.query + r), j + v, w, inside)
                keep = visible(f, self.args, self.form.mask, at) & inside
                word = word | (word_of(f, keep) << v)
            f.store(x.bits + r * self.sizes.panels + p, word)
            some.value = some.value | word
        return some.value

    # ---- scores and weights ----

    def _products(self, j0: Value) -> None:
        f, x, sizes = self.f, self.x, self.sizes
        panel = self.key_head * self.args.x2 + j0 // PANEL
        with f.loop(0, self.sizes.panels) as p:
            k = self.args.work + (panel + p) * (PANEL * sizes.depth)
            with (
                f.loop(0, self.groups) as g,
                f.when(f.load(x.live + g * self.sizes.panels + p) != NONE),
            ):
                s = x.s + g * (sizes.group * self.sizes.s_stride) + p * PANEL
                f.call("scores", "void", 0, x.q + g * (sizes.group * sizes.q_stride), k, s)

    # ---- values ----

    def _values(self, p: Value, j: Value) -> None:
        f, x, args, sizes = self.f, self.x, self.args, self.sizes
        if sizes.v_packed:
            stride = f.value(sizes.u_stride, "i64")
            v = self._packed_v(j)
        else:
            stride = args.v_n
            v = args.row("v", self.b, self.hk, j)
        at, step = f.variable(v), f.variable(stride)
        if self.strangers:
            seen = f.load(x.seen + p)
            with f.when((seen != 0) & (seen != -1)):
                self._known_values(seen, v, stride, args.N - j, x.v)
                at.value, step.value = x.v, f.value(sizes.u_stride, "i64")
        one = 2 if sizes.pairs else 1  # keys of a row of v
        for d, columns in column_blocks(sizes.E, sizes.target).items():
            with (
                f.loop(0, self.groups) as g,
                f.when(f.load(x.live + g * self.sizes.panels + p) != NONE),
            ):
                keys = self._range(g)
                skip = f.max(keys.lo - j, 0) // one
                upto = (f.min(keys.hi - j, PANEL) + (one - 1)) // one
                s = x.s + g * (sizes.group * self.sizes.s_stride) + p * PANEL + skip
                u = x.u + g * (sizes.group * sizes.u_stride) + d
                where = at.value + skip * step.value + d
                f.call(f"values_{columns}", "void", 0, s, where, step.value, u, upto - skip)

    def _known_values(self, seen: Value, v: Value, stride: Value, left: Value, to: Value) -> None:
        """A panel of v with 0 for the keys that are not `seen`: 0 * NaN is NaN."""
        f, w, sizes = self.f, self.w, self.sizes
        with f.loop(0, f.min(left, PANEL), 2 if sizes.pairs else 1) as key:
            known = seen >> key
            if sizes.pairs:
                row = key // 2
                even = f.select((known & 1) != 0, f.value(0xFFFF, "i32"), 0)
                mask = even | f.select((known & 2) != 0, f.value(-0x10000, "i32"), 0)
            else:
                row = key
                mask = f.select((known & 1) != 0, f.value(-1, "i32"), 0)
            for at, lanes in vectors(f, sizes.u_stride if sizes.v_packed else sizes.E, w):
                tiled = sizes.tiled
                source = v_place(sizes, v, row, at) if tiled else v + row * stride + at
                bits = f.load(source, w, lanes).bits("i32") & mask
                f.store(v_place(sizes, to, row, at), bits.bits("f32"))

    def _packed_v(self, j: Value) -> Value:
        """The panel of v that begins with key j."""
        panel = self.key_head * self.args.x2 + j // PANEL
        return self.args.work2 + panel * (self.sizes.v_rows * self.sizes.u_stride)

    def _known_block(self, turn: _Turn) -> Callable[[Value], Value]:
        """Where a panel of v is that holds no value which no row of the group sees."""
        f, sizes = self.f, self.sizes
        size = sizes.v_rows * sizes.u_stride
        stride, keys = (f.value(n, "i64") for n in (sizes.u_stride, PANEL))
        block = self._packed_v(turn.j)

        def partly(p: Value) -> Value:
            return (f.load(turn.x.live + p) == SOME) & (f.load(turn.x.seen + p) != -1)

        with f.loop(0, sizes.panels) as p, f.when(partly(p)):
            seen, to = f.load(turn.x.seen + p), self.x.v + p * size
            self._known_values(seen, block + p * size, stride, keys, to)
        return lambda p: f.select(partly(p), self.x.v, block) + p * size

    # ---- after ----

    def _finish(self, r: Value) -> None:
        f, x, args, w = self.f, self.x, self.args, self.w
        m, total = f.load(x.m + r), f.reduce_add(f.load(x.l + r * w, w))
        h, i = f.load(x.head + r), f.load(x.query + r)
        dead = total == 0.0
        share = 1.0 / (total * args.kept if self.form.dropout else total)
        o, u = args.row("o", self.b, h, i), x.u + r * self.sizes.u_stride
        for at, lanes in vectors(f, self.form.E, w):
            out = f.select(dead, f.splat(0.0, w), f.load(u + at, w) * share)
            if self.sizes.pairs:
                f.store((o + at).pointing_at("i16"), to_bf16(f, out), lanes)
            else:
                f.store(o + at, out, lanes)
        log = elementary.log(f, total) + (m if self.rows.natural else m * scores.LN2)
        lse = f.select(dead, MINUS_INF, log)
        f.store(args.row("lse", self.b, h, i), lse)
