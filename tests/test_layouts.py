"""Strides, repeatability and side effects: the same numbers give the same answer, and nothing
else moves."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import helpers
import nosquare as ns
from helpers import DTYPES, Case, case, check, name_of, on_cpu, rnd
from nosquare.backends import discover

WIDE = [torch.float64, torch.float32]


def transposed(t: Tensor) -> Tensor:
    """(B, length, H, width) in memory, as projections leave it."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def inner(t: Tensor) -> Tensor:
    """The last axis is strided."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def stepped(t: Tensor) -> Tensor:
    """Every third row and every second number of a larger array."""
    big = torch.full((*t.shape[:-2], 3 * t.shape[-2], 2 * t.shape[-1]), torch.nan, dtype=t.dtype)
    big[..., ::3, ::2] = t
    return big[..., ::3, ::2]


def misaligned(t: Tensor) -> Tensor:
    """It starts three numbers into its storage."""
    return torch.cat([t.new_full((3,), torch.nan), t.flatten()])[3:].view(t.shape)


def sliced(t: Tensor) -> Tensor:
    """A part of a fused projection: (B, H, length, 3 * width)."""
    return torch.cat([t, t * torch.nan, t], -1)[..., -t.shape[-1] :]


def flipped(t: Tensor) -> Tensor:
    return t.flip(-2).contiguous().flip(-2)


def expanded_batch(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


def expanded_heads(t: Tensor) -> Tensor:
    return t[:, :1].expand(t.shape)


def expanded_rows(t: Tensor) -> Tensor:
    return t[:, :, :1].expand(t.shape)


def expanded_width(t: Tensor) -> Tensor:
    return t[..., :1].expand(t.shape)


def swapped_batch(t: Tensor) -> Tensor:
    """Two batch axes in the other order in memory: no single stride steps through them."""
    return torch.stack([t, t * 2, t * 3]).transpose(0, 1)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    transposed,
    inner,
    stepped,
    misaligned,
    sliced,
    flipped,
    expanded_batch,
    expanded_heads,
    expanded_rows,
    expanded_width,
    swapped_batch,
]


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", [None, *discover()])
def test_any_strides(backend: str | None, layout: Callable[[Tensor], Tensor], which: str) -> None:
    """A strided view gives what its contiguous copy gives, forward and backward."""
    c = case((2,), 4, 2, 33, 33, 16, mask=ns.Causal())
    if layout is swapped_batch:
        which = "all"
    views = {
        n: layout(t) if which in (n, "all") else t
        for n, t in zip("qkv", (c.q, c.k, c.v), strict=True)
    }
    kept = {n: t.contiguous() for n, t in views.items()}

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> ns.State:
        strided = [Restride.apply(t, views[n]) for n, t in zip("qkv", (q, k, v), strict=True)]
        assert all(t.stride() == views[n].stride() for n, t in zip("qkv", strided, strict=True))
        return ns.attention_state(*strided, **options, backend=backend)

    try:
        check(Case(**kept, options=c.options), attend, through_lse=backend != "torch_fused")
    except ns.UnsupportedError as error:
        pytest.skip(str(error.values.get(backend or "", error)).split(";")[0])


class Restride(torch.autograd.Function):
    """The numbers of `t` under the strides of `view`, which holds the same numbers."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, view: Tensor) -> Tensor:
        assert torch.equal(t, view)
        return view.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 5, 1)])
def test_gradients_of_an_expanded_leaf(shape: tuple[int, ...]) -> None:
    """k and v of one entry used by a whole batch: autograd sums over the entries."""
    k, v = (rnd(1, 2, 20, 8, seed=s, dtype=torch.float64).requires_grad_() for s in (1, 2))
    q = rnd(*shape, 4, 9, 8, dtype=torch.float64)
    o = ns.attention(q, k.expand(*shape, 2, 20, 8), v.expand(*shape, 2, 20, 8))
    got = torch.autograd.grad(o.sin().sum(), (k, v))
    parts = [ns.attention(e, k[0], v[0]).sin().sum() for e in q.reshape(-1, 4, 9, 8)]
    want = torch.autograd.grad(torch.stack(parts).sum(), (k, v))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [torch.Tensor.sum, lambda o: o.mean((-1, -2)).sum()])
