"""The dropout mask: one function of (seed, b, h, i, j), at its exact rate, without visible
pattern."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import helpers
import nosquare as ns
from helpers import case, check, rnd
from nosquare.dropout import LEVELS, keep_scalar, keep_tile, realised_rate, row_keys, threshold

RATES = [1e-5, 1e-3, 0.1, 0.17, 0.5, 0.9]
BIG = st.integers(0, 1 << 40)


@given(
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    place=st.tuples(BIG, BIG, BIG, BIG),
    width=st.integers(1, 9),
    p=st.floats(0, 0.9999),
)
def test_tile_is_the_scalar(seed: int, place: tuple[int, ...], width: int, p: float) -> None:
    b, h, i, j = place
    keys = row_keys(torch.tensor(seed), *(torch.tensor([x]) for x in (b, h, i)))
    got = keep_tile(keys, j, j + width, p)[0].tolist()
    assert got == [keep_scalar(seed, b, h, i, j + at, p) for at in range(width)]


@given(
    lo=st.integers(0, 40), width=st.integers(0, 30), rows=st.lists(st.integers(0, 50), max_size=5)
)
def test_any_rectangle_is_a_part_of_the_whole(lo: int, width: int, rows: list[int]) -> None:
    whole = ns.dropout_keep(3, range(3), range(4), range(51), range(71), 0.4)
    part = ns.dropout_keep(3, [2, 0], 3, rows, range(lo, lo + width), 0.4)
    assert torch.equal(part, whole[[2, 0], 3][:, rows, lo : lo + width])
    scattered = ns.dropout_keep(3, 1, 2, torch.tensor(rows), [70, 0, 5, 5], 0.4)
    assert torch.equal(scattered, whole[1, 2, rows][:, [70, 0, 5, 5]])
    assert ns.dropout_keep(3, 1, 2, 7, 9, 0.4).item() == whole[1, 2, 7, 9].item()


def weights_kept(shape: tuple[int, ...], drop: ns.Dropout, **options: Any) -> Tensor:
    """Which pairs a real call keeps: v is the identity, so o shows the dropped weights."""
    n = shape[-2]
    q, v = torch.zeros(*shape[:-1], 4), torch.eye(n).expand(*shape[:-2], n, n)
    return ns.attention(q, torch.zeros(*shape[:-1], 4), v, dropout=drop, **options) > 0


def test_calls_use_this_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tiles, batch axes, head order of the call."""
    want = ns.dropout_keep(8, range(6), range(2), range(41), range(41), 0.3)
    for tiles in ((16, 16), (7, 13), (41, 41), (1, 64)):
        helpers.force_tiles(monkeypatch, *tiles)
        got = weights_kept((6, 2, 41, 41), ns.Dropout(0.3, 8))
        assert torch.equal(got, want)
    assert torch.equal(weights_kept((2, 3, 2, 41, 41), ns.Dropout(0.3, 8)).flatten(0, 1), want)


@pytest.mark.parametrize("axis", range(4))
def test_a_shard_with_offsets_is_a_part_of_the_whole(axis: int) -> None:
    """Cut batch, heads, queries or keys: the shard's mask is that part of the whole mask."""
    seed, p, shape = 5, 0.25, (4, 6, 20, 30)
    whole = ns.dropout_keep(seed, *(range(n) for n in shape), p)
    for lo, hi in ((0, 2), (1, 4), (3, 4)):
        at = [slice(None)] * 4
        at[axis] = slice(lo, hi)
        offsets = [0, 0, 0, 0]
        offsets[axis] = lo
        b, h, m, n = whole[tuple(at)].shape
        q, k, v = torch.zeros(b, h, m, 4), torch.zeros(b, h, n, 4), torch.eye(n).expand(b, h, n, n)
        got = ns.attention(q, k, v, dropout=ns.Dropout(p, seed, tuple(offsets)))  # type: ignore[arg-type]
        assert torch.equal(got > 0, whole[tuple(at)])


