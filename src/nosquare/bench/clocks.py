"""What a sample is: on the host's clock, or on a card's, and what the caches hold before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch

from .contestants import Prepared
from .watch import Watch

Call = Callable[[], Any]
SAMPLE_US = 1000.0  # on a CPU, shorter calls are repeated until a sample is this long
FLUSH_BYTES = 256 << 20  # what is written between samples: several times any L2 (H200: 60 MB)
STEADY, WARM_UP_SECONDS, WARM_UP_CALLS = 0.03, 0.5, 50
LEAD_LIMIT_US = 2000.0
CYCLES_PER_US = 2000  # of torch.cuda._sleep, at about 2 GHz


class Sample(NamedTuple):
    """time_us of a call; host_us until the call came back to the host."""

    time_us: float
    host_us: float


class Clock(Protocol):
    """Takes samples on one device."""

    device: torch.device

    def words(self) -> dict[str, str]:
        """What a sample is: {"clock": ..., "caches": ...}."""

    def warm_up(self, call: Call) -> tuple[int, int]:
        """(calls made until times were steady, calls that a sample should average)."""

    def sample(self, call: Call, calls: int) -> Sample:
        """One sample, averaged over `calls`."""

    def peak_bytes(self, prepared: Prepared) -> int | None:
        """Extra memory of one call at its peak; None where this process cannot tell."""

    def watched(self) -> AbstractContextManager[Watch]:
        """A context that gives a Watch of the device's state."""


class HostClock:
    """The host's clock, for the CPU. Every call reads the same inputs, which stay in the caches as
    far as they fit."""

    device = torch.device("cpu")

    def words(self) -> dict[str, str]:
        """See Clock."""
        return {"clock": "perf_counter", "caches": "warm: every call reads the same inputs"}

    def warm_up(self, call: Call) -> tuple[int, int]:
        """One call; and the calls that make a sample of about SAMPLE_US."""
        once = self.sample(call, 1).time_us
        if once > SAMPLE_US:
            return 1, 1
        again = min(self.sample(call, 20).time_us, once)
        return 21, max(1, round(SAMPLE_US / max(again, 1e-3)))

    def sample(self, call: Call, calls: int) -> Sample:
        """Averaged over `calls`."""
        numbers = range(calls)
        start = time.perf_counter_ns()
        for _ in numbers:
            call()
        time_us = (time.perf_counter_ns() - start) / 1000 / calls
        return Sample(time_us, time_us)

    def peak_bytes(self, prepared: Prepared) -> int | None:
        """None: that takes a fresh process (memory.py)."""
        return None

    @contextmanager
    def watched(self) -> Iterator[Watch]:
        """A Watch that sees nothing."""
        yield Watch()


class CudaClock:
    """A card's clock: two events around one call.

    cold  FLUSH_BYTES are written before each sample, so that no input is in the L2 cache

    The card waits a little before the first event, so that the host has handed over the call when
    the card begins: what is timed is the card's work, without the gaps that a slow host would leave
    in it. host_us says how slow the host is.
    """

    def __init__(self, device: torch.device | str = "cuda", cold: bool = True) -> None:
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.cold = cold
        self._flush = torch.empty(FLUSH_BYTES if cold else 0, dtype=torch.uint8, device=self.device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._lead_us: WeakKeyDictionary[Call, float] = WeakKeyDictionary()
        self._watch = Watch(self.device)

    def words(self) -> dict[str, str]:
        """See Clock."""
        cold = f"cold: {FLUSH_BYTES >> 20} MiB written before each sample"
        return {
            "clock": "CUDA events around one call, handed over before the card begins",
            "caches": cold if self.cold else "warm: every call reads the same inputs",
        }

    def warm_up(self, call: Call) -> tuple[int, int]:
        """Calls until three in a row agree to STEADY, or time is up; a sample is one call."""
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < WARM_UP_CALLS:
            sample = self.sample(call, 1)
            times.append(sample.time_us)
            last = times[-3:]
            # the first call may compile; what it cost the host is no measure of the others
            if len(times) > 1:
                self._lead_us[call] = min(2 * sample.host_us, LEAD_LIMIT_US)
            if len(last) == 3 and max(last) - min(last) <= STEADY * median(last):
                break
            if time.perf_counter() - began > WARM_UP_SECONDS and len(times) >= 3:
                break
        return len(times), 1

    def sample(self, call: Call, calls: int) -> Sample:
        """One sample; of several calls, the flush comes before the first of them."""
        if self.cold:
            self._flush.zero_()
        torch.cuda._sleep(round(self._lead_us.get(call, 0.0) * CYCLES_PER_US))
        self._start.record()
        begun = time.perf_counter_ns()
        for _ in range(calls):
            call()
        host_us = (time.perf_counter_ns() - begun) / 1000 / calls
        self._end.record()
        self._end.synchronize()
        if 1.5 * host_us > self._lead_us.get(call, host_us * 2):  # slower than the warm-up was
            self._lead_us[call] = min(2 * host_us, LEAD_LIMIT_US)
        return Sample(self._start.elapsed_time(self._end) * 1000 / calls, host_us)

    def peak_bytes(self, prepared: Prepared) -> int | None:
        """What torch's allocator held at the peak of a second call, above what it held before."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # blocks that another contestant left would be in its way
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        out = prepared.outputs()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        del out
        return int(peak - before)

    @contextmanager
    def watched(self) -> Iterator[Watch]:
        """The card's clocks, power and temperature while the block runs."""
        with self._watch as watch:
            yield watch