@pytest.mark.parametrize("mask", [None, ns.Causal()])
def test_expanded_cotangents(make: Callable[[Tensor], Tensor], mask: ns.Mask | None) -> None:
    """o.sum().backward() hands down a do whose strides are all 0."""
    leaves = [t.double().requires_grad_() for t in (case(n=37).q, case(n=37).k, case(n=37).v)]
    got = torch.autograd.grad(make(ns.attention(*leaves, mask=mask)), leaves)
    o = ns.attention(*leaves, mask=mask)
    (do,) = torch.autograd.grad(make(o), o)
    want = torch.autograd.grad(o, leaves, do.clone(memory_format=torch.contiguous_format))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-13, atol=1e-13)


def test_o_keeps_the_order_of_q() -> None:
    """Heads inside tokens in q: o comes the same way, so that the next projection needs no copy."""
    q, k, v = (transposed(t) for t in (case(n=37).q, case(n=37).k, case(n=37).v))
    for backend in on_cpu():
        o = ns.attention(q, k, v, backend=backend)
        assert o.transpose(1, 2).is_contiguous()
        assert ns.attention(q.contiguous(), k, v, backend=backend).is_contiguous()


# ---- repeatability ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("mask", [None, ns.Causal(), ns.Window(9, 0)], ids=str)
def test_forward_and_backward_repeat_bit_by_bit(mask: ns.Mask | None, dtype: torch.dtype) -> None:
    c = case(dtype=dtype, n=37, mask=mask)
    runs = []
    for _ in range(3):
        leaves = [t.detach().clone().requires_grad_() for t in (c.q, c.k, c.v)]
        s = ns.attention_state(*leaves, **c.options, deterministic=True)
        runs.append([s.o, s.lse, *torch.autograd.grad(s.o, leaves, c.cotangents()[0])])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("m", [1, 40])
def test_batch_invariance(m: int, dtype: torch.dtype) -> None:
    """The bits of an entry do not depend on the batch it comes in, forward or backward."""
    c = case((7,), 8, 2, m, 700, 32, dtype=dtype)
    do = c.cotangents()[0]

    def run(b: slice) -> list[Tensor]:
        leaves = [t[b].detach().requires_grad_() for t in (c.q, c.k, c.v)]
        s = ns.attention_state(*leaves, batch_invariant=True)
        return [s.o, s.lse, *torch.autograd.grad(s.o, leaves, do[b])]

    whole = run(slice(0, 7))
    for lo, hi in ((0, 1), (3, 4), (2, 7)):
        for a, b in zip(run(slice(lo, hi)), whole, strict=True):
            assert torch.equal(a, b[lo:hi])


