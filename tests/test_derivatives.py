"""Derivatives of any order, in both modes, alone and under torch.func; and their memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

import helpers
import memory
import nosquare as ns
from helpers import load_forward_mode, rnd

load_forward_mode()
F64 = torch.float64


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.force_tiles(monkeypatch, 3, 4)


def leaves(*batch: int, m: int = 4, n: int = 6, d: int = 3, e: int = 2) -> list[Tensor]:
    """q, k, v of 4 query heads on 2 key heads, in float64, with E != D."""
    shapes = [(4, m, d), (2, n, d), (2, n, e)]
    made = [rnd(*batch, *s, seed=i, dtype=F64) for i, s in enumerate(shapes)]
    return [t.requires_grad_() for t in made]


def dead() -> Tensor:
    """Row 1 sees nothing, key 2 is seen by nobody, key 3 only by head 0."""
    keep = torch.ones(4, 4, 6, dtype=torch.bool)
    keep[:, 1] = keep[:, :, 2] = keep[1:, :, 3] = False
    return keep


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal(end)": {"mask": ns.Causal()},
    "causal(start)": {"mask": ns.Causal("start")},
    "dense": {"mask": ns.Dense(dead())},
    "softcap": {"softcap": 1.5, "scale": 0.8},
    "alibi": {"alibi": torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=F64)},
    "dropout": {"dropout": ns.Dropout(0.3, 4), "mask": ns.Causal()},
}
EXTRAS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "": dict,
    "bias(M,N)": lambda: {"bias": rnd(4, 6, seed=7, dtype=F64).requires_grad_()},
    "bias(Hq,1,N)": lambda: {"bias": rnd(4, 1, 6, seed=7, dtype=F64).requires_grad_()},
    "sinks": lambda: {"sinks": rnd(4, seed=8, dtype=F64).requires_grad_()},
    "bias+sinks": lambda: {
        "bias": rnd(1, 1, 1, 6, seed=7, dtype=F64).requires_grad_(),
        "sinks": rnd(1, seed=8, dtype=F64).requires_grad_(),
    },
}
GRID = (
    [(o, "") for o in OPTIONS] + [("dense", x) for x in EXTRAS if x] + [("dropout", "bias+sinks")]
)


def function(option: str, extra: str) -> tuple[Callable[..., Any], list[Tensor]]:
    """(o, lse) as a function of all tensors that have gradients; -inf rows of lse become 0."""
    more = EXTRAS[extra]()

    def fn(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        s = ns.attention_state(q, k, v, **OPTIONS[option], **dict(zip(more, rest, strict=True)))
        return s.o, s.lse.masked_fill(s.lse == -torch.inf, 0)

    return fn, [*leaves(), *more.values()]


@pytest.mark.parametrize(("option", "extra"), GRID, ids=lambda x: x or "-")
def test_first_derivatives(option: str, extra: str) -> None:
    fn, args = function(option, extra)
    assert gradcheck(fn, args, check_forward_ad=True, fast_mode=bool(extra))


@pytest.mark.parametrize(("option", "extra"), GRID, ids=lambda x: x or "-")
def test_second_derivatives(option: str, extra: str) -> None:
    fn, args = function(option, extra)
    # in random directions; entry by entry below, on a smaller problem
    assert gradgradcheck(fn, args, check_fwd_over_rev=True, fast_mode=True)


def test_second_derivatives_entry_by_entry() -> None:
    args = [t.detach()[:2, :2, :2].requires_grad_() for t in leaves()]
    assert gradgradcheck(
        lambda *x: ns.attention(*x, mask=ns.Causal()), args, check_fwd_over_rev=True
    )


@pytest.mark.parametrize("option", ["causal(end)", "dense", "dropout"])
def test_third_derivatives(option: str) -> None:
    """The gradient of a gradient is itself checked by finite differences, twice differentiated."""
    args = function(option, "")[1]
    args = [t[:2, :2] if t.shape[0] == 4 else t[:1, :3] for t in args]
    mask = OPTIONS[option].get("mask")
    if option == "dense":
        mask = ns.Dense(dead()[:2, :2, :3])

    def second(*x: Tensor) -> tuple[Tensor, ...]:
        o = ns.attention(*x, mask=mask, dropout=OPTIONS[option].get("dropout"))
        first = torch.autograd.grad(o.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), x, create_graph=True)

    assert gradcheck(second, [t.detach().requires_grad_() for t in args], fast_mode=True)


def test_a_wrong_derivative_is_caught() -> None:
    def half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ns.attention(q, (k + k.detach()) / 2, v)

    with pytest.raises(GradcheckError):
        gradcheck(half, leaves())


def test_gradients_of_some_inputs_only() -> None:
    """Whatever subset requires a gradient, those gradients are what all of them together give."""
    q, k, v = leaves()
    bias, sinks = rnd(4, 6, seed=7, dtype=F64), rnd(4, seed=8, dtype=F64)
    every = [q, k, v, bias.requires_grad_(), sinks.requires_grad_()]

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        s = ns.attention_state(q, k, v, bias=bias, sinks=sinks, mask=ns.Causal())
        return s.o.sin().sum() + s.lse.cos().sum()

    want = torch.autograd.grad(loss(*every), every)
    for subset in range(1, 32):
        given = [t.detach().requires_grad_(bool(subset >> i & 1)) for i, t in enumerate(every)]
        loss(*given).backward()
        for i, (t, w) in enumerate(zip(given, want, strict=True)):
            assert (t.grad is not None) == bool(subset >> i & 1)
            if t.grad is not None:
                assert torch.equal(t.grad, w)


def test_a_scalar_of_either_output() -> None:
    """Only o, only lse, or neither is used: absent cotangents are zeros."""
    args = leaves()
    s = ns.attention_state(*args)
    both = torch.autograd.grad([s.o.sum(), s.lse.sum()], args, retain_graph=True)
    one = torch.autograd.grad(s.o.sum(), args, retain_graph=True)
    two = torch.autograd.grad(s.lse.sum(), args, allow_unused=True)
    for b, x, y in zip(both, one, two, strict=True):
        torch.testing.assert_close(b, x + (0 if y is None else y), rtol=1e-12, atol=1e-12)


# ---- torch.func ---------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ns.attention(q, k, v, mask=ns.Causal()).sin().sum()


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in plain torch."""
    k, v = k.repeat_interleave(2, -3), v.repeat_interleave(2, -3)
    s = q @ k.mT / q.shape[-1] ** 0.5
    m, n = s.shape[-2:]
    hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
    return (s.masked_fill(hidden, -torch.inf).softmax(-1) @ v).sin().sum()


