"""What the code of the kernels depends on (Form), and the numbers of a call."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...axes import flatten_batch
from ...bound import Bound
from ...mask import Both, Full, Lengths, Mask
from ...mask_text import MaskCode, arguments, form_of
from ...problem import Problem
from ...spelling import parse

WIDTHS = (64, 128, 256)  # of tiles: powers of 2, which TMA fills with 0 beyond D or E
ROWS = 64  # of a warp group: what one product takes
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Form:
    """The constant F of every kernel.

    D, E     widths of tiles, of WIDTHS
    group    query heads whose rows share a tile; 1: rows of one head
    hidden   a pair in the last tile of keys of a warp group's rows may be hidden
    more     so may be one in the tile before it: a loop is written for such, which costs the others
             registers
    half     rows of every second group, from the first on, see at most half of that tile
    even     TILE_N divides N, and somebody sees each key: no tile is cut or moved
    softcap, sinks, lengths  whether there are any; lengths: keys that are no padding, by entry
    packed   sequences side by side, see packed.py
    """

    D: int
    E: int
    group: int
    mask: MaskCode
    hidden: bool
    more: bool
    half: bool
    even: bool
    softcap: bool
    sinks: bool
    lengths: bool
    packed: bool


@dataclass(frozen=True)
class GradForm:
    """The constant F of backward's kernel: see Form.

    hidden   a pair may be hidden, or a key beyond those that are seen read
    ordered  tiles of keys add to dq in their order
    """

    D: int
    E: int
    mask: MaskCode
    hidden: bool
    softcap: bool
    lengths: bool
    ordered: bool


def numbers(p: Problem) -> tuple[float, float, float]:
    """(c2, softcap, factor of its exponential) of the kernel."""
    if p.softcap is None:
        return p.scale * LOG2E, 0.0, 0.0
    return LOG2E, p.softcap, 2 * LOG2E * p.scale / p.softcap


def parts_of(p: Problem) -> tuple[Mask, bool] | None:
    """The part of the mask that is made of intervals, and whether Lengths go with it; None where it
    has other arrays, or where more may be seen in spite of the lengths."""
    arrays = re.findall(r"\bt\d+\b", p.mask)
    if not arrays:
        return parse(p.mask), False
    if len(arrays) > 1 or "lengths(" not in p.mask:
        return None
    mask = parse(p.mask, [torch.zeros(1, dtype=torch.int64)])
    parts = mask.parts if isinstance(mask, Both) and mask.sign == "&" else (mask,)
    others = [part for part in parts if not isinstance(part, Lengths)]
    if any(part.tensors for part in others):
        return None
    return (others[0] if len(others) == 1 else Both(tuple(others)) if others else Full()), True


def bound_of(p: Problem) -> Bound:
    """The part of the mask that is made of intervals, for the sizes of the problem."""
    found = parts_of(p)
    assert found is not None, "refused"
    return Bound(found[0], p.batch, p.Hq, p.M, p.N)


def mask_of(p: Problem) -> tuple[MaskCode, tuple[Any, ...]]:
    """The code of that part, and its argument."""
    from .masks import code

    bound = bound_of(p)
    return code(form_of(bound)), tuple(arguments(bound, int))


def lengths_of(p: Problem, arrays: tuple[Tensor, ...]) -> Tensor | None:
    """How many keys each entry has, (B | 1,) on the card; None without Lengths."""
    if not arrays:
        return None
    return flatten_batch(arrays[0], arrays[0].dim(), p.batch).to(p.device)
