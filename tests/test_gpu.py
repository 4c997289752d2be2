"""On an NVIDIA GPU: the contract for every backend and engine there, and faults seen on such cards.

The reference is the oracle in float64 on the CPU; the inputs are the same numbers on both.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import helpers
import nosquare as ns
from helpers import DTYPES, INF, Case, Exact, bounds, case, check, close, moved, name_of, rnd, unit
from nosquare.backends import discover
from nosquare.backends.torch_fused import cuda as engines
from test_contract import FEATURES, MASKS, parse_shape

pytestmark = pytest.mark.gpu
LOW = [torch.bfloat16, torch.float16]
BACKENDS = [None, *discover()]
ENGINES = list(engines.ENGINES)


def attend(backend: str | None) -> Callable[..., ns.State]:
    return lambda **x: ns.attention_state(**x, backend=backend)


def right(c: Case, backend: str | None) -> None:
    """All that the backend serves agrees with the oracle: with the gradient through lse, else
    without it, else forward alone; skipped, with its reason, where it does not even serve
    forward."""
    last: ns.UnsupportedError | None = None
    for words in ({}, {"through_lse": False}, {"grads": False}):
        try:
            check(c, attend(backend), device="cuda", **words)  # type: ignore[arg-type]
            return
        except ns.UnsupportedError as error:
            last = error
    assert last is not None
    assert backend is not None, "somebody must serve every problem"
    pytest.skip(f"{backend}: {last.values.get(backend)}")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks(backend: str | None, mask: str, dtype: torch.dtype) -> None:
    s = parse_shape("B2-Hq4-Hk2-M133-N197-D64")
    made = MASKS[mask](s["batch"], s["hq"], s["m"], s["n"])
    right(case(**s, dtype=dtype, mask=made), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_features(backend: str | None, feature: str, dtype: torch.dtype) -> None:
    c = case(**parse_shape("B2-Hq4-Hk2-M70-N133-D32"), dtype=dtype, mask=ns.Causal())
    right(Case(c.q, c.k, c.v, {**c.options, **FEATURES[feature](c)}), backend)


SHAPES = [
    "B2-Hq4-Hk4-M128-N128-D64",
    "B2-Hq4-Hk4-M256-N256-D128",
    "B1-Hq8-Hk2-M200-N200-D128",
    "B2-Hq4-Hk4-M130-N130-D8",
    "B1-Hq2-Hk2-M130-N130-D256",
    "B1-Hq4-Hk2-M256-N256-D256",
    "B2-Hq2-Hk2-M128-N128-D192",
    "B1-Hq2-Hk1-M65-N129-D1",
    "B1-Hq2-Hk1-M65-N129-D33",
    "B1-Hq2-Hk1-M65-N129-D257",
    "B1-Hq2-Hk1-M65-N129-D64-E128",
    "B2-Hq16-Hk2-M1-N1000-D128",
    "B2-Hq2-Hk2-M1-N128-D64",
    "B2x3-Hq2-Hk1-M40-N40-D16",
    "Hq4-Hk2-M100-N70-D64",
    "B0-Hq2-Hk1-M20-N40-D8",
    "B2-Hq2-Hk1-M0-N40-D8",
    "B2-Hq2-Hk1-M20-N0-D8",
]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("mask", ["full", "causal(end)", "causal(start)"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes(backend: str | None, shape: str, mask: str, dtype: torch.dtype) -> None:
    s = parse_shape(shape)
    made = MASKS[mask](s["batch"], s["hq"], s["m"], s["n"])
    right(case(**s, dtype=dtype, mask=made), backend)


# ---- torch's three engines ----------------------------------------------------------------------


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Leave torch_fused one engine."""

    def leave(engine: str) -> None:
        monkeypatch.setattr(engines, "ENGINES", {engine: engines.ENGINES[engine]})
        helpers.forget(monkeypatch)

    return leave


@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=name_of)
@pytest.mark.parametrize("mask", ["full", "causal(end)", "causal(start)"])
@pytest.mark.parametrize("shape", SHAPES[:5])
@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine(
    only: Callable[[str], None], engine: str, shape: str, mask: str, dtype: torch.dtype
) -> None:
    only(engine)
    s = parse_shape(shape)
    made = MASKS[mask](s["batch"], s["hq"], s["m"], s["n"])
    right(case(**s, dtype=dtype, mask=made), "torch_fused")


