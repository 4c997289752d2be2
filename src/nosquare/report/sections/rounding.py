"""Error against tile size and N, with memory, traffic and time: the experiment's records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

from ..claims import size
from ..draw import Axis, Look, Series, chart, key
from ..evidence import Book, Other
from ..page import Section, figure, nothing, panel
from ..words import count, time

TITLE = "Error against tile size and N"
MISSING = (
    "No record of kind experiment: `nosquare bench experiment` holds q, k, v, masks and precision "
    "fixed and varies tile sizes and N."
)
ABOUT = (
    "<p>Queries, keys, values, masks and precision are fixed; only the size of the tiles and N "
    "vary. Error, memory, traffic and time are four questions, and are recorded separately. The "
    "error is that of the worst array, o or a gradient: the root of its mean square, over that of "
    "the float64 result. Under dropout the reference has the same mask.</p>"
)


class Quantity(NamedTuple):
    """One of the four questions: value of a record, None where it has none; words of a tick."""

    title: str
    value: Callable[[Any], float | None]
    words: Callable[[float], str]
    base: int


QUANTITIES = (
    Quantity("error, measured", lambda row: worst(row), lambda y: f"{y:.0e}", 10),
    Quantity("peak memory beyond inputs, measured", lambda row: row["peak_bytes"], size, 2),
    Quantity(
        "bytes to and from fast memory, modelled", lambda row: row["model"]["l2_bytes"], size, 2
    ),
    Quantity("time, measured", lambda row: row["median_us"], time, 10),
)


def worst(row: Any) -> float:
    """Relative error of the worst array: rms of the error over rms of the truth."""
    return max(e["rms"] / e["truth_rms"] if e["truth_rms"] else 0.0 for e in row["errors"])


def rounding(book: Book) -> Section:
    """A figure for each question of each machine's newest experiment."""
    newest = cells(book)
    if not newest:
        return Section("rounding", TITLE, nothing(MISSING), "no record of kind experiment")
    groups: dict[tuple[str, str], list[Other]] = {}
    for record in newest:
        dtype = record.data["case"].split()[1]
        where = (record.source.machine, f"{record.data['question']}, {dtype}")
        groups.setdefault(where, []).append(record)
    body = [ABOUT]
    for number, ((machine, question), found) in enumerate(groups.items()):
        place = f'<span class="soft">{escape(machine)}</span>'
        body.append(f"<h3>{escape(question)} {place}</h3>")
        body.append(_figure(f"x{number}", found))
    return Section(
        "rounding", TITLE, "".join(body), f"{len(newest)} cells of {count(len(groups), 'table')}"
    )


def cells(book: Book) -> list[Other]:
    """The newest record of each question, case and size of tiles on each machine."""
    newest: dict[tuple[str, str, str, int, int], Other] = {}
    for record in book.of_kind("experiment"):
        row = record.data
        kept = (record.source.machine, row["question"], row["case"], row["tile_m"], row["tile_n"])
        newest[kept] = record
    return list(newest.values())


def _figure(name: str, found: Sequence[Other]) -> str:
    lengths = sorted({keys(r.data) for r in found})
    looks = {n: Look(f"N = {n:,}", number) for number, n in enumerate(lengths)}
    panels = []
    for number, what in enumerate(QUANTITIES):
        series = [Series(looks[n], _points(what, [r for r in found if keys(r.data) == n]))
                  for n in lengths]  # fmt: skip
        series = [s for s in series if s.points]
        if series:
            panels.append(panel(what.title, _chart(f"{name}-{number}", what, series)))
    case = found[0].data["case"].replace(f"N{keys(found[0].data)}", "N...")
    caption = (
        f"<code>{escape(case)}</code>, in square tiles, or of one query. Axes are logarithmic."
    )
    return figure(key([*looks.values()]), panels, caption, [r.source for r in found])


def _points(what: Quantity, found: Sequence[Other]) -> list[tuple[float, float]]:
    pairs = [(float(r.data["tile_n"]), what.value(r.data)) for r in found]
    return [(x, float(y)) for x, y in pairs if y]


def _chart(name: str, what: Quantity, series: Sequence[Series]) -> str:
    sides = sorted({x for s in series for x, _ in s.points})
    axes = (
        Axis("keys in a tile", lambda n: f"{n:,.0f}", ticks=sides),
        Axis("", what.words, base=what.base),
    )
    told = "; ".join(
        f"{s.look.name}: " + ", ".join(f"{what.words(y)} at {x:,.0f}" for x, y in s.points)
        for s in series
    )
    return chart(name, what.title, f"{told}.", axes, series)


def open_case(row: Any) -> str:
    """The case of a record with its lengths left open."""
    n = keys(row)
    names = {f"N{n}": "N", f"M{n}": "M=N"}
    return " ".join(names.get(word, word) for word in row["case"].split())


def keys(row: Any) -> int:
    """N of a record's case."""
    return int(next(w for w in row["case"].split() if w[0] == "N")[1:])
