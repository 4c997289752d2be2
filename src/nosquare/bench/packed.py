"""How the others are asked to answer a packed case: B sequences side by side, (total, H, width).

nosquare gets the offsets on the device and nothing else. Who wants to know the longest sequence is
told it as a number of the host's, as its users know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .cases import Data
from .contestants import Attend

NESTED = "nested tensors, torch.jagged"


def by_offsets(attend: Callable[..., Any], data: Data, words: Mapping[str, Any]) -> Attend:
    """flash_attn_varlen_func, of FlashAttention-3 or of flash_attn."""
    longest = max(data.lengths)
    sizes: dict[str, Any] = {"cu_seqlens_q": data.cu, "cu_seqlens_k": data.cu}
    sizes |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def call() -> Tensor:
        out = attend(data.q, data.k, data.v, **sizes, **words)
        o: Tensor = out[0] if isinstance(out, tuple) else out  # some versions give lse too
        return o

    return call


def nested(data: Data) -> Attend:
    """scaled_dot_product_attention of nested tensors in torch's jagged layout, views of q, k and v.

    They are made before what is timed, but where forward and backward are: backward frees them.
    Raises UnsupportedError for what torch cannot say of them.
    """
    c, words = data.case, _words(data)
    made = None if c.phase == "forward+backward" else _jagged(data)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call() -> Tensor:
        q, k, v = made or _jagged(data)
        o = sdpa(q, k, v, **words)
        flat: Tensor = o.transpose(1, 2).values()
        return flat

    return call


def _words(data: Data) -> dict[str, Any]:
    c = data.case
    plain, causal = c.mask == "full()", c.mask in ("causal(start)", "causal(end)")
    lacks = {"softcap": c.softcap is not None, "alibi": c.alibi, "sinks": c.sinks,
             f"mask {c.mask}": not (plain or causal)}  # fmt: skip
    if absent := [word for word, asked in lacks.items() if asked]:
        raise UnsupportedError(f"torch's attention of nested tensors has no {', '.join(absent)}.")
    words: dict[str, Any] = {"is_causal": True} if causal else {}
    return words | ({"enable_gqa": True} if c.G > 1 else {})


def _jagged(data: Data) -> tuple[Tensor, ...]:
    """q, k and v as (B, H, length, width)."""
    sizes, make = data.lengths, torch.nested.nested_tensor_from_jagged
    return tuple(
        make(t, data.cu, min_seqlen=min(sizes), max_seqlen=max(sizes)).transpose(1, 2)
        for t in (data.q, data.k, data.v)
    )
