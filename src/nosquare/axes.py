"""Batch axes: any number of them outside, one inside.

Arrays that broadcast to the problem (bias, sinks, slopes, arrays of a mask) are viewed with one
batch axis of size B, or of size 1 where they do not vary; `restore` is the transpose, for their
gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Shape = tuple[int, ...]


def broadcasts(head: Shape, batch: Shape) -> bool:
    """Whether leading axes `head` broadcast to the batch axes."""
    if len(head) > len(batch):
        return all(n == 1 for n in head[: len(head) - len(batch)]) and broadcasts(
            head[len(head) - len(batch) :], batch
        )
    aligned = batch[len(batch) - len(head) :]
    return all(have in (1, need) for have, need in zip(head, aligned, strict=True))


def flatten_batch(array: Tensor, axes: int, batch: Shape) -> Tensor:
    """Flatten the first `axes` axes to one of size B, or of size 1 when none of them varies.

    A copy is made only where some batch axes vary and others broadcast.
    """
    head, tail = array.shape[:axes], array.shape[axes:]
    if all(n == 1 for n in head):
        return array.reshape(1, *tail)
    extra = axes - len(batch)
    array = array.reshape(*head[max(extra, 0) :], *tail)
    return array.expand(*batch, *tail).reshape(math.prod(batch), *tail)


def varies_partly(head: Shape, batch: Shape) -> bool:
    """Whether flatten_batch has to copy: some batch axes vary and others broadcast."""
    size = math.prod(head)
    return size > 1 and size != math.prod(batch)


def per_head(t: Tensor, batch: Shape, heads: int) -> Tensor:
    """sinks or slopes (..., Hq) as (B | 1, Hq, 1, 1)."""
    if t.dim() == 0:
        t = t[None]
    return flatten_batch(t, t.dim() - 1, batch).expand(-1, heads)[..., None, None]


def lay_out_bias(bias: Tensor, batch: Shape) -> Tensor:
    """bias (..., Hq, M, N), every axis broadcasting, as (B | 1, Hq | 1, M | 1, N | 1)."""
    if bias.dim() < 3:
        bias = bias[(None,) * (3 - bias.dim())]
    return flatten_batch(bias, bias.dim() - 3, batch)


def restore(total: Tensor, shape: torch.Size | Shape, batch: Shape) -> Tensor:
    """From one batch axis back to the shape the user gave, summed over what was broadcast."""
    if total.numel() == math.prod(shape):
        return total.reshape(shape)
    total = total.reshape(*((1,) if total.shape[0] == 1 else batch), *total.shape[1:])
    missing = len(shape) - total.dim()
    return total[(None,) * missing if missing > 0 else ...].sum_to_size(shape)
