"""`nosquare bench cpu`: its cases are the promised ones, and its table says how they fare."""

from __future__ import annotations

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
from nosquare.bench import aims, ceiling, contestants, cpu, cuda, record, report, timing
from nosquare.bench.aims import COLUMNS, NONE, Outcome, Suite, column, error_ratio, lines, missing
from nosquare.bench.cases import Case, Data
from nosquare.bench.ceiling import Ceiling
from nosquare.bench.check import Errors, check, truths
from nosquare.bench.contestants import NOSQUARE, Contestant, answer
from nosquare.bench.peers import TORCH
from nosquare.bench.timing import Entry, Result, Rounds, measure, pose
from nosquare.cli import app

FEW = Rounds(2, 2, 0.0)
BOTH = ("full()", "causal(start)")
F32, BF16 = torch.float32, torch.bfloat16
SHORT, LONG = (128, 256, 512), (1024, 2048, 4096)


# ---- the promise ----


def squares(phase: str, dtype: torch.dtype, tokens: tuple[int, ...], heads: int = 8,
            sizes: tuple[tuple[int, int], ...] = ((64, 64), (128, 128)),
            dropout: float = 0.0) -> Iterator[Case]:  # fmt: skip
    for n, (d, e), mask in product(tokens, sizes, BOTH):
        yield Case(phase, dtype, 1, heads, heads, n, n, d, e, mask, dropout)


def decoding(heads: tuple[int, int], tokens: tuple[int, ...]) -> Iterator[Case]:
    for dtype, n, d in product((F32, BF16), tokens, (64, 128)):
        yield Case("decode", dtype, 1, *heads, 1, n, d, d)


def dense() -> Iterator[Case]:
    for dtype in (F32, BF16):
        yield from squares("forward+backward", dtype, (4096,), 2, dropout=0.1)
        yield from squares("forward+backward", dtype, (4096,), 2, ((64, 128), (128, 64)))


TINY = Case("forward", F32, 1, 1, 1, 16, 16, 64, 64)
# (cases, aims in the order of COLUMNS): the speeds to reach, as they were first written down
PROMISED = {
    "forward_bf16": (squares("forward", BF16, LONG), (1.5, 2.0, 1.2, 1.5)),
    "backward_bf16": (squares("backward", BF16, LONG), (2.2, 2.7, 1.8, 2.2)),
    "training_bf16": (squares("forward+backward", BF16, SHORT), (2.0, 2.0, 1.6, 1.6)),
    "forward_fp32": (squares("forward", F32, (512, *LONG)), (1.0, 1.3, 1.0, 1.1)),
    "backward_fp32": (squares("backward", F32, (512, *LONG)), (1.3, 1.4, 1.1, 1.25)),
    "decode_grouped": (decoding((32, 8), (4096, 16384, 65536)), (3.0, None, 3.0, None)),
    "decode_one": (decoding((1, 1), (65536,)), (1.4, None, 1.3, None)),
    "dense": (dense(), (4.0, 4.0, 4.0, 4.0)),
    "tiny": (
        iter([TINY, replace(TINY, grad=True), replace(TINY, phase="forward+backward")]),
        (0.9, None, None, None),
    ),
}


def test_no_line_of_the_promise_is_left_out() -> None:
    assert [suite.name for suite in aims.SUITES] == list(PROMISED)


@pytest.mark.parametrize("suite", aims.SUITES, ids=lambda suite: suite.name)
def test_cases_and_aims_are_the_promised(suite: Suite) -> None:
    promised, least = PROMISED[suite.name]
    cases = [Case.parse(line) for line in suite.cases]
    expected = list(promised)
    assert len(cases) == len(set(cases))
    assert set(cases) == set(expected)
    assert tuple(suite.aims.get(where) for where in COLUMNS) == least
    assert all(suite.aim(case) is not None for case in cases)
    assert {column(case) for case in cases} <= set(suite.aims)


@pytest.mark.parametrize("suite", [*aims.SUITES, aims.PEAKS], ids=lambda suite: suite.name)
def test_quick_cases_are_of_the_same_kind_and_no_longer(suite: Suite) -> None:
    cases, quick = ([Case.parse(x) for x in xs] for xs in (suite.cases, suite.quick))
    assert 0 < len(quick) <= len(cases)
    assert {c.phase for c in quick} <= {c.phase for c in cases}
    assert {c.dtype for c in quick} <= {c.dtype for c in cases}
    assert max(c.N for c in quick) <= max(c.N for c in cases)
    assert {column(c) for c in quick} <= {column(c) for c in cases}


