"""`nosquare bench tune`: which plans are asked, that each is checked, what is chosen and kept."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import nosquare as ns
from nosquare import backends, records
from nosquare.backends import torch_any
from nosquare.backends.torch_any.tiling import Plan
from nosquare.bench import ahead, record, tune, tuned
from nosquare.bench.cases import Case, Data
from nosquare.bench.check import Check
from nosquare.bench.timing import Entry, Result, Rounds
from nosquare.cli import app
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem
from nosquare.report.evidence import Book

CONSOLE = pytest.importorskip("rich.console")
LINE = "forward float32 B1 Hq4 Hk2 M24 N24 D8 causal(end)"
BACKWARD = LINE.replace("forward", "backward")
TODAY, OTHER, WRONG, STUCK, UNBUILT = (Plan(n, n, heads=2, entries=1) for n in (8, 12, 16, 20, 24))
BOTH = Plan(12, 8, heads=2, entries=1)  # what follows from the others
PLANS = [OTHER, WRONG, STUCK, UNBUILT]


class Fake:
    """torch_any with five plans: one gives a wrong answer, one stops, one does not compile."""

    RANK = 999
    backward = staticmethod(torch_any.backward)

    def __init__(self, plans: Sequence[Plan] = PLANS) -> None:
        self.others, self.timed = plans, list[Plan]()

    def refusals(self, problem: Problem, phase: str) -> list[str]:
        return ["it has no sinks"] if problem.sinks else []

    def plan(self, problem: Problem, phase: str) -> Plan:
        return TODAY

    def plans(self, problem: Problem, phase: str, timed: Sequence[Plan] = ()) -> Sequence[Plan]:
        self.timed += timed
        return [BOTH, OTHER] if timed else self.others

    def builds(self, problem: Problem, plan: Plan, phase: str, x: Inputs) -> Mapping[Any, Any]:
        return {plan: partial(int, "no number" if plan == UNBUILT else "1")}

    def forward(self, problem: Problem, plan: Plan, x: Inputs) -> Any:
        if plan == STUCK:
            raise RuntimeError("out of resource: shared memory")
        o, lse, ran = torch_any.forward(problem, plan, x)
        return (o + 1 if plan == WRONG else o), lse, ran


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake()
    every = {"torch_any": torch_any, "fake": found}
    for module in (backends, tune):
        monkeypatch.setattr(module, "discover", lambda: every)
    monkeypatch.setattr(tune, "QUICK", Rounds(2, 2, 0.0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return found


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Jobs are done in this process; how many, each time."""
    counts: list[int] = []

    def build(jobs: Mapping[Any, Callable[[], Any]], tick: Any) -> dict[Any, str]:
        counts.append(len(jobs))
        return {name: why for name, job in jobs.items() if (why := ahead._run(job))}

    monkeypatch.setattr(ahead, "build", build)
    return counts


def words(result: Mapping[str, Any]) -> list[str]:
    return [c["name"] for c in result["contestants"]]


def named(plan: Plan) -> str:
    return f"nosquare:fake@{plan}"


# ---- the search ----


def test_all_plans_are_checked_then_timed(
    fake: Fake, here: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    assert tune.bench_tune([LINE], "fake", quick=True, path=path) == 1  # one is wrong
    first, second = records.read(path)
    assert records.faults(first, record.SCHEMA) == records.faults(second, record.SCHEMA) == []
    assert (first["kind"], first["suite"], first["case"]) == ("tune", "tune", LINE)
    assert words(first) == [named(plan) for plan in (TODAY, *PLANS)]
    by_plan = dict(zip((TODAY, *PLANS), first["contestants"], strict=True))
    for plan, one in by_plan.items():
        timed = plan in (TODAY, OTHER)
        assert (len(one["samples_us"]), bool(one["refused"])) == (
            (2, False) if timed else (0, True)
        )
        assert [r["plan"] for r in one["receipts"]] == [str(plan)] * (timed or plan == WRONG)
    assert by_plan[WRONG]["refused"].startswith("wrong: o error")
    assert by_plan[STUCK]["refused"] == "it stopped: out of resource: shared memory"
    assert "does not compile: ValueError: invalid literal" in by_plan[UNBUILT]["refused"]
    # the second round: today's plan, the fastest, and what follows from those timed
    assert set(fake.timed) == {TODAY, OTHER}
    assert second["suite"] == "tune, second round"
    fastest = fake.timed[0]
    assert words(second) == [*dict.fromkeys([named(TODAY), named(fastest), named(BOTH)])]
    assert here == [5, 1]  # what was compiled is not compiled again
    text = capsys.readouterr().out
    assert "Compiled 5 kernels in 0 s; 1 do not compile." in text
    assert "not timed: tiles 20 x 20" in text
    assert "Records: mine.jsonl" in text


def test_backward_is_timed_with_the_forward_of_today(
    fake: Fake, here: list[int], tmp_path: Path
) -> None:
    fake.others = [OTHER]
    path = tmp_path / "tune.jsonl"
    assert tune.bench_tune([BACKWARD], "fake", quick=True, path=path) == 0
    first = records.read(path)[0]
    for plan, one in zip((TODAY, OTHER), first["contestants"], strict=True):
        assert [c["what"] for c in one["checks"]] == ["dq", "dk", "dv"]
        ran = {r["op"]: r["plan"] for r in one["receipts"]}
        assert ran == {"forward": str(TODAY), "backward": str(plan)}


def test_nothing_is_kept_unless_asked(
    fake: Fake, here: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    fake.others = []
    assert tune.bench_tune([LINE], "fake", quick=True, keep=False) == 0
    assert list(tmp_path.iterdir()) == []
    assert tune.bench_tune([LINE], "fake", quick=True) == 0
    book = Book.read(tmp_path)  # its plans are no contestants of a report
    assert (len(book.of_kind("tune")), book.bench) == (2, ())


def test_the_command_passes_on_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tune, "bench_tune", lambda *given: told.append(given) or 1)
    run = partial(CliRunner().invoke, app)
    assert run(["bench", "tune"]).exit_code == 1
    words = [LINE, BACKWARD, "--backend", "fake", "--quick", "--record", "a.jsonl", "--no-record"]
    assert run(["bench", "tune", *words]).exit_code == 1
    assert told == [
        ((), "triton_any", False, None, True),
        ([LINE, BACKWARD], "fake", True, Path("a.jsonl"), False),
    ]


def test_the_default_cases_are_cases() -> None:
    lines = tune.default_cases(False)
    assert len(lines) == len(set(lines)) == 24
    assert set(tune.default_cases(True)) < set(lines)
    for line in lines:
        case = Case.parse(line)
        assert str(case) == line
        assert (case.B * case.M, case.Hq * case.D) == (16384, 2048)


@pytest.mark.parametrize("more", ["", "softcap=3.0 sinks", "alibi dropout=0.1", "bias=Hq,1,N"])
@pytest.mark.parametrize("mask", ["full()", "causal(end)&lengths(t0)", "documents(t0,t1)"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_plans_are_made_for_the_problem_that_runs(phase: str, mask: str, more: str) -> None:
    case = Case.parse(f"{phase} float32 B2 Hq4 Hk2 M24 N30 D8 {mask} {more}".strip())
    data, stand_ins = Data.of(case), tune.stand_ins(case)
    seed = torch.tensor(0) if case.dropout else None
    x = Inputs(data.q, data.k, data.v, data.bias, data.sinks, data.alibi, seed,
               arrays=data.mask.tensors)  # fmt: skip
    spec = Spec(str(data.mask), None, case.softcap, case.dropout)
    real = Problem.of(x, spec, ns.ops.wanted(x))
    assert replace(case.problem(), device=torch.device("cpu")) == real
    for mine, theirs in zip(
        (*stand_ins[3:7], *stand_ins.arrays), (*x[3:7], *x.arrays), strict=True
    ):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.device.type == "meta"
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


# ---- refusals ----


@pytest.mark.parametrize(
    ("line", "backend", "text"),
    [
        (LINE.replace("forward", "forward+backward"), "fake",
         "A plan is for one phase: forward or backward.\n  case  forward+backward float32 B1 Hq4 "
         f'Hk2 M24 N24 D8 causal(end)\n  Try: "{BACKWARD}".'),
        (LINE, "torch_any",
         "This backend has one plan for a problem: there is nothing to search.\n  backend       "
         "torch_any\n  with several  fake\n  Try: --backend fake."),
        (f"{LINE} sinks", "fake",
         f"fake does not run this case here.\n  case     {LINE} sinks\n  device   cpu\n  because  "
         "it has no sinks\n  Try: `nosquare doctor`, which says what runs here."),
    ],
)  # fmt: skip
def test_refusals_are_in_words(fake: Fake, line: str, backend: str, text: str) -> None:
    with pytest.raises(ns.errors.NosquareError) as error:
        tune.bench_tune([line], backend)
    assert str(error.value) == text


def test_what_is_no_case_no_backend_and_no_record(fake: Fake) -> None:
    with pytest.raises(ns.ArgumentError, match="not a benchmark case"):
        tune.bench_tune(["x"], "fake")
    with pytest.raises(ns.ArgumentError, match="no backend of that name"):
        tune.bench_tune([LINE], "x")
    with pytest.raises(ns.ArgumentError) as error:
        tune.bench_tune([LINE], "fake", path=Path("a.json"))
    assert str(error.value) == (
        "Records are kept in a file of JSON lines.\n  record  a.json\n  Try: --record a.jsonl."
    )


# ---- compilation ahead ----


@pytest.mark.slow
def test_a_compiler_that_dies_takes_nobody_along() -> None:
    jobs = {
        "right": partial(int, "1"),
        "dies": partial(os._exit, 3),
        "wrong": partial(int, "x"),
        "right too": partial(int, "2"),
    }
    assert ahead.build(jobs, workers=2) == {
        "dies": "its compiler ended the process.",
        "wrong": "it does not compile: ValueError: invalid literal for int() with base 10: 'x'",
    }


# ---- what is chosen, and how it is shown ----


def result(*times: float | None) -> Result:
    names = [tuned.label("fake", f"card: plan {n}") for n in range(len(times))]
    entries = [
        Entry(name, [] if t is None else [t], refused="No." if t is None else "",
              checks=[Check("o", 1.0, 2.0, "float64")])
        for name, t in zip(names, times, strict=True)
    ]  # fmt: skip
    return Result(Case.parse(LINE), 10**6, entries, "tune")


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ((10.0, 9.0, 8.0), 2),
        ((10.0, 9.95), 0),  # by so little no plan is changed
        ((10.0, 20.0), 0),
        ((None, 20.0), 1),
        ((None, None), None),
    ],
)
def test_the_fastest_is_chosen(times: tuple[float | None, ...], chosen: int | None) -> None:
    r = result(*times)
    assert tuned.chosen(r) is (None if chosen is None else r.entries[chosen])


def printed(show: Callable[[Any], None]) -> list[str]:
    console = CONSOLE.Console(width=80, file=io.StringIO(), highlight=False, color_system=None)
    show(console)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_a_table_has_the_fastest_and_the_one_of_today() -> None:
    slow = result(90.0, *(float(n) for n in range(50, 69)), None, None)
    lines = printed(lambda console: tuned.show(console, slow))
    # 2 * 1e6 * (8 + 8) flops in 50 us
    rows = [line for line in lines if line.startswith("plan ")]
    assert rows[0] == "plan us TFLOP/s today/this"
    assert rows[1] == "plan 1 50.0 0.640 1.80 chosen"
    assert [row.split()[1] for row in rows[1:]] == [*map(str, range(1, 9)), "0"]
    assert rows[-1] == "plan 0 90.0 0.356 1.00 today"
    assert "not timed: plan 20 and 1 more: No." in lines


def test_the_summary_says_what_to_take() -> None:
    none = replace(result(None), case=Case.parse(LINE.replace("D8", "D16")))
    lines = printed(lambda console: tuned.summary(console, [result(9.0, 6.0), none]))
    assert "D8 plan 1 0.006 5.3 1.50" in lines
    assert "D16 none was timed" in lines
    assert printed(lambda console: tuned.summary(console, [])) == []
