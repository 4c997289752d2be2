"""`nosquare bench tune`: the plans of one backend, side by side, each checked first.

A plan is a pure function of problem and device, and nothing is tuned while a user waits: what a
backend's tables say was searched here, and a record says how it came out. The first contestant of
a case is the plan that plan() gives today. A second round times what follows from the first, as
the fastest tiles of several passes together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import records
from ..backends import BACKWARD, FORWARD, Backend, discover, named
from ..errors import ArgumentError, UnsupportedError
from ..inputs import Inputs
from ..problem import Problem
from . import ahead, record, tuned
from .cases import FLOP_CONVENTION, Case, mask_arrays
from .clocks import Clock, CudaClock, HostClock
from .contestants import Contestant
from .cpu import WIDTH
from .screen import progress
from .tiled import planned
from .timing import Result, Rounds, Tick, measure, pose

if TYPE_CHECKING:
    from rich.console import Console

KIND, SUITE, AGAIN = "tune", "tune", "tune, second round"
FULL, QUICK = Rounds(7, 40, 1.5, few=3), Rounds(3, 20, 0.3)
GUESSES = 12  # plans of a case, with --quick: the first that the backend names
TOKENS, HIDDEN = 16384, 2048  # of the default cases, as in FlashAttention's papers


@dataclass
class Search:
    """One case and its plans, today's first.

    known   plans by their words
    failed  why a plan cannot run, by its words: its kernels do not compile
    """

    case: Case
    problem: Problem
    phase: str
    name: str
    backend: Backend
    known: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(case: Case, name: str, device: torch.device) -> Search:
        """Raises ArgumentError for a case of two phases, UnsupportedError where the backend does
        not run it or has no choice of plans."""
        backend = named(name)
        if case.phase == "forward+backward":
            raise ArgumentError(
                "A plan is for one phase: forward or backward.",
                {"case": case},
                f'"{replace(case, phase="backward")}".',
            )
        if not hasattr(backend, "plans"):
            some = [name for name, one in discover().items() if hasattr(one, "plans")]
            raise UnsupportedError(
                "This backend has one plan for a problem: there is nothing to search.",
                {"backend": name, "with several": ", ".join(some) or "none"},
                f"--backend {some[0]}." if some else "",
            )
        return Search.today(case, name, device)

    @staticmethod
    def today(case: Case, name: str, device: torch.device) -> Search:
        """A case of one phase with today's plan alone. Raises UnsupportedError where the backend
        does not run it."""
        backend, problem = named(name), replace(case.problem(), device=device)
        phases = (FORWARD, BACKWARD) if case.phase == BACKWARD else (FORWARD,)
        if why := [w for phase in phases for w in backend.refusals(problem, phase)]:
            raise UnsupportedError(
                f"{name} does not run this case here.",
                {"case": case, "device": device, "because": "; ".join(dict.fromkeys(why))},
                "`nosquare doctor`, which says what runs here.",
            )
        found = Search(case, problem, phases[-1], name, backend)
        today = backend.plan(problem, found.phase)
        found.known[str(today)] = today
        return found

    def more(self, most: int | None = None, timed: Sequence[Any] = ()) -> list[str]:
        """Learn other plans, or what follows from those timed, fastest first; the new ones."""
        found: Any = self.backend
        plans = {str(one): one for one in found.plans(self.problem, self.phase, timed)}
        new = [words for words in plans if words not in self.known][:most]
        self.known |= {words: plans[words] for words in new}
        return new

    def contestants(self, words: Sequence[str]) -> list[Contestant]:
        """These plans; those that do not compile refuse."""
        return [self._contestant(one) for one in words]

    def _contestant(self, words: str) -> Contestant:
        def plan_of(p: Problem, phase: str) -> Any:
            if words in self.failed:
                raise UnsupportedError(self.failed[words])
            return self.known[words] if phase == self.phase else self.backend.plan(p, phase)

        return planned(tuned.label(self.name, words), self.name, plan_of)


def bench_tune(
    cases: Sequence[str] = (),
    backend: str = "triton_any",
    quick: bool = False,
    path: Path | None = None,
    keep: bool = True,
) -> int:
    """Time the plans that a backend thinks worth it beside the one it takes today; print tables.

    cases  lines of the grammar in bench/cases.py; (): bfloat16 of 16,384 tokens, hidden width 2,048
    quick  few default cases, plans and rounds
    path   a .jsonl file to append the records to; None: docs/records/tune.jsonl
    keep   append them

    Returns 0 when no plan's answer was wrong and today's plans were timed, else 1.
    Raises ArgumentError for a case, a backend or a path that is none; UnsupportedError where the
    backend does not run a case, or has one plan.
    """
    lines = [Case.parse(line) for line in cases or default_cases(quick)]
    file = _file(path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock: Clock = CudaClock() if device.type == "cuda" else HostClock()
    searches = [Search.of(case, backend, clock.device) for case in lines]
    for one in searches:
        one.more(GUESSES if quick else None)
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    around, begun = records.surroundings(clock.device), time.perf_counter()
    results, fine, built = list[Result](), True, dict[Hashable, str]()
    console.print(
        f"{backend} on {_where(around)}, torch {around['software']['torch']}, triton "
        f"{around['software']['triton'] or 'none'}.\nTimes: medians of {clock.words()['clock']}. "
        f"today/this: above 1, faster than the plan of today.\nFLOP: {FLOP_CONVENTION}"
    )
    compile_ahead(console, searches, built)
    with progress(console, len(searches)) as (tick, step):
        for one in searches:
            step(str(one.case))
            found = list[Result]()
            for result in rounds_of(one, QUICK if quick else FULL, tick, clock, built):
                if keep:  # at once: what an interrupted run measured is kept
                    line = {**record.of(result, around), "kind": KIND}
                    records.append(file.parent, file.stem, [line], record.SCHEMA)
                tuned.show(console, result)
                found.append(result)
            results.append(found[-1])
            fine = fine and all(map(right, found))
    tuned.summary(console, results)
    console.print(f"It took {(time.perf_counter() - begun) / 60:.1f} minutes.")
    if keep:
        console.print(f"Records: {file.name}")
    return int(not fine)


def right(result: Result) -> bool:
    """Whether today's plan was timed, and no plan was wrong."""
    wrong = any(entry.refused.startswith("wrong") for entry in result.entries)
    return bool(result.entries[0].samples_us) and not wrong


