"""Derivatives of any order, forward and reverse, at O(N) memory for a fixed block of rows.

Attention is a sum over blocks of query rows, and the oracle's `rows` is one block in plain torch.
Its derivative is again a sum over blocks: the vector-Jacobian product of each block, rows kept
where the array has rows and added up where it has none. So one function with that shape, whose
backward and forward derivative have the same shape again, gives every order; a block recomputes
what it needs, and nothing of size M x N lives longer than one block (tile_m x N).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROWS, WHOLE = "rows", "whole"  # cut along axis 2 with the queries; or the same for every block
BLOCK_ELEMENTS = 1 << 22

BlockFn = Callable[..., tuple[Tensor, ...]]  # (index, *arrays) -> arrays


class Blocks:
    """A function of arrays that is a sum over blocks of query rows.

    fn       (index, *arrays of one block) -> outputs of that block
    takes    for each array, ROWS or WHOLE
    gives    for each output, ROWS (blocks are joined along axis 2) or WHOLE (blocks are added)
    rows     number of query rows M;  step  rows of a block
    """

    def __init__(
        self, fn: BlockFn, takes: Sequence[str], gives: Sequence[str], rows: int, step: int
    ) -> None:
        self.fn, self.takes, self.gives = fn, tuple(takes), tuple(gives)
        self.rows, self.step = rows, step

    def __call__(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        """Evaluate; differentiable to any order in both modes."""
        return _Sum.apply(self, *arrays)  # type: ignore[no-any-return,no-untyped-call]

    def evaluate(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        """Evaluate block after block, without recording."""
        joined: list[list[Tensor]] = [[] for _ in self.gives]
        for lo in range(0, max(self.rows, 1), self.step):
            index = slice(lo, min(lo + self.step, self.rows))
            block = [
                a[:, :, index] if how == ROWS else a
                for a, how in zip(arrays, self.takes, strict=True)
            ]
            for parts, out, how in zip(joined, self.fn(index, *block), self.gives, strict=True):
                if how == WHOLE and parts:
                    parts[0] = parts[0] + out
                else:
                    parts.append(out)
        return tuple(
            torch.cat(parts, 2) if how == ROWS else parts[0]
            for parts, how in zip(joined, self.gives, strict=True)
        )

    def vjp(self) -> Blocks:
        """(arrays, cotangents of the outputs) -> cotangents of the arrays."""
        count = len(self.takes)

        def fn(index: slice, *arrays: Tensor) -> tuple[Tensor, ...]:
            x, cotangents = arrays[:count], arrays[count:]
            pull = torch.func.vjp(lambda *a: self.fn(index, *a), *x)[1]
            return tuple(pull(tuple(cotangents)))

        return Blocks(fn, self.takes + self.gives, self.takes, self.rows, self.step)

    def jvp(self) -> Blocks:
        """(arrays, tangents of the arrays) -> tangents of the outputs."""
        count = len(self.takes)

        def fn(index: slice, *arrays: Tensor) -> tuple[Tensor, ...]:
            # J t as the transpose of the linear map u -> J^T u: forward mode inside forward mode is
            # something torch does not nest
            x, tangents = arrays[:count], arrays[count:]
            out, pull = torch.func.vjp(lambda *a: self.fn(index, *a), *x)[:2]
            push = torch.func.vjp(lambda *u: pull(u), *(torch.zeros_like(o) for o in out))[1]
            return tuple(push(tangents))

        return Blocks(fn, self.takes * 2, self.gives, self.rows, self.step)


class _Sum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(blocks: Blocks, *arrays: Tensor) -> tuple[Tensor, ...]:
        return blocks.evaluate(*arrays)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.blocks = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.blocks.vjp()(*ctx.saved_tensors, *cotangents)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        arrays = ctx.saved_tensors
        full = [
            torch.zeros_like(a) if t is None else t for a, t in zip(arrays, tangents, strict=True)
        ]
        return ctx.blocks.jvp()(*arrays, *full)  # type: ignore[no-any-return]


def block_rows(batch_heads: int, n: int) -> int:
    """Rows of a block, so that a few score blocks of this size fit in tens of megabytes."""
    return max(BLOCK_ELEMENTS // max(batch_heads * n, 1), 1)
