"""`nosquare report`: one page of evidence, and what it comes to in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from .. import records as all_records
from ..errors import ArgumentError
from .claims import Claim, read_file
from .evidence import Book, places
from .grade import ESTABLISHED, NARROWER, Grade, grade, standard
from .page import Section, page
from .readme import BLOCK, faults, filled, unrecorded
from .sections.conformance import conformance
from .sections.memory import memory
from .sections.receipts import receipts
from .sections.rounding import rounding
from .sections.speed import speed
from .sections.surroundings import environment, records
from .sections.traffic import traffic
from .sections.verdicts import about, by_machine, verdicts
from .words import count

if TYPE_CHECKING:
    from rich.console import Console

SECTIONS = (memory, speed, traffic, rounding, conformance, receipts, environment, records)
STYLES = {ESTABLISHED: "green", NARROWER: "yellow"}
TITLE = "Evidence for exact attention without the square"


def report(
    out: Path,
    folder: Path | None = None,
    names: str = "",
    claim: Sequence[str] = (),
    claims: Path | None = None,
) -> int:
    """Write the page and print the summary.

    folder  of the records; None: docs/records
    names   of files in it, joined by commas; "": all of them
    claim   lines to be graded; with claims, a file of them. None at all: the standard claims

    Returns 0. Raises ArgumentError for bad records and for what is no claim.
    """
    from rich.console import Console

    console = Console(highlight=False)
    asked = [Claim.parse(line) for line in claim] + (read_file(claims) if claims else [])
    if claims and not asked:
        raise ArgumentError("This file holds no claim.", {"file": claims}, "a claim a line.")
    book = _book(folder, names)
    grades, sections = build(book, asked, console)
    _write(out, _page(book, sections))
    _show(console, book, (grades, sections), at_length=bool(asked))
    console.print(f"\nPage: {out}", markup=False, soft_wrap=True)
    return 0


def readme(check: bool, folder: Path | None = None, files: Sequence[Path] = ()) -> int:
    """Make the tables of README and docs anew; or only check them, and the numbers of README.

    files  None given: README.md and docs/*.md of the working tree

    Returns 0, or 1 where a check finds a difference. Raises ArgumentError for records that are not
    there, markers that are none, and files that cannot be read.
    """
    where = folder or all_records.folder()
    root = where.resolve().parents[1]
    chosen = files or [
        p for p in (root / "README.md", *sorted(root.glob("docs/*.md"))) if p.exists()
    ]
    if not chosen:
        raise ArgumentError(
            "There is no README.md above these records.",
            {"folder": where},
            "--records docs/records.",
        )
    wrong: list[str] = []
    for path in chosen:
        text = _text(path)
        tables = len(BLOCK.findall(text))
        if check:
            found = faults(path.name, text, where)
            found += unrecorded(path.name, text) if path.name == "README.md" else []
            wrong += found
            state = f"{count(len(found), 'difference')}" if found else "as the records give"
        else:
            new = filled(text, where)
            state = "as it was" if new == text else "made anew"
            if new != text:
                _write(path, new)
        if tables or state not in ("as it was", "as the records give"):
            print(f"{path.name}: {count(tables, 'table')}, {state}")
    for line in wrong:
        print(f"  {line}")
    if wrong:
        print("Try: nosquare report --readme, which makes the tables anew.")
    return 1 if wrong else 0


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ArgumentError(
            "This document cannot be read.", {"file": path, "because": why}, "README.md."
        ) from None


def build(
    book: Book, asked: Sequence[Claim] = (), console: Console | None = None
) -> tuple[list[Grade], list[Section]]:
    """The grades and all sections, in the order of the page."""
    with _progress(console, len(SECTIONS) + 1) as step:
        step("claims")
        grades = [grade(one, book) for one in asked or standard(book)]
        sections = [verdicts(book, grades)]
        for make in SECTIONS:
            step(make.__name__)
            sections.append(make(book))
    return grades, sections


def _book(folder: Path | None, names: str) -> Book:
    wanted = [name.strip().removesuffix(".jsonl") for name in names.split(",") if name.strip()]
    return Book.read(folder or all_records.folder(), wanted)


def _page(book: Book, sections: Sequence[Section]) -> str:
    dates = sorted(r.source.utc[:10] for r in book.used)
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    machines = dict.fromkeys(r.source.machine for r in book.used)
    top = (
        f"<p>{len(book.used)} records, {days}. {escape('; '.join(machines))}.</p>"
        '<p class="soft small">Every number names the record that it is from, as file:line. '
        "Only contestants of one record are compared: they took turns, on one machine, on one "
        "case. What is calculated or modelled says so.</p>"
    )
    foot = (
        '<p class="small soft">Made by <code>nosquare report</code>. This file loads nothing.</p>'
    )
    return page(TITLE, top, sections, foot)


def _write(out: Path, text: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, "utf-8")
    except OSError as error:
        raise ArgumentError(
            "The report cannot be written there.",
            {"file": out, "because": error.strerror},
            "--out report.html.",
        ) from None


def _show(
    console: Console, book: Book, graded: tuple[Sequence[Grade], Sequence[Section]], at_length: bool
) -> None:
    """The claims, then one line for each section."""
    from rich.table import Table

    grades, sections = graded
    used = places(r.source for r in book.used)
    console.print(f"[bold]{len(book.used)} records[/bold]: {used}")
    _show_claims(console, book, grades, at_length)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for section in sections:
        table.add_row(section.title, _plain(section.words))
    console.print()
    console.print(table)


def _show_claims(console: Console, book: Book, grades: Sequence[Grade], at_length: bool) -> None:
    """Verdict and reason; what is missing and the records only of claims that were asked about."""
    from rich.table import Table

    for machine, found in by_machine(grades).items():
        console.print(f"\n[bold]On {_plain(machine or 'every machine')}[/bold]")
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for one in found:
            lines = [_plain(f"{one.claim.what}: {about(one.claim, book)}")]
            more = [one.because, f"Instead: {one.instead}" if one.instead else ""]
            if at_length:
                more += [f"Missing: {'; '.join(one.missing)}"] if one.missing else []
                more += [f"Records: {places(one.records)}"] if one.records else []
            lines += [f"[dim]{_plain(line)}[/dim]" for line in more if line]
            style = STYLES.get(one.verdict, "bold")
            table.add_row(f"[{style}]{one.verdict}[/]", "\n".join(lines))
        console.print(table)


def _plain(words: str) -> str:
    """Brackets that rich would read as markup are text."""
    return words.replace("[", r"\[")


@contextmanager
def _progress(console: Console | None, steps: int) -> Iterator[Callable[[str], None]]:
    """A bar that leaves nothing behind; without a console, nothing."""
    if console is None:
        yield lambda words: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"))
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=steps)

        def step(words: str) -> None:
            bar.update(task, description=words)
            bar.advance(task)

        yield step
