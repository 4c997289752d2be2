"""triton_any on a card: the contract's grid against the oracle, and what only a card can show.

tests/test_gpu.py asks every backend for every mask, feature and shape; here are sizes that cross
the tiles of its plans, cards' limits, and its warm calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import nosquare as ns
from helpers import Case, case, check, name_of, rnd
from nosquare.backends import BACKWARD, FORWARD, triton_any
from nosquare.backends.triton_any import compiled
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem
from test_contract import FEATURES, MASKS, parse_shape

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attention(**options: Any) -> ns.State:
    return ns.attention_state(**options, backend="triton_any")


def agrees(c: Case) -> None:
    check(c, attention, grads=False, device="cuda")


SHAPES = [
    "B2-Hq4-Hk2-M133-N197-D64",
    "B1-Hq4-Hk4-M515-N515-D128",
    "B1-Hq2-Hk2-M260-N300-D256",
    "B1-Hq2-Hk1-M129-N257-D40-E72",
    "B1-Hq2-Hk1-M33-N65-D320",
    "B2-Hq16-Hk2-M1-N3001-D128",
    "B1-Hq6-Hk2-M5-N2000-D64",
    "B1-Hq2-Hk1-M129-N257-D1",
]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_masks(shape: str, mask: str, dtype: torch.dtype) -> None:
    s = parse_shape(shape)
    agrees(case(**s, dtype=dtype, mask=MASKS[mask](s["batch"], s["hq"], s["m"], s["n"])))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("shape", ["B2-Hq4-Hk2-M170-N333-D64", "B2-Hq4-Hk2-M1-N2500-D128"])
def test_features(shape: str, feature: str, dtype: torch.dtype) -> None:
    c = case(**parse_shape(shape), dtype=dtype, mask=ns.Causal())
    agrees(Case(c.q, c.k, c.v, {**c.options, **FEATURES[feature](c)}))


@pytest.mark.parametrize("offsets", [(0, 0, 0, 0), (3, 1, 4, 1 << 40), (0, 0, 0, 7)], ids=str)
def test_dropout_bit_by_bit(offsets: tuple[int, int, int, int]) -> None:
    n, drop = 300, ns.Dropout(0.37, -3, offsets)
    q, k = (torch.zeros(2, 3, m, 64, device="cuda") for m in (200, n))
    v = torch.eye(n, device="cuda").expand(2, 3, n, n)
    b, h, i, j = offsets
    places = range(b, b + 2), range(h, h + 3), range(i, i + 200), range(j, j + n)
    keep = ns.dropout_keep(-3, *places, 0.37)
    for dtype in (torch.float32, torch.bfloat16):
        o = attention(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), dropout=drop).o
        assert torch.equal((o > 0).cpu(), keep)


def test_forward_repeats_bit_by_bit() -> None:
    c = case((2,), 8, 2, 700, 900, 128, dtype=torch.bfloat16, mask=ns.Causal())
    q, k, v = (t.cuda() for t in (c.q, c.k, c.v))
    for m in (700, 1):
        runs = [attention(q=q[..., :m, :], k=k, v=v, mask=ns.Causal()) for _ in range(3)]
        assert all(torch.equal(r.o, runs[0].o) and torch.equal(r.lse, runs[0].lse) for r in runs)


def test_packed_sequences_are_calls_of_their_own() -> None:
    lengths_q, lengths_k = [5, 0, 300, 3, 129], [9, 4, 300, 0, 600]
    cu = [torch.tensor([0, *n], device="cuda").cumsum(0) for n in (lengths_q, lengths_k)]
    q = rnd(439, 4, 64, seed=1, dtype=torch.bfloat16).cuda()  # two tokens that nobody owns
    k, v = (rnd(915, 2, 64, seed=n, dtype=torch.bfloat16).cuda() for n in (2, 3))
    for mask in (ns.Full(), ns.Causal(), ns.Window(100, 0)):
        got = ns.attention_varlen(q, k, v, *cu, mask=mask, backend="triton_any")
        want = ns.attention_varlen(q, k, v, *cu, mask=mask, backend="torch_any")
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        assert not bool(got[437:].any())


def test_more_than_65535_heads_and_entries() -> None:
    q = torch.randn(70_000, 1, 3, 16, device="cuda", dtype=torch.bfloat16)
    got = attention(q=q, k=q, v=q).o
    want = torch.softmax(q.float() @ q.float().mT / 4, -1) @ q.float()
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_more_than_2_to_the_31_elements() -> None:
    # the last head of the last entry lies beyond what 32 bits reach
    q = torch.randn(1, 1, 130, 128, device="cuda", dtype=torch.bfloat16)
    room = torch.zeros(2**31 + 2**24, device="cuda", dtype=torch.bfloat16)
    far = room[-130 * 128 :].view(1, 1, 130, 128).copy_(q)
    both = torch.as_strided(room, (2, 1, 130, 128), (far.storage_offset(), 1, 128, 1))
    got = attention(q=both, k=both, v=both).o[1]
    assert torch.equal(got, attention(q=q, k=q, v=q).o[0])


def test_memory_is_linear() -> None:
    n = 131_072
    q = torch.randn(1, 1, n, 64, device="cuda", dtype=torch.bfloat16)
    attention(q=q, k=q, v=q, mask=ns.Window(1000, 0))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    s = attention(q=q, k=q, v=q, mask=ns.Window(1000, 0))
    assert torch.cuda.max_memory_allocated() - before <= n * (64 * 2 + 4) + 4096
    assert bool(s.lse.isfinite().all())


def test_streams_and_graphs() -> None:
    c = case((2,), 4, 2, 200, 300, 64, dtype=torch.bfloat16, mask=ns.Causal())
    q, k, v = (t.cuda() for t in (c.q, c.k, c.v))
    want = attention(q=q, k=k, v=v, mask=ns.Causal()).o
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = attention(q=q, k=k, v=v, mask=ns.Causal()).o
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    graph, fresh = torch.cuda.CUDAGraph(), q.clone()
    with torch.cuda.graph(graph):
        out = attention(q=fresh, k=k, v=v, mask=ns.Causal()).o
    fresh.copy_(q * 2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, attention(q=q * 2, k=k, v=v, mask=ns.Causal()).o)


def call(seed: int, m: int = 200, n: int = 300, device: str = "cuda") -> dict[str, Any]:
    """A call with every array of its own, one seed on the device among them."""
    made = {
        **{"q": rnd(2, 4, m, 64, seed=seed), "k": rnd(2, 2, n, 64, seed=seed + 1)},
        **{"v": rnd(2, 2, n, 64, seed=seed + 2), "bias": rnd(4, 1, n, seed=seed + 3)},
        **{"sinks": rnd(4, seed=seed + 4), "do": rnd(2, 4, m, 64, seed=seed + 5)},
    }
    return {
        **{name: t.to(device, torch.bfloat16) for name, t in made.items()},
        "number": torch.tensor(seed, device=device),
        "lengths": torch.tensor([n, n - 7 * seed], device=device),
    }


def results(x: dict[str, Any]) -> list[Tensor]:
    """o and all gradients."""
    leaves = [x[name].detach().requires_grad_() for name in ("q", "k", "v", "bias", "sinks")]
    q, k, v, bias, sinks = leaves
    o = ns.attention(
        *(q, k, v),
        mask=ns.Causal() & ns.Lengths(x["lengths"]),
        bias=bias,
        sinks=sinks,
        dropout=ns.Dropout(0.2, x["number"]),
        backend="triton_any",
    )
    return [o.detach(), *torch.autograd.grad(o, leaves, x["do"])]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    assert all(torch.equal(g.to(w.device), w) for g, w in zip(got, want, strict=True))
    assert all(bool(w.isfinite().all()) and bool(w.any()) for w in want)


def test_a_graph_of_forward_and_backward() -> None:
    """What it reads is read when it is replayed: arrays, seed, lengths."""
    x = call(1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(x)  # kernels are loaded outside of a graph
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(x)
    for seed in (2, 3):
        other = call(seed)
        for name, t in x.items():
            t.copy_(other[name])
        graph.replay()
        torch.cuda.synchronize()
        same(got, results(other))


def test_backward_on_a_side_stream() -> None:
    """It waits for what came before it there: inputs that are not yet what they will be."""
    want, x, late = results(call(1)), call(2), call(1)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for name, t in x.items():
            t.copy_(late[name])
        got = results(x)
    side.synchronize()
    same(got, want)


several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one card")


@several
def test_another_card_than_the_current_one() -> None:
    q = torch.randn(1, 2, 100, 64, device="cuda:1", dtype=torch.bfloat16)
    want = attention(q=q.to("cuda:0"), k=q.to("cuda:0"), v=q.to("cuda:0")).o
    assert torch.equal(attention(q=q, k=q, v=q).o.to("cuda:0"), want)


@several
def test_gradients_on_another_card_than_the_current_one() -> None:
    for seed in (1, 2):
        same(results(call(seed, device="cuda:1")), results(call(seed)))
        assert torch.cuda.current_device() == 0


def test_new_lengths_compile_nothing() -> None:
    """Nor do new strides of heads and windows: but for another plan. The heads are so many that
    their keys are never shared among programs."""
    seen, shared = set(), 0
    for m, n, before in ((300, 500, 3), (512, 512, 16), (401, 1001, 1), (777, 233, 100_000)):
        q, k = (torch.randn(5, 128, t, 64, device="cuda", dtype=torch.bfloat16) for t in (m, n))
        mask = ns.Window(before, 0)
        p = Problem.of(Inputs(q, k, k), Spec(str(mask)), "qkv")
        plans = str(triton_any.plan(p, FORWARD)), str(triton_any.plan(p, BACKWARD))
        known = compiled.launcher.cache_info().misses
        leaves = [t.requires_grad_() for t in (q, k, k.detach().clone())]
        o = attention(**dict(zip("qkv", leaves, strict=True)), mask=mask).o
        torch.autograd.grad(o, leaves, torch.ones_like(o))
        if plans in seen:
            shared += 1
            assert compiled.launcher.cache_info().misses == known
        seen.add(plans)
    assert shared > 0, "every length has a plan of its own"


def test_compiled_over_lengths_with_two_frames() -> None:
    """torch.compile sees one operator: no break of its graph, and no new graph for a new length."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ns.attention(q, k, v, mask=ns.Causal(), backend="triton_any")

    fast = torch.compile(layer, backend=counter, fullgraph=True)
    for n in (130, 210, 340, 550, 200):
        sizes = ((4, 100), (2, n), (2, n))
        x = [rnd(2, h, t, 64, seed=n).to("cuda", torch.bfloat16) for h, t in sizes]
        do = torch.randn_like(x[0])
        found = []
        for fn in (fast, layer):
            leaves = [t.detach().requires_grad_() for t in x]
            o = fn(*leaves)
            found.append([o.detach(), *torch.autograd.grad(o, leaves, do)])
        same(*found)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_left_to_torch_is_taken_there(dtype: torch.dtype, grad: bool) -> None:
    """Else it would go to torch_any, which is slower than any kernel."""
    for d in (8, 64, 100, 128, 192, 256):
        for m, n, hq, hk in ((1, 300, 4, 2), (256, 256, 4, 4), (300, 300, 4, 2), (128, 256, 4, 4)):
            for mask in (ns.Full(), ns.Causal(), ns.Causal("start"), ns.Window(9, 0)):
                q = torch.empty(2, hq, m, d, device="cuda", dtype=dtype, requires_grad=grad)
                k = torch.empty(2, hk, n, d, device="cuda", dtype=dtype, requires_grad=grad)
                assert "torch_any" not in ns.explain(q, k, k, mask=mask).chosen.values()
