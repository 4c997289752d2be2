"""Where a log looks for attention called elsewhere, and what it tells of FlexAttention and of
flash_attn packages; a stand-in has their signatures, since none can be installed without a GPU."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import nosquare as ns
from helpers import rnd
from nosquare.observe import compiled
from test_receipts_observed import KEPT, inputs, told


def module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(names)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_names_that_a_module_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = module(monkeypatch, "my_model", attend=KEPT[0], other=1)
    q, k, v = inputs()
    with ns.receipts() as log:
        mine.attend(q, k, v)
        held = mine.attend
    assert mine.attend is KEPT[0]
    assert len(log) == 1
    held(q, k, v)  # an observer that outlives its block is the function itself
    assert len(log) == 1


def test_what_stands_in_torchs_place_is_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", ns.sdpa)
    with ns.receipts() as log:
        F.scaled_dot_product_attention(*inputs())
    assert told(log) == [("nosquare", "forward", "torch_fused")]
    assert F.scaled_dot_product_attention is ns.sdpa


def test_a_name_that_changes_inside_the_block_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = module(monkeypatch, "my_model", attend=KEPT[0])
    with ns.receipts():
        mine.attend = ns.sdpa
    assert mine.attend is ns.sdpa


def test_every_thread_is_observed() -> None:
    def work() -> None:
        F.scaled_dot_product_attention(*inputs()).sum().backward()

    with ns.receipts() as log:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert sorted(r.op for r in log) == ["backward"] * 3 + ["forward"] * 3
    assert {r.caller for r in log} == {"torch.sdpa"}


def test_transformers_own_sdpa() -> None:
    sdpa = pytest.importorskip("transformers.integrations.sdpa_attention")
    q, k, v = inputs((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    holder = types.SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    with ns.receipts() as log:
        sdpa.sdpa_attention_forward(holder, q, k, v, None)[0].sum().backward()
    assert told(log) == [
        ("torch.sdpa", op, "flash attention for CPUs") for op in ("forward", "backward")
    ]
    assert log[0].problem.mask == "causal(start)"


# ---- FlexAttention ----


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_that_is_not_compiled() -> None:
    q, k, v = inputs((1, 2, 16, 8), (1, 2, 16, 8), (1, 2, 16, 8), grads=False)
    hidden = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    expected = flex_attention(q, k, v, block_mask=hidden)
    for measured in (False, True):
        with ns.receipts(measured) as log:
            assert torch.equal(flex_attention(q, k, v, block_mask=hidden), expected)
        (r,) = log
        assert told(log) == [("flex_attention", "forward", "flex_attention, not compiled")]
        assert r.plan == "flex_attention(block_mask=BlockMask)"
        assert (r.kernels, r.problem.mask) == ((), "dense(t0)")
    assert "says       nothing of the kernels that ran" in str(r)
    assert {"aten::bmm", "aten::_softmax"} <= set(r.measured.kernels)
    assert r.measured.how.endswith("no rates: the visible pairs are not known exactly")


class Launcher:
    """As torch's CachingAutotuner, as far as a launch goes."""

    def __init__(self, name: str, *names: str) -> None:
        def fn() -> None: ...

        fn.__name__ = name
        fn.arg_names = names  # type: ignore[attr-defined]
        self.fn, self.calls = fn, 0

    def run(self, *args: Any, stream: int, benchmark_run: bool = False) -> str:
        self.calls += 1
        return "launched"


