"""llvm_cpu outside its kernels: what a warm call reuses, and what it must not; code for other
processors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import nosquare as ns
from helpers import case, check, name_of, rnd
from llvm_helpers import problem_of, target_of
from nosquare.inputs import Inputs

pytest.importorskip("llvmlite", reason="llvm_cpu generates code with llvmlite")
from nosquare.backends.llvm_cpu import call, decode, gradients, prefill
from nosquare.backends.llvm_cpu.compiled import assembly
from nosquare.backends.llvm_cpu.ready import why_not
from nosquare.backends.llvm_cpu.target import Target, host

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
NEON = Target("neon", 4, 32, "neoverse-n1", "+neon", triple="aarch64-unknown-linux-gnu")
FAMILIES: dict[str, Any] = {"decode": decode, "prefill": prefill, "backward": gradients}
DTYPES = [torch.float32, torch.bfloat16]


def saved(x: Inputs) -> tuple[Tensor, Tensor]:
    """o and lse by torch_any."""
    state = ns.attention_state(x.q, x.k, x.v, mask=ns.Causal(), backend="torch_any")
    return state.o, state.lse


def run(family: str, p: Any, x: Inputs, target: Target) -> Any:
    """One call of a family of kernels: o and lse, or the gradients for o as its own cotangent."""
    kernel = FAMILIES[family]
    plan = kernel.plan(p, target)
    if family != "backward":
        return kernel.forward(p, plan, x)[:2]
    o, lse = saved(x)
    return kernel.backward(p, plan, x, (o, lse), (o, None))[0][:3]


def inputs(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A problem that the family takes, and fresh inputs."""
    m = 1 if family == "decode" else 70
    q, k, v = (
        rnd(1, h, n, 64, seed=seed + h, dtype=dtype) for h, n in ((4, m), (2, 150), (2, 150))
    )
    p, x = problem_of(q, k, v, ns.Causal())
    if family == "backward":
        object.__setattr__(p, "grads", "qkv")
    return p, x


# ---- warm calls ----


@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_call_allocates_its_results_and_one_workspace(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, x = inputs(family)
    run(family, p, x, host())
    made: list[str] = []

    def counted(name: str) -> Callable[..., Tensor]:
        make = getattr(torch, name)
        return lambda *a, **k: (made.append(name), make(*a, **k))[1]

    for name in ("empty", "empty_strided", "empty_like", "zeros", "tensor", "full"):
        monkeypatch.setattr(torch, name, counted(name))
    kernel = FAMILIES[family]
    if family == "backward":
        o, lse = rnd(1, 4, 70, 64), rnd(1, 4, 70)
        kernel.backward(p, kernel.plan(p, host()), x, (o, lse), (o, None))
        assert len(made) == 4, made  # dq, dk, dv
    else:
        kernel.forward(p, kernel.plan(p, host()), x)
        assert len(made) == 3, made  # o, lse


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_problems_share_an_outline_and_no_array(family: str) -> None:
    """The second call of a problem reads its own arrays, also where the first ones are gone."""
    for seed in (1, 2, 3):
        p, x = inputs(family, seed=10 * seed)
        want = saved(x)
        if family == "backward":
            q, k, v = (t.clone().requires_grad_() for t in x[:3])
            o = ns.attention(q, k, v, mask=ns.Causal(), backend="torch_any")
            want = torch.autograd.grad(o, (q, k, v), want[0])
        pairs = zip(run(family, p, x, host()), want, strict=True)
        for mine, theirs in pairs:
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert call.outline(p).ready


def varied(m: int) -> Iterator[dict[str, Any]]:
    """Options under which problems are equal, and their arrays lie otherwise or have other types.
    Each comes after one that it could be taken for."""
    n, c = 200, torch.arange
    for bias in (rnd(4, m, n), rnd(4, n, m).mT, rnd(4, m, 2 * n)[..., ::2], rnd(4, m, n).double()):
        yield {"bias": bias}
    for slopes in (rnd(4).abs(), rnd(8).abs()[::2], rnd(4).abs().double()):
        yield {"alibi": slopes, "sinks": slopes.clone()}
    for lengths in ((200, 77), (0, 131)):
        for dtype in (torch.int64, torch.int32, torch.uint8):
            yield {"mask": ns.Lengths(torch.tensor(lengths, dtype=dtype))}
    for seen in (rnd(2, 1, m, n) > 0, (rnd(2, 1, n, m) > 0).mT, rnd(2, 1, m, 3 * n)[..., ::3] > 1):
        yield {"mask": ns.Dense(seen)}
    for ids in (c(n).expand(2, n) // 60, (c(n) // 90).to(torch.uint8).expand(2, n)):
        yield {"mask": ns.Documents(c(2 * m).reshape(2, m).to(ids.dtype) % 3, ids)}


@pytest.mark.parametrize("m", [3, 30], ids=["decode", "prefill"])
def test_arrays_of_other_strides_and_types_are_other_calls(m: int) -> None:
    for options in varied(m):
        c = case((2,), 4, 2, m, 200, 40, **options)
        check(c, lambda **o: ns.attention_state(**o, backend="llvm_cpu"), grads=False)


def test_seeds_of_dropout_are_not_remembered() -> None:
    q, k = rnd(1, 2, 40, 16), rnd(1, 2, 90, 16)
    for seed in (1, 2, -(1 << 63)):
        drop = ns.Dropout(0.4, seed)
        want = ns.attention(q, k, k, dropout=drop, backend="torch_any")
        got = ns.attention(q, k, k, dropout=drop, backend="llvm_cpu")
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)


def test_batch_axes_that_one_stride_steps_through() -> None:
    """An axis of one entry between two others does not hide that they are not even."""
    whole = rnd(2, 1, 4, 2, 30, 16)
    even, uneven = whole, whole[:, :, :3]
    flat = whole.flatten(0, 2)
    assert call.even(problem_of(even, even, even)[0])
    assert not call.even(problem_of(uneven, uneven, uneven)[0])
    for q in (even, uneven, whole.transpose(0, 2), whole[:, :, ::2]):
        got = ns.attention(q, q, q)  # whoever it is that takes it
        want = ns.attention(*(3 * (q.reshape(-1, 2, 30, 16),)), backend="torch_any")
        assert torch.allclose(got, want.view(q.shape), rtol=1e-4, atol=1e-5)
    got = ns.attention(even, even, even, backend="llvm_cpu")
    want = ns.attention(flat, flat, flat, backend="torch_any").view(even.shape)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)


