"""AMX in llvm_cpu: its vocabulary of tiles, and prefill on them, emulated where there is no AMX."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import nosquare as ns
from helpers import NAN, case, rnd
from kinds import masks
from llvm_helpers import ISAS, OPTIONS, agrees, attention_on, problem_of, target_of
from nosquare.backends.llvm_cpu import call, prefill
from nosquare.backends.llvm_cpu.compiled import Code
from nosquare.backends.llvm_cpu.ir import Module
from nosquare.backends.llvm_cpu.prefill_kernel import write
from nosquare.backends.llvm_cpu.prefill_packing import Sizes
from nosquare.backends.llvm_cpu.target import Target, host
from nosquare.backends.llvm_cpu.tiles import Tiles

pytestmark = pytest.mark.skipif("avx512" not in ISAS, reason="AMX is of x86 processors")
SHORT = torch.bfloat16


def sapphire_rapids() -> Target:
    """A processor with AMX: code for it can be written anywhere."""
    words = "avx512f avx512bw avx512dq avx512vl avx512bf16 amx-tile amx-bf16 fma avx2 f16c"
    features = ",".join(f"+{word}" for word in words.split()) + ",-prefer-256-bit"
    return Target("avx512", 16, 32, "sapphirerapids", features, "amx")


def amx_targets() -> list[Target]:
    """This processor's AMX, where it has it, and the emulation."""
    found = target_of("tiles")
    return [found, *([real] if (real := host("avx512")).tiles else [])]


def test_tiles_multiply_pairs() -> None:
    a, b = rnd(16, 32, seed=1, dtype=SHORT), rnd(32, 16, seed=2, dtype=SHORT)
    pairs = b.view(16, 2, 16).transpose(1, 2).contiguous()
    want = 2 * (a.double() @ b.double()) + 3
    for target in amx_targets():
        module = Module()
        f = module.function("go", a="f32*", b="f32*", c="f32*")
        tiles = Tiles(f, target)
        tiles.configure()
        tiles.load(0, f.parameters[2], 20)
        tiles.load(1, f.parameters[0], 16)
        tiles.load(7, f.parameters[1], 16)
        tiles.zero(3)
        for c in (0, 3):
            tiles.product(c, 1, 7)
        tiles.product(0, 1, 7)
        tiles.store(0, f.parameters[2], 20)
        tiles.release()
        c = torch.full((16, 20), 3.0)
        code = Code(str(module), target)
        go = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(code.address("go"))
        go(a.data_ptr(), pairs.data_ptr(), c.data_ptr())
        # 64 products of numbers near 1, added in float32 in any order
        torch.testing.assert_close(c[:, :16].double(), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(c[:, 16:], torch.full((16, 4), 3.0))  # beside the tile


@pytest.mark.parametrize("name", list(masks(2, 4, 1, 1)))
def test_masks(name: str) -> None:
    c = case(m=61, n=203, d=24, e=40, dtype=SHORT)
    agrees(c.with_(mask=masks(2, 4, 61, 203)[name]), "tiles")


@pytest.mark.parametrize("name", list(OPTIONS))
def test_options(name: str) -> None:
    agrees(case(m=61, n=203, d=24, e=40, dtype=SHORT, mask=ns.Causal(), **OPTIONS[name]), "tiles")


@pytest.mark.parametrize("scale", [0.0, -0.2, 3.0])
@pytest.mark.parametrize("mask", [ns.Causal(), ns.Prefix(70)], ids=str)
def test_any_scale(scale: float, mask: ns.Mask) -> None:
    agrees(case(m=70, n=140, d=32, dtype=SHORT, mask=mask, scale=scale), "tiles")


def test_many_blocks_and_rising_maxima() -> None:
    c = case(m=40, n=900, d=64, dtype=SHORT)
    ramp = torch.linspace(0, 6, 900)[:, None].to(SHORT)
    agrees(c.with_(k=c.k + ramp, mask=ns.Window(700, 30)), "tiles")
    agrees(c.with_(k=c.k + ramp.flip(0)), "tiles")


def test_a_row_with_nan_stays_alone() -> None:
    c = case(m=61, n=203, d=24, dtype=SHORT)
    q = c.q.clone()
    q[0, 1, 7] = NAN
    state = attention_on("tiles")(q=q, k=c.k, v=c.v)
    bad = torch.zeros(2, 4, 61, dtype=torch.bool)
    bad[0, 1, 7] = True
    assert torch.equal(state.o.isnan().all(-1), bad)
    assert torch.equal(state.lse.isnan(), bad)


@pytest.mark.parametrize("mask", [ns.Full(), ns.Causal(), ns.Window(40, 3)], ids=str)
@pytest.mark.parametrize("rows", [1, 32, 33, 64, 97])
def test_groups_that_take_turns(rows: int, mask: ns.Mask) -> None:
    """One group alone, two, the second in part, and a tile of one after a tile of two."""
    agrees(case((1,), 1, 1, m=rows, n=330, d=32, dtype=SHORT, mask=mask), "tiles")


@pytest.mark.parametrize(("d", "e"), [(16, 16), (24, 48), (60, 64), (320, 300), (128, 400)])
def test_widths(d: int, e: int) -> None:
    """q stays in tiles or not; columns of u are odd or even; two groups have room or one has."""
    c = case((1,), 1, 1, m=70, n=330, d=d, e=e, dtype=SHORT, mask=ns.Causal())
    agrees(c, "tiles")
    assert Sizes("bf16", d, e, target_of("tiles")).rows == (64 if max(d, e) <= 64 else 32)


@pytest.mark.parametrize("width", [32, 80])
def test_groups_that_see_other_blocks(width: int) -> None:
    """Both groups of a tile see a block, one does, or none; one of them is alone in the last, and
    each is where rows are wide."""
    blocks = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 1, 1, 0], [0, 1, 0, 0, 1]], dtype=torch.bool)
    seen = blocks.repeat_interleave(32, 0).repeat_interleave(128, 1)[:90, :600]
    c = case((1,), 1, 1, m=90, n=600, d=width, dtype=SHORT)
    agrees(c.with_(mask=ns.Dense(seen)), "tiles")
    seen, v = seen.clone(), c.v.clone()
    seen[:, 5::7], v[..., 5::7, :] = False, NAN  # which no row sees
    agrees(c.with_(v=v, mask=ns.Dense(seen)), "tiles")


