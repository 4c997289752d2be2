"""Measured receipts: time, memory and kernels as the profiler saw them, and rates against what was
predicted; what cannot be measured says why; the published JSON; the printed page."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import profile

import nosquare as ns
from helpers import case, rnd
from nosquare import device, measure, receipt, records

CPU = torch.device("cpu")
FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


def leaves(m: int = 48, n: int = 48) -> list[Tensor]:
    c = case((1,), hq=2, hk=2, m=m, n=n)
    return [t.requires_grad_() for t in (c.q, c.k, c.v)]


def train(**options: Any) -> ns.receipt.Log:  # type: ignore[name-defined]
    with ns.receipts(measure=True) as log:
        ns.attention(*leaves(), **options).sum().backward()
    return log


# ---- what was seen ----


def test_the_profiler_confirms_the_kernels() -> None:
    forward, backward = train(backend="torch_fused")
    assert forward.measured.kernels == (FUSED,)
    assert f"{FUSED}_backward" in backward.measured.kernels
    assert forward.agrees is backward.agrees is True
    assert f"saw        {FUSED}\n" in str(forward)


def test_tiles_show_the_operators_that_did_the_work() -> None:
    forward, backward = train(softcap=2.0, backend="torch_any")
    for r, operators in ((forward, "baddbmm_ exp_ tanh_"), (backward, "baddbmm_ exp_ addmm_")):
        assert {f"aten::{name}" for name in operators.split()} <= set(r.measured.kernels)
        assert r.agrees is None  # "torch tiles" is of no family: nothing to compare
        assert not any("view" in name or "empty" in name for name in r.measured.kernels)


@pytest.mark.parametrize("backend", ["torch_fused", "llvm_cpu"])
def test_peak_is_outputs_and_workspace(backend: str) -> None:
    """Two numbers from two places: the profiler's allocations, and what the backend says."""
    if backend == "llvm_cpu":
        pytest.importorskip("llvmlite", reason="llvm_cpu generates code with llvmlite")
    forward, _ = train(backend=backend)
    outputs_bytes = 2 * 48 * 16 * 4 + 2 * 48 * 4  # o and lse in float32
    assert forward.measured.peak_bytes == outputs_bytes + forward.workspace_bytes


def test_peak_of_known_allocations() -> None:
    def work() -> list[Tensor]:
        a = torch.ones(3000)  # 12,000 bytes
        b = torch.ones(10_000)  # 52,000: the peak
        del b  # 12,000
        return [a, torch.ones(1000)]  # 16,000

    with ns.receipts(measure=True):
        _, sight = measure.watched(work, CPU)
    assert sight is not None
    assert sight.peak_bytes == 52_000


def test_time_is_that_of_the_call() -> None:
    with ns.receipts(measure=True):
        start = time.perf_counter()
        _, sight = measure.watched(lambda: time.sleep(0.03), CPU)
        around_us = (time.perf_counter() - start) * 1e6
    assert sight is not None
    assert sight.time_us is not None
    assert 30_000 <= sight.time_us <= around_us


def test_results_are_those_of_an_unmeasured_call() -> None:
    for options in ({}, {"softcap": 1.0}, {"dropout": ns.Dropout(0.5, 3)}):
        found = []
        for measured in (None, False, True):
            x = leaves()
            if measured is None:
                ns.attention(*x, **options).square().sum().backward()
            else:
                with ns.receipts(measure=measured):
                    ns.attention(*x, **options).square().sum().backward()
            found.append([t.grad for t in x])
        for others in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


# ---- rates ----


def test_rates_are_prediction_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(device.describe("cpu"), bandwidth=1e9, peak_flops={"float32": 1e9})
    monkeypatch.setattr(measure, "describe", lambda _: facts)
    forward, backward = train(mask=ns.Causal())
    pairs = 2 * 48 * 49 // 2
    inputs, o, lse = 3 * 2 * 48 * 16 * 4, 2 * 48 * 16 * 4, 2 * 48 * 4
    for r, flops in ((forward, 2 * pairs * 32), (backward, 2 * pairs * 80)):
        seconds = r.measured.time_us / 1e6
        assert r.predicted.pairs.exact
        assert r.measured.flops_per_s * seconds == pytest.approx(flops)
        moved = r.prediction().compulsory_bytes
        assert r.measured.bytes_per_s * seconds == pytest.approx(moved)
        assert r.measured.roofline_share * seconds == pytest.approx(max(flops, moved) / 1e9)
    assert forward.prediction().compulsory_bytes == inputs + o + lse


def test_without_known_rates_there_is_no_roofline() -> None:
    forward, _ = train()
    assert forward.measured.roofline_share is None
    assert "no roofline: the device's rates are not known" in forward.measured.how


def test_measured_calls_count_the_pairs_of_arrays() -> None:
    keep = rnd(48, 48, seed=5) > 0
    q, k, v = leaves()
    for measured in (False, True):
        with ns.receipts(measure=measured) as log:
            ns.attention(q, k, v, mask=ns.Dense(keep))
        counted = log[0].predicted.pairs
        expected = 2 * (int(keep.sum()) if measured else 48 * 48)
        assert (counted.count, counted.exact) == (expected, measured)
        assert ("at most" in str(log)) is not measured


