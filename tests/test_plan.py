"""What is said before the run: who would run, workspace as receipts name it, `nosquare plan`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

import nosquare as ns
from helpers import case, force_tiles, forget, rnd
from nosquare import device as devices
from nosquare.cli import app
from nosquare.cost import Cost
from nosquare.device import Device, by_card_name, describe, known, measured
from nosquare.errors import ArgumentError
from nosquare.estimate import contiguous, cost
from nosquare.pairs import Pairs
from nosquare.plan import plan

MILLION = 1 << 20
LINE = "forward+backward bfloat16 B1 Hq8 Hk2 M512 N512 D64 causal(end)"
SIZES = {"B": 1, "Hq": 8, "Hk": 2, "M": 512, "N": 512, "D": 64, "E": 64}


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# ---- workspace ----------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ns.Causal()},
    "softcap": {"softcap": 2.0, "mask": ns.Window(9, 9)},
    "dropout": {"dropout": ns.Dropout(0.3, seed=1)},
    "lengths": {"mask": ns.Lengths(torch.tensor([5, 50]))},
    "bias": {"bias": rnd(4, 37, 53)},
    "bias of one row": {"bias": rnd(2, 1, 1, 53), "sinks": rnd(4)},
    "one sink": {"sinks": rnd(1), "softcap": 1.0},
    "sinks of each entry": {"sinks": rnd(2, 4)},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16, "e": 24},
    "many heads": {"hq": 12, "hk": 3, "batch": (3, 2), "softcap": 1.0},
    "a decoding step": {"m": 1, "hq": 8},
    "nothing": {"m": 0, "softcap": 1.0},
}


@pytest.mark.parametrize("tiles", [None, 16])
@pytest.mark.parametrize("name", OPTIONS)
def test_workspace_is_what_the_receipt_then_names(
    name: str, tiles: int | None, monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    force_tiles(monkeypatch, tiles)
    c = case(**OPTIONS[name])
    leaves = {n: t.clone().requires_grad_() for n, t in c.tensors().items()}
    options = {**c.options, **leaves}
    problem = ns.explain(**options).problem
    found = cost(problem, arrays=getattr(c.options.get("mask"), "tensors", ()))
    with ns.receipts() as log:
        ns.attention(**options).sum().backward()
    said = [
        [e.bytes for e in one.ledger.entries if e.name == "workspace"]
        for one in (found.forward, found.backward)
        if one is not None
    ]
    assert said == [[r.workspace_bytes] for r in log]
    assert [r.backend in note for r, note in zip(log, _who(found), strict=True)] == [True, True]


def _who(found: Cost) -> list[str]:
    return [note for note in found.notes if note.startswith("Here ")]


def inside(call: Any) -> int:
    """Bytes that torch's allocator has out at the peak of a call, beyond what it keeps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        kept = call()
    out = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            out += event.nbytes()
            peak = max(peak, out)
    return peak - sum(t.numel() * t.element_size() for t in kept)


@pytest.mark.parametrize(
    ("dtype", "m", "n", "mask", "token_major"),
    [(torch.float32, 300, 300, ns.Causal(), False), (torch.float32, 300, 300, ns.Causal(), True),
     (torch.float32, 800, 900, ns.Full(), False), (torch.float64, 40, 700, ns.Full(), True),
     (torch.bfloat16, 300, 300, ns.Full(), False), (torch.float32, 1, 700, ns.Full(), False),
     (torch.float16, 800, 100, ns.Causal("start"), False)],
)  # fmt: skip
def test_torchs_kernel_takes_what_torch_fused_says(
    dtype: torch.dtype, m: int, n: int, mask: ns.Mask, token_major: bool, two_threads: None
) -> None:
    """Its source lays the buffers out; torch's profiler sees them."""
    x = [rnd(2, h, s, 32, dtype=dtype) for h, s in ((4, m), (2, n), (2, n))]
    if token_major:
        x = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
    with ns.receipts() as log:
        ns.attention(*x, mask=mask, backend="torch_fused")
    assert log[0].workspace_bytes is not None
    lse_bytes = 4 * 2 * 4 * m * (2 if dtype == torch.float64 else 1)
    assert (
        inside(lambda: [ns.attention(*x, mask=mask, backend="torch_fused")])
        == log[0].workspace_bytes + lse_bytes
    )
    if dtype in (torch.bfloat16, torch.float16):
        return  # it has no backward of them
    x = [t.requires_grad_() for t in x]
    o = ns.attention(*x, mask=mask, backend="torch_fused")
    do = torch.ones_like(o)
    with ns.receipts() as log:
        torch.autograd.grad(o, x, do, retain_graph=True)
    seen = inside(lambda: torch.autograd.grad(o, x, do, retain_graph=True))
    assert seen == log[0].workspace_bytes


