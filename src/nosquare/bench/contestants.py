"""Who answers a case: torch's own attention, and nosquare.

A contestant says how it would answer before anything runs; what it cannot answer, it refuses with
its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..bound import visible
from ..dropout import Dropout
from ..errors import UnsupportedError
from ..receipt import Receipt, receipts
from ..score import alibi as alibi_scores
from .cases import Data

Attend = Callable[[], Tensor]


@dataclass(frozen=True)
class Contestant:
    """One who answers cases.

    attend  Data -> a function without arguments that gives o; raises UnsupportedError
    ran     Data -> in words, what served it, for contestants that give no receipts
    own_dropout  its dropout mask is drawn from torch's generator, not from positions
    """

    name: str
    attend: Callable[[Data], Attend]
    ran: Callable[[Data], str] | None = None
    own_dropout: bool = False


@dataclass(frozen=True)
class Prepared:
    """A case ready to be answered: call() gives a tensor or a tuple of them, named in order."""

    call: Callable[[], Any]
    names: tuple[str, ...]

    def outputs(self) -> dict[str, Tensor]:
        """One answer, by name: o, dq, dk, dv, dbias, dsinks."""
        found = self.call()
        return dict(zip(self.names, (found,) if len(self.names) == 1 else found, strict=True))


def prepare(contestant: Contestant, data: Data) -> Prepared:
    """What is timed. Of the phase backward, forward runs here, once."""
    attend, phase = contestant.attend(data), data.case.phase
    if not data.case.wants_grads:
        return Prepared(attend, ("o",))
    leaves, names = list(data.leaves.values()), tuple(f"d{name}" for name in data.leaves)
    if phase == "backward":
        o = attend()
        call = partial(torch.autograd.grad, o, leaves, data.do, retain_graph=True)
        return Prepared(call, names)

    def both() -> tuple[Tensor, ...]:
        o = attend()
        return (o, *torch.autograd.grad(o, leaves, data.do))

    return Prepared(both, ("o", *names))


# ---- nosquare ----


def _nosquare(data: Data) -> Attend:
    c = data.case
    options: dict[str, Any] = {} if c.mask == "full()" else {"mask": data.mask}
    if c.dropout:
        options["dropout"] = Dropout(c.dropout, data.seed)
    for name in ("softcap", "bias", "alibi", "sinks"):
        value = c.softcap if name == "softcap" else getattr(data, name)
        if value is not None:
            options[name] = value
    return partial(attention, data.q, data.k, data.v, **options)


NOSQUARE = Contestant("nosquare", _nosquare)


def answer(contestant: Contestant, data: Data) -> tuple[dict[str, Tensor], list[Receipt]]:
    """One answer and its receipts; forward of the phase backward is among them."""
    with receipts() as log:
        out = prepare(contestant, data).outputs()
    return out, list(log)


# ---- torch ----


def _torch_words(data: Data) -> Mapping[str, Any]:
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
        place = torch.arange(c.M) + (c.N - c.M)
        extra = alibi_scores(data.alibi[:, None, None], place, torch.arange(c.N)).to(c.dtype)
    if data.bias is None and extra is None and lower:
        return words | {"is_causal": True}
    keep = None if free else visible(data.mask, c.M, c.N, c.Hq, (c.B,))
    if keep is not None and data.bias is None and extra is None:
        return words | {"attn_mask": keep}
    added = data.bias if extra is None else extra if data.bias is None else data.bias + extra
    if added is not None and keep is not None:
        added = added.masked_fill(~keep, float("-inf"))
    return words if added is None else words | {"attn_mask": added}


def _torch(data: Data) -> Attend:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if data.bias is not None and data.bias.requires_grad:
        # what is added to a bias that learns is added in every call, as its user would have to
        return lambda: sdpa(data.q, data.k, data.v, **_torch_words(data))
    return partial(sdpa, data.q, data.k, data.v, **_torch_words(data))


def _torch_ran(data: Data) -> str:
    """Which of torch's kernels it would choose."""
    number = torch._fused_sdp_choice(data.q, data.k, data.v, **_torch_words(data))
    return str(torch.nn.attention.SDPBackend(number).name).lower()


TORCH = Contestant("torch", _torch, _torch_ran, own_dropout=True)
CONTESTANTS = {c.name: c for c in (TORCH, NOSQUARE)}
