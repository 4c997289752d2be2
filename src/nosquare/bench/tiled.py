"""nosquare's torch_any with tiles of a given size: the contestants of the experiment.

A plan is an argument of a backend, so a size of tiles is asked for by making the plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends import torch_any
from ..backends.torch_any.tiling import Plan
from ..inputs import Inputs, Spec
from ..ops import LETTERS, wanted
from ..problem import Problem
from ..receipt import LOGS, Ran, Receipt, note
from .cases import Data
from .contestants import Attend, Contestant

_NAME = re.compile(r"nosquare:torch_any@([1-9]\d*)x([1-9]\d*)")


def tiled(tile_m: int, tile_n: int) -> Contestant:
    """torch_any in tiles of tile_m queries by tile_n keys, all heads of the case at a time."""
    name = f"nosquare:torch_any@{tile_m}x{tile_n}"
    return Contestant(name, partial(_attend, tile_m=tile_m, tile_n=tile_n))


def by_name(name: str) -> Contestant | None:
    """The contestant that is spelled "nosquare:torch_any@64x128"; None for any other spelling."""
    found = _NAME.fullmatch(name)
    return tiled(int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class _Call:
    """One call with its plan. x as the backend takes it."""

    problem: Problem
    plan: Plan
    x: Inputs

    def note(self, op: str, ran: Ran) -> None:
        if LOGS:
            note(Receipt(op, self.problem, "torch_any", str(self.plan), *ran))


def _attend(data: Data, tile_m: int, tile_n: int) -> Attend:
    c = data.case
    plan = Plan(tile_m, tile_n, heads=c.Hk, entries=c.B)
    seed = torch.tensor(data.seed, device=data.device) if c.dropout else None
    x = Inputs(data.q, data.k, data.v, data.bias, data.sinks, data.alibi, seed,
               arrays=data.mask.tensors)  # fmt: skip
    spec = Spec(str(data.mask), None, c.softcap, c.dropout)
    call = _Call(Problem.of(x, spec, wanted(x)), plan, x)

    def attend() -> Tensor:
        o: Tensor = _Tiled.apply(call, *x[:5])  # type: ignore[no-untyped-call]
        return o

    return attend


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *leaves: Tensor | None) -> Tensor:
        o, lse, ran = torch_any.forward(call.problem, call.plan, call.x)
        call.note("forward", ran)
        ctx.call = call
        ctx.save_for_backward(o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        grads, ran = torch_any.backward(
            call.problem, call.plan, call.x, ctx.saved_tensors, (do, None)
        )
        call.note("backward", ran)
        assert len(grads) == len(LETTERS)
        return (None, *grads)
