"""compute-sanitizer over triton_any and gluon_sm90, forward and backward: nothing out of bounds, no
race.

Run as a program with the name of a backend, this file is what the sanitizer looks at.
"""

from __future__ import annotations

import inspect
import re
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


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not Path(TOOL).exists(), reason="there is no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("backend", ["triton_any", "gluon_sm90"])
def test_nothing_out_of_bounds_and_no_race(backend: str, tool: str) -> None:
    if backend == "gluon_sm90" and not HOPPER:
        pytest.skip("its kernels are for Hopper cards (sm_90)")
    program = [sys.executable, __file__, backend]
    subprocess.run(program, check=True, timeout=300)  # compiles the kernels
    command = [TOOL, "--tool", tool, "--error-exitcode", "9", *program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if tool == "racecheck" and backend == "gluon_sm90":
        assert "RACECHECK SUMMARY" in run.stdout
        assert races(run.stdout, dispatching()) == []
    else:
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


def races(text: str, but: set[tuple[str, int]]) -> list[str]:
    """What racecheck reports, without what lies wholly between `but`: lines as (file, number)."""
    found = []
    for report in re.split(r"=+ (?=Error|Warning)", text)[1:]:
        places = re.findall(r"access at \S+ in (?:\S*/)?(\S+\.py):(\d+)", report)
        if not places or not {(name, int(number)) for name, number in places} <= but:
            found.append(report)
    return found


def dispatching() -> set[tuple[str, int]]:
    """Lines of gluon_sm90's kernels where Triton tells groups of warps what to do: the first of a
    kernel, and that of its warp_specialize, or of the condition on it. The tool reports hazards
    between these once groups meet at named barriers of some of the threads, which PTX allows: it
    has none for a kernel of nothing but warp_specialize and a store each, and has them where two
    groups meet so as well."""
    from nosquare.backends.gluon_sm90 import attend_kernel, grad_kernel

    found = set()
    for kernel in (attend_kernel.attend, grad_kernel.gradients):
        lines, first = inspect.getsourcelines(kernel.fn)
        name = Path(inspect.getfile(kernel.fn)).name
        for at, line in enumerate(lines):
            if re.match(r"def \w+\(", line):
                found.add((name, first + at))
            if re.match(r"\s+gl\.warp_specialize\(", line):
                found.add((name, first + at))
                if re.match(r"\s+if ", lines[at - 1]):
                    found.add((name, first + at - 1))
    return found


REPORT = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at attend+0x3f0 in attend_kernel.py:{first}
=========     and Write access at attend+0x123a0 in attend_kernel.py:{second} [120 hazards]
=========     and Write access at attend+0x22eb0 in attend_kernel.py:{third} [55 hazards]
=========
========= RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)
"""


def test_a_race_of_our_own_is_not_taken_for_tritons() -> None:
    pytest.importorskip("triton.experimental.gluon", reason="gluon_sm90 is written in Gluon")
    from nosquare.backends.gluon_sm90 import attend_kernel

    lines = sorted(line for name, line in dispatching() if name == "attend_kernel.py")
    source = inspect.getsource(attend_kernel).splitlines()
    assert [source[line - 1].strip() for line in lines] == [
        "def attend(", "if GROUPS == 2:", "gl.warp_specialize(", "gl.warp_specialize(",
    ]  # fmt: skip
    known = REPORT.format(first=lines[0], second=lines[0], third=lines[1])
    assert races(known, dispatching()) == []
    for wrong in ({"first": lines[0] - 40}, {"third": lines[1] - 1}, {"second": lines[0] + 1}):
        places = {"first": lines[0], "second": lines[0], "third": lines[1]} | wrong
        assert len(races(known + REPORT.format(**places), dispatching())) == 1
    assert len(races(known.replace("in attend_kernel.py", "in pipe.py"), dispatching())) == 1
    assert len(races("========= Error: Race reported somewhere else", dispatching())) == 1


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


def on_hopper() -> Iterator[tuple[int, int, int, torch.dtype, dict[str, Any]]]:
    """The same of what gluon_sm90 takes: whole tiles and cut ones, several for a program, few rows,
    rows that see no key."""
    half = torch.bfloat16
    for d in (64, 128, 256):
        yield 256, 256, d, half, {"mask": ns.Causal()}
        yield 300, 401, d, half, {"mask": ns.Window(100, 30)}
        yield 401, 300, d, half, {"mask": ns.Causal(), "softcap": 3.0, "sinks": learned(4).detach()}
    yield 256, 384, 128, half, {}
    yield 1, 401, 128, half, {}
    yield 150, 200, 80, torch.float16, {"mask": ns.Prefix(50) | ns.Causal()}
    yield 5000, 300, 64, half, {"mask": ns.Causal("start")}


def gluon() -> None:
    """Run them."""
    for m, n, d, dtype, options in on_hopper():
        sizes = ((4, m), (2, n), (2, n))
        q, k, v = (
            torch.randn(2, h, t, d, device="cuda", dtype=dtype).requires_grad_(d <= 128)
            for h, t in sizes
        )
        s = ns.attention_state(q, k, v, backend="gluon_sm90", **options)
        if d <= 128:
            (s.o.sum() + s.lse.clamp(min=-1e3).sum()).backward()
    torch.cuda.synchronize()


def main() -> None:
    """Run them all on triton_any."""
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
    {"triton_any": main, "gluon_sm90": gluon}[sys.argv[1]]()
