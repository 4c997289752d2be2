"""The vocabulary that writes LLVM IR: its operators, its elementary functions, masks written by
their own keep()."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import nosquare as ns
from nosquare import bound
from nosquare.backends.llvm_cpu import elementary, pool
from nosquare.backends.llvm_cpu.call import Args, fill
from nosquare.backends.llvm_cpu.compiled import Code
from nosquare.backends.llvm_cpu.ir import Function, Module, Value
from nosquare.backends.llvm_cpu.target import Target, host
from nosquare.backends.llvm_cpu.visible import Place, visible
from nosquare.errors import UnsupportedError
from nosquare.inputs import Inputs, Spec
from nosquare.mask import KINDS
from nosquare.problem import Problem

ISAS = ["avx512", "avx2", "neon"]
ITEM = dict(block="ptr", item="i64", worker="i64")
Write = Callable[[Function, Value, Value], Value]


@pytest.fixture(params=ISAS)
def target(request: pytest.FixtureRequest) -> Target:
    """Each isa that this machine has."""
    try:
        return host(request.param)
    except UnsupportedError as e:
        pytest.skip(str(e).splitlines()[0])


def mapped(write: Write, target: Target, x: Tensor, kinds: tuple[str, str], out: Tensor) -> Tensor:
    """out = write(x), vector by vector, the last with a tail."""
    module, w = Module(), target.lanes
    f = module.function("map", x=f"{kinds[0]}*", y=f"{kinds[1]}*", n="i64")
    x_at, y_at, n = f.parameters
    with f.loop(0, n, w) as j:
        rest = f.tail(n - j, w)
        f.store(y_at + j, write(f, f.load(x_at + j, w, rest), f.splat(j, w) + f.iota(w)), rest)
    code = Code(str(module), target)
    words = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
    ctypes.CFUNCTYPE(None, *words)(code.address("map"))(x.data_ptr(), out.data_ptr(), x.numel())
    return out


def test_the_example_of_the_docstring(target: Target) -> None:
    module, w = Module(), target.lanes
    f = module.function("dot", a="f32*", b="f32*", n="i64", out="f32*")
    a, b, n, out = f.parameters
    total = f.variable(f.splat(0.0, w))
    with f.loop(0, n, w) as j:
        rest = f.tail(n - j, w)
        total.value = f.fma(f.load(a + j, w, rest), f.load(b + j, w, rest), total.value)
    f.store(out, f.reduce_add(total.value))
    code = Code(str(module), target)
    words = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p
    x, y, got = torch.randn(1003), torch.randn(1003), torch.zeros(1)
    dot = ctypes.CFUNCTYPE(None, *words)(code.address("dot"))
    dot(x.data_ptr(), y.data_ptr(), 1003, got.data_ptr())
    want, size = x.double() @ y.double(), x.double().abs() @ y.double().abs()
    assert abs(got.item() - want) <= 1003 * 2.0**-24 * size
    assert "Spill" not in code.assembly()


@pytest.mark.parametrize("name", ["exp2", "tanh"])
def test_elementary_functions(name: str, target: Target) -> None:
    """Within the error their docstrings promise, and exact where those say so."""
    special = torch.tensor([0.0, -1.0, -126.0, 100.0, -126.5, -1e30, -torch.inf, torch.nan])
    x = torch.cat([special, torch.linspace(-126, 12, 100003), torch.randn(5000)])
    got = mapped(
        lambda f, v, _: getattr(elementary, name)(f, v),
        target,
        x,
        ("f32", "f32"),
        x.new_empty(x.shape),
    )
    want = getattr(torch, name)(x.double())
    inside = x >= -126
    allowed = 2.0**-22 if name == "exp2" else 4 * 2.0**-23
    assert (got - want)[inside].abs().le(allowed * want.abs()[inside]).all()
    first = [1, 0.5, 2.0**-126, 2.0**100, 0, 0, 0] if name == "exp2" else [0]
    assert got[: len(first)].tolist() == first
    assert got[7].isnan()


def test_bfloat16_and_float16_round_as_torch_does(target: Target) -> None:
    x = torch.cat([torch.randn(4000), torch.tensor([torch.nan, torch.inf, 3.39e38, 65520.0])])
    x = torch.cat([x, (torch.arange(2000).float() + 0.5) * 2.0**-9])  # halfway between two
    for dtype, kind in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
        out = torch.empty(x.shape, dtype=dtype)
        got = mapped(lambda f, v, _: v, target, x, ("f32", kind), out)
        assert torch.equal(got.nan_to_num(nan=7.0), x.to(dtype).nan_to_num(nan=7.0))
        back = mapped(lambda f, v, _: v, target, got, (kind, "f32"), torch.empty(x.shape))
        assert torch.equal(back.nan_to_num(nan=7.0), got.float().nan_to_num(nan=7.0))


OPERATORS: dict[str, Callable[..., object]] = {
    "+": lambda x, j: x + j * 3 - (7 - x),
    "bits": lambda x, j: ((x ^ j) & 255) | (x << 2),
    "shift": lambda x, j: (x & 0x7FFFFFFF) >> 3,
    "division": lambda x, j: (x * x) // 5 + (x * x) % 7,
    "order": lambda x, j: (x < j) & ~(x == 3) | (x >= 90) & (x != 95) & (x <= 97) | (x > 98),
    "negative": lambda x, j: -x + ~j,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_mean_what_they_mean_in_torch(name: str, target: Target) -> None:
    x = torch.randint(-50, 100, (203,), dtype=torch.int32)
    j = torch.arange(203, dtype=torch.int32)
    want = OPERATORS[name](x, j)
    assert isinstance(want, Tensor)
    kind = "bool" if want.dtype == torch.bool else "i32"
    out = torch.zeros(203, dtype=want.dtype)
    got = mapped(lambda f, v, at: OPERATORS[name](v, at.to("i32")), target, x, ("i32", kind), out)  # type: ignore[arg-type,return-value]
    assert torch.equal(got, want)


def test_a_value_is_no_truth() -> None:
    f = Module().function("f", n="i64")
    with pytest.raises(TypeError, match="known when the kernel runs"):
        bool(f.parameters[0] == 3)


def test_without_llvmlite_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    host.cache_clear()
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    try:
        with pytest.raises(UnsupportedError, match="llvmlite, which is not installed"):
            host()
    finally:
        host.cache_clear()


# ---- masks ----

B, H, M, N = 2, 4, 7, 37
MASKS = {
    "full": ns.Full(),
    "causal": ns.Causal(),
    "causal-start": ns.Causal("start"),
    "window": ns.Window(5, 2),
    "prefix": ns.Prefix(9),
    "lengths": ns.Lengths(torch.tensor([30, 11])),
    "documents": ns.Documents(
        torch.arange(B * M).reshape(B, M) % 3, (torch.arange(N) % 3).to(torch.uint8)
    ),
    "dense": ns.Dense(torch.arange(B * H * M * N).reshape(B, H, M, N) % 3 == 0),
    "dense-strided": ns.Dense((torch.arange(N * M).reshape(N, M) % 5 < 2).T),
    "dense-rows": ns.Dense((torch.arange(B * M) % 3 > 0).reshape(B, 1, M, 1)),
    "blocks": ns.BlockSparse(torch.arange(H * 2 * 10).reshape(H, 2, 10) % 3 == 0, 4),
}
MASKS["prefix-lm"] = MASKS["causal"] | MASKS["prefix"]
MASKS["nested"] = (MASKS["window"] | MASKS["dense"]) & MASKS["lengths"] & MASKS["causal"]
MASKS["arrays"] = MASKS["documents"] | MASKS["blocks"]


def shown(target: Target, mask: ns.Mask) -> Tensor:
    """The mask as its emitted code sees it."""
    q, k = torch.randn(B, H, M, 8), torch.randn(B, 2, N, 8)
    x = Inputs(q, k, k, arrays=mask.tensors)
    filled = fill(Problem.of(x, Spec(mask=str(mask))), x)
    module, w = Module(), target.lanes
    f = module.function("show", **ITEM)
    block, item, _ = f.parameters
    args = Args(f, block, filled.form)
    out = torch.zeros(B, H, M, N, dtype=torch.bool)
    filled.call.work = out.data_ptr()
    with f.loop(0, args.M) as i, f.loop(0, args.N, w) as j:
        rest = f.tail(args.N - j, w)
        place = Place(item // args.Hq, item % args.Hq, i, j, w, rest)
        seen = visible(f, args, filled.form.mask, place)
        f.store(args.work.pointing_at("bool") + ((item * args.M + i) * args.N + j), seen, rest)
    code = Code(str(module), target)
    pool.run(code.address("show"), filled.address, B * H, 1)
    return out


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_emitted_from_its_own_keep(name: str, target: Target) -> None:
    want = bound.visible(MASKS[name], M, N, H, (B,))
    assert torch.equal(shown(target, MASKS[name]), want)


def test_every_kind_of_mask_is_among_them() -> None:
    kinds = {type(leaf) for mask in MASKS.values() for leaf in mask.leaves}
    assert kinds == set(KINDS.values())