NEAR = dict(rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("what", ["grad", "jacrev", "jacfwd", "hessian"])
def test_transforms_of_a_scalar(what: str) -> None:
    args = [t.detach() for t in leaves()]
    transform = getattr(torch.func, what)
    for i in range(3):
        got, want = transform(plain, argnums=i)(*args), transform(dense, argnums=i)(*args)
        torch.testing.assert_close(got, want, **NEAR)


def test_jvp_and_vjp() -> None:
    args = tuple(t.detach() for t in leaves())
    moved = tuple(rnd(*t.shape, seed=9, dtype=F64) for t in args)
    for transform in (
        torch.func.jvp,
        lambda f, x, _: (torch.func.vjp(f, *x)[1](torch.ones((), dtype=F64)),),
    ):
        torch.testing.assert_close(
            transform(plain, args, moved), transform(dense, args, moved), **NEAR
        )


def test_forward_over_reverse_and_reverse_over_forward() -> None:
    args = tuple(t.detach() for t in leaves())
    moved = tuple(rnd(*t.shape, seed=9, dtype=F64) for t in args)

    def hvp(f: Callable[..., Tensor]) -> Any:
        return torch.func.jvp(torch.func.grad(f, argnums=(0, 1, 2)), args, moved)[1]

    def turned(f: Callable[..., Tensor]) -> Any:
        return torch.func.grad(lambda *x: torch.func.jvp(f, x, moved)[1], argnums=(0, 1, 2))(*args)

    torch.testing.assert_close(hvp(plain), hvp(dense), **NEAR)
    torch.testing.assert_close(turned(plain), turned(dense), **NEAR)


@pytest.mark.parametrize(
    "batched", ["q", "k", "qv", "qkv", "qb", "b", "qs", "s", "qa", "a", "qm", "m", "qd"]
)
def test_vmap(batched: str) -> None:
    """Any of q, k, v, bias, sinks, alibi, the array of Lengths or of Dense batched, the others
    shared; forward and gradient, against a loop."""
    size = 3
    full = dict(zip("qkv", (t.detach() for t in leaves(2)), strict=True))
    full |= {"b": rnd(4, 1, 6, dtype=F64), "s": rnd(4, dtype=F64), "a": rnd(4, dtype=F64).abs()}
    full |= {"m": torch.tensor([4, 6]), "d": dead()}

    def fn(
        q: Tensor, k: Tensor, v: Tensor, b: Tensor, s: Tensor, a: Tensor, m: Tensor, d: Tensor
    ) -> Any:
        mask = ns.Lengths(m) & (ns.Causal() | ns.Dense(d))
        return ns.attention_state(q, k, v, bias=b, sinks=s, alibi=a, mask=mask).o

    dims = {n: 0 if n in batched else None for n in full}
    given = {}
    for i, (n, t) in enumerate(full.items()):
        many = [t] + [rnd(*t.shape, seed=20 + i + j, dtype=F64) for j in range(size - 1)]
        if n == "m":
            many = [t, torch.tensor([0, 3]), torch.tensor([6, 1])]
        if n == "d":
            many = [t, t.flip(1), ~t]
        given[n] = torch.stack(many) if n in batched else t
    values, axes = tuple(given.values()), tuple(dims.values())

    def loop(f: Callable[..., Any]) -> Any:
        rows = [
            [t[i] if d == 0 else t for t, d in zip(values, axes, strict=True)] for i in range(size)
        ]
        parts = [f(*r) for r in rows]
        return torch.utils._pytree.tree_map(lambda *t: torch.stack(t), parts[0], *parts[1:])

    torch.testing.assert_close(torch.vmap(fn, axes)(*values), loop(fn), **NEAR)
    gradient = torch.func.grad(lambda *x: fn(*x).sin().sum(), argnums=(0, 1, 2, 3, 4))
    torch.testing.assert_close(torch.vmap(gradient, axes)(*values), loop(gradient), **NEAR)


def test_vmap_twice_and_over_another_axis() -> None:
    q, k, v = (t.detach() for t in leaves(3, 2))
    got = torch.vmap(torch.vmap(ns.attention), in_dims=(1, 1, 1), out_dims=1)(q, k, v)
    torch.testing.assert_close(got, ns.attention(q, k, v), **NEAR)


def test_vmap_with_dropout() -> None:
    q, k, v = (t.detach() for t in leaves(3))
    drop = ns.Dropout(0.4, 2)
    got = torch.vmap(lambda *x: ns.attention(*x, dropout=drop), randomness="different")(q, k, v)
    assert torch.equal(got, ns.attention(q, k, v, dropout=drop))


def test_per_sample_gradients() -> None:
    q, k, v = (t.detach() for t in leaves(5))
    got = torch.vmap(torch.func.grad(plain, argnums=1))(q, k, v)
    want = torch.stack([torch.func.grad(plain, argnums=1)(*x) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(got, want, **NEAR)


# ---- refusals -----------------------------------------------------------------------------------


def test_packed_calls_have_first_derivatives_only() -> None:
    q, k = rnd(9, 4, 3, dtype=F64).requires_grad_(), rnd(9, 2, 3, dtype=F64)
    cu = torch.tensor([0, 4, 9])

    def packed(q: Tensor) -> Tensor:
        return ns.attention_varlen(q, k, k, cu, cu)

    assert gradcheck(packed, (q,))
    (g,) = torch.autograd.grad(packed(q).sum(), q, create_graph=True)
    refused = "Packed attention has first derivatives in reverse mode only"
    with pytest.raises(ns.UnsupportedError, match=refused):
        g.sum().backward()
    with pytest.raises(ns.UnsupportedError, match=refused):
        torch.func.jvp(packed, (q.detach(),), (q.detach(),))


# ---- memory -------------------------------------------------------------------------------------

SECOND = """
x = [torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3)]
o = ns.attention(*x, mask=ns.Window(64, 0))
g = torch.autograd.grad(o.sum(), x, create_graph=True)
torch.autograd.grad(sum(t.pow(2).sum() for t in g), x)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_second_derivatives_take_linear_memory() -> None:
    """One block of rows x N lives at a time, of a fixed number of elements, whatever N is:
    twice the rows take at most twice the memory (and the square of scores alone would take four
    times)."""
    small, large = memory.peaks(SECOND, 2048, 4096)
    assert large < 24 * (1 << 22) * 4  # the elements of a block, in float32, two dozen times
    assert large < 2.3 * small


def test_hooks_on_saved_tensors_may_let_go_of_them() -> None:
    """Offloading: nothing but the hook keeps q, k, v and bias between forward and backward."""
    given = [rnd(1, 2, 9, 8, seed=n).requires_grad_() for n in range(3)]
    bias = rnd(2, 9, 9, seed=3).requires_grad_()
    want = torch.autograd.grad(ns.attention(*given, bias=bias).sum(), [*given, bias])
    moved: list[Tensor] = []

    def pack(t: Tensor) -> int:
        moved.append(t.detach().clone())
        return len(moved) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, moved.__getitem__):
        inputs = [t.view_as(t) for t in (*given, bias)]
        alive = [weakref.ref(t) for t in inputs]
        o = ns.attention(*inputs[:3], bias=inputs[3])
        del inputs
    assert [ref() for ref in alive] == [None] * 4
    for got, expected in zip(torch.autograd.grad(o.sum(), [*given, bias]), want, strict=True):
        assert torch.equal(got, expected)
