"""Why a backend would run a call, and why each other would not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .backends import BACKWARD, FORWARD, discover, objections
from .problem import Problem


@dataclass(frozen=True)
class Explanation:
    """What choose() would do with one problem.

    chosen   for each phase, the backend that runs it, or None
    plans    (phase, backend) -> its plan
    reasons  (phase, backend) -> why it cannot; () when it can
    """

    problem: Problem
    chosen: Mapping[str, str | None]
    plans: Mapping[tuple[str, str], str]
    reasons: Mapping[tuple[str, str], tuple[str, ...]]

    def __str__(self) -> str:
        rows = [f"problem   {self.problem.describe()}"]
        for phase, name in self.chosen.items():
            for (where, backend), why in self.reasons.items():
                if where != phase:
                    continue
                verdict = "runs" if backend == name else "could" if not why else "cannot"
                detail = "; ".join(why) or self.plans[phase, backend]
                rows.append(f"{phase:<9} {verdict:<6} {backend:<12} {detail}")
        return "\n".join(rows)


def explain_problem(problem: Problem, name: str | None = None) -> Explanation:
    """Ask every backend (or the named one alone) about forward and, where wanted, backward."""
    chosen: dict[str, str | None] = {}
    plans: dict[tuple[str, str], str] = {}
    reasons: dict[tuple[str, str], tuple[str, ...]] = {}
    phases = (FORWARD, BACKWARD) if problem.grads else (FORWARD,)
    for phase in phases:
        chosen[phase] = None
        for backend_name, backend in discover().items():
            if name not in (None, backend_name):
                continue
            why = tuple(objections(backend, problem, phase, name is not None))
            reasons[phase, backend_name] = why
            if not why:
                plans[phase, backend_name] = str(backend.plan(problem, phase))
                chosen[phase] = chosen[phase] or backend_name
    return Explanation(problem, chosen, plans, reasons)
