"""The others who answer a case: torch's attention, FlexAttention, FlashAttention-3 and flash_attn.

All get the very tensors that nosquare gets: (B, H, M, D), heads before tokens in memory. Those with
another order of axes, (B, M, H, D), get views of them, which costs nothing. Packed sequences they
get as packed.py says.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..backends import discover
from ..bound import Bound, Rectangle
from ..errors import ArgumentError, UnsupportedError
from ..mask import Both, Causal, Full, Window
from ..score import alibi as alibi_scores
from .cases import Case, Data
from .contestants import NOSQUARE, Attend, Contestant, nosquare_by
from .flex import attend as flex
from .packed import NESTED, by_offsets, nested
from .tiled import by_name

FUSED = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# where FlashAttention-3 may be: the whole of it, or a wheel with its forward alone
FA3, FA3_FORWARD = "flash_attn_interface", "fa3_fwd_interface"


def contestants() -> dict[str, Contestant]:
    """Everybody who can be asked, by name, nosquare first. Who cannot answer says so when asked."""
    found = [
        NOSQUARE,
        *(nosquare_by(name) for name in discover()),
        TORCH,
        *(_only(name, backend) for name, backend in FUSED.items()),
        Contestant("flex", flex, lambda data: "flex_attention, compiled"),
        Contestant("fa3", _fa3, lambda data: f"{_fa3_module().__name__}.{_function(data)}"),
        Contestant("flash_attn", _flash_attn, _function, own_dropout=True),
    ]
    return {one.name: one for one in found}


def named(words: str) -> list[Contestant]:
    """The contestants of a comma-separated list, or of "all"; tiled.py's are known by their form.

    Raises ArgumentError for others.
    """
    known = contestants()
    names = list(known) if words == "all" else [word.strip() for word in words.split(",")]
    found = {name: known.get(name) or by_name(name) for name in names}
    if wrong := [name for name, one in found.items() if one is None]:
        raise ArgumentError(
            "There is no such contestant.",
            {"peers": ", ".join(map(repr, wrong)),
             "known": ", ".join([*known, "nosquare:torch_any@64x128"])},
            "--peers nosquare,torch:flash, or --peers all.",
        )  # fmt: skip
    return [one for one in found.values() if one is not None]


# ---- torch ----


def torch_words(data: Data) -> Mapping[str, Any]:
    """Keywords of scaled_dot_product_attention that say the same. Raises UnsupportedError."""
    c = data.case
    absent = [name for name, there in (("softcap", c.softcap is not None), ("sinks", c.sinks))
              if there]  # fmt: skip
    if absent:
        raise UnsupportedError(f"torch's attention has no {' and no '.join(absent)}.")
    words: dict[str, Any] = {"dropout_p": c.dropout} if c.dropout else {}
    if c.G > 1:
        words["enable_gqa"] = True
    lower = c.mask == "causal(start)" or (c.mask == "causal(end)" and c.M == c.N)
    free = c.mask == "full()" or (c.mask == "causal(end)" and c.M == 1)
    extra: Tensor | None = None
    if data.alibi is not None:
        place = torch.arange(c.M, device=data.device) + (c.N - c.M)
        keys = torch.arange(c.N, device=data.device)
        extra = alibi_scores(data.alibi[:, None, None], place, keys).to(c.dtype)
    if data.bias is None and extra is None and lower:
        return words | {"is_causal": True}
    keep = None if free else visible(data)
    if keep is not None and data.bias is None and extra is None:
        return words | {"attn_mask": keep}
    added = data.bias if extra is None else extra if data.bias is None else data.bias + extra
    if added is not None and keep is not None:
        added = added.masked_fill(~keep, float("-inf"))
    return words if added is None else words | {"attn_mask": added}


def visible(data: Data) -> Tensor:
    """The case's mask as torch takes it: bool (B, Hq, M, N), expanded along axes it is equal on."""
    c = data.case
    bound = Bound(data.mask, (c.B,), c.Hq, c.M, c.N, data.device)
    everything = Rectangle(slice(0, c.B), slice(0, c.Hq), slice(0, c.M), slice(0, c.N))
    return bound.keep(everything).expand(c.B, c.Hq, c.M, c.N)


def _torch(data: Data) -> Attend:
    if data.case.packed:
        return nested(data)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if data.bias is not None and data.bias.requires_grad:
        # what is added to a bias that learns is added in every call, as its user would have to
        return lambda: sdpa(data.q, data.k, data.v, **torch_words(data))
    return partial(sdpa, data.q, data.k, data.v, **torch_words(data))


def _torch_ran(data: Data) -> str:
    """Which of torch's kernels it would choose; of nested tensors it does not tell."""
    if data.case.packed:
        return NESTED
    number = torch._fused_sdp_choice(data.q, data.k, data.v, **torch_words(data))
    return str(SDPBackend(number).name).lower()


