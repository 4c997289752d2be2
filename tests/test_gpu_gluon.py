"""gluon_sm90 on a Hopper card, asked for by name: forward against the oracle, and what only a card
can show.

tests/test_gpu.py asks every backend for every mask, feature and shape; here are sizes that cross
the tiles of its plans, numbers that are hard on them, and its descriptors, lists and warm calls.
All fresh memory is NaN while a test runs (tests/conftest.py), that of o and lse too.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import kinds
import nosquare as ns
from helpers import INF, NAN, Case, case, check, name_of, rnd, truth
from test_contract import MASKS, parse_shape

pytest.importorskip("triton", reason="gluon_sm90 is written in Triton's Gluon")
pytest.importorskip("triton.experimental.gluon", reason="this Triton is older than Gluon")
from nosquare.backends.gluon_sm90 import attend

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="its kernels are for Hopper cards (sm_90)"),
]
DTYPES = [torch.bfloat16, torch.float16]
HALF = torch.bfloat16
ROUNDED = 2 * 2.0**-8  # of a norm: weights and o are rounded to 8 bits, less than once each
# why a mask may be refused that has arrays, or whose first seen key is not key 0
REFUSED = ("arrays", "nobody sees more than", "before those that anybody sees")


def attention(**options: Any) -> ns.State:
    return ns.attention_state(**options, backend="gluon_sm90")


def agrees(c: Case) -> None:
    """With the oracle; skipped where the mask is none of its own."""
    try:
        check(c, attention, grads=False, device="cuda")
    except ns.UnsupportedError as error:
        why = str(error.values.get("gluon_sm90"))
        assert any(words in why for words in REFUSED), why
        pytest.skip(why)


def on_card(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> Tensor:
    return rnd(*shape, seed=seed, dtype=dtype).cuda()


# ---- masks, widths, layouts ---------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", ["B2-Hq4-Hk2-M133-N397-D128", "B2-Hq4-Hk2-M515-N515-D128"])
def test_masks(shape: str, mask: str) -> None:
    s = parse_shape(shape)
    agrees(case(**s, dtype=HALF, mask=MASKS[mask](s["batch"], s["hq"], s["m"], s["n"])))


@pytest.mark.parametrize("name", kinds.masks(2, 4, 300, 500))
def test_kinds_of_masks(name: str) -> None:
    mask = kinds.masks(2, 4, 300, 500)[name]
    agrees(case((2,), 4, 2, 300, 500, 128, dtype=HALF, mask=mask))


SEEN = {
    "full": ns.Full(),
    "causal": ns.Causal(),
    "start": ns.Causal("start"),
    "window": ns.Window(200, 30),
    "prefix": ns.Prefix(150) | ns.Causal(),
}
SIZES = [(256, 256), (384, 384), (1, 300), (300, 701), (701, 300), (130, 2500), (500, 4096)]


@pytest.mark.parametrize(("m", "n"), SIZES)
@pytest.mark.parametrize("mask", SEEN)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_sizes(d: int, mask: str, m: int, n: int) -> None:
    """Whole tiles and others, more keys than queries and fewer: rows that see no key."""
    agrees(case((2,), 4, 2, m, n, d, dtype=HALF, mask=SEEN[mask]))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("d", [64, 80, 96, 128, 192, 256])
def test_widths_and_heads(d: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    for m, n in ((333, 500), (5, 777)):
        agrees(case((2,), *heads, m, n, d, dtype=dtype, mask=ns.Causal()))


def test_widths_of_q_and_v_that_differ_and_batch_axes() -> None:
    for d, e in ((192, 128), (200, 136), (72, 128), (8, 64)):
        agrees(case((2,), 4, 2, 333, 500, d, e, dtype=HALF, mask=ns.Causal()))
    for batch in ((), (3,), (2, 3)):
        agrees(case(batch, 4, 2, 200, 333, 64, dtype=HALF, mask=ns.Causal()))


@pytest.mark.parametrize("d", [64, 80, 128, 256])
def test_tokens_before_heads(d: int) -> None:
    """q, k and v as (B, M, H, D) in memory, and as parts of one array; o comes out as q lies."""
    for m, n in ((256, 256), (333, 333)):
        c = case((2,), 4, 4, m, n, d, dtype=HALF, mask=ns.Causal())
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (c.q, c.k, c.v))
        agrees(Case(q, k, v, c.options))
        both = torch.stack([t.transpose(1, 2) for t in (c.q, c.k, c.v)], 2).cuda()
        q, k, v = (t.transpose(1, 2) for t in both.unbind(2))
        got = attention(q=q, k=k, v=v, mask=ns.Causal())
        want = attention(q=c.q.cuda(), k=c.k.cuda(), v=c.v.cuda(), mask=ns.Causal())
        assert torch.equal(got.o, want.o)
        assert torch.equal(got.lse, want.lse)
        assert got.o.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", ["scale", "softcap", "sinks", "sinks of bfloat16"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_options(d: int, name: str) -> None:
    for m, n in ((333, 500), (500, 333)):  # of the latter some rows see nothing but the sink
        options = kinds.options(m, n)[name]
        agrees(case((2,), 4, 2, m, n, d, dtype=HALF, mask=ns.Causal(), **options))


# ---- hard numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_scores_that_grow_along_a_row(d: int, mask: str, dtype: torch.dtype) -> None:
    """So that the reference moves at every tile of keys, in some rows and not in others; the other
    half of the rows has its largest score first."""
    m, n = 400, 1000
    c = case((1,), 2, 1, m, n, d, dtype=dtype, mask=SEEN[mask], scale=1.0)
    q, k = c.q * 0.05, c.k.clone()
    # the last number of a row is its slope, 0 to 3 eighths or as much downwards, a key each
    q[..., -1] = ((torch.arange(m) % 7) - 3) / 8
    k[..., -1] = torch.arange(n).to(dtype)
    agrees(Case(q, k, c.v, c.options))
    # about 2^8 from tile to tile: those that just move it and those that just do not
    q[..., -1] = (torch.linspace(-0.1, 0.1, m)).to(dtype)
    agrees(Case(q, k, c.v, c.options))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_scores_in_the_thousands(d: int) -> None:
    """Whole numbers, so that products are exact and the bound of the oracle means something."""
    g = torch.Generator().manual_seed(3)
    for m, n in ((256, 256), (300, 701)):
        c = case((1,), 4, 2, m, n, d, dtype=HALF, mask=ns.Causal(), scale=1.0)
        q, k = (torch.randint(-16, 17, t.shape, generator=g).to(HALF) for t in (c.q, c.k))
        assert (q.float() @ k.float().repeat_interleave(2, 1).mT).abs().max() > 2000
        agrees(Case(q, k, c.v, c.options))


def test_scores_that_are_all_equal_or_far_below_0() -> None:
    for value in (0.0, 64.0, -64.0):
        c = case((1,), 2, 2, 300, 701, 128, dtype=HALF, mask=ns.Causal())
        agrees(Case(torch.full_like(c.q, 8.0), torch.full_like(c.k, value), c.v, c.options))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_nobody_sees_does_not_matter(d: int, poison: float) -> None:
    """Keys and values that no row sees, and queries that see no key: to the bit what 0 there
    gives."""
    for mask, m, n in (
        (ns.Causal("start"), 300, 701),
        (ns.Causal("start"), 256, 512),
        (ns.Prefix(301), 300, 701),
        (ns.Prefix(5), 300, 512),
        (ns.Window(100, 0), 300, 701),
        (ns.Window(None, 0, "start"), 300, 701),
        (ns.Causal(), 701, 300),
        (ns.Prefix(0), 300, 701),
    ):
        c = case((2,), 4, 2, m, n, d, dtype=HALF, mask=mask)
        keep = truth(mask, (2,), 4, m, n)
        rows = ~keep.any(-1)[..., None]
        keys = ~keep.any(-2)[:, ::2, :, None]
        assert rows.any() or keys.any()
        found = []
        for value in (0.0, poison):
            dirty = c.q.masked_fill(rows, value), *(t.masked_fill(keys, value) for t in (c.k, c.v))
            q, k, v = (t.cuda() for t in dirty)
            found.append(attention(q=q, k=k, v=v, mask=mask))
        clean, got = found
        assert torch.equal(got.o, clean.o), mask
        assert torch.equal(got.lse, clean.lse), mask
        assert bool(got.o.isfinite().all()), mask
        assert not bool(got.o[rows[..., 0].cuda()].any()), mask
        assert bool(got.lse[rows[..., 0].cuda()].isneginf().all()), mask


def test_lengths_that_end_anywhere() -> None:
    """Of entries that are whole, short, empty; padding is never read."""
    lengths = torch.tensor([701, 0, 1, 128, 129, 700])
    for also in (ns.Full(), ns.Causal()):
        mask = also & ns.Lengths(lengths)
        c = case((6,), 4, 2, 300, 701, 128, dtype=HALF, mask=mask)
        padding = (torch.arange(701) >= lengths[:, None])[:, None, :, None]
        k, v = (t.masked_fill(padding, NAN) for t in (c.k, c.v))
        agrees(Case(c.q, k, v, c.options))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_packed_sequences_are_calls_of_their_own(d: int) -> None:
    lengths_q, lengths_k = [5, 0, 300, 3, 129], [9, 4, 300, 0, 600]
    cu = [torch.tensor([0, *n], device="cuda").cumsum(0) for n in (lengths_q, lengths_k)]
    q = on_card(439, 4, d)  # two tokens that nobody owns
    k, v = (on_card(915, 2, d, seed=seed) for seed in (1, 2))
    for mask in (ns.Full(), ns.Causal(), ns.Causal("start")):
        got = ns.attention_varlen(q, k, v, *cu, mask=mask, backend="gluon_sm90").double()
        wide = (t.float() for t in (q, k, v))
        want = ns.attention_varlen(*wide, *cu, mask=mask, backend="torch_any").double()
        assert (got - want).norm() < ROUNDED * want.norm()
        assert not bool(got[437:].any())


# ---- the same bits ------------------------------------------------------------------------------


def inputs(m: int = 700, n: int = 900, d: int = 128, seed: int = 0) -> dict[str, Any]:
    sizes = ((4, m), (2, n), (2, n))
    x = [on_card(2, h, t, d, seed=seed + at) for at, (h, t) in enumerate(sizes)]
    return dict(zip("qkv", x, strict=True))


def same(got: ns.State, want: ns.State) -> None:
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("mask", SEEN)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_it_repeats_bit_by_bit(d: int, mask: str) -> None:
    for m, n in ((700, 900), (1024, 1024)):
        x = inputs(m, n, d)
        want = attention(**x, mask=SEEN[mask])
        for _ in range(5):
            same(attention(**x, mask=SEEN[mask]), want)


def test_entries_do_not_depend_on_the_others() -> None:
    """Nor on which program works off their tiles."""
    x = inputs()
    want = attention(**x, mask=ns.Causal())
    for b in range(2):
        got = attention(**{name: t[b : b + 1] for name, t in x.items()}, mask=ns.Causal())
        assert torch.equal(got.o, want.o[b : b + 1])
        assert torch.equal(got.lse, want.lse[b : b + 1])


def test_many_addresses_in_turn() -> None:
    """More than are kept: each call reads and writes where its own arrays are."""
    count = attend.MOST_KEPT + 100
    x = [on_card(count, 1, 128, 64, seed=seed) for seed in range(3)]
    want = attention(q=x[0], k=x[1], v=x[2], mask=ns.Causal())
    for turn in range(2):
        kept = []  # so that each o has an address of its own
        for b in range(count):
            q, k, v = (t[b : b + 1] for t in x)
            kept.append(attention(q=q, k=k, v=v, mask=ns.Causal()))
        assert torch.equal(torch.cat([s.o for s in kept]), want.o), turn
        assert torch.equal(torch.cat([s.lse for s in kept]), want.lse), turn


def test_one_address_that_lies_in_several_ways() -> None:
    """What is at an address may have another shape, order or dtype in the next call."""
    room = on_card(2 * 4 * 256 * 128)
    ways = [
        room.view(2, 4, 256, 128),
        room.view(2, 256, 4, 128).transpose(1, 2),
        room.view(2, 8, 256, 64),
        room.view(4, 2, 256, 128),
        room.view(torch.float16).view(2, 4, 256, 128),
        room.view(2, 4, 256, 128)[:, :, :200],
    ]
    want = [attention(q=t.clone(), k=t.clone(), v=t.clone(), mask=ns.Causal()) for t in ways]
    for _ in range(3):
        for t, state in zip(ways, want, strict=True):
            same(attention(q=t, k=t, v=t, mask=ns.Causal()), state)


# ---- streams and graphs -------------------------------------------------------------------------


def test_a_side_stream_waits_for_what_came_before_it_there() -> None:
    late, x = inputs(seed=1), inputs(seed=4)
    want = attention(**late, mask=ns.Causal())
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for name, t in x.items():
            t.copy_(late[name])
        got = attention(**x, mask=ns.Causal())
    side.synchronize()
    same(got, want)


@pytest.mark.parametrize("before", ["listed", "warm", "loaded", "nothing"])
def test_a_graph(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two calls, the second of which makes a list; after one; after one of other sizes, whose
    kernel is the same; after none, of a mask that no other test has: no kernel is loaded then."""
    monkeypatch.setattr(attend, "_READY", {})
    own = (ns.Causal() & ns.Window(300, 5)) | ns.Prefix(3)
    mask = own if before == "nothing" else ns.Causal()
    x = inputs(seed=1)
    for _ in range({"listed": 2, "warm": 1}.get(before, 0)):
        attention(**x, mask=mask)
    if before == "loaded":
        attention(**inputs(701, 901), mask=mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention(**x, mask=mask)
    for seed in (1, 4):
        fresh = inputs(seed=seed)
        for name, t in x.items():
            t.copy_(fresh[name])
        graph.replay()
        torch.cuda.synchronize()
        same(got, attention(**fresh, mask=mask))


def test_a_graph_outlives_what_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the list of tiles at each replay, also when the call it came from is forgotten."""
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(attend, "_READY", kept)
    x = inputs(1500, 1500)
    for _ in range(2):  # the second call makes the list
        want = attention(**x, mask=ns.Causal())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention(**x, mask=ns.Causal())
    kept.clear()
    gc.collect()
    torch.cuda.synchronize()
    # whatever is given the list's memory next: no tile at all
    over = [torch.full((n,), -1, dtype=torch.int32, device="cuda") for n in range(8, 2000, 8)]
    got.o.fill_(NAN)
    got.lse.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    same(got, want)
    assert all(bool((t == -1).all()) for t in over)


# ---- size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", SEEN)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_sequences_agree_with_torch_any(d: int, mask: str) -> None:
    """On the same card, which computes in float32 there."""
    x = {name: t[:1] for name, t in inputs(4000, 4096, d).items()}
    got = attention(**x, mask=SEEN[mask])
    wide = {name: t.float() for name, t in x.items()}
    want = ns.attention_state(**wide, mask=SEEN[mask], backend="torch_any")
    assert (got.o.double() - want.o.double()).norm() < ROUNDED * want.o.double().norm()
    seen = want.lse.isfinite()
    assert torch.equal(got.lse.isfinite(), seen)
    # two sums of D products, of which those of a score are less than 64 in size, and an exponential
    assert (got.lse - want.lse)[seen].abs().max() < 2 * (d + 8) * 64 * 2.0**-24 + 2.0**-13


def test_an_array_that_spans_more_than_2_to_the_31_elements() -> None:
    """The last head of the last entry lies beyond what 32 bits reach."""
    q = on_card(1, 1, 130, 128)
    room = torch.zeros(2**31 + 2**24, device="cuda", dtype=HALF)
    far = room[-130 * 128 :].view(1, 1, 130, 128).copy_(q)
    both = torch.as_strided(room, (2, 1, 130, 128), (far.storage_offset(), 1, 128, 1))
    got = attention(q=both, k=both, v=both).o[1]
    assert torch.equal(got, attention(q=q, k=q, v=q).o[0])


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    """Of q, k, v and o each. The last heads are those of a short problem."""
    heads, few = (1 << 17) + 4, 4
    free, _ = torch.cuda.mem_get_info()
    if free < 5 * heads * 128 * 128 * 2:
        pytest.skip("it takes 22 GB of the card's memory")
    small = [on_card(1, few, 128, 128, seed=seed) for seed in range(3)]
    q, k, v = (torch.zeros(1, heads, 128, 128, device="cuda", dtype=HALF) for _ in range(3))
    for t, s in zip((q, k, v), small, strict=True):
        t[:, -few:] = s
    for mask in (ns.Full(), ns.Causal()):
        got = attention(q=q, k=k, v=v, mask=mask)
        want = attention(q=small[0], k=small[1], v=small[2], mask=mask)
        assert torch.equal(got.o[:, -few:], want.o)
        assert torch.equal(got.lse[:, -few:], want.lse)
        assert not bool(got.o[:, :-few].any())
