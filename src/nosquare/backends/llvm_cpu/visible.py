"""Which keys a query sees, emitted from the mask's own keep(): a new kind needs nothing here."""

from __future__ import annotations

import operator
from functools import reduce
from typing import NamedTuple

from ...bound import Bound
from ...mask import Either
from .call import Args, JoinForm, LeafForm, MaskForm
from .ir import Function, Value


class Place(NamedTuple):
    """A query and a vector of keys: entry b, query head h, query i, and keys from j0 on, of which
    the lanes `where` exist. Scalars are i64; lanes is the width."""

    b: Value
    h: Value
    i: Value
    j0: Value
    lanes: int
    where: Value | None = None


def visible(f: Function, args: Args, form: MaskForm, at: Place) -> Value:
    """The keys that the query sees, an i1 for each lane (lanes outside `where` say anything)."""
    return _keep(f, args, form, at, [0, 0])


def core(bound: Bound, i_lo: int, i_hi: int) -> tuple[int, int]:
    """Keys inside [lo, hi) are visible to every row i_lo <= i < i_hi, as the sizes alone say."""
    if not bound.parts:
        lo, hi = bound.mask.core(i_lo, i_hi, bound.n, bound.numbers)
        return (lo, hi) if lo < hi else (0, 0)
    cores = [core(part, i_lo, i_hi) for part in bound.parts]
    if isinstance(bound.mask, Either):
        return max(cores, key=lambda c: c[1] - c[0])
    lo, hi = max(lo for lo, _ in cores), min(hi for _, hi in cores)
    return (lo, hi) if lo < hi else (0, 0)


def _keep(f: Function, args: Args, form: MaskForm, at: Place, used: list[int]) -> Value:
    if isinstance(form, JoinForm):
        join = {"&": operator.and_, "|": operator.or_}[form.sign]
        return reduce(join, [_keep(f, args, part, at, used) for part in form.parts])
    j = f.splat(at.j0.to("i32"), at.lanes) + f.iota(at.lanes)
    numbers = [
        f.constant(args.numbers + (used[0] + n), "i64").to("i32") for n in range(form.numbers)
    ]
    arrays = [
        _array(f, args.arrays + 5 * (used[1] + n), form, n, at) for n in range(len(form.arrays))
    ]
    used[0] += len(numbers)
    used[1] += len(arrays)
    r, c = (*arrays, None, None)[:2]
    return f.splat(form.kind.keep(at.i.to("i32"), j, r, c, tuple(numbers)), at.lanes)


def _array(f: Function, row: Value, form: LeafForm, n: int, at: Place) -> Value:
    """What the n-th array says: a scalar where it does not vary along the keys."""
    array, block = form.arrays[n], form.block
    start, b, h, m, step = (f.constant(row + k, "i64") for k in range(5))
    offset = at.b * b + at.h * h + at.i // block * m
    p = f.emit(f"inttoptr i64 {start.name} to ptr", f"{array.kind}*") + offset
    if not array.along_keys:
        return f.load(p)
    if array.side_by_side:
        return f.load(p + at.j0, at.lanes, at.where)
    j = f.splat(at.j0, at.lanes) + f.iota(at.lanes, "i64")
    return f.gather(p, j // block * f.splat(step, at.lanes), at.where)
