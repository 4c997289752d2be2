"""What triton_any is held to on a card: the lines, their cases, how they are asked and counted."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import nosquare as ns
from nosquare import records
from nosquare.bench import cuda, held, line, portable
from nosquare.bench.cases import Case
from nosquare.bench.check import Errors
from nosquare.bench.clocks import HostClock
from nosquare.bench.line import Line, Outcome
from nosquare.bench.peers import named
from nosquare.bench.portable import HEADS, LINES
from nosquare.bench.timing import Entry, Result, Rounds
from nosquare.cli import app

CONSOLE = pytest.importorskip("rich.console")
BF16, F32 = torch.bfloat16, torch.float32
FULL, CAUSAL = "full()", "causal(end)"
BACKWARD = held.BY_NAME["portable_backward"]
LONG = (512, 1024, 2048, 4096, 8192, 16384)


def squares(phase: str, dtype: torch.dtype, tokens: int, lengths: tuple[int, ...], *,
            widths: tuple[int, ...] = (64, 128), masks: tuple[str, ...] = (FULL, CAUSAL),
            **more: Any) -> Iterator[Case]:  # fmt: skip
    """So many tokens in entries of N, heads side by side 2,048 wide."""
    for n, d, mask in product(lengths, widths, masks):
        heads = 2048 // d
        yield Case(phase, dtype, tokens // n, heads, heads, n, n, d, d, mask, **more)


DROPPED: dict[str, Any] = {"widths": (128,), "masks": (FULL,), "dropout": 0.125}
BOTH = "forward+backward"
# cases, the peer, the least mean, and whether cuDNN is asked too
PROMISED = {
    "portable_forward": (squares("forward", BF16, 16384, LONG), "flash", 1.15, True),
    "portable_backward": (squares("backward", BF16, 16384, LONG), "flash", 1.1, True),
    "portable_dropout_forward": (
        squares("forward", BF16, 16384, (8192,), **DROPPED), "flash", 1.1, True),
    "portable_dropout_backward": (
        squares("backward", BF16, 16384, (8192,), **DROPPED), "flash", 1.1, True),
    "portable_float32_forward": (squares("forward", F32, 8192, (4096,)), "efficient", 1.0, False),
    "portable_float32_backward": (squares("backward", F32, 8192, (4096,)), "efficient", 1.0, False),
    "portable_bias": (
        (case for axes in ("B,Hq,M,N", "Hq,M,N")
         for case in squares(BOTH, BF16, 16384, (2048,), masks=(FULL,), bias=axes)),
        "efficient", 1.2, False),
}  # fmt: skip


def test_no_line_of_the_promise_is_left_out() -> None:
    assert [one.name for one in LINES] == list(PROMISED) == held.GROUPS["portable"]


@pytest.mark.parametrize("one", LINES, ids=lambda one: one.name)
def test_cases_peers_and_aims_are_the_promised(one: Line) -> None:
    promised, peer, least, with_cudnn = PROMISED[one.name]
    cases, quick = ([Case.parse(text) for text in texts] for texts in (one.cases, one.quick))
    assert [str(case) for case in cases] == list(one.cases)
    expected = list(promised)
    assert len(cases) == len(set(cases)) == len(expected)
    assert set(cases) == set(expected)
    assert set(quick) <= {*cases, *(replace(c, mask=CAUSAL) for c in cases)}
    assert (one.against, one.least) == (f"torch:{peer}", least)
    asked = [contestant.name for contestant in named(one.peers)]
    assert asked == ["nosquare:triton_any", f"torch:{peer}", *["torch:cudnn"] * with_cudnn]


def test_suites_are_asked_for_by_name_only() -> None:
    assert not set(cuda.chosen_suites("", None, False)) & set(PROMISED)
    assert not set(cuda.SUITES) & set(PROMISED)
    assert list(cuda.chosen_suites("portable", None, False)) == list(PROMISED)
    assert list(cuda.chosen_suites("portable", None, True)) == list(PROMISED)
    chosen = cuda.chosen_suites("portable_bias, decode,portable_bias", None, False)
    assert list(chosen) == ["portable_bias", "decode"]
    suite = chosen["portable_bias"]
    assert (suite.subject, suite.rounds) == ("nosquare:triton_any", portable.BOARD.rounds)


# ---- how it went ----


def out(name: str, n: int, ratio: float, width: int = 64, mask: str = FULL, *,
        also: float = math.nan, tflops: float = math.nan, error: float = math.nan,
        ) -> Outcome:  # fmt: skip
    phase = "backward" if "backward" in name else "forward"
    case = Case.parse(f"{phase} bfloat16 B1 Hq2 Hk2 M{n} N{n} D{width} {mask}")
    return Outcome(name, case, ratio, also, tflops, error)


def test_lines_by_hand() -> None:
    """Means 4 of (2, 8), 0.5, and 2 of all; 1.14 and one that was not timed are below 1.15."""
    found = portable.lines([
        out("portable_backward", 512, 1.1, 128, CAUSAL),
        out("portable_forward", 512, 2.0, also=0.5, tflops=300.4, error=0.9),
        out("portable_forward", 1024, 8.0, also=2.0, tflops=612.0, error=1.25),
        out("portable_forward", 512, 0.5, 128, CAUSAL),
        out("portable_forward", 1024, math.nan, 128, CAUSAL),
    ])  # fmt: skip
    assert [dict(zip(HEADS, cells, strict=True)) for cells in found] == [
        {"case": "bf16 forward, 16,384 tokens, N 512 to 16384", "against": "torch:flash",
         "D=64 full": "4.00", "D=64 causal": "-", "D=128 full": "-", "D=128 causal": "0.50",
         "all": "2.00 (1.15; 2 of 4 below)", "against cuDNN": "1.00", "TFLOP/s": "300 to 612",
         "error over the peer's": "1.25"},
        {"case": "bf16 backward, 16,384 tokens, N 512 to 16384", "against": "torch:flash",
         "D=64 full": "-", "D=64 causal": "-", "D=128 full": "-", "D=128 causal": "1.10",
         "all": "1.10 (1.1)", "against cuDNN": "-", "TFLOP/s": "-", "error over the peer's": "-"},
    ]  # fmt: skip


def entry(name: str, time_us: float | None, rms: float = 1.0, refused: str = "") -> Entry:
    found = Entry(name, [] if time_us is None else [time_us] * 7, refused=refused)
    found.errors = [] if time_us is None else [Errors("dq", 9.0, 9.0, rms, 1.0)]
    return found


def result(*entries: Entry, mask: str = FULL, suite: str = "portable_backward") -> Result:
    """2 * 2^20 pairs: with D 64, 2^20 * 1280 flops."""
    case = Case.parse(f"backward bfloat16 B2 Hq1 Hk1 M1024 N1024 D64 {mask}")
    return Result(case, 2 << 20, list(entries), suite, "cuda")


def test_outcome_by_hand() -> None:
    entries = [entry("nosquare:triton_any", 100.0, 3.0), entry("torch:flash", 150.0, 2.0),
               entry("torch:cudnn", 50.0)]  # fmt: skip
    found = line.outcome(BACKWARD, result(*entries))
    assert found.peer == "torch:flash"
    assert found[2:6] == pytest.approx((1.5, 0.5, (1280 << 20) / 100e6, 1.5))
    for missing in (entries[1:], entries[:1], [entry("nosquare:triton_any", None), *entries[1:]]):
        assert math.isnan(line.outcome(BACKWARD, result(*missing)).ratio)


def test_what_is_printed() -> None:
    console = CONSOLE.Console(width=110, file=io.StringIO(), color_system=None)
    results = [
        result(entry("nosquare:triton_any", 2000.0, 3.0), entry("torch:flash", 3000.0, 2.0)),
        result(entry("nosquare:triton_any", None, refused="wrong: dq"),
               entry("torch:flash", 3000.0), mask=CAUSAL),
    ]  # fmt: skip
    line.show(console, BACKWARD, results)
    text = console.file.getvalue()
    rows = [row.split() for row in text.splitlines() if row.startswith((FULL, CAUSAL))]
    assert rows == [
        [FULL, "2.000", "3.000", "1.50", "1.1", "0.671", "1.50", "7"],
        [CAUSAL, "-", "3.000", "-", "1.1", "-", "-", "7"],
    ]
    assert f"not timed: nosquare:triton_any [{CAUSAL}]: wrong: dq" in text
    held.summary(console, portable.BOARD, results)
    summary = " ".join(console.file.getvalue().split())
    assert "Ratios: the peer's median time over triton_any's" in summary


# ---- the run ----


def test_kernels_are_compiled_ahead_phase_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward needs forward's kernels too; what the backend refuses is left to its refusal."""
    asked: list[str] = []

    def search(case: Case, name: str, device: torch.device) -> str:
        if case.dropout:
            raise ns.UnsupportedError("No.", {}, "")
        asked.append(f"{name} {case.phase}{' grad' * case.grad}")
        return asked[-1]

    given: list[Any] = []
    monkeypatch.setattr(line.Search, "today", staticmethod(search))
    monkeypatch.setattr(line, "compile_searches", lambda *arguments: given.extend(arguments))
    start = "bfloat16 B1 Hq1 Hk1 M8 N8 D64 full()"
    texts = [f"forward {start}", f"{BOTH} {start}", f"backward {start} dropout=0.125"]
    cases = [Case.parse(text) for text in texts]
    line.compile_ahead(None, "triton_any", cases, torch.device("cpu"))  # type: ignore[arg-type]
    assert asked == [
        "triton_any forward",
        "triton_any forward grad",
        "triton_any backward",
    ]
    assert given == [None, asked, {}]


