"""Receipts: what really ran, call by call.

    with ns.receipts() as log:
        ns.attention(q, k, v)
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    print(log)

A receipt keeps what was said and what was seen apart: `kernels` is what the backend says it
launched (for calls of others, what torch's dispatcher chose); `measured.kernels` is what the
profiler saw run, with measure=True. Where the two are of different families, the receipt says so.
measure.py takes the measurements, observe.py looks at the calls of others. Off, a call pays one
look at an empty list.
"""

from __future__ import annotations

import importlib
import re
import textwrap
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from .device import describe
from .errors import ArgumentError
from .problem import Problem

if TYPE_CHECKING:
    from .cost import Cost

FORWARD, BACKWARD = "forward", "backward"
SCHEMA_VERSION = 1
_WORDS, _COUNT, _NUMBER, _TRUTH, _NONE = (str,), (int,), (int, float), (bool,), (type(None),)
PROBLEM = {
    "words": _WORDS,
    "batch": [_COUNT],
    **dict.fromkeys(("Hq", "Hk", "M", "N", "D", "E"), _COUNT),
    **dict.fromkeys(("dtype", "device", "mask", "grads"), _WORDS),
    "dropout": _NUMBER,
    "packed": _TRUTH,
}
PREDICTED = {
    **dict.fromkeys(("pairs", "flops", "compulsory_bytes"), _COUNT),
    "pairs_exact": _TRUTH,
    "roofline_us": _NUMBER + _NONE,
    "bound_by": _WORDS,
}
MEASURED = {
    "time_us": _NUMBER + _NONE,
    "peak_bytes": _COUNT + _NONE,
    **dict.fromkeys(("flops_per_s", "bytes_per_s", "roofline_share"), _NUMBER + _NONE),
    "kernels": [_WORDS],
    "how": _WORDS,
}
RECEIPT = {
    **dict.fromkeys(("op", "caller", "backend", "version", "plan"), _WORDS),
    "problem": PROBLEM,
    "kernels": [_WORDS],
    "workspace_bytes": _COUNT + _NONE,
    "copies": [_WORDS],
    "refusals": (dict,),  # backend -> list of reasons
    "predicted": (dict, *_NONE),  # PREDICTED, or null where nobody can say
    "measured": (dict, *_NONE),  # MEASURED, or null where no log measured
    "agrees": _TRUTH + _NONE,
}
# What Log.as_json() gives, as records.faults reads it: {...} an object with exactly these fields,
# [...] a list of such values, (...) a value of one of these types. A change is a new version.
SCHEMA = {"schema": _COUNT, "kind": _WORDS, "receipts": [RECEIPT]}


class Ran(NamedTuple):
    """What a backend says after a launch.

    kernels          what it launched, in order of first use
    workspace_bytes  memory it took beyond inputs and outputs, at its peak; None: unknown
    copies           inputs it had to copy, in words; () when none
    """

    kernels: tuple[str, ...]
    workspace_bytes: int | None = 0
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """What was measured of one call. Where a number is None, `how` says why.

    time_us      of the device (CUDA events) or of the processor (perf_counter)
    peak_bytes   most that torch's allocator had out at once, beyond what it had before the call;
                 on a CPU, where it does not know the size of what it had, of new memory alone
    flops_per_s, bytes_per_s   the predicted flops, and the bytes that must move, over time_us
    roofline_share   the roofline's time over time_us: 1 is as fast as the device can be
    kernels      what the profiler saw run, in order of first use: kernels of the device; on a CPU,
                 operators of torch
    """

    time_us: float | None
    peak_bytes: int | None
    flops_per_s: float | None
    bytes_per_s: float | None
    roofline_share: float | None
    kernels: tuple[str, ...]
    how: str


class Prediction(NamedTuple):
    """The part of a Cost that one receipt is about, see PREDICTED."""

    pairs: int
    flops: int
    compulsory_bytes: int
    pairs_exact: bool
    roofline_us: float | None
    bound_by: str


