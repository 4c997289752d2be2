"""The kernel `sight` (sight.py) on the host: what it writes, and what it is launched with.

(entries, heads, tiles, 4) int32, of as many heads as kinds of the mask could tell apart; where its
arrays do not, those of the first are written, and read by all.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from ...mask import KINDS
from ...mask_text import MaskCode
from ...problem import Problem
from .compiled import Arguments, Count, Small

WORDS = 4  # that are written of a tile
AT_ONCE = 128  # tiles of queries that a program looks for together
WARPS = 16


def looks(p: Problem) -> bool:
    """Whether its mask has arrays."""
    return "t0" in p.mask


def words(p: Problem, tiles: int) -> int:
    """Numbers of 32 bits in a workspace. tiles: of a head, of all entries."""
    kinds = (KINDS[name] for name in re.findall(r"(\w+)\(", p.mask))
    by_head = any("Hq" in axes for kind in kinds for axes in kind.lay)
    return WORDS * tiles * (p.Hq if by_head else 1)


def told(p: Problem, mask: MaskCode, tiles: int, t: Tensor) -> tuple[Any, ...]:
    """(pointer, stride of b, h), for kernels that read it. tiles: see `launched`."""
    head = WORDS * tiles
    entry = head * (p.Hq if mask.along_h else 1)
    return t, Count(0 if p.packed else entry), Count(head if mask.along_h else 0)


def launched(
    p: Problem, mask: MaskCode, tiles: int, t: Tensor, sides: tuple[int, int], keys: bool
) -> tuple[int, Arguments, tuple[tuple[str, int], ...]]:
    """Its grid, the arguments before those that all kernels share, its constants after F.

    tiles  of a head of an entry, or of a head of all packed sequences
    sides  of a tile: rows, keys
    keys   tiles of keys are looked for, for each tile of rows; else the other way round
    """
    heads = p.Hq if mask.along_h else 1
    constants = {"TILE_M": sides[0], "TILE_N": sides[1], "KEYS": int(keys), "AT_ONCE": AT_ONCE}
    arguments = told(p, mask, tiles, t), (Small(tiles), Small(heads))
    grid = tiles * heads * (1 if p.packed else p.B)
    return grid, arguments, tuple(constants.items())
