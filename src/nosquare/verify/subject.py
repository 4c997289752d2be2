"""The function under test, behind one way of asking it.

A check asks in the words of the contract, with heads before tokens (B, H, N, D); the subject says
it in the words of its own signature. Where the signature has no such words: Inapplicable. Where
the function answers with a clear error: Refusal. Any other exception is a crash, and passes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

SDPA, FLASH_ATTN = STYLES = ("sdpa", "flash_attn")
_CLEAR = (ValueError, TypeError, NotImplementedError, RuntimeError, AssertionError)
# What a library says when it has broken down, not when it declines.
_BROKEN = ("CUDA error", "CUDNN_STATUS", "cuDNN Frontend error", "INTERNAL ASSERT",
           "illegal memory access", "misaligned address", "CUBLAS_STATUS")  # fmt: skip
# flash_attn 2 and 3, its cache function, flash_attn 4
_LSE_WORDS = ("return_attn_probs", "return_softmax_lse", "return_lse")


class Refusal(Exception):
    """The function raised a clear error; str() is its text, on one line."""


class Inapplicable(Exception):
    """The question cannot be asked; str() says why."""


@dataclass(frozen=True)
class Ask:
    """The options of one call.

    keep     bool, True is visible; broadcasts to (..., M, N)
    bias     added to the scores; broadcasts likewise
    causal   aligned as the style says: to the top left for sdpa, the bottom right for flash_attn
    window   (left, right) inclusive counts, -1 unbounded, about position i + N - M
    dropout  the probability, drawn from torch's generator
    words    more keywords, in the words of the function
    """

    keep: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    dropout: float = 0.0
    words: tuple[tuple[str, Any], ...] = ()


PLAIN = Ask()


@dataclass(frozen=True)
class Subject:
    """A function, its style and the name it goes by."""

    function: Callable[..., Any]
    style: str
    name: str

    @cached_property
    def parameters(self) -> frozenset[str] | None:
        """The keywords it takes; None where any may be, or nobody knows (a builtin)."""
        return parameters(self.function)

    @property
    def corner(self) -> str:
        """Where a causal mask of this style is aligned when M != N."""
        return "top left" if self.style == SDPA else "bottom right"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask = PLAIN) -> Tensor:
        """o (..., Hq, M, E). Raises Refusal and Inapplicable."""
        o: Tensor = self._answer(q, k, v, ask, {})[0]
        return o

    def state(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask = PLAIN) -> tuple[Tensor, Tensor]:
        """(o, lse (B, Hq, M)), for signatures that can return it. Raises as attend does."""
        known = self.parameters or ()
        words = [word for word in _LSE_WORDS if word in known]
        if self.style == SDPA or not words:
            raise Inapplicable("its signature returns no lse")
        found = self._answer(q, k, v, ask, {words[0]: True})
        if len(found) < 2 or not isinstance(found[1], Tensor):
            raise Inapplicable(f"{words[0]}=True returns no second tensor")
        return found[0], found[1]

    def visible(self, ask: Ask, m: int, n: int, device: torch.device) -> Tensor | None:
        """Which pairs an Ask leaves visible, by the rules of the style; None: all."""
        keep = ask.keep
        i, j = torch.arange(m, device=device)[:, None], torch.arange(n, device=device)[None]
        if ask.causal:
            seen = j <= (i if self.style == SDPA else i + (n - m))
            keep = seen if keep is None else keep & seen
        if ask.window is not None:
            left, right = ask.window
            place = i + (n - m)
            near = torch.ones(m, n, dtype=torch.bool, device=device)
            if left >= 0:
                near = near & (j >= place - left)
            if right >= 0:
                near = near & (j <= place + right)
            keep = near if keep is None else keep & near
        return keep

    def with_(self, function: Callable[..., Any]) -> Subject:
        """The same subject, answered by another function (a compiled one)."""
        return replace(self, function=function)

    # ---- the two signatures ----

    def _answer(
        self, q: Tensor, k: Tensor, v: Tensor, ask: Ask, more: dict[str, Any]
    ) -> tuple[Any, ...]:
        words = self._sdpa(q, k, ask) if self.style == SDPA else self._flash(q, ask)
        words |= more | dict(ask.words)
        if self.parameters is not None and (absent := words.keys() - self.parameters):
            raise Inapplicable(f"its signature has no {' and no '.join(sorted(absent))}")
        turn = self.style == FLASH_ATTN
        x = [t.transpose(1, 2) if turn else t for t in (q, k, v)]
        found = listening(self.function, *x, **words)
        found = found if isinstance(found, tuple | list) else (found,)
        if not found or not isinstance(found[0], Tensor):
            raise TypeError(f"it returned {type(found[0] if found else None).__name__}, no tensor")
        return (found[0].transpose(1, 2) if turn else found[0], *found[1:])

    @staticmethod
    def _sdpa(q: Tensor, k: Tensor, ask: Ask) -> dict[str, Any]:
        if ask.window is not None:
            raise Inapplicable("SDPA's signature has no window")
        words: dict[str, Any] = {}
        mask = ask.keep if ask.bias is None else ask.bias
        if ask.keep is not None and ask.bias is not None:
            mask = ask.bias.masked_fill(~ask.keep, -torch.inf)
        words |= {} if mask is None else {"attn_mask": mask}
        words |= {"is_causal": True} if ask.causal else {}
        words |= {} if ask.scale is None else {"scale": ask.scale}
        words |= {"dropout_p": ask.dropout} if ask.dropout else {}
        if min(q.dim(), k.dim()) > 2 and q.shape[-3] != k.shape[-3]:
            words["enable_gqa"] = True
        return words

    @staticmethod
    def _flash(q: Tensor, ask: Ask) -> dict[str, Any]:
        if ask.keep is not None or ask.bias is not None:
            raise Inapplicable("flash_attn's signature has no mask and no bias")
        if q.dim() != 4:
            raise Inapplicable("flash_attn's signature has four axes")
        words: dict[str, Any] = {"causal": True} if ask.causal else {}
        words |= {} if ask.window is None else {"window_size": ask.window}
        words |= {} if ask.scale is None else {"softmax_scale": ask.scale}
        return words | ({"dropout_p": ask.dropout} if ask.dropout else {})


def gradients(
    o: Tensor, leaves: Sequence[Tensor], do: Tensor, create_graph: bool = False
) -> list[Tensor]:
    """Gradients of o in the leaves; 0 where a leaf does not enter. Raises as attend does."""
    if not o.requires_grad:
        raise Inapplicable("its output carries no gradient")
    found = listening(
        torch.autograd.grad, o, list(leaves), do, create_graph=create_graph, allow_unused=True
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names a function can be given; None where any may be, or nobody knows (a builtin)."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in found):
        return None
    return frozenset(p.name for p in found)


def listening(function: Callable[..., Any], *x: Any, **words: Any) -> Any:
    """Call it. A clear error becomes a Refusal; what was warned just before is part of its text,
    since torch says why a kernel is refused only there."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            return function(*x, **words)
        except (Refusal, Inapplicable):
            raise
        except _CLEAR as error:
            text = " ".join(str(error).split())
            if not text or any(sign in text for sign in _BROKEN):
                raise
            raise Refusal((text + _reasons(heard))[:400]) from None


def _reasons(heard: Sequence[warnings.WarningMessage]) -> str:
    """What was warned before, in brackets; but not headings, and not what was switched off."""
    said = [" ".join(str(w.message).split("(Triggered")[0].split()) for w in heard]
    said = [s for s in said if not s.endswith("because:") and "runtime disabled" not in s]
    return f" ({'; '.join(dict.fromkeys(said))})" if said else ""
