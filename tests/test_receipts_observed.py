"""Attention called elsewhere in the same block: what the observers tell, and that they change
nothing and leave nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as home
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils.flop_counter import FlopCounterMode

import nosquare as ns
from helpers import rnd
from nosquare.observe import ran

KEPT = (F.scaled_dot_product_attention,)  # a log replaces names of modules
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def inputs(*shapes: tuple[int, ...], grads: bool = True) -> list[Tensor]:
    made = [rnd(*shape, seed=s) for s, shape in enumerate(shapes or ((2, 3, 17, 8),) * 3)]
    return [t.requires_grad_(grads) for t in made]


def told(log: list[ns.Receipt]) -> list[tuple[str, str, str]]:
    return [(r.caller, r.op, r.backend) for r in log]


# ---- torch's SDPA: which operator the dispatcher chose ----

KERNELS = {
    SDPBackend.FLASH_ATTENTION: ("flash attention for CPUs", (FLASH,), (f"{FLASH}_backward",)),
    SDPBackend.MATH: (
        "math path",
        ("mul", "bmm", "_safe_softmax"),
        ("BmmBackward", "SafeSoftmaxBackward", "MulBackward"),
    ),
}


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("backend", KERNELS, ids=lambda b: b.name.lower())
def test_the_kernel_that_ran(backend: SDPBackend, measured: bool) -> None:
    q, k, v = inputs()
    with sdpa_kernel(backend), ns.receipts(measured) as log:
        F.scaled_dot_product_attention(q, k, v, scale=0.25).sum().backward()
    words, forward, backward = KERNELS[backend]
    assert told(log) == [("torch.sdpa", op, words) for op in ("forward", "backward")]
    assert [r.kernels for r in log] == [forward, backward]
    assert log[0].plan == "scaled_dot_product_attention(scale=0.25)"
    assert log[0].version == f"torch {torch.__version__}"
    assert log[0].problem.describe() == (
        "B=2 Hq=3 Hk=3 M=17 N=17 D=8 E=8 float32 cpu mask full() gradients of qkv"
    )
    assert log[0].workspace_bytes is None
    for r in log:
        assert (r.measured is not None) is measured
    if measured:
        fused = backend is not SDPBackend.MATH
        marks = (forward[0], backward[0]) if fused else ("_attention_math", "_softmax_backward")
        for r, mark in zip(log, marks, strict=True):
            assert any(mark in name for name in r.measured.kernels)
            assert r.agrees is (True if fused else None)
            assert r.measured.time_us > 0


def test_the_choice_is_seen_and_not_asked_for() -> None:
    """The same words, and another kernel: a mask that needs a gradient goes the math path."""
    q, k, v = inputs()
    bias = torch.zeros(17, 17, requires_grad=True)
    with ns.receipts() as log:
        F.scaled_dot_product_attention(q, k, v, attn_mask=bias.detach())
        F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert [r.backend for r in log] == ["flash attention for CPUs", "math path"]
    assert [r.problem.bias for r in log] == [(17, 17)] * 2
    assert [r.problem.grads for r in log] == ["qkv", "qkvb"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_without_gradients(context: Callable[[], Any]) -> None:
    q, k, v = inputs(grads=context is torch.no_grad)
    with ns.receipts() as log, context():
        F.scaled_dot_product_attention(q, k, v)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, k, v)
    assert [r.backend for r in log] == ["flash attention for CPUs", "math path"]
    assert [r.problem.grads for r in log] == ["", ""]


def words(*args: Any, **kwargs: Any) -> str:
    with ns.receipts() as log:
        F.scaled_dot_product_attention(*args, **kwargs)
    return f"{log[0].problem.describe()} | {log[0].plan}"


def test_what_was_asked_for() -> None:
    q, k, v = inputs((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), grads=False)
    keep = torch.ones(5, 7).bool()
    head = "scaled_dot_product_attention"
    assert words(q, k, value=v, attn_mask=keep, enable_gqa=True, scale=0.5) == (
        "B=2 Hq=4 Hk=2 M=5 N=7 D=8 E=6 float32 cpu mask dense(t0) | "
        f"{head}(attn_mask=bool (5, 7), enable_gqa=True, scale=0.5)"
    )
    assert words(q[0, 0], k[0, 0], v[0, 0]) == (
        f"B=1 Hq=1 Hk=1 M=5 N=7 D=8 E=6 float32 cpu mask full() | {head}()"
    )
    assert words(q[:1, :1], k, v, dropout_p=0.5) == (
        f"B=2 Hq=2 Hk=2 M=5 N=7 D=8 E=6 float32 cpu mask full() dropout=0.5 | {head}(dropout_p=0.5)"
    )
    with torch.autocast("cpu"):
        assert " bfloat16 cpu " in words(q[:, :2], k, v)


def test_a_mask_that_is_told_in_words() -> None:
    """torch's CausalBias compares the function with the name that an observer has taken."""
    q, k, v = inputs((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), grads=False)
    lower = causal_lower_right(5, 7)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=lower)
    with ns.receipts() as log:
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, attn_mask=lower), expected)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, lower), expected)
    assert [r.problem.mask for r in log] == ["causal(end)"] * 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_packed() -> None:
    q = torch.nested.nested_tensor([rnd(5, 2, 8), rnd(3, 2, 8)], layout=torch.jagged)
    q = q.transpose(1, 2)
    with ns.receipts() as log:
        F.scaled_dot_product_attention(q, q, q)
    (r,) = log
    assert (r.problem.packed, r.problem.batch, r.problem.Hq, r.problem.M) == (True, (2,), 2, 8)


