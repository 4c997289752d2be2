"""What lies between the two products of prefill: scores of rows to weights, by online softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from . import elementary, scores
from .bits import lanes_of, to_bf16
from .call import Args, Form
from .ir import Function, Operand, Value
from .prefill_packing import PANEL, Sizes, vectors
from .visible import Place

NONE, SOME, ALL = 0, 1, 2  # of a panel, what a group of rows sees
MINUS_INF = float("-inf")
LEAST = 2.0**-126


class Scratch(NamedTuple):
    """Memory of a tile, on the stack.

    Rows: q, u, m, l (a sum in each lane), query, head, two keys of dropout. Of a block: s; bits, a
    word of 64 keys for each row and panel; live, NONE, SOME or ALL for each group and panel; seen,
    for each panel the keys that some row sees. v: a panel of v without the keys that nobody sees,
    or with AMX a block.
    """

    q: Value
    u: Value
    m: Value
    l: Value  # the letter of the documentation
    v: Value
    query: Value
    head: Value
    k0: Value
    k1: Value
    s: Value
    bits: Value
    live: Value
    seen: Value

    @staticmethod
    def of(f: Function, sizes: Sizes, strangers: bool) -> Scratch:
        """For one function."""
        rows, w = sizes.rows, sizes.target.lanes
        v = sizes.v_rows * sizes.u_stride * (sizes.panels if sizes.tiled else 1)
        reals = rows * sizes.q_stride, rows * sizes.u_stride, rows, rows * w, v if strangers else 1
        s, *words = (n * sizes.slots for n in _of_group(sizes))
        own = [f.array("f32", n) for n in reals]
        own += [f.array(kind, rows) for kind in ("i64", "i64", "i32", "i32")]
        own += [f.array("f32", s), *(f.array("i64", n) for n in words)]
        return Scratch(*own)

    def group(self, sizes: Sizes, g: Value, slot: Value) -> Scratch:
        """What the g-th group of rows has, its rows counted from 0, and the slot of its block."""
        row = g * sizes.group
        q, u, l = (row * n for n in (sizes.q_stride, sizes.u_stride, sizes.target.lanes))
        steps: list[Operand] = [q, u, row, l, 0, row, row, row, row]
        steps += [slot * n for n in _of_group(sizes)]
        return Scratch(*(at + step for at, step in zip(self, steps, strict=True)))


def _of_group(sizes: Sizes) -> tuple[int, int, int, int]:
    """Elements of s, bits, live and seen, of a group of rows and a block."""
    rows, panels = sizes.group, sizes.panels
    return rows * sizes.s_stride, rows * panels, panels, panels


class Rows:
    """Emits code for the rows of a tile of the key head `hk` of entry b.

    raw  scores stay products of bfloat16 as they are, and the factor waits until the exponential
    """

    def __init__(self, f: Function, args: Args, form: Form, sizes: Sizes, b: Value) -> None:
        self.f, self.args, self.form, self.sizes, self.b = f, args, form, sizes, b
        self.w, self.natural = sizes.target.lanes, scores.is_natural(form)
        self.plain = scores.is_plain(form)
        self.factor = scores.factor(args, form)
        self.raw = sizes.pairs and self.plain
        if self.raw:  # the largest product must be that of the largest score, and hidden ones -inf
            self.negative = self.factor < 0.0
            self.factor = f.max(f.max(self.factor, -self.factor), LEAST)

    def softmax(self, x: Scratch, first: Value, j0: Value) -> None:
        """Scores of two rows and a block to weights, with m, l and u brought up to them: each row
        has something to do while the other waits for its maximum or its sum."""
        f, w = self.f, self.w
        rows, live = (first, first + 1), x.live + first // self.sizes.group * self.sizes.panels
        tops = [f.variable(f.splat(MINUS_INF, w)) for _ in rows]
        with f.loop(0, self.sizes.panels) as p:
            for state in (SOME, ALL):
                with f.when(f.load(live + p) == state):
                    for r, top in zip(rows, tops, strict=True):
                        found = self._scored(x, r, p, j0 + p * PANEL, state)
                        top.value = f.max(_joined(found, f.max), top.value)
        references = [self._raise(x, r, top.value) for r, top in zip(rows, tops, strict=True)]
        totals = [f.variable(f.splat(0.0, w)) for _ in rows]
        with f.loop(0, self.sizes.panels) as p, f.when(f.load(live + p) != NONE):
            for r, reference, total in zip(rows, references, totals, strict=True):
                found = self._weights(x, r, p, j0 + p * PANEL, reference)
                total.value = total.value + _joined(found, lambda a, b: a + b)
        for r, total in zip(rows, totals, strict=True):
            at = x.l + r * w
            f.store(at, f.load(at, w) + total.value)

    def _raise(self, x: Scratch, r: Value, top: Value) -> Value:
        """Let m of a row be at least its scores `top`, u and l follow; what scores are to be
        compared with. Lanes are joined only where one of them is above m, which soon is rare."""
        f, w, m = self.f, self.w, x.m + r
        top = top * self.factor if self.raw else top
        old = f.load(m)
        with f.when(f.count(top > old) > 0):
            new = f.max(f.reduce_max(top), old)
            f.store(m, new)
            alpha = elementary.exp2(f, self._base2(old - new))
            f.store(x.l + r * w, f.load(x.l + r * w, w) * alpha)
            with f.when(old > MINUS_INF):
                for at, _ in vectors(f, self.sizes.u_stride, w):
                    u = x.u + r * self.sizes.u_stride + at
                    f.store(u, f.load(u, w) * alpha)
        new = f.load(m)
        return f.select(new == MINUS_INF, 0.0, new)

    def _scored(self, x: Scratch, r: Value, p: Value, j: Value, state: int) -> list[Value]:
        """Scores of one panel, raw or stored where they differ from the product."""
        f, w, form, found = self.f, self.w, self.form, []
        s, h, i = x.s + r * self.sizes.s_stride + p * PANEL, f.load(x.head + r), f.load(x.query + r)
        bits = f.load(x.bits + r * self.sizes.panels + p)
        for v in range(0, PANEL, w):
            z = f.load(s + v, w)
            keep = lanes_of(f, bits >> v, w) if state == SOME else None
            if not self.plain:
                z = z * self.factor if self.sizes.pairs else z
                z, _ = scores.score(f, self.args, form, Place(self.b, h, i, j + v, w, keep), z)
            if keep is not None:
                z = f.select(keep, z, f.splat(MINUS_INF, w))
            if keep is not None or not self.plain:
                f.store(s + v, z)
            found.append(z)
        return found

    def _weights(self, x: Scratch, r: Value, p: Value, j: Value, reference: Value) -> list[Value]:
        """Weights of one panel: stored as dropout leaves them, returned as they were."""
        f, w, found = self.f, self.w, []
        s = x.s + r * self.sizes.s_stride + p * PANEL
        for v in range(0, PANEL, w):
            z = f.load(s + v, w)
            z = f.fma(z, self.factor, -reference) if self.raw else z - reference
            weights = elementary.exp2(f, self._base2(z), self.sizes.pairs)
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


def _joined(found: list[Value], join: Callable[[Value, Value], Value]) -> Value:
    """All joined in a tree, so that no chain is long."""
    while len(found) > 1:
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [join(a, b) for a, b in pairs]
    return found[0]
