"""Memory against N: what was measured, what is modelled, and what a stored square would take."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..claims import size
from ..draw import Axis, Look, Series, chart, key
from ..evidence import Bench, Book, Other, Source
from ..modelled import at_length, extra_bytes
from ..page import Section, anchor, cell, figure, head, link, nothing, panel, raw, table, title_of
from ..words import NONE, count, shared
from .rounding import cells, keys, open_case

MINE, MOST_PANELS, OCTAVES = "nosquare", 6, 3
SQUARE = Look("one stored square, calculated", None, "line", False)
LINEAR = Look("linear in N, a guide", None, "dots", False)
MODEL = Look("nosquare, modelled", 0, "dash", False)
TITLE = "Memory against N"
Points = list[tuple[float, float]]
MISSING = (
    "No record holds a measured peak: `nosquare bench cpu --parts c` measures some. Sizes that are "
    "calculated are no peaks."
)
ABOUT = (
    "<p>Peak memory of one attention call beyond its inputs: results and workspace, measured in "
    "a process that has done nothing else (CPU) or by the allocator (CUDA). A stored square is one "
    "B x Hq x M x N array of the case's dtype, whole: a causal mask does not halve what is stored. "
    "A materialised softmax keeps one such array at least. None of this counts the weights, the "
    "key-value cache or anything else of a model: it says nothing of what fits.</p>"
)


def memory(book: Book) -> Section:
    """A panel for each family of cases with measured peaks, and a table of all peaks."""
    cases = [b for b in book.bench if any(e.peak_bytes is not None for e in b.entries.values())]
    tiles = [r for r in cells(book) if r.data["peak_bytes"] and " M1 " not in r.data["case"]]
    if not cases and not tiles:
        return Section("memory", TITLE, nothing(MISSING), "no record holds a measured peak")
    body = [ABOUT]
    for processor in dict.fromkeys(b.processor for b in cases):
        mine = [b for b in cases if b.processor == processor]
        body += [f"<h3>{escape(processor)}</h3>", _figure(mine), _table(mine)]
    body += [_tiles([r for r in tiles if r.source.machine == m])
             for m in dict.fromkeys(r.source.machine for r in tiles)]  # fmt: skip
    found = len(cases) + len(tiles)
    return Section("memory", TITLE, "".join(body), f"{count(found, 'case')} with measured peaks")


def _figure(cases: Sequence[Bench]) -> str:
    families: dict[str, list[Bench]] = {}
    for bench in cases:
        if bench.case.M == bench.case.N:
            families.setdefault(_family(bench), []).append(bench)
    # those with the most lengths first: they show how it grows
    chosen = sorted(families.items(), key=lambda item: -len({b.case.N for b in item[1]}))
    chosen = chosen[:MOST_PANELS]
    if not chosen:
        return ""
    names = dict.fromkeys(n for _, found in chosen for b in found for n in _peaks(b))
    order = sorted(names, key=lambda name: name != MINE)
    looks = {name: Look(f"{name}, measured", n, "") for n, name in enumerate(order)}
    panels = [
        panel(name, _panel(f"p-{anchor(found[0].source)}", name, found, looks))
        for name, found in chosen
    ]
    used = [b.source for _, found in chosen for b in found]
    caption = (
        "Both axes are logarithmic. Marks are measured; lines are calculated or modelled from the "
        "case, and the modelled line is the ledger of nosquare.cost."
    )
    return figure(key([*looks.values(), MODEL, SQUARE, LINEAR]), panels, caption, used)


def _tiles(found: Sequence[Other]) -> str:
    """Peaks of the experiment against N, in the largest tiles that all N have."""
    groups: dict[str, list[Other]] = {}
    for record in found:
        groups.setdefault(record.data["question"], []).append(record)
    panels, used = [], list[Source]()
    mine, kept = Look("nosquare, measured", 0), Look("scores and weights, calculated", None, "line")
    for question, rows in groups.items():
        lengths = {keys(r.data) for r in rows}
        sides = [r.data["tile_n"] for r in rows]
        side = max((s for s in sides if sides.count(s) == len(lengths)), default=0)
        rows = [r for r in rows if r.data["tile_n"] == side]
        if len(rows) < 2:
            continue
        points = [(float(keys(r.data)), float(r.data["peak_bytes"])) for r in rows]
        square = [(float(keys(r.data)), float(r.data["square_bytes"])) for r in rows]
        name = f"{question}, tiles of {side} x {side}"
        panels.append(panel(name, _plot(f"t-{anchor(rows[0].source)}", name, points, square, mine)))
        used += [r.source for r in rows]
    if not panels:
        return ""
    case = escape(open_case(found[0].data))
    caption = (
        f"The experiment's <code>{case}</code>, one size of tiles, a process for each. "
        "Axes are logarithmic."
    )
    return figure(key([mine, kept, LINEAR]), panels, caption, used)


def _plot(name: str, title: str, points: Points, square: Points, mine: Look) -> str:
    first, last = min(points), max(points)
    linear = [first, (last[0], first[1] * last[0] / first[0])]
    data = [Series(SQUARE, square), Series(LINEAR, linear), Series(mine, points)]
    values = [y for s in data for _, y in s.points]
    axes = (
        Axis("keys N (M = N)", lambda n: f"{n:,.0f}", ticks=sorted(x for x, _ in points)),
        Axis("bytes beyond inputs", size, ticks=_sizes(min(values), max(values), 4)),
    )
    told = ", ".join(f"{size(y)} at N={x:,.0f}" for x, y in points)
    return chart(name, title, f"Measured: {told}.", axes, data)


def _family(bench: Bench) -> str:
    c = bench.case
    return " ".join(w for w in str(c).split() if w not in (f"M{c.M}", f"N{c.N}", "B1"))


def _peaks(bench: Bench) -> dict[str, int]:
    """Contestant -> measured peak in bytes, of those whose answer was right."""
    return {
        e.name: e.peak_bytes
        for e in bench.entries.values()
        if e.peak_bytes is not None and e.checked
    }


def _panel(name: str, title: str, cases: Sequence[Bench], looks: dict[str, Look]) -> str:
    found = sorted(b.case.N for b in cases)
    first, last = found[0] >> OCTAVES, found[-1] << 1
    lengths = [n for n in (1 << k for k in range(40)) if first <= n <= last]
    case = cases[0].case
    square = [
        (float(n), float(cases[0].square_bytes * n * n // (case.M * case.N))) for n in lengths
    ]
    ours = [(float(n), float(extra_bytes(at_length(case, n)))) for n in lengths]
    start = square[0]
    linear = [start, (float(lengths[-1]), start[1] * lengths[-1] / lengths[0])]
    data = [Series(SQUARE, square), Series(LINEAR, linear), Series(MODEL, ours)]
    told = []
    for who, look in looks.items():
        points = [(float(b.case.N), float(p)) for b in cases if (p := _peaks(b).get(who))]
        data.append(Series(look, points))
        told += [f"{who} {size(y)} at N={x:,.0f}" for x, y in points]
    top, low = max(y for s in data for _, y in s.points), min(y for s in data for _, y in s.points)
    axes = (
        Axis("keys N (M = N)", lambda n: f"{n:,.0f}", ticks=[float(n) for n in lengths[::2]]),
        Axis("bytes beyond inputs", size, ticks=_sizes(low, top)),
    )
    about = f"Measured peaks: {'; '.join(told)}. One stored square: {size(square[-1][1])} at N="
    return chart(name, title, f"{about}{lengths[-1]:,}.", axes, data)


def _sizes(low: float, high: float, step: int = 16) -> list[float]:
    """Powers of `step` bytes: of 16, ticks read 1 MiB, 16 MiB, 256 MiB, 4 GiB."""
    powers = [float(step**n) for n in range(60) if step**n <= high * 2]
    return [p for p in powers if p >= low / 2]


def _table(cases: Sequence[Bench]) -> str:
    common, labels = shared(cases)
    names = sorted(dict.fromkeys(n for b in cases for n in _peaks(b)), key=lambda n: n != MINE)
    rows = []
    for label, bench in zip(labels, cases, strict=True):
        peaks = _peaks(bench)
        rows.append([
            f'<th scope="row" class="mono w">{escape(label)}</th>',
            *(cell(size(peaks[n]) if n in peaks else NONE, "n") for n in names),
            cell(size(extra_bytes(bench.case)), "n"),
            cell(size(bench.square_bytes), "n"),
            cell(size(bench.input_bytes), "n"),
            raw(link(bench.source)),
        ])  # fmt: skip
    top = head("case", *(f">{n}" for n in names), ">nosquare, modelled", ">one square, calculated",
               ">inputs, not counted", "record")  # fmt: skip
    return table(top, rows, title_of("Measured peaks beyond inputs", common, cases))
