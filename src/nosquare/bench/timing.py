"""How long contestants take: checked first, then interleaved in one process, all samples kept.

In each round everybody is timed once, and the order turns by one from round to round, so that drift
of the machine (clock, power, neighbours, caches) meets all alike. clocks.py says what a sample is.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedError
from ..receipt import BACKWARD, Receipt
from .cases import Case, Data, visible_pairs
from .ceiling import Ceiling
from .check import Check, Errors, Truth, judge, truths
from .clocks import Clock, HostClock
from .contestants import Contestant, Prepared, answer

Tick = Callable[[str], None]
REFUSAL_LENGTH = 400  # characters kept of why somebody was not timed
LONG_US = 1e6


@dataclass(frozen=True)
class Rounds:
    """How many samples each contestant gives: at least `least`, then until `seconds` or `most`.

    few  at least, where a call of somebody takes longer than LONG_US; None: `least` there too
    """

    least: int = 5
    most: int = 200
    seconds: float = 4.0
    few: int | None = None

    def enough(self, count: int, slowest_us: float, seconds: float) -> bool:
        """Whether so many rounds, which took so long, are enough."""
        least = self.least if self.few is None or slowest_us <= LONG_US else self.few
        return count >= least and seconds > self.seconds


@dataclass
class Entry:
    """What one contestant did.

    samples_us  microseconds a call, one number a round, in the order in which they were taken
    calls       calls averaged in each sample
    warm_up     calls before the first sample
    host_us     until the call came back to the host, median; None where it is the same
    refused     why it was not timed; "" when it was
    errors      how far its answer is from the truth, output by output
    ran         what served the phase that is timed, in words
    peak_bytes  highest extra memory of one call, where that was asked for
    traffic     what moved in one call (see ncu.py), where that was asked for
    """

    contestant: str
    samples_us: list[float] = field(default_factory=list)
    calls: int = 1
    warm_up: int = 0
    host_us: float | None = None
    refused: str = ""
    checks: list[Check] = field(default_factory=list)
    errors: list[Errors] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    ran: str = ""
    peak_bytes: int | None = None
    traffic: Mapping[str, Any] | None = None

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
    """All entries of one case.

    pairs      visible (batch, head, query, key)
    device     type of the device it ran on
    timing     what a sample is and how the numbers were made, in words
    gpu_state  clocks, power and temperature while it was timed; None where nobody looked
    threads    of torch
    ceiling    what the processor does at best; None where nobody looked
    """

    case: Case
    pairs: int
    entries: list[Entry]
    suite: str = ""
    device: str = "cpu"
    timing: Mapping[str, str] = field(default_factory=dict)
    gpu_state: Mapping[str, Any] | None = None
    threads: int = 0
    ceiling: Ceiling | None = None

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
            tick: Tick = lambda words: None, suite: str = "",
            clock: Clock | None = None, posed: Posed | None = None,
            ceiling: Ceiling | None = None) -> Result:  # fmt: skip
    """Check every contestant, then time those that are right.

    tick     is told in words what happens next
    clock    the host's on the CPU by default; a CudaClock for a card
    posed    pose(case, clock); made here by default
    ceiling  is kept with the result

    Raises UnsupportedError when not even the numbers of the case fit on the device.
    """
    clock = clock or HostClock()
    entries = [Entry(c.name) for c in contestants]
    with clock.watched() as seen:
        tick("oracle")
        data, known = posed or pose(case, clock)
        ready: list[tuple[Entry, Prepared]] = []
        for contestant, entry in zip(contestants, entries, strict=True):
            tick(f"check {contestant.name}")
            prepared = admit(contestant, data, entry, known)
            if prepared is None:
                continue
            try:
                entry.peak_bytes = clock.peak_bytes(prepared)
            except torch.OutOfMemoryError:
                entry.refused = "a second call found no memory."
            else:
                ready.append((entry, prepared))
        tick("time")
        seen.begin()
        interleave(ready, rounds, tick, clock)
    words = {**clock.words(), "numbers": data.drawn}
    pairs = visible_pairs(data)
    return Result(case, pairs, entries, suite, clock.device.type, words, seen.summary(),
                  torch.get_num_threads(), ceiling)  # fmt: skip


class Posed(NamedTuple):
    """A case with its numbers, and what is right about them: the same for any number of threads."""

    data: Data
    known: Sequence[Truth]


def pose(case: Case, clock: Clock | None = None) -> Posed:
    """The numbers of a case on the clock's device, the host's by default.

    Raises UnsupportedError where they do not fit.
    """
    data = _numbers(case, clock or HostClock())
    return Posed(data, truths(data))


def _numbers(case: Case, clock: Clock) -> Data:
    try:
        return Data.of(case, clock.device)
    except torch.OutOfMemoryError:
        raise UnsupportedError(
            "The numbers of this case do not fit on the device.",
            {"case": case, "device": clock.device},
            "a smaller M, N or B.",
        ) from None


def admit(
    contestant: Contestant, data: Data, entry: Entry, known: Sequence[Truth]
) -> Prepared | None:
    """The contestant ready to be timed, its first answer checked; or None, and entry.refused says
    why. known: truths(data)."""
    try:
        found = answer(contestant, data)
    except UnsupportedError as error:
        why = [str(value) for name, value in error.values.items() if name != "problem"]
        entry.refused = " ".join([error.sentence, *why])[:REFUSAL_LENGTH]
        return None
    entry.receipts = found.receipts
    if contestant.ran is not None:
        entry.ran = contestant.ran(data)
    if not entry.ran:
        only = data.case.phase == BACKWARD  # forward is in the receipts, and not timed
        timed = [r.backend for r in entry.receipts if not only or r.op == BACKWARD]
        entry.ran = " + ".join(dict.fromkeys(timed))
    entry.checks, entry.errors = judge(contestant, data, found.out, known)
    wrong = [c for c in entry.checks if not c.ok]
    if wrong or not entry.checks:
        entry.refused = "wrong: " + ("; ".join(map(str, wrong)) or "nothing could be checked")
        return None
    return found.prepared


def interleave(
    ready: Sequence[tuple[Entry, Prepared]],
    rounds: Rounds,
    tick: Tick = lambda words: None,
    clock: Clock | None = None,
) -> None:
    """Time the contestants in turn and append to samples_us of their entries, warm from the first
    sample on."""
    clock = clock or HostClock()
    hosts: dict[str, list[float]] = {entry.contestant: [] for entry, _ in ready}
    for entry, prepared in ready:
        with prepared.within():
            entry.warm_up, entry.calls = clock.warm_up(prepared.call)
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        for number in range(rounds.most if ready else 0):
            slowest_us = max((entry.samples_us[0] for entry, _ in ready if number), default=0.0)
            if rounds.enough(number, slowest_us, time.perf_counter() - start):
                break
            turn = number % len(ready)
            for entry, prepared in (*ready[turn:], *ready[:turn]):
                with prepared.within():
                    sample = clock.sample(prepared.call, entry.calls)
                entry.samples_us.append(sample.time_us)
                hosts[entry.contestant].append(sample.host_us)
            tick("time")
    finally:
        if collecting:
            gc.enable()
    for entry, _ in ready:
        if clock.device.type != "cpu" and hosts[entry.contestant]:
            entry.host_us = median(hosts[entry.contestant])
