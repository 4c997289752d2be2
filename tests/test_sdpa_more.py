"""ns.sdpa: CausalBias, dropout, memory, what reaches ns.attention, and torch's transformations."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import nosquare as ns
from helpers import rnd
from nosquare.dropout import realised_rate
from test_sdpa import PLAIN, agree, math, qkv

adapter: Any = importlib.import_module("nosquare.adapters.sdpa")
bias: Any = importlib.import_module("torch.nn.attention.bias")
P = 0.3


# ---- CausalBias ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(5, 7), (3, 7), (3, 3), (1, 7), (5, 1), (9, 9)])
def test_upper_left(sizes: tuple[int, int]) -> None:
    agree(*qkv(*PLAIN), attn_mask=bias.causal_upper_left(*sizes))


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs:UserWarning")
@pytest.mark.parametrize("sizes", [(5, 7), (3, 3), (1, 7), (5, 1), (1, 1)])
def test_lower_right(sizes: tuple[int, int]) -> None:
    agree(*qkv(*PLAIN), attn_mask=bias.causal_lower_right(*sizes))


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs:UserWarning")
def test_lower_right_with_more_queries_than_keys() -> None:
    x = qkv((2, 4, 7, 8), (2, 4, 5, 8))
    agree(*x, attn_mask=bias.causal_lower_right(7, 5))
    assert not ns.sdpa(*x, attn_mask=bias.causal_lower_right(7, 5))[..., :2, :].any()


def test_lower_right_of_other_layouts() -> None:
    lower = bias.causal_lower_right(5, 7)
    agree(*qkv((5, 8), (7, 8)), attn_mask=lower)
    agree(*qkv((2, 4, 5, 8), (2, 2, 7, 8)), attn_mask=lower, enable_gqa=True)


# ---- dropout ------------------------------------------------------------------------------------


def dropped(seed: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    return ns.sdpa(q, k, v, dropout_p=P, **options)


def test_the_seed_of_torch_replays_dropout() -> None:
    x = qkv(*PLAIN)
    first = dropped(3, *x)
    assert not torch.equal(first, ns.sdpa(*x, dropout_p=P)), "the generator did not move on"
    assert torch.equal(first, dropped(3, *x))
    with torch.no_grad():
        assert torch.equal(first, dropped(3, *x))
    assert not torch.equal(first, ns.sdpa(*x))


@pytest.mark.parametrize("p", [0, 0.0, torch.tensor(0.0)])
def test_without_dropout_nothing_is_drawn(p: Any) -> None:
    before = torch.get_rng_state()
    x = qkv(*PLAIN)
    assert torch.equal(ns.sdpa(*x, dropout_p=p), ns.sdpa(*x))
    assert torch.equal(before, torch.get_rng_state())


def test_the_rate_of_dropout() -> None:
    n = 128
    q, k = torch.zeros(4, 4, n, 8), torch.zeros(4, 4, n, 8)
    weights = dropped(0, q, k, torch.eye(n).expand(4, 4, n, n)) * n  # 0 or 1 / (1 - rate)
    keep, rate = weights > 0.5, realised_rate(P)
    assert torch.allclose(weights[keep], torch.tensor(1 / (1 - rate)), rtol=1e-5)
    total = keep.numel()
    lost = total - int(keep.sum())
    assert abs(lost - rate * total) < 5 * (total * rate * (1 - rate)) ** 0.5  # five sigma


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_gradient_has_the_same_dropout_mask(is_causal: bool) -> None:
    q, k, v = qkv((2, 4, 5, 8), (2, 4, 7, 8))
    identity = torch.eye(7, dtype=torch.float64).expand(2, 4, 7, 7)
    weights = dropped(7, q, k, identity, is_causal=is_causal)
    keep = weights != 0
    x = [t.requires_grad_() for t in (q, k, v)]
    o = dropped(7, *x, is_causal=is_causal)
    do = rnd(*o.shape, seed=4, dtype=torch.float64)
    found = torch.autograd.grad(o, x, do)
    s = q @ k.transpose(-1, -2) / 8**0.5
    if is_causal:
        s = s.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(), -torch.inf)
    dense = (torch.softmax(s, -1) * keep / (1 - realised_rate(P))) @ v
    for got, want in zip((o, *found), (dense, *torch.autograd.grad(dense, x, do)), strict=True):
        assert torch.allclose(got, want, atol=1e-12, rtol=0)


def test_at_rate_one_nothing_is_left() -> None:
    agree(*qkv(*PLAIN), dropout_p=1.0)
    assert not ns.sdpa(*qkv(*PLAIN), dropout_p=1.0).any()


def test_dropout_under_vmap_differs_for_each_entry() -> None:
    q, k, v = qkv(*PLAIN)
    both = torch.vmap(lambda q: ns.sdpa(q, k, v, dropout_p=P), randomness="different")
    first, second = both(torch.stack([q, q]))
    assert not torch.equal(first, second)
    with pytest.raises(RuntimeError, match="every entry draws its own dropout mask"):
        torch.vmap(lambda q: ns.sdpa(q, k, v, dropout_p=P))(torch.stack([q, q]))


# ---- memory -------------------------------------------------------------------------------------


def largest_allocation(attend: Any) -> int:
    """Bytes of the largest block of memory that torch allocates during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as log:
        attend()
    events = log.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(e.nbytes() for e in events if e.name() == "[memory]")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_an_expanded_mask_stays_small(dtype: torch.dtype) -> None:
    m, heads = 4096, 8
    q, k, v = (rnd(1, heads, m, 8, seed=i) for i in range(3))
    row = rnd(m, seed=3) > -0.2 if dtype == torch.bool else rnd(m, seed=3)
    mask = row.expand(1, heads, m, m)
    mine = largest_allocation(lambda: ns.sdpa(q, k, v, attn_mask=mask))
    assert mine < m * m, "a square of bytes, of one head alone"
    copied = largest_allocation(lambda: mask[:, :1].contiguous())
    assert copied >= m * m, "the check sees a copy"


