"""Groups of heads side by side, each on a thread of its own that alone does its torch operations.

One product spread over all cores waits for its slowest core, and its tiles lie in no core's own
cache. Groups of heads are independent in forward and backward, so on a CPU each core can take one
from beginning to end: 15% less time at N = 4096 (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.autograd.forward_ad import _set_fwd_grad_enabled

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def run(
    work: Callable[[_Job], _Result], jobs: Sequence[_Job], threads: int
) -> tuple[list[_Result], int]:
    """work(job) of every job, in order, and how many threads did it.

    The threads live as long as the call: nothing is left for a fork to inherit. Raises what a job
    raises.
    """
    threads = min(threads, len(jobs), torch.get_num_threads())
    # a profiler watches one thread, and would miss the operations of others
    if threads < 2 or torch.autograd.profiler._is_profiler_enabled:
        return [work(job) for job in jobs], 1
    inference, count = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def alone(job: _Job) -> _Result:
        # a new thread knows nothing of the modes that its caller is in
        with torch.inference_mode(inference), torch.no_grad(), _set_fwd_grad_enabled(False):
            return work(job)

    try:
        with ThreadPoolExecutor(threads, "nosquare", lambda: torch.set_num_threads(1)) as pool:
            return list(pool.map(alone, jobs)), threads
    finally:
        # the number is each thread's own, but threads born later inherit the last that was set
        torch.set_num_threads(count)
