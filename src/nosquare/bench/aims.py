"""The table that this project's CPU kernels are held to: its lines, their cases, and how they fare.

A ratio is the median of torch's times over the median of nosquare's: above 1, nosquare is faster.
Torch's is what a user gets from scaled_dot_product_attention, whatever torch serves it with;
nosquare's is what backend=None chooses, and `ran` says what that was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .cases import Case
from .words import NONE, geometric_mean, percent, two

Column = tuple[int, str]  # width D, "full" or "causal"
COLUMNS: tuple[Column, ...] = ((64, "full"), (64, "causal"), (128, "full"), (128, "causal"))
MASKS = ("full()", "causal(start)")
HEADS = ("case", *(f"D={width} {mask}" for width, mask in COLUMNS),
         "share of ceiling", "error over torch's", "ran")  # fmt: skip
SAID = (
    "torch's median time over nosquare's, interleaved, geometric mean over the cases of the line "
    "(8 heads where it does not say), for each number of threads; in brackets the least ratio that "
    "each case aims at, and how many miss it. Share of ceiling: nosquare's rate over that of "
    "torch.mm of 1024^3 in the same dtype, or, in decoding, over that of summing a large array. "
    "Error over torch's: rms against float64, worst output; not under dropout, where the two drop "
    "other pairs"
)


@dataclass(frozen=True)
class Suite:
    """A line of the table.

    name   in records
    aims   ratio, at least, by column; {}: none is aimed at
    peaks  the peak of memory is measured too
    """

    name: str
    title: str
    cases: tuple[str, ...]
    quick: tuple[str, ...]
    aims: Mapping[Column, float] = field(default_factory=dict, hash=False)
    peaks: bool = False

    def aim(self, case: Case) -> float | None:
        """What one case is held to; None: nothing."""
        return self.aims.get(column(case))


def column(case: Case) -> Column:
    """Where a case stands in its line."""
    return case.D, "causal" if case.mask.startswith("causal") else "full"


def _aims(*least: float) -> dict[Column, float]:
    return dict(zip(COLUMNS, least, strict=True))


def _squares(phase: str, dtype: str, tokens: Sequence[int], widths: Sequence[int] = (64, 128),
             heads: int = 8, more: str = "") -> tuple[str, ...]:  # fmt: skip
    start = f"{phase} {dtype} B1 Hq{heads} Hk{heads}"
    return tuple(
        f"{start} M{n} N{n} D{width} {mask}{more}"
        for n in tokens
        for width in widths
        for mask in MASKS
    )


def _decode(heads: str, tokens: Sequence[int], widths: Sequence[int] = (64, 128)
            ) -> tuple[str, ...]:  # fmt: skip
    return tuple(
        f"decode {dtype} B1 {heads} M1 N{n} D{width} full()"
        for dtype in ("float32", "bfloat16")
        for n in tokens
        for width in widths
    )


def _dense(n: int, dtypes: Sequence[str] = ("float32", "bfloat16")) -> tuple[str, ...]:
    found: list[str] = []
    for dtype in dtypes:
        start = f"forward+backward {dtype} B1 Hq2 Hk2 M{n} N{n}"
        found += _squares("forward+backward", dtype, (n,), heads=2, more=" dropout=0.1")
        found += [f"{start} {wide} {mask}" for wide in ("D64 E128", "D128 E64") for mask in MASKS]
    return tuple(found)


_BOTH = "forward+backward"
_GROUPED, _ONE = "Hq32 Hk8", "Hq1 Hk1"
_TINY = "float32 B1 Hq1 Hk1 M16 N16 D64 full()"
_TINIES = (f"forward {_TINY}", f"forward {_TINY} grad", f"{_BOTH} {_TINY}")
_LONG, _FULL_RANGE = (1024, 2048, 4096), (512, 1024, 2048, 4096)
SUITES = (
    Suite("forward_bf16", "bf16 forward, N 1024 to 4096", _squares("forward", "bfloat16", _LONG),
          _squares("forward", "bfloat16", (1024,), (64,)), _aims(1.5, 2.0, 1.2, 1.5)),
    Suite("backward_bf16", "bf16 backward, N 1024 to 4096", _squares("backward", "bfloat16", _LONG),
          _squares("backward", "bfloat16", (1024,), (64,)), _aims(2.2, 2.7, 1.8, 2.2)),
    Suite("training_bf16", "bf16 forward + backward, N 128 to 512",
          _squares(_BOTH, "bfloat16", (128, 256, 512)), _squares(_BOTH, "bfloat16", (128,)),
          _aims(2.0, 2.0, 1.6, 1.6)),
    Suite("forward_fp32", "fp32 forward, N 512 to 4096",
          _squares("forward", "float32", _FULL_RANGE), _squares("forward", "float32", (512,)),
          _aims(1.0, 1.3, 1.0, 1.1)),
    Suite("backward_fp32", "fp32 backward, N 512 to 4096",
          _squares("backward", "float32", _FULL_RANGE), _squares("backward", "float32", (512,)),
          _aims(1.3, 1.4, 1.1, 1.25)),
    Suite("decode_grouped", "decode, 32 query heads on 8 key heads, fp32 and bf16, N 4096 to 65536",
          _decode(_GROUPED, (4096, 16384, 65536)), _decode(_GROUPED, (4096,)),
          {(64, "full"): 3.0, (128, "full"): 3.0}),
    Suite("decode_one", "decode, one head, fp32 and bf16, N 65536", _decode(_ONE, (65536,)),
          _decode(_ONE, (65536,), (64,)), {(64, "full"): 1.4, (128, "full"): 1.3}),
    Suite("dense", "dropout 0.1, or E != D: forward + backward, 2 heads, fp32 and bf16, N 4096",
          _dense(4096), _dense(512, ("float32",)), _aims(4.0, 4.0, 4.0, 4.0)),
    Suite("tiny", "tiny (1 x 1 x 16 x 64), Python included", _TINIES, _TINIES,
          {(64, "full"): 0.9}),
)  # fmt: skip


def _peaks(n: int) -> tuple[str, ...]:
    start = f"{_BOTH} float32 B1 Hq8 Hk8 M{n} N{n} D64"
    return (f"{start} full() dropout=0.1", f"{start} E128 full()", f"{start} full() bias=Hq,1,N")


# No line of the table: memory, where torch makes the square.
PEAKS = Suite(
    "c", "where torch falls to its dense path", _peaks(4096), _peaks(512), peaks=True
)  # fmt: skip
# Suites of records that were made before there was this table.
EARLIER = {
    "a": "where torch's fused kernel serves both",
    "b": "decoding with grouped heads (rates are GB/s of k and v)",
    "d": "what a call costs before any work (one thread: waking another costs more than the call)",
    "e": "bfloat16, for information",
}
TITLES = {**EARLIER, **{suite.name: suite.title for suite in (PEAKS, *SUITES)}}


# ---- how it went ----


class Outcome(NamedTuple):
    """One case of a line with one number of threads; NaN for what is not known.

    ratio  torch's time over nosquare's
    share  of the processor's own ceiling
    error  nosquare's over torch's
    """

    suite: str
    case: Case
    threads: int
    ratio: float
    share: float
    error: float
    ran: str


def lines(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The table's lines, cells as in HEADS; a line without outcomes is left out."""
    found, threads = [], thread_counts(outcomes)
    for suite in SUITES:
        mine = [o for o in outcomes if o.suite == suite.name]
        if mine:
            cells = (_cell(suite, mine, where, threads) for where in COLUMNS)
            ran = ", ".join(sorted({o.ran for o in mine if o.ran})) or NONE
            error = max((o.error for o in mine if not math.isnan(o.error)), default=math.nan)
            found.append([suite.title, *cells, _shares(mine), two(error), ran])
    return found


