"""triton_any's forward, compiled for cards that are not here: its plans fit and hardly spill.

Every plan of the tables for each kind of card, and every feature with the plan of D = 128.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nosquare.backends.triton_any import attend, attend_plan, cards, merge_kernel
from nosquare.backends.triton_any import sight as sight_kernel
from nosquare.backends.triton_any.attend_kernel import attend as kernel
from nosquare.backends.triton_any.compiled import compile_for
from nosquare.problem import Problem
from triton_compiled import CARDS, Taken, inputs, problem, taken

# Bytes that a thread puts away for want of registers, of 1,020 in them. Three parts of every number
# of float32 are wanted at once: what puts some away is still the fastest there is.
SPILLS = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 400}
# what asks for single pairs, and only where a tile is neither whole nor empty: none is put away in
# the loop without masks
SPILLS_OF_PAIRS = 288
SIGHT_SPILLS = 224  # of ids of 64 bits, which stay in registers while the others go by
pairs = torch.ones(4096, 4096, dtype=torch.bool, device="meta")
ids = torch.zeros(4096, dtype=torch.int32, device="meta")

FEATURES: dict[str, Callable[[], tuple[Problem, list[torch.Tensor]]]] = {
    "causal": lambda: (problem(mask="causal(end)"), []),
    "window and softcap": lambda: (
        problem(mask="causal(end)&window(before=100,after=0)", softcap=3.0),
        [],
    ),
    "dropout": lambda: (problem(mask="causal(end)", p=0.1), []),
    "bias, alibi, sinks": lambda: (
        problem(mask="causal(end)", bias=(16, 4096, 4096), alibi=(16,), sinks=(16,)),
        [],
    ),
    "documents": lambda: (problem(mask="documents(t0,t1)"), [ids, ids]),
    "pairs": lambda: (problem(mask="dense(t0)"), [pairs]),
    "packed": lambda: (problem(mask="causal(end)", packed=True), []),
    "odd widths": lambda: (problem(d=100, e=65), []),
    "float16": lambda: (problem(dtype=torch.float16), []),
    "few rows": lambda: (problem(m=1), []),
}


def of_plan(p: Problem, plan: attend_plan.Plan, card: cards.Card, *arrays: torch.Tensor) -> Taken:
    found = taken(kernel, attend.offline(p, plan, inputs(p, *arrays)), card)
    allowed = attend_plan.shared_bytes(plan, card, p)
    assert found.shared_bytes <= allowed <= card.shared_bytes
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CARDS)
def test_every_plan_fits_and_hardly_spills(name: str, dtype: torch.dtype) -> None:
    card = cards.NAMED[name]
    for d in (64, 128, 256):
        p = problem(d, dtype=dtype)
        found = of_plan(p, attend_plan.plan(p, card), card)
        assert found.spills <= SPILLS[dtype], f"D = {d}: {found.spills} bytes"


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", CARDS)
def test_every_feature_fits_and_hardly_spills(name: str, feature: str) -> None:
    card = cards.NAMED[name]
    p, arrays = FEATURES[feature]()
    found = of_plan(p, attend_plan.plan(p, card), card, *arrays)
    assert found.spills <= (SPILLS_OF_PAIRS if feature == "pairs" else SPILLS[p.dtype])


SIGHTS: dict[str, Callable[[], tuple[Problem, list[torch.Tensor]]]] = {
    "documents": lambda: (problem(mask="documents(t0,t1)"), [ids, ids]),
    "long ids": lambda: (
        problem(mask="causal(end)&documents(t0,t1)"),
        [ids.long(), ids.long()],
    ),
    "pairs": lambda: (problem(mask="dense(t0)", dtype=torch.float32), [pairs]),
    "tiles": lambda: (
        problem(64, mask="blocksparse(t0,block=128)|causal(end)"),
        [torch.ones(16, 32, 32, dtype=torch.bool, device="meta")],
    ),
    "packed": lambda: (
        problem(mask="causal(end)&lengths(t0)", packed=True),
        [torch.ones(2, dtype=torch.int64, device="meta")],
    ),
}


@pytest.mark.parametrize("feature", SIGHTS)
@pytest.mark.parametrize("name", CARDS)
def test_what_looks_at_arrays_first(name: str, feature: str) -> None:
    card = cards.NAMED[name]
    p, arrays = SIGHTS[feature]()
    plan, x = attend_plan.plan(p, card), attend.stand_ins(p, inputs(p, *arrays))
    one = attend.sight_pass(p, plan, attend.call_of(p, x), torch.empty(64, device="meta"))
    found = taken(sight_kernel.sight, one.key, card)
    assert found.shared_bytes <= 8192
    assert found.spills <= SIGHT_SPILLS


@pytest.mark.parametrize("name", CARDS)
def test_the_merge_of_parts(name: str) -> None:
    p = problem(m=1, sinks=(16,), p=0.1)
    call = attend.call_of(p, inputs(p))
    parts = (torch.empty(8, 2, 16, 1, 128, device="meta"), torch.empty(8, 2, 16, 1, device="meta"))
    out = (parts[0][0].to(p.dtype), parts[1][0])
    key = attend.merge_key(call, 8, attend.merge_arguments(p, call, parts, out))
    assert taken(merge_kernel.merge, key, cards.NAMED[name]).spills == 0


def test_a_mask_that_spills_would_be_seen() -> None:
    # rows of 512 in registers of one warp: there is no room for them
    card = cards.NAMED["sm_90"]
    p = problem(512, dtype=torch.float32)
    plan = attend_plan.Plan(64, 16, 4, 1)
    assert taken(kernel, attend.offline(p, plan), card).spills > SPILLS[torch.float32]


def test_a_width_that_fits_no_card_is_refused() -> None:
    card = cards.NAMED["sm_90"]
    assert attend_plan.fitting(problem(4096), card) is None
    assert attend_plan.fitting(problem(1024), card) is not None


def test_products_on_hopper_read_tiles_that_were_fetched_ahead() -> None:
    p = problem()
    plan = attend_plan.plan(p, cards.NAMED["sm_90"])
    found = compile_for(kernel, attend.offline(p, plan), cards.NAMED["sm_90"])
    assert "wgmma.mma_async" in found.asm["ptx"]
    assert "cp.async.cg" in found.asm["ptx"]
    first = found.asm["ttgir"].split("warp_group_dot ")[1].partition("loc(")[0]
    assert "dot_op" not in first.partition(" : ")[2].partition("*")[0], "q lies in registers"


def test_lengths_make_no_new_kernel() -> None:
    card = cards.NAMED["sm_90"]
    for mask in ("causal(end)", "window(before=100,after=3)|prefix(n=7)"):
        found = {
            attend.offline(p, attend_plan.plan(p, card))._replace(form=None)
            for p in (
                problem(m=4096, n=4096, mask=mask),
                problem(m=1000, n=5001, mask=mask.replace("7", "1001").replace("100", "5")),
            )
        }
        assert len(found) == 1
    a, b = (problem(mask=f"window(before={n},after=0)") for n in (17, 4096))
    assert attend.call_of(a, inputs(a)).form.mask is attend.call_of(b, inputs(b)).form.mask
