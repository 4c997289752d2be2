"""gluon_sm90 on a Hopper card, asked for by name: backward against the oracle, and what only a card
can show. All fresh memory is NaN while a test runs (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kinds
import nosquare as ns
from helpers import INF, NAN, Case, case, check, name_of, truth
from test_contract import MASKS, parse_shape

pytest.importorskip("triton", reason="gluon_sm90 is written in Triton's Gluon")
pytest.importorskip("triton.experimental.gluon", reason="this Triton is older than Gluon")
from test_gpu_gluon import DTYPES, HALF, HOPPER, SEEN, SIZES, attention, inputs, on_card

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="its kernels are for Hopper cards (sm_90)"),
]
REFUSED = ("arrays", "nobody sees more than", "before those that anybody sees", "see no key",
           "no row sees", "nothing but padding")  # fmt: skip
NAMES = "qkv"


def agrees(c: Case) -> None:
    """With the oracle; skipped where the mask is none of its own."""
    try:
        check(c, attention, device="cuda")
    except ns.UnsupportedError as error:
        why = str(error.values.get("gluon_sm90"))
        assert any(words in why for words in REFUSED), why
        pytest.skip(why)


def gradients(x: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """Of q, k and v, under cotangents of o and lse that are the same in each call."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    s = attention(**leaves, **options)
    cotangents = [t.to(like.dtype) for t, like in zip(noise(s), (s.o, s.lse), strict=True)]
    found = torch.autograd.grad((s.o, s.lse), list(leaves.values()), cotangents)
    return dict(zip(x, found, strict=True))


def noise(s: ns.State) -> list[torch.Tensor]:
    """The same for the same shapes, as numbers of 16 bits may be."""
    g = torch.Generator("cuda").manual_seed(9)
    return [torch.randn(t.shape, device="cuda", generator=g).to(HALF).float() for t in (s.o, s.lse)]


def near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], most: float) -> None:
    for name, t in want.items():
        gap = (got[name].double() - t.double()).norm()
        assert gap <= most * t.double().norm(), name


# ---- masks, widths, layouts ---------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", ["B2-Hq4-Hk2-M133-N397-D128", "B2-Hq4-Hk2-M515-N515-D64"])
def test_masks(shape: str, mask: str) -> None:
    s = parse_shape(shape)
    agrees(case(**s, dtype=HALF, mask=MASKS[mask](s["batch"], s["hq"], s["m"], s["n"])))


@pytest.mark.parametrize("mask", SEEN)
@pytest.mark.parametrize("d", [64, 128])
def test_sizes(d: int, mask: str) -> None:
    """Whole tiles and others, more keys than queries and fewer: rows that see no key."""
    for m, n in SIZES:
        agrees(case((2,), 4, 2, m, n, d, dtype=HALF, mask=SEEN[mask]))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("d", [8, 64, 72, 80, 96, 128])
def test_widths_and_heads(d: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    for m, n in ((333, 500), (5, 777)):
        agrees(case((2,), *heads, m, n, d, dtype=dtype, mask=ns.Causal()))


def test_widths_of_q_and_v_that_differ_and_batch_axes() -> None:
    for d, e in ((72, 128), (8, 64), (128, 80)):
        agrees(case((2,), 4, 2, 333, 500, d, e, dtype=HALF, mask=ns.Causal()))
    for batch in ((), (3,), (2, 3)):
        agrees(case(batch, 4, 2, 200, 333, 64, dtype=HALF, mask=ns.Causal()))


@pytest.mark.parametrize("d", [64, 80, 128])
def test_tokens_before_heads(d: int) -> None:
    """As q, k and v lie, so do their gradients."""
    for m, n in ((256, 256), (333, 333)):
        c = case((2,), 4, 4, m, n, d, dtype=HALF, mask=ns.Causal())
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (c.q, c.k, c.v))
        agrees(Case(q, k, v, c.options))
        both = torch.stack([t.transpose(1, 2) for t in (c.q, c.k, c.v)], 2).cuda()
        parts = dict(zip(NAMES, (t.transpose(1, 2) for t in both.unbind(2)), strict=True))
        got = gradients(parts, mask=ns.Causal())
        whole = {"q": c.q.cuda(), "k": c.k.cuda(), "v": c.v.cuda()}
        near(got, gradients(whole, mask=ns.Causal()), 1e-3)  # dq is added up in any order
        assert all(t.transpose(1, 2).is_contiguous() for t in got.values())