def test_kept_weights_are_scaled_by_the_realised_rate() -> None:
    drop = ns.Dropout(0.1, 1)  # 6554 / 65536
    kept = weights_kept((1, 1, 64, 64), drop)
    q, v = torch.zeros(1, 1, 64, 4), torch.eye(64)[None, None]
    o = ns.attention(q, q, v, dropout=drop)
    exact = 1 / 64 / (1 - 6554 / 65536)
    assert torch.allclose(
        o[kept], torch.tensor(exact), rtol=64 * helpers.unit(torch.float32), atol=0
    )
    assert (o[~kept] == 0).all()


def test_seeds_as_ints_and_tensors() -> None:
    a = weights_kept((1, 2, 20, 20), ns.Dropout(0.5, 7))
    assert torch.equal(a, weights_kept((1, 2, 20, 20), ns.Dropout(0.5, torch.tensor(7))))
    assert not torch.equal(a, weights_kept((1, 2, 20, 20), ns.Dropout(0.5, 8)))
    for seed in (-(1 << 63), (1 << 63) - 1, (1 << 53) + 1):  # to the last bit
        tensor = ns.Dropout(0.5, seed).seed_tensor()
        assert (int(tensor), tensor.dtype) == (seed, torch.int64)


def test_no_dropout_is_no_dropout() -> None:
    c = case()
    plain = ns.attention(c.q, c.k, c.v)
    assert torch.equal(plain, ns.attention(c.q, c.k, c.v, dropout=ns.Dropout(0.0, 3)))
    before = torch.random.get_rng_state()
    ns.attention(c.q, c.k, c.v, dropout=ns.Dropout(0.4, 3))
    assert torch.equal(before, torch.random.get_rng_state())  # torch's generator is not touched


def test_backward_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle with this mask is the truth; with another seed the same check fails."""
    helpers.force_tiles(monkeypatch)
    check(case(mask=ns.Causal(), dropout=ns.Dropout(0.4, 21)))
    with pytest.raises(AssertionError):
        check(
            case(dropout=ns.Dropout(0.4, 21)),
            lambda dropout, **x: ns.attention_state(dropout=ns.Dropout(0.4, 22), **x),
        )


# ---- the rate -----------------------------------------------------------------------------------


@given(p=st.floats(0, 1, exclude_max=True))
def test_the_rate_is_exact_over_all_draws(p: float) -> None:
    """Of the 2^16 values of the 16-bit draw, exactly threshold(p) drop: the rate is within
    2^-17 of p, except that a p next to 1 keeps one value in 65536."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    dropped = int((bits < threshold(p) - LEVELS // 2).sum())
    assert dropped == threshold(p)
    assert realised_rate(p) == dropped / 65536
    assert abs(realised_rate(p) - p) <= (2**-17 if p <= 1 - 2**-17 - 2**-16 else 2**-16)


def draws(seed: int, p: float, b: int = 4, h: int = 8, m: int = 512, n: int = 256) -> Tensor:
    return ns.dropout_keep(seed, range(b), range(h), range(m), range(n), p)


@pytest.mark.parametrize("p", RATES)
def test_the_empirical_rate_is_the_realised_one(p: float) -> None:
    """4 million draws: within 5 sigma of the realised rate (and, for p = 1e-5, not of 0 or
    2^-15)."""
    lost = ~draws(123, p)
    rate, count = realised_rate(p), lost.numel()
    sigma = math.sqrt(rate * (1 - rate) / count)
    assert abs(float(lost.double().mean()) - rate) < 5 * sigma
    # no row, head or batch entry is special: chi-square of the counts of heads, and of rows
    for over in ((2, 3), (0, 1, 3), (0, 1, 2)):
        counts = lost.double().sum(over).flatten()
        expected = count / counts.numel() * rate
        chi = float(((counts - expected) ** 2).sum() / (expected * (1 - rate)))
        free = counts.numel()
        # the variance of a binomial's chi-square: 2 a cell, and 1 / expected more where few come
        assert abs(chi - free) < 5 * math.sqrt(free * (2 + 1 / expected))


