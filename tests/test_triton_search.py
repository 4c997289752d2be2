"""triton_any's other plans: they fit, good ones are among them, the best come together, and what is
compiled ahead is what runs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nosquare import records
from nosquare.bench import ahead, tune
from nosquare.bench.cases import Case
from nosquare.problem import Problem

pytest.importorskip("triton", reason="triton_any is written in Triton")


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """triton_any's search, and the modules it plans with, on an H200 that need not be here."""
    from nosquare.backends.triton_any import attend_plan, cards, grad_plan
    from nosquare.backends.triton_any import search as module

    found = SimpleNamespace(
        forward=attend_plan, backward=grad_plan, plans=module.plans, builds=module.builds,
        card=cards.NAMED["sm_90"], named=cards.NAMED,
    )  # fmt: skip
    monkeypatch.setattr(module, "card_of", lambda device: found.card)
    return found


def problem(line: str, **more: Any) -> Problem:
    return replace(Case.parse(line).problem(), device=torch.device("cuda", 0), **more)


LONG = "bfloat16 B4 Hq16 Hk16 M4096 N4096 D{} causal(end)"


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_plans_fit_the_card(search: SimpleNamespace, d: int, dtype: str, name: str) -> None:
    card = search.card = search.named[name]
    line = LONG.format(d).replace("bfloat16", dtype)
    p = problem(f"forward {line}")
    found = search.plans(p, "forward")
    assert len({*map(str, found), str(search.forward.plan(p, card))}) == len(found) + 1 > 1
    assert all(search.forward.shared_bytes(c, card, p) <= card.shared_bytes for c in found)
    bias = "" if d == 256 else " bias=Hq,M,N"  # whose tiles take the most
    p = problem(f"backward {line}{bias}")
    found = search.plans(p, "backward")
    today = search.backward.plan(p, card)
    assert len({*map(str, found), str(today)}) == len(found) + 1 > 1
    for one in found:
        for part in ("keys", "queries", "pairs") if bias else ("keys", "queries"):
            taken = search.backward.shared_bytes(p, part, getattr(one, part), card, one.add)
            assert taken <= card.shared_bytes
        differs = [part for part in ("keys", "queries", "pairs")
                   if getattr(one, part) != getattr(today, part)]  # fmt: skip
        assert len(differs) <= 1  # one pass at a time


def test_plans_that_won_elsewhere_are_asked(search: SimpleNamespace) -> None:
    tile = search.backward.Tile
    won = {64: ((64, 64, 4, 3), tile(32, 128, 4, 3), tile(128, 64, 4, 3)),
           128: ((64, 64, 4, 3), tile(32, 64, 4, 3), tile(64, 64, 4, 2))}  # fmt: skip
    for d, (forward, keys, queries) in won.items():
        p = problem(f"forward {LONG.format(d)}")
        today = search.forward.plan(p, search.card)
        assert search.forward.Plan(*forward) in (*search.plans(p, "forward"), today)
        p = problem(f"backward {LONG.format(d)}")
        found, today = search.plans(p, "backward"), search.backward.plan(p, search.card)
        assert {replace(today, keys=keys), replace(today, queries=queries)} <= {*found, today}


def test_plans_that_won_are_todays(search: SimpleNamespace) -> None:
    """docs/records/cuda_tune.jsonl has the searches."""
    tile = search.backward.Tile
    today = search.backward.plan(problem("backward " + LONG.format(256)), search.card)
    assert (today.keys, today.queries) == (tile(32, 64, 8, 3), tile(64, 32, 4, 3))
    line = LONG.format(128).replace("bfloat16", "float32")
    today = search.backward.plan(problem(f"backward {line}"), search.card)
    assert (today.keys, today.add) == (tile(32, 128, 8, 1), True)
    few = problem("decode bfloat16 B1 Hq32 Hk8 M1 N65536 D128 full()")
    today = search.forward.plan(few, search.card)
    assert (today.tile_m, today.tile_n, today.splits) == (16, 64, 32)
    many = problem("forward bfloat16 B1 Hq32 Hk8 M32 N65536 D128 full()")
    assert search.forward.plan(many, search.card).tile_n == 128


def test_dq_by_atomics_where_order_may_change(search: SimpleNamespace) -> None:
    p = problem(f"backward {LONG.format(64)}")
    assert any(one.add for one in search.plans(p, "backward"))
    wide = problem(f"backward {LONG.format(256)}")  # two tiles of 64 x 64 under way take too much
    adding = [one.keys for one in search.plans(wide, "backward") if one.add]
    assert adding
    assert search.backward.Tile(64, 64, 8, 2) not in adding
    p = replace(p, deterministic=True)
    assert not any(one.add for one in search.plans(p, "backward"))