@pytest.mark.parametrize("name", ["scale", "softcap", "sinks", "sinks of bfloat16"])
@pytest.mark.parametrize("d", [64, 128])
def test_options(d: int, name: str) -> None:
    for m, n in ((333, 500), (500, 333)):  # of the latter some rows see nothing but the sink
        options = kinds.options(m, n)[name]
        agrees(case((2,), 4, 2, m, n, d, dtype=HALF, mask=ns.Causal(), **options))


def test_cotangents_that_lie_in_other_ways() -> None:
    """Broadcast, strided, of parts of the outputs alone."""
    x = inputs(d=64)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    s = attention(**leaves, mask=ns.Causal())
    wide = {name: t.detach().float().requires_grad_() for name, t in x.items()}
    w = ns.attention_state(**wide, mask=ns.Causal(), backend="torch_any")
    ways: list[Callable[[ns.State], torch.Tensor]] = [
        lambda s: s.o.sum(),
        lambda s: s.lse.sum(),
        lambda s: (s.o[..., ::2].float() ** 2).sum(),
        lambda s: s.o.transpose(1, 2).contiguous().float().cos().sum(),
    ]
    for of in ways:
        got = torch.autograd.grad(of(s), list(leaves.values()), retain_graph=True)
        want = torch.autograd.grad(of(w), list(wide.values()), retain_graph=True)
        near(dict(zip(NAMES, got, strict=True)), dict(zip(NAMES, want, strict=True)), 1e-2)


# ---- hard numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("d", [64, 128])
def test_scores_that_differ_by_much(d: int, dtype: torch.dtype) -> None:
    for mask in ("full", "causal", "window"):
        c = case((1,), 2, 1, 400, 1000, d, dtype=dtype, mask=SEEN[mask])
        agrees(Case(c.q * 8, c.k, c.v, c.options))


@pytest.mark.parametrize("d", [64, 128])
def test_scores_in_the_thousands(d: int) -> None:
    """Whole numbers, so that products are exact and the bound of the oracle means something."""
    g = torch.Generator().manual_seed(3)
    for m, n in ((256, 256), (300, 701)):
        c = case((1,), 4, 2, m, n, d, dtype=HALF, mask=ns.Causal(), scale=1.0)
        q, k = (torch.randint(-16, 17, t.shape, generator=g).to(HALF) for t in (c.q, c.k))
        agrees(Case(q, k, c.v, c.options))


def test_scores_far_below_0() -> None:
    """Keys beyond the last are read as 0: a score of 0 would weigh more than any number holds."""
    for d in (64, 128):
        c = case((1,), 2, 2, 300, 701, d, dtype=HALF, mask=ns.Full())
        agrees(Case(torch.full_like(c.q, 8.0), torch.full_like(c.k, -64.0), c.v, c.options))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("d", [64, 128])
def test_what_nobody_sees_does_not_matter(d: int, poison: float) -> None:
    """Keys and values that no row sees; queries that see no key, and their cotangents."""
    for mask, m, n in (
        (ns.Causal("start"), 300, 701),
        (ns.Prefix(301), 300, 701),
        (ns.Window(100, 0), 300, 701),
        (ns.Causal(), 701, 300),
        (ns.Full() & ns.Lengths(torch.tensor([701, 130])), 300, 701),
    ):
        c = case((2,), 4, 2, m, n, d, dtype=HALF, mask=mask)
        keep = truth(mask, (2,), 4, m, n)
        rows, keys = ~keep.any(-1)[..., None], ~keep.any(-2)[:, ::2, :, None]
        assert rows.any() or keys.any()
        found = []
        for value in (0.0, poison):
            dirty = [
                c.q.masked_fill(rows, value),
                *(t.masked_fill(keys, value) for t in (c.k, c.v)),
            ]
            leaves = [t.cuda().requires_grad_() for t in dirty]
            there = ns.parse(str(mask), [t.cuda() for t in mask.tensors])
            s = attention(**dict(zip(NAMES, leaves, strict=True)), mask=there)
            cotangent = torch.ones_like(s.o).masked_fill(rows.cuda(), value)
            found.append(torch.autograd.grad(s.o, leaves, cotangent))
        clean, got = (dict(zip(NAMES, g, strict=True)) for g in found)
        near(got, clean, 1e-3)
        assert all(bool(t.isfinite().all()) for t in got.values()), mask
        assert not bool(got["q"][rows[..., 0].cuda()].any()), mask
        assert not bool(got["k"][keys[..., 0].cuda()].any()), mask
        assert not bool(got["v"][keys[..., 0].cuda()].any()), mask


