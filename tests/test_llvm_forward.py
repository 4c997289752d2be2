"""llvm_cpu, forward for many queries: every feature, on every width of vector this machine has."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import nosquare as ns
from helpers import INF, NAN, Case, case, check, rnd
from kinds import masks
from llvm_helpers import (
    AT_THE_EDGE,
    ISAS,
    OPTIONS,
    SIZES,
    agrees,
    attention_on,
    problem_of,
    target_of,
)
from nosquare.backends import FORWARD
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem

pytest.importorskip("llvmlite", reason="llvm_cpu generates code with llvmlite")
from nosquare.backends.llvm_cpu import call, prefill, yields


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each vector extension of this machine."""
    target_of(request.param)
    return str(request.param)


@pytest.fixture(params=[*ISAS, "tiles"])
def for_short(request: pytest.FixtureRequest) -> str:
    """Those, and AMX emulated."""
    target_of(request.param)
    return str(request.param)


@pytest.mark.parametrize("mask", [None, ns.Causal(), ns.Causal("start"), ns.Window(20, 5)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(isa: str, sizes: dict[str, int], mask: ns.Mask | None) -> None:
    agrees(case(mask=mask, **sizes), isa)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_short_types(for_short: str, sizes: dict[str, int], dtype: torch.dtype) -> None:
    agrees(case(mask=ns.Window(20, 5), dtype=dtype, **sizes), for_short)


@pytest.mark.parametrize("name", list(masks(2, 4, 1, 1)))
def test_masks(isa: str, name: str) -> None:
    c = case(m=61, n=203, d=24, e=40)
    agrees(c.with_(mask=masks(2, 4, 61, 203)[name]), isa)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_options(isa: str, name: str) -> None:
    # some panels are seen whole, others in part
    agrees(case(m=61, n=203, d=24, e=40, mask=ns.Causal(), **OPTIONS[name]), isa)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_everything_in_short_types(for_short: str, dtype: torch.dtype) -> None:
    agrees(
        case(m=61, n=203, d=24, e=40, dtype=dtype, mask=ns.Causal(), **OPTIONS["all"]), for_short
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [150, 151])
def test_what_nobody_sees_is_not_read(for_short: str, last: int, dtype: torch.dtype) -> None:
    c = case(m=61, n=203, d=24, e=40, dtype=dtype)
    k, v = c.k.clone(), c.v.clone()
    k[..., last:, :], v[..., last:, :] = NAN, INF
    bias = torch.zeros(203)
    bias[last:] = NAN
    for mask in (
        ns.Prefix(last),
        ns.Lengths(torch.tensor([last, 3])),
        ns.Dense((torch.arange(203) < last).expand(61, 203)),
        ns.Window(last - 61, 0, "start") & ns.Prefix(last),
    ):
        agrees(c.with_(k=k, v=v, mask=mask), for_short)
        agrees(c.with_(k=k, v=v, mask=mask, bias=bias[None]), for_short)


def test_rows_in_any_order_in_memory(isa: str) -> None:
    q = rnd(2, 61, 4, 24, seed=1).transpose(1, 2)
    k = rnd(2, 70, 2, 30, seed=2)[..., 3:27].transpose(1, 2)
    v = rnd(2, 2, 80, 40, seed=3)[..., ::1][:, :, :70]
    p, x = problem_of(q, k, v, ns.Causal())
    o, _, _ = prefill.forward(p, prefill.plan(p, target_of(isa)), x)
    assert o.stride() == (61 * 4 * 40, 40, 4 * 40, 1)  # as q: heads inside tokens
    agrees(Case(q, k, v, {"mask": ns.Causal()}), isa)


def test_two_threads_give_the_bits_of_one(isa: str) -> None:
    c = case(m=200, n=300, d=64, mask=ns.Causal())
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(attention_on(isa)(q=c.q, k=c.k, v=c.v, mask=ns.Causal()))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0].o, found[1].o)
    assert torch.equal(found[0].lse, found[1].lse)


