"""Integers that grow evenly, and intervals between them: the arithmetic of the sweep."""

from __future__ import annotations

from itertools import pairwise
from operator import itemgetter
from typing import Any

End = Any  # an int or a Line
Keys = list[tuple[End, End]]  # intervals of keys: disjoint, not empty, in order


class Crossing(Exception):
    """A comparison of Lines changes its answer at t."""

    def __init__(self, t: int) -> None:
        super().__init__(t)
        self.t = t


class Line:
    """The integer base + slope * t, for lo <= t < hi at once.

    Sums, differences and multiples are Lines; a comparison or a quotient by a number has one value
    for all t, or raises Crossing.
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("base", "hi", "lo", "slope")

    def __init__(self, base: int, slope: int, lo: int, hi: int) -> None:
        self.base, self.slope, self.lo, self.hi = base, slope, lo, hi

    def at(self, t: int) -> int:
        """Its value at t."""
        return self.base + self.slope * t

    def __add__(self, other: End) -> Line:
        if isinstance(other, Line):
            return Line(self.base + other.base, self.slope + other.slope, self.lo, self.hi)
        return Line(self.base + other, self.slope, self.lo, self.hi)

    __radd__ = __add__

    def __mul__(self, factor: int) -> Line:
        return Line(self.base * factor, self.slope * factor, self.lo, self.hi)

    __rmul__ = __mul__

    def __neg__(self) -> Line:
        return self * -1

    def __sub__(self, other: End) -> Line:
        return self.__add__(-other)

    def __rsub__(self, other: int) -> Line:
        return -self + other

    def positive(self) -> bool:
        """Whether it is above 0, for all t; raises Crossing where it is for some."""
        first, last = self.at(self.lo) > 0, self.at(self.hi - 1) > 0
        if first == last:
            return first
        # the first t with base + slope t >= 1, or the first with base + slope t <= 0
        raise Crossing(-((self.base - 1) // self.slope) if last else -(self.base // self.slope))

    def __gt__(self, other: End) -> bool:
        return self.__sub__(other).positive()

    def __lt__(self, other: End) -> bool:
        return self.__neg__().__add__(other).positive()

    def __ge__(self, other: End) -> bool:
        return not self < other

    def __le__(self, other: End) -> bool:
        return not self > other

    def __eq__(self, other: End) -> bool:
        return not (self < other or self > other)

    def __floordiv__(self, divisor: int) -> int:
        quotient = self.at(self.lo) // divisor
        if self < quotient * divisor or self >= (quotient + 1) * divisor:
            raise AssertionError("at lo it is inside")
        return quotient

    def __mod__(self, divisor: int) -> Line:
        return self - self // divisor * divisor

    def total(self, divisor: int = 1) -> int:
        """The sum of (base + slope t) // divisor over all t."""
        return floor_sum(self.hi - self.lo, divisor, self.slope, self.at(self.lo))


def floor_sum(count: int, divisor: int, slope: int, base: int) -> int:
    """The sum of (slope * t + base) // divisor over 0 <= t < count, in logarithmic time.

    Whole multiples of the divisor are taken out; what is left counts lattice points under a line,
    and with the axes exchanged that is the same sum with divisor and slope exchanged (Euclid).
    """
    total = 0
    while True:
        total += count * (count - 1) // 2 * (slope // divisor) + count * (base // divisor)
        slope, base = slope % divisor, base % divisor
        top = slope * count + base
        if top < divisor:
            return total
        count, divisor, slope, base = top // divisor, slope, divisor, top % divisor


# ---- intervals ---------------------------------------------------------------------------------


def interval(ends: tuple[End, End]) -> Keys:
    return [ends] if ends[0] < ends[1] else []


def both(a: Keys, b: Keys) -> Keys:
    return [(lo, hi) for x in a for y in b if (lo := max(x[0], y[0])) < (hi := min(x[1], y[1]))]


def either(a: Keys, b: Keys) -> Keys:
    joined: Keys = []
    for lo, hi in sorted(a + b, key=itemgetter(0)):
        if joined and lo <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], hi)
        else:
            joined.append((lo, hi))
    return joined


def covered(keys: Keys, tile_n: int, n: int, repeats: int) -> tuple[int, int]:
    """Tiles of keys that hold one of the intervals, and their widths, summed over the Lines' t."""

    def total(x: End) -> int:
        return x.total(tile_n) if isinstance(x, Line) else x // tile_n * repeats

    # where one interval ends in the tile in which the next begins, that tile is counted twice
    shared = [(lo, hi) for (_, hi), (lo, _) in pairwise(keys) if lo - hi < tile_n]
    whole = n // tile_n * tile_n
    count = width = 0
    for sign, intervals in ((1, keys), (-1, shared)):
        for lo, hi in intervals:
            begin, end = total(lo), total(hi + tile_n - 1)
            count += sign * (end - begin)
            width += sign * ((n * repeats if hi > whole else end * tile_n) - begin * tile_n)
    return count, width
