"""The tables that gluon_sm90 is held to on Hopper cards (line.py says what a line is).

Forward and backward are a grid each: a case in each cell, against the best of the peers in that
cell. What is behind stands out in it, and a letter says who is ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..receipt import BACKWARD, FORWARD
from .aims import missing
from .line import (
    CUDNN,
    EFFICIENT,
    FA3,
    FLASH,
    FLEX,
    Board,
    Cells,
    Line,
    Outcome,
    most_error,
    rates,
    squares,
)
from .timing import Rounds
from .tune import HIDDEN, TOKENS
from .words import NONE, geometric_mean, two

BACKEND, GROUP = "gluon_sm90", "hopper"
SUBJECT = f"nosquare:{BACKEND}"
PEERS = {FA3: "FlashAttention-3", CUDNN: "cuDNN", FLASH: "torch's flash",
         EFFICIENT: "torch's efficient", FLEX: "FlexAttention"}  # fmt: skip
LETTERS = dict(zip(PEERS, "FCTEX", strict=True))
WIDTHS, MASKS = (64, 128, 256), ("causal(end)", "full()")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BEST = ",".join((FA3, CUDNN, FLASH))
START = "forward bfloat16"
GRID = Line(
    f"{GROUP}_forward",
    f"bf16 forward, {TOKENS:,} tokens, N 512 to 16384",
    squares(FORWARD, "bfloat16", LENGTHS, widths=WIDTHS, masks=MASKS),
    squares(FORWARD, "bfloat16", (1024, 16384), widths=(128,), masks=MASKS[:1]),
    SUBJECT, BEST, least=1.02, each=0.97,
)  # fmt: skip
BACK = Line(
    f"{GROUP}_backward",
    f"bf16 backward, {TOKENS:,} tokens, N 1024 to 16384",
    squares(BACKWARD, "bfloat16", LENGTHS[1:], masks=MASKS),
    squares(BACKWARD, "bfloat16", (1024, 16384), widths=(128,), masks=MASKS[:1]),
    SUBJECT, f"{CUDNN},{FLASH}", least=1.15, each=1.0,
)  # fmt: skip
GRIDS = {GRID: LENGTHS, BACK: LENGTHS[1:]}
_GROUPED = tuple(f"{START} B{b} Hq32 Hk8 M{n} N{n} D128 causal(end)" for b, n in
                 ((2, 8192), (4, 4096)))  # fmt: skip
# flash takes no window, and FlashAttention-3's forward wheel none either: it is asked, and says so
_WINDOW = squares(FORWARD, "bfloat16", (16384,), widths=(128, 64),
                  masks=("window(before=1023,after=0)",))  # fmt: skip
# 24 of them, from a few tens to several thousand; flash gets them as nested tensors
_PACKED = tuple(f"{START} B24 Hq{h} Hk{h} M{TOKENS} N{TOKENS} D{HIDDEN // h} {mask} packed"
                for h in (16, 32) for mask in MASKS)  # fmt: skip
_PADDED = (f"{START} B4 Hq16 Hk16 M4096 N4096 D96 causal(end)",)
LINES = (
    GRID,
    BACK,
    Line(f"{GROUP}_grouped", "bf16 forward, 32 query heads on 8, D 128, causal: N 8192, 4096",
         _GROUPED, _GROUPED[:1], SUBJECT, FA3, 1.0, also=f"{CUDNN},{FLASH}"),
    Line(f"{GROUP}_window", "bf16 forward, window of 1,024, N 16384: D 128, 64",
         _WINDOW, _WINDOW[:1], SUBJECT, f"{CUDNN},{EFFICIENT},{FLEX}", 2.0, also=FA3),
    Line(f"{GROUP}_padded", "bf16 forward, a width that is padded: D 96, causal, N 4096",
         _PADDED, _PADDED, SUBJECT, BEST, None),
    Line(f"{GROUP}_packed",
         f"bf16 forward, packed sequences, {TOKENS:,} tokens, causal and full: D 128, 64",
         _PACKED, _PACKED[:1], SUBJECT, FA3, 1.0, also=FLASH),
)  # fmt: skip
SHORT, SHORT_LEAST = "of the cells above, D 128, causal: N 512, 1024", 1.15
MORE_HEADS = ("further lines", "each case", "mean", "aim", "TFLOP/s", "error over the peer's")
SAID = (
    f"the best peer's median time over {BACKEND}'s, interleaved; the letter is that peer: "
    f"{', '.join(f'{LETTERS[name]} {said}' for name, said in PEERS.items())}. In bold: below its "
    f"aim, or not timed. The grids ({TOKENS:,} tokens, hidden width {HIDDEN:,}) are against "
    f"{', '.join(LETTERS[name] for name in BEST.split(','))}, backward (through autograd) against "
    f"C, T, and aim at {GRID.each} and {BACK.each} in each cell and at {GRID.least} and "
    f"{BACK.least} in the mean; means are geometric. Grouped heads and packed sequences are "
    "against F; the window is against C, E and X. Error over the peer's: rms against float64, the "
    "worst case"
)


def heads(line: Line) -> Sequence[str]:
    """Of the columns of a grid."""
    start, lengths = " ".join(line.cases[0].split()[:2]), GRIDS[line]
    columns = (f"N {n}" for n in lengths)
    return start, *columns, "mean", f"TFLOP/s, N {lengths[-1]}", "error over the peer's"


def grid(outcomes: Iterable[Outcome], line: Line = GRID) -> list[list[str]]:
    """A row for each width and mask, and one of all, cells as in heads(); a row without outcomes is
    left out."""
    mine = [o for o in outcomes if o.suite == line.name]
    found = []
    for width in WIDTHS:
        for mask in MASKS:
            row = [o for o in mine if (o.case.D, o.case.mask) == (width, mask)]
            if row:
                columns = _by_length(row, line)
                cells = (_cells(some, line.aim) for some in columns)
                found.append([f"D={width} {mask.partition('(')[0]}", *cells, _mean(row),
                              rates(columns[-1]), two(most_error(row))])  # fmt: skip
    if found:
        columns = _by_length(mine, line)
        found.append(["all", *map(_mean, columns), _all(mine, line), rates(columns[-1]),
                      two(most_error(mine))])  # fmt: skip
    return found


def _by_length(outcomes: Sequence[Outcome], line: Line) -> list[list[Outcome]]:
    """Those of each column of a grid."""
    return [[o for o in outcomes if n == o.case.N] for n in GRIDS[line]]


def more(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The further lines, cells as in MORE_HEADS; a line without outcomes is left out."""
    short = [
        o
        for o in outcomes
        if (o.suite, o.case.D, o.case.mask) == (GRID.name, 128, MASKS[0]) and o.case.N <= 1024
    ]
    chosen: list[tuple[str, float | None, list[Outcome]]] = [(SHORT, SHORT_LEAST, short)]
    chosen += [(one.title, one.least, [o for o in outcomes if o.suite == one.name])
               for one in LINES if one not in GRIDS]  # fmt: skip
    return [
        [title, _cells(mine, least), _bold(_mean(mine), _ratio(mine), least),
         NONE if least is None else f"{least}", rates(mine), two(most_error(mine))]
        for title, least, mine in chosen if mine
    ]  # fmt: skip