def test_whatever_device_and_dtype_are_the_default() -> None:
    """All memory is on the CPU, and of the types that the kernels know."""
    before = torch.get_default_dtype()
    inputs_, mask = (rnd(1, 2, 70, 16), rnd(1, 2, 90, 16), rnd(1, 2, 90, 16)), ns.Causal()
    want = ns.attention(*inputs_, mask=mask, backend="torch_any")
    call.outline.cache_clear()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            for rows in (70, 3):
                q, k, v = (t.clone().requires_grad_() for t in inputs_)
                o = ns.attention(q[:, :, -rows:], k, v, mask=mask, backend="llvm_cpu")
                grads = torch.autograd.grad(o, (q, k, v), o.detach())
                assert torch.allclose(o, want[:, :, -rows:], rtol=1e-4, atol=1e-5)
                assert all(bool(g.isfinite().all()) for g in grads)
    finally:
        torch.set_default_dtype(before)


# ---- other processors ----


class Written(Exception):
    """The text of a module, instead of its code."""


def text_of(family: str, dtype: torch.dtype, target: Target, patch: pytest.MonkeyPatch) -> str:
    """What a family writes for a target."""

    def stop(_: object, __: Target, write: Callable[[], object]) -> None:
        raise Written(str(write()))

    p, x = inputs(family, dtype)
    call.outline.cache_clear()
    patch.setattr(FAMILIES[family].__name__ + ".compiled", stop)
    with pytest.raises(Written) as found:
        run(family, p, x, target)
    call.outline.cache_clear()
    return str(found.value)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("family", FAMILIES)
def test_neon_compiles(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """For an ARM processor, whatever this one is: multiply-adds of whole vectors."""
    words = assembly(text_of(family, dtype, NEON, monkeypatch), NEON)
    assert len(re.findall(r"\bfmla\s+v\d+\.4s, v\d+\.4s, v\d+\.", words)) >= 24
    assert "zmm" not in words


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("isa", ["avx512", "avx2"])
def test_only_registers_that_the_isa_has(
    isa: str, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(isa)
    words = assembly(text_of(family, dtype, target, monkeypatch), target)
    register = {"avx512": "zmm", "avx2": "ymm"}[isa]
    assert len(re.findall(rf"\bv(?:fn?madd\w+|dpbf16)ps\b.*{register}", words)) >= 24
    assert isa == "avx512" or not re.search(r"zmm|ymm(1[6-9]|2\d|3[01])|%k\d", words)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("family", FAMILIES)
def test_avx2_computes_what_avx512_does(family: str, dtype: torch.dtype) -> None:
    """Forward, decode and backward, on one machine that has both."""
    p, x = inputs(family, dtype)
    wide, narrow = (run(family, p, x, target_of(isa)) for isa in ("avx512", "avx2"))
    close = 2e-5 if dtype == torch.float32 else 0.02
    for a, b in zip(wide, narrow, strict=True):
        assert (a.float() - b.float()).abs().max() <= close * a.float().abs().max()
