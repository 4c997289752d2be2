"""Two contestants on the terminal: a table for each line of aims.py, then the lines together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .aims import HEADS, SAID, Outcome, Suite, error_ratio, lines, missing
from .timing import Entry, Result
from .words import MIB, NONE, percent, two

if TYPE_CHECKING:
    from rich.console import Console


def show(console: Console, suite: Suite, results: Sequence[Result]) -> None:
    """Print what one line's cases came to, for each number of threads, and who was not timed."""
    from rich import box
    from rich.table import Table

    shared, cases = labels(results)
    console.print(f"\n[bold]{suite.title}[/bold]" + (f"\n{shared}" if shared else ""))
    decode = all(r.case.phase == "decode" for r in results)
    unit = "us" if any(e.median_us < 1000 for r in results for e in r.entries) else "ms"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("case", min_width=9)
    names = ["on", f"torch\n{unit}", f"nosquare\n{unit}", "ratio", "aim"]
    names += ["GB/s\nof k, v", "of\nread"] if decode else ["GF/s", "of\ngemm"]
    names += ["error", "torch's"]
    peaks = any(e.peak_bytes is not None for r in results for e in r.entries)
    for name in [*names, *(["torch\nMiB", "nosquare\nMiB"] if peaks else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rounds", justify="right")
    table.add_column("ran", no_wrap=True)
    last = ""
    for label, result in zip(cases, results, strict=True):
        style = "yellow" if missing(result.ratio(), suite.aim(result.case)) else None
        cells = _cells(result, suite, unit, peaks)
        table.add_row("" if label == last else label, *cells, style=style)
        last = label
    console.print(table)
    for result in results:
        for entry in result.entries:
            if entry.refused:
                console.print(f"not timed: {entry.contestant}, {result.case}, threads: "
                              f"{result.threads}: {entry.refused}", markup=False)  # fmt: skip


def summary(console: Console, results: Sequence[Result]) -> None:
    """Print the whole table, as README has it."""
    print_table(console, HEADS, lines([outcome(r) for r in results]), SAID)


def print_table(
    console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], said: str = ""
) -> None:
    """Print a table of ratios, and what is said about them below it, if anything."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in heads:
        table.add_column(name)
    for cells in rows:
        table.add_row(*cells)
    console.print()
    console.print(table)
    if said:
        console.print(f"Ratios: {said}.")


def outcome(result: Result) -> Outcome:
    """A result as a part of its line."""
    mine = result.of("nosquare")
    both = ({e.what: e.rms for e in entry.errors} for entry in (mine, result.of("torch")))
    error, ran = error_ratio(result.case, *both), mine.ran if mine.samples_us else ""
    return Outcome(result.suite, result.case, result.threads, result.ratio(), _share(result),
                   error, ran)  # fmt: skip


def labels(results: Sequence[Result]) -> tuple[str, list[str]]:
    """The words that all cases share, and what is left of each; a single case is left whole.

    M is not said where N is the same.
    """
    words = [str(r.case).split() for r in results]
    if len({str(r.case) for r in results}) < 2:
        return "", [" ".join(w) for w in words]
    shared = [w for w in words[0] if all(w in other for other in words)]
    rest = []
    for result, mine in zip(results, words, strict=True):
        again = f"M{result.case.M}" if result.case.M == result.case.N else ""
        rest.append(" ".join(w for w in mine if w not in (*shared, again)))
    return " ".join(shared), [label or "as it is" for label in rest]


def _cells(result: Result, suite: Suite, unit: str, peaks: bool) -> list[str]:
    torch, mine = result.of("torch"), result.of("nosquare")
    aim = suite.aim(result.case)
    cells = [str(result.threads), _time(torch.median_us, unit), _time(mine.median_us, unit)]
    cells += [two(result.ratio()), NONE if aim is None else f"{aim}"]
    cells += [_rate(result, mine.median_us), percent(_share(result))]
    cells += [_error(e) for e in (mine, torch)]
    if peaks:
        cells += [NONE if e.peak_bytes is None else f"{e.peak_bytes / MIB:,.0f}"
                  for e in (torch, mine)]  # fmt: skip
    return [*cells, f"{len(mine.samples_us)}", mine.ran or NONE]


def _error(entry: Entry) -> str:
    """rms of the error over rms of the truth, of the worst output."""
    known = [e.relative for e in entry.errors if not math.isnan(e.relative)]
    return f"{max(known):.1e}" if known else NONE


def _share(result: Result) -> float:
    time_us, flops = result.of("nosquare").median_us, result.case.flops(result.pairs)
    roof = result.ceiling
    return math.nan if roof is None else roof.share(result.case, flops, time_us)


def _time(time_us: float, unit: str) -> str:
    if math.isnan(time_us):
        return NONE
    number = time_us if unit == "us" else time_us / 1000
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def _rate(result: Result, time_us: float) -> str:
    """GF/s; for decoding, GB/s of k and v."""
    if math.isnan(time_us):
        return NONE
    decode = result.case.phase == "decode"
    amount = result.case.cache_bytes if decode else result.case.flops(result.pairs)
    return f"{amount / time_us / 1000:.1f}"
