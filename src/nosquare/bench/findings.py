"""The experiment's tables: what varies with the size of the tiles, and with N, and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .words import MIB, NONE

if TYPE_CHECKING:
    from rich.console import Console

Row = Mapping[str, Any]


def introduce(console: Console, around: Row, words: Mapping[str, str]) -> None:
    """Say on what it runs, and what the columns are."""
    machine, software = around["machine"], around["software"]
    card = machine["gpu"]
    name = card["name"] if card else f"{machine['cpu']}, threads: {machine['threads']}"
    console.print(
        f"{name}, torch {software['torch']}. Backend torch_any; q, k, v, mask and precision fixed; "
        "tiles and N vary.\nErrors: over the rms of the float64 result, worst array. MiB: peak "
        "above the inputs. moved: MiB between fast memory and cache, model. Times: "
        f"{words['clock']}, caches {words['caches'].partition(':')[0]}.",
        markup=False,
    )


def show(console: Console, question: str, rows: Sequence[Row]) -> None:
    """Print the table of one question, and what it comes to."""
    from rich import box
    from rich.table import Table

    shared, sizes = _sizes(rows)
    console.print(f"\n[bold]{question}[/bold]\n{shared}")
    learns = any(e["what"] != "o" for e in rows[0]["errors"])
    counted = any(row["measured"] for row in rows)
    names = ["N", "tiles", "o rms", "o max"]
    names += ["grad\nrms", "grad\nmax"] if learns else []
    names += ["MiB", "moved", *(["counted"] if counted else []), "ms"]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, pad_edge=False)
    for column in names:
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for size, row in zip(sizes, rows, strict=True):
        if last not in (None, size):
            table.add_section()
        table.add_row(NONE if size is None else f"{size}" if size != last else "",
                      *_cells(row, learns, counted))  # fmt: skip
        last = size
    console.print(table)
    for line in conclusions(sizes, rows):
        console.print(line, markup=False)


def _cells(row: Row, learns: bool, counted: bool) -> list[str]:
    m, n = row["tile_m"], row["tile_n"]
    cells = [f"{m}" if m == n else f"{m}x{n}"]
    cells += [f"{error(row, gradients, part):.1e}"
              for gradients in ([False, True] if learns else [False])
              for part in ("rms", "most")]  # fmt: skip
    cells += [_mib(row["peak_bytes"]), _mib(row["model"]["l2_bytes"])]
    if counted:
        cells.append(_mib(row["measured"]["l2_bytes"] if row["measured"] else None))
    time_ms = row["median_us"] / 1000
    return [*cells, f"{time_ms:,.{2 if time_ms < 100 else 0}f}"]


def error(row: Row, gradients: bool, part: str) -> float:
    """The error of o, or the worst of the gradients', over the rms of the truth.

    part  "rms" or "most", the largest of all elements
    """
    found = [e for e in row["errors"] if (e["what"] != "o") == gradients]
    return max(e[part] / e["truth_rms"] if e["truth_rms"] else 0.0 for e in found)


def conclusions(sizes: Sequence[int], rows: Sequence[Row]) -> list[str]:
    """What the table comes to: from the smallest tiles to the largest at the largest N, and from
    the smallest N to the largest at the smallest tiles."""
    learns = any(e["what"] != "o" for e in rows[0]["errors"])
    top, least = max(sizes), min(sizes)
    at_top = [row for size, row in zip(sizes, rows, strict=True) if size == top]
    first = [row for size, row in zip(sizes, rows, strict=True) if size == least]
    fastest = min(at_top, key=lambda row: row["median_us"])
    lines = [
        f"N = {top}, tiles {_tile(at_top[0])} to {_tile(at_top[-1])}: "
        f"{_changes(at_top[0], at_top[-1], learns)}; fastest {_tile(fastest)}",
    ]
    if top != least:
        lines.append(f"tiles {_tile(first[0])}, N = {least} to {top}: "
                     f"{_changes(first[0], at_top[0], learns)}")  # fmt: skip
    square = at_top[0]["square_bytes"]
    if square:
        lines.append(f"scores and probabilities at N = {top}, were they kept: {_mib(square)} MiB")
    return lines


def _changes(a: Row, b: Row, learns: bool) -> str:
    """How error, memory, traffic and time change from one row to another."""
    pairs = {
        "error": (error(a, learns, "rms"), error(b, learns, "rms")),
        "memory": (a["peak_bytes"], b["peak_bytes"]),
        "moved": (a["model"]["l2_bytes"], b["model"]["l2_bytes"]),
        "time": (a["median_us"], b["median_us"]),
    }
    return ", ".join(f"{name} x{y / x:.2g}" for name, (x, y) in pairs.items() if x and y)


def _tile(row: Row) -> str:
    return f"{row['tile_m']}x{row['tile_n']}"


def _sizes(rows: Sequence[Row]) -> tuple[str, list[int]]:
    """The words that all cases share, and N of each."""
    words = [row["case"].split() for row in rows]
    shared = [w for w in words[0] if all(w in other for other in words)]
    return " ".join(shared), [int(next(w for w in ws if w[0] == "N")[1:]) for ws in words]


def _mib(size: int | None) -> str:
    return NONE if size is None else f"{size / MIB:,.{1 if size < 1000 * MIB else 0}f}"
