"""Who answers a case: what a contestant is, and nosquare. The others are in peers.py.

A contestant says how it would answer before anything runs; what it cannot answer, it refuses with
its reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..dropout import Dropout
from ..errors import NosquareError, UnsupportedError
from ..receipt import Receipt, receipts
from .cases import Data

Attend = Callable[[], Tensor]
Within = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Contestant:
    """One who answers cases.

    attend  Data -> a function without arguments that gives o; raises UnsupportedError
    ran     Data -> in words, what served it, for contestants that give no receipts
    own_dropout  its dropout mask is drawn from torch's generator, not from positions
    within  a context that its forward runs in, entered once a sample and not once a call
    roundings  to the case's dtype, of each gradient, beyond those that check.py allows everybody
    """

    name: str
    attend: Callable[[Data], Attend]
    ran: Callable[[Data], str] | None = None
    own_dropout: bool = False
    within: Within = nullcontext
    roundings: Callable[[Data], float] = lambda data: 0.0


@dataclass(frozen=True)
class Prepared:
    """A case ready to be answered: call() gives a tensor or a tuple of them, named in order."""

    call: Callable[[], Any]
    names: tuple[str, ...]
    within: Within = nullcontext

    def outputs(self) -> dict[str, Tensor]:
        """One answer, by name: o, dq, dk, dv, dbias, dsinks."""
        with self.within():
            found = self.call()
        return dict(zip(self.names, (found,) if len(self.names) == 1 else found, strict=True))


class Answer(NamedTuple):
    """A contestant ready to be timed, its first answer, and the receipts of that.

    Of the phase backward, forward is among the receipts.
    """

    prepared: Prepared
    out: dict[str, Tensor]
    receipts: list[Receipt]


def prepare(contestant: Contestant, data: Data) -> Prepared:
    """What is timed. Of the phase backward, forward runs here, once."""
    within = contestant.within
    attend, phase = contestant.attend(data), data.case.phase
    if not data.case.wants_grads:
        return Prepared(attend, ("o",), within)
    leaves, names = list(data.leaves.values()), tuple(f"d{name}" for name in data.leaves)
    if phase == "backward":
        with within():
            o = attend()
        call = partial(torch.autograd.grad, o, leaves, data.do, retain_graph=True)
        return Prepared(call, names)

    def both() -> tuple[Tensor, ...]:
        o = attend()
        return (o, *torch.autograd.grad(o, leaves, data.do))

    return Prepared(both, ("o", *names), within)


def answer(contestant: Contestant, data: Data) -> Answer:
    """Prepare a contestant and let it answer once.

    Raises UnsupportedError, with its own reason, when it will not or cannot.
    """
    with warnings.catch_warnings(record=True) as told, receipts() as log:
        warnings.simplefilter("always")
        try:
            prepared = prepare(contestant, data)
            out = prepared.outputs()
            if data.device.type == "cuda":
                torch.cuda.synchronize(data.device)  # what fails on the device fails here
        except NosquareError:
            raise
        except Exception as error:  # of any library, by any of its ways to fail
            if isinstance(error, torch.cuda.OutOfMemoryError):
                torch.cuda.empty_cache()
            raise UnsupportedError(_why(error, [str(w.message) for w in told])) from error
    return Answer(prepared, out, list(log))


def _why(error: BaseException, told: Sequence[str]) -> str:
    """An error of a library in one sentence.

    Where torch is allowed none but kernels that do not take the call, it warns in pairs, "X kernel
    not used because:" and then the reason, and its error says nothing.
    """
    lines = str(error).strip().splitlines()
    first = lines[0][:300] if lines else type(error).__name__
    _, build, lacks = first.partition("This flash attention build does not support ")
    if build:  # one that was compiled without it; the words before name its source file
        return f"its build has no {lacks.rstrip('.')}."
    if not first.startswith(("No available kernel", "No viable backend")):
        return f"it stopped: {first}"
    noise = ("not used because", "runtime disabled")
    texts = [text.partition(" (Triggered internally")[0].strip() for text in told]
    reasons = dict.fromkeys(t for t in texts if not any(word in t for word in noise))
    return f"torch refuses: {' '.join(reasons)}" if reasons else "torch has no such kernel here."


# ---- nosquare ----


def _nosquare(data: Data, backend: str | None) -> Attend:
    c = data.case
    options: dict[str, Any] = {} if c.mask == "full()" else {"mask": data.mask}
    if backend is not None:
        options["backend"] = backend
    if c.dropout:
        options["dropout"] = Dropout(c.dropout, data.seed)
    for name in ("softcap", "bias", "alibi", "sinks"):
        value = c.softcap if name == "softcap" else getattr(data, name)
        if value is not None:
            options[name] = value
    if data.cu is not None:
        return partial(attention_varlen, data.q, data.k, data.v, data.cu, data.cu, **options)
    return partial(attention, data.q, data.k, data.v, **options)


def nosquare_by(backend: str | None) -> Contestant:
    """nosquare with a backend by name, "nosquare:<backend>"; None: as it chooses."""
    name = "nosquare" if backend is None else f"nosquare:{backend}"
    return Contestant(name, partial(_nosquare, backend=backend))


NOSQUARE = nosquare_by(None)
