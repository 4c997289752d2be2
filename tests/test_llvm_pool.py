"""The parallel region: every item once, whatever runs beside it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

import nosquare as ns
from helpers import rnd
from nosquare.backends import BACKWARD, FORWARD, llvm_cpu
from nosquare.backends.llvm_cpu import call, decode, pool, prefill
from nosquare.backends.llvm_cpu.compiled import compiled
from nosquare.backends.llvm_cpu.ir import Module
from nosquare.backends.llvm_cpu.ready import why_not
from nosquare.backends.llvm_cpu.target import host
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ITEMS = 500


def counting() -> Module:
    """block: two int64 arrays of ITEMS; the first counts visits of an item, the second has the
    worker."""
    module = Module()
    f = module.function("count", block="i64*", item="i64", worker="i64")
    block, item, worker = f.parameters
    f.take(block + item)
    f.store(block + (item + ITEMS), worker)
    return module


def visits(threads: int) -> Tensor:
    """(2, ITEMS): how often each item was visited, and by whom last."""
    block = torch.zeros(2, ITEMS, dtype=torch.int64)
    kernel = compiled("test_llvm_pool", host(), counting).address("count")
    pool.run(kernel, block.data_ptr(), ITEMS, threads)
    return block


@pytest.fixture(params=["openmp", "python"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of workers."""
    if request.param == "python":
        monkeypatch.setattr(pool, "_openmp", lambda: None)
    elif pool._openmp() is None:
        pytest.skip("torch has no GNU OpenMP here")


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_item_once(threads: int) -> None:
    for _ in range(20):
        count, worker = visits(threads)
        assert count.eq(1).all()
        assert worker.ge(0).all()
        assert worker.lt(threads).all()


@pytest.mark.usefixtures("_threads")
def test_many_callers_at_once() -> None:
    wrong: list[Tensor] = []

    def call() -> None:
        wrong.extend(c for c in (visits(3)[0] for _ in range(50)) if not c.eq(1).all())

    callers = [threading.Thread(target=call) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_after_the_number_of_threads_has_changed() -> None:
    before = torch.get_num_threads()
    try:
        for n in (1, 3, 2):
            torch.set_num_threads(n)
            torch.ones(1 << 16).exp()
            assert visits(3)[0].eq(1).all()
    finally:
        torch.set_num_threads(before)


def test_no_items() -> None:
    pool.run(0, 0, 0, 4)


def test_it_is_torchs_own_library() -> None:
    """One pool a process: no second OpenMP is brought in."""
    if pool._openmp() is None:
        pytest.skip("torch has no GNU OpenMP here")
    with open("/proc/self/maps") as maps:
        assert len({line.split()[-1] for line in maps if "gomp" in line}) == 1


FORK = """
import os, sys, torch
sys.path.insert(0, {here!r})
from test_llvm_pool import visits
torch.set_num_threads(2)
assert visits(2)[0].eq(1).all()
child = os.fork()
if child == 0:
    os._exit(0 if visits(2)[0].eq(1).all() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_in_the_child_of_a_fork() -> None:
    """GNU OpenMP hangs there: its threads have stayed with the parent."""
    code = FORK.format(here=__file__.rpartition("/")[0])
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60, check=False)
    assert run.returncode == 0


# ---- whole calls ----


def attended(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """o, lse, dq, dk, dv of a problem, by kernels of this package alone."""
    q, k, v = (rnd(1, h, 150, 32, seed=seed + h, dtype=dtype) for h in (4, 2, 2))
    x, spec = Inputs(q, k, v), Spec("causal(end)")
    p = Problem.of(x, spec, "qkv")
    o, lse, _ = llvm_cpu.forward(p, llvm_cpu.plan(p, FORWARD), x)
    grads, _ = llvm_cpu.backward(p, llvm_cpu.plan(p, BACKWARD), x, (o, lse), (o, None))
    one = Inputs(q[:, :, -1:], k, v)
    last = Problem.of(one, spec)
    token, _, _ = llvm_cpu.forward(last, llvm_cpu.plan(last, FORWARD), one)
    return [t for t in (o, lse, token, *grads) if t is not None]


def right(seed: int, found: list[Tensor]) -> bool:
    """Whether they are those of torch_any."""
    q, k, v = (rnd(1, h, 150, 32, seed=seed + h).requires_grad_() for h in (4, 2, 2))
    state = ns.attention_state(q, k, v, mask=ns.Causal(), backend="torch_any")
    grads = torch.autograd.grad(state.o, (q, k, v), found[0])
    want = [state.o, state.lse, state.o[:, :, -1:], *grads]
    pairs = zip(found, want, strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


@pytest.mark.usefixtures("_threads")
def test_eight_threads_call_kernels_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with problems of its own and one that all share; no bit is another than when alone."""
    for kernel in (decode, prefill):
        monkeypatch.setattr(kernel, "ALONE", 0)  # small as they are, on all threads
    call.outline.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone = [attended(10 * n) for n in range(4)]
        assert all(right(10 * n, found) for n, found in enumerate(alone))
        wrong: list[int] = []

        def work(me: int) -> None:
            torch.set_num_threads(2)  # a number of the thread's own
            for n in [me % 4, 0, 3, me % 3] * 5:
                pairs = zip(attended(10 * n), alone[n], strict=True)
                if not all(torch.equal(a, b) for a, b in pairs):
                    wrong.append(me)

        callers = [threading.Thread(target=work, args=(me,)) for me in range(8)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert not wrong
    finally:
        torch.set_num_threads(before)
        call.outline.cache_clear()


def test_calls_on_one_thread_then_three_then_two() -> None:
    """Forward gives the same bits on any number; backward adds its shares in another order."""
    before, forward = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 2, 1):
            torch.set_num_threads(threads)
            found = attended(7)
            assert right(7, found)
            forward.append(found[:3])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for f in forward for a, b in zip(f, forward[0], strict=True))


CALLS = """
import os, sys, torch
sys.path.insert(0, {here!r})
from nosquare.backends.llvm_cpu import decode, prefill
from test_llvm_pool import attended, right
decode.ALONE = prefill.ALONE = 0
torch.set_num_threads(2)
mine = attended(3)
assert right(3, mine)
child = os.fork()
if child == 0:  # warm code and code that is new to it, on more than one thread
    same = all(torch.equal(a, b) for a, b in zip(attended(3), mine, strict=True))
    new = attended(5, torch.bfloat16)
    os._exit(0 if same and all(t.isfinite().all() for t in new) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_whole_calls_in_the_child_of_a_fork() -> None:
    code = CALLS.format(here=__file__.rpartition("/")[0])
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120, check=False)
    assert run.returncode == 0
