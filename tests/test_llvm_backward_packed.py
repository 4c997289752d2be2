"""llvm_cpu, backward of packed sequences: what each gives alone, all in one parallel region."""

from __future__ import annotations

import importlib
import platform
from dataclasses import replace
from typing import Any

import pytest
import torch

import helpers
import nosquare as ns
from helpers import name_of, rnd
from nosquare.errors import UnsupportedError
from test_varlen import LK, LQ, OPTIONS, Lengths, compare, offsets, packed

pytest.importorskip("llvmlite", reason="llvm_cpu generates code with llvmlite")
from nosquare.backends.llvm_cpu import gradients, target

ARM = platform.machine() in ("arm64", "aarch64")
LONG: Lengths = [0, 97, 1, 48, 130], [64, 150, 3, 65, 0]  # more than a tile and a panel, and fewer


@pytest.fixture(params=["neon"] if ARM else ["avx512", "avx2"], autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every call of llvm_cpu runs on this width of vectors."""
    try:
        machine = target.host(request.param)
    except UnsupportedError:
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(importlib.import_module(f"{target.__package__}"), "host", lambda: machine)
    helpers.forget(monkeypatch)
    return str(request.param)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_each_sequence_is_as_if_alone(options: str, dtype: torch.dtype) -> None:
    compare(packed(dtype, e=6), OPTIONS[options], backend="llvm_cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("splits", [1, 3])
def test_long_sequences(dtype: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = gradients.plan
    monkeypatch.setattr(gradients, "plan", lambda *args: replace(plan(*args), splits=splits))
    lengths = torch.tensor([64, 100, 3, 60, 0])
    given: dict[str, Any] = {
        **{"mask": ns.Causal() & ns.Lengths(lengths), "sinks": rnd(4, seed=9)},
        **{"dropout": ns.Dropout(0.2, 1)},
    }
    compare(packed(dtype, d=40, e=24, lengths=LONG), given, LONG, "llvm_cpu")


def test_a_sequence_has_the_same_gradients_whatever_it_is_packed_with() -> None:
    q, k, v = packed()
    do = rnd(*q.shape, seed=7)
    whole = gradients_of([q, k, v], offsets(LQ), offsets(LK), do)
    rows, cols = slice(sum(LQ[:4]), sum(LQ[:5])), slice(sum(LK[:4]), sum(LK[:5]))
    own = [q[rows], k[cols], v[cols]]
    alone = gradients_of(own, offsets([30]), offsets([21]), do[rows])
    for a, b, part in zip(whole, alone, (rows, cols, cols), strict=True):
        assert torch.equal(a[part], b)


def gradients_of(
    x: list[torch.Tensor], cu_q: torch.Tensor, cu_k: torch.Tensor, do: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    own = [t.clone().requires_grad_() for t in x]
    o = ns.attention_varlen(*own, cu_q, cu_k, batch_invariant=True, backend="llvm_cpu")
    return torch.autograd.grad(o, own, do)


def test_strided_packs() -> None:
    """q, k, v as slices of one fused projection, (total, heads, 3 * width)."""
    fused, cu, do = rnd(sum(LQ), 4, 24), offsets(LQ), rnd(sum(LQ), 4, 8, seed=7)
    views = list(fused.chunk(3, -1))
    got = [t.requires_grad_() for t in views]
    o = ns.attention_varlen(*got, cu, cu, mask=ns.Causal(), backend="llvm_cpu")
    want = [t.detach().contiguous().requires_grad_() for t in views]
    same = ns.attention_varlen(*want, cu, cu, mask=ns.Causal(), backend="llvm_cpu")
    found = (torch.autograd.grad(y, x, do) for y, x in ((o, got), (same, want)))
    assert all(map(torch.equal, *found))


def test_the_receipt_says_what_it_took() -> None:
    q, k, v = (t.requires_grad_() for t in packed(lengths=LONG))
    with ns.receipts() as log:
        o = ns.attention_varlen(q, k, v, *map(offsets, LONG), backend="llvm_cpu")
        o[: sum(LONG[0])].sum().backward()
    back = log[-1]
    assert back.op == "backward"
    rows = sum(-(-m // 48) * 48 for m in LONG[0])  # whole tiles
    assert back.workspace_bytes >= 4 * 4 * rows * (8 + 4)
