"""Attention of few query rows: every key and every value is read once for all rows of its head.

The rows of a key head are its G query heads times M queries. An item is (entry, key head, chunk of
keys) and goes through its chunk in blocks of BLOCK keys:

    s = q k^T        a tile of rows x keys at a time, as many as a register has lanes
    m, p, l          online softmax, row by row
    u = u + p v      a tile of rows x columns in registers while the keys pass by

It leaves (u, m, l) in the workspace; who leaves the last part of a key head merges all of them, in
the order of the keys. Chunks begin at multiples of CHUNK whatever the batch, so a row's result does
not depend on its neighbours, on threads or on the moment.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from .call import Args, Form
from .elementary import exp2, log
from .ir import Function, Module, Value
from .scores import LN2, LOG2E, factor, is_natural, score
from .target import Target
from .visible import Place, visible

BLOCK, CHUNK = 32, 512
INF = float("inf")


@dataclass(frozen=True)
class Key:
    """All that the code depends on: group and queries make the rows; masked where some row may not
    see some key of the span."""

    form: Form
    group: int
    queries: int
    masked: bool

    @property
    def rows(self) -> int:
        """Rows of a key head."""
        return self.group * self.queries


class Sizes(NamedTuple):
    """Of the tiles: `tall` rows at once; rows, d and e rounded up to whole tiles and vectors."""

    lanes: int
    tall: int
    rows: int
    d: int
    e: int

    @staticmethod
    def of(rows: int, d: int, e: int, target: Target) -> Sizes:
        """A tile has as many pairs as a register has lanes: 1 x 16, 2 x 8 or 4 x 4."""
        w, tall = target.lanes, 4 if rows > 2 else rows

        def whole(n: int, unit: int) -> int:
            return -(-n // unit) * unit

        return Sizes(w, tall, whole(rows, tall), whole(d, w), whole(e, w))

    @property
    def part(self) -> int:
        """float32 of one part in the workspace: u, m and l of all rows."""
        return self.rows * (self.e + 2)


def write(key: Key, target: Target) -> Module:
    """The kernel `decode`. Of the block's own fields it reads x0 = parts of a key head, x1, x2 =
    the span of keys that some row sees, work = parts, work2 = int64 counters at zero."""
    module = Module()
    f = module.function("decode", block="ptr", item="i64", worker="i64")
    block, item, _ = f.parameters
    args = Args(f, block, key.form)
    head = item // args.x0
    kernel = _Kernel(
        f,
        args,
        key,
        Sizes.of(key.rows, key.form.D, key.form.E, target),
        head // args.Hk,
        head % args.Hk,
    )
    kernel.start()
    part = item % args.x0
    first = (args.x1 // CHUNK + part) * CHUNK
    last = f.min(first + CHUNK, args.x2)
    with f.loop(f.max(first, args.x1), last, BLOCK) as j0:
        kernel.block(j0, f.min(last - j0, BLOCK))
    kernel.leave(args.work + item * kernel.z.part)
    ticket = f.take(args.work2.pointing_at("i64") + head)
    with f.when(ticket == args.x0 - 1):
        kernel.merge(args.work + head * args.x0 * kernel.z.part)
    return module


class _Kernel:
    """One item while its code is written.

    q (rows, d), u (rows, e), s (rows, BLOCK), m, l (rows,) float32, seen (rows + 1, BLOCK) bool, on
    the stack; the last row of `seen` says whether any row sees the key
    """

    def __init__(
        self, f: Function, args: Args, key: Key, sizes: Sizes, b: Value, head: Value
    ) -> None:
        self.f, self.args, self.key, self.z, self.b, self.head = f, args, key, sizes, b, head
        z = sizes
        self.q, self.u = f.array("f32", z.rows * z.d), f.array("f32", z.rows * z.e)
        self.s = f.array("f32", z.rows * BLOCK)
        self.m, self.l = f.array("f32", z.rows), f.array("f32", z.rows)
        self.seen = f.array("bool", (z.rows + 1) * BLOCK)
        self.k, self.v = args.row("k", b, head), args.row("v", b, head)
        self.unit = LOG2E if is_natural(key.form) else 1.0  # of scores, in powers of 2

    def place(self, r: Value, j0: Value, where: Value | None = None) -> Place:
        """Keys from j0 on and a row: heads of the group outside, queries inside."""
        h = self.head * self.key.group + r // self.key.queries
        return Place(self.b, h, r % self.key.queries, j0, self.z.lanes, where)

    def vectors(self, width: int) -> list[tuple[int, Value | None]]:
        """Where the vectors of a row of `width` elements begin, and which of their lanes exist."""
        w = self.z.lanes
        return [
            (at, None if at + w <= width else self.f.tail(width - at, w))
            for at in range(0, width, w)
        ]

    def start(self) -> None:
        """q times its factor; nothing seen yet."""
        f, z = self.f, self.z
        zero, by = f.splat(0.0, z.lanes), factor(self.args, self.key.form)
        with f.loop(0, z.rows) as r:
            for at in range(0, z.d, z.lanes):
                f.store(self.q + (r * z.d + at), zero)
            for at in range(0, z.e, z.lanes):
                f.store(self.u + (r * z.e + at), zero)
            f.store(self.m + r, -INF)
            f.store(self.l + r, 0.0)
        with f.loop(0, self.key.rows) as r:
            where = self.place(r, r)
            row = self.args.row("q", where.b, where.h, where.i)
            for at, there in self.vectors(self.key.form.D):
                f.store(self.q + (r * z.d + at), f.load(row + at, z.lanes, there) * by)

    def block(self, j0: Value, count: Value) -> None:
        """Up to BLOCK keys from j0 on."""
        f = self.f
        if not self.key.masked:
            self.products(j0, count)
            self.softmax(j0, count)
            self.values(j0, count)
            return
        some = self.look(j0, count)
        with f.when(some > 0):
            self.products(j0, count)
            self.softmax(j0, count)
            with f.when(some == count):
                self.values(j0, count)
            with f.when(some != count):  # what nobody sees may be NaN, and 0 * NaN is no 0
                self.values(j0, count, careful=True)

    def look(self, j0: Value, count: Value) -> Value:
        """Fill `seen`; how many of the keys some row sees."""
        f, w = self.f, self.z.lanes
        some = f.variable(0, "i64")
        with f.loop(0, count, w) as at:
            there = f.tail(count - at, w)
            any_row = f.variable(f.splat(0, w, "i1"))
            with f.loop(0, self.key.rows) as r:
                where = self.place(r, j0 + at, there)
                keep = visible(f, self.args, self.key.form.mask, where) & there
                f.store(self.seen + (r * BLOCK + at), keep)
                any_row.value = any_row.value | keep
            f.store(self.seen + (self.z.rows * BLOCK + at), any_row.value)
            some.value = some.value + f.count(any_row.value).to("i64")
        return some.value

    def products(self, j0: Value, count: Value) -> None:
        """s = q k^T. Keys beyond `count` are the last one once more."""
        f, z = self.f, self.z
        wide = z.lanes // z.tall
        tail = dict(self.vectors(self.key.form.D))
        inner = self.key.form.D // z.lanes * z.lanes
        with f.loop(0, count, wide) as at:
            keys = [self.k + (j0 + f.min(at + n, count - 1)) * self.args.k_n for n in range(wide)]
            # the values are fetched while the scores are computed, a line at a time: many at once
            # would fill the core's list of what it waits for
            values = [self.v + (j0 + at + n) * self.args.v_n for n in range(wide)]
            spread = inner if z.rows == z.tall else 0
            if spread < self.key.form.E:
                for row in values:
                    f.prefetch(row + spread, self.key.form.E - spread)
            with f.loop(0, z.rows, z.tall) as r:
                rows = [self.q + (r + n) * z.d for n in range(z.tall)]
                sums = [f.variable(f.splat(0.0, z.lanes)) for _ in range(z.lanes)]

                def add(d: Value | int, there: Value | None) -> None:
                    left = [f.load(row + d, z.lanes) for row in rows]
                    right = [f.load(key + d, z.lanes, there) for key in keys]
                    pairs = [(x, y) for x in left for y in right]
                    for total, (x, y) in zip(sums, pairs, strict=True):
                        total.value = f.fma(x, y, total.value)

                with f.loop(0, inner, z.lanes) as d:
                    for row in values if spread else ():
                        f.prefetch(row + d)
                    add(d, None)
                if inner < z.d:
                    add(inner, tail[inner])
                tile = lane_sums(f, [total.value for total in sums])
                for n in range(z.tall):
                    lanes = list(range(n * wide, (n + 1) * wide))
                    f.store(self.s + ((r + n) * BLOCK + at), f.shuffle(tile, lanes))

    def softmax(self, j0: Value, count: Value) -> None:
        """s becomes p; m, l and u follow."""
        f, z, w = self.f, self.z, self.z.lanes
        with f.loop(0, self.key.rows) as r:
            top = f.variable(f.splat(-INF, w))
            scores = []
            for at in range(0, BLOCK, w):
                there = f.tail(count - at, w)
                z_at = f.load(self.s + (r * BLOCK + at), w)
                s, _ = score(f, self.args, self.key.form, self.place(r, j0 + at, there), z_at)
                if self.key.masked:
                    there = there & f.load(self.seen + (r * BLOCK + at), w)
                scores.append(f.select(there, s, -INF))
                top.value = f.max(scores[-1], top.value)
            before = f.load(self.m + r)
            now = f.max(f.reduce_max(top.value), before)
            reference = f.select(now == -INF, 0.0, now)
            total = f.splat(0.0, w)
            for at, s in zip(range(0, BLOCK, w), scores, strict=True):
                p = exp2(f, (s - reference) * self.unit)
                f.store(self.s + (r * BLOCK + at), p)
                total = total + p
            shrink = exp2(f, (before - reference) * self.unit)
            f.store(self.m + r, now)
            f.store(self.l + r, f.fma(f.load(self.l + r), shrink, f.reduce_add(total)))
            with f.when(now > before):
                for at in range(0, z.e, w):
                    place = self.u + (r * z.e + at)
                    f.store(place, f.load(place, w) * shrink)

    def values(self, j0: Value, count: Value, careful: bool = False) -> None:
        """u = u + p v; careful: keys that no row sees are not looked at."""
        f, z = self.f, self.z
        at_once = z.lanes // z.tall  # columns, in vectors
        columns = self.vectors(self.key.form.E)
        anybody = self.seen + z.rows * BLOCK
        with f.loop(0, z.rows, z.tall) as r:
            for first in range(0, len(columns), at_once):
                some = columns[first : first + at_once]
                places = [self.u + ((r + n) * z.e + at) for n in range(z.tall) for at, _ in some]
                sums = [f.variable(f.load(at, z.lanes)) for at in places]
                with f.loop(0, count) as j:
                    if first == 0:  # and the next keys while the values are summed
                        f.prefetch(self.k + (j0 + j + BLOCK) * self.args.k_n, self.key.form.D)
                    with f.when(f.load(anybody + j)) if careful else nullcontext():
                        row = self.v + (j0 + j) * self.args.v_n
                        right = [f.load(row + at, z.lanes, there) for at, there in some]
                        left = [f.load(self.s + ((r + n) * BLOCK + j)) for n in range(z.tall)]
                        pairs = [(p, x) for p in left for x in right]
                        for total, (p, x) in zip(sums, pairs, strict=True):
                            total.value = f.fma(f.splat(p, z.lanes), x, total.value)
                for at, total in zip(places, sums, strict=True):
                    f.store(at, total.value)

    def leave(self, part: Value) -> None:
        """Write (u, m, l) of all rows."""
        f, z = self.f, self.z
        with f.loop(0, self.key.rows) as r:
            row = part + r * (z.e + 2)
            for at in range(0, z.e, z.lanes):
                f.store(row + at, f.load(self.u + (r * z.e + at), z.lanes))
            f.store(row + z.e, f.load(self.m + r))
            f.store(row + (z.e + 1), f.load(self.l + r))

    def merge(self, parts: Value) -> None:
        """o and lse of all rows from the parts of their key head."""
        f, z, w, args = self.f, self.z, self.z.lanes, self.args
        columns = self.vectors(self.key.form.E)
        with f.loop(0, self.key.rows) as r:
            where = self.place(r, r)
            row = parts + r * (z.e + 2)
            sink = f.load(args.row("sinks", where.b, where.h)) if self.key.form.sinks else None
            top = f.variable(-INF if sink is None else sink)
            with f.loop(0, args.x0) as n:
                top.value = f.max(f.load(row + (n * z.part + z.e)), top.value)
            reference = f.select(top.value == -INF, 0.0, top.value)
            total = f.variable(0.0)
            if sink is not None:
                total.value = exp2(f, (sink - reference) * self.unit)
            sums = [f.variable(f.splat(0.0, w)) for _ in columns]
            with f.loop(0, args.x0) as n:
                part = row + n * z.part
                # twice the root: far below a sink the weight alone would be flushed to 0
                root = exp2(f, (f.load(part + z.e) - reference) * (self.unit / 2))
                total.value = f.fma(f.load(part + (z.e + 1)) * root, root, total.value)
                for (at, _), acc in zip(columns, sums, strict=True):
                    acc.value = f.fma(f.load(part + at, w) * root, root, acc.value)
            # not where the total is > 0: a NaN that is seen stays one
            by = 1.0 / f.select(total.value == 0.0, 1.0, total.value)
            o = args.row("o", where.b, where.h, where.i)
            for (at, there), acc in zip(columns, sums, strict=True):
                f.store(o + at, acc.value * by, there)
            # without a key ln 0 = -inf
            lse = f.fma(reference, self.unit * LN2, log(f, total.value))
            f.store(args.row("lse", where.b, where.h, where.i), lse)


def lane_sums(f: Function, vectors: list[Value]) -> Value:
    """The sum of all lanes of each of W vectors of W lanes, as one vector, in order.

    Neighbours are joined: of each segment that belongs to one sum, the first half of its lanes from
    both, plus the second half from both. Within 128 bits first, where shuffles are cheapest.
    """
    w = vectors[0].lanes
    low = [[4 * g, w + 4 * g, 4 * g + 1, w + 4 * g + 1] for g in range(w // 4)]
    stages = [(low, 2), ([[4 * g, 4 * g + 1, w + 4 * g, w + 4 * g + 1] for g in range(w // 4)], 2)]
    half = w // 2
    while half >= 4:
        starts = [n + base for base in (0, w) for n in range(0, w, 2 * half)]
        stages.append(([[start + n for n in range(half)] for start in starts], half))
        half //= 2
    for firsts, distance in stages:
        one = [lane for lanes in firsts for lane in lanes]
        two = [lane + distance for lane in one]
        vectors = [
            f.shuffle(a, one, b) + f.shuffle(a, two, b)
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]
