"""How much memory one call takes, in a process that has done nothing else.

    python -m nosquare.bench.memory '{"case": "forward ...", "contestant": "torch", "threads": 2}'

prints {"peak_bytes": n}: the highest resident size during the call above that just before it,
results included, inputs not. Linux only: there the kernel's high-water mark can be set back.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import NosquareError, UnsupportedError
from .cases import Case, Data
from .contestants import CONTESTANTS, prepare

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM_UP_TOKENS = 64


def peak_bytes(case: Case, contestant: str, threads: int) -> int:
    """Extra memory of one call in a fresh process, in bytes. Raises NosquareError when it dies."""
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    job = json.dumps({"case": str(case), "contestant": contestant, "threads": threads})
    ran = subprocess.run(
        [sys.executable, "-m", __spec__.name, job],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    if ran.returncode:
        raise NosquareError(
            "The process that measures memory did not finish.",
            {"case": case, "contestant": contestant, "exit code": ran.returncode,
             "it said": ran.stderr.strip()[-500:] or "nothing"},
            "a smaller M and N if it ran out of memory (exit code -9).",
        )  # fmt: skip
    return int(json.loads(ran.stdout.splitlines()[-1])["peak_bytes"])


def peak_here(case: Case, contestant: str) -> int:
    """The same in this process.

    Raises UnsupportedError where there is no high-water mark to set back.
    """
    if not os.access(_RESET, os.W_OK):
        raise UnsupportedError("This system has no high-water mark of memory that can be set back.")
    one = CONTESTANTS[contestant]
    warm = replace(case, M=min(case.M, WARM_UP_TOKENS), N=min(case.N, WARM_UP_TOKENS))
    prepare(one, Data.of(warm)).outputs()
    data = Data.of(case)
    gc.collect()
    if sys.platform == "linux":  # blocks that malloc keeps would be used again unseen
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    _RESET.write_text("5")
    before = _field_bytes("VmRSS")
    out = prepare(one, data).outputs()
    after = _field_bytes("VmHWM")
    del out
    return max(after - before, 0)


def _field_bytes(name: str) -> int:
    line = next(x for x in _STATUS.read_text().splitlines() if x.startswith(name + ":"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    print(json.dumps({"peak_bytes": peak_here(Case.parse(given["case"]), given["contestant"])}))
