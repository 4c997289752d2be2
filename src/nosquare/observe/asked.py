"""What a call of somebody else's attention asks for, as a Problem and in words."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mask import Causal, Full, Mask, Window
from ..problem import Problem

DENSE = "dense(t0)"  # pairs are hidden one by one; without the array nobody can count them


class Asked(NamedTuple):
    """What a call asked for.

    plan     the call in words
    inputs   the tensors where its part of autograd's graph ends
    arrays   of the mask, so that the visible pairs can be counted
    more     what is done beside attention, in words; "" where nothing
    """

    problem: Problem
    plan: str
    inputs: tuple[Tensor, ...]
    arrays: tuple[Tensor, ...] = ()
    more: str = ""


def sdpa(name: str, given: Mapping[str, Any]) -> Asked:
    """torch.nn.functional.scaled_dot_product_attention."""
    q, k, v = (given[word] for word in ("query", "key", "value"))
    extra: Any = given.get("attn_mask")
    arrays: tuple[Tensor, ...] = ()
    mask = str(Causal("start") if given.get("is_causal") else Full())
    if is_causal_bias(extra):
        mask = str(Causal("end" if extra.variant.name == "LOWER_RIGHT" else "start"))
        extra = None
    elif extra is not None and extra.dtype == torch.bool:
        mask, arrays, extra = DENSE, (extra,), None
    features = {
        "mask": mask,
        "bias": None if extra is None else tuple(extra.shape),
        "p": given.get("dropout_p") or 0.0,
        "scale": given.get("scale"),
        "grads": _grads((q, k, v, extra)),
    }
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:
        features["dtype"] = torch.get_autocast_dtype(kind)
    inputs = tuple(t for t in (q, k, v, extra) if t is not None)
    return Asked(problem_of(q, k, v, features), _words(name, given, 3), inputs, arrays)


def flex(name: str, given: Mapping[str, Any]) -> Asked:
    """torch.nn.attention.flex_attention.flex_attention; what its functions hide is not known."""
    q, k, v = (given[word] for word in ("query", "key", "value"))
    block_mask = given.get("block_mask")
    words = _words(name, given, 3)
    features = {
        "mask": str(Full()) if block_mask is None else DENSE,
        "scale": given.get("scale"),
        "grads": _grads((q, k, v)),
    }
    return Asked(problem_of(q, k, v, features), words, (q, k, v))


def fast_path(name: str, given: Mapping[str, Any]) -> Asked:
    """torch's native layers: projections and attention in one operator, x (B, M, width)."""
    x = given.get("query", given.get("src"))
    assert isinstance(x, Tensor)
    y = given.get("key", x)
    heads = given.get("num_head") or given["num_heads"]
    width = x.size(-1) // heads
    batch = x.size(0)
    each = 1 if x.is_nested else batch  # a nested tensor is packed: its tokens are counted together
    features = {
        "batch": (batch,),
        **{"Hq": heads, "Hk": heads, "D": width, "E": width, "packed": x.is_nested},
        **{word: t.numel() // max(each * t.size(-1), 1) for word, t in (("M", x), ("N", y))},
        "mask": str(Full()) if given.get("mask") is None else DENSE,
    }
    more = "the call does more than attention"
    return Asked(problem_of(x, y, y, features), f"{name}, projections too", (x,), more=more)


def flash(name: str, given: Mapping[str, Any]) -> Asked:
    """A function of a flash_attn package: tokens before heads, packed or padded, cached or not."""
    inputs: tuple[Tensor, ...]
    if "qkv" in given:
        inputs = (given["qkv"],)
        q, k, v = given["qkv"].unbind(-3)
    elif "kv" in given:
        inputs = (given["q"], given["kv"])
        q, (k, v) = given["q"], given["kv"].unbind(-3)
    else:
        cache = "_cache" if "k_cache" in given else ""
        inputs = q, k, v = given["q"], given[f"k{cache}"], given[f"v{cache}"]
    offsets = given.get("cu_seqlens_q", given.get("cu_seqlens"))
    table = given.get("block_table", given.get("page_table"))
    mask = str(_window(bool(given.get("causal")), given.get("window_size") or (-1, -1)))
    if "k_cache" in given or table is not None:
        mask = f"{mask}&lengths(t0)"  # as much of the cache as is filled
    if any(given.get(word) is not None for word in ("mask_mod", "block_sparse_tensors")):
        mask = DENSE
    features: dict[str, Any] = {
        "batch": tuple(q.shape[:-3]),
        "mask": mask,
        "p": given.get("dropout_p") or 0.0,
        "scale": given.get("softmax_scale"),
        "softcap": given.get("softcap") or None,
        "grads": _grads((q, k, v)),
    }
    for ours, theirs in (("alibi", "alibi_slopes"), ("sinks", "learnable_sink")):
        if given.get(theirs) is not None:
            features[ours] = tuple(given[theirs].shape)
    if table is not None:  # pages (number, tokens, Hk, D), and which of them each entry has
        features["N"] = table.shape[-1] * k.shape[-3]
    if offsets is not None:
        features["packed"] = True
        features["batch"] = (len(offsets) - 1,)
    q, k, v = (t.transpose(-2, -3) for t in (q, k, v))  # heads first, as a Problem has them
    return Asked(problem_of(q, k, v, features), _words(name, given, 1), inputs)


def is_causal_bias(extra: object) -> bool:
    """Whether an attn_mask is one of torch.nn.attention.bias, which words a causal mask."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(extra, module.CausalBias)


def problem_of(q: Tensor, k: Tensor, v: Tensor, features: Mapping[str, Any]) -> Problem:
    """The Problem of q (..., Hq, M, D), k and v likewise; `features` win over what they say.

    Nothing is checked: the call is somebody else's, and has its own checks.
    """
    found: dict[str, Any] = {"dtype": q.dtype, "device": q.device, "strides": ((), (), ())}
    if not q.is_nested:
        found["strides"] = (q.stride(), k.stride(), v.stride())
    if "Hq" not in features:
        (batch, hq, m), (k_batch, hk, n) = _sizes(q), _sizes(k)
        if batch != k_batch and "batch" not in features and not q.is_nested:
            batch = tuple(torch.broadcast_shapes(batch, k_batch))
        hq = max(hq, hk)  # one query head for all key heads is broadcast to them
        found |= {"batch": batch, "Hq": hq, "Hk": hk, "M": m, "N": n, "packed": q.is_nested}
        found |= {"D": q.size(-1), "E": v.size(-1)}
    found |= features
    if found.get("scale") is None:
        found["scale"] = 1 / math.sqrt(found["D"]) if found["D"] else 1.0
    return Problem(**found)


def _sizes(t: Tensor) -> tuple[tuple[int, ...], int, int]:
    """(batch, heads, tokens); of a nested tensor all tokens together."""
    if t.is_nested:
        heads = t.size(1)
        return (t.size(0),), heads, t.numel() // max(heads * t.size(-1), 1)
    return tuple(t.shape[:-3]), t.shape[-3] if t.dim() > 2 else 1, t.shape[-2]


def _grads(tensors: Sequence[Tensor | None]) -> str:
    """Letters of those that want a gradient, as Problem.grads."""
    if not torch.is_grad_enabled():
        return ""
    pairs = zip("qkvb", tensors, strict=False)
    return "".join(c for c, t in pairs if t is not None and t.requires_grad)


def _window(causal: bool, size: tuple[int | None, int | None]) -> Mask:
    """flash_attn's window: -1 or None is without bound, and all is aligned to the end."""
    before, after = (None if side is None or side < 0 else side for side in size)
    if before is None and after is None:
        return Causal() if causal else Full()
    return Window(before, 0 if causal else after)


def _words(name: str, given: Mapping[str, Any], skip: int) -> str:
    """The call without its first `skip` arguments, and without those that say nothing."""
    words = []
    for word, value in list(given.items())[skip:]:
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            words.append(f"{word}={dtype} {tuple(value.shape)}")
        elif value is True or (isinstance(value, int | float | str | tuple) and value):
            words.append(f"{word}={value}")
        elif callable(value) or (value is not None and not isinstance(value, int | float | tuple)):
            words.append(f"{word}={getattr(value, '__name__', type(value).__name__)}")
    return f"{name}({', '.join(words)})"
