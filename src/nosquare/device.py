"""Facts of a processor, as far as a plan or a report needs them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from .errors import ArgumentError

KIB, MIB, GB = 2**10, 2**20, 10**9
TERA = 1e12


@dataclass(frozen=True)
class Device:
    """One processor. A fact that is not known is 0, or missing from peak_flops.

    units         cores that torch uses, or streaming multiprocessors (compute units)
    memory_bytes  main memory of the machine, or memory of the card
    features      what the instruction set offers that attention cares about
    fast_bytes    fast memory of one unit: the shared memory that a block may have, or the
                  second-level cache of a core
    cache_bytes   the last cache before main memory, all of it
    bandwidth     of main memory, bytes a second, reads and writes together
    peak_flops    dense products, flops a second, by dtype: "bfloat16", "float32", ...; float32 is
                  IEEE float32, not tf32
    source        where the last two come from: "datasheet", "measured here" or "unknown"
    """

    kind: str
    name: str
    units: int
    memory_bytes: int
    features: tuple[str, ...] = ()
    fast_bytes: int = 0
    cache_bytes: int = 0
    bandwidth: float = 0.0
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    source: str = "unknown"


def _card(
    name: str,
    units: int,
    memory_bytes: int,
    feature: str,
    near: tuple[int, int],
    tera: tuple[float, float, float, float | None],
) -> Device:
    """A card of the table. near: fast_bytes, cache_bytes; tera: main memory TB/s, then TFLOP/s of
    16-bit types (float32 sums), float32 and float64."""
    bandwidth, half, single, double = tera
    peak = {"bfloat16": half * TERA, "float16": half * TERA, "float32": single * TERA}
    if double is not None:
        peak["float64"] = double * TERA
    return Device(
        *("cuda", name, units, memory_bytes, (feature,), *near, bandwidth * TERA, peak),
        source="datasheet",
    )


# Rates, bandwidth, units and memory: the vendors' datasheets, dense rates. Datasheet GB are read as
# 10^9 bytes; cards report a few percent more. Shared memory of a block: CUDA programming guide,
# by compute capability. Second-level caches: the architecture white papers; the H200's 60 MB and
# its memory (nvidia-smi) were read off such a card. float64 is the rate of the matrix units.
_CARDS = {
    "h100": _card(
        *("NVIDIA H100 80GB HBM3", 132, 80 * GB, "sm_90", (227 * KIB, 50 * MIB)),
        (3.35, 989.4, 66.9, 66.9),  # H100 SXM5
    ),
    "h200": _card(
        *("NVIDIA H200", 132, 143_771 * MIB, "sm_90", (227 * KIB, 60 * MIB)),
        (4.8, 989.4, 66.9, 66.9),
    ),
    "a100": _card(
        *("NVIDIA A100-SXM4-80GB", 108, 80 * GB, "sm_80", (163 * KIB, 40 * MIB)),
        (2.039, 312.0, 19.5, 19.5),
    ),
    "b200": _card(
        *("NVIDIA B200", 148, 180 * GB, "sm_100", (227 * KIB, 126 * MIB)),
        (8.0, 2250.0, 75.0, 37.0),  # one of the eight of HGX B200
    ),
    "l40s": _card(
        *("NVIDIA L40S", 142, 48 * GB, "sm_89", (99 * KIB, 96 * MIB)),
        (0.864, 362.05, 91.6, None),
    ),
    "rtx4090": _card(
        *("NVIDIA GeForce RTX 4090", 128, 24 * GB, "sm_89", (99 * KIB, 72 * MIB)),
        (1.008, 165.2, 82.6, None),  # half that of float16 sums
    ),
    # its last cache is the Infinity Cache; torch calls AMD's cards "cuda" too
    "mi300x": _card(
        *("AMD Instinct MI300X", 304, 192 * GB, "gfx942", (64 * KIB, 256 * MIB)),
        (5.3, 1307.4, 163.4, 163.4),
    ),
}


def known(name: str) -> Device:
    """The facts of a card by its short name, or of this machine for "cpu".

    Raises ArgumentError, which lists the names.
    """
    word = name.strip().lower()
    if word == "cpu":
        return describe("cpu")
    if word not in _CARDS:
        raise ArgumentError(
            "There are no facts about a device of that name.",
            {"device": repr(name), "known": ", ".join([*_CARDS, "cpu"])},
            'device="h200", or device="cuda" for the card in this machine.',
        )
    return _CARDS[word]


def describe(device: torch.device | str = "cpu") -> Device:
    """The facts of a torch device; rates of a card that is known by name are its datasheet's.

    Raises torch's RuntimeError when there is no such device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _describe_card(device)
    if device.type == "cpu":
        name, features = _cpu()
        fast_bytes, cache_bytes = _cpu_caches()
        threads, memory_bytes = torch.get_num_threads(), _main_memory_bytes()
        return Device("cpu", name, threads, memory_bytes, features, fast_bytes, cache_bytes)
    return Device(device.type, device.type, 1, 0)


