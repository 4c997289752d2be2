"""Other plans worth timing, for `nosquare bench tune`, and their compilation ahead.

The tables of attend_plan.py and grad_plan.py are what such searches found; nothing here runs in a
user's call. A plan is worth timing where its tiles fit the card's fast memory, and its sums and
scores a thread's registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from triton.runtime.interpreter import InterpretedFunction

from ...inputs import Inputs
from ...problem import Problem
from .. import FORWARD
from . import attend, attend_plan, grad_plan, gradients
from .attend_kernel import attend as attend_kernel
from .cards import Card, card_of
from .compiled import Key, compile_for
from .form import padded
from .grad_plan import Tile

# 32-bit numbers of a thread that sums and scores may take: of 255 registers, what leaves some for
# addresses; beyond, they are put away in slow memory
REGISTERS = 224
MOST_SPLITS = 64


class Grid(NamedTuple):
    """Sides of tiles, warps and stages, each with each."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    warps: tuple[int, ...] = (4, 8)
    stages: tuple[int, ...] = (2, 3, 4)

    def tiles(self) -> Iterator[Tile]:
        """All of them."""
        return (Tile(*sides) for sides in product(*self))


ROWS = Grid((64, 128), (32, 64, 128))
FEW_ROWS = Grid((), (32, 64, 128), (2, 4, 8))
KEYS = Grid((16, 32, 64), (64, 128), stages=(1, 2, 3, 4))
PAIRS = Grid((32, 64, 128), (32, 64, 128), stages=(1, 2, 3))
# of float32, and of heads wider than WIDE
SMALL = Grid((16, 32, 64, 128), (16, 32, 64, 128), stages=(1, 2))
WIDE = 256
PASSES = {"keys": KEYS, "queries": ROWS, "pairs": PAIRS}


def plans(p: Problem, phase: str, timed: Sequence[Any] = ()) -> list[Any]:
    """Other plans than plan()'s that fit, best guess first.

    timed  fastest first, plan() among them: then what follows from those, instead
    """
    card = card_of(p.device)
    found = (_forward if phase == FORWARD else _backward)(p, card, timed)
    known = [attend_plan.plan(p, card) if phase == FORWARD else grad_plan.plan(p, card), *timed]
    return [one for one in dict.fromkeys(found) if one not in known]


def builds(p: Problem, plan: Any, phase: str, x: Inputs) -> Mapping[Any, Callable[[], Any]]:
    """What compiles each kernel of a plan, in any process, by its name and what its code depends
    on. Those that look at a mask first or merge parts are left out: small, and compiled when they
    first run.

    x  stand-ins on the meta device for what the problem has beside q, k and v
    """
    if isinstance(attend_kernel, InterpretedFunction):
        return {}
    return {
        (kernel.fn.__name__, key): partial(_build, card_of(p.device), p, plan, phase, x, number)
        for number, (kernel, key) in enumerate(_kernels(p, plan, phase, x))
    }


def _build(card: Card, p: Problem, plan: Any, phase: str, x: Inputs, number: int) -> None:
    """The card is told, so that no process but the first has to open it."""
    kernel, key = _kernels(p, plan, phase, x)[number]
    compile_for(kernel, key, card)


def _kernels(p: Problem, plan: Any, phase: str, x: Inputs) -> list[tuple[Any, Key]]:
    if phase == FORWARD:
        return [(attend_kernel, attend.offline(p, plan, x))]
    return list(gradients.offline(p, plan, x))


# ---- forward ----


def _forward(p: Problem, card: Card, timed: Sequence[Any]) -> Iterable[Any]:
    planned = attend_plan.plan(p, card)
    if timed:  # the keys of the fastest tile in more parts, or in fewer
        return _split(p, card, timed[0])
    rows = p.M * p.G if planned.folded else p.M
    few = rows < min(ROWS.rows) and not p.packed
    grid = FEW_ROWS._replace(rows=(planned.tile_m,)) if few else ROWS
    most = max(ROWS.rows) if p.packed else max(planned.tile_m, padded(rows))
    tiles = _nearest(_grid(p, grid, card), _tile(planned))
    found = (
        replace(planned, tile_m=t.m, tile_n=t.n, warps=t.warps, stages=t.stages)
        for t in tiles
        if t.m <= most and _in_registers(t.m * padded(p.E) + t.m * t.n, t.warps, card)
    )
    fits = (c for c in found if attend_plan.shared_bytes(c, card, p) <= card.shared_bytes)
    return [*_split(p, card, planned), *fits]


