"""Time and throughput: every case, its interval, and how near the roof of the device it comes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..draw import Axis, Look, Series, chart, forest, key
from ..evidence import Bench, Book, Entry
from ..noise import Ratio, digits, paired
from ..page import Section, anchor, cell, figure, head, link, nothing, panel, raw, table, title_of
from ..words import NONE, count, rate, rate_words, shared, suite_title, time
from .roofline import roof_share, roofline

MINE, TITLE = "nosquare", "Time and throughput"
ABOUT = (
    "<p>A ratio is the other's time over nosquare's, above 1 where nosquare is faster: the median "
    "over the rounds, in each of which all contestants were timed in turn. Beside it is the 95% "
    "interval of the sign test, which needs six rounds and assumes no distribution. Every answer "
    "was compared with the float64 oracle before it was timed. Rates count only visible pairs, "
    "and for decoding the bytes of k and v; the roof is the longer of arithmetic at the device's "
    "peak rate and compulsory bytes at its full bandwidth, where these are known.</p>"
)


def speed(book: Book) -> Section:
    """For each machine a roofline where it has one, then charts and a table for each suite."""
    timed = [b for b in book.bench if any(e.samples_us for e in b.entries.values())]
    if not timed:
        words = "No record of kind bench: run `nosquare bench cpu` or `nosquare bench cuda`."
        return Section("speed", TITLE, nothing(words), "no record")
    body = [ABOUT]
    for processor in dict.fromkeys(b.processor for b in timed):
        mine = [b for b in timed if b.processor == processor]
        body += [f"<h3>{escape(processor)}</h3>", roofline(mine)]
        for suite in dict.fromkeys((b.suite, b.source.machine) for b in mine):
            cases = [b for b in mine if (b.suite, b.source.machine) == suite]
            body += [_throughput(cases), _suite(cases)]
    machines = len({b.processor for b in timed})
    words = f"{count(len(timed), 'case')} on {count(machines, 'machine')}"
    return Section("speed", TITLE, "".join(body), words)


# ---- charts ----


def _throughput(cases: Sequence[Bench]) -> str:
    """Rate against N of one suite, a panel for each family of cases with more than one N."""
    families: dict[str, list[Bench]] = {}
    for bench in cases:
        c = bench.case
        if c.M in (1, c.N):
            families.setdefault(_family(bench), []).append(bench)
    families = {name: found for name, found in families.items() if len(_lengths(found)) > 1}
    if not families:
        return ""
    common, _ = shared([found[0] for found in families.values()])
    names = list(dict.fromkeys(e.name for b in cases for e in (_mine(b), *b.rivals) if e))
    looks = {name: Look.of(name, n) for n, name in enumerate(names)}
    panels = []
    for number, (name, found) in enumerate(families.items()):
        title = " ".join(w for w in name.split() if w not in common.split()) or name
        svg = _panel(f"n{number}-{anchor(found[0].source)}", name, found, looks)
        panels.append(panel(title, svg))
    title = escape(suite_title(cases[0]))
    caption = f"{title}: throughput of the median round against the number of keys N."
    used = [b.source for found in families.values() for b in found]
    return figure(key([*looks.values()]), panels, caption, used)


def _family(bench: Bench) -> str:
    """The case without its lengths: what is the same along a line."""
    c = bench.case
    words = [w for w in str(c).split() if w not in (f"M{c.M}", f"N{c.N}", "B1")]
    return " ".join(words)


def _lengths(cases: Sequence[Bench]) -> set[int]:
    return {b.case.N for b in cases}


def _panel(name: str, title: str, cases: Sequence[Bench], looks: dict[str, Look]) -> str:
    unit, scale = rate(cases[0], 1.0)[1], 1.0
    if max(rate(b, e.median_us)[0] for b in cases for e in b.entries.values()) >= 9995:
        unit, scale = unit.replace("G", "T", 1), 1000.0
    data, told = [], []
    for who, look in looks.items():
        points = []
        for bench in cases:
            entry = bench.entries.get(who)
            if entry is not None and entry.median_us is not None:
                points.append((float(bench.case.N), rate(bench, entry.median_us)[0] / scale))
        if points:
            data.append(Series(look, points))
            numbers = ", ".join(f"{y:,.0f} at N={x:,.0f}" for x, y in sorted(points))
            told.append(f"{who}: {numbers}")
    axes = (
        Axis("keys N", lambda n: f"{n:,.0f}", ticks=[float(n) for n in sorted(_lengths(cases))]),
        Axis(unit, lambda y: f"{y:,.0f}", log=False, low=0.0),
    )
    return chart(name, title, f"{unit}. {'; '.join(told)}.", axes, data)


# ---- tables ----


def _suite(cases: Sequence[Bench]) -> str:
    common, labels = shared(cases)
    rivals = list(dict.fromkeys(e.name for b in cases for e in b.rivals))
    ratios = [r for b in cases for e in b.rivals if (r := _ratio(b, e)) is not None]
    ends = [x for r in ratios for x in (r.low or r.middle, r.high or r.middle)]
    span = (min([*ends, 0.8]), max([*ends, 1.25]))
    rows = []
    for label, bench in zip(labels, cases, strict=True):
        rows += _rows(label, bench, rivals, span)
    several = len(rivals) > 1
    other = ("other", ">time") if several else (f">{rivals[0] if rivals else 'other'}",)
    roofed = any(roof_share(b, e) for b in cases for e in b.entries.values())
    rated = ">rate (of roof)" if roofed else ">rate"
    top = head("case", f">{MINE}", rated, *other, rated, ">ratio", ">95% interval",
               ">slower | faster", "record")  # fmt: skip
    return table(top, rows, title_of(suite_title(cases[0]), common, cases))


def _rows(
    label: str, bench: Bench, rivals: Sequence[str], span: tuple[float, float]
) -> list[list[str]]:
    """A row for each other contestant; the first has the case and nosquare's own numbers."""
    mine, count = _mine(bench), max(len(rivals), 1)
    rows: list[list[str]] = []
    for name in rivals or [""]:
        row: list[str] = []
        if not rows:
            row.append(f'<th scope="row" class="mono w" rowspan="{count}">{escape(label)}</th>')
            row += [cell(_time(mine), "n", count), cell(_rate(bench, mine), "n", count)]
        row += [cell(name)] if len(rivals) > 1 else []
        row += _against(bench, bench.entries.get(name), span)
        if not rows:
            row.append(raw(link(bench.source), rows=count))
        rows.append(row)
    return rows


