"""Results of many contestants as tables in the terminal: one a case, the fastest first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .report import labels
from .timing import Entry, Result
from .words import MIB, NONE, geometric_mean, two

if TYPE_CHECKING:
    from rich.console import Console

OURS = "nosquare"
HOST_SHARE = 0.5  # of the card's time: from there on, how slow the host is belongs into the table


def is_ours(contestant: str) -> bool:
    """Whether it is nosquare, or one of its backends by name."""
    return contestant.partition(":")[0] == OURS


def best_peer(result: Result) -> Entry | None:
    """The fastest of those who are not nosquare; None where none was timed."""
    peers = [e for e in result.entries if e.samples_us and not is_ours(e.contestant)]
    return min(peers, key=lambda e: e.median_us, default=None)


def error_ratio(entry: Entry, yardstick: Entry | None) -> float:
    """An entry's largest error over that of the yardstick, output by output; NaN where one of them
    is unknown or 0, or where they were not checked alike."""
    theirs = {c.what: c for c in yardstick.checks} if yardstick is not None else {}
    known = [
        c.error / theirs[c.what].error
        for c in entry.checks
        if c.what in theirs and theirs[c.what].error and theirs[c.what].how == c.how
    ]
    return max(known) if known else math.nan


def show(console: Console, results: Sequence[Result], title: str) -> None:
    """Print a suite: for each case a table of who answered, then who did not and why, and how
    nosquare stands against the best peer."""
    shared, names = labels(results)
    console.print(f"\n[bold]{title}[/bold]" + (f"\n{shared}" if shared else ""))
    for name, result in zip(names, results, strict=True):
        _show_case(console, name, result)
    ran: dict[str, set[str]] = {}
    for entry in (e for r in results for e in r.entries if e.ran and e.samples_us):
        ran.setdefault(entry.contestant, set()).add(entry.ran)
    for contestant, kernels in ran.items():
        if contestant in (OURS, "torch"):  # the others have said it by their names
            console.print(f"{contestant} ran: {'; '.join(sorted(kernels))}", markup=False)
    show_refusals(console, names, results)
    ratios = {n: _ratio(r, r.of(OURS)) for n, r in zip(names, results, strict=True) if _has(r)}
    known = {name: ratio for name, ratio in ratios.items() if not math.isnan(ratio)}
    if known:
        mean, worst = geometric_mean(list(known.values())), min(known, key=known.__getitem__)
        words = f"best peer's time / nosquare's: {mean:.2f}"
        if len(known) > 1:
            words += f" (geometric mean of {len(known)}); least {known[worst]:.2f}: {worst}"
        console.print(words, markup=False)


def _show_case(console: Console, name: str, result: Result) -> None:
    from rich import box
    from rich.table import Table

    timed = sorted((e for e in result.entries if e.samples_us), key=lambda e: e.median_us)
    console.print(f"\n{name}", markup=False)
    if not timed:
        console.print("  nobody was timed")
        return
    rate = "GB/s" if result.case.phase == "decode" else "TFLOP/s"
    unit = "us" if timed[0].median_us < 1000 else "ms"
    host = any(e.host_us is not None and e.host_us > HOST_SHARE * e.median_us for e in timed)
    columns = [unit, rate, "best/this", "error"]
    columns += ["MiB"] if any(e.peak_bytes is not None for e in timed) else []
    columns += ["host us"] if host else []
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("", no_wrap=True, min_width=18)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    yardstick = next((e for e in timed if e.contestant == "torch"), best_peer(result))
    for entry in timed:
        cells = [in_unit(entry.median_us, unit), rate_of(result, entry.median_us),
                 two(_ratio(result, entry)), two(error_ratio(entry, yardstick))]  # fmt: skip
        if "MiB" in columns:
            size = entry.peak_bytes
            cells.append(NONE if size is None else f"{size / MIB:,.0f}")
        if host:
            cells.append(NONE if entry.host_us is None else f"{entry.host_us:,.0f}")
        style = "bold" if is_ours(entry.contestant) else None
        table.add_row(entry.contestant, *cells, style=style)
    console.print(table)


def show_refusals(console: Console, names: Sequence[str], results: Sequence[Result]) -> None:
    """Print each reason once, with the cases that it meets."""
    why: dict[tuple[str, str], list[str]] = {}
    for name, result in zip(names, results, strict=True):
        for entry in result.entries:
            if entry.refused:
                why.setdefault((entry.contestant, entry.refused), []).append(name)
    for (contestant, refused), where in why.items():
        cases = "" if len(where) == len(results) else f" [{'; '.join(where)}]"
        console.print(f"not timed: {contestant}{cases}: {refused}", markup=False)


def _has(result: Result) -> bool:
    return any(e.contestant == OURS for e in result.entries)


def _ratio(result: Result, entry: Entry) -> float:
    """The best peer's time over this one's: above 1, this one is faster."""
    best = best_peer(result)
    return math.nan if best is None else best.median_us / entry.median_us


def in_unit(time_us: float, unit: str) -> str:
    """A time in "us" or "ms"."""
    return f"{time_us:,.1f}" if unit == "us" else f"{time_us / 1000:,.3f}"


def rate_of(result: Result, time_us: float) -> str:
    """TFLOP/s of a call that takes so long; for decoding, GB/s of k and v."""
    if result.case.phase == "decode":
        return f"{result.case.cache_bytes / time_us / 1e3:,.0f}"
    rate = result.case.flops(result.pairs) / time_us / 1e6
    return f"{rate:,.1f}" if rate >= 1 else f"{rate:.3f}"
