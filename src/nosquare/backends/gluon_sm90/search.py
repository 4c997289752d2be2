"""Other plans worth timing, for `nosquare bench tune`, and their compilation ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from ...inputs import Inputs
from ...problem import Problem
from .. import FORWARD
from . import gradients
from .attend import offline
from .attend_plan import Plan, plan, shared_bytes
from .compiled import Key, compile_for
from .form import ROWS
from .grad_plan import GradPlan

SHARED_BYTES = 227 * 1024  # of a block on a Hopper card
REGISTERS = {2: 240, 3: 160}  # of a thread, by groups: what 64 Ki leave beside the warp that loads


def plans(p: Problem, phase: str, timed: Sequence[Any] = ()) -> list[Plan]:
    """Other plans than plan()'s that fit, those that differ least first; nothing follows from those
    that were timed."""
    today = plan(p)
    if timed or today is None:
        return []
    found = dict.fromkeys(_all(p, today))
    return sorted((one for one in found if one != today), key=lambda one: _apart(one, today))


def _all(p: Problem, today: Plan) -> Iterator[Plan]:
    most = 2 if p.packed else 3  # barriers of a third slot are taken there
    halves = (False,) if p.packed else (False, True)
    for groups, tile_n, stages, q_stages, buffer, half, alias in product(
        REGISTERS, (64, 128), range(2, most + 1), (1, 2), (False, True), halves, (False, True)
    ):
        one = replace(
            today, tile_m=groups * ROWS, tile_n=tile_n, stages=stages, groups=groups,
            registers=REGISTERS[groups], q_stages=q_stages, alias=alias, buffer=buffer, half=half,
        )  # fmt: skip
        fits = shared_bytes(p, one) <= SHARED_BYTES
        if fits and (not alias or (p.D == p.E and q_stages == 1)) and (not half or groups == 2):
            yield one


def _apart(one: Plan, today: Plan) -> int:
    return sum(a != b for a, b in zip(vars(one).values(), vars(today).values(), strict=True))


def builds(p: Problem, chosen: Any, phase: str, x: Inputs) -> Mapping[Any, Callable[[], Any]]:
    """What compiles the kernel of a plan, in any process, by what its code depends on; of backward,
    the one that multiplies."""
    made = _forward if phase == FORWARD else _backward
    return {made(p, chosen, x): partial(_build, made, p, chosen, x)}


def _forward(p: Problem, chosen: Plan, x: Inputs) -> Key:
    return offline(p, chosen, x)


def _backward(p: Problem, chosen: GradPlan, x: Inputs) -> Key:
    return gradients.offline(p, chosen, x)


def _build(made: Callable[..., Key], p: Problem, chosen: Any, x: Inputs) -> None:
    compile_for(made(p, chosen, x))