@dataclass(frozen=True)
class Receipt:
    """One forward or backward that ran.

    op        "forward", "backward", or a higher derivative in words
    plan      how it ran; for calls of others, what was asked
    kernels   what the backend, or torch's dispatcher, says ran; () where nobody says
    workspace_bytes  beyond inputs and outputs; None where nobody says
    refusals  backends of better rank that could not take it, each with its reasons
    version   of the libraries that the kernels come from
    caller    whose call: "nosquare", "torch.sdpa", "flex_attention", "flash_attn"
    """

    op: str
    problem: Problem
    backend: str
    plan: str
    kernels: tuple[str, ...]
    workspace_bytes: int | None
    copies: tuple[str, ...] = ()
    refusals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    version: str = ""
    measured: Measured | None = None
    caller: str = "nosquare"

    @cached_property
    def predicted(self) -> Cost:
        """What the call was to cost, forward and backward; worked out when first asked for.

        Where the mask has arrays the visible pairs are a bound, but in a measured receipt exact.
        """
        from .cost import Cost

        return Cost.of(self.problem, describe(self.problem.device))

    def prediction(self) -> Prediction | None:
        """The part of `predicted` that this receipt is about; None for higher derivatives."""
        if self.op not in (FORWARD, BACKWARD):
            return None
        found = getattr(self.predicted, self.op)
        pairs = self.predicted.pairs
        return Prediction(
            *(pairs.count, found.flops, found.compulsory_bytes, pairs.exact),
            *(found.roofline_us, found.bound_by),
        )

    @property
    def agrees(self) -> bool | None:
        """Whether the profiler saw every family of kernels that `kernels` names; None where it saw
        nothing, or the names are of no family."""
        said = {f for name in self.kernels if (f := family(name))}
        if self.measured is None or not self.measured.kernels or not said:
            return None
        return said <= {family(name) for name in self.measured.kernels}

    def as_json(self) -> dict[str, Any]:
        """Plain values, as RECEIPT says."""
        p = self.problem
        problem = {
            "words": p.describe(),
            "batch": list(p.batch),
            **{name: getattr(p, name) for name in ("Hq", "Hk", "M", "N", "D", "E")},
            "dtype": str(p.dtype).removeprefix("torch."),
            "device": str(p.device),
            **{"mask": p.mask, "grads": p.grads, "dropout": p.p, "packed": p.packed},
        }
        expected = self.prediction()
        seen = self.measured
        names = ("op", "caller", "backend", "version", "plan", "workspace_bytes", "agrees")
        return {
            **{name: getattr(self, name) for name in names},
            "problem": problem,
            "kernels": list(self.kernels),
            "copies": list(self.copies),
            "refusals": {name: list(why) for name, why in self.refusals.items()},
            "predicted": None if expected is None else expected._asdict(),
            "measured": None if seen is None else {**asdict(seen), "kernels": list(seen.kernels)},
        }

    def __str__(self) -> str:
        said, seen = ", ".join(map(short, self.kernels)), self.measured
        rows = [("problem", self.problem.describe()), ("plan", self.plan)]
        rows += [("says", said or "nothing of the kernels that ran")]
        if seen is not None:
            rows += [("saw", ", ".join(dict.fromkeys(map(short, seen.kernels))) or "no kernels")]
        if self.agrees is False:
            rows += [("BUT", "the profiler saw no kernel of the family that is said to have run")]
        rows += [("predicted", _expected_words(self.prediction()))]
        if seen is not None:
            rows += [("measured", _measured_words(seen)), ("how", seen.how)]
        if self.workspace_bytes is not None:
            rows += [("workspace", f"{self.workspace_bytes:,} bytes")]
        rows += [("copied", what) for what in self.copies]
        rows += [("refused", f"{name}: {'; '.join(why)}") for name, why in self.refusals.items()]
        head = f"{self.op:<9} {self.caller}: {self.backend}"
        return "\n".join([f"{head} ({self.version})" if self.version else head, *map(_row, rows)])


class Log(list[Receipt]):
    """Receipts in the order in which the calls ran.

    measure   whether the calls inside the block are measured
    """

    def __init__(self, measure: bool = False) -> None:
        super().__init__()
        self.measure = measure

    def as_json(self) -> dict[str, Any]:
        """Plain values, as SCHEMA says."""
        receipts = [receipt.as_json() for receipt in self]
        return {"schema": SCHEMA_VERSION, "kind": "receipts", "receipts": receipts}

    def __str__(self) -> str:
        return "\n".join(str(receipt) for receipt in self) or "no attention ran"


class Watcher(Protocol):
    """Who wants to know that the first log has opened and the last one has closed."""

    def start(self) -> None:
        """A log is open."""

    def stop(self) -> None:
        """No log is open any more."""


# the open logs; a backward may run on another thread, so this is not thread-local
LOGS: list[Log] = []
WATCHERS: list[Watcher] = []  # observe.py, which stands above this file, puts itself here
_LOCK = threading.Lock()


