"""Gradients of triton_any in Triton's interpreter, against the oracle, on tiny cases and tiles.

As in test_triton_interpret.py, whose cases these are, each group runs in a process of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nosquare as ns
from helpers import INF, NAN, Case, bounds, case, check, close, forget, rnd
from nosquare import oracle
from nosquare.bound import visible

pytest.importorskip("triton", reason="triton_any is written in Triton")
from kinds import LOW
from test_triton_interpret import (
    INTERPRETED,
    OPTIONS,
    SIZES,
    attention,
    inside,
    look_at_few_tiles,
    run_inside,
    small_masks,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
GROUPS = ["sizes", "masks", "options", "hard", "packed"]


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.parametrize("group", GROUPS)
def test_gradients_in_the_interpreter(group: str) -> None:
    run_inside(Path(__file__), group)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles in both directions."""
    from nosquare.backends.triton_any import attend_plan, grad_plan

    monkeypatch.setattr(attend_plan, "FORCED", (16, 16, 1))
    monkeypatch.setattr(grad_plan, "FORCED", grad_plan.Tile(16, 32, 4, 1))
    look_at_few_tiles(monkeypatch)
    forget(monkeypatch)


@pytest.fixture
def atomics(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """dq by atomics from the pass for dk and dv."""
    from nosquare.backends.triton_any import grad_plan

    planned = grad_plan.plan
    monkeypatch.setattr(grad_plan, "plan", lambda *of: replace(planned(*of), add=True))


@inside
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.usefixtures("small")
def test_sizes_and_masks(sizes: dict[str, Any]) -> None:
    for mask in (None, ns.Window(9, 2)):
        check(case(mask=mask, **sizes), attention)


@inside
@pytest.mark.parametrize("sizes", [{"batch": (2, 2)}, {"d": 7, "e": 20}], ids=str)
@pytest.mark.usefixtures("atomics")
def test_sizes_by_atomics(sizes: dict[str, Any]) -> None:
    hard = case(m=37, n=53, mask=ns.Causal("start") & ns.Prefix(20), softcap=2.0, **sizes)
    k, v = hard.k.clone(), hard.v.clone()
    k[..., 20:, :], v[..., 20:, :] = NAN, INF
    check(Case(hard.q, k, v, hard.options), attention)
    check(case(m=37, n=53, dropout=ns.Dropout(0.3, 7), sinks=rnd(4, seed=4), **sizes), attention)


@inside
@pytest.mark.parametrize("sizes", [{"batch": (0,)}, {"m": 0}, {"n": 0, "sinks": rnd(4, seed=4)}])
@pytest.mark.usefixtures("small")
def test_sizes_of_0(sizes: dict[str, Any]) -> None:
    check(case(**sizes), attention)


@inside
@pytest.mark.usefixtures("small")
def test_sizes_in_any_order_in_memory() -> None:
    q = rnd(2, 33, 4, 24, seed=1).transpose(1, 2)
    v = rnd(2, 2, 20, 80, seed=3).transpose(2, 3)[:, :, ::2]  # neither axis side by side
    for k in (rnd(2, 40, 2, 30, seed=2)[..., 3:27].transpose(1, 2), rnd(1, 1, 40, 24, seed=2)):
        check(Case(q, k.expand(2, 2, 40, 24), v, {"mask": ns.Causal()}), attention)


@inside
@pytest.mark.usefixtures("small")
def test_sizes_of_float16_and_of_tiles_that_are_whole() -> None:
    check(case(dtype=torch.float16, m=64, n=64, mask=ns.Causal()), attention)
    check(case(dtype=torch.float16, m=35, n=50), attention)


@inside
@pytest.mark.parametrize("name", list(small_masks(1, 1)))
@pytest.mark.usefixtures("small")
def test_masks_of_every_kind(name: str) -> None:
    check(case(m=37, n=61, d=8, mask=small_masks(37, 61)[name]), attention)


def documents(q_lengths: list[int], k_lengths: list[int]) -> ns.Documents:
    q_ids, k_ids = (
        torch.arange(len(x)).repeat_interleave(torch.tensor(x)) for x in (q_lengths, k_lengths)
    )
    return ns.Documents(q_ids[None], k_ids[None])


def hiding_masks() -> dict[str, ns.Mask]:
    """Of 66 queries, 150 keys and 2 heads, of which most tiles have nothing to see."""
    i, j = torch.arange(66)[:, None], torch.arange(150)
    few = documents([0, 17, 5, 44], [40, 30, 77, 3])
    return {
        "documents": few,
        "documents that nobody asks for": documents([66], [0, 150]),
        "lengths": ns.Lengths(torch.tensor([37])),
        "both": few & ns.Causal(),
        "either": few | ns.Prefix(5),
        "keys of a head": ns.Dense(j // 40 == torch.tensor([0, 3])[:, None, None]),
        "holes": ns.Dense((i // 20 + j // 50) % 3 == 1),
        "tiles": ns.BlockSparse(torch.eye(5, 10, dtype=torch.bool).roll(4, 1), 16),
    }


def tiles_with_pairs(keep: Tensor, m: int, n: int) -> int:
    more = (0, -keep.shape[-1] % n, 0, -keep.shape[-2] % m)
    tiles = torch.nn.functional.pad(keep, more).unflatten(-1, (-1, n)).unflatten(-3, (-1, m))
    return int(tiles.any(-1).any(-2).sum())


@inside
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", list(hiding_masks()))
def test_masks_that_hide_tiles_save_their_work(
    small: None, monkeypatch: pytest.MonkeyPatch, name: str, heads: int
) -> None:
    """Every pass, forward's too, works on the tiles that have a visible pair, and on no other. A
    bias of both heads has no pass of its own."""
    from nosquare.backends.triton_any import attend_kernel, grad_bias, grad_keys, grad_queries

    found: Counter[str] = Counter()

    def counted(name: str, run: Any, *of: Any) -> Any:
        found[name] += 1
        return run(*of)

    for where, visit in (
        (attend_kernel, "_visit"),
        (grad_keys, "_queries"),
        (grad_queries, "_keys"),
        (grad_bias, "_pairs"),
    ):
        monkeypatch.setattr(where, visit, partial(counted, visit, getattr(where, visit)))
    mask = hiding_masks()[name]
    bias = rnd(heads, 66, 150, seed=5)
    check(case(batch=(1,), hq=2, hk=1, m=66, n=150, d=8, mask=mask, bias=bias), attention)
    keep = visible(mask, 66, 150, 2, (1,))
    tiles = tiles_with_pairs(keep, 16, 32)
    want = {"_queries": tiles, "_keys": tiles, **({"_pairs": tiles} if heads == 1 else {})}
    assert found == Counter(want, _visit=tiles_with_pairs(keep, 16, 16))


@inside
@pytest.mark.parametrize("name", [name for name in OPTIONS if "finfo" not in name])
@pytest.mark.usefixtures("small")
def test_options_of_every_kind(name: str) -> None:
    check(case(m=21, n=61, d=8, e=24, mask=ns.Causal(), **OPTIONS[name]), attention)


@inside
@pytest.mark.parametrize("name", ["all", "bias of finfo.min in whole rows"])
@pytest.mark.usefixtures("small")
def test_options_with_delta_summed_over_keys(name: str) -> None:
    c = case(m=21, n=61, d=8, e=24, mask=ns.Window(9, 50), **OPTIONS[name])
    # a bias of finfo.min leaves lse without digits: see test_hard_ for what follows from it
    check(c, partial(attention, exact_delta=True), through_lse="finfo" not in name)


@inside
@pytest.mark.usefixtures("small")
def test_options_without_some_gradients() -> None:
    c = case(m=21, n=37, d=8, bias=rnd(37, seed=5)[None])
    leaves = {n: t.clone().requires_grad_() for n, t in c.tensors().items()}
    do, dlse = c.cotangents()
    whole = attention(**leaves)
    want = dict(
        zip(
            leaves,
            torch.autograd.grad([whole.o, whole.lse], list(leaves.values()), [do, dlse]),
            strict=True,
        )
    )
    for name in leaves:
        one = leaves[name].detach().requires_grad_()
        state = attention(**{**c.tensors(), name: one})
        (got,) = torch.autograd.grad([state.o, state.lse], [one], [do, dlse])
        assert torch.allclose(got, want[name], rtol=1e-5, atol=1e-6), name


@inside
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sinks": rnd(4, seed=4)},
        {"softcap": 2.0},
        {"bias": rnd(2, 4, 21, 61, seed=5)},
        {"dropout": ns.Dropout(0.3, 5, (0, 0, 0, 3))},
    ],
    ids=lambda more: " ".join(more) or "plain",
)
@pytest.mark.usefixtures("small")
def test_hard_what_nobody_sees_reaches_no_gradient(more: dict[str, Any]) -> None:
    """Keys beyond every length hold NaN, and so do queries that see no key, and their do."""
    c = case(m=21, n=61, d=8, mask=ns.Causal() & ns.Lengths(torch.tensor([0, 30])), **more)
    q, k, v = c.q.clone(), c.k.clone(), c.v.clone()
    q[0], k[0], v[0], k[1, :, 30:], v[1, :, 30:] = NAN, NAN, INF, NAN, -INF
    check(Case(q, k, v, c.options), attention)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    do = c.cotangents()[0]
    do[0] = NAN
    for got in torch.autograd.grad(attention(**_named(leaves), **c.options).o, leaves, do):
        assert not got.isnan().any()
        assert not got[0].any()


def _named(leaves: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip("qkv", leaves, strict=True))


@inside
@pytest.mark.usefixtures("small")
def test_hard_rows_whose_scores_are_very_negative() -> None:
    """exp(-lse) is infinite: what pads a tile must not meet it."""
    c = case(hq=2, m=35, n=35, mask=ns.Causal())
    check(c.with_(q=(c.q.abs() + 1) * 8, k=-(c.k.abs() + 1) * 4), attention)


@inside
@pytest.mark.usefixtures("small")
def test_hard_a_bias_of_finfo_min_over_whole_rows() -> None:
    """Such rows average v: their lse keeps no digit of ln N, and the weights would be N times too
    large. The same gradients, but for dq and dk, as with scores that are all 0."""
    c = case(m=21, n=61, d=8, scale=0.0)
    do = c.cotangents()[0]
    found = []
    for bias in (torch.full((1, 61), LOW), torch.zeros(1, 61)):
        leaves = {**c.tensors(), "bias": bias}
        leaves = {n: t.clone().requires_grad_() for n, t in leaves.items()}
        o = attention(**leaves, scale=0.0).o
        found.append(torch.autograd.grad(o, list(leaves.values()), do))
    allowed = bounds_of_ones(c.with_(bias=torch.zeros(1, 61)))
    for name, got, want in zip(("q", "k", "v", "bias"), *found, strict=True):
        close("d" + name, got, want.double(), allowed[name])


def bounds_of_ones(c: Case) -> dict[str, Tensor]:
    from helpers import Exact

    do, dlse = c.cotangents()
    return bounds(Exact.of(c), do, torch.zeros_like(dlse))


@inside
@pytest.mark.usefixtures("small")
def test_packed_gradients_are_those_of_calls_of_their_own() -> None:
    lengths_q, lengths_k = [5, 0, 37, 3, 2], [9, 4, 37, 0, 60]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k))
    q, k, v = rnd(49, 4, 8, seed=1), rnd(112, 2, 8, seed=2), rnd(112, 2, 20, seed=3)
    sinks, do = rnd(4, seed=4), rnd(49, 4, 20, seed=6)
    q[47:], k[110:], v[110:], do[47:] = NAN, NAN, NAN, NAN  # tokens that no sequence owns
    for mask in (ns.Full(), ns.Causal() & ns.Lengths(torch.tensor([9, 4, 30, 0, 60]))):
        options: dict[str, Any] = {"mask": mask, "dropout": ns.Dropout(0.2, 5, (3, 0, 1, 2))}
        options["exact_delta"] = mask == ns.Full()
        leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
        got = ns.attention_varlen(
            *leaves[:3], cu_q, cu_k, backend="triton_any", sinks=leaves[3], **options
        )
        found = torch.autograd.grad(got, leaves, do)
        want = [torch.zeros_like(t, dtype=torch.float64) for t in leaves]
        for b in range(5):
            rows, cols = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            where = (rows, cols, cols)
            parts = [t[s].transpose(0, 1).double() for t, s in zip((q, k, v), where, strict=True)]
            parts = [t.requires_grad_() for t in (*parts, sinks.double())]
            arrays = tuple(t[b] for t in mask.tensors)
            options["dropout"] = ns.Dropout(0.2, 5, (3 + b, 0, 1, 2))
            own = {"mask": ns.parse(str(mask), arrays), "dropout": options["dropout"]}
            o = oracle.attention(*parts[:3], sinks=parts[3], **own).o
            each = torch.autograd.grad(o, parts, do[rows].transpose(0, 1).double())
            for total, s, g in zip(want, where, each, strict=False):
                total[s] = g.transpose(0, 1)
            want[3] += each[3]
        for name, g, w in zip(("q", "k", "v", "sinks"), found, want, strict=True):
            assert torch.allclose(g.double(), w, rtol=1e-5, atol=1e-5), (name, mask)


@inside
@pytest.mark.usefixtures("small")
def test_packed_rows_with_a_large_lse_are_those_of_their_own_sequence() -> None:
    """Their weights are divided by their sum, of keys of the sequence and not of the first."""
    cu = torch.tensor([0, 20, 57])
    q, k, v = (rnd(57, 2, 8, seed=n) for n in (1, 2, 3))
    do, slopes = rnd(57, 2, 8, seed=4), torch.tensor([0.5, 0.25])
    q[20:], k[20:] = (
        40.0 + q[20:] / 100,
        20.0 + k[20:] / 100,
    )  # scores of some 2,260, whose ulp is 2e-4
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    found = []
    for backend in ("triton_any", "torch_any"):
        o = ns.attention_varlen(*leaves, cu, cu, alibi=slopes, backend=backend)
        found.append(torch.autograd.grad(o, leaves, do))
    assert torch.allclose(found[0][2], found[1][2], rtol=2e-3, atol=1e-3)
