"""How long the sequences of a packed case are: a mix as training and serving meet it."""

from __future__ import annotations

import torch
from torch import Tensor

SPREAD = 1.25  # standard deviation of the logarithm of a length


def offsets(count: int, tokens: int, seed: int) -> Tensor:
    """Where `count` sequences begin and end that have so many tokens in all: int32 (count + 1,).

    Shares of the tokens are log-normal, exp(SPREAD * z) of standard normal z: of 24 sequences with
    16,384 tokens the middle one has some 300, and they go from a few tens to several thousand. Each
    has two tokens at least where that is possible: the gradients of q and k of a single one are 0,
    and no bound is relative to that. Where there are fewer tokens than sequences, some have none.
    Drawn on the CPU from the seed alone, they are the same on every device.
    """
    random = torch.Generator().manual_seed(seed)
    ends = (SPREAD * torch.randn(count, generator=random, dtype=torch.float64)).exp().cumsum(0)
    least = min(tokens // count, 2)
    shared = (ends / ends[-1] * (tokens - least * count)).round().long()
    found = torch.zeros(count + 1, dtype=torch.int32)
    found[1:] = shared + least * torch.arange(1, count + 1)
    return found