def test_an_expanded_mask_of_many_batch_axes_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(adapter, "attention", lambda q, *_, **o: seen.append(o) or q)
    q = torch.zeros(3, 2, 4, 512, 8)
    padding = torch.ones(3, 1, 1, 1, 512, dtype=torch.bool)
    ns.sdpa(q, q, q, attn_mask=padding.expand(3, 2, 4, 512, 512))
    (array,) = seen[0]["mask"].tensors
    assert array.shape == padding.shape
    assert array.data_ptr() == padding.data_ptr()


# ---- what reaches ns.attention ------------------------------------------------------------------


def test_plain_calls_pass_straight_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(adapter, "attention", lambda *x, **o: seen.append((x, o)) or x[0])
    monkeypatch.setattr(adapter, "_general", None)  # not needed for any of these
    q, k, v = (t.float() for t in qkv(*PLAIN))
    ns.sdpa(q, k, v)
    ns.sdpa(q, k, v, None, 0.0, True, 0.5)
    ns.sdpa(q, k, v, enable_gqa=True)
    for x, _ in seen:
        assert all(a is b for a, b in zip(x, (q, k, v), strict=True))
    assert [str(o["mask"]) for _, o in seen] == ["None", "causal(start)", "None"]
    assert seen[1][1]["scale"] == 0.5


def test_masks_and_shared_heads_are_views(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(adapter, "attention", lambda *x, **o: seen.append((x, o)) or x[0])
    q, k, v = qkv((2, 4, 5, 8), (1, 1, 7, 8))
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    ns.sdpa(q, k, v, attn_mask=mask)
    (_, key, value), options = seen[0]
    assert key.shape == value.shape == (2, 1, 7, 8)
    assert key.data_ptr() == k.data_ptr()
    assert options["mask"].visible.data_ptr() == mask.data_ptr()
    ns.sdpa(q, k, v, attn_mask=mask.double())
    assert seen[1][1]["bias"].shape == mask.shape
    assert seen[1][1]["mask"] is None


# ---- transformations ----------------------------------------------------------------------------


def test_vmap_over_every_argument() -> None:
    q, k, v = qkv((3, 2, 4, 5, 8), (3, 2, 4, 7, 8))
    mask = rnd(3, 5, 7, seed=5, dtype=torch.float64)
    for given in (mask, mask > 0):
        got = torch.vmap(lambda q, k, v, m: ns.sdpa(q, k, v, attn_mask=m))(q, k, v, given)
        want = math(q, k, v, attn_mask=given[:, None, None])
        assert torch.allclose(got, want, atol=1e-12, rtol=0)
    one = torch.vmap(lambda q: ns.sdpa(q, k[0, :1], v[0, :1], is_causal=True))(q)
    want = math(q, k[0, :1], v[0, :1], is_causal=True)
    assert torch.allclose(one, want, atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile_sees_one_graph() -> None:
    q, k, v = (t.float() for t in qkv(*PLAIN))
    mask = (rnd(7, seed=5) > 0).expand(4, 5, 7)

    def many(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Tensor]:
        return [
            ns.sdpa(q, k, v, is_causal=True, scale=q.shape[-1] ** -1.0),
            ns.sdpa(q, k[:1], v[:1, :1], attn_mask=mask),
            ns.sdpa(q, k[:, :2], v[:, :2], enable_gqa=True),
            ns.sdpa(q, k, v, dropout_p=P),
        ]

    torch._dynamo.reset()
    compiled = torch.compile(many, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    got = compiled(q, k, v, mask)
    torch.manual_seed(1)
    for a, b in zip(got, many(q, k, v, mask), strict=True):
        assert torch.equal(a, b)
