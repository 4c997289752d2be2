"""From the words of a command line to a subject: which function, of which style.

torch:default | math | flash | efficient | cudnn   SDPA, left alone or pinned to one backend
nosquare | nosquare:<backend>                      ours, in either style
fa3                                                flash_attn 3's forward, where importable
package.module:function                            anybody's, from the current folder too
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..adapters.sdpa import sdpa
from ..api import attention_state
from ..backends import named
from ..dropout import Dropout
from ..errors import ArgumentError, UnsupportedError
from ..mask import Causal, Dense, Mask, Window
from .subject import FLASH_ATTN, SDPA, STYLES, Subject, parameters

_PINNED = {
    "torch:math": SDPBackend.MATH,
    "torch:flash": SDPBackend.FLASH_ATTENTION,
    "torch:efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch:cudnn": SDPBackend.CUDNN_ATTENTION,
}
SHORTHANDS = ("torch:default", *_PINNED, "nosquare", "nosquare:<backend>", "fa3")
_SDPA_WORDS = {"attn_mask", "is_causal", "dropout_p", "enable_gqa"}
_FLASH_WORDS = {"causal", "softmax_scale", "window_size"}
DTYPES = {str(t).removeprefix("torch."): t
          for t in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}  # fmt: skip


def subject_of(target: str | Callable[..., Any], style: str | None = None) -> Subject:
    """The function that a text names, or a function itself, with its style.

    style  "sdpa" or "flash_attn"; None: as the target or its parameters say

    Raises ArgumentError when there is no such function, it is not callable, or its style is
    unknown or another; UnsupportedError when a shorthand needs a package that is not here.
    """
    if style is not None and style not in STYLES:
        raise ArgumentError(
            "There is no such style of signature.",
            {"style": repr(style), "styles": ", ".join(STYLES)},
            "--style sdpa for (q, k, v, attn_mask, ...), --style flash_attn for (q, k, v, causal, "
            "...) with tokens before heads.",
        )
    if not isinstance(target, str):
        name = getattr(target, "__qualname__", type(target).__name__)
        return _of_function(target, name, style)
    if target == "torch:default" or target in _PINNED:
        function = _torch(_PINNED.get(target))
        return Subject(function, _only(target, style, SDPA), target)
    if target == "nosquare" or target.startswith("nosquare:"):
        return _nosquare(target, style or SDPA)
    if target == "fa3":
        return Subject(_fa3(), _only(target, style, FLASH_ATTN), target)
    return _of_function(_imported(target), target, style)


def dtypes_of(words: Sequence[str] | None) -> tuple[torch.dtype, ...]:
    """torch's dtypes by their words; None: float32 and bfloat16. Raises ArgumentError."""
    words = ("float32", "bfloat16") if words is None else words
    unknown = [word for word in words if word not in DTYPES]
    if unknown or not words:
        raise ArgumentError(
            "Attention has no such dtype.",
            {"dtype": ", ".join(map(repr, unknown)) or "none", "dtypes": ", ".join(DTYPES)},
            "--dtype float32,bfloat16.",
        )
    return tuple(dict.fromkeys(DTYPES[word] for word in words))


def device_of(word: str) -> torch.device:
    """The device of that name, which must be here. Raises ArgumentError."""
    try:
        device = torch.device(word)
    except RuntimeError:
        device = torch.device("meta")
    count = torch.cuda.device_count()
    here = {"cpu": True, "cuda": (device.index or 0) < count}.get(device.type, False)
    if not here:
        cards = ", ".join(f"cuda:{i}" for i in range(count)) or "no CUDA device that torch sees"
        raise ArgumentError(
            "The checks cannot run on this device.",
            {"device": repr(word), "here": f"cpu, {cards}"},
            "--device cpu.",
        )
    return device


# ---- functions of others ----


