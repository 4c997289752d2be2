"""Receipts: what really ran, call by call.

    with ns.receipts() as log:
        ns.attention(q, k, v)
    print(log)

Off, a call pays one look at an empty list.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from .problem import Problem


class Ran(NamedTuple):
    """What a backend says after a launch.

    kernels          what it launched, in order of first use
    workspace_bytes  memory it took beyond inputs and outputs, at its peak
    copies           inputs it had to copy, in words; () when none
    """

    kernels: tuple[str, ...]
    workspace_bytes: int = 0
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Receipt:
    """One forward or backward that ran.

    op        "forward", "backward" or "higher derivative"
    refusals  backends of better rank that could not take it, each with its reasons
    """

    op: str
    problem: Problem
    backend: str
    plan: str
    kernels: tuple[str, ...]
    workspace_bytes: int
    copies: tuple[str, ...] = ()
    refusals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [
            f"{self.op:<8} {self.backend:<11} {self.problem.describe()}",
            f"{'':8} plan {self.plan}; kernels {', '.join(self.kernels)}; "
            f"workspace {self.workspace_bytes:,} bytes",
        ]
        rows += [f"{'':8} copied {what}" for what in self.copies]
        rows += [f"{'':8} not {name}: {'; '.join(why)}" for name, why in self.refusals.items()]
        return "\n".join(rows)


class Log(list[Receipt]):
    """Receipts in the order in which the calls ran."""

    def __str__(self) -> str:
        return "\n".join(str(receipt) for receipt in self) or "no attention ran"


# the open logs; a backward may run on another thread, so this is not thread-local
LOGS: list[Log] = []
_LOCK = threading.Lock()


@contextmanager
def receipts() -> Iterator[Log]:
    """Collect a receipt for every forward and backward inside the block, on any thread."""
    log = Log()
    with _LOCK:
        LOGS.append(log)
    try:
        yield log
    finally:
        with _LOCK:
            LOGS[:] = [other for other in LOGS if other is not log]


def note(receipt: Receipt) -> None:
    """Append to every open log."""
    with _LOCK:
        for log in LOGS:
            log.append(receipt)
