"""The schedules of llvm_cpu, as the model of traffic.py takes them."""

from __future__ import annotations

from typing import Any

from ...problem import Problem
from ...traffic import KEYS_OUTSIDE, Tiling
from . import decode, prefill
from .decode_kernel import BLOCK
from .grad_packing import KEYS
from .prefill_packing import PANEL

SOURCE = "llvm_cpu's plan"


def tiling(problem: Problem, plan: Any, phase: str) -> Tiling:
    """Decode: all rows by blocks of keys, in chunks that are merged. Prefill: a tile of rows by the
    panels of keys that it visits, each skipped by itself. Backward: panels of keys outside, tiles
    of queries of each head of the group inside, dq summed in memory.

    What packing k and v before prefill moves, at most three times the workspace, is not in it.
    """
    if isinstance(plan, decode.Plan):
        return Tiling(plan.rows, BLOCK, decode.chunks(problem), source=SOURCE)
    if isinstance(plan, prefill.Plan):
        return Tiling(plan.sizes.rows, PANEL, source=SOURCE)
    return Tiling(problem.G * plan.tile, KEYS, backward=KEYS_OUTSIDE, source=SOURCE)