def _split(p: Problem, card: Card, plan: Any) -> Iterator[Any]:
    """A plan whose keys are shared among other numbers of programs, where few of them are busy."""
    alone = attend_plan.grid_of(p, replace(plan, splits=1))
    if p.packed or alone >= 2 * card.units:
        return
    most = min(MOST_SPLITS, p.N // plan.tile_n)
    for splits in (2 * plan.splits, plan.splits // 2, 4 * plan.splits):
        if 1 <= splits <= most:
            yield replace(plan, splits=splits)


def _tile(plan: Any) -> Tile:
    return Tile(plan.tile_m, plan.tile_n, plan.warps, plan.stages)


# ---- backward ----


def _backward(p: Problem, card: Card, timed: Sequence[Any]) -> Iterable[Any]:
    """The tiles of one pass at a time, and dq by atomics with some of those for dk and dv."""
    planned = grad_plan.plan(p, card)
    atomics = "q" in p.grads and not p.deterministic
    if timed:
        return _together(planned, timed)
    apart: Any = replace(planned, add=False)
    found = [apart]
    for name in PASSES:
        tiles = _nearest(_fitting(p, name, card), getattr(planned, name))
        found += [replace(apart, **{name: tile}) for tile in tiles if _used(p, planned, name)]
    if atomics:
        stages = planned.keys.stages
        keys = dict.fromkeys(one.keys for one in found if one.keys.stages == stages)
        room = card.shared_bytes
        fits = (t for t in keys if grad_plan.shared_bytes(p, "keys", t, card, True) <= room)
        found += [replace(planned, add=True, keys=tile) for tile in fits]
    return sorted(found, key=lambda one: _apart(one, planned))


def _together(planned: Any, timed: Sequence[Any]) -> Iterator[Any]:
    """The fastest tiles of all passes: their times add up. With dq by atomics, or without."""
    for add in (False, True):
        alike = [one for one in timed if one.add == add]
        best = {
            name: next((getattr(one, name) for one in alike if _only(one, planned, name)), None)
            for name in PASSES
        }
        if alike:
            tiles = {name: tile for name, tile in best.items() if tile is not None}
            yield replace(planned, add=add, **tiles)


def _only(one: Any, planned: Any, name: str) -> bool:
    """Whether the tiles of no other pass differ."""
    return all(getattr(one, n) == getattr(planned, n) for n in PASSES if n != name)


def _used(p: Problem, plan: Any, name: str) -> bool:
    if name == "pairs":
        return bool(plan.bias == "mn")
    if name == "queries":
        return "q" in p.grads or plan.bias in ("m", "-")
    return bool({"k", "v"} & set(p.grads)) or plan.bias == "n"


def _fitting(p: Problem, name: str, card: Card) -> Iterator[Tile]:
    d, e = padded(p.D), padded(p.E)
    for tile in _grid(p, PASSES[name], card):
        sums = {"keys": tile.n * (d + e), "queries": tile.m * d, "pairs": tile.m * tile.n}[name]
        fits = grad_plan.shared_bytes(p, name, tile, card) <= card.shared_bytes
        if fits and _in_registers(sums + 2 * tile.m * tile.n, tile.warps, card):
            yield tile


def _apart(one: Any, planned: Any) -> float:
    passes: float = sum(_distance(getattr(one, name), getattr(planned, name)) for name in PASSES)
    return passes + float(one.add != planned.add)


# ---- tiles ----


def _grid(p: Problem, usual: Grid, card: Card) -> Iterator[Tile]:
    """The tiles of a grid; smaller ones where rows take more room, fewer stages on AMD's cards."""
    if p.dtype == torch.float32 or padded(max(p.D, p.E)) > WIDE:
        usual = SMALL if usual.warps == SMALL.warps else usual._replace(stages=SMALL.stages)
    return (usual if card.backend == "cuda" else usual._replace(stages=(1, 2))).tiles()


def _nearest(tiles: Iterable[Tile], planned: Tile) -> list[Tile]:
    """Those that differ least from a tile first."""
    return sorted(tiles, key=lambda tile: _distance(tile, planned))


def _distance(a: Tile, b: Tile) -> float:
    """Halvings and doublings from one to the other, and stages."""
    twice = sum(abs(math.log2(x / y)) for x, y in zip(a[:3], b[:3], strict=True))
    return twice + abs(a.stages - b.stages) / 2


def _in_registers(numbers: int, warps: int, card: Card) -> bool:
    """Whether the threads of a program have registers for so many numbers of 32 bits."""
    return numbers <= REGISTERS * warps * card.warp
