"""The cost model at the sizes of a recorded case, and at others: lines beside measured points."""

from __future__ import annotations

from dataclasses import replace

from ..bench.cases import Case
from ..cost import Cost
from ..device import Device
from ..estimate import cost


def at_length(case: Case, n: int) -> Case:
    """The case with N keys; M follows where it was equal."""
    return replace(case, N=n, M=n if case.M == case.N else case.M)


def cost_of(case: Case, device: Device | None = None) -> Cost:
    """The account of a case; device: facts of where it ran, None: of a CPU like this one."""
    return cost(case.problem(), device)


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
