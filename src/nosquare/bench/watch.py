"""Clocks, power and temperature of a card, sampled by nvidia-smi while something runs.

A card that is held back by its power limit changes its clock with the load, so a time without the
clock beside it says less.
"""

from __future__ import annotations

import subprocess
import threading
from statistics import median
from typing import Any

import torch

from ..records import NUMBER, WHOLE, smi_command

# what nvidia-smi is asked, and what the record calls it
FIELDS = {
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw.instant": "power_w",
    "temperature.gpu": "temperature_c",
}
PERIOD_MS = 100
_RANGE = {"first": NUMBER, "least": NUMBER, "median": NUMBER, "most": NUMBER, "last": NUMBER}
STATE: dict[str, Any] = {"readings": WHOLE, **dict.fromkeys(FIELDS.values(), _RANGE)}


class Watch:
    """`with watch: ...; watch.begin(); ...; watch.summary()`: what was read since begin().

    Without a device, or where nvidia-smi does not answer, it sees nothing and summary() is None.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._command = None if device is None else smi_command(device, tuple(FIELDS))
        self._lines: list[str] = []
        self._first = 0
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Watch:
        self._lines, self._first = [], 0
        if self._command is not None:
            self._process = subprocess.Popen(
                [*self._command, f"--loop-ms={PERIOD_MS}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None and self._reader is not None:
            self._process.terminate()
            self._process.wait()
            self._reader.join()
            self._process = self._reader = None

    def begin(self) -> None:
        """Forget what was read so far: nvidia-smi is slow to start, so it is started early."""
        self._first = len(self._lines)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            self._lines.extend(lines)

    def summary(self) -> dict[str, Any] | None:
        """What was read, valid against STATE; None when nothing was."""
        return summary(self._lines[self._first :])


def summary(lines: list[str]) -> dict[str, Any] | None:
    """The lines of nvidia-smi as first, least, median, most and last of each field; lines that are
    not numbers ("[N/A]", a half-written last one) are left out."""
    rows = [row for row in map(_numbers, lines) if row is not None]
    if not rows:
        return None
    found: dict[str, Any] = {"readings": len(rows)}
    for name, values in zip(FIELDS.values(), zip(*rows, strict=True), strict=True):
        found[name] = {"first": values[0], "least": min(values), "median": median(values),
                       "most": max(values), "last": values[-1]}  # fmt: skip
    return found


def _numbers(line: str) -> list[float] | None:
    words = line.split(",")
    try:
        return [float(word) for word in words] if len(words) == len(FIELDS) else None
    except ValueError:
        return None
