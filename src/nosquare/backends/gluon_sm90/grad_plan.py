"""How backward is cut into tiles: a pure function of the problem."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from ...problem import Problem
from ...traffic import Tiling
from .attend_plan import padded
from .form import ROWS, bound_of, parts_of

TILE_N = 2 * ROWS  # keys of a program
FACT_ROWS = 64  # of a program of each small kernel of grad_rows.py
IN_TURN, UNEVEN = 32, 8  # heads: see together()
STEP = 4  # rows of the facts are padded to a multiple, 16 bytes


@dataclass(frozen=True)
class GradPlan:
    """tile_m queries by 128 keys, of which `stages` are in shared memory; two warp groups of 64
    keys, with `registers` a thread; ordered: they take turns to add to dq."""

    tile_m: int
    stages: int
    registers: int = 240
    ordered: bool = False

    def __str__(self) -> str:
        words = f"{self.tile_m} queries x {TILE_N} keys, 2 warp groups"
        order = ", in the order of keys" if self.ordered else ""
        return f"{words}, {self.stages} stages of q and do, dq added up in memory{order}"


# by the widths of q and v in tiles
PLANS = {(64, 64): GradPlan(128, 2), (128, 128): GradPlan(64, 2)}


def plan(p: Problem) -> GradPlan | None:
    """Tiles for the problem; None where there are none of its widths."""
    d, e = padded(p.D), padded(p.E)
    found = PLANS.get((d, e)) if d and e else None
    return None if found is None else replace(found, ordered=p.deterministic)


@lru_cache(maxsize=1024)
def seen_rows(p: Problem) -> tuple[int, int]:
    """Rows [first, last) outside which none sees a key."""
    bound = bound_of(p)
    if not _some(bound.span(0, p.M)):
        return 0, 0
    first = bisect_left(range(p.M), True, key=lambda i: _some(bound.span(0, i + 1)))
    after = bisect_left(range(p.M), True, key=lambda i: _some(bound.span(p.M - 1 - i, p.M)))
    return first, p.M - after


@lru_cache(maxsize=1024)
def rising(p: Problem) -> bool:
    """Whether no tile of rows sees keys before, or ends before, what the tile above it does: tiles
    of keys that see a tile of rows then lie in one row."""
    bound, origin = bound_of(p), seen_rows(p)[0]
    spans = [bound.span(i, min(i + FACT_ROWS, p.M)) for i in range(origin, p.M, FACT_ROWS)]
    return all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(spans))


def _some(span: tuple[int, int]) -> bool:
    return span[0] < span[1]


def hidden(p: Problem) -> bool:
    """Whether a pair of a tile may be hidden, or a key beyond the seen ones be read."""
    found = parts_of(p)
    assert found is not None, "refused"
    bound = bound_of(p)
    whole = bound.core(0, p.M) == (0, p.N)
    return found[1] or not whole or p.N % TILE_N != 0


def tiles(p: Problem) -> int:
    """Tiles of keys of a head."""
    return -(-p.N // TILE_N)


def pitch(p: Problem) -> int:
    """Places of the facts of a head: see grad_rows.py."""
    return -(-(p.M + shift(p)) // STEP) * STEP


def shift(p: Problem) -> int:
    """Places before the first."""
    return -seen_rows(p)[0] % STEP


def blocks(p: Problem) -> int:
    """Of FACT_ROWS rows of a head."""
    return -(-p.M // FACT_ROWS)


def together(p: Problem, chosen: GradPlan) -> int:
    """Key heads whose tiles of keys go by in turn, a tile of each: as timed on an H200. One head
    after the other is best for the cache; some together leave shorter programs for the end where
    pairs are hidden; and where tiles of keys take turns to add, a program would wait for the one
    that started just before it."""
    some = IN_TURN if chosen.ordered else UNEVEN if hidden(p) else 1
    return min(some, p.Hk * p.B)


def words(p: Problem) -> tuple[int, int, int]:
    """Of the workspace, of 4 bytes: facts of rows, sums of dq, turns."""
    heads, width = p.B * p.Hq, padded(p.D)
    assert width is not None, "refused"
    return 2 * heads * pitch(p), heads * p.M * width, heads * blocks(p) * p.deterministic


def workspace_bytes(p: Problem) -> int:
    """The facts, the sums, and whose turn it is."""
    return 4 * sum(words(p)) + (4 * p.B * p.Hq if "s" in p.grads else 0)


def tiling(p: Problem, chosen: GradPlan) -> Tiling:
    """The schedule, as the model of traffic.py takes it."""
    return Tiling(p.G * chosen.tile_m, TILE_N, source="gluon_sm90's plan")
