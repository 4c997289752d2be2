"""Peak memory of a piece of code, in a process of its own (Linux only)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"

# VmHWM is the peak of the resident set; writing 5 to clear_refs starts it anew. Every size is
# measured in a child of its own, forked before the first operation; its warm-up does what a first
# call does.
_PROGRAM = """
import os, re, traceback
import torch
import nosquare as ns
torch.set_num_threads(1)

def body(n):
{body}

def status(word):
    return int(re.search(rf"{{word}}:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def child(n):
    body(64)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    body(n)
    print(status("VmHWM") - before, flush=True)

for n in {sizes}:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child(n)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(1)
"""


def peaks(body: str, *sizes: int) -> list[int]:
    """Bytes of resident memory that `body`, statements over `torch`, `ns` and `n`, adds at its
    peak."""
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    program = _PROGRAM.format(body=indented, sizes=sizes)
    # a fixed threshold keeps malloc from holding on to large blocks that were freed
    fixed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    env = {**os.environ, **fixed, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return [int(line) for line in run.stdout.split()]
