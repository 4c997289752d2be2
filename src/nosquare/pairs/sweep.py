"""All tiles at once: a mask's spans over Lines, joined by its & and |, and summed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from ..bound import Bound
from ..mask import Both, Mask
from .lines import Crossing, End, Keys, Line, both, covered, either, interval
from .runs import Runs, UnclearError


@dataclass(frozen=True)
class Visits:
    """What a tiled plan visits on a fixed grid of tiles, over all batch entries and query heads.

    tiles    tiles with a key that the spans let one of their rows see
    entries  scores in them; the last tiles of a row or a column end at N and M
    keys     the sum of their widths: keys brought in for the tiles of queries
    queries  the sum of their heights: queries brought in for the tiles of keys
    """

    tiles: int = 0
    entries: int = 0
    keys: int = 0
    queries: int = 0

    def __add__(self, other: Visits) -> Visits:
        """Both together."""
        return Visits(
            self.tiles + other.tiles,
            self.entries + other.entries,
            self.keys + other.keys,
            self.queries + other.queries,
        )

    def times(self, count: int) -> Visits:
        """The same for `count` heads or entries that are alike."""
        return Visits(
            count * self.tiles, count * self.entries, count * self.keys, count * self.queries
        )


@dataclass(frozen=True)
class Piece:
    """A mask over batch entries, query heads, M queries and N keys.

    given  its arrays are there to be looked at (or it has none)
    """

    mask: Mask
    given: bool
    batch: tuple[int, ...]
    heads: int
    m: int
    n: int


def swept(piece: Piece, tile_m: int, tile_n: int, exact: bool = False) -> Visits:
    """Visits of the tiles, from spans and from runs of equal array rows.

    Raises UnclearError where these do not say it; with `exact`, where they do not say it pair by
    pair.
    """
    looked_at = piece.given and piece.m and piece.n
    leaves = [leaf for leaf in piece.mask.leaves if leaf.tensors and looked_at]
    laid = [
        (leaf, Bound(leaf, piece.batch, piece.heads, piece.m, piece.n).arrays) for leaf in leaves
    ]
    entries = max((t.shape[0] for _, arrays in laid for t in arrays), default=1)
    total = Visits()
    for b in range(entries):
        runs = Runs(laid, b, piece.m, piece.n)
        for first, last, known in runs.groups(tile_m):
            total += _summed(piece, known, (first, last), (tile_m, tile_n), exact)
    return total.times(piece.heads * (math.prod(piece.batch) if entries == 1 else 1))


def _summed(
    piece: Piece,
    known: Mapping[Mask, Keys],
    tiles: tuple[int, int],
    size: tuple[int, int],
    exact: bool,
) -> Visits:
    """Visits of a range of query tiles, split wherever a comparison changes its answer."""
    (tile_m, tile_n), total, todo = size, Visits(), [tiles]
    while todo:
        first, last = todo.pop()
        i_lo = Line(0, tile_m, first, last)
        try:
            i_hi: End = min(i_lo + tile_m, piece.m)
            keys = _keys(piece, piece.mask, known, (i_lo, i_hi), exact)
            count, width = covered(keys, tile_n, piece.n, last - first)
        except Crossing as crossing:
            todo += [(first, crossing.t), (crossing.t, last)]
            continue
        rows = (i_hi - i_lo).at(first)  # the same in all of these tiles
        total += Visits(count, rows * width, width, rows * count)
    return total


def _keys(
    piece: Piece, mask: Mask, known: Mapping[Mask, Keys], rows: tuple[End, End], exact: bool
) -> Keys:
    """The keys that the rows of a tile can see; with `exact`, that its one row does see."""
    if isinstance(mask, Both):
        parts = (_keys(piece, part, known, rows, exact) for part in mask.parts)
        return reduce(both if mask.sign == "&" else either, parts)
    if mask.tensors and mask in known:
        return known[mask]
    a = mask.numbers(piece.m, piece.n)
    try:
        keys = interval(mask.span(*rows, piece.n, a))
        if exact and keys != interval(mask.core(*rows, piece.n, a)):
            raise UnclearError
    except TypeError:  # a kind that computes what Lines cannot
        raise UnclearError from None
    return keys
