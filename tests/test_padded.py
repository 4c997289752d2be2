"""D != E on torch's CPU kernel, which has one width: padded by a copy where that pays, refused
elsewhere. The whole contract of it at small sizes, with the threshold out of the way."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import nosquare as ns
from helpers import case, check, name_of, rnd

cpu: Any = importlib.import_module("nosquare.backends.torch_fused.cpu")


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cpu, "REPAYS_PADDING", 1)
    ns.ops._DECISIONS.clear()
    yield
    ns.ops._DECISIONS.clear()


def on_fused(**x: Any) -> ns.State:
    return ns.attention_state(**x, backend="torch_fused")


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("mask", [None, ns.Causal("start"), ns.Causal()], ids=str)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize(("d", "e"), [(16, 24), (24, 16), (1, 5), (33, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
def test_against_the_oracle(
    d: int, e: int, batch: tuple[int, ...], mask: ns.Mask | None, dtype: torch.dtype
) -> None:
    n = 37 if mask == ns.Causal() else 53
    c = case(batch, 4, 2, 37, n, d, e, dtype=dtype, **({} if mask is None else {"mask": mask}))
    check(c, on_fused, through_lse=False)


@pytest.mark.usefixtures("_always")
def test_one_query_a_bias_and_16_bits() -> None:
    check(case((2,), 4, 2, 1, 53, 16, 24), on_fused, through_lse=False)
    check(case((2,), 4, 2, 9, 53, 16, 24, bias=rnd(4, 1, 53)), on_fused, grads=False)
    check(case((2,), 4, 2, 9, 53, 16, 24, dtype=torch.bfloat16), on_fused, grads=False)


def test_the_receipt_says_what_was_copied() -> None:
    q, k, v = rnd(1, 1, 1024, 8), rnd(1, 1, 1024, 8, seed=1), rnd(1, 1, 1024, 16, seed=2)
    with ns.receipts() as log:
        ns.attention(q, k, v)
        ns.attention(q[..., :9, :], k, v)
    assert [r.backend for r in log] == ["torch_fused", "torch_any"]
    assert log[0].copies == ("q and k, padded to E",)
    assert "does not pay below 1,024 rows" in str(log[1])
