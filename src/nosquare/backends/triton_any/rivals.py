"""What torch's own kernels for cards keep the contract on, and where they are the faster ones.

Facts about them, as of torch 2.11; on the side of saying no, since what they do not take would go
to torch_any, which is slower than any kernel.
"""

from __future__ import annotations

import torch

from ...problem import Problem
from .. import BACKWARD_LSE, FORWARD
from .cards import Card

_HALVES = (torch.bfloat16, torch.float16)
_MOST = 2**16 - 1  # heads, and entries
_TIMED = 128  # the widest heads that plans were timed with beside torch's kernels


def faster(p: Problem, phase: str, card: Card) -> list[str]:
    """Why one of them should have a problem."""
    timed = card.backend == "cuda" and card.arch == 90 and p.D <= _TIMED
    if not timed and (_cudnn(p, phase, card) or _flash(p, phase) or _efficient(p, phase)):
        return [f"torch has a kernel, beside which D {p.D} has not been timed on {card}"]
    if timed and _cudnn(p, phase, card):
        return ["cuDNN's kernel is faster on what it has: bench cuda --suite portable"]
    return []


def _cudnn(p: Problem, phase: str, card: Card) -> bool:
    new = card.backend == "cuda" and int(card.arch) >= 90 and torch.backends.cudnn.is_available()
    whole = phase == FORWARD or (p.M % 128 == 0 and p.N % 128 == 0)
    return new and p.dtype in _HALVES and p.D <= 128 and whole and _plain(p, phase)


def _flash(p: Problem, phase: str) -> bool:
    small = max(p.B, p.Hq) <= _MOST
    return p.dtype in _HALVES and p.D <= 256 and small and _plain(p, phase)


def _efficient(p: Problem, phase: str) -> bool:
    small = max(p.B, p.Hq) <= _MOST and all(max(s, default=0) < 2**31 for s in p.strides)
    return p.dtype == torch.float32 and p.G == 1 and small and _plain(p, phase)


def _plain(p: Problem, phase: str) -> bool:
    """What all three want."""
    extras = (p.softcap, p.bias, p.sinks, p.alibi, p.p or None)
    square = p.M == p.N or (p.M == 1 and p.mask == "causal(end)")
    if p.mask != "full()" and not (p.mask in ("causal(end)", "causal(start)") and square):
        return False
    if extras != (None,) * 5 or p.packed or p.batch_invariant or p.D != p.E or p.D % 8:
        return False
    if 0 in (p.B, p.Hq, p.M, p.N) or not p.scale > 0 or len(p.batch) > 1 or p.aligned is False:
        return False
    if phase == BACKWARD_LSE or (phase != FORWARD and p.deterministic):
        return False
    step = 16 // p.dtype.itemsize
    return all(s[-1] == 1 and 0 not in s and not any(n % step for n in s[:-1]) for s in p.strides)