SMALL = "bfloat16 B2 Hq2 Hk2 M64 N64 D64 full()"


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """`nosquare bench cuda` on the CPU, with small lines; the cases that were compiled ahead."""
    given: list[Case] = []
    monkeypatch.setattr(cuda, "need_cuda", lambda: None)
    monkeypatch.setattr(cuda, "CudaClock", lambda cold: HostClock())
    monkeypatch.setattr(cuda, "_introduce", lambda *arguments: None)
    monkeypatch.setattr(line, "compile_ahead", lambda c, name, cases, d: given.extend(cases))
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    text = f"backward {SMALL}"
    small = replace(cuda.HELD["portable_backward"], cases=(text,), rounds=Rounds(2, 2, 0.0))
    monkeypatch.setitem(cuda.HELD, "portable_backward", small)
    prefill = replace(cuda.SUITES["prefill"], cases=(f"forward {SMALL}",), rounds=small.rounds)
    monkeypatch.setitem(cuda.SUITES, "prefill", prefill)
    return given


def test_the_command(ahead: list[Case], tmp_path: Path) -> None:
    """Records under the name that was asked for, and a status that is triton_any's."""
    words = ["bench", "cuda", "--suite", "portable_backward", "--name", "made"]
    asked = CliRunner().invoke(app, [*words, "--peers", "nosquare:triton_any,torch:math"])
    assert asked.exit_code == 1  # it has no kernels for a CPU
    assert "not timed: nosquare:triton_any: " in asked.output
    assert "bf16 backward, 16,384 tokens" in asked.output
    others = CliRunner().invoke(app, [*words, "--peers", "nosquare:torch_any,torch:math"])
    assert others.exit_code == 0
    first, second = records.read(tmp_path / "made.jsonl")
    assert first["suite"] == second["suite"] == "portable_backward"
    assert len(second["contestants"][0]["samples_us"]) == 2
    assert ahead == [Case.parse(f"backward {SMALL}")]  # not where triton_any is not asked


def test_other_suites_run_as_before(ahead: list[Case], capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda.bench_cuda("prefill", peers="nosquare,torch", keep=False) == 0
    assert ahead == []
    text = capsys.readouterr().out
    assert "best peer's time / nosquare's:" in text
    assert portable.SAID[:20] not in text