# ---- backward is told when it runs, and as it ran ----


def test_part_of_the_math_path() -> None:
    q, k, v = inputs()
    with sdpa_kernel(SDPBackend.MATH), ns.receipts() as log:
        o = F.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(o.sum(), v, retain_graph=True)
        torch.autograd.grad(o.sum(), q)
    assert [r.op for r in log] == ["forward", "backward", "backward"]
    assert log[1].kernels == ("BmmBackward",)
    assert log[2].kernels == ("BmmBackward", "SafeSoftmaxBackward", "MulBackward")


def test_in_the_order_in_which_they_ran() -> None:
    q, k, v = inputs()
    with ns.receipts() as log:
        x = F.scaled_dot_product_attention(q, k, v)
        x = ns.attention(x, k, v, softcap=1.0)
        x = F.scaled_dot_product_attention(x, k, v)
        x.sum().backward(retain_graph=True)
        x.sum().backward()
    callers = ["torch.sdpa", "nosquare", "torch.sdpa"]
    assert [r.caller for r in log] == callers * 3
    assert [r.op for r in log] == ["forward"] * 3 + ["backward"] * 6


def test_our_own_use_of_torchs_kernels_is_told_once() -> None:
    with ns.receipts() as log:
        ns.attention(*inputs()).sum().backward()
    assert told(log) == [("nosquare", op, "torch_fused") for op in ("forward", "backward")]


def test_after_the_block_nothing_is_told_or_kept() -> None:
    q, k, v = inputs()
    with ns.receipts() as log:
        o = F.scaled_dot_product_attention(q, k, v)
        assert F.scaled_dot_product_attention is not KEPT[0]
    assert F.scaled_dot_product_attention is KEPT[0]
    assert not ran.HANDLES
    with ns.receipts() as later:
        o.sum().backward()  # of a forward that this log has not seen
    assert [r.op for r in log] == ["forward"]
    assert later == []


def test_hooks_do_not_keep_a_graph_alive() -> None:
    q, k, v = inputs()
    gc.disable()  # freed by counting references alone
    try:
        with ns.receipts():
            x = q * 2  # what the kernel's node keeps for backward
            saved = weakref.ref(x)
            o = F.scaled_dot_product_attention(x, k, v)
            o.sum().backward(retain_graph=True)
            del x
            assert saved() is not None
            del o
            assert saved() is None
    finally:
        gc.enable()


# ---- nothing changes ----


