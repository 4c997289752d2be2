"""The table that triton_any is held to on a card: its lines, their cases, and how they fare.

A ratio is the median of a peer's times over the median of triton_any's, which is asked by name:
above 1, triton_any is faster. A line aims at a geometric mean over its cases. float32 is IEEE's on
both sides: torch's tf32 is off unless a user turns it on, and would not pass the check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import UnsupportedError
from ..receipt import BACKWARD, FORWARD
from .aims import COLUMNS, column, error_ratio, missing
from .cases import Case
from .report import labels, print_table
from .table import in_unit, rate_of, show_refusals
from .timing import Result, Rounds
from .tune import HIDDEN, TOKENS, Search
from .tune import compile_ahead as compile_searches
from .words import NONE, geometric_mean, two

if TYPE_CHECKING:
    from rich.console import Console

BACKEND = "triton_any"
SUBJECT, CUDNN = f"nosquare:{BACKEND}", "torch:cudnn"
FLASH, EFFICIENT = "torch:flash", "torch:efficient"
GROUP = "portable"  # all lines
ROUNDS = Rounds(7, 30, 0.3)
HEADS = ("case", "against", *(f"D={width} {mask}" for width, mask in COLUMNS), "all",
         "against cuDNN", "TFLOP/s", "error over the peer's")  # fmt: skip
SAID = (
    "the peer's median time over triton_any's, interleaved, geometric mean over the cases "
    f"(hidden width {HIDDEN:,}); all: in brackets the least that the line aims at, and how many "
    "cases are below it or were not timed. Error over the peer's: rms against float64, worst "
    "output; not under dropout, where the two drop other pairs"
)


@dataclass(frozen=True)
class Line:
    """A line of the table.

    name     of the suite, in records
    against  the peer that the aim is about
    least    geometric mean over the cases, at least
    also     another who is asked
    """

    name: str
    title: str
    cases: tuple[str, ...]
    quick: tuple[str, ...]
    against: str
    least: float
    also: str = ""

    @property
    def peers(self) -> str:
        """Contestants, joined by commas."""
        return ",".join([SUBJECT, self.against, *([self.also] if self.also else [])])


def _cases(phase: str, dtype: str, lengths: Sequence[int], more: str = "", tokens: int = TOKENS,
           widths: Sequence[int] = (64, 128), masks: Sequence[str] = ("full()", "causal(end)"),
           ) -> tuple[str, ...]:  # fmt: skip
    start = f"{phase} {dtype}"
    return tuple(
        f"{start} B{tokens // n} Hq{HIDDEN // d} Hk{HIDDEN // d} M{n} N{n} D{d} {mask}{more}"
        for d in widths
        for n in lengths
        for mask in masks
    )


def _lengths(phase: str, least: float) -> Line:
    cases = _cases(phase, "bfloat16", (512, 1024, 2048, 4096, 8192, 16384))
    quick = _cases(phase, "bfloat16", (4096,), masks=("causal(end)",))
    title = f"bf16 {phase}, {TOKENS:,} tokens, N 512 to 16384"
    return Line(f"{GROUP}_{phase}", title, cases, quick, FLASH, least, CUDNN)


def _dropout(phase: str) -> Line:
    cases = _cases(phase, "bfloat16", (8192,), " dropout=0.125", widths=(128,), masks=("full()",))
    title = f"bf16 {phase} with dropout 0.125, {TOKENS:,} tokens, N 8192"
    return Line(f"{GROUP}_dropout_{phase}", title, cases, cases, FLASH, 1.1, CUDNN)


def _float32(phase: str) -> Line:
    tokens = TOKENS // 2
    cases = _cases(phase, "float32", (4096,), tokens=tokens)
    title = f"fp32 (IEEE) {phase}, {tokens:,} tokens, N 4096"
    return Line(f"{GROUP}_float32_{phase}", title, cases, cases[1:2], EFFICIENT, 1.0)


def _bias() -> Line:
    cases = [
        _cases("forward+backward", "bfloat16", (2048,), f" bias={axes}", masks=("full()",))
        for axes in ("B,Hq,M,N", "Hq,M,N")
    ]
    title = f"bf16 forward + backward, a bias that learns, {TOKENS:,} tokens, N 2048"
    return Line(f"{GROUP}_bias", title, (*cases[0], *cases[1]), cases[1][:1], EFFICIENT, 1.2)


LINES = (
    _lengths(FORWARD, 1.15),
    _lengths(BACKWARD, 1.1),
    *(_dropout(phase) for phase in (FORWARD, BACKWARD)),
    *(_float32(phase) for phase in (FORWARD, BACKWARD)),
    _bias(),
)
BY_NAME = {line.name: line for line in LINES}


def compile_ahead(console: Console, cases: Iterable[Case], device: torch.device) -> None:
    """Compile triton_any's kernels of these cases, many at once; what it refuses is left out."""
    searches = []
    for case in cases:
        halves = [replace(case, phase=FORWARD, grad=case.wants_grads)]
        halves += [replace(case, phase=BACKWARD)] if case.wants_grads else []
        for half in halves:
            try:
                searches.append(Search.of(half, BACKEND, device))
            except UnsupportedError:
                break  # it will say why when it is asked
    compile_searches(console, searches, {})


