"""Masks of arrays that vary along queries or along keys: runs of equal rows, and what each sees."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from ..mask import Mask
from .lines import Keys, either


class UnclearError(Exception):
    """Spans and runs do not say it: the pairs must be looked at."""


class _Unused:
    """Stands where a position is not to be used: any operation with it is a TypeError."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError


class Runs:
    """Array masks of one batch entry: rows of equal array values, and the keys each run sees."""

    def __init__(self, laid: list[tuple[Mask, list[Tensor]]], b: int, m: int, n: int) -> None:
        self.m, self.n = m, n
        self.laid = {
            leaf: [t[min(b, t.shape[0] - 1), 0] for t in arrays] for leaf, arrays in laid
        }  # each (M | 1, N | 1)
        arrays = [t for views in self.laid.values() for t in views]
        over_pairs = any(min(t.shape) > 1 for t in arrays)
        heads = any(t.shape[1] > 1 for _, views in laid for t in views)
        if over_pairs or heads or any(getattr(leaf, "block", 1) > 1 for leaf in self.laid):
            raise UnclearError
        self.starts = _starts([t[:, 0] for t in arrays if t.shape[0] > 1])
        self.columns = _starts([t[0] for t in arrays if t.shape[1] > 1])
        if len(self.starts) * len(self.columns) > max(1 << 20, m * n >> 10):
            raise UnclearError  # looking at the pairs takes less time
        self.found: dict[tuple[Mask, int], Keys] = {}

    def groups(self, tile_m: int) -> Iterator[tuple[int, int, dict[Mask, Keys]]]:
        """Neighbouring tiles of queries that touch the same runs: first, last + 1, and the keys
        that each array mask lets them see."""
        cuts = {0, -(-self.m // tile_m)}
        for start in self.starts[1:]:
            cuts |= {start // tile_m, -(-start // tile_m)}
        for first, last in pairwise(sorted(cuts)):
            low = bisect_right(self.starts, first * tile_m) - 1
            high = bisect_left(self.starts, min(last * tile_m, self.m))
            yield (
                *(first, last),
                {
                    leaf: reduce(either, (self.seen(leaf, run) for run in range(low, high)))
                    for leaf in self.laid
                },
            )

    def seen(self, leaf: Mask, run: int) -> Keys:
        """The keys that the rows of a run see. Raises UnclearError where that depends on i."""
        key = leaf, run
        if key not in self.found:
            self.found[key] = self._look(leaf, self.starts[run])
        return self.found[key]

    def _look(self, leaf: Mask, i: int) -> Keys:
        rows = [t[min(i, t.shape[0] - 1)] for t in self.laid[leaf]]
        a, unused = leaf.numbers(self.m, self.n), _Unused()
        # without positions, at one key of each run; or, where keep wants j, at all keys
        for positioned in (False, True):
            columns = torch.arange(self.n) if positioned else torch.tensor(self.columns)
            views = [t[columns] if len(t) > 1 else t for t in rows]
            r, c = (*views, None, None)[:2]
            with suppress(TypeError):
                keep = leaf.keep(unused, columns if positioned else unused, r, c, a)
                return _runs_of(keep.expand(len(columns)), [*columns.tolist(), self.n])
        raise UnclearError


def _starts(arrays: list[Tensor]) -> list[int]:
    """Where runs begin in which no array changes."""
    changes = {0}
    for t in arrays:
        changes.update(((t[1:] != t[:-1]).nonzero()[:, 0] + 1).tolist())
    return sorted(changes)


def _runs_of(keep: Tensor, edges: list[int]) -> Keys:
    """Intervals of a bool array: element x stands for edges[x] <= j < edges[x + 1]."""
    padded = torch.nn.functional.pad(keep.to(torch.int8), (1, 1))
    turns = padded.diff().nonzero()[:, 0].tolist()
    return [(edges[lo], edges[hi]) for lo, hi in zip(turns[::2], turns[1::2], strict=True)]
