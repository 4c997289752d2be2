"""gluon_sm90 on the host, without a card: what it refuses, how it cuts, what a launch is given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nosquare as ns
from nosquare.bench.cases import Case
from nosquare.bench.tune import stand_ins
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem

pytest.importorskip("triton", reason="gluon_sm90 is written in Triton's Gluon")

CARD = torch.device("cuda", 0)


def problem(line: str, **more: Any) -> Problem:
    """Of a case, on a card that need not be here."""
    return replace(Case.parse(line).problem(), device=CARD, **more)


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend, on a machine that believes to have a Hopper card."""
    from nosquare.backends import gluon_sm90

    monkeypatch.setattr(gluon_sm90, "_capability", lambda device: (9, 0))
    return gluon_sm90


class Recorded:
    """Stands for a loaded kernel: remembers what it is launched with."""

    def __init__(self) -> None:
        self.made: list[tuple[int, Any]] = []
        self.laid_out: list[list[Any]] = []
        self.calls: list[tuple[int, list[Any]]] = []

    def descriptor(self, number: int, t: torch.Tensor, described: Any) -> Any:
        self.made.append((number, described))
        return SimpleNamespace(address=f"map {number}")

    def launch(self, values: list[Any], varying: list[int]) -> Any:
        def run(grid: int, device: int, stream: int, maps: Any, numbers: Any) -> None:
            given = list(values)
            for n, value in zip(varying, self.in_order(varying, maps, numbers), strict=True):
                given[n] = value
            self.calls.append((grid, given))

        return run

    @staticmethod
    def in_order(varying: list[int], maps: Any, numbers: Any) -> list[Any]:
        """Descriptors are followed by 4 sizes and 4 strides."""
        maps, numbers = iter(maps), iter(numbers)
        return [next(maps if n in (0, 9, 18, 27) else numbers) for n in varying]


def arguments_of(given: list[Any]) -> dict[str, Any]:
    """What a launch was given, by the names of the kernel's parameters."""
    found, at = {}, 0
    counts = {
        "q": 9, "k": 9, "v": 9, "o": 9, "lse": 3, "sinks": 3, "lengths": 2, "order": 1,
        "turns": 1, "grid": 4, "sizes": 4, "numbers": 3, "packed": 3, "o_rows": 4,
    }  # fmt: skip
    for name, count in counts.items():
        found[name] = tuple(given[at : at + count])
        at += count
    return {**found, "mask": tuple(given[at:])}


