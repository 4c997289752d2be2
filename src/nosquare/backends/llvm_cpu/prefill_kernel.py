"""Prefill: forward for many queries, as code.

One item of work is a tile of rows of one key head, the group of query heads folded into rows (row r
is query r // G of head r % G). Its keys come in blocks of 4 panels of 64:

    s = factor q k^T         6 rows x 64 keys at a time, k packed beforehand as panels of k^T
    m' = max(m, rowmax s)    only where it moves: l, u = alpha l, alpha u, alpha = 2^(m - m')
    p = 2^(s - m')           l += rowsum p
    u += p v                 v in place (16-bit v packed beforehand)

and at the end o = u / l, lse = m + ln l (Milakov and Gimelshein 2018; Dao et al. 2022). What 6 rows
see of a panel is known before their product: nothing (skipped), all, or 64 bits a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from . import elementary, scores
from .bits import lanes_of, to_bf16, word_of
from .call import Args, Form, LeafForm
from .ir import Function, Module, Value
from .prefill_packing import (
    BLOCK,
    PANEL,
    PANELS,
    S_STRIDE,
    Sizes,
    copy_row,
    vectors,
    write_pack,
)
from .products import ROWS, Matrix, Sums, column_blocks, product
from .visible import Place, visible

NONE, SOME, ALL = 0, 1, 2  # of a panel, what 6 rows see
MINUS_INF = float("-inf")


def write(form: Form, sizes: Sizes) -> Module:
    """Functions pack and tile for pool.run: items are panels of key heads, and tiles of them.

    Own fields of the block: x0 ranges of the row groups, x1 tiles a key head, x2 panels a key head;
    work, work2: packed k and v.
    """
    made, target = Module(), sizes.target
    write_pack(made, form, sizes)
    f = made.function("scores", q="f32*", k="f32*", s="f32*")
    q, k, s = f.parameters
    for x, columns in column_blocks(PANEL, target).items():
        a, b, c = Matrix(q, sizes.q_stride), Matrix(k + x, PANEL), Matrix(s + x, S_STRIDE)
        product(f, a, b, c, sizes.depth, Sums(columns, target.lanes, sizes.pairs, fresh=True))
    for columns in sorted(set(column_blocks(form.E, target).values())):
        f = made.function(
            f"values_{columns}", p="f32*", v="f32*", stride="i64", u="f32*", count="i64"
        )
        p, v, stride, u, count = f.parameters
        a, b, c = Matrix(p, S_STRIDE), Matrix(v, stride), Matrix(u, sizes.u_stride)
        product(f, a, b, c, count, Sums(columns, target.lanes, sizes.pairs))
    f = made.function("tile", block="i64*", item="i64", worker="i64")
    block, item, _ = f.parameters
    _Tile(f, Args(f, block, form), form, sizes).write(item)
    return made


class _Scratch(NamedTuple):
    """Memory of a tile, on the stack. Rows: q, s, u, m, l, query, head, two keys of dropout, bits
    (a word of 64 keys for each panel). live: NONE, SOME, ALL for each 6 rows and panel. seen: for
    each panel, the keys that some row sees. v: a panel of v without the keys that nobody sees."""

    q: Value
    s: Value
    u: Value
    m: Value
    l: Value  # the letter of the documentation
    v: Value
    query: Value
    head: Value
    bits: Value
    live: Value
    seen: Value
    k0: Value
    k1: Value

    @staticmethod
    def of(f: Function, sizes: Sizes, strangers: bool) -> _Scratch:
        """For one function."""
        rows = sizes.rows
        v = sizes.v_rows * sizes.u_stride if strangers else 1
        reals = rows * sizes.q_stride, rows * S_STRIDE, rows * sizes.u_stride, rows, rows, v
        words = rows, rows, rows * PANELS, rows // ROWS * PANELS, PANELS
        return _Scratch(
            *(f.array("f32", n) for n in reals),
            *(f.array("i64", n) for n in words),
            *(f.array("i32", rows) for _ in range(2)),
        )


class _Range(NamedTuple):
    """Keys outside lo <= j < hi are visible to none of 6 rows, those inside the core to all."""

    lo: Value
    hi: Value
    core_lo: Value
    core_hi: Value


@dataclass
class _Tile:
    """Writes the function `tile`."""

    f: Function
    args: Args
    form: Form
    sizes: Sizes

    def write(self, item: Value) -> None:
        """All of it."""
        f, args = self.f, self.args
        self.w = self.sizes.target.lanes
        self.natural = scores.is_natural(self.form)
        # whether a span may hold keys that nobody sees, whose values must not be read: where it is
        # not exact, and where the odd last key of a span shares its word with the next
        exact = isinstance(self.form.mask, LeafForm) and not self.form.mask.arrays
        self.strangers = self.sizes.pairs or not exact
        self.x = _Scratch.of(f, self.sizes, self.strangers)
        self.factor = scores.factor(args, self.form)
        self.key_head = item // args.x1
        self.b, self.hk = self.key_head // args.Hk, self.key_head % args.Hk
        # the last rows first: under a causal mask they have most to do
        self.first = (args.x1 - 1 - item % args.x1) * self.sizes.rows
        total = args.G * args.M
        count = f.min(total - self.first, self.sizes.rows)
        self.groups = (count + (ROWS - 1)) // ROWS
        with f.loop(0, self.groups * ROWS) as r:
            # the rows that fill up a group are the last one again
            self._begin(r, f.min(self.first + r, total - 1))
        lo, hi = f.variable(args.N), f.variable(0, "i64")
        with f.loop(0, self.groups) as g:
            keys = self._range(g)
            with f.when(keys.lo < keys.hi):
                lo.value, hi.value = f.min(lo.value, keys.lo), f.max(hi.value, keys.hi)
        with f.loop(lo.value // PANEL * PANEL, hi.value, BLOCK) as j:
            self._look(j)
            self._products(j)
            with f.loop(0, self.groups * ROWS) as r:
                self._softmax(r, j)
            with f.loop(0, PANELS) as p:
                self._values(p, j + p * PANEL)
        with f.loop(0, count) as r:
            self._finish(r)

    def _range(self, g: Value) -> _Range:
        start = self.f.emit(f"inttoptr i64 {self.args.x0.name} to ptr", "i64*")
        at = start + (self.first // ROWS + g) * 4
        return _Range(*(self.f.load(at + n) for n in range(4)))

    def _number(self, x: float) -> Value:
        return self.f.value(x, "f32")

    def _live(self, g: Value, p: Value) -> Value:
        return self.x.live + g * PANELS + p

    # ---- before ----

    def _begin(self, r: Value, line: Value) -> None:
        f, args, x, sizes = self.f, self.args, self.x, self.sizes
        i, h = line // args.G, self.hk * args.G + line % args.G
        f.store(x.query + r, i)
        f.store(x.head + r, h)
        m, total = self._number(MINUS_INF), self._number(0.0)
        if self.form.sinks:  # a key seen before all others, with value zero
            m, total = f.load(args.row("sinks", self.b, h)), self._number(1.0)
        f.store(x.m + r, m)
        f.store(x.l + r, total)
        if self.form.dropout:
            k0, k1 = scores.row_keys(args, self.b, h, i)
            f.store(x.k0 + r, k0)
            f.store(x.k1 + r, k1)
        q, to = args.row("q", self.b, h, i), x.q + r * sizes.q_stride
        copy_row(f, q.pointing_at("f32") if sizes.pairs else q, to, sizes.depth, self.w)
        if not sizes.pairs:  # there q must stay as exact as it is: see _scored
            for at, _ in vectors(f, sizes.q_stride, self.w):
                f.store(to + at, f.load(to + at, self.w) * self.factor)
        for at, _ in vectors(f, sizes.u_stride, self.w):
            f.store(x.u + r * sizes.u_stride + at, f.splat(0.0, self.w))

    def _look(self, j0: Value) -> None:
        """What each 6 rows see of each panel."""
        f, x = self.f, self.x
        for n in range(PANELS):
            f.store(x.seen + n, f.value(0, "i64"))
        with f.loop(0, self.groups) as g:
            keys = self._range(g)
            with f.loop(0, PANELS) as p:
                j, live, seen = j0 + p * PANEL, self._live(g, p), x.seen + p
                whole = (keys.core_lo <= j) & (j + PANEL <= keys.core_hi)
                f.store(live, f.select(whole, f.value(ALL, "i64"), NONE))
                f.store(seen, f.load(seen) | f.select(whole, f.value(-1, "i64"), 0))
                with f.when((j < keys.hi) & (j + PANEL > keys.lo) & ~whole):
                    some = self._bits(g, p, j)
                    f.store(live, f.select(some == 0, f.value(NONE, "i64"), SOME))
                    f.store(seen, f.load(seen) | some)

    def _bits(self, g: Value, p: Value, j: Value) -> Value:
        """Store which keys of a panel 6 rows see, a word each; the keys that some of them sees."""
        f, x, w = self.f, self.x, self.w
        some = f.variable(0, "i64")
        with f.loop(g * ROWS, (g + 1) * ROWS) as r:
            word = f.value(0, "i64")
            for v in range(0, PANEL, w):
                inside = f.tail(self.args.N - j - v, w)
                at = Place(self.b, f.load(x.head + r), f.load(x.query + r), j + v, w, inside)
                keep = visible(f, self.args, self.form.mask, at) & inside
                word = word | (word_of(f, keep) << v)
            f.store(x.bits + r * PANELS + p, word)
            some.value = some.value | word
        return some.value

    # ---- scores and weights ----

    def _products(self, j0: Value) -> None:
        f, x, sizes = self.f, self.x, self.sizes
        panel = self.key_head * self.args.x2 + j0 // PANEL
        with f.loop(0, PANELS) as p:
            k = self.args.work + (panel + p) * (PANEL * sizes.depth)
            with f.loop(0, self.groups) as g, f.when(f.load(self._live(g, p)) != NONE):
                s = x.s + g * (ROWS * S_STRIDE) + p * PANEL
                f.call("scores", "void", 0, x.q + g * (ROWS * sizes.q_stride), k, s)

    def _softmax(self, r: Value, j0: Value) -> None:
        """Scores of a row and a block to weights, with its m, l and u brought up to them."""
        f, x, w = self.f, self.x, self.w
        s, g = x.s + r * S_STRIDE, r // ROWS
        top = f.variable(f.splat(MINUS_INF, w))
        with f.loop(0, PANELS) as p:
            for state in (SOME, ALL):
                with f.when(f.load(self._live(g, p)) == state):
                    bits = f.load(x.bits + r * PANELS + p) if state == SOME else None
                    found = self._scored(r, s + p * PANEL, j0 + p * PANEL, bits)
                    top.value = f.max(_joined(found, f.max), top.value)
        old = f.load(x.m + r)
        new = f.max(f.reduce_max(top.value), old)
        with f.when(new > old):
            f.store(x.m + r, new)
            alpha = elementary.exp2(f, self._base2(old - new))
            f.store(x.l + r, f.load(x.l + r) * alpha)
            with f.when(old > MINUS_INF):
                for at, _ in vectors(f, self.sizes.u_stride, w):
                    u = x.u + r * self.sizes.u_stride + at
                    f.store(u, f.load(u, w) * alpha)
        reference = f.select(new == MINUS_INF, self._number(0.0), new)
        total = f.variable(f.splat(0.0, w))
        with f.loop(0, PANELS) as p, f.when(f.load(self._live(g, p)) != NONE):
            found = self._weights(r, s + p * PANEL, j0 + p * PANEL, reference)
            total.value = total.value + _joined(found, lambda a, b: a + b)
        f.store(x.l + r, f.load(x.l + r) + f.reduce_add(total.value))

    def _scored(self, r: Value, s: Value, j: Value, bits: Value | None) -> list[Value]:
        """Scores of one panel, stored where they differ from the product; bits None: all seen."""
        f, x, w, form, found = self.f, self.x, self.w, self.form, []
        h, i = f.load(x.head + r), f.load(x.query + r)
        for v in range(0, PANEL, w):
            z = f.load(s + v, w)
            keep = None if bits is None else lanes_of(f, bits >> v, w)
            if self.sizes.pairs:
                z = z * self.factor
            if not scores.is_plain(form):
                z, _ = scores.score(f, self.args, form, Place(self.b, h, i, j + v, w, keep), z)
            if keep is not None:
                z = f.select(keep, z, f.splat(MINUS_INF, w))
            if keep is not None or self.sizes.pairs or not scores.is_plain(form):
                f.store(s + v, z)
            found.append(z)
        return found

    def _weights(self, r: Value, s: Value, j: Value, reference: Value) -> list[Value]:
        """Weights of one panel: stored as dropout leaves them, returned as they were."""
        f, x, w, found = self.f, self.x, self.w, []
        for v in range(0, PANEL, w):
            weights = elementary.exp2(f, self._base2(f.load(s + v, w) - reference))
            found.append(weights)
            if self.form.dropout:
                key, pair = j + v + f.iota(w, "i64"), (f.load(x.k0 + r), f.load(x.k1 + r))
                keep = scores.kept(f, self.args, pair, key)
                weights = f.select(keep, weights, f.splat(0.0, w))
            if self.sizes.pairs:  # two words of scores make one of weights, so none is lost
                f.store((s + v // 2).pointing_at("i16"), to_bf16(f, weights))
            else:
                f.store(s + v, weights)
        return found

    def _base2(self, s: Value) -> Value:
        return s * scores.LOG2E if self.natural else s

    # ---- values ----

    def _values(self, p: Value, j: Value) -> None:
        f, x, args, sizes = self.f, self.x, self.args, self.sizes
        if sizes.v_packed:
            stride = f.value(sizes.u_stride, "i64")
            panel = self.key_head * args.x2 + j // PANEL
            v = args.work2 + panel * (sizes.v_rows * sizes.u_stride)
        else:
            stride = args.v_n
            v = args.row("v", self.b, self.hk, j)
        at, step = f.variable(v), f.variable(stride)
        if self.strangers:
            seen = f.load(x.seen + p)
            with f.when((seen != 0) & (seen != -1)):
                self._known_values(seen, v, stride, args.N - j)
                at.value, step.value = x.v, f.value(sizes.u_stride, "i64")
        one = 2 if sizes.pairs else 1  # keys of a row of v
        for d, columns in column_blocks(sizes.E, sizes.target).items():
            with f.loop(0, self.groups) as g, f.when(f.load(self._live(g, p)) != NONE):
                keys = self._range(g)
                skip = f.max(keys.lo - j, 0) // one
                upto = (f.min(keys.hi - j, PANEL) + (one - 1)) // one
                s = x.s + g * (ROWS * S_STRIDE) + p * PANEL + skip
                u = x.u + g * (ROWS * sizes.u_stride) + d
                where = at.value + skip * step.value + d
                f.call(f"values_{columns}", "void", 0, s, where, step.value, u, upto - skip)

    def _known_values(self, seen: Value, v: Value, stride: Value, left: Value) -> None:
        """A panel of v with 0 for the keys that no row of the tile sees: 0 * NaN is NaN."""
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
                bits = f.load(v + row * stride + at, w, lanes).bits("i32") & mask
                f.store(self.x.v + row * sizes.u_stride + at, bits.bits("f32"))

    # ---- after ----

    def _finish(self, r: Value) -> None:
        f, x, args, w = self.f, self.x, self.args, self.w
        m, total = f.load(x.m + r), f.load(x.l + r)
        h, i = f.load(x.head + r), f.load(x.query + r)
        dead = total == 0.0
        share = 1.0 / (total * args.kept if self.form.dropout else total)
        o, u = args.row("o", self.b, h, i), x.u + r * self.sizes.u_stride
        for at, lanes in vectors(f, self.form.E, w):
            out = f.select(dead, f.splat(0.0, w), f.load(u + at, w) * share)
            f.store(o + at, out, lanes)
        log = elementary.log(f, total) + (m if self.natural else m * scores.LN2)
        lse = f.select(dead, self._number(MINUS_INF), log)
        f.store(args.row("lse", self.b, h, i), lse)


def _joined(found: list[Value], join: Callable[[Value, Value], Value]) -> Value:
    """All joined in a tree, so that no chain is long."""
    while len(found) > 1:
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [join(a, b) for a, b in pairs]
    return found[0]
