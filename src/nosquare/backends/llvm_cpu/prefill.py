"""Prefill: forward for many queries, run. prefill_kernel.py has the algorithm."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...bound import Bound
from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from . import pool
from .call import KINDS, Filled, fill, outputs, prepared
from .compiled import Code, compiled
from .packed import sequences
from .prefill_kernel import write
from .prefill_packing import PANEL, Sizes
from .target import Target
from .visible import core

RANGES_KEPT = 64
WIDEST = 2048
ALONE = 1 << 21  # products of two numbers: with fewer, another core would wake up too late
# products of two numbers from which prefill beats torch's kernel, one thread each (docs/log.md)
LEAST = {torch.float32: 1 << 19, torch.float16: 1 << 17, torch.bfloat16: 1 << 17}
_RANGES: dict[tuple[Any, ...], Any] = {}


@dataclass(frozen=True)
class Plan:
    """Prefill on one target."""

    sizes: Sizes

    def __str__(self) -> str:
        z = self.sizes
        how = ", bfloat16 by AMX" if z.tiled else ", pairs of bfloat16" if z.pairs else ""
        return f"prefill, {z.target.isa}, tiles {z.rows} x {z.block}{how}"


def refusals(p: Problem) -> list[str]:
    """Rows that do not fit a stack."""
    if max(p.D, p.E) > WIDEST:
        return [f"its tiles hold rows of up to {WIDEST} numbers, and these have {max(p.D, p.E)}"]
    return []


def slower(p: Problem) -> list[str]:
    """Where torch's own kernel, if it has this problem, is sooner."""
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


class _Ready(NamedTuple):
    """What all calls of one plan and form have in common.

    pack, tile  where the two functions start, and how many items each has
    ranges      of group_ranges, which x0 points at; fields: x0, x1, x2
    k_bytes     of packed k, which v follows in the workspace
    wide        whether it is worth waking other cores
    """

    pack: tuple[int, int]
    tile: tuple[int, int]
    ranges: Any
    fields: tuple[int, int, int]
    k_bytes: int
    words: int
    wide: bool
    ran: Ran


def forward(p: Problem, plan: Plan, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o, lse and what ran."""
    if not p.packed:
        filled = fill(p, x)
        o, lse = outputs(p, filled)
        return o, lse, _run(p, plan, filled)
    o, lse = p.empty_o(), torch.empty(p.lse_shape, dtype=torch.float32)
    o.zero_()  # tokens that no sequence owns
    lse.fill_(-torch.inf)
    most, name = 0, _name(plan)
    for one in sequences(p, x):
        filled = fill(one.problem, one.x)
        filled.point("o", o[one.queries].transpose(0, 1).unsqueeze(0))
        filled.point("lse", lse[:, one.queries].unsqueeze(0))
        most = max(most, _run(one.problem, plan, filled).workspace_bytes or 0)
    return o, lse, Ran((name,), most)


def _name(plan: Plan) -> str:
    return f"llvm_cpu prefill {plan.sizes.target.isa}" + " amx" * plan.sizes.tiled


def _run(p: Problem, plan: Plan, filled: Filled) -> Ran:
    """Write o and lse of a problem that is not packed."""
    own, call, address = prepared(_prepare, p, plan, filled), filled.call, filled.address
    work = torch.empty(own.words, dtype=torch.float32)
    call.work = work.data_ptr()
    call.work2 = call.work + own.k_bytes
    call.x0, call.x1, call.x2 = own.fields
    threads = torch.get_num_threads() if own.wide else 1
    pool.run(own.pack[0], address, own.pack[1], threads)
    pool.run(own.tile[0], address, own.tile[1], threads)
    return own.ran


def _prepare(p: Problem, plan: Plan, filled: Filled) -> _Ready:
    heads, code = p.B * p.Hk, kernel(filled, plan)
    words_k, words_v = (heads * n for n in plan.sizes.work_words(p.N))
    ranges = group_ranges(p, filled.bound, plan.sizes.group)
    tiles, panels = -(-p.G * p.M // plan.sizes.rows), -(-p.N // PANEL)
    return _Ready(
        pack=(code.address("pack"), heads * panels),
        tile=(code.address("tile"), heads * tiles),
        ranges=ranges,
        fields=(ctypes.addressof(ranges), tiles, panels),
        k_bytes=4 * words_k,
        words=words_k + words_v,
        wide=heads * p.G * p.M * p.N * (p.D + p.E) >= ALONE,
        ran=Ran((_name(plan),), 4 * (words_k + words_v)),
    )


def kernel(filled: Filled, plan: Plan) -> Code:
    """The code of a call."""
    form, sizes = filled.form, plan.sizes
    return compiled(("prefill", form), sizes.target, lambda: write(form, sizes))


def group_ranges(p: Problem, bound: Bound, group: int) -> Any:
    """(lo, hi, core_lo, core_hi) of each `group` rows of a key head, int64: prefill_kernel._Range.
    They follow from the sizes and the words of the mask alone, so they are kept."""
    key = (p.mask, p.G, p.M, p.N, group)
    found = _RANGES.get(key)
    if found is None:
        words: list[int] = []
        for row in range(0, p.G * p.M, group):
            rows = row // p.G, min(row + group - 1, p.G * p.M - 1) // p.G + 1
            words += [*bound.span(*rows), *core(bound, *rows)]
        found = (ctypes.c_int64 * max(len(words), 1))(*words)
        if len(_RANGES) >= RANGES_KEPT:
            _RANGES.clear()
        _RANGES[key] = found
    return found