@pytest.mark.parametrize("precision", ["medium", "high"])
@pytest.mark.parametrize("backend", on_cpu())
def test_float32_is_float32(backend: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process allows for its matrix products changes no bit, and is left as it was."""
    c = case((1,), 4, 2, 96, 96, 64)
    runs = []
    before = torch.get_float32_matmul_precision()
    for setting in ("highest", precision):
        torch.set_float32_matmul_precision(setting)
        try:
            leaves = [t.detach().requires_grad_() for t in (c.q, c.k, c.v)]
            o = ns.attention(*leaves, backend=backend)
            runs.append([o, *torch.autograd.grad(o, leaves, c.cotangents()[0])])
            assert torch.get_float32_matmul_precision() == setting
        finally:
            torch.set_float32_matmul_precision(before)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("place", ["mkldnn.matmul", "cuda.matmul", "mkldnn"])
def test_the_newer_precision_switches(place: str) -> None:
    """With torch's newer switches, the older getter raises: nobody may ask it."""
    switch: Any = torch.backends
    for part in place.split("."):
        switch = getattr(switch, part)
    before = switch.fp32_precision
    c = case()
    want = ns.attention(c.q, c.k, c.v, backend="torch_any")
    # torch.testing, once imported, forbids to set some switches outside of such a block
    free = torch.backends.__allow_nonbracketed_mutation
    with free():
        switch.fp32_precision = "tf32"
    try:
        assert torch.equal(ns.attention(c.q, c.k, c.v, backend="torch_any"), want)
        assert switch.fp32_precision == "tf32"
    finally:
        with free():
            switch.fp32_precision = before


FEATURES: dict[str, Any] = {
    "mask": ns.Lengths(torch.tensor([3, 50])) & ns.Causal(),
    "bias": rnd(37, 53),
    "sinks": rnd(4),
    "alibi": torch.ones(4) / 8,
    "softcap": 2.0,
    "dropout": ns.Dropout(0.2, 3),
}


def test_settings_of_the_whole_process() -> None:
    """torch's deterministic mode and its default dtype change nothing but what they say."""
    c = case(**FEATURES)
    want = ns.attention(c.q, c.k, c.v, **FEATURES)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    try:
        check(c)
        assert torch.equal(ns.attention(c.q, c.k, c.v, **FEATURES), want)
        with ns.receipts() as log:
            ns.attention(c.q, c.k, c.v)
        assert log[0].problem.deterministic
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_checkpointing_and_repeated_backward() -> None:
    c = case(**FEATURES)
    leaves = [t.requires_grad_() for t in (c.q, c.k, c.v)]

    def layer(*x: Tensor) -> Tensor:
        return ns.attention(*x, **FEATURES).sum()

    loss = layer(*leaves)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    later = torch.autograd.grad(checkpoint(layer, *leaves, use_reentrant=False), leaves)
    for a, b, x in zip(first, again, later, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, x)


@pytest.mark.parametrize("value", [FEATURES["mask"], FEATURES["dropout"], ns.Full()], ids=str)
def test_options_travel_between_processes(value: Any) -> None:
    assert str(pickle.loads(pickle.dumps(value))) == str(copy.deepcopy(value)) == str(value)


def test_threads_do_not_disturb_each_other() -> None:
    c = case((2,), 4, 2, 64, 64, 16, mask=ns.Causal(), dropout=ns.Dropout(0.2, 3))
    want = ns.attention(c.q, c.k, c.v, **c.options)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            if not torch.equal(ns.attention(c.q, c.k, c.v, **c.options), want):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# ---- side effects -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, *on_cpu()])
def test_inputs_are_never_modified(backend: str | None) -> None:
    options: dict[str, Any] = {"mask": ns.Causal("start")}
    if backend != "torch_fused":
        options |= {"bias": rnd(37, 53), "softcap": 2.0, "sinks": rnd(4), "alibi": torch.ones(4)}
    c = case(**options)
    leaves = {n: t.clone().requires_grad_() for n, t in c.tensors().items()}
    before = {n: t.detach().clone() for n, t in leaves.items()}
    versions = {n: t._version for n, t in leaves.items()}
    o = ns.attention(**{**c.options, **leaves}, backend=backend)
    do = c.cotangents()[0]
    kept = do.clone()
    torch.autograd.grad(o, list(leaves.values()), do)
    assert torch.equal(do, kept)
    for n, t in leaves.items():
        assert torch.equal(t, before[n]), n
        assert t._version == versions[n], n


def test_nothing_changes_when_a_call_raises() -> None:
    """After each refusal: the same precision, logs, random state, grad mode, and the next call
    works."""
    c = case()
    want = ns.attention(c.q, c.k, c.v)
    bad: list[dict[str, Any]] = [
        {"mask": ns.Dense(torch.ones(3, 3).bool())},
        {"softcap": -1.0},
        {"backend": "none such"},
        {"backend": "torch_fused", "softcap": 1.0},
        {"bias": torch.ones(2, 2)},
        {"oops": 1},
    ]
    cu = torch.tensor([0, 5, 3])
    torch.set_float32_matmul_precision("high")
    try:
        state = torch.random.get_rng_state()
        with ns.receipts() as log:
            for options in bad:
                with pytest.raises((ns.ArgumentError, ns.UnsupportedError)):
                    ns.attention(c.q, c.k, c.v, **options)
            with pytest.raises(ns.ArgumentError):
                ns.attention_varlen(
                    c.q[0], c.k[0].mT.contiguous().mT, c.v[0], cu, cu, mask=ns.Full()
                )
            with pytest.raises(ns.ArgumentError):
                ns.attention_varlen(rnd(9, 2, 4), rnd(9, 2, 4), rnd(9, 2, 4), cu, cu)
        assert not log
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.equal(state, torch.random.get_rng_state())
        assert torch.is_grad_enabled()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(ns.attention(c.q, c.k, c.v), want)


def test_saved_inputs_are_watched() -> None:
    """Changing q in place between forward and backward is torch's own error, not a wrong
    gradient."""
    leaf = rnd(1, 2, 5, 4).requires_grad_()
    q = leaf * 1
    o = ns.attention(q, rnd(1, 2, 7, 4), rnd(1, 2, 7, 4))
    q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_helpers_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced tiles reach problems that were decided before."""
    c = case()
    ns.attention(c.q, c.k, c.v, backend="torch_any")
    helpers.force_tiles(monkeypatch, 5, 6)
    with ns.receipts() as log:
        ns.attention(c.q, c.k, c.v, backend="torch_any")
    assert log[0].plan.startswith("tiles 5 x 6")
