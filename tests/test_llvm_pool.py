"""The parallel region: every item once, whatever runs beside it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from nosquare.backends.llvm_cpu import pool
from nosquare.backends.llvm_cpu.compiled import compiled
from nosquare.backends.llvm_cpu.ir import Module
from nosquare.backends.llvm_cpu.ready import why_not
from nosquare.backends.llvm_cpu.target import host

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