def _against(bench: Bench, other: Entry | None, span: tuple[float, float]) -> list[str]:
    """Cells of one other contestant: time, rate, ratio, interval, picture."""
    ratio = None if other is None else _ratio(bench, other)
    cells = [cell(_time(other), "n"), cell(_rate(bench, other), "n")]
    if ratio is None:
        return [*cells, cell(NONE, "n"), cell(NONE, "n"), cell("", "forest")]
    cells.append(cell(f"{digits(ratio.middle)}", "n"))
    if ratio.low is None or ratio.high is None:
        return [*cells, cell(f"{ratio.rounds} rounds only", "n soft"), cell("", "forest")]
    cells.append(cell(f"{digits(ratio.low)} to {digits(ratio.high)}", "n"))
    return [*cells, raw(forest(ratio.low, ratio.middle, ratio.high, span), "forest")]


def _mine(bench: Bench) -> Entry | None:
    return bench.entries.get(MINE)


def _ratio(bench: Bench, other: Entry) -> Ratio | None:
    mine = _mine(bench)
    return None if mine is None else paired(other.samples_us, mine.samples_us)


def _time(entry: Entry | None) -> str:
    if entry is None:
        return NONE
    return "refused" if entry.refused else time(entry.median_us)


def _rate(bench: Bench, entry: Entry | None) -> str:
    if entry is None or entry.median_us is None:
        return NONE
    number, unit = rate(bench, entry.median_us)
    share = roof_share(bench, entry)
    return rate_words(number, unit) + ("" if share is None else f" ({share:.0%})")
