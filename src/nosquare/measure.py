"""Time, memory and kernels of one call, taken with torch's profiler on.

    watched(call, device)   the call's result and, where an open log measures, the Sight of it
    confirmed(receipt, sight)   the receipt with Measured: rates and the share of the roofline

A Session is begun just before the work and ended just after it, on the same thread; hooks of
autograd can do so as well. One runs at a time in a process: the profiler is one. Nothing here may
break the work that it looks at: where it cannot measure, the Sight says why, in words.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from .cost import Cost
from .device import describe
from .receipt import BACKWARD, FORWARD, LOGS, Measured, Receipt, family

WAIT_S = 30.0  # for another thread's session to end
PAUSE_CYCLES = 5_000_000  # of a GPU, some milliseconds: launches are issued meanwhile, so that the
# time between the events is the device's, and not that of the host which falls behind it
_LABEL = "nosquare measures"  # launches by no operator at all are found under this name
Rates = tuple[float | None, float | None, float | None]  # flops/s, bytes/s, share of the roofline
_Result = TypeVar("_Result")


class Sight(NamedTuple):
    """What one session saw; None and () where `how` says why."""

    time_us: float | None
    peak_bytes: int | None
    kernels: tuple[str, ...]
    how: str


def measuring() -> bool:
    """Whether an open log asked for measurements."""
    return any(log.measure for log in LOGS)


def watched(call: Callable[[], _Result], device: torch.device) -> tuple[_Result, Sight | None]:
    """Run `call`; its result, and the Sight of it where an open log measures."""
    if not measuring():
        return call(), None
    session = Session(device)
    session.begin()
    try:
        out = call()
    except BaseException:
        session.drop()
        raise
    return out, session.end()


def confirmed(
    receipt: Receipt, sight: Sight, arrays: Sequence[Tensor] = (), more: str = ""
) -> Receipt:
    """The receipt with what was measured, and rates from what was predicted.

    arrays   of the mask, so that the pairs are exact
    more     why there can be no rates, since more was measured than was predicted
    """
    rates: Rates = (None, None, None)
    how, cost = sight.how, None
    if sight.time_us:
        try:
            cost = Cost.of(receipt.problem, describe(receipt.problem.device), arrays=arrays)
            rates, why = _rates(cost, receipt.op, sight.time_us, more)
        except Exception as error:  # the call has succeeded, and must not fail because of this
            why = f"no rates: {error}".splitlines()[0]
        how = f"{how}; {why}" if why else how
    seen = Measured(sight.time_us, sight.peak_bytes, *rates, kernels=sight.kernels, how=how)
    out = replace(receipt, measured=seen)
    if cost is not None:
        out.__dict__["predicted"] = cost  # what cached_property would keep
    return out


def together(sights: Sequence[Sight]) -> Sight:
    """Of work in several parts: times added, the highest peak of any part, all kernels."""
    times = [s.time_us for s in sights if s.time_us is not None]
    peaks = [s.peak_bytes for s in sights if s.peak_bytes is not None]
    first = sights[0]
    if len(sights) == 1:
        return first
    return Sight(
        sum(times) if len(times) == len(sights) else None,
        max(peaks) if len(peaks) == len(sights) else None,
        tuple(dict.fromkeys(name for s in sights for name in s.kernels)),
        f"{len(sights)} nodes of autograd, each by itself (times added, the highest peak of any): "
        + "; ".join(dict.fromkeys(s.how for s in sights)),
    )


def _rates(cost: Cost, op: str, time_us: float, more: str) -> tuple[Rates, str]:
    """The rates, and why not all of them."""
    found = {FORWARD: cost.forward, BACKWARD: cost.backward}.get(op)
    if more:
        return (None, None, None), f"no rates: {more}"
    if found is None:
        return (None, None, None), "no rates: the flops of a higher derivative are not modelled"
    if not cost.pairs.exact:
        return (None, None, None), "no rates: the visible pairs are not known exactly"
    roofline = found.roofline_us
    flops_per_s, bytes_per_s = (x / time_us * 1e6 for x in (found.flops, found.compulsory_bytes))
    if roofline is None:
        return (flops_per_s, bytes_per_s, None), "no roofline: the device's rates are not known"
    return (flops_per_s, bytes_per_s, roofline / time_us), ""


class Session:
    """One measurement of work on `device`: begin(), the work, end(); or drop() where it failed.

    by_hook   begun in a hook of autograd: where the work fails, nobody calls end() or drop()
    """

    def __init__(self, device: torch.device, by_hook: bool = False) -> None:
        self.device, self.by_hook = device, by_hook
        self.thread = threading.get_ident()
        self.refused = ""  # why nothing is measured
        self.blind = ""  # why there is time, but neither kernels nor memory
        self.profile: Any = None
        self.label: Any = None
        self.start: Any = None

    def begin(self) -> None:
        """Start to measure, or note why not."""
        cuda = self.device.type == "cuda"
        if self.device.type not in ("cpu", "cuda"):
            self.refused = f"a {self.device.type} device has no clock that is known here"
        elif cuda and torch.cuda.is_current_stream_capturing():
            self.refused = "a CUDA graph is being captured"
        else:
            self.refused = _take(self)
        if self.refused:
            return
        if torch._C._autograd._profiler_enabled() or profiler._is_profiler_enabled:
            self.blind = "another profiler was on"
        else:
            self._open()
        if cuda:
            torch.cuda.synchronize(self.device)
            with torch.cuda.device(self.device):
                torch.cuda._sleep(PAUSE_CYCLES)
                self.start = torch.cuda.Event(enable_timing=True)
                self.start.record()
        else:
            self.start = time.perf_counter_ns()

    def end(self) -> Sight:
        """Stop, and say what was seen."""
        if self.refused:
            return Sight(None, None, (), f"not measured: {self.refused}")
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                stop = torch.cuda.Event(enable_timing=True)
                stop.record()
            stop.synchronize()
            time_us, clock = self.start.elapsed_time(stop) * 1e3, "CUDA events"
        else:
            time_us, clock = (time.perf_counter_ns() - self.start) / 1e3, "perf_counter"
        if not self.drop():
            return Sight(None, None, (), "not measured: the session was ended from elsewhere")
        if self.blind:
            return Sight(time_us, None, (), f"{clock}; no kernels and no memory: {self.blind}")
        events = self.profile.kineto_results.events()
        cuda = self.device.type == "cuda"
        seen = "kernels as CUPTI" if cuda else "operators as it"
        how = f"{clock}, with the profiler on; allocations and {seen} saw them"
        names = _kernels(events, self.device) if cuda else _operators(events)
        return Sight(time_us, _peak_bytes(events, self.device), tuple(names), how)

    def drop(self) -> bool:
        """Close the profiler and let others measure; whether this session still had it."""
        if self.refused or not _give_back(self):
            return False
        self._close()
        return True

    def _open(self) -> None:
        _quiet()
        kind = "cuda" if self.device.type == "cuda" else None
        self.profile = profiler.profile(use_kineto=True, use_device=kind, profile_memory=True)
        try:
            self.profile.__enter__()
        except RuntimeError as error:
            self.blind = f"the profiler did not start: {error}".splitlines()[0]
            return
        self.label = torch._C._profiler._RecordFunctionFast(_LABEL)
        self.label.__enter__()

    def _close(self) -> None:
        if self.blind:
            return
        try:
            self.label.__exit__(None, None, None)
            self.profile.__exit__(None, None, None)
        except RuntimeError:  # the thread that began it has lost it, with an exception
            profiler._set_is_profiler_enabled(False)


# ---- one session at a time ----

_FREE = threading.Condition()
_current: Session | None = None


def _take(session: Session) -> str:
    """Wait until no other session runs; why that is not to be, or ""."""
    global _current
    with _FREE:
        if _current is not None and _current.thread == session.thread:
            if not _current.by_hook:
                return "it is part of a call that is being measured"
            _current._close()  # its backward raised, so nobody ended it
            _current = None
        if not _FREE.wait_for(lambda: _current is None, WAIT_S):
            return "another thread was measuring"
        _current = session
        return ""


def _give_back(session: Session) -> bool:
    global _current
    with _FREE:
        if _current is not session:
            return False
        _current = None
        _FREE.notify_all()
        return True


def settle() -> None:
    """End a session whose backward raised, so that the profiler is free for others."""
    if (left := _current) is not None and left.by_hook:
        left.drop()


def _quiet() -> None:
    """Keep kineto from writing two lines to stderr for every session, as torch 2.13's does.

    It reads the variable once, at the first session of a process; a user's own setting stands.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # above every level that it has


