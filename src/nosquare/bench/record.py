"""Evidence: one JSON line a case, appended to docs/records/<name>.jsonl.

A record says what was asked, who answered, every sample, every check, what ran, and on what. It
never says where: no paths, no host, no user. SCHEMA is all of it; a change of meaning is a new
VERSION.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..device import describe
from ..errors import ArgumentError
from ..receipt import Receipt
from .cases import FLOP_CONVENTION
from .timing import Entry, Result

VERSION = 1
NUMBER, WORDS, MAYBE = (int, float), (str,), (type(None),)
CHECK = {"what": WORDS, "error": NUMBER, "bound": NUMBER, "how": WORDS}
RECEIPT = {
    "op": WORDS,
    "backend": WORDS,
    "plan": WORDS,
    "kernels": [WORDS],
    "workspace_bytes": (int,),
    "copies": [WORDS],
    "refusals": (dict,),
}
CONTESTANT = {
    "name": WORDS,
    "ran": WORDS,
    "refused": WORDS,
    "calls_per_sample": (int,),
    "samples_us": [NUMBER],
    "median_us": NUMBER + MAYBE,
    "checks": [CHECK],
    "receipts": [RECEIPT],
    "peak_bytes": (int, *MAYBE),
}
MACHINE = {
    "cpu": WORDS,
    "features": [WORDS],
    "threads": (int,),
    "cores": (int, *MAYBE),
    "memory_bytes": (int,),
}
SOFTWARE = {
    "nosquare": WORDS,
    "torch": WORDS,
    "python": WORDS,
    "system": WORDS,
    "commit": WORDS + MAYBE,
    "dirty": (bool, *MAYBE),
}
SCHEMA: dict[str, Any] = {
    "schema": (int,),
    "utc": WORDS,
    "suite": WORDS,
    "case": WORDS,
    "flop_convention": WORDS,
    "pairs": (int,),
    "flops": (int,),
    "contestants": [CONTESTANT],
    "machine": MACHINE,
    "software": SOFTWARE,
    "load_average": [NUMBER],
}


def of(result: Result, around: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one case, valid against SCHEMA. around: what surroundings() says."""
    return {
        "schema": VERSION,
        "utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "suite": result.suite,
        "case": str(result.case),
        "flop_convention": FLOP_CONVENTION,
        "pairs": result.pairs,
        "flops": result.case.flops(result.pairs),
        "contestants": [_contestant(entry) for entry in result.entries],
        "load_average": _load(),
        **around,
    }


def surroundings() -> dict[str, Any]:
    """Machine and software, the same for all cases of one run."""
    cpu = describe("cpu")
    commit, dirty = _commit()
    machine = {
        "cpu": cpu.name,
        "features": list(cpu.features),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "memory_bytes": cpu.memory_bytes,
    }
    software = {
        "nosquare": importlib.import_module("nosquare").__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.system(),
        "commit": commit,
        "dirty": dirty,
    }
    return {"machine": machine, "software": software}


def append(folder: Path, name: str, records: Iterable[Mapping[str, Any]]) -> Path:
    """Add records to <folder>/<name>.jsonl, which is made where it is not there yet.

    Raises ArgumentError, and writes nothing, when a record breaks the schema.
    """
    lines = []
    for record in records:
        if wrong := faults(record):
            raise ArgumentError(
                "This record does not keep the schema.",
                {"case": record.get("case"), "faults": "; ".join(wrong)},
                "SCHEMA in bench/record.py says what belongs into it.",
            )
        lines.append(json.dumps(record, allow_nan=False))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    with path.open("a", encoding="ascii") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def records_folder() -> Path:
    """docs/records of the working tree that this package lies in; else ./docs/records."""
    root = _root()
    return (root if (root / "docs").is_dir() else Path()) / "docs" / "records"


def faults(value: Any, schema: Any = SCHEMA, name: str = "record") -> list[str]:
    """Where a value departs from a schema: missing, unknown and wrongly typed fields."""
    if isinstance(schema, dict):
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


def _contestant(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.contestant,
        "ran": entry.ran,
        "refused": entry.refused,
        "calls_per_sample": entry.calls,
        "samples_us": [round(t, 3) for t in entry.samples_us],
        "median_us": round(entry.median_us, 3) if entry.samples_us else None,
        "checks": [{k: _finite(v) for k, v in asdict(c).items()} for c in entry.checks],
        "receipts": [_receipt(r) for r in entry.receipts],
        "peak_bytes": entry.peak_bytes,
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN: an error that is not finite becomes the largest float."""
    return value if not isinstance(value, float) or math.isfinite(value) else 1.7e308


def _receipt(receipt: Receipt) -> dict[str, Any]:
    return {
        "op": receipt.op,
        "backend": receipt.backend,
        "plan": receipt.plan,
        "kernels": list(receipt.kernels),
        "workspace_bytes": receipt.workspace_bytes,
        "copies": list(receipt.copies),
        "refusals": {name: list(why) for name, why in receipt.refusals.items()},
    }


def _root() -> Path:
    return Path(__file__).resolve().parents[3]


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


def _load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes; [] where the system has none."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else []
