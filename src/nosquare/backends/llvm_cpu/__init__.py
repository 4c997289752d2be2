"""llvm_cpu: kernels generated as LLVM IR for this processor, run on torch's own threads.

Needs llvmlite (`pip install "nosquare[cpu]"`); imports it when it is first asked. A kernel
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
from .. import BACKWARD_LSE, FORWARD, Grads
from . import decode, disk, gradients, prefill
from .call import even
from .ready import why_not
from .said import tiling
from .target import host

# Asked first on a CPU. Where torch's own kernel has done a small problem before this one has begun,
# yields() leaves it to torch_fused; where nothing can be generated, ready.py says why.
RANK = 300
__all__ = [
    "RANK",
    "backward",
    "forward",
    "plan",
    "refusals",
    "remarks",
    "tiling",
    "workspace_bytes",
    "yields",
]
FORWARD_KERNELS: tuple[Any, ...] = (decode, prefill)
BACKWARD_KERNELS: tuple[Any, ...] = (gradients,)
_BY_PLAN = {kernel.Plan: kernel for kernel in (*FORWARD_KERNELS, *BACKWARD_KERNELS)}
_POSITIONS = 1 << 31  # positions are counted in 32 bits


def refusals(problem: Problem, phase: str) -> list[str]:
    """What stands against every kernel; empty when one of them can serve."""
    why = _common(problem)
    if why:
        return why
    kernels = _kernels(phase)
    found = [kernel.refusals(problem) for kernel in kernels]
    return [] if any(not reasons for reasons in found) else [w for ws in found for w in ws]


def remarks() -> list[str]:
    """What else `nosquare doctor` should say of this machine."""
    return [why_not() or disk.state()]


def yields(problem: Problem, phase: str) -> list[str]:
    """Why torch's own kernel should have a problem that the first kernel here could run too."""
    if not _torch_has_it(problem, phase):
        return []
    kernel = next(kernel for kernel in _kernels(phase) if not kernel.refusals(problem))
    reasons: list[str] = kernel.slower(problem)
    return reasons


def _torch_has_it(p: Problem, phase: str) -> bool:
    """Whether torch's own kernel for CPUs keeps the contract on this problem. Where it does not,
    torch_any would run what is left to others, and that is slower at any size."""
    extras = (p.softcap, p.bias, p.sinks, p.alibi, p.p or None)
    masks = ("full()", "causal(start)", *(("causal(end)",) if p.M in (1, p.N) else ()))
    if p.packed or p.batch_invariant or p.D != p.E or not p.scale > 0 or p.mask not in masks:
        return False
    short = p.dtype in (torch.bfloat16, torch.float16)
    sums_exactly = phase == FORWARD or not (short or phase == BACKWARD_LSE)
    return sums_exactly and extras == (None,) * 5


def plan(problem: Problem, phase: str) -> Any:
    """That of the first kernel without objection."""
    kernel = next(kernel for kernel in _kernels(phase) if not kernel.refusals(problem))
    return kernel.plan(problem, host())


def workspace_bytes(problem: Problem, plan: Any, phase: str) -> int | None:
    """Bytes that the receipt of this phase will name; None where they depend on arrays."""
    found: int | None = _BY_PLAN[type(plan)].workspace_bytes(problem, plan)
    return found


def forward(problem: Problem, plan: Any, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o, lse and what ran."""
    o, lse, ran = _BY_PLAN[type(plan)].forward(problem, plan, x)
    return o, lse, ran


def backward(
    problem: Problem,
    plan: Any,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v, bias, sinks, and what ran."""
    grads, ran = _BY_PLAN[type(plan)].backward(problem, plan, x, saved, cotangents)
    return grads, ran


def _kernels(phase: str) -> tuple[Any, ...]:
    return FORWARD_KERNELS if phase == FORWARD else BACKWARD_KERNELS


def _common(p: Problem) -> list[str]:
    """What no kernel here does."""
    if p.device.type != "cpu":
        return [f"it generates code for processors, and the tensors are on {p.device.type}"]
    why = [
        reason
        for reason, there in (
            ("it computes in float32, and these are float64", p.dtype == torch.float64),
            ("it is not asked for empty problems", 0 in (p.B, p.Hq, p.M, p.N, p.E)),
            ("the batch axes are not evenly strided", not p.packed and not even(p)),
            ("positions do not fit 32 bits", p.M + p.N >= _POSITIONS),
        )
        if there
    ]
    names = [name for name, s in zip("qkv", p.strides, strict=True) if s[-1] != 1]
    if names:
        why.append(f"the last axis of {' and '.join(names)} is strided")
    missing = None if why else why_not()  # asked last: it loads LLVM
    return why if missing is None else [missing]