# ---- how it went ----


class Outcome(NamedTuple):
    """One case of a line; NaN for what is not known.

    ratio   the peer's time over triton_any's
    cudnn   cuDNN's
    tflops  TFLOP/s of triton_any
    error   triton_any's over the peer's
    """

    suite: str
    case: Case
    ratio: float
    cudnn: float
    tflops: float
    error: float

    @staticmethod
    def of(suite: str, case: Case, flops: int, medians_us: Mapping[str, float],
           errors: Mapping[str, Mapping[str, float]]) -> Outcome:  # fmt: skip
        """From medians, and rms of the error by the name of the output, of each contestant."""
        mine_us, against = medians_us.get(SUBJECT, math.nan), BY_NAME[suite].against
        ratio, cudnn = (medians_us.get(peer, math.nan) / mine_us for peer in (against, CUDNN))
        error = error_ratio(case, *(errors.get(one, {}) for one in (SUBJECT, against)))
        return Outcome(suite, case, ratio, cudnn, flops / mine_us / 1e6, error)


def outcome(result: Result) -> Outcome:
    """A result as a part of its line."""
    medians_us = {e.contestant: e.median_us for e in result.entries}
    errors = {e.contestant: {x.what: x.rms for x in e.errors} for e in result.entries}
    return Outcome.of(
        result.suite, result.case, result.case.flops(result.pairs), medians_us, errors
    )


def lines(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The table's lines, cells as in HEADS; a line without outcomes is left out."""
    found = []
    for line in LINES:
        mine = [o for o in outcomes if o.suite == line.name]
        if mine:
            columns = ([o.ratio for o in mine if column(o.case) == where] for where in COLUMNS)
            cells = [two(geometric_mean(ratios)) for ratios in columns]
            error = max((o.error for o in mine if not math.isnan(o.error)), default=math.nan)
            found.append([line.title, line.against, *cells, _all(line, mine),
                          two(geometric_mean([o.cudnn for o in mine])), _range(mine),
                          two(error)])  # fmt: skip
    return found


def _all(line: Line, outcomes: Sequence[Outcome]) -> str:
    """As in "1.21 (1.15; 3 of 24 below)"."""
    missed = sum(missing(o.ratio, line.least) for o in outcomes)
    below = f"; {missed} of {len(outcomes)} below" if missed else ""
    return f"{two(geometric_mean([o.ratio for o in outcomes]))} ({line.least}{below})"


def _range(outcomes: Iterable[Outcome]) -> str:
    """The least to the most of a line."""
    known = [o.tflops for o in outcomes if not math.isnan(o.tflops)]
    ends = dict.fromkeys(f"{end:.0f}" for end in (min(known), max(known))) if known else {}
    return " to ".join(ends) or NONE


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
        one, times = outcome(result), [result.of(name).median_us for name in names]
        mine_us = {e.contestant: e.median_us for e in result.entries}.get(SUBJECT, math.nan)
        cells = [NONE if math.isnan(t) else in_unit(t, "ms") for t in times]
        cells += [two(one.ratio), f"{line.least}"]
        cells += [NONE if math.isnan(mine_us) else rate_of(result, mine_us), two(one.error)]
        rounds = max((len(e.samples_us) for e in result.entries), default=0)
        style = "yellow" if missing(one.ratio, line.least) else None
        table.add_row(label, *cells, f"{rounds}", style=style)
    console.print(table)
    show_refusals(console, cases, results)


def summary(console: Console, results: Sequence[Result]) -> None:
    """Print the whole table, as README has it."""
    print_table(console, HEADS, lines([outcome(r) for r in results]), SAID)
