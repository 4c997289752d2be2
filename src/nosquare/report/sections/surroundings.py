"""The machines and the software, and the list of all records that a report rests on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from ..claims import size
from ..evidence import Bench, Book, Other, Source, places
from ..page import Section, anchor, cell, fold, head, table
from ..words import count


def environment(book: Book) -> Section:
    """A column of facts for each machine with its software."""
    groups: dict[str, tuple[Mapping[str, Any], list[Source]]] = {}
    for record in book.used:
        both = {"machine": record.data["machine"], "software": record.data["software"]}
        both["software"] = {**both["software"], "commit": None, "dirty": None}
        known = groups.setdefault(json.dumps(both, sort_keys=True), (record.data, []))
        known[1].append(record.source)
    body = "".join(_facts(data, sources, book) for data, sources in groups.values())
    words = "; ".join(dict.fromkeys(s.machine for _, found in groups.values() for s in found))
    return Section("environment", "Environment", body, words)


def _facts(data: Mapping[str, Any], sources: list[Source], book: Book) -> str:
    machine, software = data["machine"], data["software"]
    gpu = machine.get("gpu") or {}
    used = [r for r in book.used if r.source in set(sources)]
    commits = dict.fromkeys(_commit(r.data["software"]) for r in used)
    rows = {
        "records": places(sources),
        "card": gpu.get("name"),
        "card memory": size(gpu["memory_bytes"]) if gpu else None,
        "driver": gpu.get("driver"),
        "power limit": f"{gpu['power_limit_w']:g} W" if gpu.get("power_limit_w") else None,
        "processor": f"{machine['cpu']} ({', '.join(machine['features']) or 'no known extension'})",
        "threads of torch": f"{machine['threads']} of {machine['cores']} logical processors",
        "memory": size(machine["memory_bytes"]),
        "software": ", ".join(
            f"{name} {software[name]}"
            for name in ("nosquare", "torch", "python", "cuda", "cudnn", "triton", "system")
            if software.get(name) is not None
        ),
        "commits": ", ".join(commits),
    }
    cells = [
        [f'<th scope="row">{escape(name)}</th>', cell(words)]
        for name, words in rows.items()
        if words
    ]
    return table("", cells, f"<b>{escape(sources[0].machine)}</b>")


def _commit(software: Mapping[str, Any]) -> str:
    if software.get("commit") is None:
        return "unknown"
    return str(software["commit"])[:10] + (" with changes" if software.get("dirty") else "")


def records(book: Book) -> Section:
    """Every record that a number here is from, with the line it stands on, folded by machine."""
    groups: dict[tuple[str, str], list[Bench | Other]] = {}
    for record in book.used:
        commit = _commit(record.data["software"])
        groups.setdefault((record.source.machine, commit), []).append(record)
    about = "<p>File and line: one JSON object a line. "
    if book.older:
        about += (
            f"{count(book.older, 'older record')} of the same case, suite and machine not shown: "
            "the newest counts, whatever it says."
        )
    body = "".join(_list(*group, found) for group, found in groups.items())
    words = f"{len(book.used)} used, {book.older} superseded"
    return Section("records", "Records", f"{about}</p>{body}", words)


def _list(machine: str, commit: str, found: list[Bench | Other]) -> str:
    rows = [
        [
            f'<th scope="row" id="{anchor(r.source)}" class="mono">{escape(r.source.place)}</th>',
            cell(r.source.utc.replace("T", " ").removesuffix("Z"), "one"),
            cell(r.data["kind"]),
            cell(_about(r), "mono one"),
        ]
        for r in found
    ]
    title = f"{places(r.source for r in found)}: {machine}, commit {commit}"
    return fold(title, table(head("record", "time (UTC)", "kind", "what"), rows))


def _about(record: Bench | Other) -> str:
    data = record.data
    tiles = f", tiles {data['tile_m']} x {data['tile_n']}" if "tile_m" in data else ""
    return str(data.get("case") or data.get("target") or data.get("model") or "") + tiles
