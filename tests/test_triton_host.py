"""The host's part of triton_any's calls: what is worked out once for a problem holds nothing of the
call it was worked out for, and a warm call does little beside its launches.

Here kernels are stubs that note what they are handed, on arrays of a CPU. That it is what they need
is shown by the values: the group "warm" runs in Triton's interpreter.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nosquare as ns
from helpers import Case, case, check, forget, rnd
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem

pytest.importorskip("triton", reason="triton_any is written in Triton")
from test_triton_interpret import INTERPRETED, attention, inside, run_inside

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
B, H, M, D = 2, 4, 40, 16
Given = tuple[Inputs, Spec]


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_the_interpreter() -> None:
    run_inside(Path(__file__), "warm")


# ---- with stubs ---------------------------------------------------------------------------------

stubbed = pytest.mark.skipif(INTERPRETED, reason="looks at addresses, not at values")


class Stub:
    """In place of a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, key: Any, handed: list[Any]) -> None:
        self.key, self.handed = key, handed

    def run(self, *arguments: Any) -> None:
        self.handed.append(arguments)


class Card(list[Any]):
    """The arguments of the launches; keys of the kernels that were compiled."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []

    def compile_for(self, kernel: Any, key: Any, card: Any) -> Stub:
        self.compiled.append(key)
        return Stub(key, self)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card that does nothing, in place of the CPU."""
    from nosquare.backends.triton_any import attend, cards, compiled, gradients

    stub = Card()
    monkeypatch.setattr(compiled, "compile_for", stub.compile_for)
    monkeypatch.setattr(attend, "card_of", lambda device: cards.NAMED["sm_90"])
    for half in (attend, gradients):
        monkeypatch.setattr(half, "_READY", {})
    compiled.launcher.cache_clear()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    yield stub  # type: ignore[misc]
    compiled.launcher.cache_clear()


def of(mask: ns.Mask | None = None, *, n: int = M, **more: Any) -> Callable[[int], Given]:
    """A call of the problem, with arrays that are its own."""

    def make(seed: int) -> Given:
        q, k, v = (rnd(B, H, rows, D, seed=seed, dtype=torch.float16) for rows in (M, n, n))
        spec = Spec("full()" if mask is None else str(mask), softcap=more.get("softcap"))
        own = {name: t.clone() for name, t in more.items() if isinstance(t, Tensor)}
        arrays = () if mask is None else tuple(t.clone() for t in mask.tensors)
        if "p" in more:
            own["seed"] = torch.tensor(seed)
        return Inputs(q, k, v, **own, arrays=arrays), spec._replace(p=more.get("p", 0.0))

    return make


def packed(seed: int) -> Given:
    q, k, v = (rnd(50, H, D, seed=seed + n, dtype=torch.float16) for n in range(3))
    cu = torch.tensor([0, 20 + seed, 50])
    return Inputs(q, k, v, cu_q=cu, cu_k=cu.clone()), Spec("causal(end)")


def few_rows(seed: int) -> Given:
    k, v = (rnd(1, 2, 4096, D, seed=seed + n, dtype=torch.float16) for n in range(2))
    return Inputs(rnd(1, H, 1, D, seed=seed, dtype=torch.float16), k, v), Spec()


def many_rows(seed: int) -> Given:
    q, k, v = (rnd(1, H, 200, D, seed=seed + n, dtype=torch.float16) for n in range(3))
    ids = torch.arange(200)[None] // (9 * seed)
    return Inputs(q, k, v, arrays=(ids, ids.clone())), Spec("causal(end)&documents(t0,t1)")


ids = torch.arange(M) // 9
CALLS: dict[str, Callable[[int], Given]] = {
    "plain": of(),
    "window": of(ns.Causal() & ns.Window(9, 0), softcap=2.0),
    "bias": of(bias=rnd(B, H, M, M, seed=1)),
    "bias of a key": of(bias=rnd(B, 1, 1, M, seed=1)),
    "bias of a query": of(bias=rnd(H, M, 1, seed=1, dtype=torch.float16)),
    "bias of float64": of(bias=rnd(M, M, seed=1, dtype=torch.float64)),
    "bias of some entries": of(bias=rnd(1, H, M, M, seed=1)),
    "sinks": of(ns.Causal(), sinks=rnd(H, seed=2)),
    "sinks of an entry": of(sinks=rnd(B, H, seed=2, dtype=torch.float16)),
    "alibi": of(ns.Causal(), alibi=rnd(H, seed=2).abs()),
    "dropout": of(ns.Causal(), p=0.25),
    "documents": of(ns.Documents(ids.expand(B, M), ids) & ns.Causal()),
    "lengths and pairs": of(ns.Lengths(torch.tensor([9, 40])) & ns.Dense(rnd(M, M) > 0)),
    "packed": packed,
    "few rows": few_rows,
    "many rows": many_rows,
    "all": of(ns.Lengths(torch.tensor([9, 40])), bias=rnd(M, M), sinks=rnd(H), alibi=rnd(H), p=0.5),
}