def default_cases(quick: bool) -> list[str]:
    """What the tables of a card need; quick: one length, causal."""
    masks, lengths = ("causal(end)", "full()"), (1024, 4096, 16384)
    return [
        f"{phase} bfloat16 B{TOKENS // n} Hq{HIDDEN // d} Hk{HIDDEN // d} M{n} N{n} D{d} {mask}"
        for phase in (FORWARD, BACKWARD)
        for d in (64, 128)
        for n in (lengths[1:2] if quick else lengths)
        for mask in (masks[:1] if quick else masks)
    ]


def _file(path: Path | None) -> Path:
    """Where the records go. Raises ArgumentError for a name that is no file of records."""
    if path is not None and path.suffix != ".jsonl":
        raise ArgumentError(
            "Records are kept in a file of JSON lines.",
            {"record": path},
            f"--record {path.with_suffix('.jsonl')}.",
        )
    return path or records.folder() / f"{KIND}.jsonl"


def _where(around: dict[str, Any]) -> str:
    machine = around["machine"]
    return str(machine["gpu"]["name"] if machine["gpu"] else machine["cpu"])


def rounds_of(
    one: Search, rounds: Rounds, tick: Tick, clock: Clock, built: dict[Hashable, str]
) -> Iterator[Result]:
    """A case with all its plans; and again, with what follows from how they fared.

    built  as in compile_plans
    """
    try:
        posed = pose(one.case, clock)
        asked = one.contestants([*one.known])
        first = measure(one.case, asked, rounds, tick, SUITE, clock, posed)
        yield first
        order = [tuned.words_of(entry) for entry in tuned.ranked(first)]
        new = one.more(timed=[one.known[words] for words in order]) if order else []
        if new:
            compile_plans([(one, words) for words in new], tick, built)
            again = one.contestants([*dict.fromkeys([next(iter(one.known)), order[0], *new])])
            yield measure(one.case, again, rounds, tick, AGAIN, clock, posed)
    finally:
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()  # the next case finds the card empty


# ---- compilation ----


def compile_ahead(console: Console, searches: Sequence[Search], built: dict[Hashable, str]) -> None:
    """Compile the kernels of all plans, and say how long it took."""
    begun = time.perf_counter()
    with progress(console, 1) as (tick, step):
        step("compile")
        compile_plans([(one, words) for one in searches for words in one.known], tick, built)
    if built:
        failed = sum(map(bool, built.values()))
        words = f"; {failed} do not compile" if failed else ""
        took = time.perf_counter() - begun
        console.print(f"Compiled {len(built)} kernels in {took:.0f} s{words}.")


def compile_plans(
    plans: Sequence[tuple[Search, str]], tick: Tick, built: dict[Hashable, str]
) -> None:
    """Compile what these plans need, each kernel once; those that fail are noted with their
    searches. Backends without builds() compile as they run.

    built  the kernels compiled so far, and why some could not be; the new ones are added
    """
    jobs: dict[Hashable, Callable[[], Any]] = {}
    need: list[tuple[Search, str, list[Hashable]]] = []
    for one, words in plans:
        builds = getattr(one.backend, "builds", None)
        if builds is not None:
            found = builds(one.problem, one.known[words], one.phase, stand_ins(one.case))
            jobs |= {name: job for name, job in found.items() if name not in built}
            need.append((one, words, [*found]))
    if jobs:
        built |= dict.fromkeys(jobs, "") | ahead.build(jobs, tick=tick)
    for one, words, names in need:
        if reasons := dict.fromkeys(built[name] for name in names if built[name]):
            one.failed[words] = " ".join(reasons)


def stand_ins(case: Case) -> Inputs:
    """What a case has beside q, k and v, without numbers: on the meta device."""
    c = case

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bias = None if c.bias_shape is None else empty(*c.bias_shape, dtype=c.dtype)
    sinks, alibi = (empty(c.Hq) if there else None for there in (c.sinks, c.alibi))
    seed = empty(dtype=torch.int64) if c.dropout else None
    arrays = tuple(t.to("meta") for t in mask_arrays(c, torch.Generator()))
    cu = empty(c.B + 1, dtype=torch.int32) if c.packed else None
    return Inputs(empty(0), empty(0), empty(0), bias, sinks, alibi, seed, cu, cu, arrays)