@pytest.fixture
def launched(gluon: Any, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Calls of the backend with tensors of a CPU end here."""
    from nosquare.backends.gluon_sm90 import attend

    found = Recorded()
    monkeypatch.setattr(attend, "loaded", lambda key, device: found)
    monkeypatch.setattr(attend, "_READY", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return found


def call(gluon: Any, line: str, **arrays: Any) -> Any:
    """forward of a case, with tensors of a CPU that hold nothing of use."""
    case = Case.parse(line)
    q = torch.zeros(case.B, case.Hq, case.M, case.D, dtype=case.dtype)
    k = torch.zeros(case.B, case.Hk, case.N, case.D, dtype=case.dtype)
    v = torch.zeros(case.B, case.Hk, case.N, case.E, dtype=case.dtype)
    p = replace(case.problem(), device=torch.device("cpu"))
    x = Inputs(q, k, v)._replace(**arrays)
    return p, gluon.forward(p, gluon.plan(p, "forward"), x)


def test_a_launch_gets_descriptors_in_tokens_and_heads(gluon: Any, launched: Recorded) -> None:
    line = "forward bfloat16 B2 Hq8 Hk2 M300 N600 D128 full()"
    _, (o, lse, ran) = call(gluon, line)
    assert o.shape == (2, 8, 300, 128)
    assert lse.shape == (2, 8, 300)
    assert ran.kernels == ("attend",)
    assert ran.workspace_bytes == 0
    q, k, v, to = (described for _, described in launched.made)
    assert q.shape == (2, 300, 8, 128)
    assert q.strides == (8 * 300 * 128, 128, 300 * 128, 1)
    assert q.box == (1, 64, 1, 128)
    assert to == q
    assert k.shape == (2, 600, 2, 128)
    assert k.box == (1, 128, 1, 128)
    assert v == k
    ((grid, given),) = launched.calls
    assert grid == min(132, 3 * 8 * 2)
    assert [given[n] for n in (0, 9, 18, 27)] == ["map 0", "map 1", "map 2", "map 3"]
    found = arguments_of(given)
    assert found["q"][1:] == (*q.shape, *q.strides)
    assert found["lse"] == (lse.data_ptr(), 8 * 300, 300)
    assert found["sinks"] == (0, 0, 0)
    assert found["turns"] == (1,)
    assert found["grid"] == (3, 8, 48, 0)
    assert found["sizes"] == (300, 600, 4, 2)
    assert found["numbers"][0] == pytest.approx(128**-0.5 * 1.4426950408889634)
    assert found["mask"] == (0,)


def test_descriptors_are_made_once_for_an_address(gluon: Any, launched: Recorded) -> None:
    line = "forward bfloat16 B1 Hq2 Hk2 M128 N128 D64 causal(end)"
    case = Case.parse(line)
    q, k, v = (torch.zeros(1, 2, 128, 64, dtype=case.dtype) for _ in range(3))
    p = replace(case.problem(), device=torch.device("cpu"))
    chosen = gluon.plan(p, "forward")
    for _ in range(5):
        gluon.forward(p, chosen, Inputs(q, k, v))
    assert sum(number < 3 for number, _ in launched.made) == 3
    assert len(launched.calls) == 5


@pytest.mark.parametrize("mask", ["causal(end)", "window(before=700,after=0)"])
def test_the_list_has_each_tile_once(gluon: Any, mask: str) -> None:
    from nosquare.backends.gluon_sm90.attend_plan import rows_of
    from nosquare.backends.gluon_sm90.order import listed

    p = problem(f"forward bfloat16 B3 Hq4 Hk4 M5000 N5000 D128 {mask}")
    rows = rows_of(p, gluon.plan(p, "forward"))
    for most in (None, 0):
        table = listed(rows.keys, 12, (5, 12), 132, *([] if most is None else [most]))
        assert table.shape[1] == 132
        numbers = table[table >= 0].tolist()
        assert sorted(numbers) == list(range(12 * len(rows.keys)))
        cost = torch.tensor([0, *rows.keys[::-1]])[(table % len(rows.keys) + 1) * (table >= 0)]
        shares = cost.sum(0).float()
        assert shares.max() <= 1.1 * shares.mean() + max(rows.keys)


def test_a_list_is_made_for_the_second_call(
    gluon: Any, launched: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New lengths in each call cost no list; a graph keeps the one that it reads."""
    from nosquare.backends.gluon_sm90 import attend

    monkeypatch.setattr(attend, "_CAPTURED", {})
    line = "forward bfloat16 B1 Hq2 Hk2 M1024 N1024 D128 causal(end)"
    for _ in range(3):
        call(gluon, line)
    first, second, third = (arguments_of(given) for _, given in launched.calls)
    assert first["grid"] == (8, 2, 16, 2)
    assert first["order"] == (0,)
    assert second["grid"] == third["grid"] == (8, 2, 16, 1)
    assert second["order"] == third["order"] != (0,)
    assert not attend._CAPTURED
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call(gluon, line)
    (kept,) = attend._CAPTURED.values()
    assert arguments_of(launched.calls[-1][1])["order"] == (kept.data_ptr(),)
    call(gluon, line.replace("1024", "1152"))
    call(gluon, line.replace("1024", "1152"))
    assert arguments_of(launched.calls[-1][1])["grid"][-1] == 2


MASKS = {
    "full": ns.Full(),
    "causal": ns.Causal(),
    "start": ns.Causal("start"),
    "window": ns.Window(200, 30),
    "past": ns.Window(300, 0),
    "prefix": ns.Prefix(150),
    "joined": ns.Causal() | ns.Prefix(333),
    "both": ns.Causal() & ns.Window(140, None),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("m", "n"), [(384, 384), (300, 700), (700, 300), (1, 512), (129, 130)])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tiles_beyond_those_counted_have_nothing_hidden(
    gluon: Any, name: str, m: int, n: int, width: int
) -> None:
    """What a kernel takes as visible without a look is, and every visible key is in some tile."""
    from nosquare.backends.gluon_sm90.attend_plan import rows_of
    from nosquare.bound import Bound

    mask = MASKS[name]
    p = problem(f"forward bfloat16 B1 Hq1 Hk1 M{m} N{n} D{width} {mask}")
    if gluon.refusals(p, "forward"):
        pytest.skip("refused")
    plan = gluon.plan(p, "forward")
    rows = rows_of(p, plan)
    bound, wide = Bound(mask, (1,), 1, m, n), plan.tile_n
    seen = ns.visible(mask, m, n).view(m, n)
    for at in range(0, m, 64):
        i_lo, i_hi = at, min(at + 64, m)
        lo, hi = bound.span(i_lo, i_hi)
        c_lo, c_hi = bound.core(i_lo, i_hi)
        first, top = lo // wide, max(-(-hi // wide), lo // wide + 1)
        low, high = min(max(-(-c_lo // wide), first), top - 1), top - 1
        if rows.more:
            high = max(min(c_hi // wide, high), low)
        mine = seen[i_lo:i_hi]
        assert mine[:, low * wide : high * wide].all()
        assert rows.hidden or mine[:, high * wide : top * wide].all()
        assert not mine[:, : first * wide].any()
        assert not mine[:, top * wide :].any()
        assert rows.even or not rows.half  # a tile that was moved begins elsewhere
        if rows.half and at // 64 % plan.groups % 2 == 0:
            assert not mine[:, top * wide - wide // 2 :].any()


@pytest.mark.parametrize("mask", ["lengths(t0)", "causal(end)&lengths(t0)"])
def test_lengths_go_to_the_card_and_cut_tiles(gluon: Any, launched: Recorded, mask: str) -> None:
    from nosquare.backends.gluon_sm90.attend_plan import rows_of

    n_keys = torch.tensor([5, 300])
    p, _ = call(gluon, f"forward bfloat16 B2 Hq2 Hk2 M256 N256 D128 {mask}", arrays=(n_keys,))
    ((_, given),) = launched.calls
    assert arguments_of(given)["lengths"] == (n_keys.data_ptr(), 1)
    rows = rows_of(p, gluon.plan(p, "forward"))
    assert rows.hidden
    assert not rows.even
    assert not rows.half


def test_few_rows_of_a_group_share_a_tile(gluon: Any, launched: Recorded) -> None:
    line = "forward bfloat16 B2 Hq8 Hk2 M16 N600 D128 causal(end)"
    p, _ = call(gluon, line)
    assert gluon.plan(p, "forward").group == 4
    q, k, _v, o = (described for _, described in launched.made)
    assert q.box == (1, 16, 4, 128)
    assert o.box == q.box
    assert k.box == (1, 128, 1, 128)
    ((grid, given),) = launched.calls
    assert grid == 1 * 2 * 2
    found = arguments_of(given)
    assert found["grid"] == (1, 2, 4, 0)
    assert found["sizes"] == (16, 600, 1, 2)


def test_packed_sequences_are_dealt_out_on_the_card(gluon: Any, launched: Recorded) -> None:
    q = torch.zeros(1000, 4, 128, dtype=torch.bfloat16)
    k = torch.zeros(900, 2, 128, dtype=torch.bfloat16)
    cu_q, cu_k = torch.tensor([0, 300, 1000]), torch.tensor([0, 400, 900])
    x = Inputs(q, k, k)._replace(cu_q=cu_q, cu_k=cu_k)
    p = Problem.of(x, Spec("causal(end)", None, None, 0.0, (0, 0, 0, 0), None, False, False), "")
    o, lse, ran = gluon.forward(p, gluon.plan(p, "forward"), x)
    assert o.shape == q.shape
    assert lse.shape == (4, 1000)
    assert ran.workspace_bytes == gluon.workspace_bytes(p, None, "forward") == 4
    (_, to_q), (_, to_k), _, _ = launched.made
    assert to_q.shape == (1, 1000, 4, 128)
    assert to_q.strides == (8, 512, 128, 1)
    assert to_k.shape == (1, 900, 2, 128)
    ((grid, given),) = launched.calls
    slots = 1000 // 128 + 2 + 1
    assert grid == min(132, slots * 4)
    found = arguments_of(given)
    assert found["grid"] == (slots, 4, slots * 4, 0)
    assert found["sizes"] == (1000, 900, 2, 2)
    assert found["lse"] == (lse.data_ptr(), 0, 1000)
    assert found["o_rows"] == (o.data_ptr(), 512, 128, 128)
    assert all(found["packed"])


@pytest.mark.parametrize("width", [64, 128, 256])
def test_other_plans_fit_and_differ_in_words(gluon: Any, width: int) -> None:
    from nosquare.backends.gluon_sm90.attend_plan import shared_bytes
    from nosquare.backends.gluon_sm90.search import SHARED_BYTES

    p = problem(f"forward bfloat16 B1 Hq4 Hk4 M4096 N4096 D{width} causal(end)")
    today = gluon.plan(p, "forward")
    found = gluon.plans(p, "forward")
    assert found
    assert today not in found
    assert all(shared_bytes(p, one) <= SHARED_BYTES for one in [today, *found])
    assert len({str(one) for one in [today, *found]}) == len(found) + 1
    assert gluon.plans(p, "forward", [today]) == []


def test_a_build_ahead_compiles_what_a_launch_asks_for(
    gluon: Any, launched: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nosquare.backends.gluon_sm90 import attend

    asked = []
    monkeypatch.setattr(attend, "loaded", lambda key, device: asked.append(key) or launched)
    line = "forward bfloat16 B2 Hq8 Hk2 M300 N600 D128 causal(end) sinks"
    p, _ = call(gluon, line, sinks=torch.zeros(8))
    x = stand_ins(Case.parse(line))
    (name,) = gluon.builds(p, gluon.plan(p, "forward"), "forward", x)
    assert [name] == asked


REFUSED = {
    "float32": ({"dtype": torch.float32}, "bfloat16 and float16"),
    "dropout": ({"p": 0.5}, "dropout"),
    "bias": ({"bias": (1, 1, 128, 128)}, "bias"),
    "array": ({"mask": "documents(t0,t1)"}, "arrays"),
    "scale": ({"scale": -1.0}, "scale"),
    "width": ({"D": 320}, "no tiles"),
    "odd": ({"D": 60}, "16 bytes"),
    "start": ({"aligned": False}, "do not start"),
    "empty": ({"N": 0}, "nothing to compute"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_has_a_reason(gluon: Any, name: str) -> None:
    more, words = REFUSED[name]
    line = "forward bfloat16 B1 Hq2 Hk2 M128 N128 D64 full()"
    assert gluon.refusals(problem(line), "forward") == []
    assert any(words in reason for reason in gluon.refusals(problem(line, **more), "forward"))


def test_strides_that_tma_cannot_take_are_refused(gluon: Any) -> None:
    p = problem("forward bfloat16 B2 Hq2 Hk2 M128 N128 D64 full()")
    q = p.strides[0]
    for strides in ((q[0], q[1], 65, 1), (q[0], 0, q[2], 1), (*q[:3], 2)):
        found = gluon.refusals(replace(p, strides=(strides, *p.strides[1:])), "forward")
        assert "strides" in " ".join(found)


def test_another_release_of_triton_is_refused(gluon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from nosquare.backends.gluon_sm90 import versions

    monkeypatch.setattr(versions, "version", lambda name: "4.0.0")
    versions.unsupported.cache_clear()
    try:
        p = problem("forward bfloat16 B2 Hq2 Hk2 M128 N128 D64 full()")
        assert "triton is 4.0.0" in " ".join(gluon.refusals(p, "forward"))
    finally:
        versions.unsupported.cache_clear()
