"""torch_fused: torch's own fused kernels, with their lse, exactly where they keep the contract.

Which kernel (engine) serves is decided here; what each engine cannot do, and why, stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from .. import BACKWARD_LSE, FORWARD, Grads
from . import cpu, cuda

RANK = 500


@dataclass(frozen=True)
class Plan:
    """Which of torch's kernels, and how the problem is put to it.

    causal  the kernel's own top-left causal mask
    keys    how many keys are handed over: those beyond are visible to nobody
    fold    the query heads of a group become rows, so k and v are read once a group
    direct  the kernel takes and gives the arrays as they are
    ran     what the receipt will say, on a CPU
    """

    engine: str
    causal: bool
    keys: int
    fold: bool = False
    direct: bool = False
    ran: Ran = Ran(())  # noqa: RUF009  (a tuple: nobody can change it)

    def __str__(self) -> str:
        words = [f"torch's {self.engine}"]
        words += ["causal"] if self.causal else []
        words += ["query heads of a group folded into rows"] if self.fold else []
        return ", ".join(words)


def refusals(problem: Problem, phase: str) -> list[str]:
    """What stands against every engine that the device has; empty when one can serve."""
    why = _common(problem, phase)
    if why:
        return why
    engines = _engines(problem)
    if not engines:
        return [f"torch has no fused kernel for {problem.device.type} tensors that is known here"]
    found = {name: engine_refusals(problem, phase) for name, engine_refusals in engines.items()}
    if any(not reasons for reasons in found.values()):
        return []
    return [f"{name}: {reason}" for name, reasons in found.items() for reason in reasons]


def plan(problem: Problem, phase: str) -> Plan:
    """The first engine without objection."""
    engine = next(name for name, why in _engines(problem).items() if not why(problem, phase))
    causal = problem.mask != "full()" and problem.M > 1
    keys = problem.N
    if problem.mask == "causal(start)":
        causal, keys = problem.M > 1, min(problem.M, problem.N)
    plain = engine == cpu.NAME and problem.bias is None
    fold = plain and phase == FORWARD and problem.M == 1 and problem.G > 1
    direct = plain and not fold and keys == problem.N and len(problem.batch) == 1
    ran = cpu.ran(problem, phase, fold, keys) if engine == cpu.NAME else Ran(())
    return Plan(engine, causal, keys, fold, direct and problem.dense, ran)


def workspace_bytes(problem: Problem, plan: Plan, phase: str) -> int | None:
    """Bytes that the receipt of this phase will name; None on a card: its kernels do not tell."""
    return plan.ran.workspace_bytes if plan.engine == cpu.NAME else None


def forward(problem: Problem, plan: Plan, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o, lse and what ran."""
    engine = cpu.forward if plan.engine == cpu.NAME else cuda.forward
    return engine(problem, plan, x)


def backward(
    problem: Problem,
    plan: Plan,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k and v, and what ran."""
    engine = cpu.backward if plan.engine == cpu.NAME else cuda.backward
    assert cotangents[0] is not None  # a cotangent of lse is refused
    return engine(problem, plan, x, saved, cotangents[0])


def _engines(p: Problem) -> dict[str, Callable[[Problem, str], list[str]]]:
    return {"cpu": cpu.ENGINES, "cuda": cuda.ENGINES}.get(p.device.type, {})


def _common(p: Problem, phase: str) -> list[str]:
    """Features that none of torch's fused kernels has within the contract."""
    why = [
        f"it has no {name}"
        for name, there in (
            ("packed sequences here", p.packed),
            ("softcap", p.softcap is not None),
            ("alibi", p.alibi is not None),
            ("sinks", p.sinks is not None),
            ("dropout with a replayable mask", p.p > 0),
            ("width of v other than that of q and k", p.E != p.D),
            ("guarantee of batch invariance", p.batch_invariant),
            ("gradient through lse", phase == BACKWARD_LSE),
            ("exact_delta", p.exact_delta and phase != FORWARD),
            ("gradient of bias", "b" in p.grads and phase != FORWARD),
        )
        if there
    ]
    if not p.scale > 0:
        why.append("it takes the maximum of a row before the scale, so the scale must be positive")
    if 0 in (p.B, p.Hq, p.M, p.N):
        why.append("it is not asked for empty problems")
    served = ("full()", "causal(start)")
    square = p.mask == "causal(end)" and p.M in (1, p.N)
    if p.mask not in served and not square:
        hint = " with M != N" if p.mask == "causal(end)" else ""
        why.append(f"it has the mask {p.mask}{hint} only as an M x N array")
    names = [name for name, s in zip("qkv", p.strides, strict=True) if s[-1] != 1]
    if names:
        why.append(f"the last axis of {' and '.join(names)} is strided")
    return why
