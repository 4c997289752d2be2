"""Tracers: the operators are well made, and compiled, exported and fake calls are what eager
ones are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import helpers
import nosquare as ns
from helpers import case, check, rnd
from nosquare.problem import Inputs, Spec


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    helpers.force_tiles(monkeypatch)


def inputs(grad: bool = True, n: int = 21) -> list[Tensor]:
    shapes = [(2, 4, 13, 8), (2, 2, n, 8), (2, 2, n, 8)]
    return [rnd(*s, seed=i).requires_grad_(grad) for i, s in enumerate(shapes)]


def token_major(t: Tensor) -> Tensor:
    return t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(t.requires_grad)


# ---- opcheck ------------------------------------------------------------------------------------

FEATURES: dict[str, tuple[Spec, dict[str, Any]]] = {
    "plain": (Spec(), {}),
    "causal": (Spec("causal(end)"), {}),
    "causal(start)": (Spec("causal(start)"), {}),
    "lengths": (Spec("lengths(t0)&causal(end)"), {"arrays": (torch.tensor([20, 0]),)}),
    "bias": (Spec(), {"bias": rnd(4, 1, 21)}),
    "everything": (
        Spec("window(before=5,after=None)", 0.3, 2.0, 0.25, (1, 2, 3, 4)),
        {
            "bias": rnd(13, 21).requires_grad_(),
            "sinks": rnd(4).requires_grad_(),
            "alibi": torch.ones(4),
            "seed": torch.tensor(3),
        },
    ),
}


def flat(spec: Spec, x: Inputs, grads: str) -> tuple[Any, ...]:
    return (*x[:9], list(x.arrays), *spec[:4], list(spec.offsets), *spec[5:], grads)


@pytest.mark.parametrize("layout", [lambda t: t, token_major], ids=["heads first", "token major"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=helpers.name_of)
@pytest.mark.parametrize("name", FEATURES)
def test_forward_operator(
    name: str, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    spec, more = FEATURES[name]
    q, k, v = (layout(t.detach().to(dtype).requires_grad_()) for t in inputs())
    args = flat(spec, Inputs(q, k, v, **more), "qkvbs" if name == "everything" else "qkv")
    torch.library.opcheck(torch.ops.nosquare.forward.default, args)


@pytest.mark.parametrize("name", FEATURES)
def test_backward_operator(name: str) -> None:
    spec, more = FEATURES[name]
    x = Inputs(
        *inputs(False), **{n: t.detach() if isinstance(t, Tensor) else t for n, t in more.items()}
    )
    grads = "qkvbs" if name == "everything" else "kv"
    o, lse = torch.ops.nosquare.forward(*flat(spec, x, grads))
    saved = (o, lse, torch.ones_like(o), None if name == "causal" else torch.ones_like(lse))
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.nosquare.backward.default, (*saved, *flat(spec, x, grads)), test_utils=tests
    )


@pytest.mark.parametrize("shape", ["packed", "M=1", "H=1", "empty"])
def test_operator_in_odd_shapes(shape: str) -> None:
    q, k, v = inputs()
    cu = None
    if shape == "packed":
        cu = torch.tensor([0, 4, 13])
        q, k, v = rnd(13, 4, 8), rnd(13, 2, 8), rnd(13, 2, 8)
    elif shape == "M=1":
        q = token_major(q.detach()[:, :, :1].requires_grad_())
    elif shape == "H=1":
        q, k, v = (token_major(t.detach()[:, :1].requires_grad_()) for t in (q, k, v))
    else:
        k, v = k.detach()[:, :, :0].requires_grad_(), v.detach()[:, :, :0].requires_grad_()
    x = Inputs(*(t.detach().requires_grad_() for t in (q, k, v)), cu_q=cu, cu_k=cu)
    torch.library.opcheck(torch.ops.nosquare.forward.default, flat(Spec(), x, "qkv"))


# ---- torch.compile ------------------------------------------------------------------------------


def counted(fn: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Any]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(fn, backend=counter, fullgraph=True, **options), counter


def same(compiled: Callable[..., Tensor], eager: Callable[..., Tensor], *args: Any) -> None:
    """Equal to the bit, forward and backward: both run the same kernels with the same plan."""
    results = []
    for fn in (compiled, eager):
        own = [
            a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args
        ]
        out = fn(*own)
        leaves = [a for a in own if isinstance(a, Tensor) and a.requires_grad]
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)] if leaves else [out])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_over_lengths_with_two_frames() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ns.attention(q * 1.5, k, v, mask=ns.Causal() & ns.Window(9, None)) + 1

    compiled, counter = counted(layer)
    for n in (13, 21, 34, 55, 20):
        same(compiled, layer, *inputs(n=n))
    assert counter.frame_count <= 2
    same(compiled, layer, *inputs(n=1))  # 0 and 1 are special to dynamo itself: one more frame
    assert counter.frame_count <= 3


def test_mask_arrays_of_any_values() -> None:
    """The arrays of a mask are inputs of the graph: new values need no new graph."""

    def layer(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, keep: Tensor) -> Tensor:
        return ns.attention(q, k, v, mask=ns.Lengths(lengths) & (ns.Causal() | ns.Dense(keep)))

    compiled, counter = counted(layer)
    for s in range(4):
        lengths = torch.tensor([s * 5, 21 - s])
        same(compiled, layer, *inputs(), lengths, rnd(13, 21, seed=s) > 0)
    assert counter.frame_count == 1


def test_dropout_seeds() -> None:
    """Seeds as tensors never need a new graph; seeds as ints at most one more."""

    def layer(q: Tensor, k: Tensor, v: Tensor, seed: Any) -> Tensor:
        return ns.attention(q, k, v, dropout=ns.Dropout(0.3, seed))

    for make in (torch.tensor, int):
        torch._dynamo.reset()
        compiled, counter = counted(layer)
        for seed in (3, 4, 1 << 40, -7):
            same(compiled, layer, *inputs(), make(seed))
        assert counter.frame_count <= (1 if make is torch.tensor else 2)


def test_all_options_under_compile() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        s = ns.attention_state(
            q, k, v, bias=bias, sinks=sinks, softcap=2.0, scale=0.3, alibi=torch.ones(4) / 8
        )
        return s.o.sum(-1) + s.lse

    compiled, _ = counted(layer)
    same(compiled, layer, *inputs(), rnd(13, 21).requires_grad_(), rnd(4).requires_grad_())


def test_packed_calls_under_compile() -> None:
    def layer(q: Tensor, k: Tensor, cu: Tensor) -> Tensor:
        return ns.attention_varlen(q, k, k, cu, cu, mask=ns.Causal())

    compiled, counter = counted(layer)
    for ends in ([0, 4, 13], [0, 0, 13], [0, 13, 13]):
        args = rnd(13, 4, 8).requires_grad_(), rnd(13, 2, 8, seed=1).requires_grad_()
        same(compiled, layer, *args, torch.tensor(ends))
    assert counter.frame_count == 1


def test_merge_under_compile() -> None:
    def split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        halves = [ns.attention_state(q, k[:, :, j], v[:, :, j]) for j in (slice(9), slice(9, None))]
        return ns.merge(*halves).o

    compiled, _ = counted(split)
    same(compiled, split, *inputs())


@pytest.mark.parametrize("subset", range(8))
def test_any_subset_requires_grad(subset: int) -> None:
    compiled, _ = counted(lambda q, k, v: ns.attention(q, k, v, mask=ns.Causal()))
    args = [t.detach().requires_grad_(bool(subset >> i & 1)) for i, t in enumerate(inputs())]
    same(compiled, lambda q, k, v: ns.attention(q, k, v, mask=ns.Causal()), *args)


def test_errors_under_compile_are_ours() -> None:
    compiled = torch.compile(
        lambda q, k, v: ns.attention(q, k, v, softcap=-1.0), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="softcap must be positive"):
        compiled(*inputs())


# ---- export, fake, autocast, inference ----------------------------------------------------------


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ns.attention(q, k, v, mask=ns.Causal())


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_length(strict: bool) -> None:
    n = torch.export.Dim("n", min=2, max=4096)
    shapes = {"q": None, "k": {2: n}, "v": {2: n}}
    program = torch.export.export(
        Layer(), tuple(inputs(False)), dynamic_shapes=shapes, strict=strict
    )
    assert any("nosquare.forward" in str(node.target) for node in program.graph.nodes)
    for length in (13, 40, 100):
        args = inputs(False, length)
        assert torch.equal(program.module()(*args), Layer()(*args))


def test_fake_tensors() -> None:
    """Shapes, dtypes, devices and strides without any arithmetic."""
    with FakeTensorMode():
        q = torch.empty(2, 13, 4, 8, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        k, v = torch.empty(2, 2, 21, 8, dtype=torch.bfloat16), torch.empty(2, 2, 21, 5).bfloat16()
        s = ns.attention_state(q, k, v, mask=ns.Causal(), dropout=ns.Dropout(0.1, 3))
        assert (s.o.shape, s.o.dtype) == ((2, 4, 13, 5), torch.bfloat16)
        assert s.o.transpose(1, 2).is_contiguous()
        assert (s.lse.shape, s.lse.dtype) == ((2, 4, 13), torch.float32)
        s.o.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape


def test_meta_tensors() -> None:
    q, k, v = (t.to("meta") for t in inputs(False))
    o = ns.attention(q, k, v, mask=ns.Causal())
    assert (o.device.type, o.shape) == ("meta", (2, 4, 13, 8))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool) -> None:
    """As torch's own attention: computed in the autocast dtype, float64 left alone, gradients
    wide."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ns.attention(q, k, v)

    fn = counted(layer)[0] if compiled else layer
    q, k, v = inputs()
    o = fn(q, k, v)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, ns.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(o.sum(), (q, k, v)))
    assert layer(*(t.double() for t in (q, k, v))).dtype == torch.float64
    mixed = layer(q, k.bfloat16(), v.half())
    assert mixed.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    args = inputs()
    want = ns.attention(*args)
    with mode():
        o = ns.attention(*args)
        assert not o.requires_grad
        assert torch.equal(o, want)
        assert torch.equal(torch.compile(ns.attention, backend="aot_eager")(*args), want)


def test_inference_tensors_can_be_used_later() -> None:
    with torch.inference_mode():
        k = rnd(2, 2, 21, 8)
    q = inputs()[0].detach()
    assert ns.attention(q, k, k).shape == q.shape


def test_parameters_and_subclasses() -> None:
    q, k, v = inputs()
    want = ns.attention(q, k, v)
    assert torch.equal(ns.attention(torch.nn.Parameter(q.detach()), k, v), want)

    class Tagged(Tensor):
        pass

    for which in itertools.product([False, True], repeat=3):
        args = [t.as_subclass(Tagged) if w else t for t, w in zip((q, k, v), which, strict=True)]
        assert torch.equal(ns.attention(*args).as_subclass(Tensor), want)


def test_compiled_against_the_oracle() -> None:
    def both(**x: Any) -> tuple[Tensor, Tensor]:
        state = ns.attention_state(**x)
        return state.o, state.lse

    compiled, _ = counted(both)
    check(case(mask=ns.Causal()), lambda **x: ns.State(*compiled(**x)))
