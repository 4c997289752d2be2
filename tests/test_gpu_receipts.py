"""On an NVIDIA GPU: the kernels that CUPTI saw, for our calls and for those of others, forward and
backward; memory against torch's own count; graphs that are captured while a log measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import nosquare as ns
from helpers import rnd
from nosquare import receipt, records
from nosquare.receipt import family

pytestmark = pytest.mark.gpu
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SDPA = {
    SDPBackend.FLASH_ATTENTION: ("flash attention", "flash"),
    SDPBackend.EFFICIENT_ATTENTION: ("memory-efficient attention", "memory-efficient"),
    SDPBackend.CUDNN_ATTENTION: ("cuDNN attention", "cuDNN"),
    SDPBackend.MATH: ("math path", None),
}


def inputs(m: int = 256, heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    made = [rnd(2, heads, m, 64, seed=s, dtype=dtype).to("cuda") for s in range(3)]
    return [t.requires_grad_() for t in made]


def families(r: ns.Receipt) -> set[str]:
    assert r.measured is not None
    assert r.measured.kernels, "CUPTI saw nothing"
    assert not any("spin_kernel" in name for name in r.measured.kernels)  # that pause is ours
    return {f for name in r.measured.kernels if (f := family(name))}


def complete(r: ns.Receipt) -> None:
    """Every number is there, and holds against the others."""
    seen, expected = r.measured, r.prediction()
    assert seen is not None
    assert expected is not None
    assert seen.time_us is not None
    assert seen.flops_per_s == pytest.approx(expected.flops / seen.time_us * 1e6)
    assert "CUDA events, with the profiler on; allocations and kernels as CUPTI" in seen.how
    if expected.roofline_us is not None:  # a card that the table knows
        assert seen.roofline_share is not None
        assert 0 < seen.roofline_share < 1


@pytest.mark.parametrize("backend", SDPA, ids=lambda b: b.name.lower())
def test_the_kernels_of_torchs_sdpa(backend: SDPBackend) -> None:
    words, expected = SDPA[backend]
    q, k, v = inputs()
    with sdpa_kernel(backend), ns.receipts(measure=True) as log:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    assert [(r.caller, r.op, r.backend) for r in log] == [
        ("torch.sdpa", op, words) for op in ("forward", "backward")
    ]
    for r in log:
        assert families(r) == ({expected} if expected else set())
        assert r.agrees is (True if expected else None)
        complete(r)
        if expected is None:
            assert any("softmax" in name.lower() for name in r.measured.kernels)
    if expected == "cuDNN":
        assert f"cuDNN {torch.backends.cudnn.version()}" in log[0].version
    assert records.faults(log.as_json(), receipt.SCHEMA) == []
    print(log)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_of_our_calls(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype=dtype)
    with ns.receipts(measure=True) as log:
        ns.attention(q, k, v, mask=ns.Causal()).sum().backward()
        ns.attention(q, k, v, softcap=2.0).sum().backward()
    assert [r.op for r in log] == ["forward", "backward"] * 2
    for r in log:
        complete(r)
        if r.backend == "torch_fused":
            assert r.agrees is True
        if r.backend in ("torch_any", "triton_any", "gluon_sm90"):
            assert families(r) == set()
            assert r.agrees is None
        if r.backend == "gluon_sm90":
            assert "attend" in r.measured.kernels
    if dtype == torch.bfloat16:
        served = [r.backend for r in log if r.op == "forward"]
        assert served == ["gluon_sm90"] * 2 if HOPPER else served[0] == "torch_fused"
        assert log[1].backend == "torch_fused"  # with the o and the lse of another backend
    print(log)


@pytest.mark.parametrize("backend", SDPA, ids=lambda b: b.name.lower())
def test_peak_is_that_of_torchs_allocator(backend: SDPBackend) -> None:
    """The profiler's allocations against torch.cuda.max_memory_allocated, in a second run."""
    q, k, v = inputs()

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    with sdpa_kernel(backend), torch.no_grad():
        call()  # handles and workspaces that a library keeps
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        peak_bytes = torch.cuda.max_memory_allocated() - before
        with ns.receipts(measure=True) as log:
            call()
    assert log[0].measured is not None
    assert log[0].measured.peak_bytes == peak_bytes