def misaligned(t: Tensor) -> Tensor:
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def token_major(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "token major": token_major,
    "one element off": misaligned,
    "odd rows": lambda t: torch.cat([t, t[..., :1]], -1)[..., :-1],
    "strided width": lambda t: t.mT.contiguous().mT,
    "expanded heads": lambda t: t[:, :1].expand(t.shape),
    "stepped": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
}


@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_layouts(dtype: torch.dtype, backend: str | None, layout: str, which: str) -> None:
    """A view off by an element has been a misaligned address that ends the process; a
    transposed v has been read as if it were not."""
    c = case((2,), 4, 4, 128, 128, 64, dtype=dtype)
    if which != "do":
        c = c.with_(**{which: LAYOUTS[layout](c.tensors()[which]).contiguous()})
    x = [t.cuda().requires_grad_() for t in (c.q, c.k, c.v)]
    seen = [LAYOUTS[layout](t) if which == n else t for n, t in zip("qkv", x, strict=True)]
    do = c.cotangents()[0]
    do = LAYOUTS[layout](do).contiguous() if which == "do" else do
    moved_do = LAYOUTS[layout](do.cuda()) if which == "do" else do.cuda()
    try:
        s = ns.attention_state(*seen, backend=backend)
        found = torch.autograd.grad(s.o, seen, moved_do)
    except ns.UnsupportedError as error:
        pytest.skip(str(error.values))
    e = Exact.of(c)
    allowed = bounds(e, do, torch.zeros(do.shape[:-1]))
    leaves = [t.double().requires_grad_() for t in (c.q, c.k, c.v)]
    want = torch.autograd.grad(ns.attention(*leaves, backend="torch_any"), leaves, do.double())
    close("o", s.o, e.o, allowed["o"])
    for n, g, w in zip("qkv", found, want, strict=True):
        close("d" + n, g, w, allowed[n])


# ---- precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["legacy", "newer", "generic"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_silent_tf32(backend: str | None, setting: str) -> None:
    """Whoever has allowed tf32 for matrix products gets float32 attention all the same: the
    error stays under the float32 bound, which a tf32 product exceeds (tests/test_contract.py
    shows it)."""
    switch = torch.backends if setting == "generic" else torch.backends.cuda.matmul
    before = switch.fp32_precision
    if setting == "legacy":
        torch.set_float32_matmul_precision("high")
    else:
        switch.fp32_precision = "tf32"
    try:
        for c in (case((1,), 4, 4, 128, 160, 64), case((1,), 4, 4, 128, 128, 64, mask=ns.Causal())):
            right(c, backend)
    finally:
        if setting == "legacy":
            torch.set_float32_matmul_precision("highest")
        else:
            switch.fp32_precision = before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=name_of)
def test_a_bias_of_finfo_min(dtype: torch.dtype, backend: str | None) -> None:
    """A first block of finfo.min has made the rest wrong by 0.2; a row of nothing else averages
    v."""
    low = torch.finfo(torch.float32).min
    c = case((2,), 3, 3, 9, 200, 64, dtype=dtype)
    bias = torch.zeros(9, 200)
    bias[:, :128] = bias[8] = low
    live = c.with_(bias=bias[:8].masked_fill(bias[:8] == low, -INF), q=c.q[:, :, :8])
    e = Exact.of(live)
    try:
        got = ns.attention(*(t.cuda() for t in (c.q, c.k, c.v)), bias=bias.cuda(), backend=backend)
    except ns.UnsupportedError as error:
        pytest.skip(str(error.values))
    close("o", got[:, :, :8], e.o, bounds(e, *live.cotangents())["o"])
    size = c.v.double().abs().mean(2)
    room = (2 * 200 * unit(torch.float32) + (0 if dtype == torch.float32 else unit(dtype))) * size
    close("mean", got[:, :, 8], c.v.double().mean(2), room)


