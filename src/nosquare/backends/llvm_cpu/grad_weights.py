"""What lies between the products of backward: weights and their gradients, row by row.

p = exp(score - lse)      ds = p * (dp - delta)      both after masks, dropout and softcap
"""

from __future__ import annotations

from dataclasses import dataclass

from . import scores
from .bits import lanes_of, to_bf16
from .call import Args, Form
from .elementary import exp2_gradual
from .grad_packing import KEYS, STEP, TILE, WIDE, two
from .ir import Function, Value, Variable
from .visible import Place

FACTS = 4  # float32 of a row: -lse in the units of the scores, delta, share, and one to spare
LOG2E = scores.LOG2E


@dataclass(frozen=True)
class Spec:
    """What the code depends on.

    products  how matrices are multiplied: see grad_packing.py
    tile      queries of a tile
    dbias  whether the gradient of the bias is wanted
    exact  whether the weights of each row are divided by their sum, because an lse is so large that
           its rounding is felt in them
    """

    form: Form
    products: str = WIDE
    tile: int = TILE[WIDE]
    dbias: bool = False
    exact: bool = False

    @property
    def pairs(self) -> bool:
        """Whether bfloat16 is multiplied as it is; else everything is widened."""
        return self.products != WIDE


@dataclass(frozen=True)
class Head:
    """A query head of an entry, and its key head: their numbers; where its facts, its sums dq and
    its q and do turned begin."""

    b: Value
    h: Value
    hk: Value
    facts: Value
    dq: Value
    turned: Value


@dataclass(frozen=True)
class Panel:
    """64 keys from j0 on, of which n are there; odd: whether some number of k is not finite."""

    j0: Value
    n: Value
    odd: Variable


@dataclass(frozen=True)
class Tile:
    """Rows of a head, from query i0 on, against a panel: from row `first` of them to `last`, in
    whole groups. whole: every key is there and is seen by all rows of a tile. s, dp: where the
    scores and dp of row 0 would lie."""

    head: Head
    panel: Panel
    i0: Value
    first: Value
    last: Value
    whole: Value
    s: Value
    dp: Value

    @property
    def facts(self) -> Value:
        """The facts of row 0."""
        return self.head.facts + self.i0 * FACTS


@dataclass(frozen=True)
class _Row:
    """A row of a tile: its number there and in the problem; lse, delta and share in every lane;
    the keys that it sees (None: all); its dropout keys; a sum over the panel."""

    r: Value
    i: Value
    facts: tuple[Value, Value, Value]
    seen: Value | None
    keys: tuple[Value, Value] | None
    total: Variable


