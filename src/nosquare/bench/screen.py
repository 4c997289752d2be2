"""What a benchmark shows while it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .timing import Tick

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress(console: Console, cases: int) -> Iterator[tuple[Tick, Tick]]:
    """(say what happens within a case, begin the next), on a bar that leaves nothing behind."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), BarColumn(bar_width=20), TimeElapsedColumn(),
               TextColumn("{task.description} [dim]{task.fields[words]}"))  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=cases, words="")
        begun = [0]

        def step(line: str) -> None:
            bar.update(task, description=line, completed=begun[0])
            begun[0] += 1

        yield lambda words: bar.update(task, words=words), step


def warn_if_busy(console: Console) -> None:
    """Say so when the processor has not been idle: times are then worth less."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.5:
        console.print(
            f"[yellow]The load of the last minute is {load:.1f}. If other programs still use the "
            "processor, times will be longer and less certain.[/yellow]"
        )
