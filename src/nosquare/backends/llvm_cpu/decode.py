"""Decode: few query rows against many keys, cut into chunks of keys for all cores at once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...inputs import Inputs
from ...mask import Full
from ...problem import Problem
from ...receipt import Ran
from . import pool
from .call import Filled, LeafForm, bind, fill, outputs, prepared
from .compiled import compiled
from .decode_kernel import CHUNK, Key, Sizes, write
from .target import Target
from .visible import core

NAME = "llvm_cpu decode"
ROWS = 16  # of a key head, at most: with more, products of whole tiles are faster
# bytes of keys and values below which torch's own kernel is done sooner (docs/log.md): of 16-bit
# types, which it reads slowly; of float32 for several rows a key head, and for one
SOON_SHORT, SOON_ROWS, SOON = 1 << 14, 1 << 17, 1 << 19
ALONE = 1 << 18  # bytes of keys and values below which waking other cores costs more than it gives

LINE = 64  # bytes of a cache line: parts begin at one
NO_MASK = LeafForm(Full, 1, 0, ())


@dataclass(frozen=True)
class Plan:
    """Decode on one target."""

    target: Target
    rows: int
    sizes: Sizes

    def __str__(self) -> str:
        return f"decode, {self.target.isa}, {self.rows} rows a key head, chunks of {CHUNK} keys"


def refusals(p: Problem) -> list[str]:
    """Why this is no decoding, in words."""
    why = []
    if p.G * p.M > ROWS:
        why.append(f"it decodes up to {ROWS} query rows a key head, and here are {p.G * p.M}")
    if p.p > 0:
        why.append("it decodes without dropout")
    if p.packed:
        why.append("it decodes no packed sequences")
    return why


def slower(p: Problem) -> list[str]:
    """Why torch's own kernel should decode, if it can, where there is so little to do that it is
    done before this one has filled its block."""
    if p.M == 1 and p.G > 1:  # it has to fold the group into rows, which takes longer than this
        return []
    soon = SOON_ROWS if p.G * p.M > 1 else SOON
    read = _read_bytes(p, p.N)
    if read >= (soon if p.dtype == torch.float32 else SOON_SHORT):
        return []
    return [f"with {read:,} bytes of keys and values torch's own kernel is done sooner"]


def plan(p: Problem, target: Target) -> Plan:
    """How it would run."""
    return Plan(target, p.G * p.M, Sizes.of(p.G * p.M, p.D, p.E, target))


def workspace_bytes(p: Problem, plan: Plan) -> int | None:
    """Parts and counters; None where the mask has arrays, which nobody has here."""
    if "t0" in p.mask:
        return None
    return _work_bytes(p.B * p.Hk, chunks(p), plan)


def chunks(p: Problem) -> int:
    """Parts that a key head is cut into; with a mask of arrays, that nobody has here, at most."""
    return _parts(*((0, p.N) if "t0" in p.mask else bind(p).span(0, p.M)))


class _Ready(NamedTuple):
    """What all calls of one plan and form have in common.

    span   of keys that some row sees, `parts` chunks of them a key head
    head   bytes of the counters at the start of the workspace, one a key head
    wide   whether it is worth waking other cores
    """

    address: int
    items: int
    parts: int
    span: tuple[int, int]
    head: int
    words: int
    wide: bool
    ran: Ran


def forward(p: Problem, plan: Plan, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o, lse and what ran."""
    filled = fill(p, x)
    call, own = filled.call, prepared(_prepare, p, plan, filled)
    o, lse = outputs(p, filled)
    work = torch.empty(own.words, dtype=torch.float32)
    call.work2 = work.data_ptr()
    call.work = call.work2 + own.head
    ctypes.memset(call.work2, 0, own.head)
    call.x0, (call.x1, call.x2) = own.parts, own.span
    threads = torch.get_num_threads() if own.wide else 1
    pool.run(own.address, filled.address, own.items, threads)
    return o, lse, own.ran


def _prepare(p: Problem, plan: Plan, filled: Filled) -> _Ready:
    low, high = filled.bound.span(0, p.M)
    first, last = core(filled.bound, 0, p.M)
    masked = not first <= low <= high <= last
    form = filled.form if masked else replace(filled.form, mask=NO_MASK)
    key = Key(form, p.G, p.M, masked)
    code = compiled(("decode", key), plan.target, lambda: write(key, plan.target))
    heads, parts = p.B * p.Hk, _parts(low, high)
    ran = Ran((f"{NAME} {plan.target.isa}",), _work_bytes(heads, parts, plan))
    return _Ready(
        address=code.address("decode"),
        items=heads * parts,
        parts=parts,
        span=(low, high),
        head=_head_bytes(heads),
        words=_work_bytes(heads, parts, plan) // 4,
        wide=_read_bytes(p, high - low) >= ALONE,
        ran=ran,
    )


def _work_bytes(heads: int, parts: int, plan: Plan) -> int:
    return _head_bytes(heads) + 4 * heads * parts * plan.sizes.part


def _head_bytes(heads: int) -> int:
    return -(-8 * heads // LINE) * LINE


def _read_bytes(p: Problem, keys: int) -> int:
    return p.B * p.Hk * keys * (p.D + p.E) * p.dtype.itemsize


def _parts(low: int, high: int) -> int:
    """Chunks that the keys of the span lie in; one where there are none, to write the results."""
    return max(-(-high // CHUNK) - low // CHUNK, 1)
