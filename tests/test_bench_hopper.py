"""What gluon_sm90 is held to on a Hopper card: its cases, its peers, and how they are counted."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import nosquare as ns
from nosquare.bench import cuda, held, hopper, line
from nosquare.bench.cases import Case
from nosquare.bench.hopper import BACK, GRID, LINES, MORE_HEADS
from nosquare.bench.line import Outcome
from nosquare.bench.peers import contestants
from nosquare.bench.timing import Entry, Result
from nosquare.bench.tune import Search

CONSOLE = pytest.importorskip("rich.console")
MINE, FULL, CAUSAL = "nosquare:gluon_sm90", "full()", "causal(end)"
WINDOW = "window(before=1023,after=0)"
LONG = (512, 1024, 2048, 4096, 8192, 16384)
BEST = ["fa3", "torch:cudnn", "torch:flash"]
HEADS = hopper.heads(GRID)
FURTHER = [one for one in LINES if one not in hopper.GRIDS]
NAMES = ["hopper_forward", "hopper_backward", "hopper_grouped", "hopper_window", "hopper_padded",
         "hopper_packed"]  # fmt: skip


def case(n: int, d: int, mask: str, b: int | None = None, heads: tuple[int, int] | None = None
         ) -> Case:  # fmt: skip
    """16,384 tokens and heads side by side 2,048 wide, unless told otherwise."""
    hq, hk = heads or (2048 // d, 2048 // d)
    b = 16384 // n if b is None else b
    return Case("forward", torch.bfloat16, b, hq, hk, n, n, d, d, mask)


def test_the_grid_is_36_cases_against_the_best_of_three() -> None:
    assert [one.name for one in LINES] == held.GROUPS["hopper"] == NAMES
    cases = [Case.parse(text) for text in GRID.cases]
    assert [str(one) for one in cases] == list(GRID.cases)
    assert len(cases) == 36
    assert set(cases) == {case(n, d, m) for n, d, m in product(LONG, (64, 128, 256),
                                                               (CAUSAL, FULL))}  # fmt: skip
    assert (GRID.least, GRID.aim, GRID.against.split(",")) == (1.02, 0.97, BEST)
    assert set(GRID.quick) <= set(GRID.cases)


def test_the_grid_of_backward_is_20_cases_against_the_best_of_two() -> None:
    cases = [Case.parse(text) for text in BACK.cases]
    wanted = [replace(case(n, d, m), phase="backward") for n, d, m in
              product(LONG[1:], (64, 128), (CAUSAL, FULL))]  # fmt: skip
    assert {str(one) for one in cases} == {str(one) for one in wanted}
    assert (BACK.least, BACK.aim, BACK.against.split(",")) == (1.15, 1.0, BEST[1:])
    assert set(BACK.quick) <= set(BACK.cases)
    ways = (1024, 1.2, "torch:cudnn"), (2048, 0.99, "torch:flash")
    found = hopper.grid([out(*way, suite=BACK.name) for way in ways], BACK)
    assert dict(zip(hopper.heads(BACK), found[0], strict=True))["N 2048"] == "**0.99 T**"
    assert found[-1][-3] == "**1.09 (1.15; 1 of 2 below 1.0)**"


def test_further_lines_are_the_promised() -> None:
    heads = (32, 8)
    promised = {
        "hopper_grouped": ([case(8192, 128, CAUSAL, 2, heads), case(4096, 128, CAUSAL, 4, heads)],
                           ["fa3"], 1.0),
        "hopper_window": ([case(16384, d, WINDOW) for d in (128, 64)],
                          ["torch:cudnn", "torch:efficient", "flex"], 2.0),
        "hopper_padded": ([case(4096, 96, CAUSAL, 4, (16, 16))], BEST, None),
        "hopper_packed": ([replace(case(16384, d, m, 24), packed=True)
                           for d, m in product((128, 64), (CAUSAL, FULL))], ["fa3"], 1.0),
    }  # fmt: skip
    for name, (cases, against, least) in promised.items():
        one = held.BY_NAME[name]
        assert [Case.parse(text) for text in one.cases] == cases
        assert (one.against.split(","), one.least, one.aim) == (against, least, least)
        assert set(one.quick) <= set(one.cases)
    asked = {name: set(held.BY_NAME[name].peers.split(",")) - {MINE} for name in NAMES}
    assert asked["hopper_grouped"] == set(BEST)
    assert "fa3" in asked["hopper_window"]  # to say why not
    assert asked["hopper_packed"] == {"fa3", "torch:flash"}
    for peers in asked.values():
        assert peers <= set(contestants())
        assert peers <= set(hopper.LETTERS)
    assert all(held.BY_NAME[name].peers.startswith(f"{MINE},") for name in NAMES)


def test_suites_are_asked_for_by_name_only() -> None:
    assert not set(cuda.chosen_suites("", None, False)) & set(NAMES)
    for quick in (False, True):
        chosen = cuda.chosen_suites("hopper", None, quick)
        assert list(chosen) == NAMES
        assert {(one.subject, one.rounds) for one in chosen.values()} == {
            (MINE, hopper.BOARD.rounds)
        }
    both = cuda.chosen_suites("portable,hopper_window", None, False)
    assert list(both) == [*held.GROUPS["portable"], "hopper_window"]


# ---- how it went ----


def out(n: int, ratio: float, peer: str = "fa3", d: int = 128, mask: str = CAUSAL,
        suite: str = "hopper_forward", **more: float) -> Outcome:  # fmt: skip
    numbers = {"also": math.nan, "tflops": math.nan, "error": math.nan} | more
    return Outcome(suite, case(n, d, mask), ratio, peer=peer, **numbers)


def test_the_grid_by_hand() -> None:
    """What is below 0.97 or was not timed is bold: 0.969, though it is said as 0.97, too."""
    found = hopper.grid([
        out(512, 2.0, "torch:cudnn"), out(1024, 0.969, error=0.75),
        out(16384, math.nan, "", error=1.5),
        out(16384, 0.98, d=64, mask=FULL, tflops=600.4, error=1.25),
        out(512, 0.5, "torch:flash", d=64, mask=FULL),
        out(8192, 9.0, suite="hopper_grouped"),
    ])  # fmt: skip
    assert [dict(zip(HEADS, cells, strict=True)) for cells in found] == [
        {"forward bfloat16": "D=64 full", "N 512": "**0.50 T**", "N 1024": "-", "N 2048": "-",
         "N 4096": "-", "N 8192": "-", "N 16384": "0.98 F", "mean": "0.70",
         "TFLOP/s, N 16384": "600", "error over the peer's": "1.25"},
        {"forward bfloat16": "D=128 causal", "N 512": "2.00 C", "N 1024": "**0.97 F**",
         "N 2048": "-", "N 4096": "-", "N 8192": "-", "N 16384": "**-**", "mean": "1.39",
         "TFLOP/s, N 16384": "-", "error over the peer's": "1.50"},
        {"forward bfloat16": "all", "N 512": "1.00", "N 1024": "0.97", "N 2048": "-",
         "N 4096": "-", "N 8192": "-", "N 16384": "0.98",
         "mean": "**0.99 (1.02; 3 of 5 below 0.97)**", "TFLOP/s, N 16384": "600",
         "error over the peer's": "1.50"},
    ]  # fmt: skip


def test_further_lines_by_hand() -> None:
    """The short cases of the grid are counted again, with an aim of their own."""
    found = hopper.more([
        out(512, 1.1), out(1024, 1.3, "torch:cudnn"),
        out(2048, 9.0), out(512, 9.0, d=64), out(512, 9.0, mask=FULL),  # none of the line
        out(8192, 0.5, suite="hopper_grouped", tflops=300.0),
        out(4096, 2.0, suite="hopper_grouped", tflops=400.0, error=1.0),
        out(16384, 1.5, "flex", suite="hopper_window", mask=WINDOW),
        out(4096, 0.5, suite="hopper_padded", d=96),
        out(16384, 1.2, suite="hopper_packed"), out(16384, 0.9, suite="hopper_packed", mask=FULL),
    ])  # fmt: skip
    assert [dict(zip(MORE_HEADS, cells, strict=True)) for cells in found] == [
        {"further lines": hopper.SHORT, "each case": "**1.10 F**, 1.30 C", "mean": "1.20",
         "aim": "1.15", "TFLOP/s": "-", "error over the peer's": "-"},
        {"further lines": FURTHER[0].title, "each case": "**0.50 F**, 2.00 F", "mean": "1.00",
         "aim": "1.0", "TFLOP/s": "300 to 400", "error over the peer's": "1.00"},
        {"further lines": FURTHER[1].title, "each case": "**1.50 X**", "mean": "**1.50**",
         "aim": "2.0", "TFLOP/s": "-", "error over the peer's": "-"},
        {"further lines": FURTHER[2].title, "each case": "0.50 F", "mean": "0.50", "aim": "-",
         "TFLOP/s": "-", "error over the peer's": "-"},
        {"further lines": FURTHER[3].title, "each case": "1.20 F, **0.90 F**", "mean": "1.04",
         "aim": "1.0", "TFLOP/s": "-", "error over the peer's": "-"},
    ]  # fmt: skip
    assert hopper.tables([]) == []
    assert [heads for heads, _ in hopper.tables([out(512, 1.0)])] == [HEADS, MORE_HEADS]
    assert [heads for heads, _ in hopper.tables([out(2048, 1.0)])] == [HEADS]


def result(times_us: dict[str, float | None], mask: str = CAUSAL) -> Result:
    entries = [Entry(name, [] if t is None else [t] * 9, refused="no such kernel" * (t is None))
               for name, t in times_us.items()]  # fmt: skip
    return Result(case(1024, 128, mask), 1 << 30, entries, "hopper_forward", "cuda")


def test_the_fastest_peer_is_the_one_that_counts() -> None:
    times: dict[str, float | None] = {MINE: 100.0, "fa3": None, "torch:cudnn": 90.0,
                                      "torch:flash": 150.0}  # fmt: skip
    found = line.outcome(GRID, result(times))
    assert (found.ratio, found.peer) == (pytest.approx(0.9), "torch:cudnn")
    assert found.tflops == pytest.approx((2 << 30) * 256 / 1e8)
    mine = line.outcome(GRID, result({**times, MINE: None}))
    assert math.isnan(mine.ratio)
    assert mine.peer == "torch:cudnn"
    grouped = line.outcome(FURTHER[0], result({**times, "fa3": 110.0}))
    assert (grouped.ratio, grouped.also) == (pytest.approx(1.1), pytest.approx(0.9))


def test_what_is_printed() -> None:
    console = CONSOLE.Console(width=140, file=io.StringIO(), color_system=None)
    results = [result({MINE: 2000.0, "fa3": 3000.0, "torch:flash": 5000.0}),
               result({MINE: 2000.0, "fa3": 1900.0, "torch:flash": None}, FULL)]  # fmt: skip
    line.show(console, GRID, results)
    text = console.file.getvalue()
    rows = [row.split() for row in text.splitlines() if row.startswith((FULL, CAUSAL))]
    assert [row[1:6] for row in rows] == [["2.000", "3.000", "5.000", "1.50", "0.97"],
                                          ["2.000", "1.900", "-", "0.95", "0.97"]]  # fmt: skip
    assert f"not timed: torch:flash [{FULL}]: no such kernel" in text
    held.summary(console, hopper.BOARD, results)
    summary = console.file.getvalue()[len(text) :]
    assert "*" not in summary  # colours there
    assert "0.95 F" in summary
    assert hopper.SHORT in summary
    words = " ".join(summary.split())
    assert words.count("Ratios: the best peer's median time over gluon_sm90's") == 1


# ---- compilation ----


def test_a_backend_without_a_choice_of_plans_can_be_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """builds() is asked of today's plan; plans() belongs to the search."""

    class Single:
        def refusals(self, problem: Any, phase: str) -> list[str]:
            return ["not that wide"] if problem.D == 256 else []

        def plan(self, problem: Any, phase: str) -> str:
            return f"plan of D {problem.D}"

    monkeypatch.setattr("nosquare.bench.tune.named", lambda name: Single())
    given: list[Search] = []
    monkeypatch.setattr(line, "compile_searches", lambda c, searches, b: given.extend(searches))
    cases = [case(512, d, FULL) for d in (64, 256, 128)]
    line.compile_ahead(None, "single", cases, torch.device("cpu"))  # type: ignore[arg-type]
    assert [[*one.known] for one in given] == [["plan of D 64"], ["plan of D 128"]]
    with pytest.raises(ns.UnsupportedError, match="one plan for a problem"):
        Search.of(cases[0], "single", torch.device("cpu"))
