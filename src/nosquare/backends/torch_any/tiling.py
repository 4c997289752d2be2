"""How torch_any cuts a problem into tiles: a pure function of the problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...problem import Problem

# A score tile of all heads worked on at once, in elements. With a mask or dropout, 4 MiB of
# float32: small tiles skip more, and the many passes of the generator stay in the caches. Else
# large products run at a higher rate: 16 MiB took 17% less time (docs/log.md). A GPU gets enough
# work in each launch.
CPU_ELEMENTS, CPU_ELEMENTS_FULL, GPU_ELEMENTS = 1 << 20, 1 << 22, 1 << 25
# Scores of one group of heads that are worth a thread of its own: some ten milliseconds of work.
APART_ELEMENTS = 1 << 19
# set by tests that want many tiles in a small problem
FORCED: tuple[int, int] | None = None


@dataclass(frozen=True)
class Plan:
    """tile_m queries by tile_n keys, for `heads` key heads of `entries` batch entries at a time.

    threads  groups of heads worked on side by side, each on one thread; 1: one after the other,
             and torch spreads each operation over its threads
    """

    tile_m: int
    tile_n: int
    heads: int
    entries: int
    threads: int = 1

    def __str__(self) -> str:
        apart = f" on each of {self.threads} threads" if self.threads > 1 else ""
        return (
            f"tiles {self.tile_m} x {self.tile_n}, {self.entries} batch entries x "
            f"{self.heads} key heads at a time{apart}"
        )


def plan(problem: Problem, phase: str) -> Plan:
    """Tiles of 512 x 512, or 1024 x 2048 where nothing is hidden or dropped; then as many heads as
    fill the budget. On a CPU with enough heads, one on each thread, in tiles of 1024 x 512."""
    p = problem
    on_cpu, full = p.device.type == "cpu", p.mask == "full()" and not p.p
    budget = (CPU_ELEMENTS_FULL if full else CPU_ELEMENTS) if on_cpu else GPU_ELEMENTS
    rows, columns = (1024, 2048) if full and on_cpu else (512, 512)
    threads = _threads(p) if on_cpu else 1
    if threads > 1:
        budget, columns = 0, 512
    g = max(p.G, 1)
    tile_m = min(max(rows // g, 16), max(p.M, 1))
    if on_cpu and g * tile_m * 8 <= 512:
        # few rows, as in decoding: longer tiles of keys, as each costs a fixed number of launches
        columns = 4096
    tile_n = min(columns, max(p.N, 1))
    if FORCED is not None:
        tile_m, tile_n = FORCED
    together = max(budget // (g * tile_m * tile_n), 1)
    heads = min(max(p.Hk, 1), together)
    whole = heads == max(p.Hk, 1) and not p.batch_invariant and not p.packed
    entries = min(max(p.B, 1), together // heads) if whole else 1
    return Plan(tile_m, tile_n, heads, max(entries, 1), threads)


def _threads(p: Problem) -> int:
    """How many heads to work on side by side: 1 where they would be idle, or add to one sum."""
    threads = torch.get_num_threads()
    # a row's bits may not depend on the batch, so neither may its tiles
    units = p.Hk if p.batch_invariant else p.B * p.Hk
    rounds = -(-units // threads)
    busy = units >= 0.8 * rounds * threads
    if threads < 2 or not busy or p.packed or p.G * p.M * p.N < APART_ELEMENTS:
        return 1
    return 1 if _shared_sums(p) else threads


def _shared_sums(p: Problem) -> bool:
    """Whether gradients of several heads or entries add up in one place."""
    sinks, bias = p.sinks if "s" in p.grads else None, p.bias if "b" in p.grads else None
    heads = (1, 1, 1, *bias)[-3] if bias is not None else p.Hq
    batches = [math.prod(t) for t in (sinks and sinks[:-1], bias and bias[:-3]) if t is not None]
    return heads != p.Hq or any(count != p.B for count in batches)
