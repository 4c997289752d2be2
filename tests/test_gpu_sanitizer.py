"""compute-sanitizer over triton_any, forward and backward: nothing out of bounds, no race.

Run as a program, this file is what the sanitizer looks at.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nosquare as ns

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not Path(TOOL).exists(), reason="there is no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_out_of_bounds_and_no_race(tool: str) -> None:
    subprocess.run([sys.executable, __file__], check=True, timeout=300)  # compiles the kernels
    command = [TOOL, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


def problems() -> Iterator[tuple[int, int, int, torch.dtype, dict[str, Any]]]:
    """(M, N, D, dtype, options), small and of every kind: odd sizes, tiles at the edge."""
    half, ids = torch.bfloat16, torch.arange(150, device="cuda") // 40
    for d in (64, 128):
        yield 150, 150, d, half, {"mask": ns.Causal()}
        yield 150, 150, d, half, {"mask": ns.Causal(), "dropout": ns.Dropout(0.2, 3)}
        yield 150, 200, d, half, {"bias": learned(2, 4, 150, 200)}
    more = {"bias": learned(4, 150, 200), "sinks": learned(4), "softcap": 3.0}
    yield 150, 200, 64, half, more
    yield 150, 150, 64, half, {"mask": ns.Documents(ids, ids)}
    yield 150, 150, 64, half, {"mask": ns.Dense((ids[:, None] == ids) & (ids[:, None] > 0))}
    yield 1, 3000, 64, half, {}
    yield 100, 150, 64, torch.float32, {"mask": ns.Causal()}


def learned(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").requires_grad_()


def main() -> None:
    """Run them all."""
    for m, n, d, dtype, options in problems():
        q, k, v = (
            torch.randn(2, h, rows, d, device="cuda", dtype=dtype).requires_grad_()
            for h, rows in ((4, m), (2, n), (2, n))
        )
        s = ns.attention_state(q, k, v, backend="triton_any", **options)
        (s.o.sum() + s.lse.clamp(min=-1e3).sum()).backward()
    x = torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    cu = torch.tensor([0, 5, 5, 200, 290], device="cuda")
    o = ns.attention_varlen(x, x, x, cu, cu, mask=ns.Causal(), backend="triton_any")
    o.sum().backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
