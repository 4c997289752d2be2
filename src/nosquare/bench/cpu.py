"""`nosquare bench cpu`: nosquare and torch's own attention, side by side on this processor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import records
from ..errors import ArgumentError, NosquareError
from . import memory, record, report
from .cases import FLOP_CONVENTION, Case
from .contestants import NOSQUARE
from .peers import TORCH
from .report import Aim
from .screen import progress, warn_if_busy
from .timing import Result, Rounds, Tick, measure

if TYPE_CHECKING:
    from rich.console import Console

CONTESTANTS = (TORCH, NOSQUARE)


@dataclass(frozen=True)
class Suite:
    """Cases that belong together.

    memory   the peak of each contestant is measured too
    threads  of torch, whatever the run was given; None: as the run was given
    """

    letter: str
    title: str
    cases: tuple[str, ...]
    quick: tuple[str, ...]
    aim: Aim
    memory: bool = False
    threads: int | None = None


def _prefill(dtype: str, tokens: Sequence[int], widths: Sequence[int]) -> tuple[str, ...]:
    return tuple(
        f"{phase} {dtype} B1 Hq8 Hk8 M{n} N{n} D{d} {mask}"
        for n in tokens
        for d in widths
        for mask in ("full()", "causal(start)")
        for phase in ("forward", "backward")
    )


def _decode(dtype: str, tokens: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"decode {dtype} B1 Hq32 Hk8 M1 N{n} D128 full()" for n in tokens)


def _square(n: int) -> tuple[str, ...]:
    start = f"forward+backward float32 B1 Hq8 Hk8 M{n} N{n} D64"
    return (f"{start} full() dropout=0.1", f"{start} E128 full()", f"{start} full() bias=Hq,1,N")


_TINY = "forward float32 B1 Hq1 Hk1 M16 N16 D64 full()"
SUITES = (
    Suite(
        "a",
        "where torch's fused kernel serves both",
        _prefill("float32", (512, 1024, 4096), (64, 128)),
        _prefill("float32", (512,), (64,)) + _prefill("float32", (1024,), (128,))[2:],
        Aim(least_ratio=0.97),
    ),
    Suite(
        "b",
        "decoding with grouped heads (rates are GB/s of k and v)",
        _decode("float32", (4096, 16384, 65536)) + _decode("bfloat16", (4096, 16384, 65536)),
        _decode("float32", (4096, 16384)) + _decode("bfloat16", (4096,)),
        Aim(least_ratio=1.4),
    ),
    Suite(
        "c",
        "where torch falls to its dense path",
        _square(4096),
        _square(512),
        Aim(least_ratio=1.5),
        memory=True,
    ),
    Suite(
        "d",
        "what a call costs before any work (one thread: waking another costs more than the call)",
        (_TINY, f"{_TINY} grad"),
        (_TINY, f"{_TINY} grad"),
        Aim(most_extra_us=25),
        threads=1,
    ),
    Suite(
        "e",
        "bfloat16, for information",
        _prefill("bfloat16", (1024, 4096), (64,)),
        _prefill("bfloat16", (512,), (64,))[:2],
        Aim(),
    ),
)


def bench_cpu(
    threads: int | None = None,
    quick: bool = False,
    keep: bool = True,
    case: str | None = None,
    parts: str = "abcde",
    name: str = "cpu",
) -> int:
    """Compare nosquare with torch on this CPU, print tables, keep the evidence.

    threads  of torch; None: as torch has it
    quick    fewer cases and rounds, under a minute
    keep     append the records to docs/records/<name>.jsonl (--record / --no-record)
    case     one line of the grammar in bench/cases.py, instead of all suites
    parts    letters of the suites wanted

    Returns 0 when all of nosquare's answers were right, else 1; a missed aim is reported, no more.
    Raises ArgumentError for a case or a part that is not one.
    """
    suites = _chosen(case, parts)
    from rich.console import Console

    console = Console(highlight=False)
    if threads is not None and threads < 1:
        raise ArgumentError(
            "A benchmark needs at least one thread.", {"threads": threads}, "--threads 1."
        )
    with _threads(threads):
        return _run(console, suites, quick, name if keep else None)


def _run(console: Console, suites: Sequence[Suite], quick: bool, name: str | None) -> int:
    around = records.surroundings()
    machine, software = around["machine"], around["software"]
    console.print(
        f"{machine['cpu']} ({', '.join(machine['features'])}), threads: {machine['threads']}, "
        f"torch {software['torch']}. Times are medians. Ratio: torch's time / nosquare's. "
        f"Error: nosquare's over torch's.\nGF/s: {FLOP_CONVENTION}"
    )
    warn_if_busy(console)
    rounds = Rounds(3, 100, 0.6) if quick else Rounds(7, 200, 3.0)
    plan = [(s, [Case.parse(line) for line in (s.quick if quick else s.cases)]) for s in suites]
    right, path = True, None
    with progress(console, sum(len(cases) for _, cases in plan)) as (tick, step):
        for suite, cases in plan:
            results = []
            for item in cases:
                step(str(item))
                with _threads(suite.threads):
                    result = measure(item, CONTESTANTS, rounds, tick, suite.letter)
                    if suite.memory and not quick:  # a fresh process each: seconds
                        _add_peaks(console, result, tick)
                    if name is not None:  # at once: what an interrupted run measured is kept
                        line = record.of(result, records.surroundings())
                        path = records.append(records.folder(), name, [line], record.SCHEMA)
                results.append(result)
                right = right and not result.of("nosquare").refused
            report.show(console, results, f"{suite.letter}. {suite.title}", suite.aim)
    if path is not None:
        console.print(f"Records: docs/records/{path.name}")
    if not right:
        console.print("[red]FAILED[/red] an answer of nosquare is wrong, or it gave none")
    return 0 if right else 1


def _chosen(case: str | None, parts: str) -> list[Suite]:
    if case is not None:
        line = str(Case.parse(case))
        return [Suite("-", "your case", (line,), (line,), Aim(), memory=True)]
    letters = [s.letter for s in SUITES]
    if not parts or set(parts) - set(letters):
        raise ArgumentError(
            "There is no such part of the benchmark.",
            {"parts": repr(parts), "known": "".join(letters)},
            "--parts " + "".join(letters) + ", or some of these letters.",
        )
    return [s for s in SUITES if s.letter in parts]


def _add_peaks(console: Console, result: Result, tick: Tick) -> None:
    for entry in result.entries:
        if entry.refused:
            continue
        tick(f"memory of {entry.contestant}")
        try:
            threads = torch.get_num_threads()
            entry.peak_bytes = memory.peak_bytes(result.case, entry.contestant, threads)
        except NosquareError as error:
            console.print(f"[yellow]no peak of {entry.contestant}[/yellow]: {error.sentence}")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Torch with this many threads, inside; None: as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
