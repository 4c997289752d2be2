"""A line of a table that one backend is held to on a card: its cases, how they are asked, and how
they fare.

A ratio is the median of a peer's times over the median of the backend's, which is asked by name:
above 1, the backend is faster. What the tables are: portable.py, hopper.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import UnsupportedError
from ..receipt import BACKWARD, FORWARD
from .aims import error_ratio, missing
from .cases import Case
from .report import labels
from .table import in_unit, rate_of, show_refusals
from .timing import Result, Rounds
from .tune import HIDDEN, TOKENS, Search
from .tune import compile_ahead as compile_searches
from .words import NONE, two

if TYPE_CHECKING:
    from rich.console import Console

FA3, FLEX = "fa3", "flex"
CUDNN, FLASH, EFFICIENT = "torch:cudnn", "torch:flash", "torch:efficient"


@dataclass(frozen=True)
class Line:
    """A line of a table.

    name     of the suite, in records
    subject  the contestant who is held to it
    against  peers joined by commas: the ratio of a case is to the fastest of them
    least    geometric mean over the cases, at least; None: nothing is aimed at
    each     a case's ratio, at least; None: as `least`
    also     others who are asked, joined by commas
    """

    name: str
    title: str
    cases: tuple[str, ...]
    quick: tuple[str, ...]
    subject: str
    against: str
    least: float | None
    each: float | None = None
    also: str = ""

    @property
    def peers(self) -> str:
        """Contestants, joined by commas."""
        return ",".join(filter(None, (self.subject, self.against, self.also)))

    @property
    def aim(self) -> float | None:
        """What one case is held to."""
        return self.least if self.each is None else self.each


def squares(phase: str, dtype: str, lengths: Sequence[int], more: str = "", tokens: int = TOKENS,
            widths: Sequence[int] = (64, 128), masks: Sequence[str] = ("full()", "causal(end)"),
            ) -> tuple[str, ...]:  # fmt: skip
    """Cases of so many tokens in entries of N, their heads side by side HIDDEN wide."""
    start = f"{phase} {dtype}"
    return tuple(
        f"{start} B{tokens // n} Hq{HIDDEN // d} Hk{HIDDEN // d} M{n} N{n} D{d} {mask}{more}"
        for d in widths
        for n in lengths
        for mask in masks
    )


def compile_ahead(console: Console, name: str, cases: Iterable[Case], device: torch.device) -> None:
    """Compile a backend's kernels of these cases, many at once; what it refuses is left out."""
    searches = []
    for case in cases:
        halves = [replace(case, phase=FORWARD, grad=case.wants_grads)]
        halves += [replace(case, phase=BACKWARD)] if case.wants_grads else []
        for half in halves:
            try:
                searches.append(Search.today(half, name, device))
            except UnsupportedError:
                break  # it will say why when it is asked
    compile_searches(console, searches, {})


# ---- how it went ----


class Outcome(NamedTuple):
    """One case of a line; NaN for what is not known.

    ratio   the time of the fastest of those it is against, over the backend's
    also    the time of the fastest of the others
    tflops  TFLOP/s of the backend
    error   the backend's over that peer's
    peer    the fastest of those it is against; "" where none was timed
    """

    suite: str
    case: Case
    ratio: float
    also: float
    tflops: float
    error: float
    peer: str = ""

    @staticmethod
    def of(line: Line, case: Case, flops: int, medians_us: Mapping[str, float],
           errors: Mapping[str, Mapping[str, float]]) -> Outcome:  # fmt: skip
        """From medians, and rms of the error by the name of the output, of each contestant."""
        mine_us = medians_us.get(line.subject, math.nan)
        peer, peer_us = _fastest(line.against, medians_us)
        _, also_us = _fastest(line.also, medians_us)
        error = error_ratio(case, *(errors.get(one, {}) for one in (line.subject, peer)))
        tflops = flops / mine_us / 1e6
        return Outcome(line.name, case, peer_us / mine_us, also_us / mine_us, tflops, error, peer)


def _fastest(names: str, medians_us: Mapping[str, float]) -> tuple[str, float]:
    """Of contestants joined by commas, the one with the least median; ("", NaN) for none."""
    known = {name: medians_us.get(name, math.nan) for name in names.split(",")}
    timed = {name: time_us for name, time_us in known.items() if not math.isnan(time_us)}
    return min(timed.items(), key=lambda item: item[1], default=("", math.nan))


def outcome(line: Line, result: Result) -> Outcome:
    """A result as a part of its line."""
    medians_us = {e.contestant: e.median_us for e in result.entries}
    errors = {e.contestant: {x.what: x.rms for x in e.errors} for e in result.entries}
    return Outcome.of(line, result.case, result.case.flops(result.pairs), medians_us, errors)


def most_error(outcomes: Iterable[Outcome]) -> float:
    """The largest error over the peer's of those that are known; NaN for none."""
    return max((o.error for o in outcomes if not math.isnan(o.error)), default=math.nan)


def rates(outcomes: Iterable[Outcome]) -> str:
    """TFLOP/s, from the least to the most."""
    known = [o.tflops for o in outcomes if not math.isnan(o.tflops)]
    ends = dict.fromkeys(f"{end:.0f}" for end in (min(known), max(known))) if known else {}
    return " to ".join(ends) or NONE


# ---- the table that it is a line of ----

Cells = tuple[Sequence[str], list[list[str]]]  # heads, rows


@dataclass(frozen=True)
class Board:
    """What a backend is held to.

    group   the word that means all of its lines
    tables  of outcomes, in Markdown: what is behind stands between **
    said    what their cells are
    """

    group: str
    backend: str
    lines: tuple[Line, ...]
    rounds: Rounds
    tables: Callable[[Sequence[Outcome]], list[Cells]]
    said: str


def show(console: Console, line: Line, results: Sequence[Result]) -> None:
    """Print a line's cases, and who was not timed."""
    from rich import box
    from rich.table import Table

    shared, cases = labels(results)
    console.print(f"\n[bold]{line.title}[/bold]" + (f"\n{shared}" if shared else ""))
    names = [e.contestant for e in results[0].entries]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("case", min_width=9)
    for head in (*(f"{name}\nms" for name in names), "ratio", "aim", "TFLOP/s", "error", "rounds"):
        table.add_column(head, justify="right")
    for label, result in zip(cases, results, strict=True):
        one, times = outcome(line, result), [result.of(name).median_us for name in names]
        mine_us = {e.contestant: e.median_us for e in result.entries}.get(line.subject, math.nan)
        cells = [NONE if math.isnan(t) else in_unit(t, "ms") for t in times]
        cells += [two(one.ratio), NONE if line.aim is None else f"{line.aim}"]
        cells += [NONE if math.isnan(mine_us) else rate_of(result, mine_us), two(one.error)]
        rounds = max((len(e.samples_us) for e in result.entries), default=0)
        style = "yellow" if missing(one.ratio, line.aim) else None
        table.add_row(label, *cells, f"{rounds}", style=style)
    console.print(table)
    show_refusals(console, cases, results)
