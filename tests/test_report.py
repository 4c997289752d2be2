"""The records a report reads, the model beside them, and its charts."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import nosquare as ns
from nosquare.bench.cases import Case, Data
from nosquare.bench.model import cost as modelled_by_bench
from nosquare.cost import Cost, Entry, Ledger
from nosquare.estimate import cost
from nosquare.report import draw
from nosquare.report.evidence import Bench, Book, Source, places, when_and_where
from nosquare.report.modelled import at_length, extra_bytes
from nosquare.report.sections.roofline import roof_share
from report_helpers import (
    CPU,
    DECODE,
    GPU,
    bench,
    book,
    contestant,
    duel,
    write,
)

RECORDS = Path(__file__).resolve().parents[1] / "docs" / "records"


# ---- evidence ----


def test_every_record_of_ours_is_read_with_its_line() -> None:
    """Version 1 and all that came later; each Source leads back to its own line."""
    found = Book.read(RECORDS)
    assert {r.data["schema"] for r in found.found} >= {1}
    for record in found.found:
        line = (RECORDS / record.source.file).read_text().splitlines()[record.source.line - 1]
        assert json.loads(line)["utc"] == record.source.utc
        if isinstance(record, Bench):
            assert json.loads(line)["case"] == str(record.case)
            medians = [c["median_us"] for c in json.loads(line)["contestants"]]
            ours = [e.median_us for e in record.entries.values()]
            for a, b in zip(medians, ours, strict=True):
                assert a is None or math.isclose(a, b or 0.0, abs_tol=1e-3)


def test_lines_are_counted_as_an_editor_counts_them(tmp_path: Path) -> None:
    path = write(tmp_path, [duel(), duel(DECODE)])
    first, second = path.read_text().splitlines()
    path.write_text(f"\n{first}\n\n\n{second}\n")
    assert [r.source.place for r in Book.read(tmp_path).found] == ["made.jsonl:2", "made.jsonl:5"]


def test_newest_counts_whatever_it_says(tmp_path: Path) -> None:
    late = duel(ratio=0.5, utc="2026-12-02T00:00:00Z")
    found = book(tmp_path, late, duel(ratio=3.0), duel(ratio=3.0, suite="d"))
    assert [(b.source.line, b.suite) for b in found.bench] == [(1, "c"), (3, "d")]
    assert found.older == 1
    assert [r.source.line for r in found.used] == [1, 3]


@pytest.mark.parametrize(
    "other",
    [
        {"machine": CPU | {"features": ["avx2", "avx512"]}},
        {"machine": CPU | {"threads": 1}},
        {"machine": CPU | {"cpu": "Made Up 9001"}},
        {"machine": GPU},
        {"software": duel()["software"] | {"torch": "2.14.0"}},
    ],
)
def test_what_makes_another_machine(tmp_path: Path, other: dict[str, object]) -> None:
    found = book(tmp_path, duel(), duel(**other))
    assert len(found.bench) == 2
    assert len({b.source.machine for b in found.bench}) == 2


def test_places_dates_and_machines() -> None:
    a = [Source("cpu.jsonl", n, f"2026-12-0{n}T", "this one") for n in (3, 1, 2, 5)]
    b = Source("cuda.jsonl", 7, "2026-12-01T", "that one")
    assert places([*a, b, b]) == "cpu.jsonl:1-3, 5; cuda.jsonl:7"
    assert when_and_where([*a, b]) == "2026-12-01 to 2026-12-05; this one; that one"
    assert when_and_where([b]) == "2026-12-01; that one"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["A line of this file is no record.", "line     2", "no JSON"]),
        ('{"a": 1}', ["A line of this file is no record.", "line     2"]),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, [duel()])
    path.write_text(path.read_text() + text + "\n")
    with pytest.raises(ns.ArgumentError) as caught:
        Book.read(tmp_path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"contestants": None}, "record.contestants is no list"),
        ({"case": "forward"}, "This line is not a benchmark case."),
        ({"suite": 3}, "record.suite is int 3"),
        (
            {"schema": 1, "contestants": [{"name": "torch", "samples_us": ["x"]}]},
            "'x' is no number",
        ),
        ({"schema": 1, "contestants": [{"ran": "torch"}]}, "it has no 'name'"),
        ({"machine": {"cpu": "c"}}, "it has no 'threads'"),
    ],
)
def test_a_record_that_is_none_is_named(
    tmp_path: Path, change: dict[str, object], because: str
) -> None:
    write(tmp_path, [duel(), duel() | change])
    with pytest.raises(ns.ArgumentError) as caught:
        Book.read(tmp_path)
    assert caught.value.sentence == "A line of this file is no record that a report can read."
    assert caught.value.values["file"] == "made.jsonl"
    assert caught.value.values["line"] == 2
    assert because in str(caught.value.values["because"])


def test_no_records(tmp_path: Path) -> None:
    with pytest.raises(ns.ArgumentError, match=r"There are no records here\.(\n.*)*Try: nosquare"):
        Book.read(tmp_path)
    write(tmp_path, [])
    with pytest.raises(ns.ArgumentError, match="These files hold no record"):
        Book.read(tmp_path)
    with pytest.raises(ns.ArgumentError, match=r"no records of this name.(\n.*)*known  made"):
        Book.read(tmp_path, ["cuda"])


# ---- the model beside the records ----


@pytest.mark.parametrize(
    "line",
    [
        "forward float32 B2 Hq4 Hk2 M32 N32 D8 causal(end)",
        "forward+backward float32 B1 Hq4 Hk2 M32 N48 D8 E16 full() dropout=0.1 softcap=2.0",
        "backward bfloat16 B1 Hq4 Hk4 M32 N32 D8 full() bias=Hq,1,N alibi sinks",
        "decode bfloat16 B3 Hq4 Hk2 M1 N64 D8 lengths(t0)",
        "forward float64 B1 Hq2 Hk2 M16 N16 D8 full() grad",
    ],
)
def test_problem_of_a_case_is_the_one_that_was_timed(line: str) -> None:
    case = Case.parse(line)
    timed, made = modelled_by_bench(Data.of(case)).problem, case.problem()
    same = {"device": timed.device, "grads": timed.grads}
    assert set(made.grads) == set(timed.grads)
    assert replace(made, **same) == timed


def test_extra_memory_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """o 100, lse 10, workspaces 5 and 50, gradients 300: what a caller sees at the peak."""
    forward = Case.parse("forward float32 B1 Hq8 Hk8 M1024 N1024 D64 full()")
    assert extra_bytes(forward) >= (2 << 20) + (32 << 10)  # o and lse, by the sizes
    first = Ledger((Entry("q", 7, "input"), Entry("o", 100, "output"), Entry("lse", 10, "saved"),
                    Entry("w", 5, "workspace"), Entry("scores", 9999, "materialised")))  # fmt: skip
    second = Ledger((Entry("o", 100, "input"), Entry("dq", 300, "output"),
                     Entry("lse", 10, "saved"), Entry("w", 50, "workspace")))  # fmt: skip

    def account(case: Case, device: object = None) -> Cost:
        real = cost(case.problem())
        back = real.backward and replace(real.backward, ledger=second)
        return replace(real, forward=replace(real.forward, ledger=first), backward=back)

    monkeypatch.setattr("nosquare.report.modelled.cost_of", account)
    assert extra_bytes(forward) == 115
    assert extra_bytes(replace(forward, phase="forward+backward")) == 100 + 10 + 300 + 50
    assert extra_bytes(replace(forward, phase="backward")) == 300 + 50
    assert at_length(forward, 64) == replace(forward, M=64, N=64)
    assert at_length(replace(forward, M=1), 64) == replace(forward, M=1, N=64)


def test_share_of_the_roof_by_hand(tmp_path: Path) -> None:
    """4 N^2 d H flops at 989.4 TFLOP/s, the datasheet's bfloat16: the roof of a large prefill."""
    case = "forward bfloat16 B1 Hq16 Hk16 M8192 N8192 D128 full()"
    flops = 4 * 8192**2 * 128 * 16
    record = bench(case, [contestant("nosquare", [1000.0])], machine=GPU, device="cuda")
    (one,) = book(tmp_path, record).bench
    assert roof_share(one, one.entries["nosquare"]) == pytest.approx(flops / 989.4e12 / 1e-3)
    # decoding is bound by memory: k, v, q and o at 4.8 TB/s
    record = bench(DECODE, [contestant("nosquare", [1000.0])], machine=GPU, device="cuda")
    (one,) = book(tmp_path, record).bench
    moved = 2 * (2 * 8 * 65536 * 128 + 2 * 32 * 128)
    assert roof_share(one, one.entries["nosquare"]) == pytest.approx(moved / 4.8e12 / 1e-3)
    (one,) = book(tmp_path, duel()).bench
    assert roof_share(one, one.entries["nosquare"]) is None


