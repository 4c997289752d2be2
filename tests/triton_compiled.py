"""Compile kernels of triton_any for cards that are not here, and read what they take."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nosquare.inputs import Inputs
from nosquare.problem import Problem

pytest.importorskip("triton", reason="triton_any is written in Triton")
import triton

from nosquare.backends.triton_any import cards, compiled

CARDS = list(cards.NAMED)


class Taken(NamedTuple):
    """What a kernel takes: bytes of a block's shared memory; bytes, or on an AMD card registers,
    that one thread spills."""

    shared_bytes: int
    spills: int


def problem(
    d: int = 128,
    e: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    m: int = 4096,
    n: int = 4096,
    heads: tuple[int, int] = (16, 4),
    **more: Any,
) -> Problem:
    """A problem on a card, which need not be here: contiguous arrays of two batch entries."""
    hq, hk = heads
    e = d if e is None else e
    if more.get("packed"):
        strides = tuple((h * w, w, 1) for h, w in ((hq, d), (hk, d), (hk, e)))
    else:
        sizes = ((hq, m, d), (hk, n, d), (hk, n, e))
        strides = tuple((h * r * w, r * w, w, 1) for h, r, w in sizes)
    where = torch.device("cuda", 0)
    return Problem((2,), hq, hk, m, n, d, e, dtype, where, strides, d**-0.5, **more)  # type: ignore[arg-type]


def inputs(p: Problem, *arrays: torch.Tensor) -> Inputs:
    """Stand-ins, without memory, for what a problem has beside q, k and v."""

    def stand_in(shape: tuple[int, ...] | None) -> torch.Tensor | None:
        return None if shape is None else torch.empty(shape, device="meta")

    nothing = torch.empty(0, device="meta")
    seed = torch.empty((), dtype=torch.int64, device="meta") if p.p > 0 else None
    cu = torch.empty(p.B + 1, dtype=torch.int32, device="meta") if p.packed else None
    more = (stand_in(p.bias), stand_in(p.sinks), stand_in(p.alibi), seed, cu, cu)
    return Inputs(nothing, nothing, nothing, *more, arrays)


def taken(kernel: Any, key: compiled.Key, card: cards.Card) -> Taken:
    """Compile, and read what it takes."""
    found = compiled.compile_for(kernel, key, card)
    if card.backend == "hip":
        spilled = re.findall(r"\.vgpr_spill_count:\s+(\d+)", found.asm["amdgcn"])
        return Taken(found.metadata.shared, int(spilled[0]))
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        run = subprocess.run(
            [str(reader), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    (stack,) = re.findall(r"STACK:(\d+)", run.stdout + run.stderr)
    return Taken(found.metadata.shared, int(stack))
