"""The page: small pieces of HTML, and the whole of them in one file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from .evidence import Bench, Other, Source, runs, when_and_where


@dataclass(frozen=True)
class Section:
    """One part of a report. body: HTML. words: what it comes to, in one line for a terminal."""

    name: str
    title: str
    body: str
    words: str


def anchor(source: Source) -> str:
    """The id of a record's row in the list of records."""
    return "r-" + re.sub(
        r"[^A-Za-z0-9]+", "-", f"{source.file.removesuffix('.jsonl')}-{source.line}"
    )


def link(source: Source) -> str:
    """A link to that row, short enough for a table: "cpu:41"."""
    words = f"{source.file.removesuffix('.jsonl')}:{source.line}"
    return f'<a href="#{anchor(source)}">{escape(words)}</a>'


def links(sources: Iterable[Source]) -> str:
    """Links to some records, neighbours joined: "cpu:41-43, cpu:47"."""
    words = []
    for first, last in runs(sources):
        more = "" if last == first.line else f"-{last}"
        words.append(link(first).replace("</a>", f"{more}</a>"))
    return ", ".join(words)


def origin(sources: Iterable[Source]) -> str:
    """Links to records, their dates and machines, each said once."""
    every = sorted(set(sources))
    return f"{links(every)} ({escape(when_and_where(every))})"


def cell(words: object, style: str = "", rows: int = 1) -> str:
    """A cell of text. style: classes; "n" is a number's. rows: how many it spans."""
    return raw(escape(str(words)), style, rows)


def raw(html: str, style: str = "", rows: int = 1) -> str:
    """A cell of HTML."""
    kind = f' class="{style}"' if style else ""
    span = f' rowspan="{rows}"' if rows > 1 else ""
    return f"<td{kind}{span}>{html}</td>"


def head(*names: str) -> str:
    """A head row; a name that begins with > stands over numbers."""
    cells = [
        f'<th scope="col" class="n">{escape(name[1:])}</th>'
        if name.startswith(">")
        else f'<th scope="col">{escape(name)}</th>'
        for name in names
    ]
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def table(top: str, rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table in a box of its own, which scrolls where the page is narrow."""
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    title = f'<caption><div class="stay">{caption}</div></caption>' if caption else ""
    box = '<div class="scroll" tabindex="0" role="group" aria-label="table">'
    return f"{box}<table>{title}{top}<tbody>{body}</tbody></table></div>"


def fold(title: str, body: str) -> str:
    """Something long under its title, open when asked for, and in print."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def title_of(words: str, common: str, records: Iterable[Bench | Other]) -> str:
    """A table's caption: what it is, the words that all its cases share, where it is from."""
    lines = [f"<b>{escape(words)}</b>"]
    lines += [f'<span class="mono">{escape(common)}</span>'] if common else []
    lines.append(f'<span class="soft">{origin([r.source for r in records])}</span>')
    return "<br>".join(lines)


def panel(title: str, svg: str) -> str:
    """One chart of a figure, under its title."""
    return f'<div class="panel"><b>{escape(title)}</b>{svg}</div>'


def figure(legend: str, panels: Sequence[str], caption: str, sources: Sequence[Source]) -> str:
    """Charts with one legend; the caption ends with the records that they show."""
    four = " four" if len(panels) == 4 else ""
    return (
        f'<figure>{legend}<div class="panels{four}">{"".join(panels)}</div>'
        f"<figcaption>{caption} From {origin(sources)}.</figcaption></figure>"
    )


def nothing(words: str) -> str:
    """In place of a figure: what is missing."""
    return f'<p class="none">{escape(words)}</p>'


def page(title: str, top: str, sections: Sequence[Section], foot: str) -> str:
    """The whole file."""
    style = resources.files(__package__).joinpath("style.css").read_text("utf-8")
    items = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections)
    body = "\n".join(
        f'<section id="{s.name}"><h2>{escape(s.title)}</h2>{s.body}</section>' for s in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{style}</style></head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1>{top}<nav aria-label="Sections"><ul>{items}</ul></nav>'
        f"</header>\n<main>\n{body}\n</main>\n<footer>{foot}</footer>\n</body></html>\n"
    )
