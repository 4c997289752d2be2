"""triton_any's backward, compiled for cards that are not here: its plans fit and hardly spill.

Every plan of the tables for each kind of card, and every feature with the plan of D = 128.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nosquare.backends.triton_any import cards, grad_plan, gradients
from nosquare.backends.triton_any.compiled import compile_for
from nosquare.backends.triton_any.grad_facts import products_kernel
from nosquare.backends.triton_any.grad_keys import keys_kernel
from nosquare.problem import Problem
from triton_compiled import CARDS, Taken, inputs, problem, taken, triton

# Bytes of a thread, of 1,020 in its registers. The kernel of dk and dv keeps two sums, and puts
# away before its loops what it needs after them; its loops are looked at below.
SPILLS = 1000
WHAT = {"keys_kernel": "keys", "queries_kernel": "queries", "bias_kernel": "pairs"}
ids = torch.zeros(4096, dtype=torch.int32, device="meta")
pairs = torch.ones(4096, 4096, dtype=torch.bool, device="meta")
FEATURES: dict[str, Callable[[], tuple[Problem, list[torch.Tensor]]]] = {
    "window and softcap": lambda: (
        problem(mask="causal(end)&window(before=100,after=0)", softcap=3.0),
        [],
    ),
    "dropout": lambda: (problem(mask="causal(end)", p=0.1), []),
    "bias": lambda: (problem(bias=(16, 4096, 4096), grads="qkvb"), []),
    "bias of a key, alibi, sinks": lambda: (
        problem(mask="causal(end)", bias=(16, 1, 4096), alibi=(16,), sinks=(16,), grads="qkvbs"),
        [],
    ),
    "documents": lambda: (problem(mask="documents(t0,t1)"), [ids, ids]),
    "pairs": lambda: (problem(mask="dense(t0)"), [pairs]),
    "packed": lambda: (problem(mask="causal(end)", packed=True), []),
    "odd widths": lambda: (problem(d=100, e=65), []),
    "float16": lambda: (problem(dtype=torch.float16), []),
}


def of_plan(p: Problem, card: cards.Card, *arrays: torch.Tensor, **more: Any) -> dict[str, Taken]:
    """What each pass takes; that it fits where its plan says so is asserted."""
    p = replace(p, grads=p.grads or "qkv")
    plan = replace(grad_plan.plan(p, card), **more)
    found = {}
    for kernel, key in gradients.offline(p, plan, inputs(p, *arrays)):
        name = kernel.fn.__name__
        found[name] = taken(kernel, key, card)
        assert found[name].shared_bytes <= card.shared_bytes, name
        assert found[name].spills <= SPILLS, name
        if name in WHAT:
            tile = getattr(plan, WHAT[name])
            allowed = grad_plan.shared_bytes(p, WHAT[name], tile, card, plan.add)
            assert found[name].shared_bytes <= allowed, name
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CARDS)
def test_every_plan_fits_and_hardly_spills(name: str, dtype: torch.dtype) -> None:
    for d in (64, 128, 256):
        p = problem(d, dtype=dtype, mask="causal(end)", grads="qkv")
        found = of_plan(p, cards.NAMED[name])
        adds = grad_plan.plan(p, cards.NAMED[name]).add
        assert adds == (dtype == torch.float32 and d <= 128 and name == "sm_90")
        assert list(found) == ["delta_kernel", "keys_kernel", "queries_kernel"][: 3 - adds]
        assert not grad_plan.plan(replace(p, deterministic=True), cards.NAMED[name]).add


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", CARDS)
def test_every_feature_fits_and_hardly_spills(name: str, feature: str) -> None:
    p, arrays = FEATURES[feature]()
    found = of_plan(p, cards.NAMED[name], *arrays)
    assert ("bias_kernel" in found) == (feature == "bias")


@pytest.mark.parametrize(("name", "dtype", "d"), [
    ("sm_90", torch.bfloat16, 128), ("sm_90", torch.bfloat16, 256), ("sm_80", torch.float32, 64),
    ("sm_80", torch.float32, 256), ("gfx942", torch.bfloat16, 128),
])  # fmt: skip
def test_delta_summed_over_keys_fits_and_hardly_spills(
    name: str, dtype: torch.dtype, d: int
) -> None:
    p = problem(d, dtype=dtype, mask="causal(end)", grads="qkv", exact_delta=True)
    plan, card = grad_plan.plan(p, cards.NAMED[name]), cards.NAMED[name]
    key = dict(gradients.offline(p, plan, inputs(p)))[products_kernel]
    found = taken(products_kernel, key, card)
    assert found.spills <= SPILLS
    assert found.shared_bytes <= card.shared_bytes


BY_ATOMICS = {
    torch.bfloat16: {
        64: ((32, 128, 4, 3), (16, 64, 8, 3), (64, 64, 4, 1)),
        128: ((32, 64, 4, 3), (16, 128, 4, 3)),
        256: ((64, 64, 8, 2), (32, 64, 8, 3), (16, 64, 8, 2)),
    },
    torch.float32: {
        64: ((64, 64, 4, 1), (64, 128, 8, 1), (32, 64, 4, 2)),
        128: ((32, 128, 8, 1), (16, 128, 8, 1), (32, 64, 8, 2)),
    },
}


@pytest.mark.parametrize("mask", ["causal(end)", "window(before=100,after=0)|prefix(n=7)"])
@pytest.mark.parametrize(
    ("dtype", "d"), [(dtype, d) for dtype, widths in BY_ATOMICS.items() for d in widths]
)
def test_what_dq_by_atomics_takes_is_counted(dtype: torch.dtype, d: int, mask: str) -> None:
    """Also of tiles that do not fit: the estimate has to keep them from the card."""
    card = cards.NAMED["sm_90"]
    p = problem(d, dtype=dtype, mask=mask, grads="qkv")
    for sides in BY_ATOMICS[dtype][d]:
        tile = grad_plan.Tile(*sides)
        plan = replace(grad_plan.plan(p, card), keys=tile, add=True)
        key = dict(gradients.offline(p, plan, inputs(p)))[keys_kernel]
        found = taken(keys_kernel, key, card).shared_bytes
        assert found <= grad_plan.shared_bytes(p, "keys", tile, card, add=True), tile


def test_dq_by_atomics_has_room() -> None:
    """With rows of 128 numbers, what else a kernel needs leaves none."""
    card = cards.NAMED["sm_90"]
    ids = {"mask": "documents(t0,t1)"}
    more: dict[str, Any]
    for d, more, adds in (
        (64, ids, True), (64, {"bias": (16, 4096, 4096), "grads": "qkvb"}, True),
        (64, {"bias": (2, 16, 4096, 4096), "grads": "qkvb"}, False),  # the pass for dq runs
        (128, {}, True), (128, {"p": 0.1, "mask": "causal(end)"}, True), (128, ids, False),
        (128, {"packed": True}, False), (128, {"bias": (16, 1, 4096)}, False), (100, {}, False),
        (128, {"deterministic": True}, False), (256, {}, False),
    ):  # fmt: skip
        p = problem(d, dtype=torch.float32, **{"grads": "qkv", **more})
        assert grad_plan.plan(p, card).add == adds, (d, more)
    for more in ({"p": 0.1}, {"softcap": 3.0, "alibi": (16,)}, {"sinks": (16,)}):
        p = problem(dtype=torch.float32, mask="causal(end)", grads="qkv", **more)
        assert grad_plan.plan(p, card).add
        of_plan(p, card)


@pytest.mark.parametrize("feature", ["window and softcap", "documents", "packed", "float16"])
def test_rows_of_256_on_hopper(feature: str) -> None:
    p, arrays = FEATURES[feature]()
    strides = problem(256, packed=p.packed).strides
    of_plan(replace(p, D=256, E=256, strides=strides), cards.NAMED["sm_90"], *arrays)


def blocks(kernel: Any, key: Any) -> list[str]:
    """The machine code of a kernel for sm_90, cut at its labels."""
    found = compile_for(kernel, key, cards.NAMED["sm_90"])
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        command = [str(reader), "-c", file.name]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.split(r"^\.L_x_\d+:", listed, flags=re.MULTILINE)


@pytest.mark.parametrize(("d", "add"), [(64, False), (64, True), (128, False)])
def test_loops_on_hopper_keep_their_tiles_in_registers(d: int, add: bool) -> None:
    p = problem(d, mask="causal(end)", grads="qkv")
    plan = replace(grad_plan.plan(p, cards.NAMED["sm_90"]), add=add)
    for kernel, key in gradients.offline(p, plan, inputs(p)):
        loops = [b for b in blocks(kernel, key) if "HGMMA" in b and re.search(r"\bBRA\b", b)]
        found = [len(re.findall(r"\b(?:LDL|STL)\b", loop)) for loop in loops]
        if kernel.fn.__name__ != "delta_kernel":
            # of the loop over whole tiles, and of that over masked ones, which are few; under
            # triton 3.6 the latter puts away more than under 3.7
            assert len(found) == 2, "one loop for whole tiles, one for masked ones"
            assert found[0] <= (16 if add else 4), kernel.fn.__name__
            assert found[1] <= 64, kernel.fn.__name__


def test_loops_on_hopper_fetch_ahead_where_a_mask_has_arrays_but_no_holes() -> None:
    """What is skipped there lies at the ends, so the loops need no branch; nor does that over whole
    tiles, in any mask."""
    for mask, arrays, ahead in (
        ("documents(t0,t1)", (ids, ids), True),
        ("dense(t0)", (pairs,), False),
    ):
        p = problem(mask=mask, grads="qkv")
        plan = grad_plan.plan(p, cards.NAMED["sm_90"])
        for kernel, key in gradients.offline(p, plan, inputs(p, *arrays)):
            loops = [b for b in blocks(kernel, key) if "HGMMA" in b and re.search(r"\bBRA\b", b)]
            if kernel.fn.__name__ not in ("delta_kernel", "sight"):
                assert ["LDGSTS" in loop for loop in loops] == [True, ahead], kernel.fn.__name__


def test_a_tile_that_spills_would_be_seen() -> None:
    p, plan = problem(grads="qkv"), grad_plan.plan(problem(grads="qkv"), cards.NAMED["sm_90"])
    plan = replace(plan, keys=grad_plan.Tile(128, 128, 4, 1))
    found = dict(gradients.offline(p, plan, inputs(p)))
    key = found[keys_kernel]
    assert taken(keys_kernel, key, cards.NAMED["sm_90"]).spills > SPILLS


def test_a_width_that_fits_no_card_is_refused() -> None:
    assert grad_plan.fitting(problem(4096), cards.NAMED["sm_90"]) is None
    assert grad_plan.fitting(problem(512), cards.NAMED["sm_90"]) is not None


def test_lengths_make_no_new_kernel() -> None:
    found = set()
    for m, n in ((4096, 4096), (1000, 5001), (37, 1)):
        p = problem(m=m, n=n, mask="causal(end)", sinks=(16,), p=0.1, grads="qkvs")
        keys = gradients.offline(p, grad_plan.plan(p, cards.NAMED["sm_90"]), inputs(p))
        found.add(tuple(key._replace(form=None) for _, key in keys))
    assert len(found) == 1
