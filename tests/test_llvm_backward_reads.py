"""llvm_cpu, backward: rows of q and do are multiplied where they lie, or copied; and no read leaves
an array."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from helpers import case
from llvm_helpers import AT_THE_EDGE, ISAS, target_of
from test_llvm_backward import by_kernel

KINDS = [*ISAS, "tiles"]


def by_token(t: Tensor) -> Tensor:
    """The same numbers with the heads of a token beside each other."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("isa", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_rows_lie_changes_no_bit(isa: str, dtype: torch.dtype) -> None:
    """Whole tiles, and others, of q and do: rows end to end, and rows apart."""
    machine = target_of(isa)
    c = case(m=200, n=150, d=32, e=64, dtype=dtype)
    do, dlse = c.cotangents()
    found = []
    for q, cotangent in ((c.q, do), (by_token(c.q), do), (c.q, by_token(do))):
        mine = [t.detach().requires_grad_() for t in (q, c.k, c.v)]
        got = by_kernel(machine)(*mine)
        found.append(torch.autograd.grad([got.o, got.lse], mine, [cotangent, dlse]))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


GUARDED = """
from dataclasses import replace
from nosquare.backends.llvm_cpu import gradients

tiles = sys.argv[1] == "tiles"
machine = target.host("avx512" if tiles else sys.argv[1])
machine = replace(machine, tiles="emulated") if tiles else machine
for dtype in (torch.bfloat16,) if tiles else (torch.float32, torch.bfloat16, torch.float16):
    for m, n, d, e in ((7, 71, 22, 37), (192, 128, 32, 64)):
        sizes = (m, d), (n, d), (n, e), (m, e), (m, e)
        q, k, v, o, do = (at_the_edge(torch.randn(1, 2, *size).to(dtype)) for size in sizes)
        lse, dlse = (at_the_edge(torch.randn(1, 2, m)) for _ in range(2))
        bias, seen = at_the_edge(torch.randn(m, n)), at_the_edge(torch.rand(m, n) < 0.5)
        for mask, more in ((ns.Full(), None), (ns.Causal(), None), (ns.Dense(seen), bias)):
            x = Inputs(q, k, v, more, None, None, None, None, None, mask.tensors)
            p = Problem.of(x, Spec(str(mask)), "qkv" if more is None else "qkvb")
            gradients.backward(p, gradients.plan(p, machine), x, (o, lse), (do, dlse))
print("done")
"""


@pytest.mark.parametrize("isa", KINDS)
def test_reads_stay_inside_the_arrays(isa: str) -> None:
    target_of(isa)
    words = [sys.executable, "-c", AT_THE_EDGE + GUARDED, isa]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
