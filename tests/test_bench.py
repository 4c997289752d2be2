"""The benchmark itself: its grammar, its checks, its records. Nothing here asserts a time."""

from __future__ import annotations

import getpass
import json
import math
import platform
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import house
import nosquare as ns
from nosquare import records
from nosquare.bench import aims, contestants, memory, record
from nosquare.bench.cases import Case, Data, visible_pairs
from nosquare.bench.check import check, truths
from nosquare.bench.clocks import HostClock, Sample
from nosquare.bench.contestants import NOSQUARE, Contestant, Prepared, answer
from nosquare.bench.peers import TORCH
from nosquare.bench.timing import Entry, Rounds, interleave, measure
from nosquare.mask import KINDS

FEW = Rounds(least=2, most=2, seconds=0.0)
SMALL = "float32 B2 Hq4 Hk2 M33 N47 D8"
LINES = [
    f"forward {SMALL} causal(start)",
    f"backward {SMALL} E5 causal(end)&window(before=5,after=0)",
    f"forward+backward {SMALL} full() dropout=0.1 softcap=30.0 bias=Hq,1,N alibi sinks",
    f"forward {SMALL} lengths(t0) grad",
    f"backward {SMALL} full() bias=B,1,M,1",
    "decode bfloat16 B1 Hq32 Hk8 M1 N65536 D128 full()",
]
# one spelling of every kind, and compositions
MASKS = {
    "full": "full()",
    "causal": "causal(start)",
    "window": "window(before=5,after=2)",
    "prefix": "causal(end)|prefix(n=7)",
    "lengths": "causal(end)&lengths(t0)",
    "documents": "causal(start)&documents(t0,t1)",
    "dense": "dense(t0)&lengths(t1)",
    "blocksparse": "blocksparse(t0,block=16)|documents(t1,t2)",
}


# ---- the grammar ----


@pytest.mark.parametrize(
    "line", [*LINES, *(x for s in (*aims.SUITES, aims.PEAKS) for x in (*s.cases, *s.quick))]
)
def test_line_round_trip(line: str) -> None:
    case = Case.parse(line)
    assert str(case) == line
    assert Case.parse(str(case)) == case


@pytest.mark.parametrize(
    "line",
    [
        "",
        "sideways float32 B1 Hq1 Hk1 M1 N1 D1 full()",
        "forward float33 B1 Hq1 Hk1 M1 N1 D1 full()",
        "forward float32 B1 Hq1 Hk1 M1 N1 full()",
        "forward float32 B1 Hq3 Hk2 M1 N1 D1 full()",
        "forward float32 B1 Hq1 Hk0 M1 N1 D1 full()",
        "forward float32 B1 Hq1 Hk1 M1 N1 D1",
        "forward float32 B1 Hq1 Hk1 M1 N1 D1 fool()",
        "forward float32 B1 Hq1 Hk1 M1 N1 D1 full() dropout",
        "forward float32 B1 Hq1 Hk1 M1 N1 D1 full() speed=9",
        "forward float32 B1 Hq1 Hk1 M1 N1 D1 full() bias=N,M",
        "forward float32 B1 Hq1 Hk1 M1 N1 D1 full() bias=Hq,B,M,N",
        "backward float32 B1 Hq1 Hk1 M1 N1 D1 full() grad",
        "decode float32 B1 Hq1 Hk1 M2 N1 D1 full()",
    ],
)
def test_bad_line(line: str) -> None:
    with pytest.raises(ns.ArgumentError, match=r"not a benchmark case.*\n(.*\n)*.*Try: "):
        Case.parse(line)


def test_flops_follow_the_convention() -> None:
    case = Case.parse("forward float32 B1 Hq1 Hk1 M4 N4 D8 E4 full()")
    assert case.flops(16) == 2 * 16 * (8 + 4)
    assert replace(case, phase="backward").flops(16) == 2 * 16 * (3 * 8 + 2 * 4)
    both = replace(case, phase="forward+backward").flops(16)
    assert both == case.flops(16) + replace(case, phase="backward").flops(16)


# ---- pairs ----


