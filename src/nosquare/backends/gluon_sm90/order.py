"""Which program works off which tiles of rows, and in which order. There are three ways:

AS_COUNTED     every so manieth of them, head by head: where all tiles cost the same
LONGEST_FIRST  those of most work of all heads first, in turns from the first program to the
               last and back: where they do not, and nobody has made a list
LISTED         from a list that the host makes for a shape which comes again: a program that is
               done takes the tile of most work among those left, as far as is known beforehand;
               tiles of heads whose keys and values fit the cache together come before others
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

AS_COUNTED, LISTED, LONGEST_FIRST = range(3)
NONE = -1
START = 1.5  # what a tile of rows costs beside its tiles of keys, in such tiles
MOST = 1 << 15  # tiles that are dealt out one by one; more are dealt out in turns
SLACK = 0.01  # of the time, which fewer heads at a time make up for by what they find in the cache


def listed(
    keys: Sequence[int], heads: int, near: Sequence[int], programs: int, most: int = MOST
) -> Tensor:
    """Numbers of tiles, int32 (turns, programs), NONE where a program has nothing to do.

    keys   tiles of keys of each tile of rows, the first rows first; the last rows are counted first
    heads  of all entries
    near   heads that are worked on together: the first that keeps the programs about as busy as the
           best of these does
    most   tiles that are dealt out one by one; where there are more, in turns
    """
    cost = torch.tensor(keys[::-1]) + START
    tables = [_table(cost, heads, n, programs, most) for n in dict.fromkeys(near)]
    busy = [_busy(table, cost) for table in tables]
    return next(t for t, b in zip(tables, busy, strict=True) if b >= max(busy) - SLACK)


def _table(cost: Tensor, heads: int, near: int, programs: int, most: int) -> Tensor:
    """The list for tiles of these costs."""
    rank = torch.argsort(cost, descending=True, stable=True)
    found = [
        (torch.arange(first, min(first + near, heads)) * len(cost) + rank[:, None]).flatten()
        for first in range(0, heads, near)
    ]
    numbers = torch.cat(found)
    if len(numbers) > most:
        return _in_turns(numbers, programs)
    return _dealt(numbers, cost[numbers % len(cost)], programs)


def _busy(table: Tensor, cost: Tensor) -> float:
    """The share of the time in which programs have something to do."""
    spent = torch.where(table >= 0, cost[table.clamp_min(0).long() % len(cost)], 0).sum(0)
    return float(spent.mean() / spent.max())


def _dealt(numbers: Tensor, cost: Tensor, programs: int) -> Tensor:
    """Each tile to the program that is free first."""
    free = [(0.0, at) for at in range(programs)]
    mine: list[list[int]] = [[] for _ in range(programs)]
    for number, more in zip(numbers.tolist(), cost.tolist(), strict=True):
        busy, at = free[0]
        heapq.heapreplace(free, (busy + more, at))
        mine[at].append(number)
    turns = max(map(len, mine))
    rows = [one + [NONE] * (turns - len(one)) for one in mine]
    return torch.tensor(rows, dtype=torch.int32).t().contiguous()


def _in_turns(numbers: Tensor, programs: int) -> Tensor:
    """One each, then one each in the opposite order."""
    turns = -(-len(numbers) // programs)
    found = torch.full((turns * programs,), NONE, dtype=torch.int64)
    found[: len(numbers)] = numbers
    table = found.view(turns, programs)
    table[1::2] = table[1::2].flip(1)
    return table.to(torch.int32).contiguous()
