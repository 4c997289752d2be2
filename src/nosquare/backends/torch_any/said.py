"""What torch_any says before it runs: the workspace it will take, and the tiles it goes through."""

from __future__ import annotations

import math

import torch

from ...problem import Problem
from ...traffic import QUERIES_OUTSIDE, Tiling
from .. import FORWARD
from .tiling import Plan


def workspace_bytes(problem: Problem, plan: Plan, phase: str) -> int | None:
    """Bytes that the receipt of this phase will name; None where they depend on the data, as they
    do on the lengths of packed sequences.

    Forward: a tile of scores for each thread. Backward: two, and the sums of dk, dv, dbias and
    dsinks in float32 (float64 for float64).
    """
    p = problem
    if p.packed:
        return None
    wide = p.lse_dtype.itemsize
    groups = -(-p.B // plan.entries) * -(-p.Hk // plan.heads)
    threads = max(min(plan.threads, groups, torch.get_num_threads()), 1)
    tile = min(plan.entries, p.B) * min(plan.heads, p.Hk) * p.G
    tile *= min(plan.tile_m, p.M) * min(plan.tile_n, p.N) * wide
    if phase == FORWARD:
        return threads * tile
    sums = {
        "k": p.B * p.Hk * p.N * p.D,
        "v": p.B * p.Hk * p.N * p.E,
        "b": _laid_out(p, p.bias, 3),
        "s": _laid_out(p, None if p.sinks is None else (*p.sinks[:-1], p.Hq), 1),
    }
    return wide * sum(sums.get(letter, 0) for letter in p.grads) + 2 * threads * tile


def tiling(problem: Problem, plan: Plan, phase: str) -> Tiling:
    """The schedule, as the model of traffic.py takes it: query tiles outside in both passes."""
    rows = max(problem.G, 1) * plan.tile_m
    return Tiling(rows, plan.tile_n, backward=QUERIES_OUTSIDE, source="torch_any's plan")


def _laid_out(p: Problem, shape: tuple[int, ...] | None, width: int) -> int:
    """Elements of an array with one batch axis, of size 1 where no batch axis varies."""
    if shape is None:
        return 0
    head, tail = shape[: max(len(shape) - width, 0)], shape[-width:]
    return (p.B if math.prod(head) != 1 else 1) * math.prod(tail)
