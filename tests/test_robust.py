"""Hard numbers, hard layouts and repeatability: what must not leak, overflow, vary or be
touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import helpers
import nosquare as ns
from helpers import DTYPES, INF, NAN, Case, Exact, bounds, case, check, close, name_of, rnd, truth
from nosquare import oracle
from nosquare.backends import discover


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.force_tiles(monkeypatch)


# ---- what nobody sees ---------------------------------------------------------------------------

B, HQ, HK, M, N, D = 2, 4, 2, 37, 53, 8


def per_head() -> Tensor:
    """Key 20 is hidden from the heads of group 0 alone; keys from 40 on from all; rows 5 to 9
    too."""
    keep = torch.ones(HQ, M, N, dtype=torch.bool)
    keep[:2, :, 20] = False
    keep[:, :, 40:] = False
    keep[:, 5:10] = False
    return keep


layout = torch.ones(5, 7, dtype=torch.bool)
layout[:, 6] = layout[1] = layout[:, 2] = False
k_ids = torch.arange(N) // 20
k_ids[10:15] = -1
q_ids = torch.arange(M) // 14
q_ids[30:] = 99

HIDING: dict[str, ns.Mask] = {
    "lengths": ns.Lengths(torch.tensor([30, 0])),
    "lengths&causal": ns.Lengths(torch.tensor([51, 17])) & ns.Causal(),
    "documents": ns.Documents(q_ids, k_ids),
    "dense": ns.Dense(per_head()),
    "dense(1,N)": ns.Dense(torch.arange(N)[None] % 3 > 0),
    "window": ns.Window(5, 0, "start"),
    "causal(start)": ns.Causal("start"),
    "prefix": ns.Prefix(21),
    "blocksparse": ns.BlockSparse(layout, 8),
    "nothing": ns.Prefix(0),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {
        "softcap": 3.0,
        "bias": rnd(M, N, seed=8),
        "sinks": rnd(HQ, seed=9),
        "alibi": torch.ones(HQ) / 8,
        "dropout": ns.Dropout(0.3, 5),
    },
}


def hidden(mask: ns.Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Keys (B, Hk, N) that no row sees, rows (B, Hq, M) that see no key, pairs that are hidden."""
    keep = truth(mask, (B,), HQ, M, N)
    keys = ~keep.unflatten(1, (HK, -1)).any(3).any(2)
    return keys, ~keep.any(-1), ~keep