class Weights:
    """Emits the weights of tiles in the scratch memory `at`."""

    def __init__(self, f: Function, s: Spec, args: Args, at: dict[str, Value], lanes: int) -> None:
        self.f, self.s, self.form, self.args, self.at, self.w = f, s, s.form, args, at, lanes
        self.seen = at["seen"].pointing_at("i64")
        self.plain = scores.is_plain(s.form)
        self.natural = not self.plain and scores.is_natural(s.form)

    def rows(self, tile: Tile, masked: bool, summing: bool) -> None:
        """p and ds of the rows of a tile, in place of s and dp; or sums of p."""
        f, w = self.f, self.w
        with f.loop(tile.first, tile.last, 2) as r:
            rows = [self.row_facts(tile, row, masked) for row in (r, r + 1)]
            with f.loop(0, KEYS, w) as c:
                both = [self.weight(tile, row, c, summing) for row in rows]
                if self.s.pairs and not summing:
                    self.store_pairs(r, c, both)
                elif not summing:
                    for row, (p, ds) in zip(rows, both, strict=True):
                        f.store(tile.s + (row.r * STEP + c), p)
                        f.store(tile.dp + (row.r * STEP + c), ds)
            for row in rows:
                self.end_row(tile, row, summing)

    def row_facts(self, tile: Tile, r: Value, masked: bool) -> _Row:
        """What the weights of a row depend on."""
        f, w, head = self.f, self.w, tile.head
        lse, delta, share = (f.splat(f.load(tile.facts + (r * FACTS + n)), w) for n in range(3))
        i = tile.i0 + r
        if masked:  # rows that are not there
            i = f.min(i, self.args.M - 1)
        seen = f.load(self.seen + r) if masked else None
        keys = scores.row_keys(self.args, head.b, head.h, i) if self.form.dropout else None
        return _Row(r, i, (lse, delta, share), seen, keys, f.variable(f.splat(0.0, w)))

    def weight(self, tile: Tile, row: _Row, c: Value, summing: bool) -> tuple[Value, Value]:
        """p (after dropout) and ds of the vector of keys from c on of the panel, 0 where hidden."""
        f, w, args, form, head = self.f, self.w, self.args, self.form, tile.head
        j = tile.panel.j0 + c
        lse, delta, share = row.facts
        z = f.load(tile.s + (row.r * STEP + c), w)
        where = None if row.seen is None else f.tail(args.N - j, w)
        place, bent = Place(head.b, head.h, row.i, j, w, where), None
        if self.plain:
            t = f.fma(z, args.scale * LOG2E, lse)
        else:
            s, bent = scores.score(f, args, form, place, z * scores.factor(args, form))
            t = (s + lse) * LOG2E if self.natural else s + lse
        p = exp2_gradual(f, t)
        keep = None if row.seen is None else lanes_of(f, row.seen >> c, w)
        if summing:
            row.total.value = row.total.value + (p if keep is None else f.select(keep, p, 0.0))
            return p, p
        if self.s.exact:
            p = p * share
        dp, dropped = f.load(tile.dp + (row.r * STEP + c), w), p
        if row.keys is not None:
            kept = scores.kept(f, args, row.keys, f.splat(j, w) + f.iota(w, "i64"))
            more = 1.0 / args.kept
            dp, dropped = f.select(kept, dp * more, 0.0), f.select(kept, p * more, 0.0)
        ds = p * (dp - delta)
        if keep is not None:
            dropped, ds = f.select(keep, dropped, 0.0), f.select(keep, ds, 0.0)
        if self.s.dbias:
            self.add_bias(row, place, ds)
        if form.softcap and bent is not None:
            ds = ds * (1.0 - bent * bent)
            if keep is not None:
                ds = f.select(keep, ds, 0.0)
        return dropped, ds

    def add_bias(self, row: _Row, at: Place, ds: Value) -> None:
        """dbias += ds, summed over keys first where the bias does not vary along them."""
        f = self.f
        if not self.form.bias_keys:
            row.total.value = row.total.value + ds
            return
        to = self.args.row("dbias", at.b, at.h, at.i) + at.j0
        f.store(to, f.load(to, at.lanes, at.where) + ds, at.where)

    def end_row(self, tile: Tile, row: _Row, summing: bool) -> None:
        """What a row has summed over the panel goes to memory."""
        f = self.f
        if summing:
            to = tile.facts + (row.r * FACTS + 2)
        elif self.s.dbias and not self.form.bias_keys:
            to = self.args.row("dbias", tile.head.b, tile.head.h, row.i)
        else:
            return
        f.store(to, f.load(to) + f.reduce_add(row.total.value))

    def store_pairs(self, r: Value, c: Value, both: list[tuple[Value, Value]]) -> None:
        """p and ds of two rows rounded to bfloat16, in pairs along queries; ds along keys too."""
        f, at = self.f, self.at
        for n, name in enumerate(("p_pairs", "ds_pairs")):
            low, high = (to_bf16(f, row[n]) for row in both)
            f.store(at[name] + (r // 2 * STEP + c), two(low, high))
            if name == "ds_pairs":
                for row, half in ((0, low), (1, high)):
                    f.store(at["ds_rows"].pointing_at("i16") + ((r + row) * STEP + c), half)