def test_every_suite_has_a_title_of_its_own() -> None:
    """Records say only the name: one name is one thing, in records of cards too."""
    assert not set(aims.TITLES) & {*cuda.SUITES, *cuda.HELD, "traffic", "-"}
    assert len(set(aims.TITLES.values())) == len(aims.TITLES) == len(aims.SUITES) + 5


# ---- how it went ----


def out(line: str, threads: int, ratio: float, **more: Any) -> Outcome:
    suite, _, case = line.partition(" ")
    said = {"share": math.nan, "error": math.nan, "ran": "llvm_cpu"} | more
    return Outcome(suite, Case.parse(case), threads, ratio, **said)


def test_lines_by_hand() -> None:
    """Means 4 and 2; one of the four ratios is below 2.2, another is not known."""
    start = "backward_bf16 backward bfloat16 B1 Hq8 Hk8"
    short, long = (f"{start} M{n} N{n} D64 full()" for n in (1024, 2048))
    found = lines([
        out(short, 1, 2.0, share=0.253, error=0.5),
        out(long, 1, 8.0, share=0.8, error=0.9, ran="torch_any"),
        out(short, 2, 2.2), out(long, 2, math.nan, ran=""),
        out("decode_one decode float32 B1 Hq1 Hk1 M1 N65536 D128 full()", 2, 1.3, share=0.001),
        out("c forward float32 B1 Hq1 Hk1 M1 N1 D64 full()", 1, 9.0),
    ])  # fmt: skip
    assert found == [
        ["bf16 backward, N 1024 to 4096", "4.00 / 2.20 (2.2; 2 of 4 miss)", NONE, NONE, NONE,
         "25% to 80%", "0.90", "llvm_cpu, torch_any"],
        ["decode, one head, fp32 and bf16, N 65536", NONE, NONE, "- / 1.30 (1.3)", NONE, "<1%",
         NONE, "llvm_cpu"],
    ]  # fmt: skip


def test_what_is_missed() -> None:
    assert missing(1.49, 1.5)
    assert missing(math.nan, 1.5)
    assert not missing(1.5, 1.5)
    assert not missing(0.1, None)


def test_error_ratio_by_hand() -> None:
    case = Case.parse("backward float32 B1 Hq1 Hk1 M8 N8 D8 full()")
    mine, theirs = {"dq": 1.0, "dk": 3.0, "dv": 1.0}, {"dq": 2.0, "dk": 2.0, "dv": 0.0}
    assert error_ratio(case, mine, theirs) == 1.5
    assert math.isnan(error_ratio(case, mine, {}))
    assert math.isnan(error_ratio(replace(case, dropout=0.1), mine, theirs))


def test_share_by_hand() -> None:
    """2e9 flops in 10 ms are half of 400 GF/s; 2 MiB of k and v in 1 ms are 2.1 GB/s."""
    roof = Ceiling(gemm_flops_per_s=4e11, read_bytes_per_s=4.194304e9)
    forward = Case.parse("forward float32 B1 Hq1 Hk1 M8 N8 D8 full()")
    decode = Case.parse("decode float32 B1 Hq1 Hk1 M1 N4096 D64 full()")
    assert roof.share(forward, 2 * 10**9, 1e4) == pytest.approx(0.5)
    assert roof.share(decode, 1, 1000.0) == pytest.approx(0.5)
    assert math.isnan(Ceiling(1.0).share(decode, 1, 1000.0))


def test_a_ceiling_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "SIDE", 16)
    monkeypatch.setattr(ceiling, "READ_BYTES", 4096)
    both, one = ceiling.measured(F32, True), ceiling.measured(BF16, False)
    assert min(both.gemm_flops_per_s, both.read_bytes_per_s or 0, one.gemm_flops_per_s) > 0
    assert one.read_bytes_per_s is None


# ---- the command ----