def test_every_kind_is_counted() -> None:
    assert set(MASKS) == set(KINDS)


@pytest.mark.parametrize("mask", MASKS.values())
def test_pairs_are_those_of_the_mask(mask: str) -> None:
    data = Data.of(Case.parse(f"forward {SMALL} {mask}"))
    c = data.case
    assert visible_pairs(data) == int(ns.visible(data.mask, c.M, c.N, c.Hq, (c.B,)).sum())


def test_pairs_that_are_too_many_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nosquare.pairs.LOOKED_AT", 100)
    data = Data.of(Case.parse("forward float32 B1 Hq1 Hk1 M16 N16 D8 dense(t0)"))
    with pytest.raises(ns.UnsupportedError) as caught:
        visible_pairs(data)
    assert str(caught.value) == (
        "The visible pairs of this mask are too many to be counted.\n"
        "  case            forward float32 B1 Hq1 Hk1 M16 N16 D8 dense(t0)\n"
        "  pairs, at most  256\n"
        "  Try: a smaller M and N."
    )


# ---- the check ----


def spoiled(name: str, how: float) -> Contestant:
    """nosquare with an answer that is off by `how` in one place of the last head and row."""

    def attend(data: Data) -> contestants.Attend:
        right = NOSQUARE.attend(data)

        def wrong() -> torch.Tensor:
            off = torch.zeros(data.do.shape)
            off[-1, -1, -1, -1] = how
            return right() + off.to(data.case.dtype)

        return wrong

    return Contestant(name, attend)


def shifted(data: Data) -> contestants.Attend:
    """An off-by-one in the causal mask."""
    mask = ns.Window(before=None, after=1, align="start")
    return lambda: ns.attention(data.q, data.k, data.v, mask=mask)


