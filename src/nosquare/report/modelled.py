"""The cost model at the sizes of a recorded case, and at others: lines beside measured points."""

from __future__ import annotations

from dataclasses import replace

from ..bench.cases import Case
from ..cost import Cost
from ..device import Device
from ..estimate import contiguous, cost
from ..problem import Problem


def at_length(case: Case, n: int) -> Case:
    """The case with N keys; M follows where it was equal."""
    return replace(case, N=n, M=n if case.M == case.N else case.M)


def problem_of(case: Case) -> Problem:
    """What the case asks; its mask keeps the names of its arrays, which count as hiding nothing."""
    c = case
    sizes = {name: int(getattr(c, name)) for name in ("B", "Hq", "Hk", "M", "N", "D", "E")}
    axes = {"Hq": c.Hq, "M": c.M, "N": c.N, "1": 1}
    learns = c.wants_grads or c.grad
    return contiguous(
        sizes,
        c.dtype,
        c.mask,
        softcap=c.softcap,
        bias=tuple(axes[a] for a in c.bias.split(",")) if c.bias else None,
        sinks=(c.Hq,) if c.sinks else None,
        alibi=(c.Hq,) if c.alibi else None,
        p=c.dropout,
        grads="qkv" + "b" * bool(c.bias) + "s" * c.sinks if learns else "",
    )


def cost_of(case: Case, device: Device | None = None) -> Cost:
    """The account of a case; device: facts of where it ran, None: of a CPU like this one."""
    return cost(problem_of(case), device)


def extra_bytes(case: Case) -> int:
    """What a call adds to its inputs at its peak, by the ledger: what bench measures as peak_bytes.

    A call of both passes still has o and lse while backward runs.
    """
    found = cost_of(case)
    forward = found.forward.ledger
    first = forward.total("output", "saved", "workspace")
    if found.backward is None or not case.wants_grads:
        return first
    second = found.backward.ledger.total("output", "workspace")
    if case.phase == "backward":
        return second
    return max(first, second + forward.total("output", "saved"))
