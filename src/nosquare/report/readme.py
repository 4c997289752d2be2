"""Tables of README and docs, made from records and kept between markers.

    <!-- records: cpu suites -->
    ... (generated; whatever stands here is replaced)
    <!-- /records -->

    FILE suites [against WHO] [on MACHINE]         a row for each suite: mean of the ratios
    FILE cases SUITES [against WHO] [on MACHINE]   a row for each case: times, ratio, peaks
    FILE aims [on MACHINE]                         what bench/aims.py and bench/held.py aim at, for
                                                   each processor and card
    FILE train                                     a row for each model and attention trained
    FILE verify                                    a row for each function that was verified

FILE names a file of records; SUITES are joined by commas. WHO is torch where left out; `best` is,
in each case, the fastest of the others. The newest record's machine counts, unless one is named.
A table of aims whose FILE is not there yet says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..bench import train
from ..bench.words import geometric_mean
from ..errors import ArgumentError
from ..records import read
from . import aims
from .claims import BEST, size
from .evidence import Bench, Book, Entry, Source, places, when_and_where
from .noise import Ratio, digits, paired
from .sections.conformance import newest as newest_verified
from .words import NONE, shared, suite_title, time

MINE = "nosquare"
EXAMPLE = "<!-- records: cpu suites -->"
_MARKER = re.compile(
    r"([\w.-]+) (?:(aims|train|verify)|(suites|cases ([\w,-]+))(?: against (\S+))?)(?: on (.+))?"
)
BLOCK = re.compile(r"<!-- records: ([^>]*?) -->\n(.*?)<!-- /records -->", re.S)
_OPEN, _CLOSE = re.compile(r"<!-- records:"), re.compile(r"<!-- /records -->")
# a speed, a time, a size or a ratio: what only a record can know
_NUMBER = re.compile(r"\b\d[\d.,]*(?:x\b| ?(?:us|ms|[KMG]iB|[GT]B/s|[GT]F/s|[GT]FLOP/s|tok/s)\b)")
_CODE = re.compile(r"```.*?```|`[^`]*`", re.S)


@dataclass(frozen=True)
class Wanted:
    """One marker, read. name: of the file of records."""

    name: str
    table: str
    suites: tuple[str, ...] = ()
    against: str = "torch"
    machine: str = ""

    @staticmethod
    def parse(words: str) -> Wanted:
        """Read what stands in a marker. Raises ArgumentError where it is none."""
        found = _MARKER.fullmatch(words)
        if found is None:
            raise ArgumentError(
                "This marker names no table of records.",
                {
                    "marker": repr(words),
                    "tables": "FILE suites, FILE cases SUITES, FILE aims, FILE train, FILE verify",
                },
                f"{EXAMPLE}.",
            )
        name, alone, kind, suites, against, machine = found.groups(default="")
        chosen = tuple(suites.split(",")) if suites else ()
        return Wanted(name, alone or kind.split()[0], chosen, against or "torch", machine)


def filled(text: str, folder: Path) -> str:
    """The text with all blocks made anew. Raises ArgumentError for a marker that cannot be."""
    if len(_OPEN.findall(text)) != len(BLOCK.findall(text)) or len(_CLOSE.findall(text)) != len(
        BLOCK.findall(text)
    ):
        raise ArgumentError(
            "A marker of records is open without an end, or ends without a beginning.",
            {"begin": len(_OPEN.findall(text)), "end": len(_CLOSE.findall(text))},
            f"{EXAMPLE} on a line of its own, and <!-- /records --> on another.",
        )

    def made(found: re.Match[str]) -> str:
        body = table(Wanted.parse(found[1]), folder)
        return f"<!-- records: {found[1]} -->\n{body}<!-- /records -->"

    return BLOCK.sub(made, text)


def faults(name: str, text: str, folder: Path) -> list[str]:
    """Where a document differs from the records: in words, with line numbers."""
    found = []
    new = list(BLOCK.finditer(filled(text, folder)))
    for old, right in zip(BLOCK.finditer(text), new, strict=True):
        if old[2] != right[2]:
            first = text[: old.start()].count("\n") + 2
            found += _differences(f"{name}, table `{old[1]}`", first, old[2], right[2])
    return found


def unrecorded(name: str, text: str) -> list[str]:
    """Speeds, times, sizes and ratios outside the blocks and outside code: no record gives them."""
    blank = lambda found: re.sub(r"[^\n]", " ", found[0])  # noqa: E731  keeps the line numbers
    rest = _CODE.sub(blank, BLOCK.sub(blank, text))
    return [
        f"{name}:{number} says {found[0]!r}, which no record gives"
        for number, line in enumerate(rest.splitlines(), 1)
        for found in _NUMBER.finditer(line)
    ]


def _differences(what: str, first: int, old: str, new: str) -> list[str]:
    """The first line that differs, as it is and as it should be."""
    is_now, should = old.splitlines(), new.splitlines()
    for n in range(max(len(is_now), len(should))):
        a, b = (lines[n] if n < len(lines) else "(nothing)" for lines in (is_now, should))
        if a != b:
            return [f"{what}, line {first + n}: it says\n    {a}\n  and the records give\n    {b}"]
    return []


# ---- the tables ----


def table(wanted: Wanted, folder: Path) -> str:
    """The Markdown of one block. Raises ArgumentError where there are no such records."""
    if wanted.table in ("aims", "train") and not (folder / f"{wanted.name}.jsonl").is_file():
        return f"Not measured yet: no records are called {wanted.name}.\n"
    if wanted.table == "train":
        return _train(folder / f"{wanted.name}.jsonl")
    book = Book.read(folder, [wanted.name])
    if wanted.table == "verify":
        return _verify(book)
    cases = [b for b in book.bench if any(e.samples_us for e in b.entries.values())]
    cases = [b for b in cases if wanted.machine.lower() in b.source.machine.lower()]
    suites = aims.NAMES if wanted.table == "aims" else wanted.suites
    cases = [b for b in cases if b.suite in suites or not suites]
    if not cases:
        raise ArgumentError(
            "No record is what this marker asks for.",
            {"file": f"{wanted.name}.jsonl", "suites": ", ".join(suites) or "all",
             "on": wanted.machine or "the newest record's machine"},
            f"{EXAMPLE}, or measure it: nosquare bench.",
        )  # fmt: skip
    if wanted.table == "aims":
        return "\n".join(aims.tables(cases))
    last = max(cases, key=lambda b: (b.source.utc, b.source.line))
    cases = [b for b in cases if _place(b) == _place(last)]
    make: Callable[[Sequence[Bench], str], list[str]] = {"suites": _suites, "cases": _cases}[
        wanted.table
    ]
    lines = make(cases, wanted.against)
    return "\n".join([*lines, "", _caption(cases, wanted.against), ""])


def _place(bench: Bench) -> tuple[str, str]:
    return bench.processor, bench.data["software"]["torch"]


def _caption(cases: Sequence[Bench], against: str) -> str:
    who = "the fastest other's" if against == BEST else f"{against}'s"
    sources = [b.source for b in cases]
    return (
        f"Ratio: {who} time over nosquare's, interleaved, median over the rounds. From "
        f"docs/records/{places(sources)} ({when_and_where(sources)})."
    )


def _suites(cases: Sequence[Bench], against: str) -> list[str]:
    rows = ["| where | cases | ratio, geometric mean | least to most |", "|---|---|---|---|"]
    for suite in dict.fromkeys(b.suite for b in cases):
        mine = [b for b in cases if b.suite == suite]
        title = suite_title(mine[0]).partition(" (")[0]
        ratios = [r.middle for b in mine if (r := _ratio(b, against)) is not None]
        rows.append(f"| {title} | {len(mine)} | {' | '.join(_summary(ratios))} |")
    return rows


def _summary(ratios: Sequence[float]) -> tuple[str, str]:
    """(geometric mean, least to most)."""
    if not ratios:
        return NONE, NONE
    mean = geometric_mean(ratios)
    return f"{digits(mean)}x", f"{digits(min(ratios))}x to {digits(max(ratios))}x"


def _cases(cases: Sequence[Bench], against: str) -> list[str]:
    common, labels = shared(cases)
    other = "the fastest other" if against == BEST else against
    first = f"case (`{common}`)" if common else "case"
    rows = [f"| {first} | {other} | nosquare | ratio (95%) | peak, {other} | peak, nosquare |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    several = len({b.data["machine"]["threads"] for b in cases}) > 1
    for label, bench in zip(labels, cases, strict=True):
        mine, theirs = bench.entries.get(MINE), _other(bench, against)
        ratio = _ratio(bench, against)
        threads = f", threads: {bench.data['machine']['threads']}" if several else ""
        cells = [f"`{label}`{threads}", *(_time(e) for e in (theirs, mine)), str(ratio or NONE),
                 *(_peak(e) for e in (theirs, mine))]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _other(bench: Bench, against: str) -> Entry | None:
    if against != BEST:
        return bench.entries.get(against)
    timed = [e for e in bench.rivals if e.median_us is not None]
    return min(timed, key=lambda e: e.median_us or math.inf, default=None)


def _ratio(bench: Bench, against: str) -> Ratio | None:
    mine, theirs = bench.entries.get(MINE), _other(bench, against)
    return None if mine is None or theirs is None else paired(theirs.samples_us, mine.samples_us)


def _time(entry: Entry | None) -> str:
    return NONE if entry is None else time(entry.median_us)


def _peak(entry: Entry | None) -> str:
    return NONE if entry is None or entry.peak_bytes is None else size(entry.peak_bytes)


def _train(path: Path) -> str:
    """The newest record of each width of head."""
    found = {r["head"]: (line, r) for line, r in enumerate(read(path), 1) if r["kind"] == "train"}
    if not found:
        raise ArgumentError(
            "No record of this file is of kind train.", {"file": path.name}, "nosquare bench train."
        )
    newest = [found[head] for head in sorted(found)]
    lines = [f"| {' | '.join(train.HEADS)} |", "|---" * len(train.HEADS) + "|"]
    lines += [f"| {' | '.join(row)} |" for _, record in newest for row in train.rows(record)]
    _, last = newest[-1]
    card = last["machine"]["gpu"]
    name = card["name"] if card else last["machine"]["cpu"]
    where = f"{path.name}:{', '.join(str(line) for line, _ in newest)}"
    said = " ".join(train.sentence(record) for _, record in newest)
    return "\n".join([
        *lines, "",
        f"{train.said(last)}. {said} From docs/records/{where} ({last['utc'][:10]}; {name}, torch "
        f"{last['software']['torch']}).", "",
    ])  # fmt: skip


def _verify(book: Book) -> str:
    found = newest_verified(book)
    if not found:
        raise ArgumentError(
            "No record of this file is of kind verify.", {"folder": book.folder}, "nosquare verify."
        )
    rows = [
        "| function | device | pass | fail | other convention | refused |",
        "|---|---|---|---|---|---|",
    ]
    sources: list[Source] = []
    for record in found:
        counts = record.data["counts"]
        numbers = (str(counts[word]) for word in ("pass", "fail", "convention", "refused"))
        rows.append(
            f"| `{record.data['target']}` | {record.data['device']} | {' | '.join(numbers)} |"
        )
        sources.append(record.source)
    return "\n".join(
        [*rows, "", f"From docs/records/{places(sources)} ({when_and_where(sources)}).", ""]
    )
