"""llvm_cpu, few query rows against many keys: every feature, on every width of vector this machine
has, and the same bits whatever runs beside it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nosquare as ns
from helpers import INF, NAN, Case, case, check, name_of, rnd
from nosquare.backends.llvm_cpu import decode, refusals, yields
from nosquare.backends.llvm_cpu.ready import why_not
from nosquare.backends.llvm_cpu.target import Target, host
from nosquare.bound import visible
from nosquare.errors import UnsupportedError
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem
from nosquare.receipt import Ran

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(params=["avx512", "avx2", "neon"])
def target(request: pytest.FixtureRequest) -> Target:
    """Each isa that this machine has."""
    try:
        return host(request.param)
    except UnsupportedError as e:
        pytest.skip(str(e).splitlines()[0])


def decoded(target: Target, **given: Any) -> tuple[ns.State, Ran]:
    """One call by the decode kernel alone, whatever the plan of the backend."""
    mask = given.pop("mask", None) or ns.Full()
    spec = Spec(str(mask), given.pop("scale", None), given.pop("softcap", None))
    x = Inputs(**given, arrays=mask.tensors)
    p = Problem.of(x, spec)
    plan = decode.plan(p, target)
    o, lse, ran = decode.forward(p, plan, x)
    assert decode.workspace_bytes(p, plan) in (None, ran.workspace_bytes)
    return ns.State(o, lse), ran


def on(target: Target) -> Callable[..., ns.State]:
    return lambda **given: decoded(target, **given)[0]


# every tail: of tiles of rows (4), of keys (4, 8, 16), of blocks (64) and chunks (512), of vectors
SIZES: list[dict[str, int]] = [
    {"hq": 4, "hk": 2, "m": 1, "n": 700, "d": 64},
    {"hq": 6, "hk": 2, "m": 1, "n": 1, "d": 40, "e": 24},
    {"hq": 3, "hk": 3, "m": 1, "n": 515, "d": 128},
    {"hq": 8, "hk": 2, "m": 4, "n": 1100, "d": 33, "e": 17},
    {"hq": 5, "hk": 1, "m": 3, "n": 63, "d": 7, "e": 130},
    {"hq": 2, "hk": 1, "m": 1, "n": 513, "d": 1, "e": 1},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes: dict[str, int], dtype: torch.dtype, target: Target) -> None:
    check(case((2,), **sizes, dtype=dtype), on(target), grads=False)


B, HQ, HK, M, N = 2, 6, 2, 3, 600
MASKS = {
    "causal": ns.Causal(),
    "causal-start": ns.Causal("start"),
    "window": ns.Window(130, 0),
    "prefix-lm": ns.Causal("start") | ns.Prefix(77),
    "lengths": ns.Lengths(torch.tensor([0, 517])),
    "documents": ns.Documents(
        torch.arange(B * M).reshape(B, M) % 3, torch.arange(N).expand(B, N) // 90
    ),
    "dense": ns.Dense(rnd(B, HQ, M, N) > 0.5),
    "blocks": ns.BlockSparse(rnd(HQ, 1, 19) > 0.3, 32),
    "lengths-causal": ns.Lengths(torch.tensor([600, 64])) & ns.Causal(),
    "nothing": ns.Prefix(0),
}
FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": rnd(HQ)},
    "bias": {"bias": rnd(B, 1, M, N)},
    "bias-one-key": {"bias": rnd(HQ, M, 1)},
    "bias-strided": {"bias": rnd(N, M).T},
    "finfo.min": {"bias": torch.where(rnd(M, N) > 0, torch.finfo(torch.float32).min, 0.0)},
    "hidden-by-bias": {"bias": torch.full((1, 1), -INF)},
    "alibi": {"alibi": rnd(HQ).abs()},
    "scale": {"scale": -0.3},
    "all": {"softcap": 1.5, "sinks": rnd(B, HQ), "bias": rnd(M, N), "alibi": rnd(HQ).abs()},
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, target: Target) -> None:
    check(case((B,), HQ, HK, M, N, 32, mask=MASKS[name]), on(target), grads=False)


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, target: Target) -> None:
    for mask in (None, "lengths", "causal"):
        given = FEATURES[name] | ({"mask": MASKS[mask]} if mask else {})
        check(case((B,), HQ, HK, M, N, 32, **given), on(target), grads=False)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["window", "lengths", "documents", "lengths-causal", "nothing"])
def test_nothing_leaks_from_what_nobody_sees(name: str, poison: float, target: Target) -> None:
    c = case((B,), HQ, HK, M, N, 32, mask=MASKS[name])
    hidden = ~visible(MASKS[name], M, N, HQ, (B,)).any(-2).any(1)[:, None, :, None]
    both = [
        decoded(
            target, q=c.q, k=c.k.masked_fill(hidden, x), v=c.v.masked_fill(hidden, x), **c.options
        )
        for x in (0.0, poison)
    ]
    assert torch.equal(both[0][0].o, both[1][0].o)
    assert torch.equal(both[0][0].lse, both[1][0].lse)


def test_nan_that_is_seen_reaches_the_output(target: Target) -> None:
    """So the test above can fail."""
    c = case((B,), HQ, HK, M, N, 32)
    k = c.k.masked_fill(c.k > 2.5, NAN)
    assert decoded(target, q=c.q, k=k, v=c.v)[0].o.isnan().any()
    assert decoded(target, q=c.q, k=k, v=c.v)[0].lse.isnan().any()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_on_any_threads_and_in_any_batch(threads: int, target: Target) -> None:
    """Ten rounds, as the parts of a key head are merged by whoever comes last."""
    c = case((3,), 4, 2, 1, 3000, 64)
    alone = [decoded(target, q=c.q[b], k=c.k[b], v=c.v[b])[0] for b in range(3)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for _ in range(10):
            got, _ = decoded(target, q=c.q, k=c.k, v=c.v)
            assert torch.equal(got.o, torch.stack([s.o for s in alone]))
            assert torch.equal(got.lse, torch.stack([s.lse for s in alone]))
    finally:
        torch.set_num_threads(before)


def test_layouts(target: Target) -> None:
    """A cache with room behind, heads inside tokens, two batch axes, keys shared by a batch."""
    full = case((2, 3), 4, 2, 2, 640, 32)
    room = Case(full.q, full.k[..., :601, :], full.v[..., :601, :], {})
    inside = Case(
        *(t.transpose(-2, -3).contiguous().transpose(-2, -3) for t in (room.q, room.k, room.v)), {}
    )
    shared = Case(full.q[0], *(t[0, :1].expand(3, -1, -1, -1) for t in (full.k, full.v)), {})
    for c in (room, inside, shared):
        check(c, on(target), grads=False)
    o = decoded(target, q=inside.q, k=inside.k, v=inside.v)[0].o
    assert o.stride(-3) < o.stride(-2), "heads inside tokens, as q has them"


def fenced(t: Tensor) -> Tensor:
    """A copy that ends where its page does; to read one byte beyond kills the process."""
    page, size = mmap.PAGESIZE, t.numel() * t.element_size()
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + page)
    buffer = (ctypes.c_char * (room + page)).from_buffer(memory)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert not protect(ctypes.c_void_p(ctypes.addressof(buffer) + room), page, 0)
    copy = torch.frombuffer(buffer, dtype=t.dtype, count=t.numel(), offset=room - size)
    return copy.copy_(t.flatten()).view(t.shape)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mprotect"), reason="no mprotect here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_nothing_is_read_beyond_the_arrays(dtype: torch.dtype, target: Target) -> None:
    for n, d, e in ((515, 33, 17), (1, 1, 1), (63, 64, 100)):
        c = case((1,), 6, 2, 1, n, d, e, dtype=dtype)
        dense = fenced(rnd(6, 1, n) > 0)
        mask, bias = ns.Dense(dense), fenced(rnd(6, 1, n))
        got = Case(fenced(c.q), fenced(c.k), fenced(c.v), {"mask": mask, "bias": bias})
        check(got, on(target), grads=False)


def problem(c: Case, **words: Any) -> Problem:
    x = Inputs(c.q, c.k, c.v, c.options.get("bias"))
    return Problem.of(x, Spec(**words))


def test_it_says_what_ran() -> None:
    c = case((1,), 8, 2, 1, 3000, 64, dtype=torch.bfloat16)
    with ns.receipts() as log:
        o = ns.attention(c.q, c.k, c.v, mask=ns.Causal(), backend="llvm_cpu")
    (receipt,) = log
    assert receipt.backend == "llvm_cpu"
    assert receipt.plan.startswith("decode, ")
    assert receipt.workspace_bytes == 2 * 6 * 4 * 4 * (64 + 2) + 64  # counters fill a cache line
    check(c, lambda **_: ns.State(o, ns.attention_state(c.q, c.k, c.v).lse), grads=False)


def test_refusals() -> None:
    """Word for word: users read them in receipts."""
    small = problem(case((1,), 2, 2, 1, 300, 64))
    assert refusals(small, "forward") == []
    assert yields(small, "forward") == [
        "with 307,200 bytes of keys and values torch's own kernel is done sooner"
    ]
    # it is not, where it reads a group one by one, has several rows, or 16-bit numbers
    for sizes, dtype in (((8, 2, 1, 30), "float32"), ((2, 2, 2, 300), "float32"),
                         ((2, 2, 1, 64), "bfloat16")):  # fmt: skip
        c = case((1,), *sizes, 64, dtype=getattr(torch, dtype))
        assert yields(problem(c), "forward") == []
    rows = problem(case((1,), 8, 2, 5, 300, 64))
    assert decode.refusals(rows) == ["it decodes up to 16 query rows a key head, and here are 20"]
    double = problem(case((1,), 8, 2, 1, 300, 64, dtype=torch.float64))
    assert refusals(double, "forward") == ["it computes in float32, and these are float64"]


def strided(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


def test_strided_widths_are_refused() -> None:
    c = case((1,), 8, 2, 1, 300, 64, dtype=torch.bfloat16)
    p = problem(Case(c.q, strided(c.k), c.v, {}))
    assert refusals(p, "forward") == ["the last axis of k is strided"]