# ---- reading the profiler's events ----

# operators that move no numbers (views, allocations, questions), and a label that says nothing
BOOKKEEPING = frozenset(
    "alias as_strided chunk contiguous detach empty empty_like empty_strided expand expand_as "
    "_fused_sdp_choice is_nonzero lift_fresh narrow new_empty new_empty_strided numel permute "
    "reshape _reshape_alias resolve_conj resolve_neg result_type scaled_dot_product_attention "
    "select slice split squeeze t to transpose unbind unflatten _unsafe_view unsqueeze view "
    "view_as".split()
)


def _operators(events: Sequence[Any]) -> Iterable[str]:
    """Operators that ran, in order of first use; of what a fused one calls inside, nothing."""
    ops = [
        (e.start_ns(), -e.duration_ns(), e.name())
        for e in events
        if e.scope() == 0 and "::" in e.name() and not e.name().startswith("autograd::")
    ]
    found: dict[str, None] = {}
    fused_end_ns = 0
    for start, minus, name in sorted(ops):
        if start < fused_end_ns or name.removeprefix("aten::") in BOOKKEEPING:
            continue
        if family(name):
            fused_end_ns = start - minus
        found[name] = None
    return found


def _kernels(events: Sequence[Any], device: torch.device) -> Iterable[str]:
    """Kernels that the calling thread launched on the device, copies and fills among them."""
    index = torch.cuda.current_device() if device.index is None else device.index
    seen = [
        e
        for e in events
        if e.device_type() == torch._C._autograd.DeviceType.CUDA
        and e.device_index() == index
        and not e.is_user_annotation()
        and e.name() not in (_LABEL, "[memory]")
        and "spin_kernel" not in e.name()  # the pause
    ]
    seen.sort(key=lambda e: e.start_ns())
    # launches of other threads have no operator of this one to be linked to
    linked = [e for e in seen if e.linked_correlation_id() > 0]
    return dict.fromkeys(e.name() for e in linked or seen)


def _peak_bytes(events: Sequence[Any], device: torch.device) -> int:
    """Highest sum of what the allocator gave out and took back since the session began."""
    wanted = getattr(torch._C._autograd.DeviceType, device.type.upper())
    index = device.index if device.type == "cuda" else None
    memory = sorted(
        (e.start_ns(), place, e.nbytes())
        for place, e in enumerate(events)
        if e.name() == "[memory]"
        and e.device_type() == wanted
        and index in (None, e.device_index())
    )
    now = peak = 0
    for _, _, change in memory:
        now += change
        peak = max(peak, now)
    return peak