# ---- charts ----


def test_scale_by_hand() -> None:
    """A point in the middle of a logarithmic axis lies in the middle of the drawing."""
    look = draw.Look("one", 0)
    axis = draw.Axis("x", str)
    svg = draw.chart("c", "t", "d", (axis, axis), [draw.Series(look, [(1, 1), (8, 8), (64, 64)])])
    marks = re.findall(r'class="mark full k0"[^>]*translate\(([\d.]+) ([\d.]+)\)', svg)
    xs, ys = ([float(m[i]) for m in marks] for i in (0, 1))
    assert xs[1] == pytest.approx((draw.LEFT + draw.WIDTH - draw.RIGHT) / 2, abs=0.1)
    assert ys[1] == pytest.approx((draw.TOP + draw.HEIGHT - draw.BOTTOM) / 2, abs=0.1)
    assert xs == sorted(xs)
    assert ys == sorted(ys, reverse=True)


def test_every_series_has_a_shape_of_its_own() -> None:
    """Without colours, or for who does not see them, the first six are still told apart."""
    shapes = [re.sub(r' class="[^"]*"', "", draw.Look("x", n).mark(0, 0)) for n in range(6)]
    assert len(set(shapes)) == 6
    assert draw.Look.of("seventh", 6).stroke == "dash"


def test_interval_that_straddles_one_is_grey() -> None:
    kinds = [re.findall(r"k\d", draw.forest(*ends, (0.5, 2.0)))[:1] for ends in
             ((1.1, 1.2, 1.3), (0.7, 0.8, 0.9), (0.9, 1.0, 1.1))]  # fmt: skip
    assert kinds == [["k0"], ["k1"], []]