def test_a_row_with_nan_stays_alone(isa: str) -> None:
    c = case(m=61, n=203, d=24)
    q = c.q.clone()
    q[0, 1, 7] = NAN
    state = attention_on(isa)(q=q, k=c.k, v=c.v)
    bad = torch.zeros(2, 4, 61, dtype=torch.bool)
    bad[0, 1, 7] = True
    assert torch.equal(state.o.isnan().all(-1), bad)
    assert torch.equal(state.lse.isnan(), bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_stay_in_registers(isa: str, dtype: torch.dtype) -> None:
    c = case(d=64, dtype=dtype)
    p, x = problem_of(c.q, c.k, c.v)
    filled = call.fill(p, x)
    text = prefill.kernel(filled, prefill.plan(p, target_of(isa))).assembly()
    for name in ("scores", "values_"):
        body = text[text.index(f"\n{name}") :]
        body = body[: body.index(".Lfunc_end")]
        assert "Spill" not in body, f"{name} spills on {isa}"


def test_sequences_of_a_packed_call_are_calls_of_their_own(isa: str) -> None:
    lengths_q, lengths_k = [5, 0, 70, 3], [9, 4, 70, 0]
    q, k, v = rnd(80, 4, 24, seed=1), rnd(83, 2, 24, seed=2), rnd(83, 2, 40, seed=3)
    q[78:] = NAN  # two tokens that no sequence owns
    cu = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k)]
    sinks, drop = rnd(4, seed=4), ns.Dropout(0.2, 5, (3, 0, 1, 2))
    mask = ns.Causal() & ns.Lengths(torch.tensor([9, 4, 60, 0]))
    x = Inputs(q, k, v, None, sinks, None, drop.seed_tensor(), *cu, mask.tensors)
    p = Problem.of(x, Spec(str(mask), p=drop.p, offsets=drop.offsets))
    o, lse, _ = prefill.forward(p, prefill.plan(p, target_of(isa)), x)
    assert torch.equal(o[78:], torch.zeros(2, 4, 40))
    assert bool((lse[:, 78:] == -INF).all())
    for b, (m, n) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, keys = (
            slice(int(cu[0][b]), int(cu[0][b]) + m),
            slice(int(cu[1][b]), int(cu[1][b]) + n),
        )
        own = ns.Causal() & ns.Lengths(mask.tensors[0][b : b + 1])
        shard = ns.Dropout(0.2, 5, (3 + b, 0, 1, 2))
        one = Case(
            *(t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys])),
            {"mask": own, "sinks": sinks, "dropout": shard},
        )

        def mine(rows: slice = rows, **_: Any) -> ns.State:
            return ns.State(o[rows].transpose(0, 1)[None], lse[:, rows][None])

        check(one, mine, grads=False)


def test_torch_serves_what_it_does_sooner() -> None:
    def objections(**sizes: Any) -> list[str]:
        p = problem_of(**sizes)[0]
        return prefill.refusals(p) or yields(p, FORWARD)

    small, large = rnd(1, 1, 20, 64), rnd(1, 8, 512, 64)
    said = "with fewer than 524288 products torch's own kernel has done before it starts"
    assert objections(q=small, k=small, v=small) == [said]
    assert objections(q=large, k=large, v=large) == []
    said = "its tiles hold rows of up to 2048 numbers, and these have 2049"
    assert objections(q=large, k=large, v=rnd(1, 8, 512, 2049)) == [said]
    # nobody else has a fast kernel for these
    assert objections(q=small, k=small, v=small, dropout=ns.Dropout(0.1, 1)) == []
    assert objections(q=small, k=small, v=rnd(1, 1, 20, 32)) == []
    assert objections(q=small, k=small, v=small, mask=ns.Window(3, 0)) == []


GUARDED = """
from nosquare.backends.llvm_cpu import prefill

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    sizes = (7, 22), (71, 22), (71, 37)
    q, k, v = (at_the_edge(torch.randn(1, 2, *size).to(dtype)) for size in sizes)
    bias, seen = at_the_edge(torch.randn(7, 71)), at_the_edge(torch.rand(7, 71) < 0.5)
    for mask, more in ((ns.Full(), None), (ns.Dense(seen), bias)):
        x = Inputs(q, k, v, more, None, None, None, None, None, mask.tensors)
        p = Problem.of(x, Spec(str(mask)))
        prefill.forward(p, prefill.plan(p, target.host(sys.argv[1])), x)
print("done")
"""


def test_reads_stay_inside_the_arrays(isa: str) -> None:
    words = [sys.executable, "-c", AT_THE_EDGE + GUARDED, isa]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