def _imported(target: str) -> Any:
    module, _, path = target.partition(":")
    if not module or not path:
        raise ArgumentError(
            "A target is one of ours by name, or a function as package.module:function.",
            {"target": repr(target), "ours": ", ".join(SHORTHANDS)},
            "nosquare verify torch:math, or nosquare verify mypackage.attention:attend.",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise ArgumentError(
            "The module of the target cannot be imported.",
            {"module": module, "because": f"{type(error).__name__}: {error}"},
            f"python -c 'import {module}' here; the current folder is searched first.",
        ) from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise ArgumentError(
                "The module has nothing of that name.",
                {"target": target, "missing": part},
                f"{_likely(target, module, found)}.",
            )
        found = getattr(found, part)
    return found


def _likely(target: str, module: str, owner: Any) -> str:
    """Targets that may have been meant: of a like name, else the first ones that are there."""
    names = [n for n in dir(owner) if not n.startswith("_") and callable(getattr(owner, n, None))]
    if module == "torch":  # a shorthand was meant
        names = [word.partition(":")[2] for word in SHORTHANDS if word.startswith("torch:")]
    near = difflib.get_close_matches(target.partition(":")[2], names, n=2)
    return ", or ".join(f"{module}:{name}" for name in near or names[:3]) or "nosquare"


def _of_function(function: Any, name: str, style: str | None) -> Subject:
    if not callable(function):
        raise ArgumentError(
            "The target is not a function.",
            {"target": name, "is": type(function).__name__},
            "the name of a callable that takes q, k, v.",
        )
    known = parameters(function) or frozenset()
    looks = {SDPA: bool(known & _SDPA_WORDS), FLASH_ATTN: bool(known & _FLASH_WORDS)}
    if known and len(known) < 3:
        raise ArgumentError(
            "The target does not take q, k and v.",
            {"target": name, "parameters": ", ".join(sorted(known)) or "none"},
            "a function with the signature of SDPA or of flash_attn_func.",
        )
    if style is None:
        fitting = [word for word, fits in looks.items() if fits]
        if len(fitting) != 1:
            raise ArgumentError(
                "It cannot be told whether the target has SDPA's signature or flash_attn's.",
                {"target": name, "parameters": ", ".join(sorted(known)) or "unknown"},
                "--style sdpa or --style flash_attn.",
            )
        style = fitting[0]
    other = FLASH_ATTN if style == SDPA else SDPA
    if looks[other] and not looks[style]:
        _only(name, style, other)
    return Subject(function, style, name)


def _only(target: str, style: str | None, own: str) -> str:
    if style not in (None, own):
        raise ArgumentError(
            "The target has the signature of another style.",
            {"target": target, "its style": own, "style": style},
            f"--style {own}, or no --style.",
        )
    return own


# ---- ours by name ----


def _torch(backend: SDPBackend | None) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
    if backend is None:
        return function

    def pinned(*x: Any, **words: Any) -> Tensor:
        with sdpa_kernel(backend):
            return function(*x, **words)

    return pinned


def _fa3() -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = importlib.import_module("fa3_fwd_interface").flash_attn_func
    except ImportError as error:
        raise UnsupportedError(
            "flash_attn 3's forward is not installed here.",
            {"module": "fa3_fwd_interface", "because": str(error)},
            "package.module:flash_attn_func of another build, with --style flash_attn.",
        ) from None
    return found


def _nosquare(target: str, style: str) -> Subject:
    _, _, backend = target.partition(":")
    if backend or ":" in target:
        named(backend)
    if style == SDPA and not backend:
        return Subject(sdpa, SDPA, target)
    make = _sdpa_on if style == SDPA else _flash_on
    return Subject(make(backend or None), style, target)


def _seeded(p: float, q: Tensor) -> Dropout | None:
    """Dropout with a seed from torch's generator, as ns.sdpa draws it."""
    seed = torch.randint(2**62, (), dtype=torch.int64, device=q.device) if p else None
    return None if seed is None else Dropout(p, seed)


def _sdpa_on(backend: str | None) -> Callable[..., Tensor]:
    """ns.sdpa with a named backend: only what well-formed calls need."""

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Tensor:  # fmt: skip
        bare = q.dim() == 2
        x = [t.unsqueeze(0) if bare else t for t in (q, k, v)]
        is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
        mask: Mask | None = Causal("start") if is_causal else None
        if attn_mask is not None and is_bool:
            mask = Dense(attn_mask) if mask is None else Dense(attn_mask) & mask
        o = attention_state(*x, mask=mask, bias=None if is_bool else attn_mask, scale=scale,
                            dropout=_seeded(dropout_p, q), backend=backend).o  # fmt: skip
        return o.squeeze(0) if bare else o

    return attend


@dataclass(frozen=True)
class _FlashWords:
    """The options of flash_attn_func."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    deterministic: bool = False
    return_attn_probs: bool = False

    def mask(self) -> Mask | None:
        """Causal and window, where they are asked for; -1 is no limit."""
        left, right = (None if n < 0 else n for n in self.window_size)
        causal = Causal() if self.causal else None
        if left is None and right is None:
            return causal
        near = Window(left, right)
        return near if causal is None else near & causal


def _flash_on(backend: str | None) -> Callable[..., Any]:
    """nosquare under flash_attn_func's signature."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> Any:
        asked = _FlashWords(**words)
        state = attention_state(
            *(t.transpose(1, 2) for t in (q, k, v)),
            mask=asked.mask(),
            scale=asked.softmax_scale,
            softcap=asked.softcap or None,
            dropout=_seeded(asked.dropout_p, q),
            deterministic=asked.deterministic or None,
            backend=backend,
        )
        o = state.o.transpose(1, 2)
        return (o, state.lse, None) if asked.return_attn_probs else o

    # what it takes is read from its signature
    own, options = (
        [*inspect.signature(of).parameters.values()] for of in (flash_attn_func, _FlashWords)
    )
    options = [p.replace(kind=p.KEYWORD_ONLY) for p in options]
    flash_attn_func.__signature__ = inspect.Signature([*own[:3], *options])  # type: ignore[attr-defined]
    return flash_attn_func
