"""How much memory one call takes, in a process that has done nothing else.

    python -m nosquare.bench.memory '{"threads": 2, "jobs": [{"case": "...", "contestant": "..."}]}'

forks a child for each job, before anything has run, and prints {"peak_bytes": n} or {"exit": code}
for each: the highest resident size during the call above that just before it, results included,
inputs not. Linux only: there the kernel's high-water mark can be set back.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import NosquareError, UnsupportedError
from .cases import Case, Data
from .contestants import prepare
from .peers import named

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM_UP_TOKENS = 64
# else malloc comes to keep ever larger blocks that were freed, and what is used is blurred
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak_bytes(case: Case, contestant: str, threads: int) -> int:
    """Extra memory of one call in a fresh process, in bytes. Raises NosquareError when it dies."""
    (found,) = peaks([(case, contestant)], threads)
    return found


def peaks(jobs: Sequence[tuple[Case, str]], threads: int) -> list[int]:
    """The same for many calls, each in a fresh process; torch is loaded once for all.

    Raises NosquareError when one of them dies.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    asked = [{"case": str(case), "contestant": contestant} for case, contestant in jobs]
    ran = subprocess.run(
        [sys.executable, "-m", __spec__.name, json.dumps({"threads": threads, "jobs": asked})],
        capture_output=True,
        text=True,
        env={**os.environ, **_MALLOC, "PYTHONPATH": paths},
    )
    said = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    for (case, contestant), one in zip(jobs, [*said, *({"exit": ran.returncode},) * len(jobs)],
                                       strict=False):  # fmt: skip
        if "exit" in one:
            raise NosquareError(
                "The process that measures memory did not finish.",
                {"case": case, "contestant": contestant, "exit code": one["exit"],
                 "it said": ran.stderr.strip()[-500:] or "nothing"},
                "a smaller M and N if it ran out of memory (exit code -9).",
            )  # fmt: skip
    return [int(one["peak_bytes"]) for one in said]


def peak_here(case: Case, contestant: str) -> int:
    """The same in this process.

    Raises UnsupportedError where there is no high-water mark to set back.
    """
    if not os.access(_RESET, os.W_OK):
        raise UnsupportedError("This system has no high-water mark of memory that can be set back.")
    (one,) = named(contestant)
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


def _in_a_fork(job: dict[str, Any], threads: int) -> dict[str, int]:
    """{"peak_bytes": n} of a job that a child of this process does, or {"exit": code}."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(threads)
            found = peak_here(Case.parse(job["case"]), job["contestant"])
            os.write(writer, str(found).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"exit": code} if code else {"peak_bytes": int(said)}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for one_job in given["jobs"]:
        print(json.dumps(_in_a_fork(one_job, given["threads"])), flush=True)
