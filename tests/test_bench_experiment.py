"""`nosquare bench experiment`: one thing varies at a time, and each quantity is its own."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nosquare as ns
from nosquare import records
from nosquare.bench import experiment, findings, memory
from nosquare.bench.cases import Case
from nosquare.bench.experiment import Part, bench_experiment, parts

CONSOLE = pytest.importorskip("rich.console")
SMALL = "float32 B1 Hq2 Hk1 M{n} N{n} D8 causal(end)"
TINY = [
    Part("prefill", f"forward {SMALL}", (32, 64), [(8, 8), (64, 64)]),
    Part("training with dropout", f"forward+backward {SMALL} dropout=0.1", (32,),
         [(8, 8), (32, 32)]),
    Part("decode", "decode float32 B1 Hq2 Hk1 M1 N{n} D8 full()", (64,), [(1, 8), (1, 64)]),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_the_questions_are_those_of_the_issue(device: str, quick: bool) -> None:
    found = {part.question: part for part in parts(device, "float32", quick)}
    assert list(found) == ["prefill", "training", "training with dropout", "decode"]
    for question, part in found.items():
        cases = part.cases()
        words = {" ".join(w for w in str(c).split() if w[0] not in "MN") for c in cases}
        assert len(words) == 1  # nothing but M and N varies
        assert len({c.N for c in cases}) == len(cases) >= 2
        assert all(len(part.fitting(c)) >= 2 for c in cases)
        assert {c.dropout for c in cases} == {0.1 if "dropout" in question else 0.0}
        assert [c.M for c in cases] == [1 if question == "decode" else c.N for c in cases]


def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keep: bool = True
) -> tuple[int, list[dict[str, Any]]]:
    monkeypatch.setattr(experiment, "parts", lambda device, dtype, quick: TINY)
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    monkeypatch.setattr(memory, "peaks", lambda jobs, threads: [len(jobs)] * len(jobs))
    code = bench_experiment("cpu", True, keep=keep)
    path = tmp_path / "experiment.jsonl"
    return code, records.read(path) if path.exists() else []


def test_rows_are_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    code, rows = run(monkeypatch, tmp_path)
    text = capsys.readouterr().out
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    for row in rows:
        assert records.faults(row, experiment.SCHEMA) == []
        assert (row["kind"], row["device"], row["measured"]) == ("experiment", "cpu", None)
        assert row["plan"].startswith(f"tiles {row['tile_m']} x {row['tile_n']}, ")
        assert len(row["samples_us"]) >= 3
    assert [(x["question"], x["case"].split()[6], x["tile_n"]) for x in rows] == [
        ("prefill", "N32", 8), ("prefill", "N64", 8), ("prefill", "N64", 64),
        ("training with dropout", "N32", 8), ("training with dropout", "N32", 32),
        ("decode", "N64", 8), ("decode", "N64", 64),
    ]  # fmt: skip
    trained = rows[3]
    assert [e["what"] for e in trained["errors"]] == ["o", "dq", "dk", "dv"]
    assert "128 of" not in trained["checks"][0]["how"]
    # two squares of float32, in forward and for dp in backward, and what the cost model says of it
    assert rows[2]["square_bytes"] >= 2 * 2 * 64 * 64 * 4
    # the scratch of one tile for each of two query heads
    assert [x["workspace_bytes"] for x in rows[:3]] == [2 * s * s * 4 for s in (8, 8, 64)]
    # the smaller tiles move more, by the model
    assert rows[1]["model"]["l2_bytes"] > rows[2]["model"]["l2_bytes"]
    assert [x["peak_bytes"] for x in rows] == [3, 3, 3, 2, 2, 2, 2]


def test_numbers_are_the_same_for_all_tiles(monkeypatch: pytest.MonkeyPatch,
                                            tmp_path: Path) -> None:  # fmt: skip
    """The truth does not vary with the tiles, and errors stay those of float32."""
    _, rows = run(monkeypatch, tmp_path)
    for a, b in ((rows[1], rows[2]), (rows[3], rows[4])):
        for x, y in zip(a["errors"], b["errors"], strict=True):
            assert (x["truth_rms"], x["truth_most"]) == (y["truth_rms"], y["truth_most"])
            assert 0 < x["rms"] <= x["most"] < 1e-5 * x["truth_most"]


def test_a_wrong_answer_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Dropout without its mask in the reference would be an error of that size."""
    plain = experiment.truths

    def undropped(data: Any, every_row: bool) -> Any:
        case = Case.parse(str(data.case).replace(" dropout=0.1", ""))
        return plain(replace(data, case=case), every_row)

    monkeypatch.setattr(experiment, "truths", undropped)
    code, _ = run(monkeypatch, tmp_path, keep=False)
    assert code == 1
    assert "FAILED an error is beyond its bound" in capsys.readouterr().out


