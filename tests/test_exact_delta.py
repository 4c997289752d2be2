"""exact_delta: delta as a sum over keys, which has nothing of the rounding of o."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import nosquare as ns
from helpers import case, check
from nosquare.errors import UnsupportedError

OPTIONS: dict[str, Any] = {
    "plain": {},
    "causal": {"mask": ns.Causal()},
    "window": {"mask": ns.Window(5, 2)},
    "rows without keys": {"mask": ns.Causal("start") & ns.Window(4, 0)},
    "dropout": {"dropout": ns.Dropout(0.3, 5)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "large lse": {"bias": torch.full((37, 53), -3e4)},
}


def gradients(dtype: torch.dtype, exact: bool, backend: str | None = None) -> list[torch.Tensor]:
    """Of q, k and v, where values have a mean and cotangents do: rounding of o matters there."""
    g = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(1, 2, 96, 32, generator=g).to(torch.bfloat16) for _ in range(4))
    v, do = v + 8, do + 4
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    o = ns.attention(*leaves, mask=ns.Causal(), exact_delta=exact, backend=backend)
    return list(torch.autograd.grad(o, leaves, do.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_same_function(name: str, dtype: torch.dtype) -> None:
    c = case((2,), 4, 2, 37, 53, 16, 24, dtype=dtype, **OPTIONS[name])
    check(c, partial(ns.attention_state, exact_delta=True))


def test_gradients_of_16_bits_err_less() -> None:
    truth = gradients(torch.float64, False)

    def error(exact: bool) -> list[float]:
        found = gradients(torch.bfloat16, exact, "torch_any")
        return [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)
        ]

    (dq, dk, dv), (exact_dq, exact_dk, exact_dv) = error(False), error(True)
    assert exact_dq < dq / 5
    assert exact_dk < dk / 5
    assert exact_dv == dv


def test_packed_sequences() -> None:
    g = torch.Generator().manual_seed(2)
    leaves = [torch.randn(50, 2, 16, generator=g).requires_grad_() for _ in range(3)]
    cu = torch.tensor([0, 13, 13, 50])
    found = [
        torch.autograd.grad(
            ns.attention_varlen(*leaves, cu, cu, mask=ns.Causal(), exact_delta=exact)
            .square()
            .sum(),
            leaves,
        )
        for exact in (False, True)
    ]
    for plain, exact in zip(*found, strict=True):
        torch.testing.assert_close(exact, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llvm_cpu", "torch_fused"])
def test_those_who_take_delta_from_o_refuse(name: str) -> None:
    leaves = [torch.randn(1, 2, 64, 16).requires_grad_() for _ in range(3)]
    o = ns.attention(*leaves, exact_delta=True, backend=name)
    with pytest.raises(UnsupportedError, match="delta"):
        torch.autograd.grad(o.sum(), leaves)
    assert ns.attention(*[t.detach() for t in leaves], exact_delta=True).shape == (1, 2, 64, 16)


def test_compiled_calls_have_it_too() -> None:
    leaves = [torch.randn(1, 2, 32, 16).requires_grad_() for _ in range(3)]

    @torch.compile(backend="aot_eager")
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ns.attention(q, k, v, exact_delta=True)

    with ns.receipts() as log:
        torch.autograd.grad(attend(*leaves).sum(), leaves)
    assert [r.backend for r in log if r.op == "backward"] == ["torch_any"]
