"""How forward is cut into tiles: a pure function of the problem and the card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...problem import Problem
from ...traffic import Tiling
from . import sights
from .cards import Card
from .form import padded

MOST_SPLITS = 32
# set by tests that want small tiles or many splits: (tile_m, tile_n, splits)
FORCED: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Plan:
    """tile_m rows by tile_n keys for a program of `warps` warps; `stages` tiles of keys under way.

    folded  rows are the queries of all heads that share a key head
    splits  programs that share the keys of a tile; what they saw is merged by a second kernel
    """

    tile_m: int
    tile_n: int
    warps: int
    stages: int
    folded: bool = False
    splits: int = 1

    def __str__(self) -> str:
        words = f"{self.tile_m} rows x {self.tile_n} keys, {self.warps} warps, {self.stages} stages"
        words += ", query heads of a group folded into rows" if self.folded else ""
        return words + (f", keys in {self.splits} parts" if self.splits > 1 else "")


# Tiles for many rows by the width of heads that they are for, best first: where a mask is made of
# intervals; and (_MIXED) where an array or a bias of pairs costs registers too, or on some cards
# the join of two kinds.
_HOPPER = ((128, Plan(64, 64, 4, 3)), (256, Plan(128, 64, 8, 2)))
_HOPPER_LONG = ((64, Plan(64, 64, 4, 3)), (128, Plan(128, 128, 8, 3)), *_HOPPER)
_HOPPER_FLOAT32 = ((128, Plan(128, 64, 8, 1)),)
_BLACKWELL = (
    (64, Plan(128, 64, 4, 3)),
    (128, Plan(128, 64, 8, 3)),
    (256, Plan(64, 64, 8, 2)),
)
_AMPERE = (
    (64, Plan(128, 64, 4, 3)),
    (128, Plan(128, 64, 8, 3)),
    (128, Plan(128, 64, 8, 2)),
    (256, Plan(64, 64, 8, 2)),
)
_AMD = ((128, Plan(128, 64, 4, 1)), (256, Plan(64, 32, 4, 1)))
_HOPPER_MIXED = (
    (64, Plan(64, 64, 4, 3)),
    (128, Plan(64, 64, 4, 2)),
    (256, Plan(64, 64, 8, 2)),
)
_MIXED = ((128, Plan(64, 64, 8, 2)), (256, Plan(64, 32, 8, 2)))
_AMD_MIXED = ((256, Plan(64, 32, 4, 1)),)
_FLOAT32 = (
    (64, Plan(64, 32, 4, 2)),
    (128, Plan(32, 32, 4, 1)),
    (128, Plan(32, 16, 4, 1)),
    (256, Plan(16, 16, 4, 1)),
)
_LONG, _MANY = 12288, 128  # keys and rows from which wider tiles are worth their longer start
_WIDEST = 1 << 13  # of heads that any tile is tried for
_LAST = ((256, Plan(64, 32, 8, 2)), (_WIDEST, Plan(16, 32, 4, 1)), (_WIDEST, Plan(16, 16, 4, 1)))


def _table(p: Problem, card: Card) -> tuple[tuple[int, Plan], ...]:
    hopper = card.backend == "cuda" and card.arch == 90
    if p.dtype == torch.float32:
        return (*_HOPPER_FLOAT32, *_FLOAT32) if hopper else _FLOAT32
    mixed = sights.looks(p) or _bias_of_pairs(p)
    joined = mixed or "&" in p.mask or "|" in p.mask
    if card.backend == "hip":
        return _AMD_MIXED if mixed else _AMD
    if hopper:
        many = p.packed or p.M * p.G >= _MANY
        long = many and p.N >= _LONG and p.p == 0
        return _HOPPER_MIXED if mixed else _HOPPER_LONG if long else _HOPPER
    if joined:
        return _MIXED
    return _BLACKWELL if card.wgmma else _AMPERE


def _bias_of_pairs(p: Problem) -> bool:
    return min((1, 1, *(p.bias or ()))[-2:]) > 1


def shared_bytes(plan: Plan, card: Card, p: Problem) -> int:
    """Fast memory that a program may take: the tiles of k and v under way, and of a bias for each
    pair; q where products read it from there or else the weights; of float32 the three parts of k
    or v; room for what reductions exchange. Tests hold it against what the compiler takes."""
    d, e = padded(p.D), padded(p.E)
    from_shared = card.wgmma or p.dtype == torch.float32
    held = plan.tile_m * max(d if from_shared else 0, plan.tile_n)
    tiles = plan.stages * plan.tile_n * (d + e)
    pairs = 4 * plan.stages * plan.tile_m * plan.tile_n if _bias_of_pairs(p) else 0
    if p.dtype == torch.float32 and card.backend == "cuda":
        pairs += 6 * plan.tile_n * max(d, e)
    return p.dtype.itemsize * (tiles + held) + pairs + (2048 if card.arch == 90 else 8192)


def candidates(p: Problem, card: Card) -> Iterator[Plan]:
    """Tiles for many rows, best first."""
    width = padded(max(p.D, p.E))
    yield from (plan for widest, plan in (*_table(p, card), *_LAST) if width <= widest)


def fitting(problem: Problem, card: Card) -> Plan | None:
    """The first that fits the card's fast memory; None where none does."""
    room = card.shared_bytes
    fits = (c for c in candidates(problem, card) if shared_bytes(c, card, problem) <= room)
    return next(fits, None)


