"""torch's FlexAttention as a contestant: compiled, with a block mask made from the case's mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ..bound import Bound
from ..errors import UnsupportedError
from .cases import Data
from .contestants import Attend

Indexed = Callable[..., Any]  # (b, h, i, j), each an index or a tensor of them -> a number of each


def attend(data: Data) -> Attend:
    """flex_attention, compiled for the sizes of the case. Raises UnsupportedError."""
    c = data.case
    if c.packed:  # it would be a mask of documents over one row, which other cases ask for
        raise UnsupportedError("FlexAttention is not asked to take packed sequences.")
    absent = [word for word, asked in (("dropout", c.dropout), ("sinks", c.sinks)) if asked]
    if absent:
        raise UnsupportedError(f"FlexAttention has no {' and no '.join(absent)}.")
    if data.device.type == "cpu" and (c.wants_grads or c.grad):
        raise UnsupportedError("FlexAttention has no backward on a CPU.")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # else the ninth size is one recompilation too many, and runs uncompiled
    words: dict[str, Any] = {"enable_gqa": True} if c.G > 1 else {}
    if c.mask != "full()":
        bound = Bound(data.mask, (c.B,), c.Hq, c.M, c.N, data.device)
        arrays = _arrays(bound)
        batch = c.B if any(a.shape[0] > 1 for a in arrays) else None
        heads = c.Hq if any(a.shape[1] > 1 for a in arrays) else None
        words["block_mask"] = create_block_mask(
            mask_mod(bound), batch, heads, c.M, c.N, device=str(data.device)
        )
    if c.softcap is not None or data.bias is not None or data.alibi is not None:
        words["score_mod"] = score_mod(data)
    return partial(torch.compile(flex_attention, dynamic=False), data.q, data.k, data.v, **words)


def mask_mod(bound: Bound) -> Indexed:
    """A mask in FlexAttention's form: (b, h, i, j) -> visible."""
    if bound.parts:
        join = bound.mask.join  # type: ignore[attr-defined]
        mods = [mask_mod(part) for part in bound.parts]
        return lambda b, h, i, j: reduce(join, (mod(b, h, i, j) for mod in mods))
    readers = [_reader(array) for array in bound.arrays]
    keep, numbers, block = bound.mask.keep, bound.numbers, bound.block

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        tiled = (i, j) if block == 1 else (i // block, j // block)
        r, c = (*(read(b, h, *tiled) for read in readers), None, None)[:2]
        return keep(i, j, r, c, numbers)

    return mod


def score_mod(data: Data) -> Indexed:
    """Softcap, alibi and bias in FlexAttention's form: (score, b, h, i, j) -> score."""
    c, softcap, slopes = data.case, data.case.softcap, data.alibi
    bias = None if data.bias is None else _reader(data.bias[(None,) * (4 - data.bias.ndim)])

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h] * torch.abs(i + (c.N - c.M) - j)
        return score if bias is None else score + bias(b, h, i, j)

    return mod


def _reader(array: Tensor) -> Indexed:
    """(b, h, i, j) -> the element of an array (B | 1, Hq | 1, M | 1, N | 1), indexed along the axes
    on which it varies alone: FlexAttention follows no other index."""
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    small = array.reshape([array.shape[axis] for axis in axes])

    def read(*index: Any) -> Any:
        return small[tuple(index[axis] for axis in axes)] if axes else small

    return read


def _arrays(bound: Bound) -> list[Tensor]:
    return [*bound.arrays, *(array for part in bound.parts for array in _arrays(part))]
