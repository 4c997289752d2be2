"""The score of a pair, forward and derivative.

    z = scale * q.k      s = softcap * tanh(z / softcap)      s += alibi      s += bias      then
    the mask

A sink is one more logit of the row whose value vector is zero; it enters the normaliser alone.
ALiBi (Press, Smith, Lewis 2021) adds -slope * |position - j|, with positions aligned to the end.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cap_(z: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(z / softcap), in place."""
    return z.div_(softcap).tanh_().mul_(softcap)


def cap_slope(capped: Tensor, softcap: float) -> Tensor:
    """The derivative of softcap at the pair whose capped score is given: 1 - (s / softcap)^2."""
    ratio = capped / softcap
    return 1 - ratio * ratio


def alibi(slopes: Tensor, position: Tensor, j: Tensor) -> Tensor:
    """-slope * |position - j|.

    slopes (..., 1, 1); position (M,) and j (N,) integers; returns (..., M, N) in the slopes' dtype
    """
    return -slopes * (position[:, None] - j).abs().to(slopes.dtype)


def sum_to(grad: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Sum the gradient of a broadcast array over the axes it was broadcast along."""
    return grad if grad.shape == shape else grad.sum_to_size(shape)
