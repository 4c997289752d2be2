"""How backward is cut into tiles: a pure function of the problem and the card."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...problem import Problem
from ...traffic import ATOMIC, SEPARATE, Tiling
from . import sights
from .cards import Card
from .form import padded

FACT_ROWS, FACT_PART = 64, 64  # rows of a program of the delta kernel; the part of E it holds
SHARE = (64, 64)  # tile of the share kernel
OWN = "bhmn"  # of Plan.bias
PAIRS = ("mn", OWN)
BY_QUERIES = ("m", "-", OWN)  # of which the pass for dq makes the gradient
TIGHT = ("full()", "causal(end)", "causal(start)")  # no key of their tiles is hidden from all rows


class Tile(NamedTuple):
    """A tile of m queries by n keys, and how the program that goes through them is compiled."""

    m: int
    n: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.m} x {self.n} ({self.warps} warps, {self.stages} stages)"


# tiles of each pass by the width of a row, best first, then what fits anywhere
SMALL = (Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1))
Table = dict[str, dict[int, tuple[Tile, ...]]]
WIDEST: Table = {
    "keys": {
        256: (Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), Tile(32, 64, 8, 1)),
        512: (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
    },
    "queries": {
        256: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 1)),
        512: (Tile(32, 32, 8, 1), Tile(32, 16, 8, 1)),
    },
}
HOPPER: Table = {
    "keys": {
        64: (Tile(32, 128, 4, 3),),
        128: (Tile(32, 64, 4, 3),),
        **WIDEST["keys"],
        256: (Tile(32, 64, 8, 3), *WIDEST["keys"][256]),
    },
    "queries": {
        64: (Tile(128, 64, 4, 3),),
        128: (Tile(64, 64, 4, 2),),
        **WIDEST["queries"],
        256: (Tile(64, 32, 4, 3), *WIDEST["queries"][256]),
    },
    "pairs": {64: (Tile(64, 64, 4, 2),), 128: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 1))},
}
# where the hash of dropout, or a bias of pairs, takes registers and time
HOPPER_DROPOUT: Table = {
    "keys": {64: (Tile(64, 64, 4, 1),), 128: (Tile(32, 64, 4, 3),), **WIDEST["keys"]},
    "queries": {64: (Tile(64, 64, 4, 3),), 128: (Tile(128, 64, 8, 3),), **WIDEST["queries"]},
    "pairs": HOPPER["pairs"],
}
HOPPER_BIAS: Table = {
    "keys": {64: (Tile(64, 64, 4, 1),), 128: (Tile(32, 64, 4, 2),), **WIDEST["keys"]},
    "queries": {128: (Tile(64, 64, 4, 2),), **WIDEST["queries"]},
    "pairs": HOPPER["pairs"],
}
HOPPER_FLOAT32: Table = {
    "keys": {64: (Tile(64, 128, 8, 1),), 128: (Tile(32, 128, 8, 1),)},
    "queries": {64: (Tile(128, 64, 8, 1),), 128: (Tile(128, 32, 8, 1),)},
    "pairs": {},
}
HOPPER_ADD: Table = {  # Plan.add
    **HOPPER_FLOAT32,
    "keys": {64: (Tile(64, 64, 4, 1),), 128: (Tile(32, 128, 8, 1),)},
}
# operands of a product lie in registers there, and 64 x 128 would spill
OTHER: Table = {
    "keys": {
        64: (Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)),
        128: (Tile(64, 64, 8, 2), Tile(32, 64, 4, 2)),
        **WIDEST["keys"],
    },
    "queries": {
        64: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
        128: (Tile(64, 64, 8, 2), Tile(64, 32, 4, 2)),
        **WIDEST["queries"],
    },
    "pairs": {64: (Tile(64, 64, 4, 2),), 128: (Tile(32, 64, 8, 2), Tile(32, 64, 4, 1))},
}
AMD: Table = {
    "keys": {},
    "queries": {128: (Tile(64, 32, 4, 1),)},
    "pairs": {},
}
FLOAT32: Table = {
    "keys": {64: (Tile(32, 32, 4, 1),), 128: (Tile(16, 32, 8, 1),), 256: (Tile(16, 16, 8, 1),)},
    "queries": {64: (Tile(32, 32, 4, 1),), 128: (Tile(32, 16, 8, 1),), 256: (Tile(16, 16, 8, 1),)},
    "pairs": {128: (Tile(32, 32, 4, 1),)},
}
AMD_FLOAT32: Table = {
    "keys": {64: (Tile(32, 32, 4, 1),), 128: (Tile(16, 32, 4, 1),), 256: (Tile(16, 16, 4, 1),)},
    "queries": {64: (Tile(32, 32, 4, 1),), 128: (Tile(32, 16, 4, 1),), 256: (Tile(16, 16, 4, 1),)},
    "pairs": FLOAT32["pairs"],
}
FORCED: Tile | None = None  # set by tests that want small tiles


@dataclass(frozen=True)
class Plan:
    """Tiles of the passes of backward, and what else their code depends on.

    keys, queries, pairs  of the passes for dk and dv, for dq, for the gradient of a bias
    add    dq comes from the pass for dk and dv, by atomics, in an order that changes
    exact  weights of rows with a large lse are divided by their sum
    bias   "mn", "n", "m" or "-": axes along which a wanted gradient of a bias varies; "bhmn" where
           no two pairs share a number, and the pass for dq writes it; "" for none
    """

    card: Card
    keys: Tile
    queries: Tile
    pairs: Tile
    add: bool = False
    exact: bool = False
    bias: str = ""

    def __str__(self) -> str:
        dq = "dq by atomics" if self.add else f"dq {self.queries}"
        dbias = f", dbias {self.pairs}" if self.bias == "mn" else ""
        return f"backward, {self.card}: dk and dv {self.keys}, {dq}{dbias}"


def plan(p: Problem, card: Card) -> Plan:
    """Tiles by the width of a row and the fast memory of the card."""
    chosen = fitting(p, card)
    assert chosen is not None, "refused"
    return chosen


def fitting(p: Problem, card: Card) -> Plan | None:
    """The first tiles of each pass that fit; None where none do."""
    along, add = _along(p), _adds(p, card)
    found = []
    for name in ("keys", "queries", "pairs"):
        tiles = (
            tile
            for tile in _candidates(p, name, card)
            if shared_bytes(p, name, tile, card, add) <= card.shared_bytes
        )
        found.append(next(tiles, None))
    keys, queries, pairs = found
    if along != "mn":
        pairs = SMALL[-1]  # not used
    if keys is None or queries is None or pairs is None:
        return None
    # where nothing is added to scores, they and their bounds are as large as lse
    exact = p.bias is not None or p.alibi is not None
    return Plan(card, keys, queries, pairs, add=add, exact=exact, bias=along)


def _along(p: Problem) -> str:
    """Plan.bias."""
    if p.bias is None or "b" not in p.grads:
        return ""
    found = "".join(c for c, n in zip("mn", (1, 1, *p.bias)[-2:], strict=True) if n > 1) or "-"
    own = found == "mn" and math.prod(p.bias) == p.B * p.Hq * p.M * p.N
    return OWN if own else found


def _candidates(p: Problem, name: str, card: Card) -> Iterator[Tile]:
    if FORCED is not None:
        yield FORCED
        return
    width = max(padded(p.D), padded(p.E))
    tables = _tables(p, card)
    if name == "keys" and width == 128 and p.bias is not None and OTHER in tables:
        yield Tile(32, 64, 8, 2)  # the bias needs registers too
    for most, tiles in (item for table in tables for item in table[name].items()):
        if width <= most:
            yield from tiles
    yield from SMALL


def _tables(p: Problem, card: Card) -> tuple[Table, ...]:
    """Whose tiles are tried, one table after the other."""
    hopper = card.backend == "cuda" and card.arch == 90
    if p.dtype == torch.float32:
        own = HOPPER_ADD if _adds(p, card) else HOPPER_FLOAT32
        more = AMD_FLOAT32 if card.backend == "hip" else FLOAT32
        return (own, more) if hopper else (more,)
    if not hopper:
        return (AMD if card.backend == "hip" else OTHER,)
    if p.bias is not None:
        return (HOPPER_BIAS,)
    return (HOPPER_DROPOUT if p.p > 0 else HOPPER,)


def _adds(p: Problem, card: Card) -> bool:
    """Whether dq comes by atomics: five products instead of seven, where the units that multiply
    are what is waited for. At width 128 only where registers and fast memory are left for it: no
    bias, no mask that keys are hidden for, no bounds of a width or of a packed sequence. Nowhere
    that the pass for dq runs all the same, for the gradient of a bias."""
    width = max(padded(p.D), padded(p.E))
    whole = all(n == padded(n) for n in (p.D, p.E))
    light = whole and p.bias is None and not p.packed and p.mask in TIGHT
    pays = p.dtype == torch.float32 and card.backend == "cuda" and card.arch == 90
    pays = pays and (width <= 64 or (width == 128 and light))
    wanted = {"q", "k", "v"} <= set(p.grads) and _along(p) not in BY_QUERIES
    return pays and wanted and not p.deterministic


def shared_bytes(p: Problem, name: str, tile: Tile, card: Card, add: bool = False) -> int:
    """Fast memory that a program of a pass may take: its own tile, those on their way (and one
    turned, where they are not under way), what of the scores passes through it; with dq by atomics
    (add) its keys once more, and slopes or parts of dq. Held against the compiler by the tests."""
    d, e = padded(p.D), padded(p.E)
    owned = {"keys": (tile.n, tile.m), "queries": (tile.m, tile.n)}
    own, other = owned.get(name, (0, tile.m + tile.n))
    rows, copies = own + other * tile.stages, 2
    if card.backend == "hip":  # there a tile of one's own stays in registers
        rows, copies = other, 1
    elif int(card.arch) >= 100:  # and there both operands of a product are in fast memory
        rows += other
    turned = other * max(d, e) if tile.stages == 1 else 0
    scores = tile.m * tile.n * (copies * p.dtype.itemsize + (4 if p.bias is not None else 0))
    taken = p.dtype.itemsize * (rows * (d + e) + turned) + scores + 4096
    add = add and name == "keys"
    hidden = own * d if add and p.mask not in TIGHT else 0  # the keys without those that none sees
    if p.dtype == torch.float32 and card.backend == "cuda":
        # bfloat16 that a number is split into: of what is on its way; and of what is owned, which
        # lies where what is on its way would, were it under way
        free = 6 * other * (d + e) if tile.stages == 1 else 0
        parts = (2 * turned or 12288) + max(0, 3 * own * max(d, e) - free) + 6 * hidden
        return taken + parts + 4096
    added = own * d + hidden + other * max(d, own) + 2048 if add else 0
    return taken + p.dtype.itemsize * added


def workspace_bytes(p: Problem, plan: Plan) -> int:
    """Bytes that the receipt will name: the facts of rows, sums in float32, what is seen of a mask
    before the passes."""
    entries = 1 if p.packed else p.B
    rows = entries * p.Hq * p.M
    words = entries * p.Hq * room(p.M) * planes(p, plan)
    words += {"n": p.B * p.Hq * p.N, "m": rows, "-": rows}.get(plan.bias, 0)
    if "s" in p.grads and math.prod(p.sinks or ()) != entries * p.Hq:
        words += entries * p.Hq
    if plan.add:
        words += rows * p.D
    return 4 * (words + sum(sights.words(p, tiles) for tiles in sighted(p, plan).values()))


def sighted(p: Problem, plan: Plan) -> dict[str, int]:
    """The passes before which a kernel looks at the mask's arrays, and what they have of a head, in
    all entries: tiles of keys, of queries."""
    found = {}
    if sights.looks(p) and by_keys(p, plan):
        found["keys"] = tiles_of(p, p.N, plan.keys.n)
    if sights.looks(p) and by_queries(p, plan):
        found["queries"] = tiles_of(p, p.M, plan.queries.m)
    return found


def by_keys(p: Problem, plan: Plan) -> bool:
    """Whether there is a pass for dk and dv."""
    return bool({"k", "v"} & set(p.grads)) or plan.bias == "n" or (plan.add and "q" in p.grads)


def by_queries(p: Problem, plan: Plan) -> bool:
    """Whether there is a pass for dq."""
    return ("q" in p.grads and not plan.add) or plan.bias in BY_QUERIES


def grid_of(p: Problem, plan: Plan) -> int:
    """Programs of the largest grid."""
    entries = 1 if p.packed else p.B
    return max(
        tiles_of(p, p.N, plan.keys.n) * p.Hk,
        tiles_of(p, p.M, min(plan.queries.m, FACT_ROWS)) * p.Hq,
        -(-p.M // plan.pairs.m) * -(-p.N // plan.pairs.n) * entries * p.Hq * (plan.bias == "mn"),
    )


def tiles_of(p: Problem, length: int, tile: int) -> int:
    """Programs of a head: tiles of a length, of all entries."""
    return length // tile + p.B + 1 if p.packed else -(-length // tile) * p.B


def tiling(p: Problem, plan: Plan) -> Tiling:
    """The schedule, as the model of traffic.py takes it: that of the pass for dk and dv."""
    backward = ATOMIC if plan.add else SEPARATE
    tile = plan.keys
    return Tiling(p.G * tile.m, tile.n, backward=backward, source="triton_any's plan")


def products_side(p: Problem) -> int:
    """Of the tile of the pass that sums delta over keys: it holds rows of q, do, k and v."""
    row = padded(max(p.D, p.E)) * p.dtype.itemsize
    return 64 if row <= 256 else 32 if row <= 512 else 16


def planes(p: Problem, plan: Plan) -> int:
    """Numbers of 32 bits that are kept of a row: see grad_facts.py."""
    return 2 + plan.exact + 2 * (p.p > 0)


def room(rows: int) -> int:
    """Room for the facts of the rows of a head: strides that 16 divides, whatever the length."""
    return -(-rows // 16) * 16