def test_compiled_flex_attention_at_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on a GPU, see test_gpu_receipts.py; here the kernels are not there."""
    monkeypatch.setattr(compiled, "launcher", lambda: Launcher)
    run = Launcher.run
    names = ("arg_Q", "arg_K", "arg_V", "arg_LSE", "arg_KV_NUM_BLKS")
    forward = Launcher("triton_tem_fused_flex_attention_0", *names)
    backward = Launcher("triton_tem_fused_flex_attention_backward_1", *names, "arg_DO")
    other = Launcher("triton_poi_fused_add_2", "in_ptr0")
    q, k, v = inputs((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8))
    with ns.receipts() as log:
        assert Launcher.run is not run
        for kernel in (forward, backward, other):
            assert kernel.run(q, k, v, None, None, None, stream=0) == "launched"
        forward.run(q, k, v, None, None, stream=0, benchmark_run=True)
    assert Launcher.run is run
    assert told(log) == [
        ("flex_attention", op, "flex_attention, compiled") for op in ("forward", "backward")
    ]
    assert [r.kernels for r in log] == [(k.fn.__name__,) for k in (forward, backward)]
    assert log[0].problem.describe().startswith("B=2 Hq=4 Hk=2 M=16 N=16 D=8")
    assert (forward.calls, other.calls) == (2, 1)


# ---- flash_attn ----


class FlashAttnFunc(torch.autograd.Function):
    """A stand-in: q, k, v (B, tokens, H, D) as flash_attn has them, or (tokens, H, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        heads = (t.transpose(-2, -3) for t in (q, k, v))
        s = next(heads) @ next(heads).mT * (scale or q.shape[-1] ** -0.5)
        return (s.softmax(-1) @ next(heads)).transpose(-2, -3)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return (*(torch.ones_like(t) for t in ctx.saved_tensors), None)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return FlashAttnFunc.apply(q, k, v, softmax_scale)


def flash_attn_qkvpacked_func(qkv: Tensor, causal: bool = False) -> Tensor:
    return FlashAttnFunc.apply(*qkv.unbind(-3), None)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool = False
) -> tuple[Tensor, Tensor]:
    return FlashAttnFunc.apply(q, *kv.unbind(-3), None), q


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    cache_seqlens: Tensor | None = None, block_table: Tensor | None = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    return q.clone()


def flash_attn_helper(x: int) -> int:
    return x


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    functions = [flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_kvpacked_func,
                 flash_attn_with_kvcache, flash_attn_helper]  # fmt: skip
    names = {f.__name__: f for f in functions}
    made = module(monkeypatch, "flash_attn", __version__="2.8.3", **names)
    module(monkeypatch, "user_of_flash", attend=flash_attn_func)
    yield made
    assert made.flash_attn_func is flash_attn_func


def test_flash_attn_forward_and_backward(flash: types.ModuleType) -> None:
    q, k, v = inputs((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))
    with ns.receipts(measure=True) as log:
        flash.flash_attn_func(q[:, :, :2], k, v, causal=True).sum().backward()
        sys.modules["user_of_flash"].attend(q[:, :, :2], k, v, 0.1, window_size=(3, 2))
        assert flash.flash_attn_helper(3) == 3
    assert told(log) == [
        ("flash_attn", op, "flash_attn") for op in ("forward", "backward", "forward")
    ]
    assert log[0].version == f"flash_attn 2.8.3, torch {torch.__version__}"
    assert log[0].problem.describe() == (
        "B=2 Hq=2 Hk=2 M=5 N=7 D=8 E=6 float32 cpu mask causal(end) gradients of qkv"
    )
    assert log[1].kernels == ("FlashAttnFuncBackward",)
    assert "aten::fill_" in log[1].measured.kernels  # the stand-in's gradients are ones
    assert (log[2].problem.mask, log[2].problem.p) == ("window(before=3,after=2)", 0.1)
    assert log[2].plan == "flash_attn_func(k=float32 (2, 7, 2, 8), v=float32 (2, 7, 2, 6), " \
        "dropout_p=0.1, window_size=(3, 2))"  # fmt: skip


def test_flash_attn_packed_and_cached(flash: types.ModuleType) -> None:
    cu = torch.tensor([0, 2, 5])
    with ns.receipts() as log:
        flash.flash_attn_qkvpacked_func(rnd(2, 6, 3, 4, 8), causal=True)
        flash.flash_attn_varlen_kvpacked_func(rnd(5, 4, 8), rnd(5, 2, 4, 8), cu, cu)
        pages, table = rnd(9, 16, 2, 8), torch.zeros(3, 4, dtype=torch.int32)
        lengths = torch.tensor([3, 4, 5])
        flash.flash_attn_with_kvcache(
            rnd(3, 1, 4, 8), pages, pages, cache_seqlens=lengths, block_table=table, causal=True
        )
    assert [r.problem.describe() for r in log] == [
        "B=2 Hq=4 Hk=4 M=6 N=6 D=8 E=8 float32 cpu mask causal(end)",
        "2 packed sequences Hq=4 Hk=4 M=5 N=5 D=8 E=8 float32 cpu mask full()",
        "B=3 Hq=4 Hk=2 M=1 N=64 D=8 E=8 float32 cpu mask causal(end)&lengths(t0)",
    ]
    assert not log[2].predicted.pairs.exact


def test_a_call_that_cannot_be_read_is_not_silent(flash: types.ModuleType) -> None:
    with ns.receipts() as log, pytest.warns(UserWarning, match="no receipt of this flash_attn"):
        out = flash.flash_attn_with_kvcache(rnd(3, 1, 4, 8), 1, 2)
    assert log == []
    assert out.shape == (3, 1, 4, 8)
