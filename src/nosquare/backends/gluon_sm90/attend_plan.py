"""How forward is cut into tiles: a pure function of the problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ...bound import Bound
from ...problem import Problem
from ...traffic import Tiling
from .form import ROWS, WIDTHS, bound_of, parts_of


@dataclass(frozen=True)
class Plan:
    """tile_m rows by tile_n keys, of which `stages` are in shared memory; `groups` warp groups of
    64 rows, with `registers` a thread.

    group   query heads whose rows share a tile, all of those that share a key head; 1: one
    q_stages  tiles of rows of which q is in shared memory
    alias   o takes the place of q in shared memory
    buffer  weights of the next tile have registers of their own
    half    a group that sees at most half of its last tile of keys multiplies no more
    """

    tile_m: int
    tile_n: int
    stages: int
    groups: int
    registers: int
    q_stages: int = 1
    group: int = 1
    alias: bool = False
    buffer: bool = False
    half: bool = False

    def __str__(self) -> str:
        words = f"{self.tile_m} rows x {self.tile_n} keys, {self.groups} warp groups in turns"
        words += f", {self.stages} stages of k and v, {self.q_stages} of q"
        words += ", o in the place of q" if self.alias else ""
        words += ", weights kept apart" if self.buffer else ""
        words += ", half of the last tile" if self.half else ""
        return words + (f", {self.group} query heads a tile" if self.group > 1 else "")


SHORT = 2048  # keys up to which the last tile is worth a kernel of its own
SHORTEST = 512  # keys up to which tiles of 192 rows are too wide, where some are hidden
NARROW = Plan(128, 128, 2, 2, 240, q_stages=2, half=True)
FOLDED = (2, 4, 8, 16, 32, 64)  # heads of a group whose rows may share a tile: they divide ROWS
# by the widths of q and v in tiles
PLANS = {
    (64, 64): Plan(192, 128, 3, 3, 160, q_stages=2, buffer=True),
    (128, 128): Plan(128, 128, 2, 2, 240, q_stages=2, buffer=True),
    (256, 256): Plan(128, 64, 2, 2, 240, alias=True),
    (256, 128): Plan(128, 64, 2, 2, 240, buffer=True),
}


def padded(width: int) -> int | None:
    """The width of tiles that holds rows of a width; None: none does."""
    return next((w for w in WIDTHS if w >= width), None)


def plan(p: Problem) -> Plan | None:
    """Tiles for the problem; None where there are none of its widths."""
    d, e = padded(p.D), padded(p.E)
    found = PLANS.get((d, e)) if d and e else None
    if found is None:
        return None
    if p.packed:  # its work takes the barriers of a third slot; nobody knows where tiles are cut
        return replace(found, stages=2, buffer=found.groups == 2)
    if p.M * 2 <= ROWS and p.G in FOLDED:
        found = replace(found, group=p.G)
    if found.groups == 3 and p.N <= SHORTEST and len(set(rows_of(p, found).keys)) > 1:
        return NARROW
    if found.groups == 2 and p.N <= SHORT and found.group == 1:
        return replace(found, half=True, buffer=False)
    if found.groups == 3 and not rows_of(p, found).even:  # 160 registers do not hold both
        return replace(found, buffer=False)
    return found


class Rows(NamedTuple):
    """The tiles of rows of one head (or of those that share tiles), all that their code and their
    order depend on.

    keys    tiles of keys that each loads
    hidden, more, half, even  see form.Form
    """

    keys: tuple[int, ...]
    hidden: bool
    more: bool
    half: bool
    even: bool


@lru_cache(maxsize=4096)
def rows_of(p: Problem, chosen: Plan) -> Rows:
    """What the mask says of the tiles of a problem."""
    if p.packed:  # nobody on the host knows how long sequences are
        return Rows((), True, p.mask != "full()", False, False)
    bound, (_, lengths) = bound_of(p), parts_of(p) or (None, False)
    wide, rows = chosen.tile_n, p.M * chosen.group
    keys, most, half = [], 0, chosen.half
    for start in range(0, rows, chosen.tile_m):
        groups = range(start, min(start + chosen.tile_m, rows), ROWS)
        seen = [_seen(bound, chosen, row, ROWS) for row in groups]
        first, last, _ = _seen(bound, chosen, start, chosen.tile_m)
        keys.append(last - first)
        most = max(most, *(top - whole for _, top, whole in seen))
        for row in groups[::2]:
            half = half and _last(bound, chosen, row) <= wide // 2
    even = p.N % wide == 0 and bound.span(0, p.M) == (0, p.N) and not lengths
    return Rows(tuple(keys), lengths or most > 0, most > 1, half and even and most < 2, even)


def _seen(bound: Bound, chosen: Plan, row: int, count: int) -> tuple[int, int, int]:
    """(first, last, whole): the tiles of keys that rows see, at least one; those from `whole` on
    have something hidden."""
    i_lo, i_hi = row // chosen.group, min((row + count - 1) // chosen.group + 1, bound.m)
    lo, hi = bound.span(i_lo, i_hi)
    first = lo // chosen.tile_n
    last = max(-(-hi // chosen.tile_n), first + 1)
    c_lo, c_hi = bound.core(i_lo, i_hi)
    low = max(-(-c_lo // chosen.tile_n), first)
    whole = min(max(c_hi // chosen.tile_n, low), last)
    return first, last, min(whole, last - 1) if low >= last else whole


def _last(bound: Bound, chosen: Plan, row: int) -> int:
    """Keys of its last tile that a group of rows from `row` on may see."""
    i_lo, i_hi = row // chosen.group, min((row + ROWS - 1) // chosen.group + 1, bound.m)
    return (bound.span(i_lo, i_hi)[1] - 1) % chosen.tile_n + 1


def tiles(p: Problem, chosen: Plan) -> int:
    """Tiles of rows of a head, in an entry or in all packed sequences, with room for their ends."""
    if p.packed:
        return p.M // chosen.tile_m + p.B + 1
    return -(-p.M * chosen.group // chosen.tile_m)


def alive(p: Problem) -> tuple[int, int]:
    """The keys [lo, hi) outside which nobody sees any."""
    return bound_of(p).span(0, p.M)


def tiling(p: Problem, chosen: Plan) -> Tiling:
    """The schedule, as the model of traffic.py takes it."""
    rows = chosen.tile_m * (1 if chosen.group > 1 else p.G)
    return Tiling(rows, chosen.tile_n, source="gluon_sm90's plan")


def shared_bytes(p: Problem, chosen: Plan) -> int:
    """Fast memory that a block takes: tiles of q, o, k and v, and barriers."""
    d, e = padded(p.D), padded(p.E)
    assert d is not None and e is not None, "refused"
    rows = chosen.tile_m * (chosen.q_stages * d + (0 if chosen.alias else e))
    return p.dtype.itemsize * (rows + chosen.stages * chosen.tile_n * (d + e)) + 1024


assert all(one.tile_m == ROWS * one.groups for one in PLANS.values())
