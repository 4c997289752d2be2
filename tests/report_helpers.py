"""Records for the tests of `nosquare report`: written like real ones, with made-up numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nosquare.bench.cases import FLOP_CONVENTION, Case
from nosquare.report.evidence import Book
from nosquare.report.run import report

CPU = {"cpu": "Made Up 9000", "features": ["avx2"], "threads": 2, "cores": 2,
       "memory_bytes": 2**34, "gpu": None}  # fmt: skip
GPU = CPU | {
    "gpu": {"name": "NVIDIA H200", "features": ["sm_90"], "units": 132, "memory_bytes": 150 * 10**9,
            "driver": "590.1", "power_limit_w": 700.0, "max_sm_clock_mhz": 1980.0},
}  # fmt: skip
SOFTWARE = {"nosquare": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "system": "Linux",
            "commit": "a" * 40, "dirty": False, "cuda": None, "cudnn": None,
            "triton": None}  # fmt: skip
TRAINING = "forward+backward float32 B1 Hq8 Hk8 M4096 N4096 D64 full()"
DECODE = "decode bfloat16 B1 Hq32 Hk8 M1 N65536 D128 full()"


def contestant(name: str, samples: Sequence[float] = (), **more: Any) -> dict[str, Any]:
    """One contestant, answered and checked unless `more` says otherwise."""
    checks = [{"what": w, "error": 1e-7, "bound": 1e-6, "how": "float64 oracle"}
              for w in more.pop("outputs", ("o", "dq", "dk", "dv"))]  # fmt: skip
    middle = sorted(samples)[len(samples) // 2] if samples else None
    return {
        "name": name, "ran": f"{name}'s label", "refused": "", "warm_up_calls": 1,
        "calls_per_sample": 1, "samples_us": list(samples), "median_us": middle, "host_us": None,
        "checks": checks, "errors": [], "receipts": [], "peak_bytes": None, "traffic": None,
    } | more  # fmt: skip


def bench(case: str, contestants: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """A record of kind bench that keeps its schema."""
    asked = Case.parse(case)
    pairs = asked.B * asked.Hq * asked.M * asked.N
    return {
        "schema": 3, "kind": "bench", "utc": "2026-12-01T10:00:00Z", "machine": CPU,
        "software": SOFTWARE, "device": "cpu", "suite": "c", "case": case,
        "flop_convention": FLOP_CONVENTION, "pairs": pairs, "flops": asked.flops(pairs),
        "timing": {"clock": "c", "caches": "c", "numbers": "n"}, "contestants": list(contestants),
        "ceiling": None, "gpu_state": None, "load_average": [],
    } | more  # fmt: skip


def duel(case: str = TRAINING, ratio: float = 2.0, rounds: int = 8, **more: Any) -> dict[str, Any]:
    """nosquare against torch, faster by `ratio` in each round; the machine drifts by a third."""
    times = [1000.0 * (1 + r / (3 * rounds)) for r in range(rounds)]
    mine = contestant("nosquare", times, peak_bytes=64 << 20)
    theirs = contestant("torch", [t * ratio for t in times], peak_bytes=1 << 30)
    return bench(case, [theirs, mine], **more)


def write(folder: Path, records: Sequence[Mapping[str, Any]], name: str = "made") -> Path:
    """The records as a file of lines."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def book(folder: Path, *records: Mapping[str, Any]) -> Book:
    """A book of these records."""
    write(folder, records)
    return Book.read(folder)


def traffic(read: int, write: int, model: int | None = None) -> dict[str, Any]:
    """What ncu might say, beside what the model might."""
    kernel = {"name": "fwd_kernel", "launches": 1, "dram_bytes": read + write, "time_us": 10.0}
    said = None if model is None else {
        "compulsory_bytes": model // 2, "l2_bytes": 3 * model, "hbm_bytes": model,
        "tiles": "64 x 64",
    }  # fmt: skip
    return {"dram_read_bytes": read, "dram_write_bytes": write, "l2_bytes": 2 * (read + write),
            "time_us": 10.0, "kernels": [kernel], "how": "ncu", "model": said}  # fmt: skip


