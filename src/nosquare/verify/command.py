"""`nosquare verify`: targets on the command line, tables and records out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import records
from ..errors import ArgumentError
from ..records import HEAD, NUMBER, WHOLE, WORDS, Maybe
from . import show
from .registry import chosen
from .run import Tick, verify
from .target import device_of, dtypes_of, subject_of
from .verdict import VERDICTS, Verdicts

if TYPE_CHECKING:
    from rich.console import Console

VERSION = 1
FINDING = {
    "check": WORDS,
    "group": WORDS,
    "dtype": WORDS,
    "verdict": WORDS,
    "words": WORDS,
    "error": Maybe(NUMBER),
    "bound": Maybe(NUMBER),
}
SCHEMA: dict[str, Any] = HEAD | {
    "target": WORDS,
    "style": WORDS,
    "device": WORDS,
    "dtypes": [WORDS],
    "counts": dict.fromkeys(VERDICTS, WHOLE),
    "checks": [FINDING],
}


class Output(NamedTuple):
    """What is printed and kept: json and markdown replace the tables; record appends to
    docs/records/verify.jsonl."""

    json: bool = False
    markdown: bool = False
    record: bool = True


TABLES = Output()


def verify_command(
    targets: Sequence[str],
    style: str | None = None,
    device: str = "cpu",
    dtypes: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    jobs: int = 1,
    output: Output = TABLES,
) -> int:
    """Run the checks on each target and print what they found.

    jobs     targets examined at once, each in a process of its own
    Returns 0 when nothing failed, else 1.
    Raises ArgumentError for a target, style, device, dtype or group that is not one, or no target.
    """
    from rich.console import Console

    if not targets:
        raise ArgumentError(
            "There is nothing to verify.", {}, "nosquare verify torch:default, or nosquare verify "
            "--list for the checks."
        )  # fmt: skip
    if jobs < 1:
        raise ArgumentError(
            "At least one target is examined at a time.", {"jobs": jobs}, "--jobs 1."
        )
    # what is wrong with any of them is said before minutes are spent on the others
    device_of(device)
    dtypes_of(dtypes)
    chosen(only)
    for target in targets:
        subject_of(target, style)
    console = Console(highlight=False)
    quiet = output.json or output.markdown

    def one(target: str, tick: Tick) -> Verdicts:
        return verify(target, style, device, dtypes, only, tick=tick)

    results: list[Verdicts] = []
    with _progress() as tick, ThreadPoolExecutor(jobs) as pool:
        ticks = [tick(target) for target in targets]
        for result in (map if jobs == 1 else pool.map)(one, targets, ticks):
            results.append(result)
            if not quiet:
                show.show(console, result)
    if output.json:
        print(json.dumps([result.as_json() for result in results], indent=1))
    elif output.markdown:
        print(show.markdown(results))
    elif len(results) > 1:
        show.matrix(console, results)
    if output.record:
        _record(console, results, device, quiet)
    return 0 if all(result.ok for result in results) else 1


def list_command() -> int:
    """Print what the checks are. Returns 0."""
    from rich.console import Console

    show.listing(Console(highlight=False))
    return 0


def _record(console: Console, results: Sequence[Verdicts], device: str, quiet: bool) -> None:
    around = records.surroundings(device)
    lines = [records.begin("verify", VERSION, around) | result.as_json() for result in results]
    path = records.append(records.folder(), "verify", lines, SCHEMA)
    if not quiet:
        console.print(f"Record: docs/records/{path.name}")


@contextmanager
def _progress() -> Iterator[Any]:
    """target -> its Tick, on a bar each that leaves nothing behind; on stderr, since stdout may be
    read by a program."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[target]}"), BarColumn(bar_width=20), MofNCompleteColumn(),
               TimeElapsedColumn(), TextColumn("[dim]{task.description}"))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def begin(target: str) -> Tick:
            task = bar.add_task("starting", target=target, total=None)

            def tick(done: int, total: int, words: str) -> None:
                bar.update(task, completed=done, total=total, description=words)

            return tick

        yield begin
