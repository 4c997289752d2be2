"""Bytes by ncu: its table read, its absence and its refusals told, the model beside it."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nosquare as ns
from nosquare import records
from nosquare.bench import model, ncu, record, traffic
from nosquare.bench.cases import Case, Data
from nosquare.bench.timing import Entry

CONSOLE = pytest.importorskip("rich.console")
LINE = "forward float32 B1 Hq4 Hk2 M128 N256 D16 causal(end)"
COLUMNS = (
    "ID,Process ID,Process Name,Host Name,Kernel Name,Context,Stream,Block Size,Grid Size,Device,"
    "CC,Section Name,Metric Name,Metric Unit,Metric Value"
)


def table(rows: list[tuple[int, str, str, str, str]]) -> str:
    """What ncu prints with --csv: its own words first, then all fields in quotes."""
    lines = ["==PROF== Connected to process 17 (python3)", "a word of the program, \"quoted\"",
             '==PROF== Profiling "flash": 0%....100% - 2 passes',
             "==PROF== Disconnected from process 17",
             ",".join(f'"{name}"' for name in COLUMNS.split(","))]  # fmt: skip
    for number, kernel, metric, unit, value in rows:
        cells = [number, 17, "python3", "127.0.0.1", kernel, 1, 7, "(384, 1, 1)", "(132, 1, 1)", 0,
                 "9.0", "Command line profiler metrics", metric, unit, value]  # fmt: skip
        lines.append(",".join(f'"{cell}"' for cell in cells))
    return "\n".join(lines) + "\n"


FLASH, COMBINE = "void flash<float, 128>(Params)", "combine(float*)"
CAPTURED = table([
    (0, FLASH, "dram__bytes_read.sum", "byte", "204,800,000"),
    (0, FLASH, "dram__bytes_write.sum", "byte", "60,000,000"),
    (0, FLASH, "gpu__time_duration.sum", "ns", "1,640,000"),
    (0, FLASH, "lts__t_bytes.sum", "byte", "6,600,000,000"),
    (1, COMBINE, "dram__bytes_read.sum", "byte", "1,000"),
    (1, COMBINE, "dram__bytes_write.sum", "byte", "2,000"),
    (1, COMBINE, "gpu__time_duration.sum", "ns", "3,500"),
    (1, COMBINE, "lts__t_bytes.sum", "byte", "4,000"),
    (2, FLASH, "dram__bytes_read.sum", "byte", "200,000"),
    (2, FLASH, "dram__bytes_write.sum", "byte", "0"),
    (2, FLASH, "gpu__time_duration.sum", "ns", "10,000"),
    (2, FLASH, "lts__t_bytes.sum", "byte", "0"),
])  # fmt: skip


# ---- the table of ncu ----


def test_kernels_are_summed() -> None:
    found = ncu.parse(CAPTURED)
    assert found["dram_read_bytes"] == 205_001_000
    assert found["dram_write_bytes"] == 60_002_000
    assert found["l2_bytes"] == 6_600_004_000
    assert found["time_us"] == 1653.5
    assert found["kernels"] == [
        {"name": FLASH, "launches": 2, "dram_bytes": 265_000_000, "time_us": 1650.0},
        {"name": COMBINE, "launches": 1, "dram_bytes": 3_000, "time_us": 3.5},
    ]
    assert records.faults({**found, "model": None}, record.TRAFFIC) == []


@pytest.mark.parametrize(
    ("metric", "unit", "value", "name", "number"),
    [
        ("dram__bytes_read.sum", "Kbyte", "1.5", "dram_read_bytes", 1500),
        ("dram__bytes_write.sum", "Mbyte", "2.25", "dram_write_bytes", 2_250_000),
        ("lts__t_bytes.sum", "Gbyte", "6.6", "l2_bytes", 6_600_000_000),
        ("gpu__time_duration.sum", "usecond", "7.5", "time_us", 7.5),
        ("gpu__time_duration.sum", "ms", "1.5", "time_us", 1500.0),
        ("gpu__time_duration.sum", "nsecond", "250", "time_us", 0.25),
    ],
)
def test_units(metric: str, unit: str, value: str, name: str, number: float) -> None:
    found = ncu.parse(table([(0, "k", metric, unit, value)]))
    assert found[name] == number
    others = set(ncu.METRICS.values()) - {name}
    assert all(found[other] is None for other in others)


def test_a_metric_that_the_card_does_not_have() -> None:
    text = CAPTURED.replace('"6,600,000,000"', '"n/a"').replace('"4,000"', '"n/a"')
    text = "\n".join(x for x in text.splitlines() if not x.startswith('"2"'))
    found = ncu.parse(text)
    assert found["l2_bytes"] is None
    assert found["dram_write_bytes"] == 60_002_000


def test_text_without_a_table() -> None:
    assert ncu.parse("==ERROR== nothing\n")["kernels"] == []
    with pytest.raises(ValueError, match="unit 'furlong'"):
        ncu.parse(table([(0, "k", "lts__t_bytes.sum", "furlong", "1")]))


# ---- the program ----


def install(folder: Path, patch: pytest.MonkeyPatch, text: str, code: int = 0) -> Path:
    """An `ncu` on the PATH that prints the text, ends with the code, and notes its arguments."""
    noted = folder / "arguments.json"
    (folder / "said").write_text(text)
    program = folder / "ncu"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"json.dump(sys.argv[1:], open({str(noted)!r}, 'w'))\n"
        f"sys.stdout.write(open({str(folder / 'said')!r}).read())\nsys.exit({code})\n"
    )
    program.chmod(0o755)
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return noted


def test_ncu_is_asked_for_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = install(tmp_path, monkeypatch, CAPTURED)
    found = ncu.traffic(Case.parse(LINE), "nosquare")
    assert found["l2_bytes"] == 6_600_004_000
    arguments = json.loads(noted.read_text())
    words = " ".join(arguments)
    assert "--profile-from-start off" in words
    assert "--clock-control none" in words
    assert "--metrics " + ",".join(ncu.METRICS) in words
    assert arguments[-4:-1] == [sys.executable, "-m", "nosquare.bench.ncu"]
    assert json.loads(arguments[-1]) == {"case": LINE, "contestant": "nosquare"}


@pytest.mark.parametrize(
    ("text", "code", "sentence", "value"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters", 1,
         "ncu may not read the counters of this card.", None),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", 0, "ncu counted nothing.",
         "==PROF== Connected / ==WARNING== No kernels were profiled."),
        (CAPTURED + "Traceback\nRuntimeError: CUDA error\n", 1, "ncu counted nothing.", None),
    ],
)  # fmt: skip
def test_ncu_refuses(
    text: str, code: int, sentence: str, value: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install(tmp_path, monkeypatch, text, code)
    with pytest.raises(ns.UnsupportedError) as error:
        ncu.traffic(Case.parse(LINE), "nosquare")
    assert error.value.sentence == sentence
    assert error.value.attempt
    if value is not None:
        assert error.value.values["it said"] == value


def test_ncu_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ncu"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(ncu, "LIMIT_SECONDS", 0.2)
    with pytest.raises(ns.UnsupportedError, match=r"ncu did not finish within 0\.2 s"):
        ncu.traffic(Case.parse(LINE), "nosquare")


def test_there_is_no_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ns.UnsupportedError) as error:
        ncu.program()
    assert str(error.value) == (
        "Traffic is measured by Nsight Compute, and there is no ncu on the PATH.\n"
        "  PATH  1 folders\n"
        "  Try: `nosquare bench traffic` on a machine with the CUDA toolkit; the model needs none."
    )


# ---- the model beside it ----


def test_the_models_compulsory_bytes() -> None:
    """q, k and v read once and o written once; a case with a backward has both passes."""
    line = "float32 B1 Hq4 Hk2 M128 N128 D16 full()"
    said = model.summary(model.cost(Data.of(Case.parse(f"forward {line}"))), "forward")
    assert said["compulsory_bytes"] == 2 * (4 * 128 * 16 * 4) + 2 * (2 * 128 * 16 * 4)
    account = model.cost(Data.of(Case.parse(f"forward+backward {line}")))
    assert account.backward is not None
    passes = [account.forward.compulsory_bytes, account.backward.compulsory_bytes]
    for phase, bytes_ in (("backward", passes[1]), ("forward+backward", sum(passes))):
        assert model.summary(account, phase)["compulsory_bytes"] == bytes_


def test_smaller_tiles_move_more() -> None:
    data = Data.of(Case.parse("forward float32 B1 Hq2 Hk2 M512 N512 D16 full()"))
    moved = []
    for side in (32, 64, 512):
        said = model.summary(model.cost(data, model.tiles(data, side, side)), "forward")
        assert records.faults(said, record.MODEL) == []
        assert said["tiles"] == f"{side} rows x {side} keys"
        moved.append(said["l2_bytes"])
    # each tile of queries reads k and v anew; q, o and lse move once
    kv, once = 2 * 2 * 512 * 16 * 4, 2 * 2 * 512 * 16 * 4 + 2 * 512 * 4
    assert moved == [16 * kv + once, 8 * kv + once, kv + once]


# ---- the command ----


def test_a_cpu_has_the_model_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert traffic.bench_traffic(LINE, "cpu") == 0
    text = capsys.readouterr().out
    assert "Not measured: ncu counts the bytes of NVIDIA cards, and no CPU's." in text
    assert "must" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_device_that_is_none() -> None:
    with pytest.raises(ns.ArgumentError) as error:
        traffic.bench_traffic(LINE, "tpu")
    assert str(error.value) == (
        "Traffic is measured on a card, or modelled for a CPU.\n  device  'tpu'\n"
        "  Try: --device cuda, or --device cpu."
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_no_card() -> None:
    with pytest.raises(ns.UnsupportedError, match="torch sees no CUDA device here"):
        traffic.bench_traffic(LINE, "cuda")


def test_the_table_says_all() -> None:
    said: dict[str, Any] = {"compulsory_bytes": 100 << 20, "l2_bytes": 6000 << 20,
                            "hbm_bytes": 150 << 20, "tiles": "128 rows x 128 keys"}  # fmt: skip
    moved = {"dram_read_bytes": 150 << 20, "dram_write_bytes": 50 << 20, "l2_bytes": 9000 << 20,
             "time_us": 1640.0, "model": said}  # fmt: skip
    mine = Entry("nosquare:torch_fused", traffic=moved, ran="flash x 1")
    unknown = Entry("torch", traffic=moved | {"l2_bytes": None, "model": None})
    refused = Entry("fa3", refused="ncu counted nothing.")
    console = CONSOLE.Console(width=80, file=io.StringIO(), highlight=False, color_system=None)
    traffic._show(console, [mine, unknown, refused], said)
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    both = ["150.0", "50.0", "200.0", "2.00"]
    assert ["nosquare:torch_fused", *both, "9,000", "1.50", "1.640"] in rows
    assert ["torch", *both, "-", "-", "1.640"] in rows
    assert ["model", "150.0", "1.50", "6,000"] in rows
    assert ["must", "100.0", "1.00"] in rows
    assert "not measured: fa3: ncu counted nothing." in console.file.getvalue()
    assert "nosquare:torch_fused ran: flash x 1" in console.file.getvalue()