def test_the_lengths_of_packed_sequences_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    cu = torch.tensor([0, 4, 9])
    with ns.receipts() as log:
        ns.attention_varlen(*(rnd(9, 2, 4, seed=s) for s in range(3)), cu, cu)
    found = cost(log[0].problem)
    assert found.pairs == Pairs(2 * 9 * 9, False)
    assert not [e for e in found.forward.ledger.entries if e.role == "workspace"]
    assert "The workspace is not known before the run, and not in the ledger." in found.notes
    assert "lengths of the packed sequences are not given" in str(found).replace("\n  ", " ")


# ---- who would run, and where -------------------------------------------------------------------


def test_tiles_are_those_of_the_plan_or_as_asked() -> None:
    p = contiguous(SIZES, torch.float64, "causal(end)", softcap=1.0)
    found = cost(p)
    assert found.device == describe("cpu")
    assert found.forward.traffic is not None
    assert found.forward.traffic.tiling.source == "torch_any's plan"
    assert found.forward.traffic.tiling.rows == 4 * (512 // 4)
    assert "  not torch_fused: it has no softcap" in found.notes
    assert "  not llvm_cpu: it computes in float32, and these are float64" in found.notes
    asked = cost(p, "cpu", tiles=(32, 64)).forward.traffic
    assert asked is not None
    assert (asked.tiling.rows, asked.tiling.tile_n) == (32, 64)
    far = cost(p, "h200")
    assert far.device is known("h200")
    assert far.notes == (
        "There is no NVIDIA H200 in this machine, so no backend was asked: traffic and workspace "
        "are those of a fused kernel with the tiles that are named.",
    )
    assert cost(p, torch.device("cpu")).device == cost(p, describe("cpu")).device


def test_each_pass_has_the_tiles_of_who_runs_it() -> None:
    """torch_fused, which does not tell its tiles, has no gradient of a bias."""
    p = contiguous(SIZES, torch.float64, grads="qkvb", bias=(512, 512))
    found = cost(p)
    assert "runs on torch_fused" in found.notes[0]
    assert found.forward.traffic is not None
    assert "fast memory" in found.forward.traffic.tiling.source
    assert found.backward is not None
    assert found.backward.traffic is not None
    assert found.backward.traffic.tiling.source == "torch_any's plan"


def test_training_may_be_asked_of_a_problem_without_gradients() -> None:
    p = contiguous(SIZES, torch.float32)
    assert cost(p).backward is None
    found = cost(p, phase="training").backward
    assert found is not None
    assert [e.name for e in found.ledger.entries if e.role == "output"] == ["dq", "dk", "dv"]
    assert cost(p, "h200", phase="training").backward is not None


def test_a_card_that_is_here_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(
        name="NVIDIA H200", multi_processor_count=131, total_memory=7, major=9, minor=0,
        shared_memory_per_block_optin=232448, L2_cache_size=62914560,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    card = describe("cuda:0")
    assert (card.units, card.memory_bytes, card.features) == (131, 7, ("sm_90",))
    assert (card.fast_bytes, card.cache_bytes) == (227 * 1024, 60 << 20)
    assert card.bandwidth == known("h200").bandwidth
    assert card.source == "datasheet"
    facts.name = "NVIDIA H200 NVL"
    assert describe("cuda:0").bandwidth == 0.0
    assert describe("cuda:0").source == "unknown"


def test_facts_of_cards() -> None:
    for name in ("h100", "h200", "a100", "b200", "l40s", "rtx4090", "mi300x"):
        card = known(name)
        assert by_card_name(card.name) is card
        assert card.source == "datasheet"
        assert card.peak_flops["bfloat16"] == card.peak_flops["float16"]
        # a wrong power of ten is out of these
        assert 8e11 <= card.bandwidth <= 1e13
        assert 1e14 <= card.peak_flops["bfloat16"] <= 1e16
        assert 64 << 10 <= card.fast_bytes <= 256 << 10
        assert 20 << 30 <= card.memory_bytes <= 200 << 30
    assert by_card_name("NVIDIA H100 PCIe") is None
    assert known("cpu") == describe("cpu")
    assert hash(known("h200")) != hash(known("h100"))
    ridge = known("h200").peak_flops["bfloat16"] / known("h200").bandwidth
    assert round(ridge) == 206  # flops for a byte


def test_caches_of_a_cpu(tmp_path: Path) -> None:
    def cache(cpu: int, index: int, level: int, kind: str, size: str, shared: str) -> None:
        folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        words = {"level": level, "type": kind, "size": size, "shared_cpu_list": shared}
        for name, word in words.items():
            (folder / name).write_text(f"{word}\n")

    for cpu in range(4):
        cache(cpu, 0, 1, "Data", "32K", str(cpu))
        cache(cpu, 1, 1, "Instruction", "64K", str(cpu))
        cache(cpu, 2, 2, "Unified", "2048K", str(cpu))
        cache(cpu, 3, 3, "Unified", "16384K", "0-1" if cpu < 2 else "2-3")
    assert devices._cpu_caches(tmp_path) == (2 << 20, 32 << 20)
    assert devices._cpu_caches(tmp_path / "nowhere") == (0, 0)


def test_rates_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.5, 0.25, 0.125])
    monkeypatch.setattr(devices, "_best_seconds", lambda work, device: next(seconds))
    devices._measured.cache_clear()
    try:
        found = measured("cpu")
        assert measured("cpu") is found
        assert found.source == "measured here"
        assert found.bandwidth == 2 * 4 * (1 << 26) / 0.5
        assert found.peak_flops == {"float32": 2**31 / 0.25, "bfloat16": 2**31 / 0.125}
    finally:
        devices._measured.cache_clear()


