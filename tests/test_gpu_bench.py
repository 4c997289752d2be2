"""The benchmark on a card: contestants right at small sizes, refusals in words, records valid."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nosquare import records
from nosquare.bench import contestants, cuda, experiment, ncu, portable, record, traffic
from nosquare.bench.cases import DRAWN_ON_CPU, Case, Data
from nosquare.bench.check import check, truths
from nosquare.bench.clocks import FLUSH_BYTES, CudaClock
from nosquare.bench.contestants import NOSQUARE, Contestant, answer
from nosquare.bench.experiment import Part
from nosquare.bench.line import Line, outcome
from nosquare.bench.peers import named
from nosquare.bench.timing import Result, Rounds, measure

pytestmark = pytest.mark.gpu
FEW = Rounds(least=2, most=2, seconds=0.0)
SIZES = "B2 Hq4 Hk2 M256 N256 D64"
SQUARE = "B2 Hq4 Hk4 M256 N256 D64"


@pytest.fixture(scope="module")
def clock() -> CudaClock:
    return CudaClock()


def ask(clock: CudaClock, line: str, names: str) -> Result:
    return measure(Case.parse(line), named(names), FEW, clock=clock)


WITHOUT_FLEX = (
    "nosquare,nosquare:torch_fused,nosquare:torch_any,nosquare:torch_any@64x96,torch,torch:math,"
    "torch:flash,torch:efficient,torch:cudnn,fa3,flash_attn"
)


@pytest.mark.parametrize("phase", ["forward", "backward", "forward+backward"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mask", ["full()", "causal(end)", "causal(end)&window(before=40,after=0)"])
def test_all_who_answer_are_right(clock: CudaClock, phase: str, dtype: str, mask: str) -> None:
    found = ask(clock, f"{phase} {dtype} {SIZES} {mask}", WITHOUT_FLEX)
    for entry in found.entries:
        assert not entry.refused.startswith(("wrong", "it stopped")), entry
        assert bool(entry.refused) == (not entry.samples_us)
    for name in ("nosquare", "nosquare:torch_any", "nosquare:torch_any@64x96", "torch:math"):
        entry = found.of(name)
        assert len(entry.samples_us) == 2
        assert entry.host_us is not None
        assert entry.warm_up >= 3
        assert entry.peak_bytes is not None


@pytest.mark.parametrize("name", ["torch:flash", "torch:efficient", "torch:cudnn", "torch:math"])
def test_each_of_torchs_kernels_answers(clock: CudaClock, name: str) -> None:
    entry = ask(clock, f"forward+backward bfloat16 {SQUARE} causal(end)", name).entries[0]
    assert not entry.refused
    assert entry.samples_us


def test_a_kernel_that_torch_refuses_says_why(clock: CudaClock) -> None:
    found = ask(clock, f"forward float32 {SQUARE} full()", "torch:flash,torch:cudnn,fa3")
    for name in ("torch:flash", "torch:cudnn"):
        assert found.of(name).refused.startswith("torch refuses: "), found.of(name).refused
    assert found.of("fa3").refused.startswith("FlashAttention-3 ")


@pytest.mark.parametrize("phase", ["forward", "backward", "forward+backward"])
@pytest.mark.parametrize("mask", ["full()", "causal(end)"])
def test_dropout_is_checked_with_its_own_mask(clock: CudaClock, phase: str, mask: str) -> None:
    names = "nosquare,torch,torch:math,torch:flash,torch:efficient,torch:cudnn"
    line = f"{phase} bfloat16 {SQUARE} {mask} dropout=0.1"
    found = ask(clock, line, names)
    for entry in found.entries:
        assert not entry.refused.startswith(("wrong", "it stopped")), entry
    for name in ("nosquare", "torch", "torch:math"):
        assert found.of(name).samples_us


def test_another_rate_is_caught() -> None:
    line = f"forward+backward bfloat16 {SQUARE} full() dropout=0.1"
    data = Data.of(Case.parse(line), "cuda")
    (plain,) = named("torch")

    def attend(given: Data) -> Any:
        case = Case.parse(str(given.case).replace("0.1", "0.3"))
        return plain.attend(Data(case, given.mask, given.q, given.k, given.v, given.do))

    wrong = Contestant("torch", attend, own_dropout=True)
    checks = check(wrong, data, answer(wrong, data).out, truths(data))
    assert not all(c.ok for c in checks)


def test_a_wrong_answer_is_not_timed(clock: CudaClock) -> None:
    def attend(data: Data) -> contestants.Attend:
        right = NOSQUARE.attend(data)
        off = torch.zeros_like(data.do)
        off[-1, -1, -1, -1] = 1.0
        return lambda: right() + off

    case = Case.parse(f"forward bfloat16 {SIZES} full()")
    entry = measure(case, [Contestant("off", attend)], FEW, clock=clock).of("off")
    assert entry.refused.startswith("wrong: o ")
    assert not entry.samples_us


@pytest.mark.parametrize(
    "words",
    ["causal(end) softcap=3.0 sinks", "causal(end) bias=Hq,1,N alibi", "lengths(t0)",
     "causal(start)&documents(t0,t1)", "dense(t0)&lengths(t1)", "blocksparse(t0,block=64)"],
)  # fmt: skip
def test_features_and_masks(clock: CudaClock, words: str) -> None:
    line = f"forward+backward float32 {SIZES} {words}"
    found = ask(clock, line, "nosquare,torch,torch:math,torch:efficient")
    assert found.of("nosquare").samples_us
    for entry in found.entries:
        assert not entry.refused.startswith(("wrong", "it stopped")), entry


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    ["full()", "causal(end)&window(before=40,after=0)", "causal(end)&documents(t0,t1)",
     "causal(end) softcap=3.0 alibi", "full() bias=Hq,M,N"],
)  # fmt: skip
def test_flex_is_right(clock: CudaClock, words: str) -> None:
    entry = ask(clock, f"forward+backward bfloat16 {SIZES} {words}", "flex").entries[0]
    assert not entry.refused
    assert entry.samples_us
    assert {c.what for c in entry.checks} >= {"o", "dq", "dk", "dv"}


@pytest.mark.slow
def test_flex_is_right_without_gradients(clock: CudaClock) -> None:
    """Another program, but of the same mask and scores: one of each."""
    line = f"forward bfloat16 {SIZES} causal(end)&window(before=40,after=0) softcap=3.0"
    entry = ask(clock, line, "flex").entries[0]
    assert not entry.refused
    assert entry.samples_us


@pytest.mark.parametrize("one", portable.LINES, ids=lambda one: one.name)
def test_lines_of_portable_are_answered_by_all_of_their_contestants(
    clock: CudaClock, one: Line
) -> None:
    for text in (one.cases[0], one.cases[-1]):
        case = replace(Case.parse(text), B=2, Hq=4, Hk=4, M=256, N=256)
        found = measure(case, named(one.peers), FEW, clock=clock, suite=one.name)
        for entry in found.entries:
            assert entry.samples_us, entry.refused
            assert {c.what for c in entry.checks} >= ({"dbias"} if case.bias else set())
        assert outcome(one, found).ratio > 0


def test_decoding(clock: CudaClock) -> None:
    line = "decode bfloat16 B2 Hq8 Hk2 M1 N4096 D128 full()"
    found = ask(clock, line, "nosquare,torch,torch:flash,torch:cudnn,torch:math,fa3")
    assert found.of("nosquare").samples_us
    for entry in found.entries:
        assert not entry.refused.startswith("wrong"), entry


def test_small_numbers_are_those_of_the_cpu_and_large_ones_are_not() -> None:
    case = Case.parse(f"forward bfloat16 {SIZES} lengths(t0) bias=Hq,M,N sinks")
    here, there = Data.of(case), Data.of(case, "cuda")
    assert there.drawn == "drawn on the CPU"
    arrays = [(d.q, d.v, d.bias, d.sinks, *d.mask.tensors) for d in (here, there)]
    for a, b in zip(*arrays, strict=True):
        assert a is not None
        assert b is not None
        assert b.is_cuda
        assert torch.equal(a, b.cpu())
    large = Case.parse("forward bfloat16 B1 Hq32 Hk32 M4096 N4096 D64 full()")
    assert large.numel > DRAWN_ON_CPU
    data = Data.of(large, "cuda")
    assert data.drawn == "drawn on the device"
    assert abs(float(data.q.float().std()) - 1) < 1e-2
    assert torch.equal(data.q, Data.of(large, "cuda").q)


def test_the_square_is_seen_in_the_peak(clock: CudaClock) -> None:
    found = ask(clock, "forward float32 B1 Hq4 Hk4 M1024 N1024 D64 full()", "torch:math,nosquare")
    square, mine = (found.of(name).peak_bytes for name in ("torch:math", "nosquare"))
    assert square is not None
    assert mine is not None
    assert square >= 4 * 1024 * 1024 * 4
    assert mine < square


def test_the_cache_is_flushed(clock: CudaClock) -> None:
    """Several times the L2 is written before a sample, unless the inputs are to stay there."""
    assert torch.cuda.get_device_properties(clock.device).L2_cache_size * 2 < FLUSH_BYTES
    assert clock._flush.numel() == FLUSH_BYTES
    assert CudaClock(cold=False)._flush.numel() == 0
    assert clock.words()["caches"].startswith("cold")


def test_a_record_of_a_card_is_valid(clock: CudaClock) -> None:
    found = ask(clock, f"forward bfloat16 {SIZES} full()", "nosquare,torch")
    line = record.of(found, records.surroundings(clock.device))
    assert records.faults(line, record.SCHEMA) == []
    card = line["machine"]["gpu"]
    assert card["name"] == torch.cuda.get_device_name()
    assert line["software"]["cuda"] == torch.version.cuda
    if shutil.which("nvidia-smi"):
        assert card["driver"]
        assert card["power_limit_w"]


def test_clocks_and_power_are_watched(clock: CudaClock) -> None:
    if not shutil.which("nvidia-smi"):
        pytest.skip("no nvidia-smi")
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with clock.watched() as seen:
        for _ in range(40):
            for _ in range(100):
                x @ x
            torch.cuda.synchronize()
            if len(seen._lines) > 2:
                break
    state = seen.summary()
    assert state is not None
    assert state["sm_clock_mhz"]["most"] > 0
    assert state["power_w"]["most"] > 0


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                     capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    line = f"forward bfloat16 {SIZES} causal(end)"
    assert cuda.bench_cuda(case=line, peers="nosquare,torch,torch:math", quick=True) == 0
    (kept,) = records.read(tmp_path / "cuda.jsonl")
    assert (kept["case"], kept["device"], len(kept["contestants"])) == (line, "cuda", 3)
    text = capsys.readouterr().out
    assert "TFLOP/s" in text
    assert "best peer's time / nosquare's:" in text


def test_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = "float32 B1 Hq2 Hk1 M{n} N{n} D64 causal(end)"
    tiny = [Part("training with dropout", f"forward+backward {small} dropout=0.1", (256,),
                 [(64, 64), (256, 256)])]  # fmt: skip
    monkeypatch.setattr(experiment, "parts", lambda device, dtype, quick: tiny)
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    assert experiment.bench_experiment("cuda", True) == 0
    rows = records.read(tmp_path / "experiment.jsonl")
    assert [row["tile_m"] for row in rows] == [64, 256]
    assert all(row["peak_bytes"] for row in rows)


@pytest.mark.slow
def test_bytes_by_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding step must read k and v from memory, and reads little else."""
    if not shutil.which("ncu"):
        pytest.skip("no ncu")
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    case = Case.parse("decode bfloat16 B1 Hq32 Hk8 M1 N16384 D128 full()")
    # one child under ncu, which takes longer to start than to count; it says so where that is long
    monkeypatch.setattr(ncu, "LIMIT_SECONDS", 80)
    assert traffic.bench_traffic(str(case), "cuda", "torch:flash") == 0
    (kept,) = records.read(tmp_path / "cuda.jsonl")
    assert kept["suite"] == "traffic"
    (one,) = kept["contestants"]
    assert one["checks"]
    moved = one["traffic"]
    assert case.cache_bytes * 0.9 < moved["dram_read_bytes"] < case.cache_bytes * 1.5
    assert moved["kernels"]
    assert moved["l2_bytes"] > case.cache_bytes * 0.9