def everything(c: Case, do: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    """o, lse, and the gradients of all inputs, by name."""
    leaves = {n: t.detach().requires_grad_() for n, t in c.tensors().items()}
    got = ns.attention_state(**{**c.options, **leaves})
    grads = torch.autograd.grad([got.o, got.lse], list(leaves.values()), [do, dlse])
    return {"o": got.o.detach(), "lse": got.lse.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", HIDING)
def test_nothing_leaks_from_what_nobody_sees(mask: str, options: str, poison: float) -> None:
    """NaN or inf in keys and values that no row sees, in queries and in do of rows that see no
    key, and in bias at hidden pairs: every result is, to the bit, what zeros there give."""
    c = case((B,), HQ, HK, M, N, D, mask=HIDING[mask], **OPTIONS[options])
    keys, rows, pairs = hidden(HIDING[mask])
    do, dlse = c.cotangents()
    both = []
    for value in (0.0, poison):
        dirty = {
            "q": c.q.masked_fill(rows[..., None], value),
            "k": c.k.masked_fill(keys[..., None], value),
            "v": c.v.masked_fill(keys[..., None], value),
        }
        if "bias" in c.options:
            always = pairs.all(0).all(0)  # bias is shared by entries and heads
            dirty["bias"] = c.options["bias"].masked_fill(always, value)
        both.append(everything(c.with_(**dirty), do.masked_fill(rows[..., None], value), dlse))
    for name, clean in both[0].items():
        assert not both[1][name].isnan().any(), name
        assert torch.equal(clean, both[1][name]), name
    for name, t in (("k", keys), ("v", keys), ("q", rows)):
        assert not both[1][name][t].any(), f"d{name} of what nobody sees"
    assert not both[1]["o"][rows].any()
    if options == "plain":
        assert both[1]["lse"][rows].isneginf().all()


def test_poison_that_is_seen_does_reach_the_output() -> None:
    """So the test above can fail."""
    c = case((B,), HQ, HK, M, N, D)
    assert ns.attention(c.q, c.k.masked_fill(c.k > 2.5, NAN), c.v).isnan().any()


@pytest.mark.parametrize("mask", ["lengths", "documents", "dense", "blocksparse"])
def test_nothing_leaks_into_second_derivatives(mask: str) -> None:
    c = case((B,), HQ, HK, M, N, D, dtype=torch.float64, mask=HIDING[mask])
    keys, rows, _ = hidden(HIDING[mask])
    results = []
    for value in (0.0, NAN):
        q = c.q.masked_fill(rows[..., None], value).requires_grad_()
        k = c.k.masked_fill(keys[..., None], value).requires_grad_()
        v = c.v.masked_fill(keys[..., None], value).requires_grad_()
        o = ns.attention(q, k, v, mask=HIDING[mask])
        first = torch.autograd.grad(o.pow(2).sum(), (q, k, v), create_graph=True)
        results.append(torch.autograd.grad(sum(g.pow(2).sum() for g in first), (q, k, v)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


def test_the_unwritten_tail_of_a_cache() -> None:
    """A cache of 64 places of which 41 are written: one query a step, GQA, whatever lies behind."""
    k, v = torch.full((3, 2, 64, 16), NAN), torch.full((3, 2, 64, 16), INF)
    k[:, :, :41], v[:, :, :41] = rnd(3, 2, 41, 16), rnd(3, 2, 41, 16, seed=1)
    q = rnd(3, 8, 1, 16, seed=2)
    got = ns.attention(q, k, v, mask=ns.Lengths(torch.tensor([41, 40, 0])))
    for b, n in enumerate((41, 40, 0)):
        c = Case(q[b], k[b, :, :n], v[b, :, :n])
        x = Exact.of(c)
        close("o", got[b], x.o, bounds(x, *c.cotangents())["o"])


# ---- large numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", discover())
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("size", [30.0, 300.0])
def test_scores_in_the_thousands(size: float, dtype: torch.dtype, backend: str) -> None:
    c = case(d=32, dtype=dtype)
    c = c.with_(q=c.q * size)
    attempt(lambda: check(c, named(backend), grads=False))
    attempt(lambda: check(c, named(backend), through_lse=backend == "torch_any"))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("backend", discover())
def test_scores_that_grow_with_every_tile(order: int, backend: str) -> None:
    """The running maximum moves at every tile (or at none): each rescale, or each underflow,
    counts."""
    q = torch.ones(1, 2, 20, 1)
    k = (torch.arange(96.0)[::order] if order > 0 else torch.arange(96.0).flip(0)) * 3
    c = Case(q, k.reshape(1, 1, 96, 1), rnd(1, 1, 96, 1, seed=4))
    attempt(lambda: check(c, named(backend), through_lse=backend == "torch_any"))


@pytest.mark.parametrize("backend", discover())
def test_dots_beyond_the_largest_half(backend: str) -> None:
    """float16, q.k = 102,400 before the scale: the product may not be rounded to float16."""
    q = torch.full((1, 2, 4, 64), 40.0, dtype=torch.float16)
    k = torch.full((1, 1, 70, 64), 40.0, dtype=torch.float16)
    k[..., 1::2, :] = -40
    k[..., 5, 0] = 40.5
    c = Case(q, k, rnd(1, 1, 70, 64, seed=3, dtype=torch.float16))
    attempt(lambda: check(c, named(backend), grads=False))


def named(backend: str) -> Callable[..., ns.State]:
    return lambda **x: ns.attention_state(**x, backend=backend)


def attempt(what: Callable[[], Any]) -> None:
    """Run; a refusal that was not foreseen is a skip with its reason."""
    try:
        what()
    except ns.UnsupportedError as error:
        pytest.skip("; ".join(map(str, error.values.values())))


# ---- bias at the edge of the numbers ------------------------------------------------------------


def first_block(low: float) -> Tensor:
    bias = rnd(M, N, seed=6)
    bias[:, :32] = low  # two whole tiles come first
    bias[7] = low  # and one row has nothing else
    return bias


@pytest.mark.parametrize("backend", discover())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_a_bias_of_finfo_min(dtype: torch.dtype, backend: str) -> None:
    """A running maximum that starts at finfo.min must not count those keys. The row that holds
    nothing else has equal logits, since finfo.min absorbs the scores: its output is the mean of
    v."""
    low = torch.finfo(torch.float32).min
    c = case((B,), HQ, HK, M, N, D, dtype=dtype, bias=first_block(low))
    got = {}

    def run() -> None:
        got["o"] = ns.attention(c.q, c.k, c.v, bias=c.options["bias"], backend=backend)

    attempt(run)
    want = Exact.of(c.with_(bias=first_block(-INF)))
    mean = c.v.double().mean(-2).repeat_interleave(HQ // HK, 1)
    exact = want.o.index_copy(-2, torch.tensor([7]), mean[:, :, None])
    size = c.v.double().abs().mean(-2).repeat_interleave(HQ // HK, 1)
    allowed = bounds(want, *c.cotangents())["o"].index_copy(
        -2, torch.tensor([7]), (size * (4 * N + 32) * helpers.unit(torch.float32))[:, :, None]
    )
    close(
        "o", got["o"], exact, allowed + helpers.unit(dtype) * exact.abs() * (dtype != torch.float32)
    )


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e30, -1e9, 1e9], ids=str)
def test_gradients_where_lse_has_lost_its_normaliser(low: float) -> None:
    """lse = low + ln N rounds to low: weights of exp(s - lse) would be 1, not 1 / N. The scores
    are 0 here, so that every weight is 1 / N, and dv = sum of do / N, whatever the bias is."""
    c = case((B,), HQ, HK, M, N, D)
    v = c.v.clone().requires_grad_()
    o = ns.attention(c.q * 0, c.k, v, bias=torch.full((1, N), low))
    do = c.cotangents()[0]
    (dv,) = torch.autograd.grad(o, v, do)
    grouped = do.double().unflatten(1, (HK, -1))
    room = 2 * (HQ // HK * M + N + 32) * helpers.unit(torch.float32) / N
    want = grouped.sum((2, 3))[:, :, None].expand(v.shape) / N
    close("dv", dv, want, (room * grouped.abs().sum((2, 3)))[:, :, None].expand(v.shape))
    mean = c.v.double().mean(-2).repeat_interleave(HQ // HK, 1)[:, :, None].expand(o.shape)
    size = c.v.double().abs().mean(-2).repeat_interleave(HQ // HK, 1)[:, :, None].expand(o.shape)
    close("o", o, mean, 2 * (N + 32) * helpers.unit(torch.float32) * size)


@pytest.mark.parametrize("backend", discover())
def test_a_bias_of_minus_inf(backend: str) -> None:
    """It hides the pair, as a mask does: a row of nothing else is (0, -inf), with zero
    gradients."""
    c = case((B,), HQ, HK, M, N, D, bias=first_block(-INF))
    attempt(lambda: check(c, named(backend), grads=False))
    check(c)
    with_sinks = c.with_(sinks=rnd(HQ, seed=3))
    check(with_sinks)
    got = everything(c, *c.cotangents())
    assert not got["q"][:, :, 7].any()


@pytest.mark.parametrize("backend", discover())
@pytest.mark.parametrize("where", ["(M,N)", "(1,N)"])
def test_a_bias_of_minus_inf_with_a_causal_mask(backend: str, where: str) -> None:
    """Rows whose visible keys are all hidden by the bias, while keys beyond the diagonal are
    not."""
    bias = rnd(*((M, N) if where == "(M,N)" else (1, N)), seed=6)
    bias[..., :9] = -INF
    c = case((B,), HQ, HK, M, N, D, bias=bias, mask=ns.Causal("start"))
    attempt(lambda: check(c, named(backend), grads=False))
    check(c)


def test_a_sink_far_above_or_below_the_scores() -> None:
    for sink in (-INF, -200.0, 200.0):
        check(case(m=20, n=33, sinks=torch.full((4,), sink)), through_lse=sink != -INF)


# ---- check_finite -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_check_finite_names_the_first_position(name: str, value: float) -> None:
    c = case()
    dirty = c.tensors()[name].clone()
    dirty[1, 1, 3, 2] = dirty[1, 1, 4, 0] = value
    with pytest.raises(ns.ArgumentError) as caught:
        ns.attention(**{**c.tensors(), name: dirty}, check_finite=True)
    assert str(caught.value) == (
        f"{name} is not finite.\n"
        f"  first at  {name}[1, 1, 3, 2] = {value}\n"
        "  Try: look at the layer that makes it; padding that no query sees may hold anything."
    )


def test_check_finite_of_a_bias() -> None:
    c = case(bias=rnd(37, 53).index_fill(1, torch.tensor([50]), NAN), check_finite=True)
    with pytest.raises(ns.ArgumentError) as caught:
        ns.attention(c.q, c.k, c.v, **c.options)
    assert str(caught.value) == (
        "bias holds NaN or +inf at a visible pair.\n"
        "  first at  {'b': 0, 'h': 0, 'i': 0, 'j': 50}\n"
        "  Try: -inf in bias hides a pair; NaN and +inf have no meaning."
    )
    ns.attention(c.q, c.k, c.v, mask=ns.Prefix(50), **c.options)
    ns.attention(c.q, c.k, c.v, bias=torch.full((1, 53), -INF), check_finite=True)


@pytest.mark.parametrize("mask", HIDING)
def test_check_finite_ignores_what_nobody_sees(mask: str) -> None:
    c = case((B,), HQ, HK, M, N, D, mask=HIDING[mask], check_finite=True)
    keys, rows, _ = hidden(HIDING[mask])
    k, v = (t.masked_fill(keys[..., None], NAN) for t in (c.k, c.v))
    ns.attention(c.q.masked_fill(rows[..., None], NAN), k, v, **c.options)


def test_check_finite_of_packed_calls() -> None:
    cu = torch.tensor([0, 4, 9])
    q = rnd(12, 2, 4)
    q[9:] = NAN
    ns.attention_varlen(q, q, q, cu, cu, check_finite=True)
    q[8, 1, 2] = INF
    with pytest.raises(ns.ArgumentError, match=r"q\[8, 1, 2\] = inf"):
        ns.attention_varlen(q, q, q, cu, cu, check_finite=True)


# ---- the reference is safe too ------------------------------------------------------------------


def test_the_oracle_does_not_leak_either() -> None:
    keys, rows, _ = hidden(HIDING["dense"])
    c = case((B,), HQ, HK, M, N, D, dtype=torch.float64)
    k = c.k.masked_fill(keys[..., None], NAN)
    q = c.q.masked_fill(rows[..., None], NAN)
    assert oracle.attention(q, k, k, HIDING["dense"]).o.isfinite().all()