def test_higher_derivatives_are_measured_without_rates() -> None:
    x = leaves(9, 9)
    with ns.receipts(measure=True) as log:
        (g,) = torch.autograd.grad(ns.attention(*x).sum(), x[0], create_graph=True)
        g.sum().backward()
    assert [r.op for r in log] == ["forward", "backward", "second derivative"]
    seen = log[2].measured
    assert seen.time_us > 0
    assert seen.flops_per_s is seen.roofline_share is None
    assert "no rates: the flops of a higher derivative are not modelled" in seen.how
    assert "nothing is said of higher derivatives" in str(log[2])


# ---- what cannot be measured says so, and breaks nothing ----


def test_under_another_profiler_there_is_time_alone() -> None:
    with profile() as theirs, ns.receipts(measure=True) as log:
        ns.attention(*leaves(), backend="torch_fused")
    seen = log[0].measured
    assert seen.time_us > 0
    assert (seen.peak_bytes, seen.kernels) == (None, ())
    assert seen.how.startswith("perf_counter; no kernels and no memory: another profiler was on")
    assert "no kernels" in str(log)
    assert FUSED in {e.name for e in theirs.events()}  # and theirs saw all of it


def test_a_profiler_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("busy\nmore")

    monkeypatch.setattr(torch.autograd.profiler.profile, "__enter__", fail)
    forward, backward = train()
    for r in (forward, backward):
        assert r.measured.time_us > 0
        assert "; no kernels and no memory: the profiler did not start: busy;" in r.measured.how
    monkeypatch.undo()
    assert train(backend="torch_fused")[0].agrees is True


def test_a_captured_graph_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of CUDA is touched but the question: this machine has none."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    session = measure.Session(torch.device("cuda"))
    session.begin()
    sight = session.end()
    assert sight == (None, None, (), "not measured: a CUDA graph is being captured")


def test_other_devices_have_no_clock() -> None:
    session = measure.Session(torch.device("meta"))
    session.begin()
    assert session.end().how == "not measured: a meta device has no clock that is known here"


def test_a_call_inside_a_measured_call() -> None:
    def outer() -> Any:
        return measure.watched(lambda: 1, CPU)

    with ns.receipts(measure=True):
        (_, inner), sight = measure.watched(outer, CPU)
    assert inner.how == "not measured: it is part of a call that is being measured"
    assert sight is not None
    assert sight.time_us is not None


def test_a_call_that_raises_frees_the_profiler() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with ns.receipts(measure=True) as log:
        with pytest.raises(ZeroDivisionError):
            measure.watched(fail, CPU)
        ns.attention(*leaves())
    assert log[0].measured.kernels == (FUSED,)


def test_a_receipt_survives_a_prediction_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no such problem\nmore")

    monkeypatch.setattr(measure.Cost, "of", fail)
    forward, _ = train()
    assert forward.measured.how.endswith("; no rates: no such problem")
    assert forward.measured.flops_per_s is None


def test_threads_take_turns() -> None:
    def work() -> None:
        ns.attention(*leaves()).sum().backward()

    with ns.receipts(measure=True) as log:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert len(log) == 8
    for r in log:
        assert r.measured.kernels[-1].startswith(FUSED)
        assert sum(name.startswith("aten::_scaled") for name in r.measured.kernels) == 1


def test_one_measuring_log_measures_for_all() -> None:
    with ns.receipts() as outer:
        ns.attention(*leaves())
        with ns.receipts(measure=True) as inner:
            ns.attention(*leaves())
    assert [r.measured is None for r in outer] == [True, False]
    assert outer[1] is inner[0]
    assert (outer.measure, inner.measure) == (False, True)


def test_the_profiler_says_nothing_on_the_screen() -> None:
    """torch 2.13's writes two lines for every session, unless it is told in time."""
    code = (
        "import torch, nosquare as ns\nq = torch.ones(1, 1, 4, 8)\n"
        "with ns.receipts(measure=True) as log: ns.attention(q, q, q)\n"
        "print(log[0].measured.kernels[-1])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout.strip(), ran.stderr) == (FUSED, "")


# ---- JSON ----


def test_json_keeps_the_published_schema() -> None:
    q, k, v = leaves()
    with ns.receipts(measure=True) as log:
        ns.attention(q, k, v, softcap=1.0).sum().backward()
        (g,) = torch.autograd.grad(ns.attention(q, k, v).sum(), q, create_graph=True)
        g.sum().backward()
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(48, 48).bool())
    with ns.receipts() as more:
        ns.attention(q, k, v)
    log += more
    told = json.loads(json.dumps(log.as_json(), allow_nan=False))
    assert records.faults(told, receipt.SCHEMA) == []
    assert (told["schema"], told["kind"], len(told["receipts"])) == (1, "receipts", len(log))
    for r in told["receipts"]:
        assert records.faults(r["measured"], records.Maybe(receipt.MEASURED)) == []
        assert records.faults(r["predicted"], records.Maybe(receipt.PREDICTED)) == []
    assert [r["measured"] is None for r in told["receipts"]].count(True) == 1
    assert [r["predicted"] is None for r in told["receipts"]].count(True) == 1
    told["receipts"][0].pop("plan")
    assert records.faults(told, receipt.SCHEMA) == ["record.receipts[0].plan is missing"]


# ---- the errors ----


@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_measure_is_a_bool(wrong: Any) -> None:
    with pytest.raises(ns.ArgumentError) as caught:
        ns.receipts(measure=wrong)
    assert str(caught.value) == (
        f"measure is True or False.\n  measure  {wrong!r}\n  Try: ns.receipts(measure=True)."
    )
    assert not receipt.LOGS
