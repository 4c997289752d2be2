"""README's table of what the CPU kernels are held to (bench/aims.py), one for each processor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..bench.aims import HEADS, SAID, SUITES, Outcome, error_ratio, lines, thread_counts
from ..bench.ceiling import Ceiling
from .evidence import Bench, Entry, places

MINE, THEIRS = "nosquare", "torch"
NAMES = tuple(suite.name for suite in SUITES)


def tables(cases: Sequence[Bench]) -> list[str]:
    """Lines of Markdown: for each processor, of the torch that it was last measured with, a table
    of the newest record of each case. cases: of the suites NAMES, at least one."""
    found: list[str] = []
    for processor in dict.fromkeys(b.processor for b in cases):
        here = [b for b in cases if b.processor == processor]
        last = max(here, key=lambda b: (b.source.utc, b.source.line))
        here = [b for b in here if _torch(b) == _torch(last)]
        outcomes = [outcome(b) for b in here]
        counts = " / ".join(map(str, thread_counts(outcomes)))
        threads = f"{counts} thread{'s' * (counts != '1')}"
        days = dict.fromkeys((min(b.source.utc for b in here)[:10], last.source.utc[:10]))
        found += [
            f"{processor}, with {threads}, torch {_torch(last)}, {' to '.join(days)} "
            f"(docs/records/{places(b.source for b in here)}):",
            "",
            f"| {' | '.join(HEADS)} |",
            "|---" * len(HEADS) + "|",
            *(f"| {' | '.join(cells)} |" for cells in lines(outcomes)),
            "",
        ]
    return [*found, f"Cells: {SAID}.", ""]


def _torch(bench: Bench) -> str:
    return str(bench.data["software"]["torch"])


def outcome(bench: Bench) -> Outcome:
    """A record as a part of its line."""
    mine, theirs = bench.entries[MINE], bench.entries[THEIRS]
    ours_us, theirs_us = _median_us(mine), _median_us(theirs)
    roof, share = bench.data["ceiling"], math.nan
    if roof is not None:
        ceiling = Ceiling(roof["gemm_flops_per_s"], roof["read_bytes_per_s"])
        share = ceiling.share(bench.case, bench.flops, ours_us)
    errors = ({e["what"]: e["rms"] for e in one.errors} for one in (mine, theirs))
    ran = mine.ran if mine.samples_us else ""
    return Outcome(bench.suite, bench.case, bench.data["machine"]["threads"], theirs_us / ours_us,
                   share, error_ratio(bench.case, *errors), ran)  # fmt: skip


def _median_us(entry: Entry) -> float:
    return math.nan if entry.median_us is None else entry.median_us
