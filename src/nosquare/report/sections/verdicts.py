"""The claims, each with its verdict, its reason, and the records it rests on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from ..claims import Claim
from ..evidence import Book
from ..grade import ESTABLISHED, NARROWER, VERDICTS, Grade
from ..page import Section, links
from ..words import listed, suite_title

_RING = '<circle cx="8" cy="8" r="6.5" fill="none" stroke="currentColor" stroke-width="2"/>'
_HALF = '<path d="M8,1.5a6.5,6.5 0 0,0 0,13z" fill="currentColor"/>'
_DISC = '<circle cx="8" cy="8" r="7.5" fill="currentColor"/>'
ABOUT = (
    "<p>Each claim is graded by what the records can carry. <b>Established</b>: every recorded "
    "case that it is about says so, and it goes no further than those cases and machines. "
    "<b>Narrower</b>: something smaller is established instead. <b>Not established</b>: the "
    "records do not show it, or show the opposite.</p>"
)


def verdicts(book: Book, grades: Sequence[Grade]) -> Section:
    """All claims, machine by machine, in the order given."""
    counts = {v: sum(g.verdict == v for g in grades) for v in VERDICTS}
    items = "".join(f"<li><b>{n}</b> {word}</li>" for word, n in counts.items())
    body = ABOUT + f'<ul class="sum">{items}</ul>'
    for machine, found in by_machine(grades).items():
        body += f"<h3>On {escape(machine or 'every machine')}</h3>"
        body += "".join(_claim(grade, book) for grade in found)
    words = ", ".join(f"{n} {word}" for word, n in counts.items())
    return Section("claims", "Claims", body, words)


def by_machine(grades: Sequence[Grade]) -> dict[str, list[Grade]]:
    """Grades by the machine that their claims name; "" for none."""
    found: dict[str, list[Grade]] = {}
    for one in grades:
        found.setdefault(one.claim.machine, []).append(one)
    return found


def about(claim: Claim, book: Book) -> str:
    """What the claim is about, with a suite called by what its cases have in common."""
    titles = {b.suite: suite_title(b).partition(" (")[0] for b in book.bench}

    def title(found: re.Match[str]) -> str:
        return titles.get(found[1], f"suite {found[1]}")

    return re.sub(r"(?:every phase )?suite=(\w+)", title, claim.about)


def _claim(grade: Grade, book: Book) -> str:
    kind, shape = {
        ESTABLISHED: ("yes", _DISC),
        NARROWER: ("part", _RING + _HALF),
    }.get(grade.verdict, ("no", _RING))
    mark = f'<svg viewBox="0 0 16 16" aria-hidden="true">{shape}</svg>'
    rest = f' <span class="soft">{escape(about(grade.claim, book))}</span>'
    records = f' <span class="small soft">[{links(grade.records)}]</span>' if grade.records else ""
    parts = [f"<h4>{escape(grade.claim.what)}{rest}</h4>"]
    parts.append(f"<p>{escape(grade.because)}{records}</p>")
    if grade.instead:
        words = escape(grade.instead).removesuffix(".")
        parts.append(f'<p><span class="lead">Established instead:</span> {words}.</p>')
    if grade.missing:
        words = escape(listed(grade.missing))
        parts.append(f'<p><span class="lead">Missing:</span> {words}.</p>')
    return (
        f'<article class="claim"><div class="verdict {kind}">{mark}{grade.verdict}</div>'
        f"<div>{''.join(parts)}</div></article>"
    )
