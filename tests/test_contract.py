"""The contract, enumerated: every backend x dtype x mask x feature x shape against the oracle in
float64.

A backend that refuses must say why; then the case is skipped for that reason. Tiles of
torch_any are forced to 16 x 16, so that every case has several of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import helpers
import nosquare as ns
from helpers import DTYPES, Case, Exact, case, check, close, name_of, rnd, truth
from nosquare import oracle
from nosquare.backends import BACKWARD_LSE, FORWARD, discover
from nosquare.problem import Inputs, Problem, Spec

BACKENDS = list(discover())


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.force_tiles(monkeypatch)


def ids_lengths(n: int, batch: tuple[int, ...], seed: int = 7) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, n + 1, batch, generator=g)
    if lengths.dim():
        lengths.view(-1)[-1] = 0  # an entry without any key
    return lengths


def documents(batch: tuple[int, ...], m: int, n: int) -> ns.Documents:
    k_ids = (torch.arange(n) * 4 // max(n, 1)).expand(*batch, n)
    q_ids = (torch.arange(m) * 5 // max(m, 1)).expand(*batch, m)  # document 4 has no key
    return ns.Documents(q_ids, k_ids)


def coin(*shape: int, seed: int = 5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4


def sparse(hq: int, m: int, n: int) -> ns.BlockSparse:
    layout = coin(hq, -(-m // 8), -(-n // 8))
    if layout.shape[1]:
        layout[:, 0] = False  # rows that see nothing
    return ns.BlockSparse(layout, 8)


Make = Callable[[tuple[int, ...], int, int, int], ns.Mask]
MASKS: dict[str, Make] = {
    "full": lambda b, h, m, n: ns.Full(),
    "causal(end)": lambda b, h, m, n: ns.Causal(),
    "causal(start)": lambda b, h, m, n: ns.Causal("start"),
    "window(5,3)": lambda b, h, m, n: ns.Window(5, 3),
    "window(20,0)start": lambda b, h, m, n: ns.Window(20, 0, "start"),
    "window(None,2)": lambda b, h, m, n: ns.Window(None, 2),
    "window(0,0)": lambda b, h, m, n: ns.Window(0, 0),
    "prefix(19)": lambda b, h, m, n: ns.Prefix(19),
    "prefix(0)": lambda b, h, m, n: ns.Prefix(0),
    "lengths": lambda b, h, m, n: ns.Lengths(ids_lengths(n, b)),
    "documents": lambda b, h, m, n: documents(b, m, n),
    "dense(Hq,M,N)": lambda b, h, m, n: ns.Dense(coin(h, m, n)),
    "dense(B,1,1,N)": lambda b, h, m, n: ns.Dense(coin(*b, 1, 1, n)),
    "dense(M,1)": lambda b, h, m, n: ns.Dense(coin(m, 1)),
    "blocksparse(8)": lambda b, h, m, n: sparse(h, m, n),
    "causal&window": lambda b, h, m, n: ns.Causal() & ns.Window(9, None),
    "(causal|prefix)&lengths": lambda b, h, m, n: (
        (ns.Causal() | ns.Prefix(11)) & ns.Lengths(ids_lengths(n, b))
    ),
    "documents&causal": lambda b, h, m, n: documents(b, m, n) & ns.Causal(),
    "dense|window": lambda b, h, m, n: ns.Dense(coin(h, 1, n)) | ns.Window(2, 2),
    "(blocksparse&causal)|(lengths&prefix)": lambda b, h, m, n: (
        (sparse(h, m, n) & ns.Causal()) | (ns.Lengths(ids_lengths(n, b)) & ns.Prefix(6))
    ),
}

FEATURES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "bias()": lambda c: {"bias": rnd(seed=4)},
    "bias(M,N)": lambda c: {"bias": rnd(*c.q.shape[-2:-1], c.k.shape[-2], seed=4)},
    "bias(1,N)": lambda c: {"bias": rnd(1, c.k.shape[-2], seed=4)},
    "bias(M,1)": lambda c: {"bias": rnd(c.q.shape[-2], 1, seed=4)},
    "bias(Hq,1,N)": lambda c: {"bias": rnd(c.q.shape[-3], 1, c.k.shape[-2], seed=4)},
    "bias(B,1,1,N)": lambda c: {"bias": rnd(*c.batch, 1, 1, c.k.shape[-2], seed=4)},
    "bias(B0,1,Hq,M,N)": lambda c: {
        "bias": rnd(c.batch[0], *(1 for _ in c.batch[1:]), *c.q.shape[-3:-1], c.k.shape[-2], seed=4)
    },
    "bias(own dtype)": lambda c: {"bias": rnd(1, c.k.shape[-2], seed=4, dtype=c.q.dtype)},
    "softcap": lambda c: {"softcap": 1.5},
    "scale": lambda c: {"scale": -0.7},
    "scale0": lambda c: {"scale": 0.0},
    "alibi(Hq)": lambda c: {"alibi": 0.5 ** torch.arange(1, c.q.shape[-3] + 1)},
    "alibi(B,Hq)": lambda c: {"alibi": rnd(*c.batch, c.q.shape[-3], seed=4).abs() / 8},
    "sinks(Hq)": lambda c: {"sinks": rnd(c.q.shape[-3], seed=4)},
    "sinks(B,Hq)": lambda c: {"sinks": rnd(*c.batch, c.q.shape[-3], seed=4)},
    "sinks(1)": lambda c: {"sinks": rnd(1, seed=4)},
    "sinks()": lambda c: {"sinks": rnd(seed=4)},
    "dropout": lambda c: {"dropout": ns.Dropout(0.3, seed=11)},
    "dropout+offsets": lambda c: {"dropout": ns.Dropout(0.17, -5, (1 << 33, 3, 1 << 40, 7))},
    "everything": lambda c: {
        "bias": rnd(*c.batch, 1, c.q.shape[-2], c.k.shape[-2], seed=4),
        "softcap": 2.0,
        "scale": 0.6,
        "alibi": rnd(c.q.shape[-3], seed=5).abs() / 8,
        "sinks": rnd(c.q.shape[-3], seed=6),
        "dropout": ns.Dropout(0.5, seed=3),
        "mask": ns.Causal() & ns.Window(30, 0),
    },
}


def parse_shape(text: str) -> dict[str, Any]:
    """B2x3-Hq4-Hk2-M37-N53-D16-E8 -> the arguments of helpers.case."""
    found = dict(re.findall(r"([A-Za-z]+)([\dx]*)", text))
    batch = tuple(int(n) for n in found.pop("B", "").split("x") if n)
    return {"batch": batch, **{name.lower(): int(n) for name, n in found.items()}}


MAIN, TALL = "B2-Hq4-Hk2-M37-N53-D16", "B2-Hq3-Hk1-M53-N37-D16"
SHAPES = [
    "Hq4-Hk2-M37-N53-D16",
    "B2x3-Hq2-Hk1-M21-N34-D8",
    "B1x1x2-Hq2-Hk2-M17-N17-D4",
    "B3-Hq6-Hk2-M33-N33-D5-E24",
    "B2-Hq2-Hk2-M64-N64-D16",
    "B1-Hq8-Hk1-M1-N77-D33",
    "B2-Hq4-Hk4-M1-N1-D16",
    "B1-Hq2-Hk1-M77-N1-D16",
    "B1-Hq2-Hk1-M40-N40-D1",
    "B1-Hq2-Hk1-M40-N31-D33",
    "B1-Hq2-Hk1-M20-N40-D64",
    "B1-Hq2-Hk1-M20-N40-D257",
    "B1-Hq2-Hk1-M20-N40-D257-E3",
    "B1-Hq2-Hk1-M20-N40-D3-E65",
    "B1-Hq2-Hk1-M20-N40-D64-E1",
    "B0-Hq2-Hk1-M20-N40-D8",
    "B2-Hq0-Hk0-M20-N40-D8",
    "B2-Hq2-Hk1-M0-N40-D8",
    "B2-Hq2-Hk1-M20-N0-D8",
    "B2-Hq2-Hk1-M0-N0-D8",
    "B2-Hq2-Hk1-M20-N40-D8-E0",
    "B2x0-Hq2-Hk1-M20-N40-D8",
]


def served(c: Case, backend: str) -> tuple[bool, bool]:
    """Whether forward and backward are served; skip, with the backend's own reason, if neither
    is."""
    mask, get = c.options.get("mask") or ns.Full(), c.options.get
    drop = get("dropout")
    seed = None if drop is None else drop.seed_tensor()
    x = Inputs(c.q, c.k, c.v, get("bias"), get("sinks"), get("alibi"), seed, arrays=mask.tensors)
    spec = Spec(str(mask), get("scale"), get("softcap"), drop.p if drop else 0.0, backend=backend)
    letters = "".join(n[0] for n in c.tensors())
    why = {}
    for phase in (FORWARD, BACKWARD_LSE):
        why[phase] = discover()[backend].refusals(Problem.of(x, spec, letters), phase)
        assert all(isinstance(reason, str) and reason.strip() for reason in why[phase])
    if why[FORWARD]:
        with pytest.raises(ns.UnsupportedError) as caught:
            ns.attention(c.q, c.k, c.v, **{**c.options, "backend": backend})
        assert all(reason in str(caught.value) for reason in why[FORWARD])
        pytest.skip(f"{backend}: {why[FORWARD][0]}")
    return True, not why[BACKWARD_LSE]


def contract(c: Case, backend: str) -> None:
    """Forward, lse and all gradients; where a backend has no gradient through lse, without it."""
    _, through_lse = served(c, backend)

    def attend(**given: Any) -> ns.State:
        return ns.attention_state(**given, backend=backend)

    try:
        check(c, attend, through_lse=through_lse)
    except ns.UnsupportedError:  # no backward at all: then it must at least be right forward
        check(c, attend, grads=False)


def every(items: Any, *others: Any) -> list[Any]:
    """pytest parameters backend x item x dtype, with ids that can be read."""
    return [
        pytest.param(backend, item, dtype, id=f"{backend}-{item}-{name_of(dtype)}")
        for backend in BACKENDS
        for item in items
        for dtype in DTYPES
    ]


@pytest.mark.parametrize("shape", [MAIN, TALL])
@pytest.mark.parametrize(("backend", "mask", "dtype"), every(MASKS))
def test_masks(backend: str, mask: str, dtype: torch.dtype, shape: str) -> None:
    s = parse_shape(shape)
    made = MASKS[mask](s["batch"], s["hq"], s["m"], s["n"])
    contract(case(**s, dtype=dtype, mask=made), backend)


@pytest.mark.parametrize("shape", [MAIN, "B2x3-Hq4-Hk2-M18-N33-D8-E5", "Hq2-Hk1-M33-N20-D8"])
@pytest.mark.parametrize(("backend", "feature", "dtype"), every(FEATURES))
def test_features(backend: str, feature: str, dtype: torch.dtype, shape: str) -> None:
    c = case(**parse_shape(shape), dtype=dtype, mask=ns.Causal("start"))
    if not c.batch and "B" in feature:
        feature = "bias(M,N)"  # there is no batch axis to vary along
    options = {**c.options, **FEATURES[feature](c)}
    contract(Case(c.q, c.k, c.v, options), backend)


@pytest.mark.parametrize("mask", ["full", "causal(end)", "causal(start)"])
@pytest.mark.parametrize(("backend", "shape", "dtype"), every(SHAPES))
def test_shapes(backend: str, shape: str, dtype: torch.dtype, mask: str) -> None:
    s = parse_shape(shape)
    made = MASKS[mask](s["batch"], s["hq"], s["m"], s["n"])
    contract(case(**s, dtype=dtype, mask=made), backend)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", ["B1-Hq2-Hk1-M530-N1050-D8", "B2-Hq2-Hk2-M3-N4200-D4"])
def test_tiles_as_they_are_planned(shape: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes beyond the tiles that are really used: 512 x 512, and long ones for few queries."""
    helpers.force_tiles(monkeypatch, None)
    s = parse_shape(shape)
    c = case(**s, mask=MASKS[mask](s["batch"], s["hq"], s["m"], s["n"]))
    check(Case(c.q, c.k, c.v, {**c.options, "dropout": ns.Dropout(0.1, 2)}))


