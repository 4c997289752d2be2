"""Verdicts for people: a table in the terminal, several targets side by side, Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .registry import GROUPS, checks
from .verdict import (
    CONVENTION,
    FAIL,
    NOT_APPLICABLE,
    PASS,
    REFUSED,
    Finding,
    Verdict,
    Verdicts,
    gravest,
    summary,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STYLES = {PASS: "green", FAIL: "bold red", CONVENTION: "yellow", REFUSED: "cyan"}
SHORT = {PASS: "pass", FAIL: "FAIL", CONVENTION: "conv.", REFUSED: "refused", NOT_APPLICABLE: "-"}
MOST_LETTERS = 170
NAMES, LABELS = 24, 10  # columns


def show(console: Console, result: Verdicts) -> None:
    """Print one target: its checks group by group, then the counts."""
    from rich.text import Text

    console.print(f"\n[bold]{result.target}[/bold]  {_about(result)}")
    refused = _refused_altogether(result)
    for word, why in refused.items():
        console.print(Text(f"{word}: not answered at all. {why}", style=STYLES[REFUSED]))
    rows = [row for row in result.rows if row.dtype not in refused]
    for group in dict.fromkeys(row.group for row in rows):
        console.print(f"\n[bold]{GROUPS[group]}[/bold]")
        table = _table(NAMES, LABELS)
        own, before = [row for row in rows if row.group == group], ""
        for name in dict.fromkeys(row.check for row in own):
            for number, (word, text) in enumerate(_lines([r for r in own if r.check == name])):
                label = SHORT[word] if word == NOT_APPLICABLE else word
                pale = "dim" if word in (PASS, NOT_APPLICABLE) else ""
                text, before = ("as above" if text == before and len(text) > 40 else text), text
                table.add_row(
                    "" if number else f"  {name}",
                    Text(label, style=STYLES.get(word, "dim")),
                    Text(text, style=pale),
                )
        console.print(table)
    style = "green" if result.ok else "red"
    console.print(Text(f"\n{result.target}: {summary(result.counts())}", style=style))


def _table(*widths: int) -> Table:
    """Columns of these widths, and one that takes the rest."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for width in widths:
        table.add_column(width=width, no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _about(result: Verdicts) -> str:
    return f"{result.style} signature, {result.device}, {' and '.join(result.dtypes)}"


def _refused_altogether(result: Verdicts) -> dict[str, str]:
    """The dtypes in which not one check was answered, and the one reason."""
    found = {}
    for word in result.dtypes:
        outcomes = {(r.word, r.finding.words) for r in result.rows if r.dtype == word}
        if (
            len(outcomes) == 1
            and next(iter(outcomes))[0] in (REFUSED, FAIL)
            and len(result.rows) > 2
        ):
            found[word] = next(iter(outcomes))[1]
    return found


def _lines(rows: Sequence[Verdict]) -> list[tuple[str, str]]:
    """(verdict, words) of one check: one line where all dtypes agree, else one for each verdict."""
    words = list(dict.fromkeys(row.word for row in rows))
    if len(words) > 1 and NOT_APPLICABLE in words:
        words.remove(NOT_APPLICABLE)
    lines = []
    for word in words:
        own = [row for row in rows if row.word == word]
        text = _text([row.finding for row in own])
        if len(own) < len(rows):
            text = f"{', '.join(row.dtype for row in own)}{': ' if text else ''}{text}"
        lines.append((word, clipped(text)))
    return lines


def _text(findings: Sequence[Finding]) -> str:
    """What some findings of one verdict say: passes with bounds say how near they came."""
    near = [f.error / f.bound for f in findings if f.error is not None and f.bound]
    if findings[0].verdict == PASS and near and len(near) == len(findings):
        return f"error at most {max(near):.2g} of its bound" if max(near) else "exact"
    return findings[0].words


def clipped(text: str) -> str:
    """The text, or its beginning with three dots."""
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 3].rstrip() + "..."


def matrix(console: Console, results: Sequence[Verdicts]) -> None:
    """Print several targets side by side: one word for each check, the gravest of its dtypes."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for result in results:
        name = f"{result.target}{_of_some(result)}".replace(":", ":\n")
        table.add_column(name, justify="left", overflow="fold")
    for name, words in _side_by_side(results):
        table.add_row(name, *(Text(SHORT[w], style=STYLES.get(w, "dim")) for w in words))
    console.print("\n[bold]side by side[/bold]: the gravest verdict of the dtypes it answers")
    console.print(table)


def _of_some(result: Verdicts) -> str:
    """ " (bfloat16)" where other dtypes were not answered at all."""
    left = [word for word in result.dtypes if word not in _refused_altogether(result)]
    return f" ({', '.join(left)})" if 0 < len(left) < len(result.dtypes) else ""


def _answered(result: Verdicts) -> list[Verdict]:
    """The rows of the dtypes that were answered; of all, where none was."""
    refused = _refused_altogether(result)
    return [r for r in result.rows if r.dtype not in refused] or result.rows


def _side_by_side(results: Sequence[Verdicts]) -> list[tuple[str, list[str]]]:
    found = []
    answered = [_answered(result) for result in results]
    for name in checks():
        words = [
            gravest(own).verdict if own else NOT_APPLICABLE
            for rows in answered
            for own in [[r.finding for r in rows if r.check == name]]
        ]
        if any(r.check == name for result in results for r in result.rows):
            found.append((name, words))
    return found


def markdown(results: Sequence[Verdicts]) -> str:
    """The same as Markdown, and below it the words of all that did not simply pass."""
    head = ["check", *(f"`{r.target}`{_of_some(r)}" for r in results)]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name, words in _side_by_side(results):
        lines.append(f"| {name} | {' | '.join(SHORT[w] for w in words)} |")
    for result in results:
        lines += ["", f"**`{result.target}`** ({_about(result)}): {summary(result.counts())}.", ""]
        refused = _refused_altogether(result)
        lines += [f"- {word}: not answered at all. {clipped(why)}" for word, why in refused.items()]
        rows = [r for r in result.rows if r.dtype not in refused]
        names: dict[tuple[str, str], list[str]] = {}  # of each thing that is said
        for name in dict.fromkeys(r.check for r in rows):
            for said in _lines([r for r in rows if r.check == name]):
                names.setdefault(said, []).append(name)
        lines += [
            f"- {', '.join(who)}: {word}. {text}"
            for (word, text), who in names.items()
            if word in (FAIL, CONVENTION, REFUSED)
        ]
    return "\n".join(lines)


def listing(console: Console) -> None:
    """Print all checks: what each asks, and which public report it guards against."""
    from rich.text import Text

    every = checks().values()
    for group, title in GROUPS.items():
        console.print(f"\n[bold]{group}[/bold]  {title}")
        table = _table(NAMES)
        for check in every:
            if check.group == group:
                table.add_row(f"  {check.name}", check.says)
                if check.guards:
                    table.add_row("", Text(check.guards, style="dim"))
        console.print(table)
