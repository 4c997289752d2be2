"""Heads on threads of their own: the same answers, and nothing of it is left behind."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

import nosquare as ns
from helpers import Attend, Case, case, check, force_tiles, load_forward_mode, rnd
from nosquare.backends.torch_any import side_by_side


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads, small tiles, and no problem too small for threads of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    tiling = importlib.import_module("nosquare.backends.torch_any.tiling")
    monkeypatch.setattr(tiling, "APART_ELEMENTS", 0)
    force_tiles(monkeypatch)
    yield
    torch.set_num_threads(before)


ANY_STATE: Attend = partial(ns.attention_state, backend="torch_any")


def plans(c: Case, wanted: str = "") -> list[str]:
    leaves = {n: t.detach().requires_grad_(bool(wanted)) for n, t in c.tensors().items()}
    with ns.receipts() as log:
        o = ANY_STATE(**{**c.options, **leaves}).o
        if wanted:
            torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))
    return [r.plan for r in log]


CASES = {
    "plain": case(),
    "float64": case(dtype=torch.float64),
    "wide v": case(e=24),
    "causal": case(mask=ns.Causal()),
    "lengths": case(mask=ns.Lengths(torch.tensor([11, 53]))),
    "dropout": case(dropout=ns.Dropout(0.3, 5)),
    "bias of heads": case(batch=(1,), hq=4, hk=4, bias=rnd(4, 1, 53, seed=7)),
    "bias for all": case(bias=rnd(1, 37, 53, seed=7)),
    "bias of entries": case(bias=rnd(2, 1, 37, 53, seed=7)),
    "bias of one number": case(bias=rnd(seed=7)),
    "sinks": case(batch=(1,), sinks=rnd(4, seed=8)),
    "sinks for all": case(sinks=rnd(4, seed=8)),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_the_oracle(name: str) -> None:
    check(CASES[name], ANY_STATE)


@pytest.mark.parametrize("name", CASES)
def test_heads_that_add_to_one_sum_take_turns(name: str) -> None:
    forward, backward = plans(CASES[name], "all")
    shared = name in ("bias for all", "bias of one number", "bias of entries", "sinks for all")
    assert ("on each of 2 threads" in backward) is not shared
    assert ("on each of 2 threads" in forward) is not shared  # one plan for both


@pytest.mark.parametrize(("hk", "batch", "apart"), [(1, (1,), False), (3, (1,), False),
                                                    (2, (1,), True), (1, (2,), True)])  # fmt: skip
def test_no_thread_is_left_idle(hk: int, batch: tuple[int, ...], apart: bool) -> None:
    (plan,) = plans(case(batch=batch, hq=hk, hk=hk))
    assert ("threads" in plan) is apart


def test_batch_invariance() -> None:
    """The batch alone does not bring threads, and with them other tiles."""
    whole = case(batch=(2,), hq=1, hk=1, batch_invariant=True)
    assert "threads" not in plans(whole)[0]
    one = Case(whole.q[:1], whole.k[:1], whole.v[:1], whole.options)
    got = [ANY_STATE(c.q, c.k, c.v, **c.options).o[:1] for c in (whole, one)]
    assert torch.equal(*got)


def test_plans_follow_the_number_of_threads() -> None:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found += ["threads" in plans(CASES["plain"])[0]]
    assert found == [False, True]


def test_workspace_is_that_of_all_threads() -> None:
    c = case(hq=2, hk=2)
    with ns.receipts() as log:
        ANY_STATE(c.q, c.k, c.v, **c.options)
    assert log[0].workspace_bytes == 2 * (16 * 16 * 4)  # each has one tile of scores


def test_calls_leave_thread_counts_alone() -> None:
    c = CASES["plain"]
    ANY_STATE(c.q, c.k, c.v, **c.options)
    counts = [torch.get_num_threads()]
    late = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    late.start()
    late.join()
    assert counts == [2, 2]
    assert not [t for t in threading.enumerate() if t.name.startswith("nosquare")]


def test_inference_mode_reaches_the_threads() -> None:
    c = CASES["plain"]
    with torch.inference_mode():
        o = ANY_STATE(c.q, c.k, c.v, **c.options).o
    assert o.is_inference()
    assert torch.equal(o, ANY_STATE(c.q, c.k, c.v, **c.options).o)


def test_forward_mode_stays_outside_the_threads() -> None:
    """A dual level is the process's; whether tangents are taken is each thread's."""
    load_forward_mode()
    c = CASES["float64"]
    t = rnd(*c.q.shape, seed=4, dtype=torch.float64)

    def o(q: torch.Tensor) -> torch.Tensor:
        return ANY_STATE(q, c.k, c.v).o

    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(o(forward_ad.make_dual(c.q, t))).tangent
    step = 1e-6
    torch.testing.assert_close(tangent, (o(c.q + step * t) - o(c.q - step * t)) / (2 * step))


def test_a_profiler_sees_every_operation() -> None:
    """It watches one thread, so the work stays on it."""
    c = CASES["plain"]
    with torch.profiler.profile() as profile, ns.receipts() as log:
        ANY_STATE(c.q, c.k, c.v, **c.options)
    assert any("bmm" in event.key for event in profile.key_averages())
    assert log[0].workspace_bytes == 2 * 16 * 16 * 4  # one thread, with G = 2 heads as rows


def test_what_a_thread_raises_is_raised() -> None:
    def fail(job: int) -> int:
        if job == 2:
            raise ZeroDivisionError("job 2")
        return job

    with pytest.raises(ZeroDivisionError, match="job 2"):
        side_by_side.run(fail, [0, 1, 2, 3], 2)
    assert torch.get_num_threads() == 2
    assert side_by_side.run(lambda job: job + 1, [0, 1, 2], 8) == ([1, 2, 3], 2)