def test_memory_stays_unknown_where_it_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot(jobs: Any, threads: int) -> list[int]:
        raise ns.UnsupportedError("This system has no high-water mark.")

    monkeypatch.setattr(memory, "peaks", cannot)
    rows: list[dict[str, Any]] = [
        {"case": str(TINY[0].cases()[0]), "tile_m": 8, "tile_n": 8, "peak_bytes": None}
    ]
    experiment._add_peaks(rows)
    assert rows[0]["peak_bytes"] is None


@pytest.mark.parametrize(("device", "dtype"), [("tpu", "float32"), ("cpu", "float8")])
def test_options_that_are_wrong(device: str, dtype: str) -> None:
    with pytest.raises(ns.ArgumentError) as error:
        bench_experiment(device, dtype=dtype)
    assert str(error.value) == (
        "The experiment needs a device and a dtype that it knows.\n"
        f"  device   {device!r}\n  dtype    {dtype!r}\n  devices  cuda, cpu\n"
        "  dtypes   float64, float32, bfloat16, float16\n  Try: --device cpu --dtype float32."
    )


# ---- what the tables come to ----


def row(n: int, tile: int, error: float, peak: int | None, moved: int, time_us: float) -> Any:
    """One row, with a truth of rms 2."""
    errors = [{"what": "o", "most": 4 * error, "rms": error, "truth_most": 9.0, "truth_rms": 2.0}]
    return {
        "case": f"forward float32 B1 Hq2 Hk2 M{n} N{n} D8 full()",
        "tile_m": tile,
        "tile_n": tile,
        "errors": errors,
        "peak_bytes": peak,
        "square_bytes": 2 * n * n * 1024,
        "model": {"l2_bytes": moved},
        "measured": None,
        "median_us": time_us,
    }


ROWS = [row(64, 8, 1e-7, 1 << 20, 10 << 20, 100.0), row(64, 16, 2e-7, 1 << 20, 8 << 20, 50.0),
        row(128, 8, 3e-7, 2 << 20, 40 << 20, 400.0), row(128, 16, 6e-7, 3 << 20, 20 << 20, 90.0),
        row(128, 32, 1.5e-7, 5 << 20, 10 << 20, 200.0)]  # fmt: skip


def test_conclusions_are_ratios_of_rows() -> None:
    assert findings.conclusions([64, 64, 128, 128, 128], ROWS) == [
        "N = 128, tiles 8x8 to 32x32: error x0.5, memory x2.5, moved x0.25, time x0.5; fastest "
        "16x16",
        "tiles 8x8, N = 64 to 128: error x3, memory x2, moved x4, time x4",
        "scores and probabilities at N = 128, were they kept: 32.0 MiB",
    ]
    unknown = [row(64, 8, 1e-7, None, 10, 100.0), row(64, 16, 1e-7, None, 5, 100.0)]
    assert findings.conclusions([64, 64], unknown)[0] == (
        "N = 64, tiles 8x8 to 16x16: error x1, moved x0.5, time x1; fastest 8x8"
    )


def test_the_table() -> None:
    console = CONSOLE.Console(width=80, file=io.StringIO(), highlight=False, color_system=None)
    findings.show(console, "prefill", ROWS)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["64", "8", "5.0e-08", "2.0e-07", "1.0", "10.0", "0.10"] in lines
    assert ["16", "3.0e-07", "1.2e-06", "3.0", "20.0", "0.09"] in lines
    assert math.isclose(findings.error(ROWS[0], False, "most"), 2e-7)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no high-water mark here")
def test_larger_tiles_take_more_memory() -> None:
    """A tile of scores for two heads: 2 MiB more of float32 from 128 to 512 tokens a side."""
    case = Case.parse("forward float32 B1 Hq2 Hk2 M512 N512 D8 full()")
    names = [f"nosquare:torch_any@{n}x{n}" for n in (128, 512)]
    small, large = memory.peaks([(case, name) for name in names], 1)
    assert large - small >= 2 * (512 * 512 - 128 * 128) * 4 // 2
    with pytest.raises(ns.errors.NosquareError, match="did not finish") as error:
        memory.peaks([(case, names[0]), (case, "nosquare:torch_any@x")], 1)
    assert error.value.values["contestant"] == "nosquare:torch_any@x"