SMALL = (
    Suite("forward_bf16", "short ones", ("forward bfloat16 B1 Hq2 Hk2 M32 N32 D64 causal(start)",),
          ("forward bfloat16 B1 Hq2 Hk2 M16 N16 D64 full()",), {(64, "causal"): 2.0}),
    Suite("decode_one", "one query", ("decode float32 B1 Hq2 Hk1 M1 N64 D64 full()",), ()),
    Suite("backward_fp32", "gradients", ("backward float32 B1 Hq2 Hk2 M40 N40 D64 full()",),
          ("backward float32 B1 Hq2 Hk2 M16 N16 D64 full()",), {(64, "full"): 999.0}),
)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The command with small suites, few rounds and low ceilings; the folder of its records."""
    for module in (aims, cpu):
        monkeypatch.setattr(module, "SUITES", SMALL)
    monkeypatch.setattr(cpu, "FULL", FEW)
    monkeypatch.setattr(cpu, "QUICK", FEW)
    monkeypatch.setattr(ceiling, "SIDE", 16)
    monkeypatch.setattr(ceiling, "READ_BYTES", 4096)
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    return tmp_path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "cpu", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_command_prints_and_keeps(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table for each line, one for all of them, and a record for each case and thread count."""
    monkeypatch.setattr(cpu, "WIDTH", 300)  # no cell is folded
    threads = torch.get_num_threads()
    code, text = run("--threads", "1", "--threads", "2")
    assert torch.get_num_threads() == threads
    assert code == 0
    for words in ("short ones", "one query", "gradients", "GF/s", "GB/s", "aim", "torch's", "ran",
                  "share of ceiling", "D=64 causal", "(999.0; 2 of 2 miss)", "It took",
                  "Records: docs/records/cpu.jsonl"):  # fmt: skip
        assert words in text, words
    found = records.read(small / "cpu.jsonl")
    assert [(r["suite"], r["machine"]["threads"]) for r in found] == [
        (suite.name, count) for suite in SMALL for count in (1, 2)
    ]
    for one in found:
        assert records.faults(one, record.SCHEMA) == []
        theirs, mine = one["contestants"]
        assert (theirs["name"], mine["name"]) == ("torch", "nosquare")
        assert mine["ran"] in text
        assert {e["what"] for e in mine["errors"]} == {c["what"] for c in mine["checks"]}
        assert one["ceiling"]["gemm_flops_per_s"] > 0
        assert (one["ceiling"]["read_bytes_per_s"] is None) == (one["suite"] != "decode_one")


def test_the_tables_fit_where_there_is_no_terminal(small: Path) -> None:
    _, text = run("--no-record", "--threads", "1,2")
    assert max(map(len, text.splitlines())) <= cpu.WIDTH
    assert "\u2026" not in text


@pytest.mark.parametrize(
    ("phase", "ran"), [("backward", "second"), ("forward+backward", "first + second")]
)
def test_the_timed_phase_says_who_ran(monkeypatch: pytest.MonkeyPatch, phase: str,
                                      ran: str) -> None:  # fmt: skip
    """Where backward alone is timed, who ran forward is in the receipts and not in the table."""
    backends = {"forward": "first", "backward": "second"}

    def told(contestant: Contestant, data: Data) -> contestants.Answer:
        found = answer(contestant, data)
        return found._replace(receipts=[replace(r, backend=backends[r.op]) for r in found.receipts])

    monkeypatch.setattr(timing, "answer", told)
    result = measure(Case.parse(f"{phase} float32 B1 Hq2 Hk2 M40 N40 D64 full()"), [NOSQUARE], FEW)
    (entry,) = result.entries
    assert entry.ran == ran
    assert [r.op for r in entry.receipts] == ["forward", "backward"]


def test_what_is_asked_for(small: Path) -> None:
    def names(*words: str) -> list[str]:
        run("--threads", "1", *words)
        path = small / "cpu.jsonl"
        found = [r["case"] for r in records.read(path)]
        path.unlink()
        return found

    assert names("--only", "D64 causal", "--only", "M40") == [SMALL[0].cases[0], SMALL[2].cases[0]]
    assert names("--quick") == [SMALL[0].quick[0], SMALL[2].quick[0]]
    assert names("--quick", "--only", "forward_bf16") == [SMALL[0].quick[0]]
    assert not (small / "cpu.jsonl").exists()
    assert run("--quick", "--no-record", "--threads", "1")[0] == 0
    assert not (small / "cpu.jsonl").exists()


def spoiled(data: Data) -> contestants.Attend:
    """nosquare, wrong in one number of o, or through the scale of do in its gradients."""
    right = NOSQUARE.attend(data)
    if data.case.wants_grads:
        return lambda: right() * 1.001
    off = torch.zeros(data.do.shape, dtype=data.case.dtype)
    off[-1, -1, -1, -1] = 0.5
    return lambda: right() + off