@pytest.mark.gpu
def test_a_real_card_is_known_and_measured() -> None:
    card, seen = describe("cuda"), measured("cuda")
    print(f"\n{card}\nmeasured {seen.bandwidth:.4g} bytes/s, {dict(seen.peak_flops)}")
    assert card.fast_bytes >= 48 << 10
    assert card.cache_bytes >= 1 << 20
    assert set(seen.peak_flops) == {"float32", "bfloat16"}
    if card.source == "datasheet":
        assert 0.7 < seen.bandwidth / card.bandwidth <= 1
        assert 0.5 < seen.peak_flops["bfloat16"] / card.peak_flops["bfloat16"] <= 1
        assert 0.5 < seen.peak_flops["float32"] / card.peak_flops["float32"] <= 1
    q = torch.randn(2, 8, 300, 64, device="cuda", requires_grad=True)
    problem = ns.explain(q, q, q, softcap=2.0).problem
    with ns.receipts() as log:
        ns.attention(q, q, q, softcap=2.0).sum().backward()
    found = cost(problem)
    assert found.backward is not None
    for one, receipt in zip((found.forward, found.backward), log, strict=True):
        said = [e.bytes for e in one.ledger.entries if e.name == "workspace"]
        assert said == [receipt.workspace_bytes]


# ---- the command --------------------------------------------------------------------------------


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_account_fits_a_terminal_and_says_what_each_number_is() -> None:
    text = run(LINE, "--device", "h200")
    assert max(len(line) for line in text.splitlines()) <= 80
    for words in (
        "problem   B=1 Hq=8 Hk=2 M=512 N=512 D=64 E=64 bfloat16 mask causal(end)",
        "device    NVIDIA H200, 132 units, 4.80 TB/s, bfloat16 989.40 TFLOP/s (datasheet)",
        "phase     training",
        "pairs     exactly 1,050,624 visible, 50.1% of B x Hq x M x N",
        "a floor, not a forecast",
        "moves, by a model (192 rows x 128 keys)",
        "moves, by a model (64 rows x 128 keys; dq by atomic adds)",
        "FlashAttention paper",
        "Algorithm 4, a model; S = 116,224",
        "a lower bound; S = 247,296",
        "squares                 8.00 MiB  scores 4.00 MiB, probabilities 4.00 MiB",
    ):
        assert words in text, words


