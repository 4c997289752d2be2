"""Backends: one folder each. A folder here is a backend; nothing else has to be told about it.

A backend is a package that offers the five names of the protocol below. choose() takes the first by
rank that has nothing to object, and keeps the objections of the others; a backend that the user
names never falls back.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from ..errors import ArgumentError, UnsupportedError
from ..inputs import Inputs
from ..problem import Problem
from ..receipt import Ran

FORWARD, BACKWARD, BACKWARD_LSE = "forward", "backward", "backward through lse"
Grads = tuple[Tensor | None, ...]  # of q, k, v, bias, sinks


class Backend(Protocol):
    """What a backend package offers.

    RANK      the smaller is asked first
    refusals  why it cannot run the phase of this problem; empty when it can
    plan      how it would run it: a pure function of problem and device, with a readable str()
    forward   o in the layout of the contract, lse (any strides: most calls do not hand it out),
              and what ran
    backward  gradients of q, k, v, bias, sinks (None where not wanted), and what ran

    Where it can run a problem but another backend is faster, it may say so in yields(problem,
    phase), which is heard only where the user names no backend.

    It may say two things more before it runs, each of (problem, plan, phase):

    workspace_bytes  that its receipt will name; None where that depends on the data
    tiling           its schedule, a traffic.Tiling

    and remarks(), lines about this machine for `nosquare doctor`. Where it has a choice of plans,
    it may offer two things to `nosquare bench tune`:

    plans   (problem, phase, timed=()): others than plan()'s that can run, best guess first; where
            some were timed (fastest first, plan()'s among them), what follows from those instead
    builds  (problem, plan, phase, x): by what their code depends on, picklable functions that
            compile the kernels of a plan in any process; x as Inputs, of stand-ins without memory
    """

    RANK: int

    def refusals(self, problem: Problem, phase: str) -> list[str]:
        """Reasons, in the user's terms, why this backend cannot run the phase."""

    def plan(self, problem: Problem, phase: str) -> Any:
        """How it would run the phase."""

    def forward(self, problem: Problem, plan: Any, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
        """Run forward."""

    def backward(
        self,
        problem: Problem,
        plan: Any,
        x: Inputs,
        saved: tuple[Tensor, Tensor],
        cotangents: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Grads, Ran]:
        """Run backward from saved = (o, lse) and cotangents = (do, dlse)."""


@dataclass(frozen=True)
class Choice:
    """The backend that runs a phase, its plan, and why those of better rank do not."""

    name: str
    backend: Backend
    plan: Any
    refusals: Mapping[str, tuple[str, ...]]


@cache
def discover() -> dict[str, Backend]:
    """All backends by name, best rank first: the packages in this folder."""
    found: dict[str, Any] = {
        info.name: importlib.import_module(f"{__name__}.{info.name}")
        for info in pkgutil.iter_modules(__path__)
        if info.ispkg
    }
    return dict(sorted(found.items(), key=lambda item: item[1].RANK))


def named(name: str) -> Backend:
    """The backend of that name. Raises ArgumentError when there is none."""
    backends = discover()
    if name not in backends:
        raise ArgumentError(
            "There is no backend of that name.",
            {"backend": repr(name), "backends": ", ".join(backends)},
            "backend=None lets nosquare choose; `nosquare doctor` says what runs here.",
        )
    return backends[name]


def objections(backend: Backend, problem: Problem, phase: str, asked: bool = False) -> list[str]:
    """Why a backend does not take the phase; asked for by name, only why it cannot."""
    why = backend.refusals(problem, phase)
    yields = getattr(backend, "yields", None)
    return why if why or asked or yields is None else list(yields(problem, phase))


def choose(problem: Problem, phase: str, name: str | None = None) -> Choice:
    """The backend for one phase of a problem. A named backend is taken or refused, never replaced.

    Raises UnsupportedError with every reason when nobody (or not the named one) can run it.
    """
    reasons: dict[str, tuple[str, ...]] = {}
    candidates = discover() if name is None else {name: named(name)}
    for candidate, backend in candidates.items():
        why = objections(backend, problem, phase, name is not None)
        if not why:
            return Choice(candidate, backend, backend.plan(problem, phase), reasons)
        reasons[candidate] = tuple(why)
    raise UnsupportedError(
        "No backend can run this problem." if name is None else f"{name} cannot run this problem.",
        {"problem": f"{phase}: {problem.describe()}"}
        | {key: "; ".join(why) for key, why in reasons.items()},
        "backend=None, so that another backend may take it."
        if name is not None
        else "the smallest change that removes one of the reasons above.",
    )