def experiment(n: int, tile: int, rms: float, question: str = "prefill") -> dict[str, Any]:
    """A cell of the experiment's table."""
    said = traffic(1, 1, 2 << 20)["model"]
    return {
        "schema": 1, "kind": "experiment", "utc": "2026-12-01T10:00:00Z", "machine": CPU,
        "software": SOFTWARE, "device": "cpu", "question": question,
        "case": f"forward float32 B1 Hq2 Hk2 M{n} N{n} D64 causal(end)", "tile_m": tile,
        "tile_n": tile, "plan": f"tiles {tile} x {tile}",
        "errors": [{"what": "o", "most": 4 * rms, "truth_most": 1.0, "rms": rms, "truth_rms": 1.0}],
        "checks": [{"what": "o", "error": 1e-7, "bound": 1e-6, "how": "float64 oracle"}],
        "peak_bytes": n * tile * 8, "workspace_bytes": 1024, "square_bytes": 16 * n * n,
        "model": said, "measured": None, "calls_per_sample": 1, "samples_us": [100.0 * n / tile],
        "median_us": 100.0 * n / tile, "timing": {"clock": "c", "caches": "c", "numbers": "n"},
        "gpu_state": None, "load_average": [],
    }  # fmt: skip


def verified(target: str, verdicts: Mapping[str, str]) -> dict[str, Any]:
    """A record of kind verify: check -> verdict."""
    words = ("pass", "fail", "convention", "refused", "not applicable")
    counts = {word: sum(v == word for v in verdicts.values()) for word in words}
    checks = [
        {"check": check, "group": "masks", "dtype": "float32", "verdict": verdict,
         "words": f"{check} came out as {verdict}", "error": 0.5 if verdict == "fail" else None,
         "bound": 1e-6 if verdict == "fail" else None}
        for check, verdict in verdicts.items()
    ]  # fmt: skip
    return {
        "schema": 1, "kind": "verify", "utc": "2026-12-01T10:00:00Z", "machine": CPU,
        "software": SOFTWARE, "target": target, "style": "sdpa", "device": "cpu",
        "dtypes": ["float32"], "counts": counts, "checks": checks,
    }  # fmt: skip


def everything() -> list[dict[str, Any]]:
    """Records of every kind, of two machines, with all that a report can show."""
    cuda = {"machine": GPU, "device": "cuda"}
    peers = (
        "nosquare",
        "torch",
        "torch:cudnn",
        "torch:flash",
        "fa3",
        "torch:efficient",
        "torch:math",
    )

    def prefill(n: int, mask: str, scale: float) -> dict[str, Any]:
        case = f"forward bfloat16 B1 Hq16 Hk16 M{n} N{n} D128 {mask}"
        base = scale * n * n / 1e5
        entries = [
            contestant(name, [base * (1 + 0.3 * k + 0.01 * r) for r in range(12)],
                       outputs=("o",), peak_bytes=n * 2**12 * (1 + 40 * (name == "torch:math")))
            for k, name in enumerate(peers)
        ]  # fmt: skip
        entries[-1] |= {"refused": "it stopped: out of memory", "samples_us": [], "median_us": None}
        return bench(case, entries, suite="prefill", **cuda)

    moved = [
        contestant("nosquare", outputs=(), traffic=traffic(60 << 20, 20 << 20, 72 << 20)),
        contestant("torch:flash", outputs=(), traffic=traffic(70 << 20, 20 << 20)),
    ]
    first = prefill(8192, "causal(end)", 1.0)
    return [
        duel(),
        duel(f"{TRAINING} dropout=0.1", 3.0, rounds=3),
        *(prefill(n, "causal(end)", 1.0) for n in (2048, 4096, 16384)),
        first,
        prefill(8192, "full()", 2.0),
        bench(first["case"], moved, suite="traffic", **cuda),
        *(experiment(n, t, 1e-7 * n / t) for n in (1024, 4096) for t in (64, 256, 1024)),
        verified("torch:default", {"causal": "pass", "empty-rows": "fail", "align": "convention"}),
        verified("nosquare", {"causal": "pass", "empty-rows": "pass", "align": "pass"}),
    ]


def made_page(folder: Path, path: Path) -> Path:
    """The page of everything(), written to `path`."""
    write(folder, everything())
    assert report(path, folder) == 0
    return path
