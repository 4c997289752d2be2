"""What this processor does at best, by torch's own hand: products of matrices, and reading memory.

Measured in the same run, with the same threads, beside the cases that are set against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .cases import Case
from .clocks import HostClock

SIDE, READ_BYTES, RUNS = 1024, 512 << 20, 9


@dataclass(frozen=True)
class Ceiling:
    """Rates of one number of threads.

    gemm_flops_per_s  torch.mm of SIDE^3 in the dtype of the case
    read_bytes_per_s  the sum of READ_BYTES of float32; None where it was not asked for
    """

    gemm_flops_per_s: float
    read_bytes_per_s: float | None = None

    def share(self, case: Case, flops: int, time_us: float) -> float:
        """The rate of a call over its ceiling: bytes of k and v in decoding, else flops.

        Above 1, decoding read from caches. NaN where the ceiling is not known.
        """
        decode = case.phase == "decode"
        amount = case.cache_bytes if decode else flops
        roof = self.read_bytes_per_s if decode else self.gemm_flops_per_s
        return float("nan") if roof is None else amount / (time_us / 1e6) / roof


HOW = (
    f"best of {RUNS}: torch.mm of {SIDE}^3 in the dtype of the case; "
    f"the sum of {READ_BYTES >> 20} MiB of float32"
)


def measured(dtype: torch.dtype, reads: bool) -> Ceiling:
    """The ceiling of a dtype, with torch's threads as they are. reads: of memory too."""
    x = torch.randn(SIDE, SIDE).to(dtype)
    out = torch.empty_like(x)
    gemm = 2 * SIDE**3 / _best_seconds(lambda: torch.mm(x, x, out=out))
    if not reads:
        return Ceiling(gemm)
    array = torch.ones(READ_BYTES // 4)  # zeros may share one page
    return Ceiling(gemm, READ_BYTES / _best_seconds(array.sum))


def _best_seconds(work: Callable[[], object]) -> float:
    clock = HostClock()
    clock.sample(work, 1)  # the first may still prepare
    return min(clock.sample(work, 1).time_us for _ in range(RUNS)) / 1e6
