"""llvm_cpu, backward: every gradient and feature, on every width of vector this machine has."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import nosquare as ns
from helpers import INF, NAN, Case, case, check, rnd
from nosquare.backends import BACKWARD
from nosquare.errors import UnsupportedError
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem

pytest.importorskip("llvmlite", reason="llvm_cpu generates code with llvmlite")
from nosquare.backends.llvm_cpu import call, elementary, grad_kernel, gradients, ir, target, yields
from nosquare.backends.llvm_cpu.compiled import Code
from nosquare.backends.llvm_cpu.grad_weights import Spec as Written

ISAS = ["neon"] if platform.machine() in ("arm64", "aarch64") else ["avx512", "avx2"]
Change = Callable[[gradients.Plan], gradients.Plan]


@pytest.fixture(params=ISAS)
def machine(request: pytest.FixtureRequest) -> target.Target:
    try:
        return target.host(request.param)
    except UnsupportedError:
        pytest.skip(f"this processor has no {request.param}")


class Pulled(torch.autograd.Function):
    """o and lse of torch_any, gradients of the kernel under test."""

    @staticmethod
    def forward(
        ctx: Any, options: dict[str, Any], how: tuple[Any, Change], *tensors: Tensor
    ) -> Any:
        mask, drop = options.get("mask") or ns.Full(), options.get("dropout")
        seed = drop.seed_tensor() if drop else None
        q, k, v, bias, sinks = tensors
        alibi = options.get("alibi")
        x = Inputs(q, k, v, bias, sinks, alibi, seed, arrays=mask.tensors)
        spec = Spec(str(mask), options.get("scale"), options.get("softcap"))
        if drop:
            spec = spec._replace(p=drop.p, offsets=drop.offsets)
        wanted = "".join(c for c, t in zip("qkvbs", tensors, strict=True) if t is not None)
        ctx.problem, ctx.x, ctx.how = Problem.of(x, spec, wanted), x, how
        more = {"bias": bias, "sinks": sinks, **options}
        state = ns.attention_state(q, k, v, backend="torch_any", **more)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(state.o, state.lse)
        return state.o, state.lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        machine, change = ctx.how
        plan = change(gradients.plan(ctx.problem, machine))
        found, ran = gradients.backward(ctx.problem, plan, ctx.x, ctx.saved_tensors, (do, dlse))
        assert ran.workspace_bytes == gradients.workspace_bytes(ctx.problem, plan)
        return None, None, *found


def by_kernel(machine: target.Target, change: Change = lambda plan: plan) -> Callable[..., Any]:
    """Attention whose backward is the kernel's; `change` may alter its plan."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> ns.State:
        tensors = (q, k, v, options.pop("bias", None), options.pop("sinks", None))
        return ns.State(*Pulled.apply(options, (machine, change), *tensors))

    return attend


def grads_of(c: Case, machine: target.Target, change: Change = lambda p: p) -> list[Tensor]:
    mine = {n: t.detach().requires_grad_() for n, t in c.tensors().items()}
    got = by_kernel(machine, change)(**{**c.options, **mine})
    outs = [got.o, got.lse]
    return list(torch.autograd.grad(outs, list(mine.values()), list(c.cotangents())))


