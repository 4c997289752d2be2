"""ns.sdpa against torch's own scaled_dot_product_attention, on its math path."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nosquare as ns
from helpers import rnd

INF, LOWEST = float("inf"), torch.finfo(torch.float32).min
Attend = Callable[..., Tensor]


def math(*args: Any, **options: Any) -> Tensor:
    """torch's function by its plain definition."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


def agree(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = torch.float64, **options: Any
) -> None:
    """Value, and gradients of q, k, v and an additive mask, against the math path in float64.

    In float64 both sides are one rounding, 1.1e-16, away from exact in each of some thousand sums
    and products. In the other dtypes the bar is four times what torch's math path loses on the same
    numbers, plus two roundings of the largest one: both do the same work in another order.
    """
    mask = options.get("attn_mask")
    given = [t.to(dtype) for t in (q, k, v)]
    if type(mask) is Tensor and mask.is_floating_point():
        given.append(mask.to(dtype))

    def run(attend: Attend, wide: bool) -> list[Tensor]:
        x = [(t.double() if wide else t).requires_grad_() for t in (t.detach() for t in given)]
        o = attend(*x[:3], **{**options, **({"attn_mask": x[3]} if x[3:] else {})})
        do = rnd(*o.shape, seed=9).to(dtype).to(o.dtype)
        return [o.detach(), *torch.autograd.grad(o, x, do)]

    ours, exact, theirs = run(ns.sdpa, False), run(math, True), run(math, False)
    for name, got, want, low in zip("oqkvb", ours, exact, theirs, strict=False):
        assert got.shape == want.shape, name
        assert got.dtype == dtype
        top = float(want.abs().max()) if want.numel() else 0.0
        room = 1e-12 * (1 + top)
        if dtype != torch.float64:
            loss = float((low.double() - want).abs().max()) if want.numel() else 0.0
            room = 4 * loss + 2 * torch.finfo(dtype).eps * top
        assert torch.allclose(got.double(), want, atol=room, rtol=0, equal_nan=True), name


