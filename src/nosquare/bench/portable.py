"""The table that triton_any is held to on a card (line.py says what a line is).

A line aims at a geometric mean over its cases. float32 is IEEE's on both sides: torch's tf32 is off
unless a user turns it on, and would not pass the check.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..receipt import BACKWARD, FORWARD
from .aims import COLUMNS, column, missing
from .line import CUDNN, EFFICIENT, FLASH, Board, Cells, Line, Outcome, most_error, rates, squares
from .timing import Rounds
from .tune import HIDDEN, TOKENS
from .words import geometric_mean, two

BACKEND, GROUP = "triton_any", "portable"
SUBJECT = f"nosquare:{BACKEND}"
HEADS = ("case", "against", *(f"D={width} {mask}" for width, mask in COLUMNS), "all",
         "against cuDNN", "TFLOP/s", "error over the peer's")  # fmt: skip
SAID = (
    "the peer's median time over triton_any's, interleaved, geometric mean over the cases "
    f"(hidden width {HIDDEN:,}); all: in brackets the least that the line aims at, and how many "
    "cases are below it or were not timed. Error over the peer's: rms against float64, worst "
    "output; not under dropout, where the two drop other pairs"
)


def _lengths(phase: str, least: float) -> Line:
    cases = squares(phase, "bfloat16", (512, 1024, 2048, 4096, 8192, 16384))
    quick = squares(phase, "bfloat16", (4096,), masks=("causal(end)",))
    title = f"bf16 {phase}, {TOKENS:,} tokens, N 512 to 16384"
    return Line(f"{GROUP}_{phase}", title, cases, quick, SUBJECT, FLASH, least, also=CUDNN)


def _dropout(phase: str) -> Line:
    cases = squares(phase, "bfloat16", (8192,), " dropout=0.125", widths=(128,), masks=("full()",))
    title = f"bf16 {phase} with dropout 0.125, {TOKENS:,} tokens, N 8192"
    return Line(f"{GROUP}_dropout_{phase}", title, cases, cases, SUBJECT, FLASH, 1.1, also=CUDNN)


def _float32(phase: str) -> Line:
    tokens = TOKENS // 2
    cases = squares(phase, "float32", (4096,), tokens=tokens)
    title = f"fp32 (IEEE) {phase}, {tokens:,} tokens, N 4096"
    return Line(f"{GROUP}_float32_{phase}", title, cases, cases[1:2], SUBJECT, EFFICIENT, 1.0)


def _bias() -> Line:
    cases = [
        squares("forward+backward", "bfloat16", (2048,), f" bias={axes}", masks=("full()",))
        for axes in ("B,Hq,M,N", "Hq,M,N")
    ]
    title = f"bf16 forward + backward, a bias that learns, {TOKENS:,} tokens, N 2048"
    every, quick = (*cases[0], *cases[1]), cases[1][:1]
    return Line(f"{GROUP}_bias", title, every, quick, SUBJECT, EFFICIENT, 1.2)


LINES = (
    _lengths(FORWARD, 1.15),
    _lengths(BACKWARD, 1.1),
    *(_dropout(phase) for phase in (FORWARD, BACKWARD)),
    *(_float32(phase) for phase in (FORWARD, BACKWARD)),
    _bias(),
)


def lines(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The table's lines, cells as in HEADS; a line without outcomes is left out."""
    found = []
    for line in LINES:
        mine = [o for o in outcomes if o.suite == line.name]
        if mine:
            columns = ([o.ratio for o in mine if column(o.case) == where] for where in COLUMNS)
            cells = [two(geometric_mean(ratios)) for ratios in columns]
            found.append([line.title, line.against, *cells, _all(line, mine),
                          two(geometric_mean([o.also for o in mine])), rates(mine),
                          two(most_error(mine))])  # fmt: skip
    return found


def _all(line: Line, outcomes: Sequence[Outcome]) -> str:
    """As in "1.21 (1.15; 3 of 24 below)"."""
    missed = sum(missing(o.ratio, line.least) for o in outcomes)
    below = f"; {missed} of {len(outcomes)} below" if missed else ""
    return f"{two(geometric_mean([o.ratio for o in outcomes]))} ({line.least}{below})"


def tables(outcomes: Sequence[Outcome]) -> list[Cells]:
    """The one there is."""
    return [(HEADS, lines(outcomes))]


BOARD = Board(GROUP, BACKEND, LINES, Rounds(7, 30, 0.3), tables, SAID)
