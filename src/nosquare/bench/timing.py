"""How long contestants take: checked first, then interleaved in one process, all samples kept.

In each round everybody is timed once, and the order turns by one from round to round, so that drift
of the machine (clock, neighbours, caches) meets all alike. Short calls are repeated in a sample.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..errors import UnsupportedError
from ..receipt import Receipt
from .cases import Case, Data, visible_pairs
from .check import Check, Truth, check, truths
from .contestants import Contestant, Prepared, answer, prepare

SAMPLE_US = 1000.0  # shorter calls are repeated until a sample is this long
Tick = Callable[[str], None]


@dataclass(frozen=True)
class Rounds:
    """How many samples each contestant gives: at least `least`, then until `seconds` or `most`."""

    least: int = 5
    most: int = 200
    seconds: float = 4.0


@dataclass
class Entry:
    """What one contestant did.

    samples_us  microseconds a call, one number a round, in the order in which they were taken
    calls       calls averaged in each sample
    refused     why it was not timed; "" when it was
    ran         what served it, in words
    peak_bytes  highest extra memory of one call in a fresh process, where that was asked for
    """

    contestant: str
    samples_us: list[float] = field(default_factory=list)
    calls: int = 1
    refused: str = ""
    checks: list[Check] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    ran: str = ""
    peak_bytes: int | None = None

    @property
    def median_us(self) -> float:
        """Median of the samples; NaN where there are none."""
        return median(self.samples_us) if self.samples_us else math.nan

    @property
    def error(self) -> float:
        """The error nearest to its bound, as a share of the bound; NaN before a check."""
        shares = [c.error / c.bound if c.bound else 0.0 for c in self.checks if c.ok]
        return max(shares) if shares and len(shares) == len(self.checks) else math.nan


@dataclass(frozen=True)
class Result:
    """All entries of one case. pairs: visible (batch, head, query, key)."""

    case: Case
    pairs: int
    entries: list[Entry]
    suite: str = ""

    def of(self, contestant: str) -> Entry:
        """The entry of one contestant. Raises KeyError when it was not asked."""
        for entry in self.entries:
            if entry.contestant == contestant:
                return entry
        raise KeyError(contestant)

    def ratio(self, mine: str = "nosquare", theirs: str = "torch") -> float:
        """Time of theirs over time of mine: above 1, mine is faster; NaN: one was not timed."""
        return self.of(theirs).median_us / self.of(mine).median_us


def measure(case: Case, contestants: Sequence[Contestant], rounds: Rounds,
            tick: Tick = lambda words: None, suite: str = "") -> Result:  # fmt: skip
    """Check every contestant, then time those that are right.

    tick  is told in words what happens next
    """
    data = Data.of(case)
    result = Result(case, visible_pairs(data), [Entry(c.name) for c in contestants], suite)
    tick("oracle")
    known = truths(data)
    ready: list[tuple[Entry, Prepared]] = []
    for contestant, entry in zip(contestants, result.entries, strict=True):
        tick(f"check {contestant.name}")
        prepared = _admit(contestant, data, entry, known)
        if prepared is not None:
            ready.append((entry, prepared))
    tick("time")
    interleave([(entry, prepared.call) for entry, prepared in ready], rounds, tick)
    return result


def _admit(
    contestant: Contestant, data: Data, entry: Entry, known: Sequence[Truth]
) -> Prepared | None:
    """The contestant ready to be timed, or None with the reason in entry.refused."""
    try:
        out, entry.receipts = answer(contestant, data)
        if contestant.ran is not None:
            entry.ran = contestant.ran(data)
    except UnsupportedError as error:
        entry.refused = error.sentence
        return None
    except RuntimeError as error:
        entry.refused = f"it stopped: {str(error).splitlines()[0][:200]}"
        return None
    if not entry.ran:
        entry.ran = " + ".join(dict.fromkeys(r.backend for r in entry.receipts))
    entry.checks = check(contestant, data, out, known)
    wrong = [c for c in entry.checks if not c.ok]
    if wrong or not entry.checks:
        entry.refused = "wrong: " + ("; ".join(map(str, wrong)) or "nothing could be checked")
        return None
    return prepare(contestant, data)


def interleave(
    calls: Sequence[tuple[Entry, Callable[[], Any]]],
    rounds: Rounds,
    tick: Tick = lambda words: None,
) -> None:
    """Time the calls in turn and append to samples_us of their entries; the first call warms up."""
    for entry, call in calls:
        entry.calls = _repeats(call)
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        for number in range(rounds.most if calls else 0):
            if number >= rounds.least and time.perf_counter() - start > rounds.seconds:
                break
            turn = number % len(calls)
            for entry, call in (*calls[turn:], *calls[:turn]):
                entry.samples_us.append(_sample_us(call, entry.calls))
            tick("time")
    finally:
        if collecting:
            gc.enable()


def _repeats(call: Callable[[], Any]) -> int:
    """Calls that make a sample of about SAMPLE_US; warms up."""
    once = _sample_us(call, 1)
    if once > SAMPLE_US:
        return 1
    return max(1, round(SAMPLE_US / max(min(_sample_us(call, 20), once), 1e-3)))


def _sample_us(call: Callable[[], Any], calls: int) -> float:
    """Microseconds a call, averaged over `calls`."""
    numbers = range(calls)
    start = time.perf_counter_ns()
    for _ in numbers:
        call()
    return (time.perf_counter_ns() - start) / 1000 / calls
