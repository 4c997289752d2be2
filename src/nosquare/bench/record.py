"""The record of one benchmark case: every sample, every check, what ran, and on what.

SCHEMA is all of it (nosquare.records says how to read one); a change of meaning is a new VERSION.
Version 1 had no kind, device, timing, gpu_state, warm-up, host_us and traffic: it knew CPUs alone.
Version 2 had no errors and no ceiling.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .. import records
from ..receipt import Receipt
from ..records import HEAD, NUMBER, WHOLE, WORDS, Maybe
from . import ceiling, watch
from .cases import FLOP_CONVENTION
from .timing import Entry, Result

VERSION = 3
CHECK = {"what": WORDS, "error": NUMBER, "bound": NUMBER, "how": WORDS}
ERRORS = dict.fromkeys(("most", "truth_most", "rms", "truth_rms"), NUMBER) | {"what": WORDS}
RECEIPT = {
    "op": WORDS,
    "caller": WORDS,
    "backend": WORDS,
    "plan": WORDS,
    "kernels": [WORDS],
    "workspace_bytes": Maybe(WHOLE),
    "copies": [WORDS],
    "refusals": (dict,),
}
# What moved in one call, by the card's own counters (ncu.py), and what the cost model says of a
# kernel with these tiles (model.py).
MODEL = {
    "compulsory_bytes": WHOLE,
    "l2_bytes": Maybe(WHOLE),
    "hbm_bytes": Maybe(WHOLE),
    "tiles": WORDS,
}
KERNEL = {"name": WORDS, "launches": WHOLE, "dram_bytes": WHOLE, "time_us": NUMBER}
TRAFFIC = {
    "dram_read_bytes": Maybe(WHOLE),
    "dram_write_bytes": Maybe(WHOLE),
    "l2_bytes": Maybe(WHOLE),
    "time_us": Maybe(NUMBER),
    "kernels": [KERNEL],
    "how": WORDS,
    "model": Maybe(MODEL),
}
CONTESTANT = {
    "name": WORDS,
    "ran": WORDS,
    "refused": WORDS,
    "warm_up_calls": WHOLE,
    "calls_per_sample": WHOLE,
    "samples_us": [NUMBER],
    "median_us": Maybe(NUMBER),
    "host_us": Maybe(NUMBER),
    "checks": [CHECK],
    "errors": [ERRORS],
    "receipts": [RECEIPT],
    "peak_bytes": Maybe(WHOLE),
    "traffic": Maybe(TRAFFIC),
}
# What the processor does at best (ceiling.py).
CEILING = {"gemm_flops_per_s": NUMBER, "read_bytes_per_s": Maybe(NUMBER), "how": WORDS}
TIMING = {"clock": WORDS, "caches": WORDS, "numbers": WORDS}
SCHEMA: dict[str, Any] = HEAD | {
    "device": WORDS,
    "suite": WORDS,
    "case": WORDS,
    "flop_convention": WORDS,
    "pairs": WHOLE,
    "flops": WHOLE,
    "timing": TIMING,
    "contestants": [CONTESTANT],
    "ceiling": Maybe(CEILING),
    "gpu_state": Maybe(watch.STATE),
    "load_average": [NUMBER],
}


def of(result: Result, around: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one case, valid against SCHEMA. around: what records.surroundings() says."""
    return {
        **records.begin("bench", VERSION, around),
        "device": result.device,
        "suite": result.suite,
        "case": str(result.case),
        "flop_convention": FLOP_CONVENTION,
        "pairs": result.pairs,
        "flops": result.case.flops(result.pairs),
        "timing": dict(result.timing),
        "contestants": [_contestant(entry) for entry in result.entries],
        "ceiling": None if result.ceiling is None else _ceiling(result.ceiling),
        "gpu_state": result.gpu_state,
        "load_average": load(),
    }


def _contestant(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.contestant,
        "ran": entry.ran,
        "refused": entry.refused,
        "warm_up_calls": entry.warm_up,
        "calls_per_sample": entry.calls,
        "samples_us": [round(t, 3) for t in entry.samples_us],
        "median_us": round(entry.median_us, 3) if entry.samples_us else None,
        "host_us": None if entry.host_us is None else round(entry.host_us, 3),
        "checks": [plain(c) for c in entry.checks],
        "errors": [plain(e) for e in entry.errors],
        "receipts": [receipt(r) for r in entry.receipts],
        "peak_bytes": entry.peak_bytes,
        "traffic": entry.traffic,
    }


def plain(one: Any) -> dict[str, Any]:
    """A dataclass of words and numbers as JSON has it."""
    return {name: records.finite(value) for name, value in asdict(one).items()}


def _ceiling(one: ceiling.Ceiling) -> dict[str, Any]:
    rates = {n: None if rate is None else round(rate) for n, rate in asdict(one).items()}
    return {**rates, "how": ceiling.HOW}


def receipt(one: Receipt) -> dict[str, Any]:
    """What a record keeps of a receipt; the problem is the case."""
    return {
        "op": one.op,
        "caller": one.caller,
        "backend": one.backend,
        "plan": one.plan,
        "kernels": list(one.kernels),
        "workspace_bytes": one.workspace_bytes,
        "copies": list(one.copies),
        "refusals": {name: list(why) for name, why in one.refusals.items()},
    }


def load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes; [] where the system has none."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else []