def thread_counts(outcomes: Iterable[Outcome]) -> list[int]:
    """The numbers of threads that a cell has a ratio for, in their order."""
    return sorted({o.threads for o in outcomes})


def _cell(suite: Suite, outcomes: Sequence[Outcome], where: Column, threads: Sequence[int]) -> str:
    """As in "1.62 / 1.55 (1.5; 2 of 6 miss)"."""
    here = [o for o in outcomes if column(o.case) == where]
    if not here:
        return NONE
    means = [geometric_mean([o.ratio for o in here if o.threads == count]) for count in threads]
    words, aim = " / ".join(map(two, means)), suite.aims.get(where)
    if aim is None:
        return words
    missed = sum(missing(o.ratio, aim) for o in here)
    return f"{words} ({aim}" + (f"; {missed} of {len(here)} miss)" if missed else ")")


def error_ratio(case: Case, mine: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """nosquare's error over torch's, the worst of all outputs; NaN where none can be compared.

    mine, theirs  rms of the error by the name of the output; of cases with dropout, about other
                  masks, and so not compared
    """
    known = [] if case.dropout else [mine[what] / theirs[what] for what in mine if theirs.get(what)]
    return max(known, default=math.nan)


def missing(ratio: float, aim: float | None) -> bool:
    """Whether an aim is missed; a case that was not timed (NaN) misses it."""
    return aim is not None and not ratio >= aim


def _shares(outcomes: Iterable[Outcome]) -> str:
    """The least to the most of a line."""
    known = [o.share for o in outcomes if not math.isnan(o.share)]
    ends = list(dict.fromkeys(percent(end) for end in (min(known), max(known)))) if known else []
    return " to ".join(ends) or NONE
