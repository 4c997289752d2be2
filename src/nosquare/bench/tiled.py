"""nosquare with plans of one's own: the contestants of the experiment and of the search for plans.

A plan is an argument of a backend, so another one is asked for by making it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends import BACKWARD, FORWARD, Backend, named
from ..backends.torch_any.tiling import Plan
from ..inputs import Inputs, Spec
from ..ops import LETTERS, wanted
from ..problem import Problem
from ..receipt import LOGS, Ran, Receipt, note
from .cases import Data
from .contestants import Attend, Contestant

PlanOf = Callable[[Problem, str], Any]  # the plan for a phase of a problem
_NAME = re.compile(r"nosquare:torch_any@([1-9]\d*)x([1-9]\d*)")


def planned(name: str, backend: str, plan_of: PlanOf) -> Contestant:
    """A backend with the plans that plan_of gives."""
    return Contestant(name, partial(_attend, backend=backend, plan_of=plan_of))


def tiled(tile_m: int, tile_n: int) -> Contestant:
    """torch_any in tiles of tile_m queries by tile_n keys, all heads of the case at a time."""

    def plan_of(p: Problem, phase: str) -> Plan:
        return Plan(tile_m, tile_n, heads=p.Hk, entries=p.B)

    return planned(f"nosquare:torch_any@{tile_m}x{tile_n}", "torch_any", plan_of)


def by_name(name: str) -> Contestant | None:
    """The contestant that is spelled "nosquare:torch_any@64x128"; None for any other spelling."""
    found = _NAME.fullmatch(name)
    return tiled(int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class _Call:
    """One call with its plans. x as the backend takes it."""

    problem: Problem
    name: str
    backend: Backend
    plan_of: PlanOf
    x: Inputs

    def note(self, op: str, plan: Any, ran: Ran) -> None:
        if LOGS:
            note(Receipt(op, self.problem, self.name, str(plan), *ran))


def _attend(data: Data, backend: str, plan_of: PlanOf) -> Attend:
    c = data.case
    seed = torch.tensor(data.seed, device=data.device) if c.dropout else None
    x = Inputs(data.q, data.k, data.v, data.bias, data.sinks, data.alibi, seed,
               data.cu, data.cu, data.mask.tensors)  # fmt: skip
    spec = Spec(str(data.mask), None, c.softcap, c.dropout)
    call = _Call(Problem.of(x, spec, wanted(x)), backend, named(backend), plan_of, x)

    def attend() -> Tensor:
        o: Tensor = _Planned.apply(call, *x[:5])  # type: ignore[no-untyped-call]
        return o

    return attend


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *leaves: Tensor | None) -> Tensor:
        plan = call.plan_of(call.problem, FORWARD)
        o, lse, ran = call.backend.forward(call.problem, plan, call.x)
        call.note(FORWARD, plan, ran)
        ctx.call = call
        ctx.save_for_backward(o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        plan = call.plan_of(call.problem, BACKWARD)
        grads, ran = call.backend.backward(
            call.problem, plan, call.x, ctx.saved_tensors, (do, None)
        )
        call.note(BACKWARD, plan, ran)
        assert len(grads) == len(LETTERS)
        return (None, *grads)
