"""`nosquare bench cpu`: nosquare and torch's own attention, side by side on this processor."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .. import records
from ..errors import ArgumentError, NosquareError
from . import ceiling, memory, record, report
from .aims import PEAKS, SUITES, Suite
from .cases import FLOP_CONVENTION, Case
from .contestants import NOSQUARE
from .peers import TORCH
from .screen import progress, warn_if_busy
from .timing import Result, Rounds, Tick, measure, pose

if TYPE_CHECKING:
    from rich.console import Console

CONTESTANTS = (TORCH, NOSQUARE)
WIDTH = 140  # columns, where what is printed goes to no terminal
FULL, QUICK = Rounds(7, 100, 0.8, few=3), Rounds(3, 50, 0.2)
Ceilings = dict[int, dict[torch.dtype, ceiling.Ceiling]]


def bench_cpu(
    threads: Sequence[str] = (),
    quick: bool = False,
    keep: bool = True,
    case: str | None = None,
    only: Sequence[str] = (),
    peaks: bool = False,
    name: str = "cpu",
) -> int:
    """Compare nosquare with torch on this CPU, print the table of aims.py, keep the evidence.

    threads  numbers of torch's threads, each a word or several joined by commas; (): 1 and 2
    quick    fewer cases and rounds, about a minute
    keep     append the records to docs/records/<name>.jsonl (--record / --no-record)
    case     one line of the grammar in bench/cases.py, instead of the table
    only     words, of which a case's line (its suite's name before it) has one
    peaks    also the peak of memory, where torch makes the square

    Returns 0 when all of nosquare's answers were right, else 1; a missed aim is reported, no more.
    Raises ArgumentError for threads or a case that are none, and for words that no case has.
    """
    counts = thread_counts(threads)
    suites = chosen(case, only, quick, peaks)
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    begun = time.perf_counter()
    _introduce(console, counts)
    results, path = [], None
    with progress(console, len(counts) * sum(len(s.cases) for s in suites)) as (tick, step):
        for suite in suites:
            found = []
            tick("the processor's ceilings")
            roofs = _ceilings(suite, counts)
            for result in _measured(suite, counts, roofs, QUICK if quick else FULL, tick, step):
                with torch_threads(result.threads):
                    if suite.peaks and not quick:  # a fresh process each: seconds
                        _add_peaks(console, result, tick)
                    if keep:  # at once: what an interrupted run measured is kept
                        line = record.of(result, records.surroundings())
                        path = records.append(records.folder(), name, [line], record.SCHEMA)
                found.append(result)
            report.show(console, suite, found)
            results += found
    if case is None:
        report.summary(console, results)
    console.print(f"It took {(time.perf_counter() - begun) / 60:.1f} minutes.")
    if path is not None:
        console.print(f"Records: docs/records/{path.name}")
    if wrong := any(result.of("nosquare").refused for result in results):
        console.print("[red]FAILED[/red] an answer of nosquare is wrong, or it gave none")
    return int(wrong)


def thread_counts(words: Sequence[str]) -> list[int]:
    """The numbers in ("1", "2") or ("1,2"); of (), 1 and, where there are two processors, 2.

    Raises ArgumentError for what is no number above 0.
    """
    if not words:
        return [1, 2][: os.cpu_count() or 1]
    try:
        found = [int(word) for word in ",".join(words).split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ArgumentError(
            "A benchmark needs at least one thread, and whole numbers of them.",
            {"threads": ", ".join(words)},
            "--threads 1, or --threads 1,2.",
        )
    return list(dict.fromkeys(found))


def chosen(case: str | None, only: Sequence[str], quick: bool, peaks: bool) -> list[Suite]:
    """The suites that are asked for, each with the cases that are; see bench_cpu."""
    if case is not None:
        return [Suite("-", "your case", (str(Case.parse(case)),), (), peaks=True)]
    found = []
    for suite in (*SUITES, PEAKS) if peaks else SUITES:
        lines = suite.quick if quick else suite.cases
        if only:
            lines = tuple(x for x in lines if any(w in f"{suite.name} {x}" for w in only))
        if lines:
            found.append(replace(suite, cases=lines))
    if not found:
        raise ArgumentError(
            "No case of the benchmark has these words.",
            {"only": ", ".join(map(repr, only)), "suites": ", ".join(s.name for s in SUITES),
             "a case": f"{SUITES[0].name} {SUITES[0].cases[0]}"},
            '--only decode, or --only "D128 causal".',
        )  # fmt: skip
    return found


def _introduce(console: Console, counts: Sequence[int]) -> None:
    around = records.surroundings()
    machine, software = around["machine"], around["software"]
    console.print(
        f"{machine['cpu']} ({', '.join(machine['features'])}), threads: "
        f"{' and '.join(map(str, counts))}, torch {software['torch']}.\nTimes are medians of "
        "interleaved rounds. Ratio: torch's time / nosquare's. of gemm, of read: nosquare's rate "
        "over torch.mm's and over that of summing an array, measured here.\nerror, torch's: rms "
        "against float64 over rms of the answer, worst output.\n"
        f"GF/s: {FLOP_CONVENTION}",
        markup=False,
    )
    warn_if_busy(console)


def _ceilings(suite: Suite, counts: Sequence[int]) -> Ceilings:
    """By number of threads and dtype."""
    cases = [Case.parse(line) for line in suite.cases]
    reads = any(case.phase == "decode" for case in cases)
    found: Ceilings = {}
    for count in counts:
        with torch_threads(count):
            found[count] = {d: ceiling.measured(d, reads) for d in {c.dtype for c in cases}}
    return found


def _measured(suite: Suite, counts: Sequence[int], roofs: Ceilings, rounds: Rounds,
              tick: Tick, step: Tick) -> Iterator[Result]:  # fmt: skip
    """Each case with each number of threads; what is right is found once for all."""
    for line in suite.cases:
        case, posed = Case.parse(line), None
        for count in counts:
            step(f"{case}, threads: {count}")
            tick("oracle")
            posed = posed or pose(case)
            with torch_threads(count):
                roof = roofs[count][case.dtype]
                result = measure(case, CONTESTANTS, rounds, tick, suite.name, None, posed, roof)
            yield result


def _add_peaks(console: Console, result: Result, tick: Tick) -> None:
    for entry in result.entries:
        if entry.refused:
            continue
        tick(f"memory of {entry.contestant}")
        try:
            entry.peak_bytes = memory.peak_bytes(result.case, entry.contestant, result.threads)
        except NosquareError as error:
            console.print(f"[yellow]no peak of {entry.contestant}[/yellow]: {error.sentence}")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch with this many threads, inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
