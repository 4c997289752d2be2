"""Results as a table in the terminal, with a verdict on what was aimed at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .timing import Result

if TYPE_CHECKING:
    from rich.console import Console

MIB = 2**20
NONE = "-"


@dataclass(frozen=True)
class Aim:
    """What a suite is held to.

    least_ratio    torch's time over nosquare's, at least; None: no aim
    most_extra_us  nosquare's time less torch's, at most; None: no aim
    """

    least_ratio: float | None = None
    most_extra_us: float | None = None

    def words(self) -> str:
        """The aim in words; "" where there is none."""
        if self.least_ratio is not None:
            return f"aim: ratio >= {self.least_ratio}"
        if self.most_extra_us is not None:
            return f"aim: at most {self.most_extra_us:g} us more than torch"
        return ""

    def missed(self, result: Result) -> bool:
        """Whether a case misses it: nosquare was not timed, or torch was and the numbers say so."""
        if self.least_ratio is None and self.most_extra_us is None:
            return False
        mine, theirs = result.of("nosquare").median_us, result.of("torch").median_us
        if math.isnan(mine):
            return True
        if math.isnan(theirs):
            return False
        if self.least_ratio is not None and theirs / mine < self.least_ratio:
            return True
        return self.most_extra_us is not None and mine - theirs > self.most_extra_us


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of the ratios that are numbers; NaN when there are none."""
    known = [r for r in ratios if not math.isnan(r)]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else math.nan


def show(console: Console, results: Sequence[Result], title: str, aim: Aim) -> None:
    """Print the table of one suite, the geometric mean, misses of the aim, who was not timed.

    What all cases share stands above the table, what differs in it; pairs are torch's / nosquare's.
    """
    from rich.table import Table

    shared, cases = labels(results)
    console.print(f"\n[bold]{title}[/bold]" + (f"\n{shared}" if shared else ""))
    table = Table()
    table.add_column("case", min_width=9)
    memory = any(e.peak_bytes is not None for r in results for e in r.entries)
    extra = aim.most_extra_us is not None
    rate = "GB/s" if all(r.case.phase == "decode" for r in results) else "GF/s"
    unit = "us" if any(e.median_us < 1000 for r in results for e in r.entries) else "ms"
    names = [f"torch {unit}", f"nosquare {unit}", f"extra {unit}" if extra else "ratio"]
    names += [rate, "error"]
    for name in [*names, *(["MiB"] if memory else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for label, result in zip(cases, results, strict=True):
        style = "yellow" if aim.missed(result) else None
        table.add_row(label, *_cells(result, memory, extra, unit), style=style)
    mean = math.nan if extra else geometric_mean([r.ratio() for r in results])
    if not math.isnan(mean):
        table.add_section()
        table.add_row("geometric mean", "", "", f"{mean:.2f}")
    console.print(table)
    for who in ("torch", "nosquare"):
        kernels = sorted({result.of(who).ran for result in results} - {""})
        if kernels:
            console.print(f"{who} ran: {'; '.join(kernels)}", markup=False)
    missed = [r for r in results if aim.missed(r)]
    if aim.words():
        verdict = f"[yellow]{len(missed)} of {len(results)} miss[/yellow]" if missed else "met"
        console.print(f"{aim.words()}: {verdict}")
    if extra:
        least = [f"{_least_us(r, 'nosquare') - _least_us(r, 'torch'):.1f}" for r in results]
        console.print(
            f"by the least sample of each, which neighbours disturb least: {', '.join(least)} us"
        )
    for result in results:
        for entry in result.entries:
            if entry.refused:
                console.print(f"not timed: {entry.contestant}, {result.case}: {entry.refused}",
                              markup=False)  # fmt: skip


def labels(results: Sequence[Result]) -> tuple[str, list[str]]:
    """The words that all cases share, and what is left of each; a single case is left whole."""
    words = [str(r.case).split() for r in results]
    if len(words) < 2:
        return "", [" ".join(w) for w in words]
    shared = [w for w in words[0] if all(w in other for other in words)]
    rest = [" ".join(w for w in case if w not in shared) for case in words]
    return " ".join(shared), [label or "as it is" for label in rest]


def _cells(result: Result, memory: bool, extra: bool, unit: str) -> list[str]:
    torch, mine = result.of("torch"), result.of("nosquare")
    gap = _time(mine.median_us - torch.median_us, unit) if extra else two(result.ratio())
    cells = [_time(torch.median_us, unit), _time(mine.median_us, unit), gap]
    cells.append(" / ".join(_rate(result, e.median_us) for e in (torch, mine)))
    cells.append(two(error_ratio(result)))
    if memory:
        sizes = [NONE if e.peak_bytes is None else f"{e.peak_bytes / MIB:,.0f}"
                 for e in (torch, mine)]  # fmt: skip
        cells.append(" / ".join(sizes))
    return cells


def error_ratio(result: Result) -> float:
    """nosquare's error over torch's, the largest of all outputs; NaN where one is unknown or 0.

    Under dropout the two are not compared: their masks differ, and so do their answers.
    """
    theirs = {c.what: c.error for c in result.of("torch").checks}
    mine = {c.what: c.error for c in result.of("nosquare").checks}
    known = [mine[w] / theirs[w] for w in mine if theirs.get(w)]
    return max(known) if known and not result.case.dropout else math.nan


def _least_us(result: Result, contestant: str) -> float:
    return min(result.of(contestant).samples_us, default=math.nan)


def _time(time_us: float, unit: str) -> str:
    if math.isnan(time_us):
        return NONE
    number = time_us if unit == "us" else time_us / 1000
    return f"{number:,.1f}" if number < 1000 else f"{number:,.0f}"


def two(number: float) -> str:
    """With two digits after the point; NONE for NaN."""
    return NONE if math.isnan(number) else f"{number:.2f}"


def _rate(result: Result, time_us: float) -> str:
    """GF/s; for decoding, GB/s of k and v."""
    if math.isnan(time_us):
        return NONE
    if result.case.phase == "decode":
        return f"{result.case.cache_bytes / time_us / 1000:.1f}"
    return f"{result.case.flops(result.pairs) / time_us / 1000:.1f}"
