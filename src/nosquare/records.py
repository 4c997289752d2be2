"""Evidence: one JSON line a record, in docs/records/<name>.jsonl.

Every record says what it is (schema, kind, utc), on what it was made (machine, software), and then
what its kind adds. It never says where: no paths, no host, no user. A schema is a description of
JSON that `faults` understands:

    {"a": ..., "b": ...}   an object with exactly these fields
    [...]                  a list of such values
    Maybe(...)             null, or such a value
    (int, float)           a value of one of these types; numbers are finite

HEAD holds the fields that all kinds share; a kind's own schema is HEAD | {...}.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .device import describe
from .errors import ArgumentError


@dataclass(frozen=True)
class Maybe:
    """In a schema: null, or a value of the schema `of`."""

    of: Any


WORDS, WHOLE, NUMBER, TRUTH = (str,), (int,), (int, float), (bool,)
GPU = {
    "name": WORDS,
    "features": [WORDS],
    "units": WHOLE,
    "memory_bytes": WHOLE,
    "driver": Maybe(WORDS),
    "power_limit_w": Maybe(NUMBER),
    "max_sm_clock_mhz": Maybe(NUMBER),
}
MACHINE = {
    "cpu": WORDS,
    "features": [WORDS],
    "threads": WHOLE,
    "cores": Maybe(WHOLE),
    "memory_bytes": WHOLE,
    "gpu": Maybe(GPU),
}
SOFTWARE = {
    "nosquare": WORDS,
    "torch": WORDS,
    "python": WORDS,
    "system": WORDS,
    "commit": Maybe(WORDS),
    "dirty": Maybe(TRUTH),
    "cuda": Maybe(WORDS),
    "cudnn": Maybe(WORDS),
    "triton": Maybe(WORDS),
}
HEAD: dict[str, Any] = {
    "schema": WHOLE,
    "kind": WORDS,
    "utc": WORDS,
    "machine": MACHINE,
    "software": SOFTWARE,
}
_ALWAYS = ("schema", "utc", "machine", "software")  # since version 1
KINDS = ("bench", "experiment", "train", "tune", "verify", "fit")

# What version 1 of a bench record, the first there was, left unsaid because it had one value.
_FIRST = {
    "kind": "bench",
    "device": "cpu",
    "timing": {
        "clock": "perf_counter",
        "caches": "warm: every call reads the same inputs",
        "numbers": "drawn on the CPU",
    },
    "gpu_state": None,
}
# And version 2.
_SECOND, _SECOND_CONTESTANT = {"ceiling": None}, {"errors": list[Any]()}


def begin(kind: str, version: int, around: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of HEAD for a record made now. around: what surroundings() said."""
    utc = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"schema": version, "kind": kind, "utc": utc, **around}


def append(
    folder: Path, name: str, records: Iterable[Mapping[str, Any]], schema: Mapping[str, Any]
) -> Path:
    """Add records to <folder>/<name>.jsonl, which is made where it is not there yet; its path.

    Raises ArgumentError, and writes nothing, when a record breaks the schema.
    """
    lines = []
    for record in records:
        if wrong := faults(record, schema):
            raise ArgumentError(
                "This record does not keep the schema.",
                {"kind": record.get("kind"), "faults": "; ".join(wrong)},
                "the SCHEMA of its kind says what belongs into it.",
            )
        lines.append(json.dumps(record, allow_nan=False))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    with path.open("a", encoding="ascii") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def read(path: Path | str) -> list[dict[str, Any]]:
    """All records of a file, oldest first; older ones with the fields that came later.

    Raises ArgumentError when there is no such file, or a line of it is no record.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ArgumentError(
            "These records cannot be read.",
            {"file": path, "because": why or "the system does not say why"},
            "a .jsonl file that `nosquare bench`, `verify` or `fit` wrote.",
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            record, why = None, f"no JSON: {error.msg} at column {error.colno}"
        else:
            why = f"no object with the fields {', '.join(_ALWAYS)}"
        if not (isinstance(record, dict) and all(name in record for name in _ALWAYS)):
            raise ArgumentError(
                "A line of this file is no record.",
                {"file": path, "line": number, "because": why},
                "remove the line; an interrupted run can leave half a line.",
            )
        found.append(_completed(record))
    return found


def _completed(record: dict[str, Any]) -> dict[str, Any]:
    """A record with what earlier versions did not say; "schema" stays what was written."""
    record = record if "kind" in record else _first_completed(record)
    if record["kind"] != "bench" or record["schema"] not in (1, 2):
        return record
    contestants = [
        _SECOND_CONTESTANT | c if isinstance(c, dict) else c for c in record.get("contestants", [])
    ]
    return _SECOND | record | {"contestants": contestants}


def _first_completed(record: dict[str, Any]) -> dict[str, Any]:
    unknown = dict.fromkeys(("cuda", "cudnn", "triton"))
    later = {"warm_up_calls": 1, "host_us": None, "traffic": None}
    contestants = [
        {**later, **c, "receipts": [{"caller": "nosquare"} | r for r in c["receipts"]]}
        for c in record.get("contestants", [])
    ]
    more = {
        "machine": {"gpu": None} | record["machine"],
        "software": unknown | record["software"],
        "contestants": contestants,
    }
    return _FIRST | record | more


def folder() -> Path:
    """docs/records of the working tree that this package lies in; else ./docs/records."""
    root = _root()
    return (root if (root / "docs").is_dir() else Path()) / "docs" / "records"


def faults(value: Any, schema: Any, name: str = "record") -> list[str]:
    """Where a value departs from a schema: missing, unknown and wrongly typed fields."""
    if isinstance(schema, Maybe):
        return [] if value is None else faults(value, schema.of, name)
    if isinstance(schema, Mapping):
        if not isinstance(value, dict):
            return [f"{name} is no object"]
        found = [f"{name}.{key} is missing" for key in schema.keys() - value.keys()]
        found += [f"{name}.{key} is unknown" for key in value.keys() - schema.keys()]
        for key in schema.keys() & value.keys():
            found += faults(value[key], schema[key], f"{name}.{key}")
        return sorted(found)
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{name} is no list"]
        return [f for n, item in enumerate(value) for f in faults(item, schema[0], f"{name}[{n}]")]
    fits = isinstance(value, schema) and (bool in schema or not isinstance(value, bool))
    finite = not isinstance(value, float) or math.isfinite(value)
    return [] if fits and finite else [f"{name} is {type(value).__name__} {value!r:.40}"]


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: an error that is one becomes the largest float."""
    return value if not isinstance(value, float) or math.isfinite(value) else 1.7e308


