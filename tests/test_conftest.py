"""The poison of conftest.py works: without it, a row that nobody wrote could pass its test."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_unwritten_memory_is_nan(dtype: torch.dtype) -> None:
    x = torch.zeros(5, 3, dtype=dtype)
    for made in (
        torch.empty(5, 3, dtype=dtype),
        torch.empty((5, 3), dtype=dtype, requires_grad=True),
        torch.empty_like(x.T),
        torch.empty_strided((5, 3), (1, 5), dtype=dtype),
        x.new_empty((5, 3)),
    ):
        assert made.isnan().all()
        assert made.dtype == dtype
    assert torch.empty_like(x.T).stride() == torch.empty_strided((3, 5), (1, 3)).stride()


def test_other_memory_is_left_alone() -> None:
    assert torch.empty(4, dtype=torch.int64).shape == (4,)
    assert torch.empty(4, dtype=torch.bool).shape == (4,)
    assert torch.empty(0).shape == (0,)
    assert torch.empty_strided((4,), (0,)).shape == (4,)
    assert torch.empty(4, device="meta").device.type == "meta"


@given(st.integers(1, 5))
def test_hypothesis_examples_are_poisoned(n: int) -> None:
    assert torch.empty(n).isnan().all()


def test_compile_sees_no_poison() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).copy_(x) * 2

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.gpu
def test_gpu_mark_skips_without_a_gpu() -> None:
    assert torch.cuda.is_available()
