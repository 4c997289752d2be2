"""How many pairs of a problem are visible, and which tiles a plan visits: counted, not listed.

A kind of mask says which keys a range of rows can see: span(i_lo, i_hi, N, a), in plain operators
(mask.py). So one call of it serves a million tiles at once: i_lo is a Line, an integer that grows
evenly with the number t of the tile. A comparison of Lines whose answer changes on the way stops
the call at that t, and both halves are run again, each by itself. A call that comes to its end
gives the keys of all its tiles as intervals between Lines, and sums of Lines, rounded to whole
tiles or not, have closed forms: what this costs does not grow with M and N.

A kind whose core(i, i + 1) is its span(i, i + 1) is one interval of keys in every row, and its
pairs are counted exactly in this way, with whatever it is composed of by & and |. Masks of arrays
that vary along queries or along keys (lengths, documents) are intervals for every run of equal
rows, once the arrays are given. What is left, an array over pairs, is looked at, square by square.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..bound import Bound, Rectangle
from ..errors import ArgumentError
from ..mask import Full
from ..problem import Problem
from ..spelling import parse
from .runs import UnclearError
from .sweep import Piece, Visits, swept

__all__ = ["Pairs", "Visits", "pairs", "reached", "visited", "visits"]

SIDE = 1024  # of the squares in which an array over pairs is looked at
LOOKED_AT = 1 << 32  # pairs that are looked at; for more, an upper bound has to do
TILES_LOOKED_AT = 1 << 16


@dataclass(frozen=True)
class Pairs:
    """Visible (batch, query head, query, key) of a problem: exactly so many, or at most."""

    count: int
    exact: bool


def pairs(
    problem: Problem, arrays: Sequence[Tensor] = (), cu: tuple[Tensor, Tensor] | None = None
) -> Pairs:
    """Visible (batch, query head, query, key) of a problem.

    arrays  of the mask, as the call had them. Without them, or on the meta device, they count as
            if they hid nothing, and the count is an upper bound
    cu      (cu_q, cu_k) of a packed problem; without them Hq x M x N is the bound
    """
    found = [(_pairs(piece), count) for piece, count in _pieces(problem, arrays, cu)]
    known = cu is not None or not problem.packed
    return Pairs(sum(p.count * n for p, n in found), known and all(p.exact for p, _ in found))


def visits(
    problem: Problem,
    tile_m: int,
    tile_n: int,
    arrays: Sequence[Tensor] = (),
    cu: tuple[Tensor, Tensor] | None = None,
) -> Visits:
    """What a plan of tiles of tile_m queries by tile_n keys visits; arguments as `pairs`.

    A tile is visited when the spans of the kinds, over the tile's rows and joined by the mask's &
    and |, hold a key of it. With tiles of 1 x 1 the entries are the pairs, of interval masks.
    """
    found = (
        _visits(piece, tile_m, tile_n).times(count) for piece, count in _pieces(problem, arrays, cu)
    )
    return sum(found, Visits())


def visited(problem: Problem, tile_m: int, tile_n: int, arrays: Sequence[Tensor] = ()) -> int:
    """Score entries in the tiles that a plan visits: the entries of `visits`."""
    return visits(problem, tile_m, tile_n, arrays).entries


def reached(
    problem: Problem, arrays: Sequence[Tensor] = (), cu: tuple[Tensor, Tensor] | None = None
) -> tuple[int, int]:
    """(queries that see a key, keys that a query sees), each summed over batch and query heads:
    what must be read. Arrays over pairs count as if they hid nothing."""
    rows = keys = 0
    for piece, count in _pieces(problem, arrays, cu):
        m, n = max(piece.m, 1), max(piece.n, 1)
        rows += count * _at_most(piece, 1, n).queries
        keys += count * _at_most(piece, m, 1).keys
    return rows, keys


def _pieces(
    p: Problem, arrays: Sequence[Tensor], cu: tuple[Tensor, Tensor] | None
) -> Iterator[tuple[Piece, int]]:
    """The problem, or the sequences of a packed one, and how often each occurs."""
    given = bool(arrays) and not any(t.device.type == "meta" for t in arrays)
    arrays = [t.cpu() for t in arrays] if given else _stand_ins(p.mask)
    given = given or not arrays
    if not p.packed:
        yield Piece(parse(p.mask, arrays), given, p.batch, p.Hq, p.M, p.N), 1
    elif cu is None:
        yield Piece(Full(), True, (1,), p.Hq, p.M, p.N), 1
    else:
        sizes = list(zip(*(t.diff().tolist() for t in cu), strict=True))
        if given and arrays:
            for b, (m, n) in enumerate(sizes):
                own = [t.expand(p.batch)[b : b + 1] for t in arrays]
                yield Piece(parse(p.mask, own), True, (1,), p.Hq, m, n), 1
        else:
            for (m, n), count in Counter(sizes).items():
                yield Piece(parse(p.mask, arrays), given, (1,), p.Hq, m, n), count


def _stand_ins(spelling: str) -> list[Tensor]:
    """Arrays of a dtype that the kinds accept, for t0, t1, ...: what they hold is not known."""
    found: dict[int, Tensor] = {}
    for kind in re.findall(r"\w+\([^()]*\)", spelling):
        names = [int(name) for name in re.findall(r"\bt(\d+)\b", kind)]
        for dtype in (torch.bool, torch.int64) if names else ():
            array = torch.empty((), dtype=dtype, device="meta")
            try:
                parse(kind, [array] * (max(names) + 1))
            except ArgumentError:
                continue
            found |= dict.fromkeys(names, array)
    return [found[number] for number in sorted(found)]


def _pairs(piece: Piece) -> Pairs:
    try:
        return Pairs(swept(piece, 1, 1, exact=True).entries, True)
    except UnclearError:
        if piece.given and piece.m * piece.n <= LOOKED_AT:
            return Pairs(sum(int(seen.sum()) for *_, seen in _squares(piece, SIDE, SIDE)), True)
        return Pairs(_at_most(piece, 1, 1).entries, False)


def _visits(piece: Piece, tile_m: int, tile_n: int) -> Visits:
    try:
        return swept(piece, tile_m, tile_n)
    except UnclearError:
        tiles = -(-piece.m // tile_m) * -(-piece.n // tile_n)
        if not piece.given or tiles > TILES_LOOKED_AT or piece.m * piece.n > LOOKED_AT:
            return _at_most(piece, tile_m, tile_n)
        found = (
            Visits(1, rows * keys, keys, rows).times(int((seen > 0).sum()))
            for rows, keys, seen in _squares(piece, tile_m, tile_n)
        )
        return sum(found, Visits())


def _at_most(piece: Piece, tile_m: int, tile_n: int) -> Visits:
    """From the spans and the arrays; from the spans alone; as if nothing were hidden."""
    for simpler in (piece, replace(piece, given=False), replace(piece, mask=Full())):
        with suppress(UnclearError):
            return swept(simpler, tile_m, tile_n)
    raise AssertionError("a mask that hides nothing is clear")


def _squares(piece: Piece, tile_m: int, tile_n: int) -> Iterator[tuple[int, int, Tensor]]:
    """Each tile that the spans reach: its rows, its keys, and its visible pairs (B, Hq)."""
    m, n, heads = piece.m, piece.n, piece.heads
    bound = Bound(piece.mask, piece.batch, heads, m, n)
    b = math.prod(piece.batch)
    for i in range(0, m, tile_m):
        rows = slice(i, min(i + tile_m, m))
        low, high = bound.span(rows.start, rows.stop)
        for j in range(low // tile_n * tile_n, high, tile_n):
            keys = slice(j, min(j + tile_n, n))
            area = (rows.stop - i) * (keys.stop - j)
            keep = bound.tile(Rectangle(slice(0, b), slice(0, heads), rows, keys))
            if isinstance(keep, Tensor):
                seen = keep.sum((2, 3)) * (area // max(keep.shape[2] * keep.shape[3], 1))
            else:
                seen = torch.tensor([[area * keep]])
            yield rows.stop - i, keys.stop - j, seen.expand(b, heads)
