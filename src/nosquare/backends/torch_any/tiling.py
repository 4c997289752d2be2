"""How torch_any cuts a problem into tiles: a pure function of the problem."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import Problem

# A score tile of all heads worked on at once, in elements. With a mask or dropout, 4 MiB of
# float32: small tiles skip more, and the many passes of the generator stay in the caches. Else
# large products run at a higher rate: 16 MiB took 17% less time (docs/log.md). A GPU gets enough
# work in each launch.
CPU_ELEMENTS, CPU_ELEMENTS_FULL, GPU_ELEMENTS = 1 << 20, 1 << 22, 1 << 25
# set by tests that want many tiles in a small problem
FORCED: tuple[int, int] | None = None


@dataclass(frozen=True)
class Plan:
    """tile_m queries by tile_n keys, for `heads` key heads of `entries` batch entries at a time."""

    tile_m: int
    tile_n: int
    heads: int
    entries: int

    def __str__(self) -> str:
        return (
            f"tiles {self.tile_m} x {self.tile_n}, {self.entries} batch entries x "
            f"{self.heads} key heads at a time"
        )


def plan(problem: Problem, phase: str) -> Plan:
    """Tiles of 512 x 512, or 1024 x 2048 where nothing is hidden or dropped; then as many heads as
    fill the budget."""
    p = problem
    on_cpu, full = p.device.type == "cpu", p.mask == "full()" and not p.p
    budget = (CPU_ELEMENTS_FULL if full else CPU_ELEMENTS) if on_cpu else GPU_ELEMENTS
    rows, columns = (1024, 2048) if full and on_cpu else (512, 512)
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
    return Plan(tile_m, tile_n, heads, max(entries, 1))