def test_lengths_that_end_anywhere() -> None:
    """Of entries that are whole, short, empty; padding is never read."""
    lengths = torch.tensor([701, 0, 1, 128, 129, 700])
    for also in (ns.Full(), ns.Causal()):
        c = case((6,), 4, 2, 300, 701, 128, dtype=HALF, mask=also & ns.Lengths(lengths))
        padding = (torch.arange(701) >= lengths[:, None])[:, None, :, None]
        k, v = (t.masked_fill(padding, NAN) for t in (c.k, c.v))
        agrees(Case(c.q, k, v, c.options))


# ---- again, and long ----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", SEEN)
@pytest.mark.parametrize("d", [64, 128])
def test_it_repeats(d: int, mask: str) -> None:
    """dk and dv to the bit; dq but for the order of its sums."""
    for m, n in ((700, 900), (1024, 1024)):
        x = inputs(m, n, d)
        want = gradients(x, mask=SEEN[mask])
        for _ in range(5):
            got = gradients(x, mask=SEEN[mask])
            assert torch.equal(got["k"], want["k"])
            assert torch.equal(got["v"], want["v"])
            near({"q": got["q"]}, {"q": want["q"]}, 1e-3)


@pytest.mark.parametrize("mask", SEEN)
@pytest.mark.parametrize("d", [64, 128])
def test_a_deterministic_backward_repeats_bit_by_bit(d: int, mask: str) -> None:
    """More programs than fit the card at once, heads that do not come out even, a busy card."""
    side, noisy = torch.cuda.Stream(), torch.ones(2048, 2048, device="cuda")
    for m, n, heads in ((700, 900, (3, 10, 2)), (2048, 2048, (2, 8, 8)), (77, 5000, (1, 2, 1))):
        x = {name: on_card(heads[0], heads[1 + (at > 0)], t, d, seed=at)
             for at, (name, t) in enumerate(zip(NAMES, (m, n, n), strict=True))}  # fmt: skip
        want = gradients(x, mask=SEEN[mask], deterministic=True)
        near(want, gradients(x, mask=SEEN[mask]), 1e-3)
        for _ in range(5):
            with torch.cuda.stream(side):
                noisy = (noisy @ noisy).clamp(-1, 1)
            got = gradients(x, mask=SEEN[mask], deterministic=True)
            assert all(torch.equal(got[name], t) for name, t in want.items())
    side.synchronize()


@pytest.mark.parametrize("mask", ["full", "causal", "window", "prefix"])
@pytest.mark.parametrize("d", [64, 128])
def test_long_sequences_agree_with_torch_any(d: int, mask: str) -> None:
    x = inputs(4096, 4096, d)
    got = gradients(x, mask=SEEN[mask])
    leaves = {name: t.detach().float().requires_grad_() for name, t in x.items()}
    s = ns.attention_state(**leaves, mask=SEEN[mask], backend="torch_any")
    wide = torch.autograd.grad((s.o, s.lse), list(leaves.values()), noise(s))
    near(got, dict(zip(NAMES, wide, strict=True)), 6e-3)


def test_a_graph() -> None:
    """Of a forward and a backward."""
    x = {name: t.requires_grad_() for name, t in inputs(512, 512, 64).items()}

    def step() -> tuple[torch.Tensor, ...]:
        s = attention(**x, mask=ns.Causal())
        return torch.autograd.grad(s.o, list(x.values()), torch.ones_like(s.o))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for seed in (1, 4):
        fresh = inputs(512, 512, 64, seed=seed)
        with torch.no_grad():
            for name, t in x.items():
                t.copy_(fresh[name])
        graph.replay()
        torch.cuda.synchronize()
        near(dict(zip(NAMES, got, strict=True)), dict(zip(NAMES, step(), strict=True)), 1e-3)
