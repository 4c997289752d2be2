"""Bytes that one call really moves, by the card's own counters: Nsight Compute in a child process.

    ncu --profile-from-start off ... python -m nosquare.bench.ncu '{"case": "...", ...}'

The child makes the case's numbers, lets the contestant answer (which compiles what there is to
compile), and calls once more between cudaProfilerStart and cudaProfilerStop: only that call is
counted. ncu runs each kernel by itself, several times where it needs to, from empty caches; so
times here are of kernels without their company, and the clocks are as the card has them.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import UnsupportedError
from .cases import Case, Data
from .contestants import answer

# What ncu is asked, and what the record calls it. dram: between the card's memory and its L2 cache.
# lts: all that was asked of the L2, in bytes; on cards whose L2 has two halves (A100, H100, H200)
# also what one half asks of the other.
METRICS = {
    "dram__bytes_read.sum": "dram_read_bytes",
    "dram__bytes_write.sum": "dram_write_bytes",
    "lts__t_bytes.sum": "l2_bytes",
    "gpu__time_duration.sum": "time_us",
}
# ncu scales a number to its liking unless told otherwise, and older versions spell units out
UNITS = {
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3, "second": 1e6,
    "ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6,
}  # fmt: skip
HOW = "ncu, each kernel by itself from empty caches, clocks as they are"
LIMIT_SECONDS = 240


def program() -> str:
    """The path of ncu. Raises UnsupportedError where there is none."""
    found = shutil.which("ncu")
    if found is None:
        raise UnsupportedError(
            "Traffic is measured by Nsight Compute, and there is no ncu on the PATH.",
            {"PATH": f"{len(os.environ.get('PATH', '').split(os.pathsep))} folders"},
            "`nosquare bench traffic` on a machine with the CUDA toolkit; the model needs none.",
        )
    return found


def traffic(case: Case, contestant: str) -> dict[str, Any]:
    """What one call of a contestant moves, as TRAFFIC in record.py says it, without the model.

    Raises UnsupportedError where ncu is missing or may not read the counters, and when the child
    ends early.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    job = json.dumps({"case": str(case), "contestant": contestant})
    command = [program(), "--profile-from-start", "off", "--clock-control", "none", "--csv",
               "--print-units", "base", "--metrics", ",".join(METRICS),
               sys.executable, "-m", __spec__.name, job]  # fmt: skip
    asked = {"case": case, "contestant": contestant}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS,
                             env={**os.environ, "PYTHONPATH": paths})  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UnsupportedError(
            f"ncu did not finish within {LIMIT_SECONDS} s.",
            asked,
            "a smaller case: ncu takes some 10 ms for each kernel of a call.",
        ) from None
    said = ran.stdout + ran.stderr
    if "ERR_NVGPUCTRPERM" in said:
        raise UnsupportedError(
            "ncu may not read the counters of this card.",
            asked,
            "as root, or with the driver's option NVreg_RestrictProfilingToAdminUsers=0.",
        )
    found = parse(ran.stdout)
    if ran.returncode or not found["kernels"]:
        tail = [line for line in said.splitlines() if line.strip()][-3:]
        raise UnsupportedError(
            "ncu counted nothing.",
            asked | {"exit code": ran.returncode, "it said": " / ".join(tail)[-400:] or "nothing"},
            f"`nosquare bench cuda --case '{case}' --peers {contestant}`, which shows refusals.",
        )
    return found


def parse(text: str) -> dict[str, Any]:
    """ncu's CSV, one line a kernel and metric, summed over all kernels and for each by its name.

    What ncu and the program print before the table is skipped. A metric that the card does not have
    is None. Raises ValueError for a unit that is not known.
    """
    total: dict[str, float | None] = dict.fromkeys(METRICS.values())
    kernels: dict[str, dict[str, Any]] = {}
    launches: dict[str, set[str]] = {}
    for row in _rows(text):
        name, kernel = METRICS.get(row["Metric Name"]), row["Kernel Name"]
        value = _number(row["Metric Value"], row["Metric Unit"])
        if name is None or value is None:
            continue
        launches.setdefault(kernel, set()).add(row["ID"])
        total[name] = (total[name] or 0.0) + value
        one = kernels.setdefault(kernel, {"name": kernel, "dram_bytes": 0.0, "time_us": 0.0})
        if name == "time_us":
            one["time_us"] += value
        elif name.startswith("dram"):
            one["dram_bytes"] += value
    for kernel, one in kernels.items():
        one["launches"] = len(launches[kernel])
        one |= {"dram_bytes": round(one["dram_bytes"]), "time_us": round(one["time_us"], 3)}
    ordered = sorted(kernels.values(), key=lambda one: -one["time_us"])
    whole = {k: v if v is None else round(v, 3) if k == "time_us" else round(v)
             for k, v in total.items()}  # fmt: skip
    return {**whole, "kernels": ordered, "how": HOW}


def _rows(text: str) -> Iterator[Mapping[str, str]]:
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith('"ID"'):
            yield from csv.DictReader([line, *_table(lines)])


def _table(lines: Iterable[str]) -> Iterator[str]:
    """The lines of the table: ncu's own words begin with ==."""
    return (line for line in lines if line.startswith('"'))


def _number(value: str, unit: str) -> float | None:
    digits = value.replace(",", "")
    if digits in ("n/a", "nan", ""):
        return None
    if unit not in UNITS:
        raise ValueError(f"unit {unit!r} of a metric")
    return float(digits) * UNITS[unit]


def run_counted(case: Case, contestant: str) -> None:
    """The child's part: answer once, then once more inside the counted range."""
    from .peers import named

    (one,) = named(contestant)
    prepared = answer(one, Data.of(case, "cuda")).prepared
    with prepared.within():
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        out = prepared.call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    del out


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    run_counted(Case.parse(given["case"]), given["contestant"])