def test_json_holds_the_same() -> None:
    found = json.loads(run("decode float16 B2 Hq32 Hk8 M1 N131072 D128 full()", "--device", "a100",
                           "--json"))  # fmt: skip
    assert found["phase"] == "decode"
    assert found["backward"] is None
    assert found["pairs"] == {"count": 2 * 32 * 131072, "exact": True}
    cache = 2 * 8 * 131072 * 128 * 2
    assert found["forward"]["compulsory_bytes"] == 2 * cache + 2 * (2 * 32 * 128 * 2)
    assert found["device"]["peak_flops"]["float16"] == 312e12
    ledger = found["forward"]["ledger"]
    assert {"name": "v (cache)", "bytes": cache, "role": "input"} in ledger["entries"]
    assert found["forward"]["traffic"]["tiling"]["splits"] == 108 // 16


def test_a_million_tokens_are_planned_without_arrays() -> None:
    sizes = f"B1 Hq32 Hk8 M{MILLION} N{MILLION} D128"
    text = run(f"forward bfloat16 {sizes} dense(t0)&causal(end)", "--device", "b200")
    assert f"at most {32 * MILLION * (MILLION + 1) // 2:,} visible" in text
    assert "an upper bound." in text
    text = run(f"forward bfloat16 {sizes} full()", "--device", "h200", "--phase", "training",
               "--tiles", "192x64")  # fmt: skip
    assert "192 rows x 64 keys; dq by atomic adds" in text


def test_features_reach_the_problem() -> None:
    from nosquare.bench.cases import Case

    words = "forward float32 B1 Hq8 Hk8 M64 N64 D16 E8 full() dropout=0.1 softcap=3.0 bias=Hq,1,N"
    p = Case.parse(f"{words} alibi sinks").problem(True)
    assert (p.E, p.p, p.softcap, p.bias) == (8, 0.1, 3.0, (8, 1, 64))
    assert (p.alibi, p.sinks, p.grads) == ((8,), (8,), "qkvbs")


def test_a_cpu_is_measured_and_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Device("cpu", "a processor", 2, 0, (), 1 << 20, 1 << 25, 1e10, {"float64": 1e11},
                   "measured here")  # fmt: skip
    monkeypatch.setattr("nosquare.plan.measured", lambda word: facts)
    plan(LINE.replace("bfloat16", "float64"), "cpu")
    text = capsys.readouterr().out
    assert "a processor, 2 units, 10.00 GB/s, float64 100.00 GFLOP/s (measured" in text
    assert "Here forward runs on torch_fused: torch's flash attention for CPUs, causal." in text
    assert "torch_fused does not tell its tiles: the largest usual ones are assumed." in text


REFUSED = {
    (LINE, "h300"): """There are no facts about a device of that name.
  device  'h300'
  known   h100, h200, a100, b200, l40s, rtx4090, mi300x, cpu
  Try: device="h200", or device="cuda" for the card in this machine.""",
    (LINE, "h200", "later"): """There is no such phase.
  phase   'later'
  phases  training, prefill, decode
  Try: --phase decode, or leave it out.""",
    (LINE, "h200", None, "128"): """Tiles are rows by keys, two positive counts.
  tiles  '128'
  Try: --tiles 128x128.""",
    (LINE, "h200", None, None, False, True): """Only a device of this machine can be measured.
  device  'h200'
  Try: --device cpu or --device cuda.""",
    (LINE, "cuda:77"): """torch does not see this device.
  device      cuda:77
  torch says  there is no card
  Try: device="cpu", or a card by its short name, as "h200": it need not be here.""",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_words_are_refused(words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_card(device: torch.device) -> None:
        raise RuntimeError("there is no card\nof that number")

    monkeypatch.setattr(torch.cuda, "get_device_properties", no_card)
    with pytest.raises(ArgumentError) as caught:
        plan(*words)
    assert str(caught.value) == REFUSED[words]


def test_a_phase_is_one_of_three() -> None:
    with pytest.raises(ArgumentError) as caught:
        cost(contiguous(SIZES, torch.float32), "h200", phase="serving")
    assert str(caught.value) == (
        "There is no such phase.\n"
        "  phase   'serving'\n"
        "  phases  training, prefill, decode\n"
        "  Try: phase=None: it is read off the problem."
    )