@pytest.mark.parametrize("phase", ["forward", "backward", "forward+backward"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_right_answers_are_timed_and_wrong_ones_not(phase: str, dtype: str) -> None:
    case = Case.parse(f"{phase} {dtype} B2 Hq4 Hk2 M70 N70 D16 E8 causal(start)")
    result = measure(case, [TORCH, NOSQUARE, Contestant("shifted", shifted)], FEW)
    for name in ("torch", "nosquare"):
        entry = result.of(name)
        assert not entry.refused
        assert len(entry.samples_us) == 2
        assert entry.ran
    bad = result.of("shifted")
    assert bad.refused.startswith("wrong: ")
    assert not bad.samples_us


@pytest.mark.parametrize("off", [1e-4, math.nan, math.inf])
def test_one_wrong_number_is_enough(off: float) -> None:
    case = Case.parse("forward float32 B1 Hq2 Hk2 M200 N200 D16 full()")
    entry = measure(case, [spoiled("off", off)], FEW).of("off")
    assert entry.refused.startswith("wrong: o ")
    assert not measure(case, [spoiled("fine", 0.0)], FEW).of("fine").refused


@pytest.mark.parametrize(
    "words",
    [
        "full() dropout=0.1",
        "causal(end) softcap=3.0 sinks",
        "causal(end) bias=Hq,1,N alibi",
        *MASKS.values(),
    ],
)
def test_features_are_checked(words: str) -> None:
    """All contestants that answer agree with the oracle; torch has no softcap and no sinks."""
    case = Case.parse(f"forward+backward float32 B1 Hq4 Hk2 M40 N48 D8 {words}")
    result = measure(case, [TORCH, NOSQUARE], FEW)
    assert not result.of("nosquare").refused
    alone = "softcap" in words
    assert bool(result.of("torch").refused) == alone
    if alone:
        assert result.of("torch").refused == "torch's attention has no softcap and no sinks."
    names = {c.what for c in result.of("nosquare").checks}
    assert names == {"o", "dq", "dk", "dv"} | ({"dbias"} if "bias" in words else set()) | (
        {"dsinks"} if "sinks" in words else set()
    )


@pytest.mark.parametrize(
    ("axes", "checked"),
    [("Hq,M,N", True), ("B,Hq,M,N", True), ("B,1,M,N", False), ("1,M,N", False), ("Hq,1,1", True)],
)
def test_gradients_of_a_bias_in_a_batch(axes: str, checked: bool) -> None:
    """Of one entry, or summed over all of them; one wrong number is enough."""
    case = Case.parse(f"forward+backward float32 B3 Hq4 Hk2 M40 N48 D8 causal(end) bias={axes}")
    data = Data.of(case)
    out, known = answer(NOSQUARE, data).out, truths(data)
    assert all(c.ok for c in check(NOSQUARE, data, out, known))
    assert out["dbias"].shape == case.bias_shape
    out["dbias"].reshape(-1)[-1] += 1.0
    wrong = [c.what for c in check(NOSQUARE, data, out, known) if not c.ok]
    assert wrong == ["dbias"] * checked


def test_gradients_of_sinks_in_a_batch_are_sums() -> None:
    data = Data.of(Case.parse("backward float32 B3 Hq4 Hk2 M40 N48 D8 full() sinks"))
    out, known = answer(NOSQUARE, data).out, truths(data)
    assert {c.what for c in check(NOSQUARE, data, out, known)} == {"dq", "dk", "dv", "dsinks"}
    out["dsinks"][-1] *= 1.1
    assert [c.what for c in check(NOSQUARE, data, out, known) if not c.ok] == ["dsinks"]


def test_torch_with_another_dropout_rate_is_caught() -> None:
    case = Case.parse("forward+backward float32 B1 Hq2 Hk1 M40 N48 D8 full() dropout=0.1")
    data = Data.of(case)

    def attend(given: Data) -> contestants.Attend:
        return TORCH.attend(replace(given, case=replace(given.case, dropout=0.2)))

    wrong = Contestant("torch", attend, own_dropout=True)
    out = answer(wrong, data).out
    assert not any(c.ok for c in check(wrong, data, out, truths(data)) if c.what != "dv")
    assert all(c.ok for c in check(TORCH, data, out, truths(data)))


def test_order_turns_and_samples_are_kept() -> None:
    """Everybody once a round, each round begun by the next; every sample in its order."""

    class Counting(HostClock):
        order: ClassVar[list[str]] = []

        def warm_up(self, call: Any) -> tuple[int, int]:
            return 2, 3

        def sample(self, call: Any, calls: int) -> Sample:
            assert calls == 3
            self.order.append(call())
            return Sample(float(len(self.order)), 0.0)

    entries = [Entry(name) for name in "abc"]
    ready = [(e, Prepared(partial(str, e.contestant), ("o",))) for e in entries]
    interleave(ready, Rounds(least=4, most=4, seconds=0.0), clock=Counting())
    assert "".join(Counting.order) == "abcbcacababc"
    assert [e.samples_us for e in entries] == [[1, 6, 8, 10], [2, 4, 9, 11], [3, 5, 7, 12]]
    assert {(e.warm_up, e.calls, e.host_us) for e in entries} == {(2, 3, None)}


def test_few_rounds_are_enough_where_calls_are_long() -> None:
    rounds = Rounds(least=7, most=100, seconds=1.0, few=3)
    assert not rounds.enough(6, 1e5, 2.0)
    assert rounds.enough(7, 1e5, 2.0)
    assert not rounds.enough(7, 1e5, 0.5)
    assert rounds.enough(3, 1.1e6, 7.0)
    assert not rounds.enough(2, 1.1e6, 7.0)
    assert not Rounds(least=7, seconds=1.0).enough(6, 1.1e6, 12.0)


@pytest.mark.parametrize(("first_us", "samples"), [(0.9e6, 5), (1.1e6, 2)])
def test_the_slowest_call_decides(first_us: float, samples: int) -> None:
    class Fixed(HostClock):
        def warm_up(self, call: Any) -> tuple[int, int]:
            return 1, 1

        def sample(self, call: Any, calls: int) -> Sample:
            return Sample(call(), 0.0)

    entries = [Entry("quick"), Entry("slow")]
    ready = [
        (e, Prepared(partial(float, t), ("o",)))
        for e, t in zip(entries, (9.0, first_us), strict=True)
    ]
    interleave(ready, Rounds(least=5, most=9, seconds=0.0, few=2), clock=Fixed())
    assert [len(e.samples_us) for e in entries] == [samples, samples]


def test_a_real_clock_gives_samples() -> None:
    entry = Entry("a")
    prepared = Prepared(partial(torch.ones, 3), ("o",))
    interleave([(entry, prepared)], Rounds(least=3, most=3, seconds=0.0))
    assert len(entry.samples_us) == 3
    assert min(entry.samples_us) > 0
    assert entry.calls > 1  # a short call is repeated


# ---- the record and the report ----


def test_record_is_valid_and_tells_no_place(tmp_path: Path) -> None:
    case = Case.parse(f"forward {SMALL} causal(start)")
    contenders = [TORCH, NOSQUARE, Contestant("shifted", shifted)]
    result = measure(case, contenders, FEW, suite="a")
    line = record.of(result, records.surroundings())
    assert records.faults(line, record.SCHEMA) == []
    path = records.append(tmp_path, "try", [line, line], record.SCHEMA)
    text = path.read_text()
    assert [json.loads(x) for x in text.splitlines()] == [line, line]
    assert Case.parse(line["case"]) == case
    assert [len(c["samples_us"]) for c in line["contestants"]] == [2, 2, 0]
    assert line["contestants"][1]["receipts"][0]["op"] == "forward"
    assert not house.machine_names("record", text)
    words = {x.strip('"') for x in text.replace(",", " ").replace(":", " ").split()}
    assert not words & {platform.node(), getpass.getuser()}
    assert str(Path.cwd()) not in text
    assert str(Path.home()) not in text


def test_record_faults_are_found(tmp_path: Path) -> None:
    case = Case.parse(f"forward {SMALL} full()")
    good = record.of(measure(case, [NOSQUARE], FEW), records.surroundings())
    for bad, word in (
        ({k: v for k, v in good.items() if k != "utc"}, "record.utc is missing"),
        (good | {"host": "x"}, "record.host is unknown"),
        (good | {"pairs": 1.5}, "record.pairs is float"),
        (good | {"flops": True}, "record.flops is bool"),
        (good | {"load_average": [math.nan]}, "load_average[0]"),
        (
            good | {"contestants": [good["contestants"][0] | {"ran": 1}]},
            "contestants[0].ran is int",
        ),
    ):
        assert any(word in fault for fault in records.faults(bad, record.SCHEMA)), word
        with pytest.raises(ns.ArgumentError, match="does not keep the schema"):
            records.append(tmp_path, "bad", [bad], record.SCHEMA)
    assert not list(tmp_path.iterdir())


class Full(HostClock):
    """A card that has no room for torch's second call."""

    def __init__(self) -> None:
        self.asked = 0

    def peak_bytes(self, prepared: Prepared) -> int | None:
        self.asked += 1
        if self.asked == 1:
            raise torch.OutOfMemoryError
        return 7


def test_no_memory_for_one_is_no_end_for_all() -> None:
    case = Case.parse(f"forward {SMALL} full()")
    result = measure(case, [TORCH, NOSQUARE], FEW, clock=Full())
    assert result.of("torch").refused == "a second call found no memory."
    assert not result.of("torch").samples_us
    assert result.of("nosquare").peak_bytes == 7
    assert len(result.of("nosquare").samples_us) == 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no high-water mark here")
def test_peak_counts_the_square() -> None:
    """A dense 8 x 1024 x 1024 array of weights is what dropout costs torch, at least."""
    case = Case.parse("forward float32 B1 Hq8 Hk8 M1024 N1024 D8 full() dropout=0.1")
    assert memory.peak_here(case, "torch") > 8 * 1024 * 1024 * 4


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no high-water mark here")
def test_peak_in_a_fresh_process() -> None:
    case = Case.parse("forward float32 B1 Hq8 Hk8 M1024 N1024 D8 full() dropout=0.1")
    assert memory.peak_bytes(case, "torch", 1) > 8 * 1024 * 1024 * 4
