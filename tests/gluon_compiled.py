"""Compile kernels of gluon_sm90 for a Hopper card that is not here, and read what they take."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nosquare.bench.cases import Case
from triton_compiled import inputs

pytest.importorskip("triton", reason="gluon_sm90 is written in Triton's Gluon")
import triton
from triton.backends.nvidia.compiler import get_ptxas

from nosquare.backends.gluon_sm90 import attend, attend_plan, grad_plan, gradients
from nosquare.backends.gluon_sm90.compiled import Key, compile_for
from nosquare.backends.gluon_sm90.form import ROWS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CARD = torch.device("cuda", 0)
DEPTH = 16  # of one instruction: m64nNk16, so many products are summed


class Taken(NamedTuple):
    """What a kernel takes.

    shared_bytes  of a block
    spills        bytes that one thread stores for want of registers
    messages      numbers of ptxas's messages about products: C75.., as where it makes them wait
    products      instructions that multiply, by their n
    """

    shared_bytes: int
    spills: int
    messages: frozenset[str]
    products: Counter[int]


def key_of(line: str, packed: bool = False, **changes: Any) -> Key:
    """Of the kernel of a case on a card that need not be here, by its plan with some changes;
    packed: its batch entries are sequences side by side."""
    p = replace(Case.parse(line).problem(), device=CARD, packed=packed)
    chosen = attend_plan.plan(p)
    assert chosen is not None, "there are no tiles for the widths"
    lengths = torch.empty(p.batch, dtype=torch.int64, device="meta")
    x = inputs(p, *[lengths] * ("t0" in p.mask))
    return attend.offline(p, replace(chosen, **changes), x)


def grad_key_of(line: str, deterministic: bool = False) -> Key:
    """Of the kernel of backward that multiplies."""
    p = replace(Case.parse(line).problem(), device=CARD, deterministic=deterministic)
    chosen = grad_plan.plan(p)
    assert chosen is not None, "there are no tiles for the widths"
    lengths = torch.empty(p.batch, dtype=torch.int64, device="meta")
    return gradients.offline(p, chosen, inputs(p, *[lengths] * ("t0" in p.mask)))


@cache
def taken(key: Key) -> Taken:
    """Compile, and read what it takes."""
    found = compile_for(key)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ptx").write_text(found.asm["ptx"])
        Path(folder, "cubin").write_bytes(found.asm["cubin"])
        # again, since Triton keeps no log of it; by its own choice, which is another from 3.9 on
        ptxas = get_ptxas(90).path
        log = _output(folder, ptxas, "-v", "--gpu-name=sm_90a", "ptx", "-o", "/dev/null")
        code = _output(folder, str(TOOLS / "nvdisasm"), "-c", "cubin")
    (spills,) = re.findall(r"(\d+) bytes spill stores", log)
    widths = re.findall(rf"\bHGMMA\.{ROWS}x(\d+)x{DEPTH}\.", code)
    assert len(widths) == len(re.findall(r"\bHGMMA\b", code)), "products of another size"
    messages = frozenset(re.findall(r"\bC75\d\d\b", log))
    return Taken(found.metadata.shared, int(spills), messages, Counter(map(int, widths)))


def _output(folder: str, *command: str) -> str:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def grad_products_of(key: Key) -> Counter[int]:
    """The instructions that the kernel of backward must have, by their n, and no others.

    A warp group has 64 keys. Of a tile of queries s takes D / 16 instructions with n = TILE_M, dp
    E / 16; dv and dk TILE_M / 16 each, with n = E and n = D; its half of dq 128 / 16, with n = D
    where it is half of the queries and D / 2 where it is half of the columns (TILE_M = 64). Those
    of one tile stand in each copy of the loop (1, 1 where F.hidden, 1 where F.mask.low), and dq
    once more after it; for two groups.
    """
    words = dict(key.constants)
    form, wide = words["F"], words["TILE_M"]
    copies = 2 * (1 + form.hidden + form.mask.low)
    half = form.D if wide == 2 * ROWS else form.D // 2
    return (
        Counter({wide: copies * (form.D + form.E) // DEPTH})
        + Counter({form.E: copies * wide // DEPTH})
        + Counter({form.D: copies * wide // DEPTH})
        + Counter({half: (copies + 2) * 2 * ROWS // DEPTH})
    )


def products_of(key: Key) -> Counter[int]:
    """The instructions that the kernel must have, by their n, and no others.

    A warp group multiplies 64 rows: q k' of a tile takes D / 16 instructions with n = TILE_N, and
    p v of it TILE_N / 16 with n = E. It has the scores of its last tile before the loop and the
    values of its first tile after it, which is one pair of products; and one pair in each copy of
    the loop, of which there are

        1                     nothing is hidden
        1 where F.more        hidden at the high end, beyond the last tile
        1 where F.mask.low    hidden at the low end

        GROUPS (1 + copies) (D / 16 + TILE_N / 16)      in all

    Packed sequences change nothing in this. Where F.half, every second group, from the first on,
    multiplies half of the last tile: as many instructions, with n = TILE_N / 2. More would be a
    loop that was unrolled or code that was copied; fewer, products that are done elsewhere.
    """
    words = dict(key.constants)
    form, wide, groups = words["F"], words["TILE_N"], words["GROUPS"]
    pairs = 2 + form.more + form.mask.low  # of one group
    halves = -(-groups // 2) if form.half else 0
    scores, values = form.D // DEPTH, wide // DEPTH
    return (
        +Counter({wide // 2: halves * scores})
        + Counter({wide: (groups * pairs - halves) * scores})
        + Counter({form.E: groups * pairs * values})
    )
