"""Receipts: what served each case, and how that is known."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

from ..claims import size
from ..evidence import Book, Entry, Source
from ..page import Section, cell, head, links, nothing, raw, table
from ..rules import kernels_seen
from ..words import listed, suite_title

TITLE = "What really ran"
ABOUT = (
    "<p>A name that an API gives is not evidence of the kernel that ran. <b>Profiler</b>: kernel "
    "names as a profiler saw them. <b>Receipt</b>: the backend of nosquare that launched them says "
    "so. <b>Label</b>: the library named its choice, and nobody looked.</p>"
)


class Ran(NamedTuple):
    """What served a contestant; equal ones share a row."""

    who: str
    op: str
    backend: str
    plan: str
    kernels: str
    known_by: str
    notes: str


def receipts(book: Book) -> Section:
    """A row for each way in which cases of a suite were served."""
    if not book.bench:
        return Section("receipts", TITLE, nothing("No record of kind bench."), "no record")
    body, labels = [ABOUT], set[str]()
    for suite, machine in dict.fromkeys((b.suite, b.source.machine) for b in book.bench):
        cases = [b for b in book.bench if (b.suite, b.source.machine) == (suite, machine)]
        served: dict[Ran, list[Source]] = {}
        for bench in cases:
            for entry in bench.entries.values():
                for ran in _ran(entry):
                    served.setdefault(ran, []).append(bench.source)
        labels |= {ran.who for ran in served if ran.known_by == "label"}
        rows = [_row(ran, sources) for ran, sources in served.items()]
        top = head("contestant", "pass", "served by", "kernels", "known by", "notes", ">cases",
                   "records")  # fmt: skip
        title = (
            f'<b>{escape(suite_title(cases[0]))}</b> <span class="soft">{escape(machine)}</span>'
        )
        body.append(table(top, rows, title))
    told = f"known by label only: {listed(sorted(labels))}" if labels else "all confirmed"
    return Section("receipts", TITLE, "".join(body), told)


def _ran(entry: Entry) -> list[Ran]:
    if entry.refused:
        return [Ran(entry.name, "", "nobody", "", "", "", f"not timed: {entry.refused}")]
    seen = ", ".join(kernels_seen(entry))
    if not entry.receipts:
        return [Ran(entry.name, "all", entry.ran, "", seen, "profiler" if seen else "label", "")]
    return [
        Ran(entry.name, r["op"], r["backend"], r["plan"], seen or ", ".join(r["kernels"]),
            "profiler" if seen else "receipt", _notes(r))
        for r in entry.receipts
    ]  # fmt: skip


def _notes(receipt: Mapping[str, Any]) -> str:
    """Workspace, copies, and who could not take it."""
    workspace = receipt.get("workspace_bytes") or 0
    words = [f"workspace {size(workspace)}"] if workspace else []
    words += [f"copied {what}" for what in receipt.get("copies") or ()]
    refusals: Mapping[str, list[str]] = receipt.get("refusals") or {}
    words += [f"not {name}: {'; '.join(why)}" for name, why in refusals.items()]
    return "; ".join(words)


def _row(ran: Ran, sources: list[Source]) -> list[str]:
    served = f'<span class="mono">{escape(ran.backend)}</span>'
    return [
        cell(ran.who),
        cell(ran.op),
        raw(f"{served}<br>{escape(ran.plan)}" if ran.plan else served, "w" if ran.plan else ""),
        cell(ran.kernels, "mono kernels" if ran.kernels else ""),
        cell(ran.known_by, "soft" if ran.known_by == "label" else ""),
        cell(ran.notes, "w" if ran.notes else ""),
        cell(len(set(sources)), "n"),
        raw(links(sources)),
    ]
