"""llvm_cpu, backward on AMX tiles: emulated here, on any processor with AVX512-BF16, and compiled
for one that has them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import nosquare as ns
from helpers import NAN, case, check, rnd
from llvm_helpers import target_of
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem
from test_llvm_backward import FEATURES, MASKS, SIZES, by_kernel, grads_of
from test_llvm_backward import test_a_key_of_nan_that_some_rows_see_is_0_for_the_others as nan_seen
from test_llvm_backward import test_threads_do_not_change_a_bit as same_bits
from test_llvm_backward import test_what_nobody_sees_may_hold_nan as nan_unseen

pytest.importorskip("llvmlite", reason="llvm_cpu generates code with llvmlite")
from nosquare.backends.llvm_cpu import call, grad_kernel, gradients, target
from nosquare.backends.llvm_cpu.compiled import Code
from nosquare.backends.llvm_cpu.grad_packing import PAIRS, TILES
from nosquare.backends.llvm_cpu.grad_weights import Spec as Written

BF16 = torch.bfloat16


@pytest.fixture
def machine() -> target.Target:
    return target_of("tiles")


@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(machine: target.Target, sizes: dict[str, Any], mask: ns.Mask | None) -> None:
    check(case(mask=mask, dtype=BF16, **sizes), by_kernel(machine))


@pytest.mark.parametrize("mask", MASKS[3:], ids=lambda m: type(m).__name__)
def test_masks(machine: target.Target, mask: ns.Mask) -> None:
    check(case(mask=mask, m=100, n=110, dtype=BF16), by_kernel(machine))


# but for "scores beyond exp": factors below 2^-126 are 0 to the products of bfloat16
@pytest.mark.parametrize("name", [name for name in FEATURES if name != "scores beyond exp"])
def test_features(machine: target.Target, name: str) -> None:
    check(case(m=70, n=100, dtype=BF16, **FEATURES[name]), by_kernel(machine))


@pytest.mark.parametrize("d", [32, 33])  # whole tiles are multiplied where they are, or copied
def test_whole_tiles(machine: target.Target, d: int) -> None:
    check(case(m=300, n=333, d=d, e=64, mask=ns.Causal(), dtype=BF16), by_kernel(machine))


def test_any_strides(machine: target.Target) -> None:
    """q of tokens, and of rows that begin at odd places; do that is one row for all."""
    c = case(m=130, n=140, d=32, dtype=BF16)
    wide = rnd(2, 4, 130, 33, seed=1, dtype=BF16)
    by_token = c.q.transpose(1, 2).contiguous().transpose(1, 2)
    for q in (by_token, wide[..., :32], wide[..., 1:]):
        check(c.with_(q=q), by_kernel(machine))
    mine = [t.detach().requires_grad_() for t in (c.q, c.k, c.v)]
    o = by_kernel(machine)(*mine).o
    found = (torch.autograd.grad(o, mine, do, retain_graph=True) for do in ones(o))
    assert all(map(torch.equal, *found))


def ones(o: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same cotangent as one number, and in full."""
    return torch.ones((), dtype=o.dtype).expand(o.shape), torch.ones_like(o)


@pytest.mark.parametrize("mask", [None, ns.Causal()], ids=str)
def test_shares_of_keys(machine: target.Target, mask: ns.Mask | None) -> None:
    c = case((1,), 2, 1, m=200, n=200, mask=mask, sinks=rnd(2, seed=3), dtype=BF16)
    check(c, by_kernel(machine, lambda plan: replace(plan, splits=3)))


def test_threads_do_not_change_a_bit(machine: target.Target) -> None:
    same_bits(machine)


def test_nan(machine: target.Target) -> None:
    """In what nobody sees, and in a key that some see."""
    nan_unseen(machine, BF16)
    nan_seen(machine, BF16)


def test_rows_of_nan_beside_rows_of_numbers(machine: target.Target) -> None:
    """A row of q or do that is not a number reaches no row of dq but its own, and dk and dv of the
    keys that it sees alone."""
    c = case((1,), 1, 1, m=128, n=192, d=32, dtype=BF16, mask=ns.Causal("start"))
    q = c.q.clone()
    q[..., 100, 3] = NAN
    (dq, dk, dv), clean = (grads_of(x, machine) for x in (c.with_(q=q), c))
    rows = torch.arange(128) != 100
    assert torch.equal(dq[..., rows, :], clean[0][..., rows, :])
    assert dq[..., 100, :].isnan().all()
    for got, want in ((dk, clean[1]), (dv, clean[2])):
        assert got[..., :101, :].isnan().all()
        assert torch.equal(got[..., 128:, :], want[..., 128:, :])


def test_tiles_are_taken_where_there_are_any(machine: target.Target) -> None:
    def of(dtype: torch.dtype, machine: target.Target, m: int = 37) -> tuple[str, int]:
        c = case(m=m, dtype=dtype)
        plan = gradients.plan(Problem.of(Inputs(c.q, c.k, c.v), Spec()), machine)
        return plan.products, plan.tile

    assert of(BF16, machine) == (TILES, 64)
    assert of(BF16, machine, 512) == (TILES, 128)
    assert of(BF16, replace(machine, tiles=""), 512) == (PAIRS, 48)
    assert of(torch.float16, machine, 512) == of(torch.float32, machine) == ("float32", 48)


@pytest.mark.parametrize(
    ("mask", "m"), [(None, 300), (MASKS[1], 300), (MASKS[6], 100), (MASKS[7], 100)], ids=str
)
def test_tall_tiles(machine: target.Target, mask: ns.Mask | None, m: int) -> None:
    """Tiles of 128 queries, where M is long by itself, here for any."""
    c = case(m=m, n=110, d=40, dtype=BF16, mask=mask, dropout=ns.Dropout(0.2, 3))
    check(c, by_kernel(machine, lambda plan: replace(plan, tile=128)))


def test_what_a_processor_with_tiles_is_told(machine: target.Target) -> None:
    c = case(d=64, dtype=BF16)
    x = Inputs(c.q, c.k, c.v)
    form = call.fill(Problem.of(x, Spec()), x).form
    features = f"{machine.features},+amx-tile,+amx-bf16"
    real = replace(machine, cpu="sapphirerapids", features=features, tiles="amx")
    code = Code(str(grad_kernel.write(Written(form, TILES, 128), real)), real)
    parts = {part.split()[0]: part for part in code.assembly().split(".globl")[1:]}
    for name in ("tiles_fresh", "tiles_more"):
        assert parts[name].count("tdpbf16ps") == 4  # 2 x 2 tiles of c in registers
        assert not re.search(r"[xyz]mm\d|\d\d-byte (Folded )?Spill", parts[name])
    inner = parts["tiles_fresh"].split("tdpbf16ps")[1:-1]
    assert sum(text.count("tileloadd") for text in inner) <= 4
    assert parts["item"].count("ldtilecfg") == parts["item"].count("tilerelease") == 1
