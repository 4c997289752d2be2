"""triton_any: portable Triton kernels for NVIDIA cards from sm_80 on, and AMD's.

Every feature of the contract in kernels; masks through their own keep and span (masks.py). Kernels
are compiled for the form of a problem, not for its lengths, and launched without Triton's
dispatcher (compiled.py). Needs triton, which a CUDA build of torch brings along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from ...traffic import Tiling
from .. import FORWARD, Grads

# Before torch_fused: yields() leaves to torch's kernels what they are faster at.
RANK = 400
__all__ = [
    "RANK",
    "backward",
    "builds",
    "forward",
    "plan",
    "plans",
    "refusals",
    "tiling",
    "workspace_bytes",
    "yields",
]
_POSITIONS = 1 << 30  # positions are counted in 32 bits, and a window may reach M + N beyond them
_PROGRAMS = 1 << 31
_OLDEST = 80


def refusals(problem: Problem, phase: str) -> list[str]:
    """What stands against it; empty when it can run the phase."""
    p = problem
    if p.device.type != "cuda" and not _interpreter(p.device.type):
        return [f"it has kernels for GPUs, and the tensors are on {p.device.type}"]
    why = [
        reason
        for reason, there in (
            ("it computes in float32, and these are float64", p.dtype == torch.float64),
            ("values have no width: E is 0", p.E == 0),
            ("positions do not fit 32 bits", p.M + p.N >= _POSITIONS),
        )
        if there
    ]
    if find_spec("triton") is None:
        why.append('triton is not installed: pip install "nosquare[triton]"')
    return why or _too_large(p, phase)


def yields(problem: Problem, phase: str) -> list[str]:
    """Why one of torch's own kernels should have a problem that those here could run too."""
    from .cards import card_of
    from .rivals import faster

    return faster(problem, phase, card_of(problem.device))


def _too_large(p: Problem, phase: str) -> list[str]:
    from . import cards, form

    card, half = cards.card_of(p.device), _half(phase)
    if card.backend == "cuda" and int(card.arch) < _OLDEST:
        return [f"the card is {card}, and Triton's products need sm_{_OLDEST}"]
    if not (p.packed or form.even(p)):
        return ["the batch axes are not evenly strided"]
    if half.fitting(p, card) is None:
        return [f"no tile of width {max(p.D, p.E)} fits the {card.shared_bytes} bytes of a block"]
    if half.grid_of(p, half.plan(p, card)) >= _PROGRAMS:
        return ["more programs than a grid has"]
    return []


def _half(phase: str) -> Any:
    """The module that plans a phase: kernels are read, and triton loaded, when one is asked for."""
    from . import attend_plan, grad_plan

    return attend_plan if phase == FORWARD else grad_plan


@cache
def _interpreter(device: str) -> bool:
    """Whether kernels run on arrays of a CPU: TRITON_INTERPRET=1, for tests."""
    if device != "cpu" or find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def plan(problem: Problem, phase: str) -> Any:
    """Tiles for the problem on its card."""
    from .cards import card_of

    return _half(phase).plan(problem, card_of(problem.device))


def plans(problem: Problem, phase: str, timed: Sequence[Any] = ()) -> list[Any]:
    """Other plans worth timing, or what follows from those that were."""
    from .search import plans as found

    return found(problem, phase, timed)


def builds(problem: Problem, plan: Any, phase: str, x: Inputs) -> Mapping[Any, Callable[[], Any]]:
    """What compiles the kernels of a plan ahead."""
    from .search import builds as found

    return found(problem, plan, phase, x)


def workspace_bytes(problem: Problem, plan: Any, phase: str) -> int | None:
    """Bytes that the receipt of this phase will name."""
    found: int | None = _half(phase).workspace_bytes(problem, plan)
    return found


def tiling(problem: Problem, plan: Any, phase: str) -> Tiling:
    """The schedule, as the model of traffic.py takes it."""
    found: Tiling = _half(phase).tiling(problem, plan)
    return found


def forward(problem: Problem, plan: Any, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o, lse and what ran."""
    out: tuple[Tensor, Tensor, Ran] = _halves()[0].forward(problem, plan, x)
    return out


def backward(
    problem: Problem,
    plan: Any,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v, bias, sinks, and what ran."""
    out: tuple[Grads, Ran] = _halves()[1].backward(problem, plan, x, saved, cotangents)
    return out


@cache
def _halves() -> tuple[Any, Any]:
    """What runs forward and backward. An import in every call would take a microsecond of it."""
    from . import attend, gradients

    return attend, gradients