def tables(outcomes: Sequence[Outcome]) -> list[Cells]:
    """Those that have rows."""
    every: list[Cells] = [(heads(line), grid(outcomes, line)) for line in GRIDS]
    every.append((MORE_HEADS, more(outcomes)))
    return [(words, rows) for words, rows in every if rows]


def _ratio(outcomes: Iterable[Outcome]) -> float:
    return geometric_mean([o.ratio for o in outcomes])


def _mean(outcomes: Iterable[Outcome]) -> str:
    return two(_ratio(outcomes))


def _all(outcomes: Sequence[Outcome], line: Line) -> str:
    """As in "1.03 (1.02; 3 of 36 below 0.97)"."""
    missed = sum(missing(o.ratio, line.each) for o in outcomes)
    below = f"; {missed} of {len(outcomes)} below {line.each}" if missed else ""
    return _bold(f"{_mean(outcomes)} ({line.least}{below})", _ratio(outcomes), line.least)


def _cells(outcomes: Iterable[Outcome], aim: float | None) -> str:
    """As in "1.02 F, **0.96 C**"."""
    words = (
        _bold(f"{two(o.ratio)} {LETTERS.get(o.peer, '')}".strip(), o.ratio, aim) for o in outcomes
    )
    return ", ".join(words) or NONE


def _bold(words: str, ratio: float, aim: float | None) -> str:
    return f"**{words}**" if missing(ratio, aim) else words


BOARD = Board(GROUP, BACKEND, LINES, Rounds(9, 40, 0.5), tables, SAID)