@pytest.mark.parametrize("measured", [False, True])
def test_results_do_not_change(measured: bool) -> None:
    for backend in KERNELS:
        found = []
        for watch in (False, True):
            q, k, v = inputs()
            torch.manual_seed(5)
            with sdpa_kernel(backend), ns.receipts(measured) if watch else nullcontext():
                p = 0.3 if backend is SDPBackend.MATH else 0.0
                o = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
                o.square().sum().backward()
            found.append([o, q.grad, k.grad, v.grad, torch.rand(3)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_errors_do_not_change() -> None:
    q, k, v = inputs(grads=False)
    for args in ((q, k[..., :4], v), (q, k.double(), v), (q, [1], v), (q,)):
        texts = []
        for watch in (False, True):
            with pytest.raises((RuntimeError, TypeError)) as caught:  # noqa: SIM117
                with ns.receipts() if watch else nullcontext():
                    F.scaled_dot_product_attention(*args)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


def test_the_fast_paths_stay_fast() -> None:
    """nn.MultiheadAttention leaves its fast path under a TorchFunctionMode: not under a log."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).eval()
    x = rnd(2, 6, 16)
    with ns.receipts(measure=True) as log, torch.no_grad():
        layer.self_attn(x, x, x, need_weights=False)
        layer(x)
    fast = "_native_multi_head_attention"
    assert [r.kernels for r in log] == [(fast,), ("_transformer_encoder_layer_fwd",)]
    for r in log:
        assert f"aten::{fast}" in r.measured.kernels
        assert r.problem.describe() == "B=2 Hq=2 Hk=2 M=6 N=6 D=8 E=8 float32 cpu mask full()"
        assert r.measured.flops_per_s is None
        assert r.measured.how.endswith("no rates: the call does more than attention")
    with ns.receipts() as log:
        layer.train()
        layer(x).sum().backward()
    assert told(log) == [
        ("torch.sdpa", op, "flash attention for CPUs") for op in ("forward", "backward")
    ]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_under_transforms_and_modes() -> None:
    q, k, v = inputs(grads=False)
    with ns.receipts() as log:
        torch.func.grad(lambda x: F.scaled_dot_product_attention(x, k, v).sum())(q)
        torch.vmap(F.scaled_dot_product_attention)(q[None], k[None], v[None])
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            F.scaled_dot_product_attention(q, k, v)
    assert [r.backend for r in log] == ["flash attention for CPUs"] * 2 + ["math path"]
    assert counter.get_total_flops() == 2 * 2 * 2 * 3 * 17 * 17 * 8  # two products


def test_nothing_is_told_of_what_computes_nothing() -> None:
    meta = torch.empty(1, 1, 4, 8, device="meta")
    with ns.receipts() as log:
        F.scaled_dot_product_attention(meta, meta, meta)
        with torch._subclasses.FakeTensorMode():
            fake = torch.empty(1, 1, 4, 8)
            F.scaled_dot_product_attention(fake, fake, fake)
    assert log == []


def test_compiled_code_is_compiled_as_before() -> None:
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def model(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q) + ns.attention(q, q, q)

    run = torch.compile(model, backend=keep, fullgraph=True)
    (q,) = inputs((1, 2, 6, 8))
    before = run(q)
    for _ in range(3):
        with ns.receipts() as log:
            assert torch.equal(run(q), before)
        assert [r.caller for r in log] == ["nosquare"]
        run(q)
    assert len(graphs) == 2  # once outside, once inside
    with ns.receipts() as log:
        torch.compile(F.scaled_dot_product_attention, backend=keep)(q, q, q)
        flex = torch.compile(home.flex_attention)
    assert log == []
    assert "scaled_dot_product_attention" in graphs[-1].code
    # no observer outlives its block in what was compiled there
    assert flex._torchdynamo_orig_callable is home.flex_attention


@pytest.mark.filterwarnings("ignore:Leaked callback handle")  # of torch's, once the node has raised
def test_a_backward_that_raises_frees_the_profiler() -> None:
    q, k, v = inputs()

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    with ns.receipts(measure=True) as log:
        o = F.scaled_dot_product_attention(q, k, v)
        o.grad_fn.register_prehook(fail)  # type: ignore[union-attr]
        with pytest.raises(ZeroDivisionError):
            o.sum().backward(retain_graph=True)
        ns.attention(q, k, v)
        with pytest.raises(ZeroDivisionError):
            o.sum().backward()
    assert [r.op for r in log] == ["forward", "forward"]
    assert log[1].agrees is True
    assert not torch.autograd.profiler._is_profiler_enabled  # the block has freed it
    with ns.receipts(measure=True) as log:
        F.scaled_dot_product_attention(q, k, v)
    assert log[0].agrees is True
