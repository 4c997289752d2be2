"""Facts of a processor, as far as a plan or a report needs them."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch


@dataclass(frozen=True)
class Device:
    """One processor.

    units       cores that torch uses, or streaming multiprocessors
    memory_bytes  main memory of the machine, or memory of the card
    features    what the instruction set offers that attention cares about
    """

    kind: str
    name: str
    units: int
    memory_bytes: int
    features: tuple[str, ...] = ()


def describe(device: torch.device | str = "cpu") -> Device:
    """The facts of a torch device. Raises torch's RuntimeError when there is no such device."""
    device = torch.device(device)
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        return Device(
            "cuda", p.name, p.multi_processor_count, p.total_memory, (f"sm_{p.major}{p.minor}",)
        )
    if device.type == "cpu":
        name, features = _cpu()
        return Device("cpu", name, torch.get_num_threads(), _main_memory_bytes(), features)
    return Device(device.type, device.type, 1, 0)


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


def _main_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