def test_the_best_tiles_of_all_passes_come_together(search: SimpleNamespace) -> None:
    p = problem(f"backward {LONG.format(64)}")
    tile, today = search.backward.Tile, search.backward.plan(p, search.card)
    keys, queries = tile(64, 64, 4, 3), tile(64, 64, 4, 4)
    by_keys, by_queries = replace(today, keys=keys), replace(today, queries=queries)
    worse = replace(today, keys=tile(16, 64, 4, 2))
    timed = [by_queries, by_keys, today, worse]
    assert search.plans(p, "backward", timed) == [replace(today, keys=keys, queries=queries)]
    assert search.plans(p, "backward", [today, *timed]) == []
    added = replace(by_keys, add=True)
    assert search.plans(p, "backward", [added, today, worse]) == []  # it was timed


def test_few_rows_have_their_keys_in_other_numbers_of_parts(search: SimpleNamespace) -> None:
    p = problem("decode bfloat16 B1 Hq8 Hk8 M1 N16384 D128 full()")
    today = search.forward.plan(p, search.card)
    found = search.plans(p, "forward")
    assert {one.splits for one in found} >= {today.splits, 2 * today.splits, today.splits // 2}
    assert {one.tile_m for one in found} == {today.tile_m} == {16}
    fastest = replace(today, tile_n=32)
    assert search.plans(p, "forward", [fastest, today]) == [
        replace(fastest, splits=n) for n in (2 * today.splits, today.splits // 2)
    ] + [replace(fastest, splits=4 * today.splits)] * (4 * today.splits <= 64)
    whole = problem(f"forward {LONG.format(64)}")  # every unit is busy
    assert {one.splits for one in search.plans(whole, "forward")} == {1}


def test_kernels_are_compiled_ahead_once(search: SimpleNamespace) -> None:
    p = problem(f"backward {LONG.format(64)}")
    x = tune.stand_ins(Case.parse(f"backward {LONG.format(64)}"))
    today = search.backward.plan(p, search.card)
    first = search.builds(p, today, "backward", x)
    assert len(first) == 3  # facts of rows, dk and dv, dq
    longer = replace(p, M=8192, N=8192, strides=((8192 * 1024, 8192 * 64, 64, 1),) * 3)
    assert set(search.builds(longer, today, "backward", x)) == set(first)
    other = replace(today, queries=today.queries._replace(warps=8))
    assert len(set(search.builds(p, other, "backward", x)) - set(first)) == 1


def test_a_search_in_tritons_interpreter(tmp_path: Path) -> None:
    case = "float32 B1 Hq2 Hk1 M5 N9 D8 causal(end)"
    code = (
        "from pathlib import Path; from nosquare.bench import tune; "
        "tune.GUESSES, tune.QUICK = 4, tune.Rounds(1, 1, 0.0); "
        f"raise SystemExit(tune.bench_tune(['forward {case}', 'backward {case}'], quick=True, "
        "path=Path('found.jsonl')))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment,
                         cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    found = records.read(tmp_path / "found.jsonl")
    assert {line["case"] for line in found} == {f"forward {case}", f"backward {case}"}
    for line in found:
        for one in line["contestants"]:
            assert one["samples_us"], one
            assert one["receipts"][-1]["plan"] == one["name"].partition("@")[2]


@pytest.mark.gpu
@pytest.mark.parametrize("more", ["", " bias=1,M,N", " dropout=0.1"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_is_compiled_ahead_is_what_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, phase: str, more: str
) -> None:
    from nosquare.backends.triton_any import compiled

    monkeypatch.setattr(tune, "GUESSES", 1)
    monkeypatch.setattr(tune, "QUICK", tune.Rounds(1, 1, 0.0))
    asked, compile_for = set(), compiled.compile_for

    def noted(kernel: Any, key: Any, card: Any) -> Any:
        name = kernel.fn.__name__
        if name != "merge" and (phase == "forward" or name != "attend"):
            asked.add((name, key))
        return compile_for(kernel, key, card)

    monkeypatch.setattr(compiled, "compile_for", noted)
    built: dict[Any, Any] = {}
    # nothing is: a process for each processor would take longer to start than a kernel to compile
    monkeypatch.setattr(ahead, "build", lambda jobs, tick: built.update(jobs) or {})
    # a width that no other test has: what is loaded already is not asked for
    case = f"{phase} bfloat16 B1 Hq4 Hk2 M256 N256 D24 causal(end){more}"
    assert tune.bench_tune([case], quick=True, path=tmp_path / "tune.jsonl") == 0
    assert asked
    assert asked <= set(built)
    for job in built.values():  # as it would go to another process
        assert pickle.loads(pickle.dumps(job)).func is job.func
