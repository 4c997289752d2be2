"""llvm_cpu: kernels generated as LLVM IR for this processor, run on torch's own threads.

Needs llvmlite (`pip install nosquare[cpu]`); imports it when the first kernel is made. A kernel
family is a module with refusals(problem), plan(problem, target), workspace_bytes(problem, plan) and
forward(problem, plan, x), or backward(...): FORWARD_KERNELS and BACKWARD_KERNELS list them, and the
first that has nothing to object runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from .. import FORWARD, Grads
from . import decode, gradients, prefill
from .call import even
from .target import host, why_not

# Asked last for now, so it runs where it is named: backend="llvm_cpu". It moves up to 300 once it
# has been measured on an idle machine, and `nosquare fit` and `plan` tell its tiles.
RANK = 950
FORWARD_KERNELS: tuple[Any, ...] = (decode, prefill)
BACKWARD_KERNELS: tuple[Any, ...] = (gradients,)
_POSITIONS = 1 << 31  # positions are counted in 32 bits


def refusals(problem: Problem, phase: str) -> list[str]:
    """What stands against every kernel; empty when one of them can serve."""
    why = _common(problem, phase)
    if why:
        return why
    kernels = _kernels(phase)
    found = [kernel.refusals(problem) for kernel in kernels]
    return [] if any(not reasons for reasons in found) else [w for ws in found for w in ws]


def yields(problem: Problem, phase: str) -> list[str]:
    """Why torch's own kernels should have a problem that the first kernel here could run too."""
    kernel = next(kernel for kernel in _kernels(phase) if not kernel.refusals(problem))
    reasons: list[str] = kernel.slower(problem)
    return reasons


def plan(problem: Problem, phase: str) -> Any:
    """That of the first kernel without objection."""
    kernel = next(kernel for kernel in _kernels(phase) if not kernel.refusals(problem))
    return kernel.plan(problem, host())


def workspace_bytes(problem: Problem, plan: Any, phase: str) -> int | None:
    """Bytes that the receipt of this phase will name; None where they depend on arrays."""
    found: int | None = _of(plan, phase).workspace_bytes(problem, plan)
    return found


def forward(problem: Problem, plan: Any, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o, lse and what ran."""
    o, lse, ran = _of(plan, FORWARD).forward(problem, plan, x)
    return o, lse, ran


def backward(
    problem: Problem,
    plan: Any,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v, bias, sinks, and what ran."""
    grads, ran = _of(plan, "backward").backward(problem, plan, x, saved, cotangents)
    return grads, ran


def _kernels(phase: str) -> tuple[Any, ...]:
    return FORWARD_KERNELS if phase == FORWARD else BACKWARD_KERNELS


def _of(plan: Any, phase: str) -> Any:
    return next(kernel for kernel in _kernels(phase) if isinstance(plan, kernel.Plan))


def _common(p: Problem, phase: str) -> list[str]:
    """What no kernel here does."""
    if p.device.type != "cpu":
        return [f"it generates code for processors, and the tensors are on {p.device.type}"]
    why = [
        reason
        for reason, there in (
            ("it computes in float32, and these are float64", p.dtype == torch.float64),
            ("it has no backward of packed sequences", p.packed and phase != FORWARD),
            ("it is not asked for empty problems", 0 in (p.B, p.Hq, p.M, p.N, p.E)),
            ("the batch axes are not evenly strided", not p.packed and not even(p)),
            ("positions do not fit 32 bits", p.M + p.N >= _POSITIONS),
        )
        if there
    ]
    names = [name for name, s in zip("qkv", p.strides, strict=True) if s[-1] != 1]
    if names:
        why.append(f"the last axis of {' and '.join(names)} is strided")
    missing = why_not()
    why += [] if missing is None else [missing]
    return why
