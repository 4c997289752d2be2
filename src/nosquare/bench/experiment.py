"""`nosquare bench experiment`: the experiment that the second seed document asks for.

Queries, keys, values, masks and precision are fixed; the size of the tiles and N vary. Recorded
separately: the errors of outputs and gradients against float64 on the very same numbers, peak
memory, traffic (modelled; where ncu is, measured), and time. Dropout is off, then on, with the
same dropout mask in the float64 reference: so a difference is of arithmetic, not of chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import records
from ..errors import ArgumentError, UnsupportedError
from ..records import HEAD, NUMBER, WHOLE, WORDS, Maybe
from . import findings, memory, model, ncu, record, watch
from .cases import DTYPES, Case, Data
from .check import Truth, check, errors, truths
from .clocks import Clock, CudaClock, HostClock
from .contestants import Prepared, answer
from .cuda import need_cuda
from .screen import progress, warn_if_busy
from .tiled import tiled
from .timing import Entry, Rounds, Tick, interleave
from .traffic import DEVICES

VERSION = 1
SCHEMA: dict[str, Any] = HEAD | {
    "device": WORDS,
    "question": WORDS,  # prefill, training, training with dropout, decode
    "case": WORDS,
    "tile_m": WHOLE,
    "tile_n": WHOLE,
    "plan": WORDS,
    "errors": [record.ERRORS],
    "checks": [record.CHECK],
    "peak_bytes": Maybe(WHOLE),
    "workspace_bytes": WHOLE,
    "square_bytes": WHOLE,  # that scores and probabilities would take, were they materialised
    "model": record.MODEL,
    "measured": Maybe({name: s for name, s in record.TRAFFIC.items() if name != "model"}),
    "calls_per_sample": WHOLE,
    "samples_us": [NUMBER],
    "median_us": NUMBER,
    "timing": record.TIMING,
    "gpu_state": Maybe(watch.STATE),
    "load_average": [NUMBER],
}
NCU_TILES = 8  # ncu takes some 10 ms a launch: it is asked where so many tiles of keys are a row
DROPOUT = " dropout=0.1"


@dataclass(frozen=True)
class Part:
    """One table: a question, its case with N left open, and the sizes that vary.

    tiles  (tile_m, tile_n) each
    """

    question: str
    line: str
    tokens: Sequence[int]
    tiles: Sequence[tuple[int, int]]

    def cases(self) -> list[Case]:
        """The cases, one for each N."""
        return [Case.parse(self.line.format(n=n)) for n in self.tokens]

    def fitting(self, case: Case) -> list[tuple[int, int]]:
        """The tiles that are no larger than the case."""
        return [(m, n) for m, n in self.tiles if m <= case.M and n <= case.N]


def parts(device: str, dtype: str, quick: bool) -> list[Part]:
    """All tables: prefill, training, training with dropout, decode."""
    first, heads = (512, "Hq2 Hk2") if device == "cpu" else (2048, "Hq16 Hk16")
    sizes = [first * 2**n for n in range(2 if quick else 3)]
    sides = [first // 8 * 2**n for n in range(3 if quick else 5)]
    cache, widths = [4096, 16384, 65536][: 2 if quick else 3], [64, 256, 1024, 4096]
    squares = [(side, side) for side in sides]
    square = f"{dtype} B1 {heads} M{{n}} N{{n}} D64 causal(end)"
    row = f"{dtype} B1 Hq8 Hk2 M1 N{{n}} D64 full()"
    return [
        Part("prefill", f"forward {square}", sizes, squares),
        Part("training", f"forward+backward {square}", sizes, squares),
        Part("training with dropout", f"forward+backward {square}{DROPOUT}", sizes, squares),
        Part("decode", f"decode {row}", cache, [(1, n) for n in widths]),
    ]


def bench_experiment(
    device: str = "",
    quick: bool = False,
    dtype: str = "float32",
    keep: bool = True,
    name: str = "experiment",
) -> int:
    """Vary tiles and N, and nothing else; print a table for each question; keep the evidence.

    device  "cpu" or "cuda"; "": the card where torch sees one
    quick   small sizes, some seconds
    dtype   of q, k and v
    keep    append the records to docs/records/<name>.jsonl

    Returns 0 when all answers were right, else 1. Raises ArgumentError for a device or a dtype that
    is not one; UnsupportedError where torch sees no card.
    """
    if device not in ("", *DEVICES) or dtype not in DTYPES:
        raise ArgumentError(
            "The experiment needs a device and a dtype that it knows.",
            {"device": repr(device), "dtype": repr(dtype), "devices": ", ".join(DEVICES),
             "dtypes": ", ".join(DTYPES)},
            "--device cpu --dtype float32.",
        )  # fmt: skip
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        need_cuda()
    from rich.console import Console

    console = Console(highlight=False)
    clock: Clock = HostClock() if device == "cpu" else CudaClock()
    around = records.surroundings(clock.device)
    findings.introduce(console, around, clock.words())
    if device == "cpu":
        warn_if_busy(console)
    plan = [(part, part.cases()) for part in parts(device, dtype, quick)]
    right, path = True, None
    with progress(console, sum(len(cases) for _, cases in plan)) as (tick, step):
        for part, cases in plan:
            lines: list[dict[str, Any]] = []
            for case in cases:
                step(str(case))
                last = case == cases[-1]  # ncu takes some 10 s a row: at the largest N alone
                lines += _rows(part, case, clock, around, tick, counted=last and not quick)
            if device == "cpu":
                tick("memory, in fresh processes")
                _add_peaks(lines)
            if keep:
                path = records.append(records.folder(), name, lines, SCHEMA)
            findings.show(console, part.question, lines)
            right = right and all(c["error"] <= c["bound"] for x in lines for c in x["checks"])
    if path is not None:
        console.print(f"\nRecords: docs/records/{path.name}")
    if not right:
        console.print("[red]FAILED[/red] an error is beyond its bound")
    return 0 if right else 1


def _rows(part: Part, case: Case, clock: Clock, around: dict[str, Any], tick: Tick,
          counted: bool) -> list[dict[str, Any]]:  # fmt: skip
    """The records of one N, one for each size of tiles."""
    data = Data.of(case, clock.device)
    rows: list[dict[str, Any]] = []
    ready: list[tuple[Entry, Prepared]] = []
    with clock.watched() as seen:
        tick("float64")
        known = truths(data, every_row=True)
        for tiles in part.fitting(case):
            tick(f"{tiles[0]} x {tiles[1]}")
            prepared, row = _row(data, tiles, known)
            rows.append(row | {"question": part.question, "peak_bytes": clock.peak_bytes(prepared)})
            ready.append((Entry(tiled(*tiles).name), prepared))
        tick("time")
        seen.begin()
        interleave(ready, Rounds(least=3, most=20, seconds=0.3), clock=clock)
    if clock.device.type == "cuda" and counted and part.question == "prefill":
        _add_measured(rows, case, ready, tick)
    same = {
        **records.begin("experiment", VERSION, around),
        "device": clock.device.type,
        "timing": {**clock.words(), "numbers": data.drawn},
        "gpu_state": seen.summary(),
        "load_average": record.load(),
    }
    return [
        {**same, **row, "calls_per_sample": entry.calls, "median_us": round(entry.median_us, 3),
         "samples_us": [round(t, 3) for t in entry.samples_us]}
        for row, (entry, _) in zip(rows, ready, strict=True)
    ]  # fmt: skip


def _row(
    data: Data, tiles: tuple[int, int], known: Sequence[Truth]
) -> tuple[Prepared, dict[str, Any]]:
    """A size of tiles, ready to be timed, and all that is known of it but time and memory."""
    contestant = tiled(*tiles)
    prepared, out, receipts = answer(contestant, data)
    account = model.cost(data, model.tiles(data, *tiles))
    passes = [p for p in (account.forward, account.backward) if p is not None]
    checks = check(contestant, data, out, known)
    return prepared, {
        "errors": [record.plain(one) for one in errors(data, out, known)],
        "checks": [record.plain(one) for one in checks],
        "case": str(data.case),
        "tile_m": tiles[0],
        "tile_n": tiles[1],
        "plan": receipts[0].plan,
        "workspace_bytes": max(r.workspace_bytes or 0 for r in receipts),
        "square_bytes": max(p.ledger.materialised_bytes for p in passes),
        "model": model.summary(account, data.case.phase),
        "measured": None,
    }


def _add_peaks(rows: Sequence[dict[str, Any]]) -> None:
    """On a CPU, memory is measured in fresh processes; where that cannot be, it stays unknown."""
    jobs = [(Case.parse(x["case"]), tiled(x["tile_m"], x["tile_n"]).name) for x in rows]
    try:
        found = memory.peaks(jobs, torch.get_num_threads())
    except UnsupportedError:
        return
    for row, peak in zip(rows, found, strict=True):
        row["peak_bytes"] = peak


def _add_measured(rows: Sequence[dict[str, Any]], case: Case,
                  ready: Sequence[tuple[Entry, Prepared]], tick: Tick) -> None:  # fmt: skip
    """What ncu counts, for tiles so large that their launches are few."""
    for row, (entry, _) in zip(rows, ready, strict=True):
        if NCU_TILES * row["tile_n"] < case.N:
            continue
        tick(f"ncu {row['tile_m']} x {row['tile_n']}")
        try:
            row["measured"] = ncu.traffic(case, entry.contestant)
        except UnsupportedError:
            return  # no ncu, or no leave to count: the model stands alone
