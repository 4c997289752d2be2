"""Records with their places, and which of them may stand beside each other.

A number in a report has a Source: file, line, date, machine. Only contestants of one record are
ever compared: they ran interleaved, on one machine, on one case. Of several records of one case on
one machine the newest counts, whatever it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from .. import records
from ..bench.cases import Case
from ..bench.record import SCHEMA, VERSION
from ..errors import ArgumentError


@dataclass(frozen=True, order=True)
class Source:
    """Where a number is from. machine: processor, threads and torch, in words."""

    file: str
    line: int
    utc: str
    machine: str

    @property
    def place(self) -> str:
        """As in "cpu.jsonl:41"."""
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place}, {self.utc[:10]}, {self.machine}"


def runs(sources: Iterable[Source]) -> list[tuple[Source, int]]:
    """Sources in order, neighbouring lines joined: (the first, the last line) of each run."""
    found: list[tuple[Source, int]] = []
    for source in sorted(set(sources)):
        if found and source.file == found[-1][0].file and source.line == found[-1][1] + 1:
            found[-1] = (found[-1][0], source.line)
        else:
            found.append((source, source.line))
    return found


def places(sources: Iterable[Source]) -> str:
    """Files and lines of many sources: "cpu.jsonl:41-43, 47; cuda.jsonl:1"."""
    words: dict[str, list[str]] = {}
    for first, last in runs(sources):
        line = str(first.line) if first.line == last else f"{first.line}-{last}"
        words.setdefault(first.file, []).append(line)
    return "; ".join(f"{file}:{', '.join(lines)}" for file, lines in words.items())


def when_and_where(sources: Iterable[Source]) -> str:
    """Dates and machines of many sources, each said once."""
    every = list(sources)
    dates = sorted({s.utc[:10] for s in every})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return "; ".join([days, *dict.fromkeys(s.machine for s in every)])


@dataclass(frozen=True)
class Entry:
    """What one contestant did in one record; absent parts are empty or None.

    ran         what served it, in words: a name that the library gave, no proof
    refused     why it was not timed; "" when it was
    samples_us  one a round, in the order in which they were taken
    checks      {"what", "error", "bound", "how"}: each output against the float64 oracle
    errors      {"what", "most", "truth_most", "rms", "truth_rms"}: how far each output is from it
    peak_bytes  highest extra memory of one call: results included, inputs not
    traffic     bytes that moved, as counters of the hardware saw them
    """

    name: str
    ran: str
    refused: str
    samples_us: tuple[float, ...]
    checks: tuple[Mapping[str, Any], ...]
    receipts: tuple[Mapping[str, Any], ...]
    peak_bytes: int | None
    traffic: Mapping[str, Any] | None
    errors: tuple[Mapping[str, Any], ...] = ()

    @property
    def median_us(self) -> float | None:
        """Median of the samples; None where there are none."""
        return median(self.samples_us) if self.samples_us else None

    @property
    def checked(self) -> bool:
        """Whether every output was compared with the oracle and kept its bound."""
        return bool(self.checks) and all(c["error"] <= c["bound"] for c in self.checks)


@dataclass(frozen=True)
class Bench:
    """A record of kind bench: one case, all contestants.

    suite  the letter or the name of its suite
    also   records from which checks were taken over
    """

    source: Source
    suite: str
    case: Case
    pairs: int
    flops: int
    entries: Mapping[str, Entry]
    data: Mapping[str, Any] = field(repr=False)
    also: tuple[Source, ...] = ()

    @property
    def phase(self) -> str:
        """prefill, decode, training, or backward: what the case is a part of."""
        names = {"forward": "prefill", "forward+backward": "training"}
        return names.get(self.case.phase, self.case.phase)

    @property
    def processor(self) -> str:
        """The name of what it ran on, without threads and versions."""
        return processor(self.data["machine"])

    @property
    def rivals(self) -> list[Entry]:
        """Everybody but nosquare and its backends by name."""
        return [e for e in self.entries.values() if e.name.partition(":")[0] != "nosquare"]

    @property
    def square_bytes(self) -> int:
        """One stored score array: B x Hq x M x N, whole. A causal mask does not halve it."""
        c = self.case
        return c.B * c.Hq * c.M * c.N * c.dtype.itemsize

    @property
    def input_bytes(self) -> int:
        """q, k and v, and do where gradients are wanted."""
        c = self.case
        out = c.Hq * c.M * c.E if c.wants_grads else 0
        return c.B * c.dtype.itemsize * (c.Hq * c.M * c.D + c.Hk * c.N * (c.D + c.E) + out)


@dataclass(frozen=True)
class Other:
    """A record of another kind, as it was written."""

    source: Source
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Book:
    """All records of a report. folder: as it is named to the reader."""

    folder: str
    found: tuple[Bench | Other, ...]

    @staticmethod
    def read(folder: Path, names: Sequence[str] = ()) -> Book:
        """Read <folder>/<name>.jsonl, all of them where no names are given.

        Raises ArgumentError where there is none, or a line is no record.
        """
        known = sorted(path.stem for path in folder.glob("*.jsonl"))
        if not known:
            raise ArgumentError(
                "There are no records here.",
                {"folder": folder},
                "nosquare bench cpu --quick, which writes some; or --records FOLDER.",
            )
        if unknown := [name for name in names if name not in known]:
            raise ArgumentError(
                "There are no records of this name.",
                {"name": ", ".join(unknown), "known": ", ".join(known)},
                f"--name {known[0]}.",
            )
        found = [r for name in names or known for r in _read(folder / f"{name}.jsonl")]
        if not found:
            raise ArgumentError(
                "These files hold no record.",
                {"files": ", ".join(f"{name}.jsonl" for name in names or known)},
                "nosquare bench cpu --quick, which writes some.",
            )
        return Book(folder.name, tuple(found))

    @cached_property
    def bench(self) -> tuple[Bench, ...]:
        """The newest record of each case of each suite on each machine, in their first order.

        Whoever counts traffic checks no answer: there the checks of the same contestant, in the
        newest record of the same case on the same machine, are taken over, and so is that source.
        """
        kept: dict[tuple[str, str, str], Bench] = {}
        for record in self.found:
            if isinstance(record, Bench):
                key = (record.source.machine, record.suite, str(record.case))
                old = kept.get(key)
                if old is None or old.source.utc <= record.source.utc:
                    kept[key] = record
        found = [_with_checks(record, kept.values()) for record in kept.values()]
        return tuple(sorted(found, key=lambda r: (r.processor, r.suite)))

    def of_kind(self, kind: str) -> list[Other]:
        """Records of kind experiment, verify or fit, oldest first."""
        return [r for r in self.found if isinstance(r, Other) and r.kind == kind]

    @property
    def older(self) -> int:
        """How many bench records a newer one has replaced."""
        return sum(isinstance(r, Bench) for r in self.found) - len(self.bench)

    @property
    def used(self) -> list[Bench | Other]:
        """All records that a number can be from, by file and line."""
        others = [r for r in self.found if isinstance(r, Other)]
        return sorted([*self.bench, *others], key=lambda r: r.source)


def _with_checks(record: Bench, others: Iterable[Bench]) -> Bench:
    """The record, with checks from elsewhere for entries that have none; see Book.bench."""
    bare = {n: e for n, e in record.entries.items() if not e.checks and not e.refused}
    same = [
        other
        for other in others
        if (other.case, other.source.machine) == (record.case, record.source.machine)
    ]
    entries, also = dict(record.entries), list[Source]()
    for name, entry in bare.items():
        for other in sorted(same, key=lambda o: o.source.utc, reverse=True):
            if name in other.entries and other.entries[name].checks:
                entries[name] = replace(entry, checks=other.entries[name].checks)
                also.append(other.source)
                break
    return replace(record, entries=entries, also=tuple(dict.fromkeys(also)))


def machine_words(data: Mapping[str, Any]) -> str:
    """Processor, threads and torch of a record: what must be equal where numbers are compared."""
    machine = data["machine"]
    where = "" if machine.get("gpu") else f", {_threads(machine['threads'])}"
    return f"{processor(machine)}{where}, torch {data['software']['torch']}"


def processor(machine: Mapping[str, Any]) -> str:
    """The card; or the processor, with its vector extensions: one name can mean several."""
    gpu = machine.get("gpu")
    if gpu:
        return str(gpu["name"])
    extensions = ", ".join(machine["features"])
    return f"{machine['cpu']} ({extensions})" if extensions else str(machine["cpu"])


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _read(path: Path) -> list[Bench | Other]:
    """The records of one file, each with its line. Raises ArgumentError naming file and line."""
    lines = [
        number
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
        if line.strip()
    ]
    found: list[Bench | Other] = []
    for number, data in zip(lines, records.read(path), strict=True):
        try:
            source = Source(path.name, number, data["utc"], machine_words(data))
            if data["kind"] == "bench":
                found.append(_bench(source, data))
            else:
                found.append(Other(source, data["kind"], data))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ArgumentError(
                "A line of this file is no record that a report can read.",
                {"file": path.name, "line": number, "because": why.splitlines()[0]},
                "remove the line; an interrupted run can leave half a line.",
            ) from None
    return found


def _bench(source: Source, data: Mapping[str, Any]) -> Bench:
    if data["schema"] == VERSION and (wrong := records.faults(data, SCHEMA)):
        raise ValueError("; ".join(wrong[:3]))
    entries = {c["name"]: _entry(c) for c in data["contestants"]}
    case = Case.parse(data["case"])
    return Bench(source, data["suite"], case, data["pairs"], data["flops"], entries, data)


def _entry(c: Mapping[str, Any]) -> Entry:
    checks = tuple(c.get("checks") or ())
    for check in checks:
        _number(check["error"]), _number(check["bound"])
    peak = c.get("peak_bytes")
    return Entry(
        name=c["name"],
        ran=c.get("ran") or "",
        refused=c.get("refused") or "",
        samples_us=tuple(_number(t) for t in c.get("samples_us") or ()),
        checks=checks,
        receipts=tuple(c.get("receipts") or ()),
        peak_bytes=None if peak is None else int(_number(peak)),
        traffic=c.get("traffic"),
        errors=tuple(c.get("errors") or ()),
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.40} is no number")
    return value
