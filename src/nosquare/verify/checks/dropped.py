"""Dropout: how much is dropped, the same again from one seed, the same in backward, and of whom.

With q = k = 0 every weight is 1 / N, and with v = 1 (the unit matrix) o is the matrix of weights:
an exact 0 was dropped.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..registry import check
from ..subject import Ask, Refusal, gradients
from ..trial import Trial, judged, leaves
from ..truth import Options, gaps_of_gradients, largest, off
from ..verdict import CONVENTION, FAIL, PASS, REFUSED, Finding

N = 64
RATES = (0.001, 0.1, 0.17, 0.5)
SIGMAS = 5.0  # of a binomial count: passed by chance once in 1.7 million draws
BATCH, HEADS, ROWS = 2, 8, 4096  # 4.2 million weights tell 0.1 from 26/256 by ten sigmas


def _weights(t: Trial, p: float, seed: int, b: int, h: int, m: int) -> Tensor:
    """The weights (b, h, m, N) after dropout, all equal before it."""
    q, k = t.zeros(b, h, m, N), t.zeros(b, h, N, N)
    v = torch.eye(N, dtype=t.dtype, device=t.device).expand(b, h, N, N).contiguous()
    torch.manual_seed(seed)
    return t.attend((q, k, v), Ask(dropout=p)).detach()


def _unlikely(count: int, n: int, p: float) -> bool:
    return abs(count - n * p) > SIGMAS * math.sqrt(n * p * (1 - p)) + 1


def _steps(p: float) -> dict[str, float]:
    """Rates that known generators realise for p: flash_attn keeps when a byte <= floor(255 (1-p)),
    cuDNN has 16 steps."""
    return {"1/256": 1 - (math.floor(255 * (1 - p)) + 1) / 256, "1/16": round(p * 16) / 16}


@check("dropout-rate", "dropout", "The share that is dropped is p to 2^-16.",
       "Dao-AILab/flash-attention (rates in steps of 1/256)")  # fmt: skip
def rate(t: Trial) -> Finding:
    n = BATCH * HEADS * ROWS * N
    coarse: dict[str, list[str]] = {}
    refused = ""
    for seed, p in enumerate(RATES):
        try:
            count = int((_weights(t, p, 11 + seed, BATCH, HEADS, ROWS) == 0).sum())
        except Refusal as refusal:
            refused = refused or f"p={p}: {refusal}"
            continue
        if _unlikely(count, n, p):
            seen = f"{count / n:.5f} for {p}"
            near = [word for word, r in _steps(p).items() if not _unlikely(count, n, r)]
            if not near:
                return Finding(FAIL, f"{seen} over {n} weights", abs(count / n - p),
                               SIGMAS * math.sqrt(p * (1 - p) / n))  # fmt: skip
            coarse.setdefault(near[0], []).append(seen)
    if refused:
        return Finding(REFUSED, refused)
    if coarse:
        step, seen_ = next(iter(coarse.items()))
        return Finding(CONVENTION, f"rates in steps of {step}: {', '.join(seen_)}")
    asked = ", ".join(map(str, RATES))
    return Finding(PASS, f"p = {asked} within {SIGMAS:g} sigmas of {n:,} weights")


@check("dropout-scale", "dropout", "What is kept is divided by the share that is kept.",
       "pytorch/pytorch#124464")  # fmt: skip
def scale(t: Trial) -> Finding:
    for p in (0.1, 0.5):
        w = _weights(t, p, 5, 1, 2, 256)
        kept = w[w != 0].double()
        want = 1 / N / (1 - p)
        # the rate may be p to 2^-16, and the weight is rounded to the dtype
        room = want * (2.0**-16 / (1 - p) + 2 * torch.finfo(t.dtype).eps)
        error = largest(kept - want)
        if not error <= room:
            words = f"p={p}: a weight is {float(kept[0]):.6g}, not {want:.6g}"
            return Finding(FAIL, words, error, room)
    return Finding(PASS, f"error {error:.1e}, bound {room:.1e}", error, room)


@check("dropout-replay", "dropout", "The same seed drops the same weights; another seed others.",
       "Dao-AILab/flash-attention#612")  # fmt: skip
def replay(t: Trial) -> Finding:
    first, again, other = (_weights(t, 0.3, seed, 2, 2, 96) for seed in (5, 5, 6))
    if not torch.equal(first, again):
        return Finding(FAIL, "seed 5 twice: other weights are dropped")
    if torch.equal(first, other):
        return Finding(FAIL, "seeds 5 and 6 drop the same weights")
    return Finding(PASS, "bit by bit")


@check("dropout-backward", "dropout", "Backward drops the weights that forward has dropped.",
       "pytorch/pytorch#124464")  # fmt: skip
def backward(t: Trial) -> Finding:
    p, m = 0.25, 96
    q, k = t.rnd(1, 2, m, N, seed=1), t.rnd(1, 2, N, N, seed=2)
    eye = torch.eye(N, dtype=t.dtype, device=t.device).expand(1, 2, N, N).contiguous()
    x = leaves((q, k, eye))
    torch.manual_seed(8)
    o = t.attend(x, Ask(dropout=p))
    do = t.rnd(*o.shape, seed=9)
    found = gradients(o, x, do)
    factor = (o.detach() != 0).double() / (1 - p)
    for gap in gaps_of_gradients(found, x, do, Options(factor=factor), t.dtype):
        if not gap.ok:
            return judged(gap, f"M={m} N={N} p={p}, with the mask of forward")
    return Finding(PASS, "the same mask")


@check("dropout-independent", "dropout", "Entries, heads, rows and keys are dropped independently.")
def independent(t: Trial) -> Finding:
    gone = _weights(t, 0.5, 21, 2, 4, 512) == 0
    for axis, words in ((0, "batch entries"), (1, "heads"), (2, "rows"), (3, "keys")):
        same = gone == gone.roll(1, axis)
        share, n = float(same.double().mean()), same.numel()
        # of two entries each pair is counted twice: hence twice the deviation of n draws
        error, bound = abs(share - 0.5), 2 * SIGMAS * 0.5 / math.sqrt(n)
        if error > bound:
            text = f"neighbouring {words} share {share:.1%} of their mask"
            return Finding(FAIL, text, error, bound)
    return Finding(PASS)


@check("dropout-slices", "dropout", "What is dropped does not depend on what else is in the batch.",
       "Dao-AILab/flash-attention#771")  # fmt: skip
def slices(t: Trial) -> Finding:
    whole = _weights(t, 0.3, 5, 3, 2, 96) == 0
    for words, b, h, m in (("one entry", 1, 2, 96), ("the first 40 rows", 3, 2, 40)):
        part = _weights(t, 0.3, 5, b, h, m) == 0
        if not torch.equal(part, whole[:b, :h, :m]):
            text = f"the mask depends on the sizes of the call ({words} differ)"
            return Finding(CONVENTION, text)
    return Finding(PASS)


@check("dropout-zero", "dropout", "p = 0 drops nothing, and draws no random numbers.")
def zero(t: Trial) -> Finding:
    x = t.qkv(33, 65)
    ask = Ask(words=(("dropout_p", 0.0),))  # both signatures call it so
    torch.manual_seed(7)
    o = t.attend(x, ask)
    after = torch.rand(4, device=t.device)
    torch.manual_seed(7)
    if not torch.equal(after, torch.rand(4, device=t.device)):
        return Finding(CONVENTION, "p = 0 draws random numbers")
    error = off(o, t.attend(x))
    return (
        Finding(PASS) if error == 0.0 else Finding(FAIL, "M=33 N=65: p = 0 changes o", error, 0.0)
    )
