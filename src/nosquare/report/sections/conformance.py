"""Conformance: what each attention function did with the questions of the contract."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from ...records import finite
from ..evidence import Book, Other
from ..page import Section, cell, head, link, nothing, raw, table
from ..words import count

TITLE = "Conformance"
NOT_FINITE = finite(math.inf)
VERDICTS = ("pass", "fail", "convention", "refused", "not applicable")
MISSING = (
    "No record of kind verify: `nosquare verify` puts an attention function through the contract "
    "and keeps what it finds."
)


def newest(book: Book) -> list[Other]:
    """The newest record of each function on each device and machine."""
    found: dict[tuple[str, str, str], Other] = {}
    for record in book.of_kind("verify"):
        found[record.data["target"], record.data["device"], record.source.machine] = record
    return list(found.values())


def conformance(book: Book) -> Section:
    """A row of counts for each function that was verified, and what it did not pass."""
    found = newest(book)
    if not found:
        return Section("conformance", TITLE, nothing(MISSING), "no record of kind verify")
    top = head("function", "device", *(f">{word}" for word in VERDICTS), "record")
    body = table(top, [_counts(record) for record in found])
    body += "".join(map(_findings, found))
    failed = sum(r.data["counts"].get("fail", 0) for r in found)
    words = f"{count(len(found), 'function')}, {count(failed, 'failed check')}"
    return Section("conformance", TITLE, body, words)


def _counts(record: Other) -> list[str]:
    counts: Mapping[str, int] = record.data["counts"]
    return [
        f'<th scope="row" class="mono">{escape(record.data["target"])}</th>',
        cell(record.data["device"]),
        *(cell(counts.get(word, 0), "n") for word in VERDICTS),
        raw(link(record.source)),
    ]


def _findings(record: Other) -> str:
    """What was not passed: failures first, then other conventions, then refusals."""
    rows = [
        _finding(check)
        for verdict in ("fail", "convention", "refused")
        for check in record.data["checks"]
        if check["verdict"] == verdict
    ]
    if not rows:
        return ""
    target = escape(record.data["target"])
    title = (
        f'<b>{target}</b>: what it did not pass <span class="soft">({link(record.source)})</span>'
    )
    return table(head("verdict", "check", "dtype", "what it did", ">error", ">bound"), rows, title)


def _finding(check: Mapping[str, Any]) -> list[str]:
    style = "lead" if check["verdict"] == "fail" else ""
    numbers = [cell(_number(check.get(name)), "n") for name in ("error", "bound")]
    words = [cell(check["check"], "mono"), cell(check["dtype"]), cell(check["words"], "w")]
    return [cell(check["verdict"], style), *words, *numbers]


def _number(value: float | None) -> str:
    """Records hold the largest float where an error was NaN or infinite (records.finite)."""
    if value is None:
        return ""
    return "not finite" if value >= NOT_FINITE else f"{value:.1e}"
