"""Modelled against measured traffic: what the hardware counted beside what was expected."""

from __future__ import annotations

from ..claims import size
from ..evidence import Bench, Book, Entry
from ..noise import digits
from ..page import Section, cell, head, link, nothing, raw, table
from ..rules import moved_bytes
from ..words import NONE, count

TITLE = "Modelled and measured traffic"
MISSING = (
    "No record holds measured traffic. It takes counters of the hardware: `nosquare bench cuda "
    "--traffic` with Nsight Compute (ncu) on the machine. A model of the traffic, alone, is a plan "
    "and not a measurement."
)


def traffic(book: Book) -> Section:
    """A row for each contestant whose traffic was counted."""
    rows = [
        _row(bench, entry)
        for bench in book.bench
        for entry in bench.entries.values()
        if entry.traffic
    ]
    if not rows:
        return Section("traffic", TITLE, nothing(MISSING), "no record holds measured traffic")
    about = (
        "<p>Measured: bytes that one call read from and wrote to the device's main memory, and "
        "what went through its second-level cache, as the card counted them. Modelled: the same "
        "by the cost model, before the call. Compulsory: inputs and outputs, each once. Logical "
        "bytes saved are neither.</p>"
    )
    top = head("case", "contestant", ">compulsory", ">memory, modelled", ">measured", ">ratio",
               ">L2, modelled", ">measured", ">ratio", "counted by", "record")  # fmt: skip
    return Section("traffic", TITLE, about + table(top, rows), count(len(rows), "counted call"))


def _row(bench: Bench, entry: Entry) -> list[str]:
    seen = entry.traffic or {}
    model = seen.get("model") or {}
    main, near = moved_bytes(entry), seen.get("l2_bytes")
    expected, expected_near = model.get("hbm_bytes"), model.get("l2_bytes")
    return [
        f'<th scope="row" class="mono w">{cell(bench.case)[4:-5]}</th>',
        cell(entry.name),
        cell(_size(model.get("compulsory_bytes")), "n"),
        cell(_size(expected), "n"),
        cell(_size(main), "n"),
        cell(_share(main, expected), "n"),
        cell(_size(expected_near), "n"),
        cell(_size(near), "n"),
        cell(_share(near, expected_near), "n"),
        cell(seen.get("how", NONE)),
        raw(link(bench.source)),
    ]


def _size(amount: float | None) -> str:
    return NONE if amount is None else size(amount)


def _share(measured: float | None, modelled: float | None) -> str:
    return digits(measured / modelled) if measured is not None and modelled else NONE
