"""README's tables of what kernels are held to: those for CPUs (bench/aims.py), one for each
processor, and those for backends on a card (bench/held.py), for each card."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..bench import held
from ..bench.aims import HEADS, SAID, SUITES, Outcome, error_ratio, lines, thread_counts
from ..bench.ceiling import Ceiling
from ..bench.line import Outcome as OnCard
from .evidence import Bench, Entry, places

MINE, THEIRS = "nosquare", "torch"
NAMES = (*(suite.name for suite in SUITES), *held.BY_NAME)


def tables(cases: Sequence[Bench]) -> list[str]:
    """Lines of Markdown: for each processor or card, of the torch that it was last measured with, a
    table of the newest record of each case. cases: of the suites NAMES, at least one."""
    found: list[str] = []
    for here in _places([b for b in cases if b.suite not in held.BY_NAME]):
        outcomes = [outcome(b) for b in here]
        counts = " / ".join(map(str, thread_counts(outcomes)))
        more = f", with {counts} thread{'s' * (counts != '1')}"
        found += _table(_where(here, more), HEADS, lines(outcomes))
    found += [f"Cells: {SAID}.", ""] if found else []
    for board in held.BOARDS:
        mine = [b for b in cases if b.suite in held.GROUPS[board.group]]
        for here in _places(mine):
            where = _where(here, "")
            for heads, rows in board.tables([on_card(b) for b in here]):
                found += _table(where, heads, rows)
                where = ""  # said once
        found += [f"Cells: {board.said}.", ""] if mine else []
    return found


def _places(cases: Sequence[Bench]) -> Iterator[list[Bench]]:
    """The cases of each processor or card, of the torch that it was last measured with."""
    for processor in dict.fromkeys(b.processor for b in cases):
        here = [b for b in cases if b.processor == processor]
        last = max(here, key=lambda b: (b.source.utc, b.source.line))
        yield [b for b in here if _torch(b) == _torch(last)]


def _where(here: Sequence[Bench], more: str) -> str:
    days = sorted(b.source.utc[:10] for b in here)
    return (
        f"{here[0].processor}{more}, torch {_torch(here[0])}, "
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))} "
        f"(docs/records/{places(b.source for b in here)}):"
    )


def _table(where: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        *([where, ""] if where else []),
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(f"| {' | '.join(cells)} |" for cells in rows),
        "",
    ]


def _torch(bench: Bench) -> str:
    return str(bench.data["software"]["torch"])


def outcome(bench: Bench) -> Outcome:
    """A record as a part of its line, of a CPU."""
    mine, theirs = bench.entries[MINE], bench.entries[THEIRS]
    ours_us, theirs_us = _median_us(mine), _median_us(theirs)
    roof, share = bench.data["ceiling"], math.nan
    if roof is not None:
        ceiling = Ceiling(roof["gemm_flops_per_s"], roof["read_bytes_per_s"])
        share = ceiling.share(bench.case, bench.flops, ours_us)
    errors = (_errors(one) for one in (mine, theirs))
    ran = mine.ran if mine.samples_us else ""
    return Outcome(bench.suite, bench.case, bench.data["machine"]["threads"], theirs_us / ours_us,
                   share, error_ratio(bench.case, *errors), ran)  # fmt: skip


def on_card(bench: Bench) -> OnCard:
    """A record as a part of its line, of a card."""
    medians_us = {name: _median_us(one) for name, one in bench.entries.items()}
    errors = {name: _errors(one) for name, one in bench.entries.items()}
    return OnCard.of(held.BY_NAME[bench.suite], bench.case, bench.flops, medians_us, errors)


def _errors(entry: Entry) -> dict[str, float]:
    return {e["what"]: e["rms"] for e in entry.errors}


def _median_us(entry: Entry) -> float:
    return math.nan if entry.median_us is None else entry.median_us