@pytest.mark.parametrize("mask", MASKS)
def test_the_oracle_itself(mask: str) -> None:
    """The reference of all this agrees with a dense formula that shares no code with it."""
    made = MASKS[mask]((2,), 4, 37, 53)
    c = case(dtype=torch.float64, mask=made)
    for options in ({}, *(f(c) for f in FEATURES.values())):
        x = Exact.of(Case(c.q, c.k, c.v, {**options, "mask": made}))
        want = oracle.attention(c.q, c.k, c.v, **x.case.options)
        allowed = helpers.bounds(x, *c.cotangents())
        close("o", x.o, want.o, allowed["o"])
        close("lse", x.lse, want.lse, allowed["lse"])


def test_every_kind_is_in_the_grid() -> None:
    seen = {w for n in MASKS for w in re.findall(r"[a-z]+", n)}
    assert set(ns.mask.KINDS) <= seen  # type: ignore[attr-defined]
    dead = [not truth(f((2,), 4, 37, 53), (2,), 4, 37, 53).any(-1).all() for f in MASKS.values()]
    assert sum(dead) >= 6  # rows with no key are in the grid


# ---- the check can fail -------------------------------------------------------------------------


def averaged(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> ns.State:
    """The mistake the whole algorithm avoids: average the outputs of tiles of keys."""
    n = k.shape[-2] // 2
    a = ns.attention_state(q, k[..., :n, :], v[..., :n, :])
    b = ns.attention_state(q, k[..., n:, :], v[..., n:, :])
    return ns.State((a.o + b.o) / 2, ns.merge(a, b).lse)


def other_heads(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> ns.State:
    """Query head h reads key head h % Hk."""
    turned = q.unflatten(-3, (-1, k.shape[-3])).transpose(-3, -4).flatten(-4, -3)
    s = ns.attention_state(turned, k, v, **options)
    o = s.o.unflatten(-3, (k.shape[-3], -1)).transpose(-3, -4).flatten(-4, -3)
    lse = s.lse.unflatten(-2, (k.shape[-3], -1)).transpose(-2, -3).flatten(-3, -2)
    return ns.State(o, lse)


def tf32(x: Tensor) -> Tensor:
    """Rounded to the 11 bits that a silent tf32 product would see."""
    mantissa, exponent = torch.frexp(x)
    return (mantissa * 2048).round().div(2048).ldexp(exponent)


WRONG: dict[str, Callable[..., ns.State]] = {
    "tiles averaged": averaged,
    "head h reads h % Hk": other_heads,
    "aligned to the start": lambda mask, **x: ns.attention_state(mask=ns.Causal("start"), **x),
    "q in bfloat16": lambda q, **x: ns.attention_state(q.bfloat16().float(), **x),
    "q in tf32": lambda q, **x: ns.attention_state(tf32(q), **x),
    "lse without gradient": lambda **x: ns.State(
        ns.attention(**x), ns.attention_state(**x).lse.detach()
    ),
    "scale of D + 1": lambda q, **x: ns.attention_state(q=q, scale=17**-0.5, **x),
    "one key short": lambda k, v, mask, **x: ns.attention_state(
        k=k[..., :-1, :], v=v[..., :-1, :], mask=ns.Window(None, 1), **x
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_check_fails_for(wrong: str) -> None:
    c = case(mask=None if wrong == "tiles averaged" else ns.Causal())
    with pytest.raises((AssertionError, RuntimeError)):
        check(c, WRONG[wrong])
    check(c)


def test_the_check_fails_without_the_rescale(monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha = 1: exp_ of a (rows, 1) array is the rescale, that of a wide one the weights."""
    true = Tensor.exp_
    wrong = lambda x: true(x) if x.shape[-1] > 1 else x.fill_(1)  # noqa: E731
    monkeypatch.setattr(Tensor, "exp_", wrong)
    with pytest.raises(AssertionError):
        check(case(), lambda **x: ns.attention_state(**x, backend="torch_any"), grads=False)


# ---- properties ---------------------------------------------------------------------------------


@settings(max_examples=30)
@given(tile_m=st.integers(1, 70), tile_n=st.integers(1, 70), mask=st.sampled_from(sorted(MASKS)))
def test_tile_sizes_do_not_matter(tile_m: int, tile_n: int, mask: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        helpers.force_tiles(patch, tile_m, tile_n)
        options = {"mask": MASKS[mask]((2,), 2, 19, 31), "dropout": ns.Dropout(0.2, 5)}
        c = case((2,), 2, 1, 19, 31, 6, dtype=torch.float64, **options)
        check(c, lambda **x: ns.attention_state(**x, backend="torch_any"))


@settings(max_examples=30)
@given(st.permutations(range(41)), st.sampled_from(["full", "dense", "documents"]))
def test_keys_may_come_in_any_order(order: list[int], kind: str) -> None:
    """Attention is a sum over keys: a permutation of keys, values and mask changes nothing."""
    keep = coin(2, 1, 13, 41)
    masks = {
        "full": lambda at: None,
        "dense": lambda at: ns.Dense(keep[..., at]),
        "documents": lambda at: ns.Documents(torch.arange(13) % 5, (torch.arange(41) % 7)[at]),
    }
    c = case((2,), 2, 1, 13, 41, 8, mask=masks[kind](slice(None)))

    def shuffled(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> ns.State:
        at = torch.tensor(order)
        return ns.attention_state(q, k[..., at, :], v[..., at, :], mask=masks[kind](at))

    check(c, shuffled)