def forward(given: Given) -> Callable[[], Any]:
    """A call of the backend, already decided on."""
    from nosquare.backends.triton_any import attend, attend_plan, cards

    x, spec = given
    p = Problem.of(x, spec, "")
    plan = attend_plan.plan(p, cards.NAMED["sm_90"])
    return lambda: attend.forward(p, plan, x)


def backward(given: Given, through_lse: bool = False) -> Callable[[], Any]:
    from nosquare.backends.triton_any import cards, grad_plan, gradients

    x, spec = given
    more = "b" * (x.bias is not None) + "s" * (x.sinks is not None)
    p = Problem.of(x, spec, "qkv" + more)
    plan = grad_plan.plan(p, cards.NAMED["sm_90"])
    o, lse = torch.zeros(p.o_shape, dtype=p.dtype), torch.zeros(p.lse_shape)
    cotangents = torch.ones_like(o), torch.ones_like(lse) if through_lse else None
    return lambda: gradients.backward(p, plan, x, (o, lse), cotangents)


HALVES: dict[str, Callable[[Given], Callable[[], Any]]] = {
    "forward": forward,
    "backward": backward,
    "backward through lse": lambda given: backward(given, True),
}


class Replay:
    """torch.empty and its like, that give the same memory in the same order each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Tensor] = []
        self.next = 0
        for name in ("empty", "empty_strided", "zeros", "ones_like"):
            monkeypatch.setattr(torch, name, self._again(getattr(torch, name)))

    def _again(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def again(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs.get("device") == torch.device("meta"):
                return make(*args, **kwargs)  # a stand-in
            if self.next == len(self.made):
                self.made.append(make(*args, **kwargs))
            self.next += 1
            return self.made[self.next - 1]

        return again


@stubbed
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_hands_over_its_own_arrays(
    name: str, half: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nosquare.backends.triton_any import attend, gradients

    run = HALVES[half]
    first, second = CALLS[name](1), CALLS[name](2)
    replay = Replay(monkeypatch)
    handed = []
    for given, warm in ((first, False), (second, True), (second, False)):
        if not warm:
            attend._READY.clear()
            gradients._READY.clear()
        compiled, card[:], replay.next = len(card.compiled), [], 0
        run(given)()
        assert not (warm and len(card.compiled) > compiled)
        assert len(attend._READY) + len(gradients._READY) == 1
        handed.append([*card])
    cold, again, fresh = handed
    if name != "bias of float64":  # its copy lies elsewhere each time
        assert again == fresh
    assert again != cold
    for one, other in zip(cold, again, strict=True):
        assert one[:9] == other[:9], "grid, stream and kernel"
        assert [type(a) for a in flat(one)] == [type(a) for a in flat(other)]


def flat(values: Any) -> Iterator[Any]:
    if type(values) is tuple:
        for value in values:
            yield from flat(value)
    else:
        yield values


@stubbed
def test_keys_may_be_queries_in_one_call_and_not_in_the_next(card: Card) -> None:
    """What is picked from a call is known by its place, not by what it was in the first one."""
    one, *others = (rnd(B, H, M, D, seed=n, dtype=torch.float16) for n in range(4))
    forward((Inputs(one, one, one), Spec()))()
    forward((Inputs(*others), Spec()))()
    assert [values[0] for values in card[1][9:12]] == [t.data_ptr() for t in others]


@stubbed
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", CALLS)
def test_nothing_of_a_call_is_kept(name: str, half: str, card: Card) -> None:
    given = CALLS[name](1)
    seen = [weakref.ref(t) for t in (*given[0][:9], *given[0].arrays) if t is not None]
    seen += [weakref.ref(t.untyped_storage()) for t in given[0][:3]]
    HALVES[half](given)()
    del given
    gc.collect()
    assert not [ref() for ref in seen if ref() is not None]


class Operations(TorchDispatchMode):
    """Counts what torch does; tests fill empty arrays with NaN, which does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() != "aten::fill_.Scalar":
            self.names.append(func.name().partition(".")[0].removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@stubbed
@pytest.mark.parametrize("name", [name for name in CALLS if "float64" not in name])
def test_a_warm_call_is_its_allocations(name: str, card: Card) -> None:
    """o, lse and parts or sights; gradients, their sums and the facts of rows."""
    given = CALLS[name](1)
    bias, sinks = given[0].bias is not None, given[0].sinks is not None
    seen = {}
    for half, call in (("forward", forward(given)), ("backward", backward(given))):
        call()
        with Operations() as operations:
            call()
        # the number of a seed that the host knows
        seen[half] = [n for n in operations.names if n != "_local_scalar_dense"]
    assert seen["forward"] == ["empty_strided"] * 2 + ["empty"] * ("rows" in name)
    # sums of what is shared among entries or heads lie in the workspace
    assert seen["backward"] == ["empty_strided"] * (3 + bias + sinks) + ["empty"]


@stubbed
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("which", ["q", "bias"])
def test_what_starts_elsewhere_than_at_16_bytes_is_another_kernel(
    which: str, half: str, card: Card
) -> None:
    x, spec = CALLS["bias"](1)
    HALVES[half]((x, spec))()
    usual = len(card.compiled)
    t = getattr(x, which)
    moved = torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    HALVES[half]((x._replace(**{which: moved}), spec))()
    others = card.compiled[usual:]
    assert others
    alike = {key._replace(multiples=()): key for key in card.compiled[:usual]}
    for key in others:
        known = set(alike[key._replace(multiples=())].multiples)
        assert len(known - set(key.multiples)) == 1
        assert set(key.multiples) < known


@stubbed
def test_what_is_remembered_has_a_bound(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    from nosquare.backends.triton_any import attend, compiled

    monkeypatch.setattr(compiled, "MOST_READY", 3)
    for n in range(1, 9):
        forward(of(n=n)(1))()
        assert len(attend._READY) <= 3
    assert len(card.compiled) == 1, "lengths make no kernel"


# ---- in the interpreter -------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    from nosquare.backends.triton_any import attend_plan, grad_plan

    monkeypatch.setattr(attend_plan, "FORCED", (16, 16, 1))
    monkeypatch.setattr(grad_plan, "FORCED", grad_plan.Tile(16, 32, 4, 1))
    forget(monkeypatch)


def tiny(seed: int, **options: Any) -> Case:
    c = case(m=19, n=35, d=8, **options)
    return replace(c, q=c.q.roll(seed), k=c.k.roll(seed), v=c.v.roll(seed))


def varied() -> Iterator[dict[str, Any]]:
    """Options under which problems are equal, and their arrays lie otherwise or have other types.
    Each comes after one that it could be taken for."""
    m, n = 19, 35
    for bias in (rnd(4, m, n), rnd(4, n, m).mT, rnd(4, m, 2 * n)[..., ::2], rnd(4, m, n).double()):
        yield {"bias": bias}
    for slopes in (rnd(4).abs(), rnd(8).abs()[::2], rnd(4).abs().double()):
        yield {"alibi": slopes, "sinks": slopes.clone()}
    for lengths, dtype in (((35, 7), torch.int64), ((0, 31), torch.int64), ((0, 31), torch.uint8)):
        yield {"mask": ns.Lengths(torch.tensor(lengths, dtype=dtype))}
    for seen in (rnd(2, 1, m, n) > 0, (rnd(2, 1, n, m) > 0).mT):
        yield {"mask": ns.Dense(seen)}
    for seed in (1, 2, torch.tensor(-(1 << 63))):
        yield {"dropout": ns.Dropout(0.4, seed)}


@inside
@pytest.mark.usefixtures("small")
def test_warm_calls_of_other_values_strides_and_types() -> None:
    for n, options in enumerate(varied()):
        check(tiny(n, **options), attention)


@inside
def test_warm_sums_over_entries_and_heads() -> None:
    """More of them than a program adds at once, and wider than one program."""
    from nosquare.backends.triton_any.grad_sums import sums_kernel

    for entries, heads, width, b, h in ((67, 2, 70, 1, 1), (3, 5, 70, 3, 1), (67, 2, 1, 1, 2)):
        parts = rnd(entries, heads, width)
        out = torch.full((b, h, width), torch.nan)
        others = [(0,)] * 8
        sums_kernel[(b * h * -(-width // 64),)](
            *((parts, entries, heads, width), (out, b, h, width), *others, None, 64, 64)
        )
        axes = [axis for axis, n in ((0, b), (1, h)) if n == 1]
        exact = parts.double().sum(axes, keepdim=True)
        terms = entries * heads // (b * h)
        allowed = terms * 2.0**-24 * parts.double().abs().sum(axes, keepdim=True)
        assert bool(((out - exact).abs() <= allowed).all())


@inside
@pytest.mark.usefixtures("small")
def test_warm_calls_whose_arrays_are_copied() -> None:
    """Arrays that vary along one of two batch axes, and cotangents whose rows are strided."""
    for seed in (1, 2):
        ids = torch.randint(0, 3, (2, 1, 35), generator=torch.Generator().manual_seed(seed))
        mask = ns.Documents(ids[..., :19], ids) & ns.Causal()
        c = case((2, 2), m=19, n=35, d=8, mask=mask, bias=rnd(2, 1, 1, 19, 35, seed=seed))
        check(c, attention)
    for seed in (1, 2):
        bias, sinks = rnd(4, 1, 1, seed=seed, dtype=torch.float64), rnd(2, 1, seed=seed)
        check(tiny(seed, bias=bias, sinks=sinks), attention)
        c = tiny(seed, sinks=rnd(2, 4, seed=seed))
        mine = [t.clone().requires_grad_() for t in c.tensors().values()]
        theirs = [t.double().requires_grad_() for t in c.tensors().values()]
        found = []
        for leaves, backend in ((mine, "triton_any"), (theirs, "torch_any")):
            state = ns.attention_state(*leaves[:3], sinks=leaves[3], backend=backend)
            found.append(torch.autograd.grad(state.o.sum() * seed + state.lse.sum(), leaves))
        for got, want in zip(*found, strict=True):
            assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)