def test_time_is_of_the_device_and_not_of_the_host() -> None:
    """One large product takes the time of its flops; a call that launches nothing takes none."""
    from nosquare import measure

    with ns.receipts(measure=True):
        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        x @ x
        _, large = measure.watched(lambda: x @ x, x.device)
        _, none = measure.watched(lambda: None, x.device)
    assert large is not None
    assert none is not None
    assert large.time_us > 2 * 8192**3 / 5e15 * 1e6  # no card does 5 PFLOP/s in bfloat16
    assert none.time_us < 1000
    assert (none.kernels, none.peak_bytes) == ((), 0)


def test_results_do_not_change() -> None:
    for call in (
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
        lambda *x: ns.attention(*x, mask=ns.Causal()),
    ):
        found = []
        for watch in (False, True):
            x = inputs()
            if watch:
                with ns.receipts(measure=True):
                    o = call(*x)
                    torch.autograd.grad(o.sum(), x[0], retain_graph=True)
            else:
                o = call(*x)
            found.append(o)
        assert torch.equal(*found)


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, ns.attention])
def test_a_graph_is_captured_while_a_log_measures(attend: Callable[..., Tensor]) -> None:
    q, k, v = (t.detach() for t in inputs())
    if attend is not ns.attention:
        attend = lambda *x: F.scaled_dot_product_attention(*x)  # noqa: E731
    expected = attend(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(q, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with ns.receipts(measure=True) as log, torch.cuda.graph(graph):
        o = attend(q, k, v)
    assert [r.op for r in log] == ["forward"]
    assert log[0].measured is not None
    assert log[0].measured.how == "not measured: a CUDA graph is being captured"
    assert log[0].kernels  # noted all the same
    o.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, expected)


def test_compiled_flex_attention() -> None:
    """Torch 2.11 and later name the kernel after the operator: the family is in it."""
    q, k, v = inputs()
    flex: Any = torch.compile(flex_attention)
    with ns.receipts() as first:  # compiles, and may try several tiles
        flex(q, k, v).sum().backward()
    with ns.receipts(measure=True) as log:
        flex(q, k, v).sum().backward()
    for told in (first, log):
        assert [(r.caller, r.op) for r in told] == [
            ("flex_attention", op) for op in ("forward", "backward")
        ]
    for r in log:
        assert families(r) == {"flex"}, r.measured
        assert r.agrees is True
        assert r.problem.describe().startswith("B=2 Hq=4 Hk=4 M=256 N=256 D=64 E=64 bfloat16")
    print(log)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_that_is_not_compiled() -> None:
    import torch.nn.attention.flex_attention as home

    q, k, v = inputs()
    with ns.receipts(measure=True) as log:
        home.flex_attention(q, k, v).sum().backward()
    assert [(r.caller, r.op) for r in log] == [
        ("flex_attention", op) for op in ("forward", "backward")
    ]
    assert all(families(r) == set() for r in log)  # products and a softmax, whatever its name says
    assert any("softmax" in name.lower() for name in log[0].measured.kernels)


@pytest.mark.parametrize("package", ["flash_attn", "flash_attn_interface", "fa3_fwd_interface"])
def test_flash_attn(package: str) -> None:
    module = pytest.importorskip(package)
    q, k, v = (t.detach().transpose(1, 2).contiguous() for t in inputs())
    with ns.receipts(measure=True) as log:
        module.flash_attn_func(q, k, v, causal=True)
    (r,) = log
    assert (r.caller, r.backend) == ("flash_attn", package)
    assert "flash" in families(r)
    assert r.problem.describe() == (
        "B=2 Hq=4 Hk=4 M=256 N=256 D=64 E=64 bfloat16 cuda:0 mask causal(end)"
    )
    complete(r)
    print(log)