# ---- the surroundings ----


def surroundings(device: torch.device | str = "cpu") -> dict[str, Any]:
    """{"machine": ..., "software": ...}, the same for all records of one run.

    machine["gpu"] is None unless `device` is a CUDA device.
    """
    cpu = describe("cpu")
    device = torch.device(device)
    commit, dirty = _commit()
    machine = {
        "cpu": cpu.name,
        "features": list(cpu.features),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "memory_bytes": cpu.memory_bytes,
        "gpu": _gpu(device) if device.type == "cuda" else None,
    }
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    software = {
        "nosquare": importlib.import_module("nosquare").__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.system(),
        "commit": commit,
        "dirty": dirty,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "triton": _version("triton"),
    }
    return {"machine": machine, "software": software}


def _gpu(device: torch.device) -> dict[str, Any]:
    card = describe(device)
    told = nvidia_smi(device, ("driver_version", "power.limit", "clocks.max.sm")) or (None,) * 3
    driver, power, clock = told
    return {
        "name": card.name,
        "features": list(card.features),
        "units": card.units,
        "memory_bytes": card.memory_bytes,
        "driver": driver,
        "power_limit_w": _number(power),
        "max_sm_clock_mhz": _number(clock),
    }


def nvidia_smi(device: torch.device, fields: tuple[str, ...]) -> tuple[str, ...] | None:
    """What nvidia-smi says about fields of its --query-gpu; None where it does not answer."""
    command = smi_command(device, fields)
    if command is None:
        return None
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = tuple(word.strip() for word in ran.stdout.split(","))
    return words if not ran.returncode and len(words) == len(fields) else None


def smi_command(device: torch.device, fields: tuple[str, ...]) -> list[str] | None:
    """The command that asks nvidia-smi about one CUDA device; None where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    # by its name for life: nvidia-smi does not number cards as CUDA_VISIBLE_DEVICES does
    uuid = torch.cuda.get_device_properties(device).uuid
    query = f"--query-gpu={','.join(fields)}"
    return [program, query, "--format=csv,noheader,nounits", f"--id=GPU-{uuid}"]


def _number(word: str | None) -> float | None:
    """A number that nvidia-smi printed; None for "[N/A]" and its like."""
    try:
        return None if word is None else float(word)
    except ValueError:
        return None


def _version(package: str) -> str | None:
    """Of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _root() -> Path:
    return Path(__file__).resolve().parents[2]


def _commit() -> tuple[str | None, bool | None]:
    """(commit, whether the tree differs from it); None, None outside a checkout."""
    if not (_root() / ".git").exists():
        return None, None
    words = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "src"]):
        try:
            ran = subprocess.run(["git", "-C", str(_root()), *command],
                                 capture_output=True, text=True, check=True)  # fmt: skip
        except (OSError, subprocess.CalledProcessError):
            return None, None
        words.append(ran.stdout.strip())
    return words[0], bool(words[1])
