"""Every ill-formed call of attention: the class of the error and its whole text, as a reader
sees it."""

from __future__ import annotations

import math

import pytest
import torch

import nosquare as ns
import refusals
from helpers import rnd

NAMES = {"Q": rnd(2, 4, 5, 8), "K": rnd(2, 2, 7, 8), "V": rnd(2, 2, 7, 8), "rnd": rnd}

LISTING = """
>>> ns.attention(Q, [1.0], V)
ArgumentError: k is not a tensor.
  k  list
  Try: torch.as_tensor(k).

>>> ns.attention(Q, K, V, bias=[1.0])
ArgumentError: bias is not a tensor.
  bias  list
  Try: torch.as_tensor(bias).

>>> ns.attention(rnd(5, 8), rnd(5, 8), rnd(5, 8))
ArgumentError: q, k and v have at least three axes: (..., heads, length, width).
  q  (5, 8)
  k  (5, 8)
  v  (5, 8)
  Try: q[None] for a single head.

>>> ns.attention(Q, K.double(), V)
ArgumentError: q, k and v must share one dtype.
  q  batch=(2) Hq=4 M=5 D=8  float32 cpu
  k  batch=(2) Hk=2 N=7 D=8  float64 cpu
  v  batch=(2) Hk=2 N=7 E=8  float32 cpu
  Try: cast them, for example k.to(q.dtype).

>>> ns.attention(Q.int(), K.int(), V.int())
ArgumentError: Attention is computed in float64, float32, bfloat16 or float16.
  q  batch=(2) Hq=4 M=5 D=8  int32 cpu
  k  batch=(2) Hk=2 N=7 D=8  int32 cpu
  v  batch=(2) Hk=2 N=7 E=8  int32 cpu
  Try: q.float(), k.float(), v.float().

>>> ns.attention(Q.cfloat(), K.cfloat(), V.cfloat())
ArgumentError: Attention is computed in float64, float32, bfloat16 or float16.
  q  batch=(2) Hq=4 M=5 D=8  complex64 cpu
  k  batch=(2) Hk=2 N=7 D=8  complex64 cpu
  v  batch=(2) Hk=2 N=7 E=8  complex64 cpu
  Try: q.float(), k.float(), v.float().

>>> ns.attention(Q, K.to("meta"), V)
ArgumentError: q, k and v must be on one device.
  q  batch=(2) Hq=4 M=5 D=8  float32 cpu
  k  batch=(2) Hk=2 N=7 D=8  float32 meta
  v  batch=(2) Hk=2 N=7 E=8  float32 cpu
  Try: k.to(q.device), v.to(q.device).

>>> ns.attention(Q, K[..., :7], V)
ArgumentError: q and k disagree on D, the width of a head.
  q  batch=(2) Hq=4 M=5 D=8  float32 cpu
  k  batch=(2) Hk=2 N=7 D=7  float32 cpu
  v  batch=(2) Hk=2 N=7 E=8  float32 cpu
  Try: look at the projection that makes k; D is the last axis of both.

>>> ns.attention(Q[..., :0], K[..., :0], V)
ArgumentError: q and k have width D = 0.
  q  batch=(2) Hq=4 M=5 D=0  float32 cpu
  k  batch=(2) Hk=2 N=7 D=0  float32 cpu
  v  batch=(2) Hk=2 N=7 E=8  float32 cpu
  Try: a width of at least 1.

>>> ns.attention(Q, K, V[:, :, :6])
ArgumentError: k and v disagree on their heads or on N, the number of keys.
  q  batch=(2) Hq=4 M=5 D=8  float32 cpu
  k  batch=(2) Hk=2 N=7 D=8  float32 cpu
  v  batch=(2) Hk=2 N=6 E=8  float32 cpu
  Try: one value vector for each key: v has k's shape but for the last axis.

>>> ns.attention(Q, K, V[:, :1])
ArgumentError: k and v disagree on their heads or on N, the number of keys.
  q  batch=(2) Hq=4 M=5 D=8  float32 cpu
  k  batch=(2) Hk=2 N=7 D=8  float32 cpu
  v  batch=(2) Hk=1 N=7 E=8  float32 cpu
  Try: one value vector for each key: v has k's shape but for the last axis.

>>> ns.attention(Q, K[:1], V[:1])
ArgumentError: q and k disagree on the batch axes.
  q  batch=(2) Hq=4 M=5 D=8  float32 cpu
  k  batch=(1) Hk=2 N=7 D=8  float32 cpu
  v  batch=(1) Hk=2 N=7 E=8  float32 cpu
  Try: expand the smaller one to the other.

>>> ns.attention(Q, K[0], V[0])
ArgumentError: q and k disagree on the batch axes.
  q  batch=(2) Hq=4 M=5 D=8  float32 cpu
  k  Hk=2 N=7 D=8  float32 cpu
  v  Hk=2 N=7 E=8  float32 cpu
  Try: expand the smaller one to the other.

>>> ns.attention(Q[:, :3], K, V)
ArgumentError: The query heads must be a whole multiple of the key heads.
  q  batch=(2) Hq=3 M=5 D=8  float32 cpu
  k  batch=(2) Hk=2 N=7 D=8  float32 cpu
  v  batch=(2) Hk=2 N=7 E=8  float32 cpu
  Try: query head h reads key head h // G with G = Hq / Hk; check the axis order (batch, head, \
length, width).

>>> ns.attention(Q, K[:, :0], V[:, :0])
ArgumentError: The query heads must be a whole multiple of the key heads.
  q  batch=(2) Hq=4 M=5 D=8  float32 cpu
  k  batch=(2) Hk=0 N=7 D=8  float32 cpu
  v  batch=(2) Hk=0 N=7 E=8  float32 cpu
  Try: query head h reads key head h // G with G = Hq / Hk; check the axis order (batch, head, \
length, width).

>>> ns.attention(Q, K, V, casual=True, is_causal=True)
ArgumentError: There is no such option.
  given  casual, is_causal
  known  alibi, backend, batch_invariant, bias, check_finite, deterministic, dropout, \
exact_delta, mask, scale, sinks, softcap
  Try: help(nosquare.api.Options).

>>> ns.attention(Q, K, V, mask=torch.ones(5, 7).bool())
ArgumentError: mask is not one of the mask kinds.
  mask  Tensor
  Try: ns.Dense(tensor) for a bool tensor, bias=tensor for additive numbers.

>>> ns.attention(Q, K, V, mask="causal")
ArgumentError: mask is not one of the mask kinds.
  mask  str
  Try: ns.Dense(tensor) for a bool tensor, bias=tensor for additive numbers.

>>> ns.attention(Q, K, V, mask=ns.Dense(torch.ones(7, 5).bool()))
ArgumentError: An array of the mask Dense does not fit the problem.
  array     (1, 7, 5)
  expected  (..., Hq=4, M=5, N=7) with ... one of batch (2,) or absent
  Try: give Dense the lengths that q and k have in this call.

>>> ns.attention(Q, K, V, mask=ns.Lengths(torch.tensor([1, 2, 3])))
ArgumentError: An array of the mask Lengths does not fit the problem.
  array     (3,)
  expected  (...) with ... one of batch (2,) or absent
  Try: give Lengths the lengths that q and k have in this call.

>>> ns.attention(Q, K, V, mask=ns.Causal() & ns.Lengths(torch.ones(2, device="meta").long()))
ArgumentError: The mask's arrays and q must be on one device.
  mask       causal(end)&lengths(t0)
  its array  meta
  q          cpu
  Try: move the array before building the mask.

>>> ns.attention(Q, K, V, bias=rnd(7, 5))
ArgumentError: bias does not broadcast to the problem.
  bias    (7, 5)
  needed  (2, 4, 5, 7)
  batch   (2,)
  Hq      4
  M       5
  N       7
  Try: axes of bias are the last ones of (batch, Hq, M, N); size 1 broadcasts.

>>> ns.attention(Q, K, V, bias=rnd(2, 5, 7))
ArgumentError: bias does not broadcast to the problem.
  bias    (2, 5, 7)
  needed  (2, 4, 5, 7)
  batch   (2,)
  Hq      4
  M       5
  N       7
  Try: axes of bias are the last ones of (batch, Hq, M, N); size 1 broadcasts.

>>> ns.attention(Q, K, V, bias=torch.zeros(5, 7).long())
ArgumentError: bias holds numbers that are added to the scores.
  bias  (5, 7) torch.int64
  Try: mask=ns.Dense(keep) for a bool tensor.

>>> ns.attention(Q, K, V, bias=torch.ones(5, 7).bool())
ArgumentError: bias holds numbers that are added to the scores.
  bias  (5, 7) torch.bool
  Try: mask=ns.Dense(keep) for a bool tensor.

>>> ns.attention(Q, K, V, bias=torch.zeros(5, 7, device="meta"))
ArgumentError: bias and q must be on one device.
  bias  meta
  q     cpu
  Try: bias.to(q.device).

>>> ns.attention(Q, K, V, sinks=rnd(2))
ArgumentError: sinks does not broadcast to the problem.
  sinks   (2,)
  needed  (2, 4)
  batch   (2,)
  Hq      4
  M       5
  N       7
  Try: axes of sinks are the last ones of (batch, Hq, M, N); size 1 broadcasts.

>>> ns.attention(Q, K, V, sinks=torch.zeros(4, device="meta"))
ArgumentError: sinks and q must be on one device.
  sinks  meta
  q      cpu
  Try: sinks.to(q.device).

>>> ns.attention(Q, K, V, alibi=rnd(2))
ArgumentError: alibi does not broadcast to the problem.
  alibi   (2,)
  needed  (2, 4)
  batch   (2,)
  Hq      4
  M       5
  N       7
  Try: axes of alibi are the last ones of (batch, Hq, M, N); size 1 broadcasts.

>>> ns.attention(Q, K, V, alibi=rnd(4).requires_grad_())
ArgumentError: The ALiBi slopes have no gradient here.
  alibi  requires_grad=True
  Try: alibi.detach(), or the same numbers as bias= which has a gradient.

>>> ns.attention(Q, K, V, scale=torch.tensor(0.5, requires_grad=True))
ArgumentError: scale is one number for the whole call, without a gradient.
  scale  Tensor
  Try: float(...), or multiply q by a learned scale: it has a gradient there.

>>> ns.attention(Q, K, V, softcap="30")
ArgumentError: softcap is one number for the whole call, without a gradient.
  softcap  str
  Try: float(...), or multiply q by a learned scale: it has a gradient there.

>>> ns.attention(Q, K, V, sinks=torch.ones(4).cfloat())
ArgumentError: sinks must be real.
  sinks  torch.complex64
  Try: sinks.real.

>>> ns.attention(Q, K, V, softcap=0.0)
ArgumentError: softcap must be positive and finite.
  softcap  0.0
  Try: softcap=None for none.

>>> ns.attention(Q, K, V, softcap=math.nan)
ArgumentError: softcap must be positive and finite.
  softcap  nan
  Try: softcap=None for none.

>>> ns.attention(Q, K, V, scale=math.nan)
ArgumentError: scale must be a finite number.
  scale  nan
  Try: scale=None for 1 / sqrt(D).

>>> ns.attention(Q, K, V, scale=-math.inf)
ArgumentError: scale must be a finite number.
  scale  -inf
  Try: scale=None for 1 / sqrt(D).

>>> ns.attention(Q, K.index_fill(2, torch.tensor([3]), math.nan), V, check_finite=True)
ArgumentError: k is not finite.
  first at  k[0, 0, 3, 0] = nan
  Try: look at the layer that makes it; padding that no query sees may hold anything.
"""


@pytest.mark.parametrize(("call", "expected"), refusals.listed(LISTING))
def test_refused(call: str, expected: str) -> None:
    refusals.raises(call, expected, {"ns": ns, "torch": torch, "math": math, **NAMES})


def test_the_classes() -> None:
    """Code that catches what torch and Python raise for such things catches these too."""
    assert issubclass(ns.ArgumentError, ValueError)
    assert issubclass(ns.UnsupportedError, NotImplementedError)
    assert issubclass(ns.ArgumentError, ns.NosquareError)
    with pytest.raises(ns.ArgumentError) as caught:
        ns.Prefix(-2)
    assert caught.value.sentence == "A prefix is a count of keys, so it cannot be negative."
    assert caught.value.values == {"n": -2}
    assert caught.value.attempt == "Prefix(0) for none."


def test_the_listing_is_read() -> None:
    with pytest.raises(AssertionError):
        refusals.raises("ns.Prefix(-2)", "ArgumentError: something else", {"ns": ns})
    with pytest.raises(pytest.fail.Exception):
        refusals.raises("ns.Prefix(2)", "ArgumentError: never", {"ns": ns})
    assert len(refusals.listed(LISTING)) > 30