def receipts(measure: bool = False) -> AbstractContextManager[Log]:
    """Collect a receipt for every forward and backward of attention inside the block: nosquare's
    on any thread; and those of torch's scaled_dot_product_attention, of flex_attention and of the
    flash_attn packages, which observe.py can see.

    measure   take time, memory and the kernels that really ran, with torch's profiler: every call
              is waited for and takes milliseconds longer. Unmeasured, a call takes microseconds.
    returns   a context manager that gives the Log

    Raises ArgumentError when measure is not a bool.
    """
    if not isinstance(measure, bool):
        raise ArgumentError(
            "measure is True or False.",
            {"measure": repr(measure)[:60]},
            "ns.receipts(measure=True).",
        )
    return _open(Log(measure))


@contextmanager
def _open(log: Log) -> Iterator[Log]:
    try:
        with _LOCK:
            LOGS.append(log)
            if len(LOGS) == 1:
                for watcher in WATCHERS:
                    watcher.start()
        yield log
    finally:
        with _LOCK:
            LOGS[:] = [other for other in LOGS if other is not log]
            if not LOGS:
                for watcher in WATCHERS:
                    watcher.stop()


def note(receipt: Receipt) -> None:
    """Append to every open log."""
    with _LOCK:
        for log in LOGS:
            log.append(receipt)


# ---- names ----

# families of attention kernels, by what their names contain; the first that fits counts: cuDNN's
# kernels have "flash" in their names too
_FAMILIES = (
    ("cuDNN", ("cudnn", "native_sdpa")),
    ("memory-efficient", ("efficient", "fmha")),
    ("flex", ("flex",)),
    ("flash", ("flash",)),
)


@cache
def family(name: str) -> str | None:
    """The family of attention kernels that the name of a kernel, an operator or an engine belongs
    to: "flash", "memory-efficient", "cuDNN", "flex"; None for all else."""
    low = name.lower()
    return next((word for word, marks in _FAMILIES if any(m in low for m in marks)), None)


@cache
def versions(kernels: tuple[str, ...], ours: bool = True) -> str:
    """Of nosquare where the call is ours, of torch, and of cuDNN where a kernel is cuDNN's."""
    words = [f"nosquare {importlib.import_module('nosquare').__version__}"] if ours else []
    words.append(torch_version())
    if "cuDNN" in map(family, kernels):
        words.append(f"cuDNN {torch.backends.cudnn.version()}")
    return ", ".join(words)


def torch_version() -> str:
    """As "torch 2.13.0+cpu"."""
    return f"torch {torch.__version__}"


@cache
def short(kernel: str) -> str:
    """The name of a kernel without its template arguments, parameters and return type."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    while (bare := re.sub(r"<[^<>]*>", "", name)) != name:
        name = bare
    return re.split(r"(?<! )\(|<", name)[0].strip() or kernel  # "Memset (Device)" stays as it is


# ---- words ----


def _row(row: tuple[str, str]) -> str:
    return textwrap.fill(
        row[1],
        width=80,
        initial_indent=f"  {row[0]:<10} ",
        subsequent_indent=" " * 13,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _expected_words(expected: Prediction | None) -> str:
    if expected is None:
        return "nothing is said of higher derivatives"
    words = (
        f"{_amount(expected.flops, 'FLOP')}, {_amount(expected.compulsory_bytes, 'B')} must move"
    )
    if not expected.pairs_exact:
        words = f"at most {words}"
    if expected.roofline_us is not None:
        words += f", {expected.roofline_us:,.1f} us at the roofline ({expected.bound_by})"
    return words


def _measured_words(seen: Measured) -> str:
    words = [] if seen.time_us is None else [f"{seen.time_us:,.1f} us"]
    if seen.flops_per_s is not None and seen.bytes_per_s is not None:
        words += [_amount(seen.flops_per_s, "FLOP/s"), _amount(seen.bytes_per_s, "B/s")]
    if seen.roofline_share is not None:
        words.append(f"{seen.roofline_share:.0%} of the roofline")
    if seen.peak_bytes is not None:
        words.append(f"peak {seen.peak_bytes:,} bytes")
    return ", ".join(words) or "nothing"


def _amount(number: float, unit: str) -> str:
    """Three digits and a decimal prefix: 17.2 GFLOP."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or prefix == "T":
            break
        number /= 1000
    return f"{number:.3g} {prefix}{unit}"
