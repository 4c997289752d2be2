"""ns.weights: the quadratic artefact in slices, and never more of it than was asked for."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nosquare as ns
from helpers import DTYPES, NAN, Exact, case, name_of, rnd, unit

ARRAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ns.Causal()},
    "window|prefix": {"mask": ns.Window(3, 0) | ns.Prefix(2)},
    "lengths": {"mask": ns.Lengths(torch.tensor([20, 0]))},
    "softcap": {"softcap": 2.0, "scale": 0.3},
    "bias": {"bias": rnd(2, 1, 37, 53, seed=5)},
    "alibi": {"alibi": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "sinks": {"sinks": rnd(4, seed=5), "mask": ns.Causal()},
}


def given(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor, Tensor]:
    """The case, its lse, the exact weights."""
    c = case(dtype=dtype, **ARRAYS[name])
    return c, ns.attention_state(c.q, c.k, c.v, **c.options).lse, Exact.of(c).p


def ask(c: Any, lse: Tensor, **more: Any) -> Any:
    options = {n: x for n, x in c.options.items() if n != "sinks"}
    return ns.weights(c.q, c.k, lse, **options, **more)


def near(got: Tensor, want: Tensor, c: Any) -> None:
    """p = exp(s - lse): relative error (D + 8) u S for s, the same for lse, whose sum has N
    terms."""
    x = Exact.of(c)
    u = unit(got.dtype)
    # a column sum adds up to M of them
    terms = c.k.shape[-2] + c.q.shape[-2]
    room = (4 * (c.q.shape[-1] + 8) * float(x.size.max()) + 2 * terms + 32) * u
    assert got.shape == want.shape
    assert not got.isnan().any()
    assert ((got.double() - want).abs() <= room * want + torch.finfo(got.dtype).tiny).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", ARRAYS)
def test_all_weights(name: str, dtype: torch.dtype) -> None:
    c, lse, exact = given(name, dtype)
    w = ask(c, lse)
    assert w.dtype == lse.dtype
    assert not w.requires_grad
    near(w, exact, c)
    if name == "sinks":
        assert (w.sum(-1) < 1).all()


@pytest.mark.parametrize("name", ARRAYS)
def test_slices(name: str) -> None:
    c, lse, exact = given(name)
    near(ask(c, lse, rows=3, heads=1), exact[:, 1:2, 3:4], c)
    near(ask(c, lse, rows=-1, heads=[3, 0]), exact[:, [3, 0], -1:], c)
    near(ask(c, lse, rows=slice(5, 30, 4)), exact[:, :, 5:30:4], c)
    near(ask(c, lse, rows=[], heads=2), exact[:, 2:3, :0], c)
    near(ask(c, lse, rows=torch.tensor([9, 9, 0]), heads=[]), exact[:, :0, [9, 9, 0]], c)


@pytest.mark.parametrize("name", ARRAYS)
def test_top_k_and_column_sums(name: str) -> None:
    c, lse, exact = given(name)
    values, indices = ask(c, lse, rows=[1, 30], heads=[2], top_k=5)
    near(values, exact[:, 2:3, [1, 30]].topk(5).values, c)
    near(values, exact[:, 2:3, [1, 30]].gather(-1, indices), c)
    near(ask(c, lse, column_sums=True), exact.sum(2), c)
    near(ask(c, lse, column_sums=True, rows=slice(0, 4), heads=1), exact[:, 1:2, :4].sum(2), c)


def test_empty_selections() -> None:
    c, lse, _ = given("plain")
    values, indices = ask(c, lse, heads=[], top_k=3)
    assert values.shape == indices.shape == (2, 0, 37, 3)
    assert indices.dtype == torch.int64
    assert ask(c, lse, rows=[], column_sums=True).eq(0).all()
    assert ask(c, lse, heads=[], column_sums=True).shape == (2, 0, 53)


@pytest.mark.parametrize("batch", [(), (2, 3), (0,)])
def test_batch_axes(batch: tuple[int, ...]) -> None:
    c = case(batch, m=9, n=11, mask=ns.Causal())
    lse = ns.attention_state(c.q, c.k, c.v, mask=ns.Causal()).lse
    near(ns.weights(c.q, c.k, lse, mask=ns.Causal()), Exact.of(c).p, c) if 0 not in batch else None
    assert ns.weights(c.q, c.k, lse, rows=[2], mask=ns.Causal()).shape == (*batch, 4, 1, 11)


def test_weights_of_what_nobody_sees() -> None:
    """NaN in padding keys reaches no weight; a row that sees nothing has weights 0."""
    c = case(mask=ns.Lengths(torch.tensor([20, 0])))
    k = c.k.clone()
    k[0, :, 20:], k[1] = NAN, NAN
    lse = ns.attention_state(c.q, k, c.v, **c.options).lse
    w = ns.weights(c.q, k, lse, **c.options)
    assert not w.isnan().any()
    assert not w[1].any()


class Largest(TorchDispatchMode):
    """The largest array that any operation makes, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                held = t.untyped_storage().nbytes() // max(t.element_size(), 1)
                self.elements = max(self.elements, held)
        return out


@pytest.mark.parametrize(
    "what",
    [{"rows": [0, 2000]}, {"column_sums": True}, {"top_k": 2}, {"top_k": 3, "rows": slice(0, 5)}],
    ids=str,
)
def test_never_the_square(what: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4,096 x 4,096 weights of 2 heads only blocks of rows ever exist."""
    module = importlib.import_module("nosquare.weights")  # the function hides it
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 1 << 18)
    n = 4096
    q, k = rnd(1, 2, n, 4), rnd(1, 1, n, 4, seed=1)
    lse = ns.attention_state(q, k, k).lse
    with Largest() as seen:
        ns.weights(q, k, lse, **what)
    assert seen.elements <= 1 << 18
    with Largest() as whole:  # and the meter does see a square
        ns.weights(q[:, :, :512], k, lse[:, :, :512])
    assert whole.elements >= 512 * n


def test_refusals() -> None:
    c, lse, _ = given("plain")
    with pytest.raises(ns.ArgumentError) as caught:
        ask(c, lse[..., :-1])
    assert str(caught.value) == (
        "lse does not belong to these queries.\n"
        "  lse       (2, 4, 36)\n"
        "  expected  (2, 4, 37)\n"
        "  Try: ns.attention_state(q, k, v, ...).lse."
    )
    for bad in ({"top_k": 0}, {"top_k": 54}, {"top_k": 2, "column_sums": True}):
        with pytest.raises(ns.ArgumentError, match="top_k must lie between 1 and N"):
            ask(c, lse, **bad)
    with pytest.raises(ns.ArgumentError) as caught:
        ask(c, lse, rows=[0, 37])
    assert str(caught.value) == (
        "rows names something that does not exist.\n"
        "  rows       [0, 37]\n"
        "  there are  37\n"
        "  Try: rows from 0 to 36."
    )
    with pytest.raises(ns.ArgumentError, match="heads names something"):
        ask(c, lse, heads=4)
    with pytest.raises(ns.ArgumentError, match="rows names something"):
        ask(c, lse, rows=-38)
    with pytest.raises(ns.ArgumentError, match="disagree on D"):
        ns.weights(c.q, c.k[..., :3], lse)


@pytest.mark.parametrize("bad", [torch.tensor([True, False]), [0.5], torch.tensor([1.5])], ids=str)
def test_indices_are_integers(bad: Any) -> None:
    """A bool mask of rows, or a fraction, would silently name other rows."""
    c, lse, _ = given("plain")
    with pytest.raises(ns.ArgumentError):
        ask(c, lse, rows=bad)