def plan(problem: Problem, card: Card) -> Plan:
    """Tiles that fit; few rows are folded, and their keys shared among idle units."""
    p = problem
    chosen = fitting(p, card)
    assert chosen is not None, "refused"
    folded = p.G > 1 and chosen.tile_m > p.M and not p.packed
    rows = p.M * p.G if folded else p.M
    if not p.packed and rows < chosen.tile_m:
        tile_m = max(16, 1 << (max(rows, 1) - 1).bit_length())
        chosen = replace(chosen, tile_m=tile_m, warps=4)
    chosen = replace(chosen, folded=folded)
    if FORCED is not None:
        tile_m, tile_n, splits = FORCED
        return replace(chosen, tile_m=tile_m, tile_n=tile_n, splits=1 if p.packed else splits)
    return replace(chosen, splits=_splits(p, chosen, card, rows))


def _splits(p: Problem, chosen: Plan, card: Card, rows: int) -> int:
    """As many as keep all units busy, each with several tiles; a power of 2."""
    if p.packed or 0 in (p.B, p.Hq, p.M, p.N):
        return 1
    heads = p.Hk if chosen.folded else p.Hq
    # a row's bits may not depend on what else is in the batch
    entries = 1 if p.batch_invariant else p.B
    programs = entries * heads * -(-rows // chosen.tile_m)
    most = min(2 * card.units // programs, p.N // (4 * chosen.tile_n), MOST_SPLITS)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


def programs(p: Problem, plan: Plan) -> tuple[int, int, int, int]:
    """(tiles, heads, group, splits): the grid's axes, and how many heads are folded."""
    group = p.G if plan.folded else 1
    tiles = p.M // plan.tile_m + p.B + 1 if p.packed else -(-p.M * group // plan.tile_m)
    return tiles, p.Hq // group, group, plan.splits


def grid_of(p: Problem, plan: Plan) -> int:
    """Programs of the main kernel."""
    tiles, heads, _, splits = programs(p, plan)
    return tiles * heads * (1 if p.packed else p.B) * splits


def sighted(p: Problem, plan: Plan) -> bool:
    """Whether a kernel looks at the mask's arrays before the main one does. Not for a few tiles of
    keys, nor for few rows: a program of its own for all keys of a row would be waited for."""
    many = plan.tile_m <= p.M and 2 * plan.tile_n < p.N
    return sights.looks(p) and many and plan.splits == 1 and not plan.folded


def sight_words(p: Problem, plan: Plan) -> int:
    """Numbers of 32 bits that it writes."""
    return sights.words(p, programs(p, plan)[0] * (1 if p.packed else p.B))


def workspace_bytes(p: Problem, plan: Plan) -> int:
    """float32 o and lse of each part of the keys, or what a kernel has seen of the mask."""
    if sighted(p, plan):
        return 4 * sight_words(p, plan)
    return 4 * plan.splits * p.B * p.Hq * p.M * (p.E + 1) if plan.splits > 1 else 0


def tiling(p: Problem, plan: Plan) -> Tiling:
    """The schedule, as the model of traffic.py takes it."""
    rows = plan.tile_m * (1 if plan.folded else p.G)
    return Tiling(rows, plan.tile_n, plan.splits, source="triton_any's plan")
