"""The algebra of states: any split of the keys gives one answer, and its derivative."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nosquare as ns
from helpers import INF, rnd, unit
from nosquare import oracle

WIDE = torch.float64
LSE = st.floats(-300, 300) | st.just(-INF)


def state(lses: list[float], seed: int) -> ns.State:
    """One row each; o is 0 where lse is -inf, as the contract says."""
    lse = torch.tensor(lses, dtype=WIDE)
    o = rnd(len(lses), 3, seed=seed, dtype=WIDE).masked_fill(lse.isneginf()[:, None], 0)
    return ns.State(o, lse)


@st.composite
def three(draw: st.DrawFn) -> list[ns.State]:
    rows = draw(st.integers(1, 4))
    return [
        state(draw(st.lists(LSE, min_size=rows, max_size=rows)), draw(st.integers(0, 99)))
        for _ in range(3)
    ]


def same(a: ns.State, b: ns.State) -> None:
    """Equal up to the rounding of two merges: a weight is exp of a difference of size |lse|."""
    biggest = a.lse.masked_fill(a.lse.isneginf(), 0).abs().amax() + 1
    room = 16 * float(biggest) * unit(WIDE)
    torch.testing.assert_close(a.lse, b.lse, rtol=0, atol=room)
    torch.testing.assert_close(a.o, b.o, rtol=0, atol=room * 8)


@given(three())
def test_merge_is_associative(x: list[ns.State]) -> None:
    a, b, c = x
    same(ns.merge(ns.merge(a, b), c), ns.merge(a, ns.merge(b, c)))


@given(three())
def test_merge_is_commutative_to_the_bit(x: list[ns.State]) -> None:
    ab, ba = ns.merge(x[0], x[1]), ns.merge(x[1], x[0])
    assert torch.equal(ab.o, ba.o)
    assert torch.equal(ab.lse, ba.lse)


@given(three())
def test_the_empty_state_is_the_unit(x: list[ns.State]) -> None:
    unit_ = ns.State.empty_like(x[0])
    same(ns.merge(x[0], unit_), x[0])
    same(ns.merge(unit_, x[0]), x[0])
    both = ns.merge(unit_, unit_)
    assert not both.o.any()
    assert both.lse.isneginf().all()


@given(three())
def test_merge_is_differentiable(x: list[ns.State]) -> None:
    """No NaN in any gradient, with rows that one side, the other, or neither has seen; and
    where both have, the derivative that finite differences give."""
    leaves = [t.clone().requires_grad_() for s in x[:2] for t in (s.o, s.lse)]
    merged = ns.merge(ns.State(*leaves[:2]), ns.State(*leaves[2:]))
    outs = [merged.o, merged.lse.masked_fill(merged.lse.isneginf(), 0)]
    for g in torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs]):
        assert g.isfinite().all()


def test_merge_passes_gradcheck() -> None:
    a, b = state([0.3, -2.0, 5.0], 1), state([1.0, 4.0, 5.5], 2)
    leaves = [t.clone().requires_grad_() for t in (a.o, a.lse, b.o, b.lse)]

    def both(*t: Tensor) -> tuple[Tensor, Tensor]:
        merged = ns.merge(ns.State(*t[:2]), ns.State(*t[2:]))
        return merged.o, merged.lse

    assert torch.autograd.gradcheck(both, leaves)
    assert torch.autograd.gradgradcheck(both, leaves)


def one_row(scores: list[float], values: list[float]) -> ns.State:
    """Attention of one query whose scores are given: D = 1, q = 1, k = the scores."""
    q = torch.ones(1, 1, 1, dtype=WIDE)
    k, v = (torch.tensor(x, dtype=WIDE).reshape(1, -1, 1) for x in (scores, values))
    return ns.attention_state(q, k, v, scale=1.0)


LN2 = math.log(2)


@pytest.mark.parametrize(
    ("a", "b", "answer", "average"),
    [
        # two blocks of two keys, the second with twice the mass: 20/3, where averaging says 5
        (([0, 0], [0, 0]), ([LN2, LN2], [10, 10]), 20 / 3, 5),
        # here the masses match, and averaging is right by luck
        (([0, 0], [0, 2]), ([LN2], [4]), 2.5, 2.5),
        # and here they do not
        (([0, 0], [0, 2]), ([math.log(4)], [4]), 3, 2.5),
    ],
)
def test_worked_examples(a: tuple, b: tuple, answer: float, average: float) -> None:
    left, right = one_row(*a), one_row(*b)
    merged, whole = ns.merge(left, right), one_row(a[0] + b[0], a[1] + b[1])
    assert float(merged.o) == pytest.approx(answer, rel=8 * unit(WIDE))
    assert float(whole.o) == pytest.approx(answer, rel=8 * unit(WIDE))
    assert float(left.o + right.o) / 2 == pytest.approx(average, rel=8 * unit(WIDE))
    assert float(merged.lse) == pytest.approx(float(whole.lse), rel=8 * unit(WIDE))


@given(cut=st.integers(0, 23), other=st.integers(0, 23), mask=st.sampled_from(["none", "dead"]))
def test_keys_split_anywhere(cut: int, other: int, mask: str) -> None:
    """Three parts, any of them empty, with rows that see nothing in some parts or in all."""
    q, k = rnd(2, 4, 5, 8, dtype=WIDE), rnd(2, 2, 23, 8, seed=1, dtype=WIDE)
    v = rnd(2, 2, 23, 6, seed=2, dtype=WIDE)
    keep = torch.ones(5, 23, dtype=torch.bool)
    if mask == "dead":
        keep[1, 9:], keep[2, :9], keep[3] = False, False, False
    lo, hi = sorted((cut, other))
    total: ns.State | None = None
    for j in (slice(0, lo), slice(lo, hi), slice(hi, 23)):
        part = ns.attention_state(q, k[:, :, j], v[:, :, j], mask=ns.Dense(keep[:, j]))
        total = part if total is None else ns.merge(total, part)
    assert total is not None
    same(total, oracle.attention(q, k, v, ns.Dense(keep)))


def test_gradients_go_through_a_split() -> None:
    """Merged halves have the gradients of the whole: lse carries what the halves exchange."""
    leaves = [
        rnd(1, 2, 4, 8, dtype=WIDE),
        rnd(1, 1, 12, 8, seed=1, dtype=WIDE),
        rnd(1, 1, 12, 8, seed=2, dtype=WIDE),
    ]
    leaves = [t.requires_grad_() for t in leaves]
    q, k, v = leaves
    parts = [ns.attention_state(q, k[..., j, :], v[..., j, :]) for j in (slice(5), slice(5, 12))]
    merged, whole = ns.merge(*parts), oracle.attention(q, k, v)
    do = rnd(1, 2, 4, 8, seed=3, dtype=WIDE)
    got = torch.autograd.grad(merged.o, leaves, do)
    for g, w in zip(got, torch.autograd.grad(whole.o, leaves, do), strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=64 * 12 * unit(WIDE) * float(w.abs().max()))


def test_types_of_a_merge() -> None:
    a = ns.State(torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2))
    b = ns.State(torch.ones(2, 3), torch.zeros(2))
    assert ns.merge(a, a).o.dtype == torch.bfloat16
    assert ns.merge(a, b).o.dtype == torch.float32
    assert ns.merge(a, a).lse.dtype == torch.float32


def test_states_of_other_shapes_are_refused() -> None:
    a, b = state([0.0], 0), state([0.0, 1.0], 0)
    with pytest.raises(ns.ArgumentError) as caught:
        ns.merge(a, b)
    assert str(caught.value) == (
        "Two states can be merged only when their shapes agree.\n"
        "  a  o (1, 3)  lse (1,)\n"
        "  b  o (2, 3)  lse (2,)\n"
        "  Try: compute both states from the same queries, over different keys."
    )
