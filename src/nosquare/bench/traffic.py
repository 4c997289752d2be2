"""`nosquare bench traffic`: bytes that a call moves, measured where ncu is, beside the model's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import records
from ..errors import ArgumentError, UnsupportedError
from . import model, ncu, record
from .cases import Case, Data, visible_pairs
from .check import truths
from .cuda import need_cuda
from .peers import named
from .screen import progress
from .timing import Entry, Result, admit
from .words import MIB, NONE, two

if TYPE_CHECKING:
    from rich.console import Console

DEVICES = ("cuda", "cpu")
KERNELS, NAME_LENGTH = 4, 60  # shown of each contestant


def bench_traffic(
    case: str, device: str = "", peers: str = "nosquare", keep: bool = True, name: str = "cuda"
) -> int:
    """Check each contestant, measure what one call of it moves, and set the model beside it.

    case    one line of the grammar in bench/cases.py
    device  "cuda" or "cpu"; "": the card where torch sees one. Of a CPU there is the model alone
    peers   contestants joined by commas
    keep    append the record to docs/records/<name>.jsonl

    Returns 0 when everybody was measured, or the device is a CPU; else 1.
    Raises ArgumentError for a case, device or contestant that is not one; UnsupportedError where
    torch sees no card, or where there is no ncu.
    """
    item, asked = Case.parse(case), named(peers)
    if device not in ("", *DEVICES):
        raise ArgumentError(
            "Traffic is measured on a card, or modelled for a CPU.",
            {"device": repr(device)},
            "--device cuda, or --device cpu.",
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        need_cuda()
        ncu.program()
    from rich.console import Console

    console = Console(highlight=False)
    data = Data.of(item, device)
    account = model.cost(data)
    said = model.summary(account, item.phase)
    console.print(f"{item}\non {account.device.name}", markup=False)
    if device == "cpu":
        _show(console, [], said)
        console.print("Not measured: ncu counts the bytes of NVIDIA cards, and no CPU's.")
        return 0
    entries = [Entry(one.name) for one in asked]
    pairs, drawn = visible_pairs(data), data.drawn
    with progress(console, len(entries)) as (tick, step):
        tick("oracle")
        known = truths(data)
        for one, entry in zip(asked, entries, strict=True):
            admit(one, data, entry, known)
        del data, known  # the children need the card's memory
        torch.cuda.empty_cache()
        for entry in entries:
            step(entry.contestant)
            if not entry.refused:
                _measure(item, entry, said)
    _show(console, entries, said)
    if keep:
        words = {"clock": "none", "caches": ncu.HOW, "numbers": drawn}
        result = Result(item, pairs, entries, "traffic", device, words)
        line = record.of(result, records.surroundings(device))
        path = records.append(records.folder(), name, [line], record.SCHEMA)
        console.print(f"Records: docs/records/{path.name}")
    return 1 if any(entry.refused for entry in entries) else 0


def _measure(item: Case, entry: Entry, said: dict[str, Any]) -> None:
    try:
        moved = ncu.traffic(item, entry.contestant)
    except UnsupportedError as error:
        why = [f"{name}: {value}" for name, value in error.values.items()
               if name not in ("case", "contestant")]  # fmt: skip
        entry.refused = " ".join([error.sentence, *why])
        return
    # the model is of a kernel of ours
    entry.traffic = {**moved, "model": said if entry.contestant.startswith("nosquare") else None}
    most = moved["kernels"][:KERNELS]  # the record has them all, and their whole names
    entry.ran = "; ".join(f"{one['name'][:NAME_LENGTH]} x {one['launches']}" for one in most)


def _show(console: Console, entries: list[Entry], said: dict[str, Any]) -> None:
    """Print the table: MiB, and how many times the compulsory bytes, or the model's, that is."""
    from rich import box
    from rich.table import Table

    least, far, near = said["compulsory_bytes"], said["hbm_bytes"], said["l2_bytes"]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1))
    table.add_column("MiB", no_wrap=True, min_width=8)
    names = ("read", "written") if entries else ()
    for column in (*names, "memory", "/ must", "cache", "/ model", *(("ms",) if entries else ())):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        if entry.traffic is None:
            continue
        t = entry.traffic
        both = [t["dram_read_bytes"], t["dram_write_bytes"]]
        total = None if None in both else sum(both)
        modelled = near if t["model"] is not None else None
        table.add_row(entry.contestant, *map(_mib, both), _mib(total), _over(total, least),
                      _mib(t["l2_bytes"]), _over(t["l2_bytes"], modelled),
                      NONE if t["time_us"] is None else f"{t['time_us'] / 1000:.3f}")  # fmt: skip
    blank = [""] * len(names)
    table.add_row("model", *blank, _mib(far), _over(far, least), _mib(near), "")
    table.add_row("must", *blank, _mib(least), "1.00", "", "")
    console.print(table)
    console.print(
        "memory: between main memory and the last cache. cache: between that and the units. must: "
        "inputs that are used read once, outputs written once. model: a kernel with tiles of "
        f"{said['tiles'] or 'unknown size'}.",
        markup=False,
    )
    for entry in entries:
        if entry.refused:
            console.print(f"not measured: {entry.contestant}: {entry.refused}", markup=False)
        elif entry.ran:
            console.print(f"{entry.contestant} ran: {entry.ran}", markup=False)


def _mib(size: int | None) -> str:
    mib = (size or 0) / MIB
    return NONE if size is None else f"{mib:,.1f}" if mib < 1000 else f"{mib:,.0f}"


def _over(size: int | None, least: int | None) -> str:
    return NONE if size is None or not least else two(size / least)