@pytest.mark.parametrize("shape", ["(M,N)", "(M,1)", "(1,N)", "N strided"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_any_stride(backend: str | None, shape: str) -> None:
    """A mask broadcast along its last axis, or strided there, has been an error or a wrong
    answer."""
    bias = {
        "(M,N)": rnd(70, 133, seed=5),
        "(M,1)": rnd(70, 1, seed=5),
        "(1,N)": rnd(1, 133, seed=5),
        "N strided": rnd(133, 70, seed=5).T,
    }[shape]
    c = case((2,), 4, 4, 70, 133, 64, dtype=torch.bfloat16, bias=bias)
    right(c, backend)
    right(c.with_(bias=bias.expand(2, 4, 70, 133)), backend)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=name_of)
@pytest.mark.parametrize("mask", [None, ns.Causal()], ids=str)
@pytest.mark.parametrize("m", [128, 130, 200])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_whose_scores_are_very_negative(
    backend: str | None, m: int, mask: ns.Mask | None, dtype: torch.dtype
) -> None:
    """lse < -88.7: what a kernel pads a tile with has become exp(-lse) = inf and the gradients
    NaN."""
    c = case((1,), 2, 2, m, m, 64, dtype=dtype, mask=mask)
    q, k = c.q.abs() + 1, -(c.k.abs() + 1)
    low = c.with_(q=q * 8, k=k)
    assert Exact.of(low).lse.max() < -88.7
    right(low, backend)


@pytest.mark.parametrize("dtype", LOW, ids=name_of)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_query_backward(backend: str | None, dtype: torch.dtype) -> None:
    """M = 1 and N = 128, forward and backward, with and without groups."""
    for hk in (4, 1):
        right(case((2,), 4, hk, 1, 128, 64, dtype=dtype), backend)
        right(case((2,), 4, hk, 1, 128, 64, dtype=dtype, mask=ns.Causal()), backend)


# ---- dropout, repeatability, memory -------------------------------------------------------------


@pytest.mark.parametrize("p", [1e-3, 0.17, 0.9])
def test_dropout_masks_are_those_of_the_cpu(p: float) -> None:
    place = (range(3), range(1 << 40, (1 << 40) + 2), range(100, 170), range(7, 140))
    for seed in (7, -1, 1 << 62):
        gpu = ns.dropout_keep(seed, *place, p, device="cuda")
        assert gpu.is_cuda
        assert torch.equal(gpu.cpu(), ns.dropout_keep(seed, *place, p))


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_drop_the_same_weights_on_both(backend: str | None) -> None:
    q, v = torch.zeros(2, 3, 96, 16), torch.eye(96).expand(2, 3, 96, 96)
    drop = ns.Dropout(0.3, 5, (1, 2, 3, 4))
    want = ns.attention(q, q, v, dropout=drop) > 0
    try:
        got = ns.attention(q.cuda(), q.cuda(), v.cuda(), dropout=drop, backend=backend)
    except ns.UnsupportedError as error:
        pytest.skip(str(error.values))
    assert torch.equal(got.cpu() > 0, want)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=name_of)
@pytest.mark.parametrize("hk", [4, 1])
def test_repeatable(hk: int, dtype: torch.dtype) -> None:
    """Forward always; backward with deterministic=True."""
    c = moved(case((2,), 4, hk, 300, 300, 64, dtype=dtype, mask=ns.Causal()), "cuda")
    runs = []
    for _ in range(4):
        leaves = [t.detach().requires_grad_() for t in (c.q, c.k, c.v)]
        s = ns.attention_state(*leaves, mask=ns.Causal(), deterministic=True)
        runs.append([s.o, s.lse, *torch.autograd.grad(s.o, leaves, c.cotangents()[0])])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_batch_invariance(dtype: torch.dtype) -> None:
    c = moved(case((5,), 8, 2, 100, 333, 64, dtype=dtype), "cuda")
    whole = ns.attention(c.q, c.k, c.v, batch_invariant=True)
    for b in range(5):
        one = ns.attention(*(t[b : b + 1] for t in (c.q, c.k, c.v)), batch_invariant=True)
        assert torch.equal(one[0], whole[b])


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"mask": ns.Causal()},
    "dropout": {"mask": ns.Causal(), "dropout": ns.Dropout(0.1, 3)},
    "window": {"mask": ns.Window(1000, 0)},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_memory_grows_as_n(options: str, backend: str | None) -> None:
    """Forward and backward at N and 2 N: what is beyond the tiles of fixed size at most
    doubles, and no square of scores (2 GiB for one head at N = 32,768 in 16 bits) is ever
    there."""
    peaks = []
    for n in (16384, 32768):
        x = [
            rnd(1, 2, n, 64, seed=s, dtype=torch.bfloat16).cuda().requires_grad_() for s in range(3)
        ]
        gc.collect()  # what earlier tests left must not be freed while this one counts
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            ns.attention(*x, **OPTIONS[options], backend=backend).sum().backward()
        except ns.UnsupportedError as error:
            pytest.skip(str(error.values))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    tiles = 24 * (1 << 25) * 4 if backend in (None, "torch_any") else 256 << 20
    assert peaks[1] < tiles + 40 * 2 * 32768 * 64 * 4
    assert peaks[1] < 2.3 * peaks[0]
