"""How the plans of a search are shown: the fastest of each case, then all cases together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .report import labels
from .table import OURS, in_unit, rate_of
from .timing import Entry, Result
from .words import two

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 8  # plans of a case; the record has all
NOISE = 1.01  # today's plan stays where another is faster by less


def label(backend: str, words: str) -> str:
    """The name of a contestant: a backend with a plan."""
    return f"{OURS}:{backend}@{words}"


def words_of(entry: Entry) -> str:
    """The plan of a contestant, in words."""
    return entry.contestant.partition("@")[2]


def _brief(entry: Entry) -> str:
    """Without the words before a colon, which all plans of a case share."""
    return words_of(entry).rpartition(": ")[2]


def ranked(result: Result) -> list[Entry]:
    """Those who were timed, fastest first."""
    return sorted((e for e in result.entries if e.samples_us), key=lambda e: e.median_us)


def chosen(result: Result) -> Entry | None:
    """The plan to take: the fastest, but today's where that is as fast; None: none was timed."""
    order, today = ranked(result), result.entries[0]
    if not order:
        return None
    return today if today.median_us <= NOISE * order[0].median_us else order[0]


def gain(result: Result, entry: Entry) -> float:
    """Time of today's plan over this one's: above 1, this one is faster; NaN: not known."""
    return result.entries[0].median_us / entry.median_us if entry.samples_us else math.nan


def show(console: Console, result: Result) -> None:
    """Print the fastest plans of a case, today's and the one to take; then who was not timed."""
    from rich import box
    from rich.table import Table

    order, today, take = ranked(result), result.entries[0], chosen(result)
    console.print(f"\n{result.case} ({result.suite}: {len(order)} plans)", markup=False)
    unit = "us" if order and order[0].median_us < 1000 else "ms"
    rate = "GB/s" if result.case.phase == "decode" else "TFLOP/s"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("plan")
    for column in (unit, rate, "today/this"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for place, entry in enumerate(order):
        if place >= SHOWN and entry not in (today, take):
            continue
        marks = [word for word, one in (("chosen", take), ("today", today)) if entry is one]
        numbers = in_unit(entry.median_us, unit), rate_of(result, entry.median_us)
        cells = (_brief(entry), *numbers, two(gain(result, entry)), ", ".join(marks))
        table.add_row(*cells, style="bold" if entry is take else None)
    console.print(table)
    _show_refusals(console, result.entries)


def _show_refusals(console: Console, entries: Sequence[Entry]) -> None:
    """Print each reason once, with the plans that it meets."""
    why: dict[str, list[str]] = {}
    for entry in entries:
        if entry.refused:
            why.setdefault(entry.refused, []).append(_brief(entry))
    for reason, plans in why.items():
        many = f" and {len(plans) - 1} more" if len(plans) > 1 else ""
        console.print(f"not timed: {plans[0]}{many}: {reason}", markup=False)


def summary(console: Console, results: Sequence[Result]) -> None:
    """Print, for each case, the plan to take and what it gains."""
    from rich import box
    from rich.table import Table

    if not results:
        return
    shared, cases = labels(results)
    console.print("\n[bold]plans to take[/bold]" + (f"\n{shared}" if shared else ""))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("case", "plan"):
        table.add_column(name)
    for name in ("ms", "rate", "today/this"):
        table.add_column(name, justify="right", no_wrap=True)
    for case, result in zip(cases, results, strict=True):
        entry = chosen(result)
        if entry is None:
            table.add_row(case, "none was timed", "", "", "")
            continue
        stays = " (today's)" if entry is result.entries[0] else ""
        numbers = in_unit(entry.median_us, "ms"), rate_of(result, entry.median_us)
        table.add_row(case, _brief(entry) + stays, *numbers, two(gain(result, entry)))
    console.print(table)
