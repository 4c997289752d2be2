"""On an NVIDIA GPU: backward of triton_any with the tiles of its plans, and what only size shows.

The contract's grid for every backend, this one among them, is in test_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import nosquare as ns
from helpers import case, check, close, forget, moved, name_of, rnd

pytest.importorskip("triton", reason="triton_any is written in Triton")
from nosquare.backends.triton_any import grad_plan

pytestmark = pytest.mark.gpu


def attention(**options: Any) -> ns.State:
    return ns.attention_state(**options, backend="triton_any")


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": ns.Causal()},
    "window": {"mask": ns.Window(200, 3)},
    "softcap": {"mask": ns.Causal(), "softcap": 3.0},
    "dropout": {"mask": ns.Causal(), "dropout": ns.Dropout(0.2, 7, (1, 2, 3, 5))},
    "bias": {"bias": rnd(1, 4, 333, 500, seed=5)},
    "bias of every pair": {"bias": rnd(2, 4, 333, 500, seed=5), "mask": ns.Causal()},
    "bias of a key, sinks": {"bias": rnd(4, 1, 500, seed=5), "sinks": rnd(4, seed=6)},
    "bias of a query, alibi": {"bias": rnd(333, 1, seed=5), "alibi": rnd(4, seed=6).abs()},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=name_of)
@pytest.mark.parametrize("d", [64, 100, 128, 256])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_tiles_of_the_plan(name: str, d: int, dtype: torch.dtype) -> None:
    check(case(m=333, n=500, d=d, dtype=dtype, **OPTIONS[name]), attention, device="cuda")


@pytest.mark.parametrize("entries", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("d", [64, 128])
def test_a_bias_that_is_read_many_numbers_at_a_time(
    d: int, dtype: torch.dtype, entries: int
) -> None:
    """Its rows begin at multiples of 16 bytes, and whole tiles have no bounds."""
    bias = rnd(entries, 4, 320, 512, seed=5, dtype=dtype)
    for mask in (ns.Full(), ns.Causal()):
        check(case(m=320, n=512, d=d, dtype=dtype, bias=bias, mask=mask), attention, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["full", "causal", "dropout", "softcap"])
def test_by_atomics(name: str, d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = grad_plan.plan
    monkeypatch.setattr(grad_plan, "plan", lambda *of: replace(planned(*of), add=True))
    forget(monkeypatch)
    check(case(m=333, n=500, d=d, dtype=dtype, **OPTIONS[name]), attention, device="cuda")


def gradients(c: Any, backend: str, wide: bool = False) -> list[Tensor]:
    """Of q, k, v and, where there is one, bias."""
    leaves = {n: t.detach() for n, t in c.tensors().items()}
    if wide:
        leaves = {n: t.float() for n, t in leaves.items()}
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    o = ns.attention(**{**c.options, **leaves}, backend=backend)
    return list(torch.autograd.grad(o, list(leaves.values()), c.cotangents()[0].to(o.dtype)))


@pytest.mark.parametrize("name", ["causal", "dropout", "bias", "bias of a key, sinks"])
def test_the_same_bits_each_time(name: str) -> None:
    c = moved(case(m=333, n=500, d=64, dtype=torch.bfloat16, **OPTIONS[name]), "cuda")
    first = gradients(c, "triton_any")
    for _ in range(3):
        again = gradients(c, "triton_any")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("hk", [8, 2])
@pytest.mark.parametrize("name", ["full", "causal", "dropout"])
def test_long_sequences_agree_with_torch_any(name: str, hk: int) -> None:
    """On the same card, with the same pairs dropped."""
    c = case((1,), 8, hk, 4000, 4096, 128, dtype=torch.bfloat16, **OPTIONS[name])
    c = moved(c, "cuda")
    for got, want in zip(gradients(c, "triton_any"), gradients(c, "torch_any", True), strict=True):
        # p and ds are rounded to 16 bits, o too, and the sums are long: 3 roundings, in the norm
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < 3 * 2.0**-8


@pytest.mark.slow
def test_more_elements_than_32_bits_count() -> None:
    """The last rows of 2^24 + 300, of width 128, are those of a short problem."""
    n, last = (1 << 24) + 300, 512
    free, _ = torch.cuda.mem_get_info()
    if free < 10 * n * 128 * 2:
        pytest.skip("it takes 43 GB of the card's memory")
    mask = ns.Window(64, 0)
    x = [torch.zeros(1, 1, n, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    small = [rnd(1, 1, last, 128, seed=s, dtype=torch.bfloat16).cuda() for s in range(4)]
    for t, s in zip(x, small, strict=True):
        t[:, :, -last:] = s
    q, k, v, do = x
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o = ns.attention(*leaves, mask=mask, backend="triton_any")
    found = torch.autograd.grad(o, leaves, do)
    few = [t.requires_grad_() for t in small[:3]]
    short = ns.attention(*few, mask=mask, backend="triton_any")
    own = torch.autograd.grad(short, few, small[3])
    tail = slice(-last + 128, None)  # rows before see keys that the short problem has not got
    for name, got, want in zip("qkv", found, own, strict=True):
        exact = torch.zeros_like(want[:, :, tail], dtype=torch.float64, device="cpu") + 2.0**-6
        close("d" + name, got[:, :, tail], want[:, :, tail].cpu(), exact)