def test_an_erroneous_contestant_is_not_timed(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CONTESTANTS", (TORCH, Contestant("nosquare", spoiled)))
    monkeypatch.setattr(cpu, "WIDTH", 300)
    code, text = run("--threads", "1")
    assert code == 1
    assert text.count("not timed: nosquare") == 3
    assert "FAILED an answer of nosquare is wrong" in text
    assert "- (2.0; 1 of 1 miss)" in text  # who is not timed misses the aim
    for one in records.read(small / "cpu.jsonl"):
        theirs, mine = one["contestants"]
        assert theirs["samples_us"]
        assert not mine["samples_us"]
        assert mine["refused"].startswith("wrong: ")


def test_options_that_are_wrong(small: Path) -> None:
    for words, sentence, attempt in (
        (("--threads", "0"), "A benchmark needs at least one thread", "--threads 1, or"),
        (("--threads", "1,x"), "A benchmark needs at least one thread", "--threads 1,2."),
        (("--only", "sideways"), "No case of the benchmark has these words.", "--only decode"),
        (("--quick", "--only", "decode_one"), "No case of the benchmark", "--only decode"),
        (("--case", "forward"), "This line is not a benchmark case.", ""),
    ):
        with pytest.raises(ns.ArgumentError) as caught:
            run(*words)
        assert caught.value.sentence.startswith(sentence)
        assert attempt in caught.value.attempt
    assert cpu.thread_counts(["2", "1,2"]) == [2, 1]
    assert cpu.thread_counts(()) in ([1], [1, 2])


def test_peaks_are_asked_for() -> None:
    assert [s.name for s in cpu.chosen(None, (), False, True)][-1] == "c"
    assert "c" not in [s.name for s in cpu.chosen(None, (), False, False)]
    (own,) = cpu.chosen(SMALL[0].cases[0], (), True, False)
    assert (own.name, own.peaks) == ("-", True)


def test_table_says_who_was_not_timed_and_by_what_it_ran() -> None:
    console_module = pytest.importorskip("rich.console")
    case = Case.parse("forward float32 B2 Hq4 Hk2 M33 N47 D8 causal(start) softcap=2.0")
    ours = replace(contestants.nosquare_by("torch_any"), name="nosquare")
    result = measure(case, [TORCH, ours], FEW)
    console = console_module.Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        report.show(console, Suite("-", "a title", (str(case),), ()), [result])
        text = console.export_text()
    assert "not timed: torch" in text
    assert "torch's attention has no softcap." in text
    assert str(case) in text
    assert "torch_any" in text


def test_one_pose_serves_every_number_of_threads() -> None:
    case = Case.parse(SMALL[0].cases[0])
    posed = pose(case)
    first, second = (measure(case, [TORCH, NOSQUARE], FEW, posed=posed) for _ in range(2))
    for one, other in zip(first.entries, second.entries, strict=True):
        assert one.errors == other.errors
        assert isinstance(one.errors[0], Errors)


def test_labels_leave_out_what_is_shared_or_said_twice() -> None:
    def result(line: str, threads: int) -> Result:
        return Result(Case.parse(line), 1, [Entry("torch")], threads=threads)

    start = "forward float32 B1 Hq8 Hk8"
    several = [result(f"{start} M{n} N{n} D64 full()", t) for n in (8, 16) for t in (1, 2)]
    assert report.labels(several) == (f"{start} D64 full()", ["N8", "N8", "N16", "N16"])
    assert report.labels(several[:2]) == ("", [f"{start} M8 N8 D64 full()"] * 2)


# ---- torch's sums in bfloat16 ----


@pytest.mark.parametrize(
    ("line", "roundings"),
    [
        ("backward bfloat16 B1 Hq2 Hk2 M1024 N1024 D16 causal(start)", 2.0),
        ("backward bfloat16 B1 Hq2 Hk2 M256 N512 D16 full()", 2.0),
        ("backward float32 B1 Hq2 Hk2 M1024 N1024 D16 causal(start)", 0.0),
        ("backward bfloat16 B1 Hq2 Hk2 M256 N256 D16 E8 full()", 0.0),  # by its dense path
    ],
)
def test_roundings_of_torchs_sums(line: str, roundings: float) -> None:
    data = Data.of(Case.parse(line))
    assert TORCH.roundings(data) == roundings
    assert NOSQUARE.roundings(data) == 0.0


def test_what_is_allowed_for_sums_is_no_leave_to_be_wrong() -> None:
    """The allowance is said, is about gradients alone, and an off-by-one mask is far beyond it."""
    case = Case.parse("forward+backward bfloat16 B1 Hq2 Hk2 M256 N256 D16 causal(start)")
    data = Data.of(case)

    def shifted(given: Data) -> contestants.Attend:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        keep = torch.ones(given.case.M, given.case.N, dtype=torch.bool).tril(1)
        return lambda: sdpa(given.q, given.k, given.v, keep)

    known = truths(data)
    fair, off = (check(who, data, answer(who, data).out, known)
                 for who in (TORCH, replace(TORCH, attend=shifted)))  # fmt: skip
    assert all(c.ok for c in fair)
    assert not any(c.ok for c in off)
    assert all("may round 2.0 times more" in c.how for c in fair)
    plain = check(NOSQUARE, data, answer(TORCH, data).out, known)
    wider = {c.what: c.bound / p.bound for c, p in zip(fair, plain, strict=True)}
    assert wider.pop("o") == 1.0
    assert all(1.0 < more < 1.5 for more in wider.values())
