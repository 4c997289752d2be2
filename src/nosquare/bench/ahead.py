"""Compile ahead, in other processes: many kernels at once, and a compiler that dies takes nobody
along.

What they compile lies on disk, in the compiler's own cache, where this process finds it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from .timing import REFUSAL_LENGTH, Tick

Job = Callable[[], Any]  # picklable
DIED = "its compiler ended the process."
_Item = tuple[Hashable, Job]


def build(
    jobs: Mapping[Hashable, Job], workers: int | None = None, tick: Tick = lambda words: None
) -> dict[Hashable, str]:
    """Do all jobs; in words, by the same names, why some failed.

    workers  processes; None: as many as there are processors
    """
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    failed: dict[Hashable, str] = {}
    waiting = deque(jobs.items())
    while waiting:
        for item in _build(waiting, workers, failed, tick):
            # one of those under way ended its process: alone, each shows whether it was that
            if _build(deque([item]), 1, failed, tick):
                failed[item[0]] = DIED
    return failed


def _build(
    waiting: deque[_Item], workers: int, failed: dict[Hashable, str], tick: Tick
) -> list[_Item]:
    """Do what waits until nothing is left or a process has died; what was then under way.

    Processes are started afresh: one that was forked from a process with a card could not go on.
    """
    running: dict[Future[str], _Item] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    running[pool.submit(_run, waiting[0][1])] = waiting[0]
                    waiting.popleft()
                tick(f"{len(waiting) + len(running)} kernels to compile")
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    why = future.result()
                    name, _ = running.pop(future)
                    if why:
                        failed[name] = why
        except BrokenProcessPool:
            return list(running.values())
    return []


def _run(job: Job) -> str:
    """In the other process: why the job failed; "" when it did not."""
    try:
        job()
    except Exception as error:  # of any compiler, by any of its ways to fail
        lines = str(error).strip().splitlines()
        words = f"it does not compile: {type(error).__name__}: {lines[0] if lines else ''}"
        return words[:REFUSAL_LENGTH]
    return ""
