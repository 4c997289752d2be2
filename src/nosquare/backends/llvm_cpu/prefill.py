"""Prefill: forward for many queries, run. prefill_kernel.py has the algorithm."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...bound import Bound
from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from . import pool
from .call import KINDS, Filled, fill, one_batch
from .compiled import Code, compiled
from .packed import sequences
from .prefill_kernel import write
from .prefill_packing import BLOCK, PANEL, Sizes
from .products import ROWS
from .target import Target, host
from .visible import core

RANGES_KEPT = 64
WIDEST = 2048
ALONE = 1 << 22  # products of two numbers: with fewer, another core would wake up too late
# products of two numbers from which prefill beats torch's kernel, one thread each (docs/log.md)
LEAST = {torch.float32: 1 << 24, torch.float16: 1 << 21, torch.bfloat16: 1 << 21}
_RANGES: dict[tuple[Any, ...], Any] = {}


@dataclass(frozen=True)
class Plan:
    """Prefill on one target."""

    sizes: Sizes

    def __str__(self) -> str:
        pairs = ", pairs of bfloat16" if self.sizes.pairs else ""
        return f"prefill, {self.sizes.target.isa}, tiles {self.sizes.rows} x {BLOCK}{pairs}"


def refusals(p: Problem) -> list[str]:
    """Rows that do not fit a stack."""
    if max(p.D, p.E) > WIDEST:
        return [f"its tiles hold rows of up to {WIDEST} numbers, and these have {max(p.D, p.E)}"]
    return []


def slower(p: Problem) -> list[str]:
    """Where torch's own kernel, if it has this problem, is sooner."""
    if p.dtype == torch.bfloat16 and "+amx-bf16" in host().features:
        return ["torch multiplies bfloat16 with AMX here, which no kernel of ours uses yet"]
    least = LEAST[p.dtype]
    count = p.B * p.Hq * p.M * p.N * (p.D + p.E)
    if count < least:
        return [f"with fewer than {least} products torch's own kernel has done before it starts"]
    return []


def plan(p: Problem, target: Target) -> Plan:
    """How it would run."""
    return Plan(Sizes(KINDS[p.dtype], p.D, p.E, target))


def workspace_bytes(p: Problem, plan: Plan) -> int | None:
    """Panels of k, and of v where it is packed; None where they depend on the lengths of packed
    sequences."""
    return None if p.packed else 4 * p.B * p.Hk * sum(plan.sizes.work_words(p.N))


def forward(p: Problem, plan: Plan, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o, lse and what ran."""
    o, lse = p.empty_o(), torch.empty(p.lse_shape, dtype=torch.float32)
    if p.packed:
        o.zero_()  # tokens that no sequence owns
        lse.fill_(-torch.inf)
        words = [
            _run(one.problem, plan, one.x, _one_entry(o, lse, one.queries))
            for one in sequences(p, x)
        ]
    else:
        words = [_run(p, plan, x, (one_batch(p, o), lse.view(p.B, p.Hq, p.M)))]
    return o, lse, Ran((f"llvm_cpu prefill {plan.sizes.target.isa}",), 4 * max(words, default=0))


def _one_entry(o: Tensor, lse: Tensor, queries: slice) -> tuple[Tensor, Tensor]:
    return o[queries].transpose(0, 1).unsqueeze(0), lse[:, queries].unsqueeze(0)


def _run(p: Problem, plan: Plan, x: Inputs, out: tuple[Tensor, Tensor]) -> int:
    """Write o and lse of a problem that is not packed; the words of workspace that took."""
    filled = fill(p, x)
    filled.point("o", out[0])
    filled.point("lse", out[1])
    call, heads = filled.call, p.B * p.Hk
    words_k, words_v = (heads * n for n in plan.sizes.work_words(p.N))
    work = torch.empty(words_k + words_v)
    call.work = work.data_ptr()
    call.work2 = call.work + 4 * words_k
    ranges = group_ranges(p, filled.bound)
    call.x0, call.x1 = ctypes.addressof(ranges), -(-p.G * p.M // plan.sizes.rows)
    call.x2 = -(-p.N // PANEL)
    small = heads * p.G * p.M * p.N * (p.D + p.E) < ALONE
    threads = 1 if small else torch.get_num_threads()
    code = kernel(filled, plan)
    pool.run(code.address("pack"), filled.address, heads * call.x2, threads)
    pool.run(code.address("tile"), filled.address, heads * call.x1, threads)
    return words_k + words_v


def kernel(filled: Filled, plan: Plan) -> Code:
    """The code of a call."""
    form, sizes = filled.form, plan.sizes
    return compiled(("prefill", form), sizes.target, lambda: write(form, sizes))


def group_ranges(p: Problem, bound: Bound) -> Any:
    """(lo, hi, core_lo, core_hi) of each 6 rows of a key head, int64: see prefill_kernel._Range.
    They follow from the sizes and the words of the mask alone, so they are kept."""
    key = (p.mask, p.G, p.M, p.N)
    found = _RANGES.get(key)
    if found is None:
        words: list[int] = []
        for row in range(0, p.G * p.M, ROWS):
            rows = row // p.G, min(row + ROWS - 1, p.G * p.M - 1) // p.G + 1
            words += [*bound.span(*rows), *core(bound, *rows)]
        found = (ctypes.c_int64 * max(len(words), 1))(*words)
        if len(_RANGES) >= RANGES_KEPT:
            _RANGES.clear()
        _RANGES[key] = found
    return found