def _torch_roundings(data: Data) -> float:
    """torch's flash attention for CPUs sums gradients of 16-bit types in that type, a block of rows
    after the other: sqrt(n) roundings for n blocks (Higham and Mary 2019). 0 for others of torch's.
    """
    c = data.case
    if data.device.type != "cpu" or c.dtype.itemsize > 2 or _torch_ran(data) != "flash_attention":
        return 0.0
    block = 256 if c.M >= 768 else 64 if c.M >= 192 else 32  # as in torch's source
    return float((c.M / block) ** 0.5)


def _only(name: str, backend: SDPBackend) -> Contestant:
    """torch's attention with one of its kernels allowed."""
    words = str(backend.name).lower()
    return Contestant(
        f"torch:{name}", _torch, lambda data: words, True, lambda: sdpa_kernel(backend)
    )


TORCH = Contestant("torch", _torch, _torch_ran, own_dropout=True, roundings=_torch_roundings)


# ---- FlashAttention ----


def flash_mask(case: Case, data: Data) -> tuple[bool, tuple[int, int]] | None:
    """(causal, window) as FlashAttention takes them, -1 for a side without bound; None where it
    cannot say the mask. Its masks are aligned to the end."""
    mask = data.mask
    parts = mask.parts if type(mask) is Both else (mask,)
    sides: list[int | None] = [None, None]
    for part in parts:
        if isinstance(part, Full):
            continue
        if not isinstance(part, Causal | Window) or (part.align != "end" and case.M != case.N):
            return None
        bounds = (None, 0) if isinstance(part, Causal) else (part.before, part.after)
        for n, bound in enumerate(bounds):
            known = [side for side in (sides[n], bound) if side is not None]
            sides[n] = min(known, default=None)
    before, after = (-1 if side is None else side for side in sides)
    return after == 0, (before, after)


def _flash_words(name: str, data: Data, absent: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of flash_attn_func. absent: what this one has not, by name, and whether it is asked.

    Raises UnsupportedError for what it has not.
    """
    c = data.case
    masks = flash_mask(c, data)
    why = [word for word, asked in absent.items() if asked]
    why += [f"mask {c.mask}"] if masks is None else []
    if data.device.type != "cuda":
        raise UnsupportedError(f"{name} runs on CUDA devices only.")
    if c.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(f"{name} takes bfloat16 and float16 only.")
    if masks is None or why:
        raise UnsupportedError(f"{name} has no {' and no '.join(why)}.")
    words: dict[str, Any] = {"causal": masks[0], "window_size": masks[1]}
    return words if c.softcap is None else words | {"softcap": c.softcap}


def _function(data: Data) -> str:
    """Of FlashAttention's, the one that takes such a case."""
    return "flash_attn_varlen_func" if data.case.packed else "flash_attn_func"


def _flash(module: ModuleType, data: Data, words: Mapping[str, Any]) -> Attend:
    attend = getattr(module, _function(data))
    return (by_offsets if data.case.packed else _by_tokens)(attend, data, words)


def _by_tokens(attend: Callable[..., Any], data: Data, words: Mapping[str, Any]) -> Attend:
    """A function over (B, M, H, D) as one over ours."""

    def call() -> Tensor:
        out = attend(*(t.transpose(1, 2) for t in (data.q, data.k, data.v)), **words)
        o: Tensor = out[0] if isinstance(out, tuple) else out  # some versions give lse too
        return o.transpose(1, 2)

    return call


def _fa3_module() -> ModuleType:
    for name in (FA3, FA3_FORWARD):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise UnsupportedError(f"FlashAttention-3 is not installed ({FA3} or {FA3_FORWARD}).")


def _fa3(data: Data) -> Attend:
    c, module = data.case, _fa3_module()
    learns = c.wants_grads or c.grad
    only_forward = module.__name__ == FA3[0]
    absent: dict[str, Any] = {
        "backward in this wheel": learns and only_forward,
        "dropout": c.dropout,
    }
    absent |= {"bias": c.bias, "alibi": c.alibi, "sinks": c.sinks}
    words = _flash_words("FlashAttention-3", data, absent)
    if c.M == 1:
        words["num_splits"] = 0  # as many as it thinks best; 1 is its default
    return _flash(module, data, words)


def _flash_attn(data: Data) -> Attend:
    if importlib.util.find_spec("flash_attn") is None:
        raise UnsupportedError("flash_attn is not installed.")
    c = data.case
    absent = {"bias": c.bias, "sinks": c.sinks, "width of v other than that of k": c.E != c.D}
    words = _flash_words("flash_attn", data, absent)
    if c.dropout:
        words["dropout_p"] = c.dropout
    if data.alibi is not None:
        words["alibi_slopes"] = data.alibi
    return _flash(importlib.import_module("flash_attn"), data, words)