@pytest.mark.parametrize("width", [64, 128, 80])
def test_code_for_amx(width: int) -> None:
    c = case(d=width, dtype=SHORT)
    p, x = problem_of(c.q, c.k, c.v, ns.Causal())
    target = sapphire_rapids()
    sizes = Sizes("bf16", width, width, target)
    text = Code(str(write(call.fill(p, x).form, sizes)), target).assembly()
    # of scores, 2 tiles a step of 32 numbers; of values, 2 x 2 tiles, and 2 x 1 of an odd column,
    # once for a step of 32 keys, and where no tile has two groups, for each of the 128 of a block
    run = 1 if width <= 64 else 4
    values = (4 + 2 * (width // 16 % 2)) * run
    assert text.count("tdpbf16ps") == 2 * -(-width // 32) + values
    # of u, one tile a product, and no more: it is loaded and stored once for a run or a block
    assert text.count("tilestored") == 2 + values // run
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1
    # no vector leaves its register, where tiles and weights alternate
    assert not re.search("64-byte (Folded )?(Spill|Reload)", text)


def test_amx_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from nosquare.backends.llvm_cpu import target

    class Refusing:
        def syscall(self, *words: Any) -> int:
            assert words == (158, 0x1023, 18)
            return -1

    monkeypatch.setattr(target.ctypes, "CDLL", lambda name: Refusing())
    target._amx_allowed.cache_clear()
    try:
        assert not target._amx_allowed()
    finally:
        target._amx_allowed.cache_clear()


def test_plan_says_so() -> None:
    c = case(d=64, dtype=SHORT)
    p, _ = problem_of(c.q, c.k, c.v)
    amx = sapphire_rapids()
    refused = replace(amx, tiles="")
    without = replace(refused, features=refused.features.replace("+amx-bf16,", ""))
    for target, words in (
        (amx, "tiles 64 x 128, bfloat16 by AMX"),
        (without, "tiles 48 x 256, pairs of bfloat16"),
        (refused, "tiles 48 x 256"),
    ):
        assert str(prefill.plan(p, target)) == f"prefill, avx512, {words}"
