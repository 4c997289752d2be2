"""What the cost model says of a case: to be set beside what was measured."""

from __future__ import annotations

from typing import Any

import torch

from ..cost import Cost
from ..device import describe
from ..inputs import Inputs, Spec
from ..ops import wanted
from ..problem import Problem
from ..traffic import QUERIES_OUTSIDE, Tiling
from .cases import Data


def cost(data: Data, tiling: Tiling | None = None) -> Cost:
    """The account of a case on the device that its arrays are on.

    tiling  of the schedule; None: the largest usual tiles that fit the device
    """
    c = data.case
    seed = torch.tensor(data.seed) if c.dropout else None
    x = Inputs(data.q, data.k, data.v, data.bias, data.sinks, data.alibi, seed,
               data.cu, data.cu, data.mask.tensors)  # fmt: skip
    problem = Problem.of(x, Spec(str(data.mask), None, c.softcap, c.dropout), wanted(x))
    phase = "training" if c.wants_grads else "decode" if c.phase == "decode" else "prefill"
    return Cost.of(problem, describe(data.device), phase, data.mask.tensors, tiling=tiling)


def tiles(data: Data, tile_m: int, tile_n: int) -> Tiling:
    """The schedule of torch_any with these tiles, as the model takes it."""
    c = data.case
    rows, keys = c.G * min(tile_m, c.M), min(tile_n, c.N)
    return Tiling(rows, keys, backward=QUERIES_OUTSIDE, source="as asked for")


def summary(account: Cost, phase: str) -> dict[str, Any]:
    """The model's bytes of the passes that the phase of a case has: MODEL in record.py."""
    passes = [account.forward] if phase != "backward" else []
    if account.backward is not None:
        passes.append(account.backward)
    moved = [one.traffic for one in passes]
    l2 = [None if t is None else t.l2_bytes for t in moved]
    hbm = [None if t is None else t.hbm_bytes for t in moved]
    return {
        "compulsory_bytes": sum(one.compulsory_bytes for one in passes),
        "l2_bytes": _sum(l2),
        "hbm_bytes": _sum(hbm),
        "tiles": "; ".join(dict.fromkeys(str(t.tiling) for t in moved if t is not None)),
    }


def _sum(numbers: list[int | None]) -> int | None:
    known = [n for n in numbers if n is not None]
    return sum(known) if len(known) == len(numbers) else None
