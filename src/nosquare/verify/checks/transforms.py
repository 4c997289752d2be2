"""Derivatives beyond the first, and the transforms of torch: right, or refused, never wrong."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..registry import check
from ..subject import Ask, gradients, listening
from ..trial import Case, Trial, judged, leaves, within
from ..truth import Gap, Options, Triple, cast, dense, gap_of_o, largest, off, room, yard_dtype
from ..verdict import Finding


def _second(o: Tensor, x: Triple, do: Tensor) -> list[Tensor]:
    """Gradients of the sum of squares of the gradients."""
    first = gradients(o, x, do, create_graph=True)
    total = torch.stack([g.square().sum() for g in first]).sum()
    return gradients(total, x, torch.ones_like(total))


@check("double-backward", "derivatives", "Gradients of gradients are right, or refused.",
       "pytorch/pytorch#116350, Dao-AILab/flash-attention#699")  # fmt: skip
def double_backward(t: Trial) -> Finding:
    fixed = t.qkv(5, 7, 8)
    do = t.rnd(1, 2, 5, 8, seed=9)
    x = leaves(fixed)
    mine = _second(t.attend(x), x, do)
    found = []
    for kind in (torch.float64, yard_dtype(t.dtype)):
        wide = leaves(cast(fixed, kind))
        found.append(_second(dense(*wide).o, wide, do.to(kind)))
    gaps = [
        Gap(f"second derivative in {n}", off(g, right),
            room(t.dtype, off(plain, right), 12, 8.0, largest(right)))
        for n, g, right, plain in zip("qkv", mine, *found, strict=True)
    ]  # fmt: skip
    for gap in gaps:
        if not gap.ok:
            return judged(gap, "M=5 N=7 D=8")
    return within(gaps)


@contextmanager
def _forward_mode() -> Iterator[None]:
    """torch's forward mode imports, at its first use, what torch 2.13 itself deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")
    yield


@check("forward-mode", "derivatives", "Forward-mode derivatives are right, or refused.",
       "pytorch/pytorch#154226, Dao-AILab/flash-attention#1672")  # fmt: skip
def forward_mode(t: Trial) -> Finding:
    x, tangents = t.qkv(5, 7, 8), t.qkv(5, 7, 8, seed=20)
    with _forward_mode():
        _, mine = _jvp(t.subject.attend, x, tangents)
        found = []
        for kind in (torch.float64, yard_dtype(t.dtype)):
            found.append(_jvp(_o_of_dense, cast(x, kind), cast(tangents, kind))[1])
    right, plain = found
    bound = room(t.dtype, off(plain, right), 12, 8.0, largest(right))
    return judged(Gap("its derivative", off(mine, right), bound), "M=5 N=7 D=8")


def _o_of_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dense(q, k, v).o


def _jvp(function: Callable[..., Tensor], x: Triple, tangents: Triple) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = listening(torch.func.jvp, function, x, tangents)
    return found


@check("vmap", "derivatives", "torch.vmap over a call is right, or refused.")
def vmap(t: Trial) -> Finding:
    q, k, v = (y.reshape(3, 1, *y.shape[1:]) for y in t.qkv(5, 7, 8, b=3))
    mapped = listening(torch.vmap(t.subject.attend), q, k, v)
    flat = (q.squeeze(1), k.squeeze(1), v.squeeze(1))
    return judged(gap_of_o(mapped.squeeze(1), flat, Options(), t.dtype), "3 calls of M=5 N=7")


@check("compiled-lengths", "compile", "One compiled function serves several lengths.",
       "pytorch/pytorch#144021, pytorch/pytorch#141486")  # fmt: skip
def compiled_lengths(t: Trial) -> Finding:
    torch._dynamo.reset()
    compiled = torch.compile(t.subject.function, dynamic=True, backend="aot_eager")
    own = Trial(t.subject.with_(lambda *x, **words: compiled(*x, **words)), t.dtype, t.device)
    return own.agree(
        Case(f"M=N={n} causal, compiled", t.qkv(n, n, 24), Ask(causal=True), grads=True)
        for n in (17, 64, 65, 130)
    )
