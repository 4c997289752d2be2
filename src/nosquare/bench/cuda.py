"""`nosquare bench cuda`: nosquare and everybody else, side by side on this card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import records
from ..errors import ArgumentError, UnsupportedError
from . import held, line, record, table
from .cases import FLOP_CONVENTION, Case
from .clocks import Clock, CudaClock
from .contestants import Contestant
from .peers import contestants, named
from .screen import progress
from .timing import Result, Rounds, Tick, measure

if TYPE_CHECKING:
    from rich.console import Console

FEW = "nosquare,torch,torch:cudnn,torch:flash,fa3,flash_attn"
MANY = f"{FEW},torch:efficient,torch:math"
WITH_FLEX = f"{MANY},flex"  # which compiles for some 10 s a case
FULL, QUICK = Rounds(7, 100, 1.2), Rounds(3, 40, 0.4)


@dataclass(frozen=True)
class Suite:
    """Cases that belong together, and who is asked unless --peers says otherwise.

    subject  whose answers have to be right
    """

    title: str
    cases: tuple[str, ...]
    quick: tuple[str, ...]
    peers: str = MANY
    rounds: Rounds = FULL
    subject: str = table.OURS


def _long(phase: str, dtype: str = "bfloat16") -> tuple[str, ...]:
    """16,384 tokens, hidden width 2,048: the sizes that FlashAttention's papers report."""
    return (
        f"{phase} {dtype} B2 Hq16 Hk16 M8192 N8192 D128 full()",
        f"{phase} {dtype} B1 Hq16 Hk16 M16384 N16384 D128 causal(end)",
        f"{phase} {dtype} B2 Hq32 Hk32 M8192 N8192 D64 full()",
        f"{phase} {dtype} B1 Hq32 Hk32 M16384 N16384 D64 causal(end)",
    )


_SHORT = "B16 Hq16 Hk16 M1024 N1024 D128 causal(end)"
_BOTH = "forward+backward bfloat16"
_GROUPED = "B1 Hq32 Hk8 M8192 N8192 D128"
_MIDDLE = "B4 Hq16 Hk16 M4096 N4096 D64"
SUITES = {
    "prefill": Suite(
        "prefill: forward, bfloat16",
        (*_long("forward"), "forward bfloat16 B2 Hq8 Hk8 M8192 N8192 D256 full()",
         f"forward bfloat16 {_SHORT}"),
        _long("forward")[:2],
    ),
    "training": Suite(
        "training: forward and backward, bfloat16",
        (*_long("forward+backward"), f"{_BOTH} {_SHORT}"),
        _long("forward+backward")[1:2],
    ),
    "decode": Suite(
        "decoding: one query (rates are GB/s of k and v)",
        ("decode bfloat16 B1 Hq32 Hk8 M1 N131072 D128 full()",
         "decode bfloat16 B16 Hq32 Hk8 M1 N16384 D128 full()",
         "decode bfloat16 B64 Hq32 Hk8 M1 N4096 D128 lengths(t0)"),
        ("decode bfloat16 B16 Hq32 Hk8 M1 N16384 D128 full()",),
    ),
    "dropout": Suite(
        "dropout 0.1",
        (f"{_BOTH} {_MIDDLE} full() dropout=0.1", f"{_BOTH} {_MIDDLE} causal(end) dropout=0.1"),
        (),
    ),
    "bias": Suite(
        "additive bias",
        (f"forward bfloat16 {_MIDDLE} full() bias=Hq,M,N",
         f"{_BOTH} {_MIDDLE} causal(end) alibi"),
        (),
        WITH_FLEX,
    ),
    "fp32": Suite(
        "float32, IEEE quality",
        (f"forward float32 {_MIDDLE} full()", f"forward+backward float32 {_MIDDLE} causal(end)"),
        (f"forward float32 {_MIDDLE} full()",),
    ),
    "gqa": Suite(
        "grouped heads",
        (f"forward bfloat16 {_GROUPED} causal(end)", f"{_BOTH} {_GROUPED} causal(end)"),
        (),
        WITH_FLEX,
    ),
    "window": Suite(
        "sliding window of 1,024",
        (f"forward bfloat16 {_GROUPED} causal(end)&window(before=1023,after=0)",
         f"{_BOTH} {_GROUPED} causal(end)&window(before=1023,after=0)"),
        (),
        WITH_FLEX,
    ),
    "varlen": Suite(
        "documents packed into one row, and padded batches",
        (f"forward bfloat16 {_GROUPED} causal(end)&documents(t0,t1)",
         "forward bfloat16 B8 Hq16 Hk16 M2048 N2048 D128 lengths(t0)"),
        (),
        WITH_FLEX,
    ),
}  # fmt: skip
# What backends are held to: asked for by name, not among the suites of a plain run.
HELD = {
    one.name: Suite(one.title, one.cases, one.quick, one.peers, board.rounds, one.subject)
    for board in held.BOARDS
    for one in board.lines
}


def bench_cuda(
    suites: str = "",
    case: str | None = None,
    peers: str = "",
    quick: bool = False,
    keep: bool = True,
    warm: bool = False,
    name: str = "cuda",
) -> int:
    """Compare nosquare with its peers on this card, print tables, keep the evidence.

    suites  names joined by commas, "portable" and "hopper" for those of held.py; "": the others
            (quick: those with a quick case)
    case    one line of the grammar in bench/cases.py, instead of suites
    peers   contestants joined by commas, or "all"; "": those of the suite
    quick   fewer cases and rounds, about a minute
    keep    append the records to docs/records/<name>.jsonl
    warm    leave the inputs in the L2 cache between samples

    Returns 0 when all of nosquare's answers (of the backend's, in held.py) were right, else 1.
    Raises ArgumentError for a case, a suite or a contestant that is not one; UnsupportedError where
    torch sees no card.
    """
    chosen = chosen_suites(suites, case, quick)
    asked = named(peers) if peers else None
    need_cuda()
    from rich.console import Console

    console = Console(highlight=False)
    clock = CudaClock(cold=not warm)
    plan = [(key, suite, [Case.parse(x) for x in (suite.quick if quick else suite.cases)],
             asked or named(suite.peers)) for key, suite in chosen.items()]  # fmt: skip
    around = records.surroundings(clock.device)
    _introduce(console, clock, around)
    for board in held.BOARDS:
        if ahead := [case for key, suite, cases, contenders in plan for case in cases
                     if key in held.GROUPS[board.group]
                     and suite.subject in [c.name for c in contenders]]:  # fmt: skip
            line.compile_ahead(console, board.backend, ahead, clock.device)
    right, path, every = True, None, list[Result]()
    with progress(console, sum(len(cases) for _, _, cases, _ in plan)) as (tick, step):
        for key, suite, cases, contenders in plan:
            results, rounds = [], QUICK if quick else suite.rounds
            for item in cases:
                step(str(item))
                result = _measure(item, contenders, rounds, tick, key, clock)
                if keep:  # at once: what an interrupted run measured is kept
                    kept = record.of(result, around)
                    path = records.append(records.folder(), name, [kept], record.SCHEMA)
                results.append(result)
                right = right and not any(
                    e.refused for e in result.entries if e.contestant == suite.subject
                )
            if key in HELD:
                line.show(console, held.BY_NAME[key], results)
                every += results
            else:
                table.show(console, results, suite.title)
    for board in held.BOARDS:
        if mine := [result for result in every if result.suite in held.GROUPS[board.group]]:
            held.summary(console, board, mine)
    if path is not None:
        console.print(f"\nRecords: docs/records/{path.name}")
    if not right:
        console.print("[red]FAILED[/red] an answer of nosquare is wrong, or it gave none")
    return 0 if right else 1


def _measure(item: Case, contenders: Sequence[Contestant], rounds: Rounds, tick: Tick,
             suite: str, clock: Clock) -> Result:  # fmt: skip
    """One case; what it allocated is given back, so that the next finds the card empty."""
    try:
        return measure(item, contenders, rounds, tick, suite, clock)
    finally:
        torch.cuda.empty_cache()


def chosen_suites(suites: str, case: str | None, quick: bool) -> dict[str, Suite]:
    """The suites asked for by name; or your case as one. Raises ArgumentError."""
    if case is not None:
        if suites:
            raise ArgumentError(
                "A run has one case, or suites, not both.",
                {"suite": suites, "case": case},
                "--case alone.",
            )
        mine = str(Case.parse(case))
        return {"-": Suite("your case", (mine,), (mine,), WITH_FLEX)}
    known, names = SUITES | HELD, list[str]()
    for word in [word.strip() for word in suites.split(",")] if suites else SUITES:
        names += held.GROUPS.get(word, [word])
    if wrong := [name for name in names if name not in known]:
        raise ArgumentError(
            "There is no such suite.",
            {"suite": ", ".join(map(repr, wrong)), "known": ", ".join(SUITES),
             **{group: ", ".join(some) for group, some in held.GROUPS.items()}},
            f"--suite {','.join(list(SUITES)[:3])}.",
        )  # fmt: skip
    empty = [name for name in names if quick and not known[name].quick]
    if suites and empty:
        raise ArgumentError(
            "This suite has no quick cases.",
            {"suite": ", ".join(empty), "quick": ", ".join(n for n in SUITES if SUITES[n].quick)},
            "the same without --quick.",
        )
    return {name: known[name] for name in dict.fromkeys(names) if name not in empty}


def need_cuda() -> None:
    """Raise UnsupportedError where torch sees no card."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "torch sees no CUDA device here.",
            {"torch": torch.__version__, "built for CUDA": torch.version.cuda or "no"},
            "`nosquare bench cpu`, or the same on a machine with an NVIDIA card.",
        )


def _introduce(console: Console, clock: Clock, around: Mapping[str, Any]) -> None:
    card, software, words = around["machine"]["gpu"], around["software"], clock.words()
    limit = f", power limit {card['power_limit_w']:.0f} W" if card["power_limit_w"] else ""
    console.print(
        f"{card['name']} ({card['units']} multiprocessors{limit}), torch {software['torch']}, "
        f"CUDA {software['cuda']}, cuDNN {software['cudnn']}.\nTimes: medians of "
        f"{words['clock']}; caches {words['caches']}. best/this: the best peer's time over this "
        "one's. error: over torch's, against float64. MiB: peak above the inputs. host us: until "
        "a call came back.\n"
        f"FLOP: {FLOP_CONVENTION}"
    )
    console.print(f"Contestants: {', '.join(contestants())}", markup=False)
