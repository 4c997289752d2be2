"""A mask bound to the sizes of one problem, ready to be asked rectangle by rectangle.

The same questions serve every reader in torch: the tiles of torch_any, the oracle, ns.weights.
Arrays of a mask are laid out once as (B | 1, Hq | 1, M | 1, N | 1) views; nothing of size M x N
is made.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .axes import broadcasts, flatten_batch
from .errors import ArgumentError
from .mask import Both, Lengths, Mask

Index = slice | Tensor


class Rectangle(NamedTuple):
    """Some batch entries, query heads, queries and keys. Heads and batch are always slices."""

    b: slice
    h: slice
    i: Index
    j: Index


def cut(array: Tensor, where: Rectangle) -> Tensor:
    """The part of a (B | 1, Hq | 1, M | 1, N | 1) array in the rectangle; a view for slices."""
    for axis, index in enumerate(where):
        if array.shape[axis] == 1:
            continue  # it broadcasts
        if isinstance(index, slice):
            array = array.narrow(axis, index.start, index.stop - index.start)
        else:
            array = array.index_select(axis, index)
    return array


class Bound:
    """One mask for a batch of B entries, Hq heads, M queries and N keys.

    Raises ArgumentError when an array of the mask does not fit these sizes.
    """

    def __init__(
        self,
        mask: Mask,
        batch: tuple[int, ...],
        heads: int,
        m: int,
        n: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.mask, self.m, self.n, self.device = mask, m, n, device
        self.parts = (
            [Bound(part, batch, heads, m, n, device) for part in mask.parts]
            if isinstance(mask, Both)
            else []
        )
        self.numbers = mask.numbers(m, n)
        self.block = getattr(mask, "block", 1)
        self.arrays = (
            []
            if self.parts
            else [
                lay_out(array, lay, batch, {"Hq": heads, "M": m, "N": n}, self.block, mask)
                for array, lay in zip(mask.tensors, mask.lay, strict=True)
            ]
        )

    def span(self, i_lo: int, i_hi: int) -> tuple[int, int]:
        """Keys outside [lo, hi) are visible to no query i_lo <= i < i_hi. From the sizes alone."""
        if not self.parts:
            lo, hi = self.mask.span(i_lo, i_hi, self.n, self.numbers)
            return (lo, hi) if lo < hi else (0, 0)
        spans = [part.span(i_lo, i_hi) for part in self.parts]
        if self.mask.sign == "&":  # type: ignore[attr-defined]
            lo, hi = max(s[0] for s in spans), min(s[1] for s in spans)
        else:
            spans = [s for s in spans if s[0] < s[1]]
            lo, hi = min((s[0] for s in spans), default=0), max((s[1] for s in spans), default=0)
        return (lo, hi) if lo < hi else (0, 0)

    def core(self, i_lo: int, i_hi: int) -> tuple[int, int]:
        """Keys in [lo, hi) are visible to every query i_lo <= i < i_hi. From the sizes alone."""
        if not self.parts:
            lo, hi = self.mask.core(i_lo, i_hi, self.n, self.numbers)
            return (lo, hi) if lo < hi else (0, 0)
        cores = [part.core(i_lo, i_hi) for part in self.parts]
        if self.mask.sign == "&":  # type: ignore[attr-defined]
            lo, hi = max(c[0] for c in cores), min(c[1] for c in cores)
            return (lo, hi) if lo < hi else (0, 0)
        return max(cores, key=lambda c: c[1] - c[0])

    def tile(self, where: Rectangle) -> Tensor | bool:
        """What is visible in the rectangle: False nothing, True everything, else a bool array that
        broadcasts to (B, Hq, rows, keys).

        Array masks are looked at (which waits for the device); the others are answered from
        integers.
        """
        if self.parts:
            return self._join([part.tile(where) for part in self.parts])
        if isinstance(where.i, slice) and isinstance(where.j, slice):
            lo, hi = self.span(where.i.start, where.i.stop)
            if where.j.stop <= lo or where.j.start >= hi:
                return False
            c_lo, c_hi = self.mask.core(where.i.start, where.i.stop, self.n, self.numbers)
            if c_lo <= where.j.start and where.j.stop <= c_hi:
                return True
        keep = self.keep(where)
        if self.arrays and isinstance(where.i, slice) and keep.device.type != "meta":
            if not bool(keep.any()):
                return False
            if bool(keep.all()):
                return True
        return keep

    def keep(self, where: Rectangle) -> Tensor:
        """The visible pairs as a bool array (B | 1, Hq | 1, rows | 1, keys | 1)."""
        if self.parts:
            return reduce(self.mask.join, (part.keep(where) for part in self.parts))  # type: ignore[attr-defined]
        i, j = positions(where.i, self.device), positions(where.j, self.device)
        scaled = Rectangle(where.b, where.h, i // self.block, j // self.block)
        views = [cut(a, where if self.block == 1 else scaled) for a in self.arrays]
        r, c = (*views, None, None)[:2]
        keep: Tensor = self.mask.keep(
            i[None, None, :, None], j[None, None, None], r, c, self.numbers
        )
        return keep

    def _join(self, tiles: list[Tensor | bool]) -> Tensor | bool:
        conjunction = self.mask.sign == "&"  # type: ignore[attr-defined]
        decisive = not conjunction  # one False decides &, one True decides |
        if any(t is decisive for t in tiles):
            return decisive
        arrays = [t for t in tiles if isinstance(t, Tensor)]
        return reduce(self.mask.join, arrays) if arrays else conjunction  # type: ignore[attr-defined]


def per_key_head(keep: Tensor, group: int) -> Tensor:
    """(B | 1, Hq | 1, ...) as (B | 1, Hk | 1, G | 1, ...): the query heads of each key head."""
    return keep.unsqueeze(2) if keep.shape[1] == 1 else keep.unflatten(1, (-1, group))


def positions(index: Index, device: torch.device | str) -> Tensor:
    """The indices themselves, as a 1-d int64 tensor."""
    if isinstance(index, slice):
        return torch.arange(index.start, index.stop, device=device)
    return index.to(device)


def visible(mask: Mask, m: int, n: int, heads: int = 1, batch: tuple[int, ...] = ()) -> Tensor:
    """The mask as one bool array (B, Hq, M, N): a square, for tests and small problems."""
    b = math.prod(batch)
    everything = Rectangle(slice(0, b), slice(0, heads), slice(0, m), slice(0, n))
    return Bound(mask, batch, heads, m, n).keep(everything).expand(b, heads, m, n)


def lay_out(
    array: Tensor,
    lay: tuple[str, ...],
    batch: tuple[int, ...],
    sizes: dict[str, int],
    block: int,
    mask: Mask,
) -> Tensor:
    """View an array of a mask, last axes as `lay` names them, as (B | 1, Hq | 1, M | 1, N | 1)."""
    want = [
        -(-sizes[axis[0]] // block) if "/" in axis else sizes[axis] for axis in lay
    ]  # "M/block" counts tiles
    missing = len(lay) - array.dim()
    if missing > 0:
        array = array[(None,) * missing]
    tail, head = array.shape[array.dim() - len(lay) :], array.shape[: array.dim() - len(lay)]
    fits = all(have in (1, need) for have, need in zip(tail, want, strict=True))
    exact = isinstance(mask, Lengths) or len(lay) > 1 or tuple(tail) == tuple(want)
    if not (fits and exact and broadcasts(head, batch)):
        name = type(mask).__name__
        expected = ["...", *(f"{axis}={need}" for axis, need in zip(lay, want, strict=True))]
        raise ArgumentError(
            f"An array of the mask {name} does not fit the problem.",
            {
                "array": tuple(array.shape),
                "expected": f"({', '.join(expected)}) with ... one of batch {batch} or absent",
            },
            f"give {name} the lengths that q and k have in this call.",
        )
    named = {axis[0]: size for axis, size in zip(lay, tail, strict=True)}
    flat = flatten_batch(array, len(head), batch)
    return flat.reshape(flat.shape[0], *(named.get(axis, 1) for axis in "HMN"))