NEIGHBOURS = {
    "next key": (0, 0, 0, 1),
    "two keys on": (0, 0, 0, 2),
    "16 keys on": (0, 0, 0, 16),
    "next row": (0, 0, 1, 0),
    "next head": (0, 1, 0, 0),
    "next entry": (1, 0, 0, 0),
    "diagonal": (0, 0, 1, 1),
    "other diagonal": (0, 0, 1, -1),
}


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("step", NEIGHBOURS)
def test_neighbours_are_independent(step: str, p: float) -> None:
    lost = (~draws(99, p)).double() - realised_rate(p)
    a, b = lost, lost
    for axis, d in enumerate(NEIGHBOURS[step]):
        n = lost.shape[axis] - abs(d)
        a, b = a.narrow(axis, max(-d, 0), n), b.narrow(axis, max(d, 0), n)
    uncorrelated(a, b, p)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("seeds", [(0, 1), (1, 2), (5, -5), (7, 7 + (1 << 32)), (3, 3 << 32)])
def test_seeds_are_independent(seeds: tuple[int, int], p: float) -> None:
    rate = realised_rate(p)
    uncorrelated(*((~draws(s, p)).double() - rate for s in seeds), p)


def uncorrelated(a: Tensor, b: Tensor, p: float) -> None:
    rate = realised_rate(p)
    correlation = float((a * b).mean()) / (rate * (1 - rate))
    assert abs(correlation) < 5 / math.sqrt(a.numel())


def test_the_correlation_test_can_fail() -> None:
    lost = (~draws(99, 0.5)).double() - 0.5
    with pytest.raises(AssertionError):
        uncorrelated(lost, 0.01 * lost + lost.roll(1, -1), 0.5)


def test_pairs_of_keys_take_all_combinations() -> None:
    """Two keys share one 32-bit hash: its halves, and the keys of the pairs beside it, are
    independent. Chi-square of the 16 patterns of four keys, with 15 degrees of freedom."""
    lost = (~draws(17, 0.5)).long().reshape(-1, 4)
    pattern = (lost * torch.tensor([1, 2, 4, 8])).sum(1).bincount(minlength=16).double()
    expected = lost.shape[0] / 16
    assert float(((pattern - expected) ** 2 / expected).sum()) < 15 + 5 * math.sqrt(30)


def test_batch_entries_heads_and_rows_do_not_collide() -> None:
    """(b, h, i) that a sum of indices would confuse have different rows."""
    places = list(itertools.product(range(4), repeat=3))
    rows = {tuple(ns.dropout_keep(1, b, h, i, range(64), 0.5).tolist()) for b, h, i in places}
    assert len(rows) == len(places)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_bad_probabilities(p: float) -> None:
    with pytest.raises(ns.ArgumentError) as caught:
        ns.Dropout(p, seed=1)
    assert str(caught.value) == (
        "Dropout needs a probability p with 0 <= p < 1.\n"
        f"  p  {p}\n"
        "  Try: p=0.1, or no dropout at all; p = 1 would drop every weight."
    )
    with pytest.raises(ns.ArgumentError):
        ns.dropout_keep(1, 0, 0, 0, range(3), p)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ns.Dropout("0.1", 1),
        lambda: ns.Dropout(None, 1),
        lambda: ns.Dropout(torch.tensor(0.1), 1),
        lambda: ns.Dropout(0.1, 1.5),
        lambda: ns.Dropout(0.1, 1 << 63),
        lambda: ns.Dropout(0.1, torch.tensor([1])),
        lambda: ns.Dropout(0.1, torch.tensor(1.0)),
        lambda: ns.Dropout(0.1, torch.tensor(1, dtype=torch.int32)),
        lambda: ns.Dropout(0.1, 1, (0, 0, 0)),
        lambda: ns.Dropout(0.1, 1, (0.5, 0, 0, 0)),
        lambda: ns.attention(rnd(1, 2, 4), rnd(1, 2, 4), rnd(1, 2, 4), dropout=0.1),
    ],
)
def test_bad_dropout(make: Any) -> None:
    with pytest.raises(ns.ArgumentError):
        make()


def test_offsets_may_be_any_sequence() -> None:
    a = weights_kept((1, 2, 9, 9), ns.Dropout(0.5, 7, [1, 2, 3, 4]))  # type: ignore[arg-type]
    assert torch.equal(a, weights_kept((1, 2, 9, 9), ns.Dropout(0.5, 7, (1, 2, 3, 4))))