# every tail: of rows (6), tiles (48), panels (64) and vectors; groups of heads; one of each
SIZES = [
    {"m": 1, "n": 1, "d": 1},
    {"m": 48, "n": 64, "d": 64},
    {"m": 49, "n": 65, "d": 17, "e": 33},
    {"m": 13, "n": 200, "d": 7, "e": 130},
    {"m": 131, "n": 150, "d": 72, "hq": 6, "hk": 2},
    {"m": 5, "n": 40, "d": 300, "e": 260, "hq": 2, "hk": 1},
]
MASKS = [
    None,
    ns.Causal(),
    ns.Causal("start"),
    ns.Window(20, 5),
    ns.Causal() | ns.Prefix(70),
    ns.Lengths(torch.tensor([30, 70])),
    ns.Documents(torch.arange(100) // 30, torch.arange(110) // 30) & ns.Causal(),
    ns.Dense(rnd(4, 100, 110, seed=5) > 0.3),
    ns.BlockSparse(rnd(4, 7, 7, seed=6) > 0.3, 16),
]


@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(machine: target.Target, sizes: dict[str, int], mask: ns.Mask | None) -> None:
    check(case(mask=mask, **sizes), by_kernel(machine))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_short_types(machine: target.Target, sizes: dict[str, Any], dtype: torch.dtype) -> None:
    check(case(mask=ns.Causal(), dtype=dtype, **sizes), by_kernel(machine))


def test_any_strides_of_the_cotangent(machine: target.Target) -> None:
    c = case((2, 3), 2, 1, m=20, n=70, e=24, mask=ns.Causal())
    do, dlse = c.cotangents()
    found = []
    for given in (do, do.transpose(-1, -2).contiguous().transpose(-1, -2)):
        mine = [t.detach().requires_grad_() for t in (c.q, c.k, c.v)]
        got = by_kernel(machine)(*mine, **c.options)
        found.append(torch.autograd.grad([got.o, got.lse], mine, [given, dlse]))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("mask", MASKS[3:], ids=lambda m: type(m).__name__)
def test_masks(machine: target.Target, mask: ns.Mask) -> None:
    check(case(mask=mask, m=100, n=110), by_kernel(machine))


BIASES = [(2, 4, 70, 100), (2, 1, 70, 100), (4, 70, 100), (70, 100), (70, 1), (1, 100), (4, 1, 1)]
FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0, "mask": ns.Causal()},
    "alibi": {"alibi": rnd(4, seed=7).abs(), "mask": ns.Causal()},
    "sinks": {"sinks": rnd(4, seed=8)},
    "sinks of entries": {"sinks": rnd(2, 4, seed=8), "softcap": 3.0},
    "dropout": {"dropout": ns.Dropout(0.3, 7)},
    "dropout of a shard": {"dropout": ns.Dropout(0.3, 7, (1, 2, 3, 5)), "mask": ns.Causal()},
    "scores beyond exp": {"scale": 300.0},
    **{f"bias {shape}": {"bias": rnd(*shape, seed=9), "softcap": 4.0} for shape in BIASES},
    "bias of -inf": {
        "bias": torch.where(rnd(70, 100, seed=9) > torch.arange(70)[:, None] // 40 * 9, 0.0, -INF)
    },
    "all": {
        **{"mask": ns.Causal() | ns.Prefix(3), "softcap": 5.0, "bias": rnd(4, 70, 100, seed=9)},
        **{"sinks": rnd(4, seed=8), "alibi": rnd(4, seed=7).abs()},
        "dropout": ns.Dropout(0.3, 7),
    },
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(machine: target.Target, name: str) -> None:
    check(case(m=70, n=100, **FEATURES[name]), by_kernel(machine))


@pytest.mark.parametrize("name", ["all", "dropout", "softcap", "bias (70, 100)"])
def test_features_in_bfloat16(machine: target.Target, name: str) -> None:
    check(case(m=70, n=100, dtype=torch.bfloat16, **FEATURES[name]), by_kernel(machine))


@pytest.mark.parametrize("low", [-3e38, float(torch.finfo(torch.float32).min)])
def test_a_bias_so_low_that_lse_has_no_digit_for_the_sum(
    machine: target.Target, low: float
) -> None:
    """p = exp(s - lse) would be 1 for each of 100 keys, so weights are divided by their sum."""
    c = case((1,), 1, 1, m=70, n=100, bias=torch.full((70, 1), low))
    do, _ = c.cotangents()
    dv = grads_of(c, machine)[2]
    mean = do.double().sum(-2, keepdim=True) / 100
    assert torch.allclose(dv.double(), mean.expand_as(dv), rtol=1e-5, atol=1e-6)


def test_without_a_gradient_through_lse(machine: target.Target) -> None:
    check(case(m=70, n=100), by_kernel(machine), through_lse=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_nobody_sees_may_hold_nan(machine: target.Target, dtype: torch.dtype) -> None:
    """Queries without a key, keys without a query: NaN and infinity there change no bit elsewhere,
    and their own gradients are 0."""
    seen = torch.rand(130, 150) > 0.4
    seen[[0, 50, 51, 52, 53, 54, 55, 129]] = False  # single rows, and a whole group of 6
    seen[:, [3, 64, 149]] = False
    clean = case(m=130, n=150, d=33, dtype=dtype, mask=ns.Dense(seen), sinks=rnd(4, dtype=dtype))
    q, k, v = (t.clone() for t in (clean.q, clean.k, clean.v))
    q[..., 50, :], q[..., 129, 0], k[..., 64, :], k[..., 149, 1] = NAN, INF, NAN, INF
    v[..., 3, :], v[..., 149, 0] = NAN, -INF
    do, dlse = clean.cotangents()
    do[..., 0, :], do[..., 55, 0] = NAN, INF
    found = []
    for c in (clean, clean.with_(q=q, k=k, v=v)):
        mine = {n: t.detach().requires_grad_() for n, t in c.tensors().items()}
        got = by_kernel(machine)(**{**c.options, **mine})
        found.append(torch.autograd.grad([got.o, got.lse], list(mine.values()), [do, dlse]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert found[0][0][..., 50, :].eq(0).all()
    assert found[0][1][..., 64, :].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_of_nan_that_some_rows_see_is_0_for_the_others(
    machine: target.Target, dtype: torch.dtype
) -> None:
    """Tiles of rows that do not see it have their gradients of q as if it were not there."""
    whole = 64 if machine.tiles and dtype == torch.bfloat16 else 96
    c = case(m=150, n=150, d=33, dtype=dtype, mask=ns.Causal())
    k = c.k.clone()
    k[..., 100, 2] = NAN
    dq, clean = (grads_of(x, machine)[0] for x in (c.with_(k=k), c))
    assert torch.equal(dq[..., :whole, :], clean[..., :whole, :])
    assert dq[..., 100:, :].isnan().all()


@pytest.mark.parametrize("mask", [None, ns.Causal()], ids=str)
@pytest.mark.parametrize("splits", [2, 3])
def test_shares_of_keys(machine: target.Target, splits: int, mask: ns.Mask | None) -> None:
    c = case((1,), 2, 1, m=100, n=200, mask=mask, sinks=rnd(2, seed=3), bias=rnd(100, 200, seed=4))
    check(c, by_kernel(machine, lambda plan: replace(plan, splits=splits)))


def test_threads_do_not_change_a_bit(machine: target.Target) -> None:
    c = case(m=100, n=300, d=64, mask=ns.Causal(), bias=rnd(4, 100, 300))
    for splits in (1, 2):
        first, *others = (
            grads_of(c, machine, partial(replace, threads=threads, splits=splits))
            for threads in (1, 2, 2)
        )
        for other in others:
            assert all(map(torch.equal, first, other))


def test_plans_fill_the_threads(machine: target.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)

    def plan(*heads: Any, grads: str = "qkv", m: int = 500, **options: Any) -> gradients.Plan:
        spec = Spec(batch_invariant=options.pop("invariant", False))
        c = case(*heads, m=m, n=1000, **options)
        x = Inputs(c.q, c.k, c.v, c.options.get("bias"))
        return gradients.plan(Problem.of(x, spec, grads), machine)

    assert plan().splits == 3  # 4 key heads on 6 threads: 12 items
    assert plan((1,), 1, 1).splits == 6
    assert plan((24,), 2, 1).splits == 1
    shared = plan(grads="qkvb", bias=rnd(500, 1000))  # one gradient that every head adds to
    assert (shared.entries, shared.heads, shared.splits) == (2, 2, 6)
    assert plan(grads="qkvb", bias=rnd(500, 1)).splits == 1  # and that every key adds to
    assert "shares of keys" in str(plan())
    small, large = (plan((b,), 2, 2, m=9, invariant=True) for b in (1, 50))
    assert (small.threads, large.threads) == (1, 6)  # a core that need not wake up
    assert small.splits == large.splits == 3  # whatever else is in the batch


def test_gradients_in_bfloat16_are_no_less_accurate_than_torchs(machine: target.Target) -> None:
    c = case((1,), 2, 2, m=1024, n=1024, d=64, dtype=torch.bfloat16)
    do, _ = c.cotangents()
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def of(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        x = [t.detach().to(dtype).requires_grad_() for t in (c.q, c.k, c.v)]
        return [g.double() for g in torch.autograd.grad(attend(*x), x, do.to(dtype))]

    exact = of(sdpa, torch.float64)
    mine = of(lambda *x: by_kernel(machine)(*x).o, torch.bfloat16)
    for want, got, theirs in zip(exact, mine, of(sdpa, torch.bfloat16), strict=True):
        assert (got - want).norm() <= (theirs - want).norm()


def test_products_stay_in_registers(machine: target.Target) -> None:
    c = case(d=64)
    filled = call.fill(Problem.of(Inputs(c.q, c.k, c.v), Spec()), Inputs(c.q, c.k, c.v))
    code = Code(str(grad_kernel.write(Written(filled.form), machine)), machine)
    parts = code.assembly().split(".globl")
    products = [part for part in parts if part.split()[0].startswith("product")]
    assert len(products) >= 4
    assert not any("Spill" in part for part in products)
    assert any("vfmadd" in part or "fmla" in part for part in products)


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_masked_store_writes_its_lanes_and_no_other(
    machine: target.Target, kind: str, count: int
) -> None:
    """LLVM 22 wrote two bfloat16 where one was to be stored."""
    module, w = ir.Module(), machine.lanes
    f = module.function("write", source="f32*", to=f"{kind}*")
    source, to = f.parameters
    f.store(to, f.load(source, w), f.tail(count, w))
    code = Code(str(module), machine)
    write = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(code.address("write"))
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[kind]
    given, found = torch.arange(1.0, w + 1), torch.full((2 * w,), 7.0, dtype=dtype)
    write(given.data_ptr(), found.data_ptr())
    want = torch.where(torch.arange(2 * w) < count, torch.cat([given, given]), 7.0)
    assert torch.equal(found.float(), want)


def test_exp2_below_the_smallest_normal_number(machine: target.Target) -> None:
    module, w = ir.Module(), machine.lanes
    f = module.function("map", source="f32*", to="f32*", n="i64")
    source, to, n = f.parameters
    with f.loop(0, n, w) as j:
        f.store(to + j, elementary.exp2_gradual(f, f.load(source + j, w)))
    code = Code(str(module), machine)
    x = torch.cat(
        [torch.linspace(-160, 127, 16 * 500), torch.tensor([-INF, -1e30, NAN] + [0.0] * 13)]
    )
    got = torch.full_like(x, 7.0)
    kinds = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    ctypes.CFUNCTYPE(None, *kinds)(code.address("map"))(x.data_ptr(), got.data_ptr(), len(x))
    want = torch.exp2(x.double())
    room = want * 2.0**-21 + 2.0**-149
    assert ((got.double() - want).abs() <= room)[: 16 * 500 + 2].all()
    assert got[16 * 500 + 2].isnan()
    assert got[-1] == 1


def test_refusals_are_where_torch_is_sooner() -> None:
    def why(**sizes: Any) -> str:
        options = sizes.pop("options", {})
        c = case(**{"m": 20, "n": 20, "d": 64, **sizes})
        x = Inputs(c.q, c.k, c.v, options.get("bias"))
        spec = Spec(options.get("mask", "full()"), softcap=options.get("softcap"))
        return "; ".join(yields(Problem.of(x, spec), BACKWARD))

    assert "204,800 products" in why()
    assert "sooner" in why(m=400, n=32)  # a panel of which half is not there
    assert why(m=40, n=40) == why(dtype=torch.bfloat16) == why(e=32) == ""
    assert "sooner" in why(options={"mask": "causal(start)"})
    assert why(n=24, options={"mask": "causal(end)"}) == ""  # torch has no such mask
    assert why(options={"mask": "causal(end)&window(before=9,after=0)"}) == ""
    assert why(options={"softcap": 3.0}) == why(options={"bias": rnd(1, 1)}) == ""
