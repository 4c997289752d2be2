"""Receipts say what ran; explain says beforehand what then runs; a named backend never falls
back."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import helpers
import nosquare as ns
from helpers import case, rnd
from nosquare import receipt
from nosquare.backends import discover

CAUSAL = {"mask": ns.Causal("start")}


def train(c: Any, **options: Any) -> None:
    leaves = [t.clone().requires_grad_() for t in (c.q, c.k, c.v)]
    ns.attention(*leaves, **c.options, **options).sum().backward()


def test_a_receipt_of_forward_and_backward() -> None:
    c = case(mask=ns.Causal(), softcap=2.0, dtype=torch.float64)  # torch_any's alone
    with ns.receipts() as log:
        train(c)
    forward, backward = log
    assert [r.op for r in log] == ["forward", "backward"]
    assert forward.backend == backward.backend == "torch_any"
    assert forward.kernels == ("torch tiles",)
    assert backward.kernels == ("torch tiles backward",)
    assert forward.plan == "tiles 37 x 53, 2 batch entries x 2 key heads at a time"
    assert forward.workspace_bytes == 2 * 4 * 37 * 53 * 8  # one tile of scores
    sums = 2 * 2 * 53 * (16 + 16) * 8  # dk and dv in float64
    assert backward.workspace_bytes == sums + 2 * forward.workspace_bytes
    assert forward.copies == backward.copies == ()
    assert set(forward.refusals) == {"gluon_sm90", "llvm_cpu", "torch_fused", "triton_any"}
    assert "it computes in float32, and these are float64" in forward.refusals["llvm_cpu"]
    assert "it has no softcap" in forward.refusals["torch_fused"]
    assert forward.problem.grads == "qkv"
    text = str(log)
    for words in (
        "forward",
        "backward",
        "plan       tiles",
        "workspace",
        "refused    torch_fused: it has no softcap",
    ):
        assert words in text


def test_copies_are_told() -> None:
    c = case((3, 2), m=9, n=9)
    with ns.receipts() as log:
        ns.attention(
            c.q.transpose(0, 1), c.k.transpose(0, 1).contiguous(), c.v.transpose(0, 1), softcap=1.0
        )
        ns.attention(c.q, c.k, c.v, softcap=1.0)
    assert [w.split(",")[0] for w in log[0].copies] == ["q", "v"]
    assert "copied     q, whose batch axes are not evenly strided" in str(log)
    assert log[1].copies == ()


def test_packed_calls_and_higher_derivatives_leave_receipts() -> None:
    cu = torch.tensor([0, 4, 9])
    x = [rnd(9, 2, 4, seed=s).requires_grad_() for s in range(3)]
    with ns.receipts() as log:
        ns.attention_varlen(*x, cu, cu).sum().backward()
    assert [r.op for r in log] == ["forward", "backward"]
    assert "2 packed sequences" in str(log)
    q, k, v = (rnd(1, 2, 5, 4, seed=s).requires_grad_() for s in range(3))
    with ns.receipts() as log:
        (g,) = torch.autograd.grad(ns.attention(q, k, v).sum(), q, create_graph=True)
        g.sum().backward()
    assert [r.op for r in log] == ["forward", "backward", "second derivative"]


def test_compiled_and_dispatched_calls_leave_receipts() -> None:
    c = case()
    with ns.receipts() as log, FlopCounterMode(display=False):
        ns.attention(c.q, c.k, c.v)
    assert [r.op for r in log] == ["forward"]


def test_logs_nest() -> None:
    c = case()
    with ns.receipts() as outer:
        ns.attention(c.q, c.k, c.v)
        with ns.receipts() as inner:
            ns.attention(c.q, c.k, c.v)
        ns.attention(c.q, c.k, c.v)
    ns.attention(c.q, c.k, c.v)
    assert (len(outer), len(inner)) == (3, 1)
    assert outer[1] is inner[0]


def test_a_log_closes_when_the_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), ns.receipts():
        raise ZeroDivisionError
    assert not receipt.LOGS


def test_equal_logs_are_told_apart() -> None:
    """Two empty logs are equal as lists; closing one must not close the other."""
    with ns.receipts() as outer:
        with ns.receipts():
            pass
        ns.attention(*(case().q,) * 3)
    assert len(outer) == 1


def test_every_thread_is_heard() -> None:
    c = case()
    with ns.receipts() as log:
        threads = [threading.Thread(target=train, args=(c,)) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert sorted(r.op for r in log) == ["backward"] * 3 + ["forward"] * 3


def test_off_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an open log no receipt is even made."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a receipt was made")

    from nosquare import autograd, ops

    for module in (ops, autograd):
        monkeypatch.setattr(module, "Receipt", never)
        monkeypatch.setattr(module, "note", never)
    train(case())
    with pytest.raises(AssertionError), ns.receipts():
        train(case())


def test_no_attention_ran() -> None:
    with ns.receipts() as log:
        pass
    assert str(log) == "no attention ran"


# ---- explain ------------------------------------------------------------------------------------

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal(start)": CAUSAL,
    "softcap": {"softcap": 1.0},
    "bias": {"bias": rnd(37, 53)},
    "dropout": {"dropout": ns.Dropout(0.1, 1)},
    "window": {"mask": ns.Window(3, 3)},
    "sinks": {"sinks": rnd(4)},
    "batch_invariant": {"batch_invariant": True},
    "exact_delta": {"exact_delta": True},
}


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=helpers.name_of)
@pytest.mark.parametrize("call", CALLS)
def test_explain_agrees_with_what_then_runs(call: str, dtype: torch.dtype, grads: bool) -> None:
    c = case(dtype=dtype, **CALLS[call])
    leaves = [t.requires_grad_(grads) for t in (c.q, c.k, c.v)]
    with ns.receipts() as log:
        why = ns.explain(*leaves, **c.options)
        assert not log  # nothing was computed
        o = ns.attention(*leaves, **c.options)
        if grads:
            torch.autograd.grad(o.sum(), leaves)
    assert list(why.chosen) == (["forward", "backward"] if grads else ["forward"])
    for r in log:
        assert why.chosen[r.op] == r.backend
        assert why.plans[r.op, r.backend] == r.plan
        for name, reasons in r.refusals.items():
            assert why.reasons[r.op, name] == reasons != ()
    assert f"forward   runs   {log[0].backend}" in str(why)


def test_explain_of_a_named_backend() -> None:
    c = case(softcap=1.0)
    why = ns.explain(c.q, c.k, c.v, softcap=1.0, backend="torch_fused")
    assert why.chosen == {"forward": None}
    assert "forward   cannot torch_fused  it has no softcap" in str(why)
    with pytest.raises(ns.ArgumentError, match="no backend of that name"):
        ns.explain(c.q, c.k, c.v, backend="nobody")


# ---- a named backend never falls back -----------------------------------------------------------


@pytest.mark.parametrize("name", discover())
def test_a_named_backend_runs_or_refuses(name: str) -> None:
    for options in CALLS.values():
        c = case(**options)
        with ns.receipts() as log, contextlib.suppress(ns.UnsupportedError):
            train(c, backend=name)
        assert all(r.backend == name for r in log)


def test_a_named_backend_does_not_fall_back_in_backward() -> None:
    """torch_fused serves forward and has no gradient through lse: backward is refused, not
    replaced."""
    c = case()
    q, k, v = (t.requires_grad_() for t in (c.q, c.k, c.v))
    s = ns.attention_state(q, k, v, backend="torch_fused")
    with pytest.raises(ns.UnsupportedError, match="it has no gradient through lse"):
        s.lse.sum().backward()
    (g,) = torch.autograd.grad(
        ns.attention(q, k, v, backend="torch_fused").sum(), q, create_graph=True
    )
    with pytest.raises(ns.UnsupportedError, match="torch_fused has no second derivative"):
        g.sum().backward()


def test_what_a_refusal_says() -> None:
    c = case(m=3, n=5, d=8, softcap=2.0, sinks=rnd(4))
    with pytest.raises(ns.UnsupportedError) as caught:
        ns.attention(c.q, c.k, c.v, **c.options, backend="torch_fused")
    assert str(caught.value) == (
        "torch_fused cannot run this problem.\n"
        "  problem      forward: B=2 Hq=4 Hk=2 M=3 N=5 D=8 E=8 float32 cpu mask full() "
        "softcap=2.0 sinks=(4,)\n"
        "  torch_fused  it has no softcap; it has no sinks\n"
        "  Try: backend=None, so that another backend may take it."
    )
    assert isinstance(caught.value, NotImplementedError)
