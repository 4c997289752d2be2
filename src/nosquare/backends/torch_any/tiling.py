"""How torch_any cuts a problem into tiles: a pure function of the problem."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import Problem

# a score tile of all heads worked on at once, in elements: 4 MiB of float32. It stays in the
# caches of a server CPU, and a GPU gets enough work in each launch.
CPU_ELEMENTS, GPU_ELEMENTS = 1 << 20, 1 << 25
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
    """Tiles of 512 x 512 where there are that many rows; then as many heads as fill the budget."""
    p = problem
    budget = CPU_ELEMENTS if p.device.type == "cpu" else GPU_ELEMENTS
    g = max(p.G, 1)
    tile_n = min(512, max(p.N, 1))
    tile_m = min(max(512 // g, 16), max(p.M, 1))
    if p.device.type == "cpu" and g * tile_m * 8 <= 512:
        # few rows, as in decoding: longer tiles of keys, since each costs a fixed number of
        # launches
        tile_n = min(4096, max(p.N, 1))
    if FORCED is not None:
        tile_m, tile_n = FORCED
    together = max(budget // (g * tile_m * tile_n), 1)
    heads = min(max(p.Hk, 1), together)
    whole = heads == max(p.Hk, 1) and not p.batch_invariant and not p.packed
    entries = min(max(p.B, 1), together // heads) if whole else 1
    return Plan(tile_m, tile_n, heads, max(entries, 1))