def qkv(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors of the given shapes; those of one shape are filled in: k like q, v like k."""
    shapes = (*shapes, *(shapes[-1],) * (3 - len(shapes)))
    return [rnd(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]


PLAIN = ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 3))
SHAPES = {
    "plain": PLAIN,
    "2-D": ((5, 8), (7, 8), (7, 3)),
    "3-D": ((4, 5, 8), (4, 7, 8)),
    "5-D": ((3, 2, 4, 5, 8), (3, 2, 4, 7, 8)),
    "more queries": ((2, 4, 9, 8), (2, 4, 5, 8)),
    "k has fewer axes": ((2, 4, 5, 8), (4, 7, 8)),
    "k has two axes": ((2, 4, 5, 8), (7, 8)),
    "q has two axes": ((5, 8), (2, 4, 7, 8)),
    "one batch entry of k": ((2, 4, 5, 8), (1, 4, 7, 8)),
    "one batch entry of q": ((1, 4, 5, 8), (2, 4, 7, 8)),
    "v alone has a batch": ((4, 5, 8), (4, 7, 8), (3, 4, 7, 8)),
    "one key head": ((2, 4, 5, 8), (2, 1, 7, 8)),
    "one key head, more of v": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 4, 7, 8)),
    "one query head": ((2, 1, 5, 8), (2, 4, 7, 8)),
    "crossed batch axes": ((3, 1, 4, 5, 8), (1, 2, 1, 7, 8), (3, 2, 1, 7, 8)),
    "no key": ((2, 4, 5, 8), (2, 4, 0, 8)),
    "no query": ((2, 4, 0, 8), (2, 4, 7, 8)),
    "no batch": ((0, 4, 5, 8), (0, 4, 7, 8)),
    "no head": ((2, 0, 5, 8), (2, 0, 7, 8)),
    "no width": ((2, 4, 5, 0), (2, 4, 7, 0), (2, 4, 7, 3)),
    "no width of v": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 0)),
}
GROUPED = {
    "two key heads": ((2, 4, 5, 8), (2, 2, 7, 8)),
    "k 2, v 1": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 1, 7, 8)),
    "k 4, v 6": ((12, 5, 8), (4, 7, 8), (6, 7, 8)),
    "equal": PLAIN,
    "broadcast": ((3, 2, 4, 5, 8), (3, 1, 2, 7, 8), (1, 2, 2, 7, 8)),
}
MASKS = [(), (7,), (5, 7), (5, 1), (1, 7), (1, 5, 7), (4, 1, 7), (2, 4, 5, 7), (2, 1, 1, 7)]
MASKS_5D = [(3, 1, 4, 5, 7), (1, 2, 1, 5, 7), (2, 1, 5, 7), (3, 1, 1, 1, 7)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, is_causal: bool) -> None:
    agree(*qkv(*SHAPES[name]), is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_heads(name: str, is_causal: bool) -> None:
    agree(*qkv(*GROUPED[name]), is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("shape", MASKS)
def test_masks_broadcast(shape: tuple[int, ...], additive: bool) -> None:
    mask = rnd(*shape, seed=5, dtype=torch.float64)
    mask = mask if additive else mask > -0.3
    agree(*qkv(*PLAIN), attn_mask=mask)
    agree(*qkv(*GROUPED["two key heads"]), attn_mask=mask, enable_gqa=True)
    agree(*qkv(*SHAPES["one key head"]), attn_mask=mask)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("shape", MASKS_5D)
def test_masks_broadcast_over_many_batch_axes(shape: tuple[int, ...], additive: bool) -> None:
    mask = rnd(*shape, seed=5, dtype=torch.float64)
    agree(*qkv(*SHAPES["5-D"]), attn_mask=mask if additive else mask > -0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    x = qkv((2, 4, 37, 16), (2, 4, 53, 16))
    agree(*x, dtype=dtype)
    agree(*x, dtype=dtype, is_causal=True)
    agree(*x, dtype=dtype, attn_mask=rnd(37, 53, seed=6) > 0)
    agree(*x, dtype=dtype, attn_mask=rnd(37, 53, seed=6))


@pytest.mark.parametrize("scale", [0.0, -2.0, 1, 0.3, torch.tensor(0.25)])
def test_scale(scale: Any) -> None:
    agree(*qkv(*PLAIN), scale=scale)


def test_an_endless_scale_gives_nan_as_in_torch() -> None:
    q, k, v = qkv(*PLAIN)
    for scale in (INF, -INF, float("nan")):
        assert ns.sdpa(q, k, v, scale=scale).isnan().all()
        assert math(q, k, v, scale=scale).isnan().all()


def test_rows_that_see_nothing_are_zero() -> None:
    q, k, v = qkv(*PLAIN)
    hidden = torch.ones(5, 7, dtype=torch.bool)
    hidden[2] = False
    endless = torch.zeros(5, 7, dtype=torch.float64).masked_fill(~hidden, -INF)
    endless[0, 3:] = -INF
    agree(q, k, v, attn_mask=hidden)
    agree(q, k, v, attn_mask=endless)
    assert not ns.sdpa(q, k, v, attn_mask=endless)[..., 2, :].any()


def test_an_additive_mask_may_be_float32() -> None:
    q, k, v = (t.bfloat16() for t in qkv(*PLAIN))
    mask = rnd(5, 7, seed=5)
    mask[1] = LOWEST  # in bfloat16 it would be -inf, and hide the row
    want = math(q.double(), k.double(), v.double(), attn_mask=mask.double())
    got = ns.sdpa(q, k, v, attn_mask=mask).double()
    # one rounding of weights and one of the output, each 2^-8, of values that are at most max |v|
    assert (got - want).abs().max() <= 2 * 2**-8 * v.double().abs().max()


@pytest.mark.parametrize("mask", [None, torch.float32, torch.bfloat16, torch.bool])
def test_autocast_decides_the_dtype(mask: torch.dtype | None) -> None:
    q, k, v = (t.float() for t in qkv(*PLAIN))
    given = None if mask is None else torch.ones(5, 7).to(mask)
    with torch.autocast("cpu", torch.bfloat16):
        want = F.scaled_dot_product_attention(q, k.bfloat16(), v, attn_mask=given)
        got = ns.sdpa(q, k.bfloat16(), v, attn_mask=given)
    assert got.dtype == want.dtype == torch.bfloat16
    assert (got.float() - want.float()).abs().max() <= 2 * 2**-8 * v.abs().max()


# ---- learned on an H200, where torch's kernels fail ----------------------------------------------


def test_a_first_block_of_the_lowest_number() -> None:
    q, k, v = qkv((1, 2, 70, 16), (1, 2, 150, 16))
    mask = torch.zeros(70, 150)
    mask[:, :128] = LOWEST
    agree(q, k, v, attn_mask=mask)
    agree(q, k, v, dtype=torch.float32, attn_mask=mask)


def test_a_transposed_value() -> None:
    q, k, v = qkv(*PLAIN)
    agree(q, k, v.transpose(-1, -2).contiguous().transpose(-1, -2), is_causal=True)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_whose_last_stride_is_not_one(additive: bool) -> None:
    wide = rnd(7, 2, 5, seed=5, dtype=torch.float64)
    for mask in (wide[:, 1].T, wide[:1, 0].T.expand(5, 7), wide[:, :1].transpose(0, 2).squeeze(1)):
        assert mask.stride(-1) != 1
        agree(*qkv(*PLAIN), attn_mask=mask if additive else mask > 0)


def test_an_expanded_mask_that_is_a_leaf_has_a_gradient_for_each_element() -> None:
    q, k, v = qkv(*PLAIN)
    found = []
    for attend in (ns.sdpa, math):
        mask = torch.zeros(1, 7, dtype=torch.float64).expand(5, 7).requires_grad_()
        found.append(torch.autograd.grad(attend(q, k, v, attn_mask=mask).pow(2).sum(), mask)[0])
    assert torch.allclose(*found, atol=1e-12, rtol=0)


# ---- errors -------------------------------------------------------------------------------------


def _bad() -> Iterator[tuple[str, str, Callable[[Attend], Tensor]]]:
    """(what is wrong, our sentence, the call); the call is made with both functions."""
    q, k, v = (t.float() for t in qkv(*PLAIN))
    one, keep = torch.ones(8), torch.ones(5, 7, dtype=torch.bool)
    lower = importlib.import_module("torch.nn.attention.bias").causal_lower_right
    axes, mixed = "at least two axes", "q, k and v must share one dtype"
    lead, shape = "do not broadcast to one shape", "attn_mask does not broadcast"
    kind, heads = "A mask is bool, or in float32", "query heads must be a whole multiple"
    computed = "Attention is computed in"
    yield "1-D query", axes, lambda f: f(one, k, v)
    yield "1-D all", axes, lambda f: f(one, one, one)
    yield "0-D", axes, lambda f: f(torch.tensor(1.0), k, v)
    yield "dtype of k", mixed, lambda f: f(q, k.double(), v)
    yield "dtype of v", mixed, lambda f: f(q, k, v.double())
    yield "int", computed, lambda f: f(q.int(), k.int(), v.int())
    yield "bool", computed, lambda f: f(q.bool(), k.bool(), v.bool())
    yield "complex", computed, lambda f: f(q.cfloat(), k.cfloat(), v.cfloat())
    yield "float8", computed, lambda f: f(*(t.to(torch.float8_e4m3fn) for t in (q, k, v)))
    yield "device", "must be on one device", lambda f: f(q, k.to("meta"), v)
    yield "sparse", "Attention reads dense tensors", lambda f: f(q, k.to_sparse(), v)
    yield "D", "q and k disagree on D", lambda f: f(q, k[..., :6], v)
    yield "N", "k and v disagree on their heads or on N", lambda f: f(q, k, v[..., :6, :])
    yield "batch", lead, lambda f: f(q, k.repeat(2, 1, 1, 1)[:3], v.repeat(2, 1, 1, 1)[:3])
    yield "batch of v", lead, lambda f: f(q, k, v.repeat(2, 1, 1, 1)[:3])
    yield "heads", lead, lambda f: f(q, k[:, :3], v[:, :3])
    yield "groups without enable_gqa", lead, lambda f: f(q, k[:, :2], v[:, :2])
    yield "3 of 4", heads, lambda f: f(q, k[:, :3], v[:, :3], enable_gqa=True)
    yield "v 3 of 4", heads, lambda f: f(q, k, v[:, :3], enable_gqa=True)
    yield "more key heads", heads, lambda f: f(q[:, :2], k, v, enable_gqa=True)
    yield (
        "gqa 2-D",
        "enable_gqa needs an axis of heads",
        lambda f: f(q[0, 0], k[0, 0], v[0, 0], enable_gqa=True),
    )
    yield "mask int", kind, lambda f: f(q, k, v, attn_mask=keep.int())
    yield "mask complex", kind, lambda f: f(q, k, v, attn_mask=keep.cfloat())
    yield "mask wider", kind, lambda f: f(q, k, v, attn_mask=keep.double())
    yield "mask narrower", kind, lambda f: f(q, k, v, attn_mask=keep.half())
    half = (q.half(), k.half(), v.half())
    yield "mask bfloat16", kind, lambda f: f(*half, attn_mask=keep.bfloat16())
    for bad in ((4, 7), (5, 8), (2, 5, 7), (3, 4, 5, 7), (1, 2, 4, 5, 7)):
        yield f"mask {bad}", shape, lambda f, bad=bad: f(q, k, v, attn_mask=torch.ones(bad) > 0)
    yield "mask with more rows", shape, lambda f: f(q[:, :, :1], k, v, attn_mask=keep)
    yield "mask 3-D", shape, lambda f: f(q[0, 0], k[0, 0], v[0, 0], attn_mask=keep[None])
    yield "mask device", "must be on one device", lambda f: f(q, k, v, attn_mask=keep.to("meta"))
    yield "mask sparse", "reads dense tensors", lambda f: f(q, k, v, attn_mask=keep.to_sparse())
    yield (
        "mask and is_causal",
        "either a mask or is_causal=True",
        lambda f: f(q, k, v, attn_mask=keep, is_causal=True),
    )
    yield (
        "CausalBias and is_causal",
        "CausalBias should not be used with causal=True",
        lambda f: f(q, k, v, attn_mask=lower(5, 7), is_causal=True),
    )
    yield "CausalBias sizes", shape, lambda f: f(q, k, v, attn_mask=lower(3, 7))
    yield "CausalBias 1-D", axes, lambda f: f(one, one, one, attn_mask=lower(5, 7))
    yield "CausalBias dtype", mixed, lambda f: f(q, k.double(), v, attn_mask=lower(5, 7))
    yield "p above 1", "dropout_p is a probability", lambda f: f(q, k, v, dropout_p=1.5)
    yield "p a word", "dropout_p is a number", lambda f: f(q, k, v, dropout_p="x")
    yield "scale a word", "scale is a number", lambda f: f(q, k, v, scale="x")
    yield "list", "query is not a tensor", lambda f: f([1.0], k, v)
    yield "None", "value is not a tensor", lambda f: f(q, k, None)
    yield "mask a bool", "attn_mask is not a tensor", lambda f: f(q, k, v, attn_mask=True)
    yield "is_causal 1", "is_causal is True or False", lambda f: f(q, k, v, is_causal=1)
    yield "enable_gqa None", "enable_gqa is True or", lambda f: f(q, k, v, enable_gqa=None)


BAD = {name: (sentence, call) for name, sentence, call in _bad()}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_of_the_types_that_torch_raises(name: str) -> None:
    sentence, call = BAD[name]
    with pytest.raises(Exception) as theirs:  # noqa: PT011  (any: it says what ours has to be)
        call(math)
    with pytest.raises(theirs.type, match=re.escape(sentence)) as ours:
        call(ns.sdpa)
    assert isinstance(ours.value, ns.ArgumentError | ns.UnsupportedError)
    first, *values, attempt = str(ours.value).splitlines()
    assert first.endswith(".")
    assert values
    assert attempt.startswith("  Try: ")


@pytest.mark.parametrize("p", [-0.1, float("nan")])
def test_a_rate_that_is_none_is_refused(p: float) -> None:
    with pytest.raises(RuntimeError, match="dropout_p is a probability"):
        ns.sdpa(*qkv(*PLAIN), dropout_p=p)  # torch's math path ignores it, its kernels raise


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    x = torch.nested.nested_tensor([torch.ones(4, 5, 8), torch.ones(4, 6, 8)])
    jagged = torch.nested.nested_tensor([torch.ones(5, 8)], layout=torch.jagged)
    for bad in ((x, x, x), (jagged, jagged, jagged), (torch.ones(2, 4, 5, 8), x, x)):
        with pytest.raises(ns.UnsupportedError, match="Nested tensors are not read here"):
            ns.sdpa(*bad)


def test_the_signature_is_torchs() -> None:
    doc = F.scaled_dot_product_attention.__doc__ or ""
    said = re.search(r"scaled_dot_product_attention\((.*?)\) -> Tensor", doc, re.DOTALL)
    assert said
    want = [word.split("=")[0].strip() for word in said[1].split(",")]
    assert list(inspect.signature(ns.sdpa).parameters) == want