def _describe_card(device: torch.device) -> Device:
    p = torch.cuda.get_device_properties(device)
    listed = by_card_name(p.name) or Device("cuda", p.name, 0, 0)
    return replace(
        listed,
        name=p.name,
        units=p.multi_processor_count,
        memory_bytes=p.total_memory,
        features=(f"sm_{p.major}{p.minor}",),
        fast_bytes=getattr(p, "shared_memory_per_block_optin", 0) or listed.fast_bytes,
        cache_bytes=getattr(p, "L2_cache_size", 0) or listed.cache_bytes,
    )


def by_card_name(name: str) -> Device | None:
    """The card of the table that calls itself `name`, as torch.cuda.get_device_name says it; None
    for others, above all for PCIe and other variants with rates of their own."""
    return next((d for d in _CARDS.values() if d.name.lower() == name.strip().lower()), None)


def measured(device: torch.device | str = "cpu") -> Device:
    """describe(device) with rates measured here, on first use in a process: a second or two.

    bandwidth   a large copy, bytes read and written over the time
    peak_flops  a large product of random numbers in float32 (left out where the process allows
                tf32) and in bfloat16, the best of several runs
    """
    device = torch.device(device)
    return _measured(device, torch.get_num_threads())


@cache
def _measured(device: torch.device, threads: int) -> Device:
    on_cpu = device.type == "cpu"
    elements, side = (1 << 26, 1024) if on_cpu else (1 << 29, 8192)
    bandwidth = _copy_bytes_per_s(device, elements)
    peak = {}
    for word in ("float32", "bfloat16"):
        if word == "float32" and torch.get_float32_matmul_precision() != "highest":
            continue
        x = torch.randn(side, side, device=device).to(getattr(torch, word))
        out = torch.empty_like(x)

        def product(x: torch.Tensor = x, out: torch.Tensor = out) -> object:
            return torch.mm(x, x, out=out)

        peak[word] = 2 * side**3 / _best_seconds(product, device)
    return replace(describe(device), bandwidth=bandwidth, peak_flops=peak, source="measured here")


def _copy_bytes_per_s(device: torch.device, elements: int) -> float:
    source = torch.ones(elements, device=device)  # zeros may share one page
    target = torch.zeros_like(source)
    moved_bytes = 2 * source.numel() * source.element_size()
    return moved_bytes / _best_seconds(lambda: target.copy_(source), device)


def _best_seconds(work: Callable[[], object], device: torch.device, runs: int = 7) -> float:
    """Seconds of one run, the best of several after a first that is not counted."""
    best = float("inf")
    for run in range(runs + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if run:
            best = min(best, time.perf_counter() - start)
    return best


_CPU_FLAGS = {
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_bf16": "avx512_bf16",
    "amx_bf16": "amx_bf16",
    "asimd": "neon",
    "bf16": "neon_bf16",
}


@cache
def _cpu() -> tuple[str, tuple[str, ...]]:
    """Model name and features; Linux tells them, elsewhere the platform's word for it."""
    try:
        pairs = [
            line.partition(":")[::2] for line in Path("/proc/cpuinfo").read_text().splitlines()
        ]
    except OSError:
        return platform.processor() or platform.machine(), ()
    facts = {key.strip(): value.strip() for key, value in pairs}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    name = facts.get("model name") or platform.machine()
    return name, tuple(word for flag, word in _CPU_FLAGS.items() if flag in flags)


@cache
def _cpu_caches(root: Path = Path("/sys/devices/system/cpu")) -> tuple[int, int]:
    """Bytes of the second-level cache of one core, and of all last-level caches; Linux tells them,
    elsewhere (0, 0)."""
    second = deepest = 0
    last: dict[str, int] = {}  # the processors that share a cache -> its bytes
    try:
        for index in sorted(root.glob("cpu[0-9]*/cache/index*")):
            words = {n: (index / n).read_text().strip() for n in ("level", "size", "type")}
            if words["type"] == "Instruction":
                continue
            level = int(words["level"])
            size = int(words["size"].removesuffix("K")) * KIB
            if level == 2:
                second = second or size
            if level > deepest:
                deepest, last = level, {}
            if level == deepest:
                last[(index / "shared_cpu_list").read_text().strip()] = size
    except (OSError, ValueError):
        return 0, 0
    return second, sum(last.values())


def _main_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
