"""The functions people call: they make an Inputs and a Spec, and enter through autograd.attend."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from .autograd import attend, attend_state
from .backends import named
from .dropout import Dropout
from .errors import ArgumentError
from .explain import Explanation, explain_problem
from .finite import check_finite as look_for_non_finite
from .inputs import Inputs, Spec, check_types
from .mask import Mask
from .ops import wanted
from .problem import Problem
from .state import State


class Options(TypedDict, total=False):
    """The keywords that attention, attention_state, attention_varlen and explain share.

    mask             which pairs are visible; None: all of them
    scale            multiplies q.k; None: 1 / sqrt(D)
    softcap          s becomes softcap * tanh(s / softcap)
    bias             (..., Hq, M, N) added to the scores, every axis broadcasts; has a gradient
    alibi            (..., Hq) slopes: -slope * |i + N - M - j| is added
    sinks            (..., Hq) one more logit a row, with value zero; has a gradient
    dropout          ns.Dropout(p, seed): replayable, the same on every backend
    deterministic    True: backward repeats bit by bit. None: as torch's deterministic mode says
    batch_invariant  True: a row's bits do not depend on what else is in the batch
    exact_delta      True: backward sums p dp over keys where it takes rowsum(do o) else, which has
                     the rounding of o: dq and dk of 16 bits err less, most where v has a mean
                     (docs/log.md), for two products of pairs more than the five or seven
    check_finite     True: raise at the first number that is used and is not finite
    backend          name of the one backend that may run this; it never falls back
    """

    mask: Mask | None
    scale: float | None
    softcap: float | None
    bias: Tensor | None
    alibi: Tensor | None
    sinks: Tensor | None
    dropout: Dropout | None
    deterministic: bool | None
    batch_invariant: bool
    exact_delta: bool
    check_finite: bool
    backend: str | None


_DEFAULTS = {
    "batch_invariant": False,
    "exact_delta": False,
    "check_finite": False,
}  # all other options: None
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _spelt_out(function: _Function) -> _Function:
    """Let help() and inspect.signature show each option where the code says **options."""
    own = [
        p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD
    ]
    words = {o: getattr(a, "__forward_arg__", a) for o, a in Options.__annotations__.items()}
    named = [
        inspect.Parameter(o, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(o), annotation=a)
        for o, a in words.items()
    ]
    whole = inspect.signature(function).replace(parameters=[*own, *named])
    function.__signature__ = whole  # type: ignore[attr-defined]
    return function


@_spelt_out
def attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> Tensor:
    """Exact softmax attention in O(N) memory.

    q (..., Hq, M, D)  k (..., Hk, N, D)  v (..., Hk, N, E), one dtype of float64, float32,
    bfloat16, float16; any strides; Hq a multiple of Hk (query head h reads key head h // (Hq / Hk))
    options  see Options
    returns  o (..., Hq, M, E) in the dtype of q; 0 in rows that see no key

    Raises ArgumentError for an ill-formed call, UnsupportedError when nobody (or not the backend
    that was named) can run it.
    """
    return attend(*_call(q, k, v, None, None, options))


@_spelt_out
def attention_state(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> State:
    """As attention, with the normaliser: State(o, lse), differentiable through both.

    returns  o as attention; lse (..., Hq, M) float32 (float64 for float64), natural logarithm of
             the row's normaliser, sink included, dropout not; -inf in rows that see nothing

    Raises as attention does.
    """
    return State(*attend_state(*_call(q, k, v, None, None, options)))


@_spelt_out
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Unpack[Options]
) -> Tensor:
    """Attention over packed sequences: sequence b owns tokens cu[b] <= t < cu[b + 1].

    q (total_q, Hq, D)  k (total_k, Hk, D)  v (total_k, Hk, E)
    cu_q, cu_k  (B + 1,) int32 or int64, rising from 0; lengths of 0 are fine
    options     as attention, but no bias; masks Causal, Window, Prefix and Lengths act on each
                sequence, and dropout counts i and j from each sequence's start, with b its number
    returns     o (total_q, Hq, E); 0 for tokens beyond cu_q[-1]

    Raises as attention does.
    """
    return varlen_state(q, k, v, cu_q, cu_k, **options).o


def varlen_state(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Unpack[Options]
) -> State:
    """As attention_varlen, with lse (Hq, total_q). For adapters; not a public name."""
    if cu_q is None or cu_k is None:  # without both it would be read as a call that is not packed
        raise ArgumentError("A packed call needs cu_q and cu_k.", {}, "give both.")
    return State(*attend_state(*_call(q, k, v, cu_q, cu_k, options)))


@_spelt_out
def explain(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> Explanation:
    """Which backend would run this call, and why each other would not. Nothing is computed.

    Arguments as attention; backward is included when an input requires a gradient.
    returns  an Explanation; print it

    Raises ArgumentError for an ill-formed call.
    """
    spec, x = _call(q, k, v, None, None, options)
    if spec.backend is not None:
        named(spec.backend)
    return explain_problem(Problem.of(x, spec, wanted(x)), spec.backend)


@_spelt_out
def problem(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> Problem:
    """The problem that this call would pose, checked, for ns.cost. Nothing is computed.

    Arguments as attention; all of them may be on the meta device, so that a problem of any size
    takes no memory. Its phase is training where an input requires a gradient.
    returns  a Problem: sizes, dtype, device, mask and features; it holds no data

    Raises ArgumentError for an ill-formed call.
    """
    spec, x = _call(q, k, v, None, None, options)
    return Problem.of(x, spec, wanted(x))


_KNOWN = frozenset(Options.__annotations__)
_BARE = {flag: Spec(deterministic=flag) for flag in (False, True)}  # a call without options


def _call(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, options: Options
) -> tuple[Spec, Inputs]:
    if options:
        spec, own, arrays = _read(options)
        x = Inputs(q, k, v, *own, cu_q, cu_k, arrays)
    else:
        spec = _BARE[torch.are_deterministic_algorithms_enabled()]
        x = Inputs(q, k, v, None, None, None, None, cu_q, cu_k)
    check_types(x)
    if torch._C._is_any_autocast_enabled():
        kind = q.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            q, k, v = _autocast(q, k, v)
            x = x._replace(q=q, k=k, v=v)
    if options and options.get("check_finite"):
        look_for_non_finite(x, spec)
    return spec, x


def _read(options: Options) -> tuple[Spec, tuple[Any, Any, Any, Any], tuple[Tensor, ...]]:
    """The options of a call: as Spec; bias, sinks, alibi and seed; what the mask refers to."""
    if not _KNOWN.issuperset(options):
        raise ArgumentError(
            "There is no such option.",
            {"given": ", ".join(sorted(set(options) - _KNOWN)), "known": ", ".join(sorted(_KNOWN))},
            "help(nosquare.api.Options).",
        )
    get: Any = options.get
    mask, dropout, deterministic = get("mask"), get("dropout"), get("deterministic")
    if mask is not None and not isinstance(mask, Mask):
        raise ArgumentError(
            "mask is not one of the mask kinds.",
            {"mask": type(mask).__name__},
            "ns.Dense(tensor) for a bool tensor, bias=tensor for additive numbers.",
        )
    if dropout is not None and not isinstance(dropout, Dropout):
        raise ArgumentError(
            "dropout is not an ns.Dropout.",
            {"dropout": repr(dropout)[:60]},
            "ns.Dropout(p=0.1, seed=7): the seed is what replays it.",
        )
    if dropout is not None and dropout.p == 0:
        dropout = None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    spec = Spec(
        "full()" if mask is None else str(mask),
        get("scale"),
        get("softcap"),
        0.0 if dropout is None else dropout.p,
        (0, 0, 0, 0) if dropout is None else dropout.offsets,
        get("backend"),
        deterministic,
        get("batch_invariant", False),
        get("exact_delta", False),
    )
    seed = None if dropout is None else dropout.seed_tensor()
    own = get("bias"), get("sinks"), get("alibi"), seed
    return spec, own, () if mask is None else mask.tensors


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As torch's own attention under autocast: to the autocast dtype, float64 left alone."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )
