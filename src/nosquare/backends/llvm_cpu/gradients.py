"""Backward on the host: its workspace, its block, the gradients in the user's shapes."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...axes import lay_out_bias, per_head, restore
from ...bound import Bound
from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from .. import Grads
from . import pool
from .call import Filled, fill, prepared, steps
from .compiled import Code, compiled
from .grad_kernel import OWN, TABLE, write
from .grad_packed import Pack, blocks, heads_first, overlaid
from .grad_packing import KEYS, LONG, LONG_TILE, PAIRS, TILE, TILES, WIDE, Room, padded
from .grad_weights import FACTS, Spec
from .large_lse import large
from .target import Target
from .visible import core

# products (pairs times D) below which torch's own backward is done sooner, and keys of a panel with
# so few that it always is (docs/log.md)
SOON, FEW_KEYS = 1 << 18, 32
ALONE = 1 << 19  # products below which waking other cores costs more than it gives
_ZERO = ctypes.c_float(0.0)  # the cotangent of each lse, where there is none


@dataclass(frozen=True)
class Plan:
    """Items of backward: `entries` batch entries by `heads` key heads each, and each of those in
    `splits` shares of the panels of keys; on at most `threads` threads. products: how matrices are
    multiplied (grad_packing.py). tile: queries of a tile."""

    entries: int
    heads: int
    splits: int
    threads: int
    target: Target
    products: str = WIDE
    tile: int = TILE[WIDE]

    def room(self, p: Problem) -> Room:
        """The scratch memory of a worker."""
        return Room(p.D, p.E, self.target, self.products, self.tile)

    def items(self, p: Problem) -> int:
        """How many there are."""
        return p.B // self.entries * (p.Hk // self.heads) * self.splits

    def scratch_words(self, p: Problem, rows: int) -> tuple[int, int]:
        """Workers, and the words of scratch memory of each, for heads of so many rows."""
        room = self.room(p)
        row = room.turned + (room.D if self.splits == 1 else 0)
        return min(self.threads, self.items(p)), room.words + p.G * rows * row

    def __str__(self) -> str:
        shares = f" in {self.splits} shares of keys" if self.splits > 1 else ""
        return (
            f"backward, {self.target.isa}, {self.products}, tiles {self.tile} x {KEYS}, "
            f"{self.entries} batch entries x {self.heads} key heads an item{shares}, "
            f"{self.threads} threads"
        )


def refusals(p: Problem) -> list[str]:
    """Nothing but another delta: it runs whatever else the package takes."""
    return ["it has no exact_delta: it takes delta from o"] if p.exact_delta else []


def slower(p: Problem) -> list[str]:
    """Where torch's own backward, if it has one, is faster, in the user's terms."""
    if _products(p) < SOON or p.N <= FEW_KEYS:
        return [f"at {_products(p):,} products a pass torch's own backward is done sooner"]
    return []


def _products(p: Problem) -> int:
    """Of two numbers, in one of the five products of matrices."""
    return p.B * p.Hq * p.M * p.N * p.D


def workspace_bytes(p: Problem, plan: Plan) -> int | None:
    """Bytes that its receipt will name; None where they depend on the lengths of packed
    sequences."""
    if p.packed:
        return None
    rows = padded(p.M, plan.tile)
    workers, words = plan.scratch_words(p, rows)
    shared = FACTS * plan.splits
    if plan.splits > 1:
        shared += plan.splits * plan.room(p).D
    words = workers * words + p.B * p.Hq * rows * shared
    return 4 * words + 8 * TABLE * (rows // plan.tile)


def plan(p: Problem, target: Target) -> Plan:
    """One item a key head, or shares of one where these are fewer than the threads."""
    there = torch.get_num_threads()
    threads = there if _products(p) >= ALONE else 1
    sharers = there if p.batch_invariant else threads  # not by what else is in the batch
    entries = heads = splits = 1
    bias = None
    if "b" in p.grads and p.bias is not None:
        bias = (1, 1, 1, *p.bias)[-3:]
        if p.B > 1 and math.prod(p.bias[:-3]) != p.B:
            entries = p.B  # every entry adds to the same gradient
        if bias[0] == 1:
            heads = p.Hk
    units = p.Hk // heads * (1 if p.batch_invariant else p.B // entries)
    if bias is None or bias[2] > 1:
        panels = -(-p.N // KEYS)
        splits = 1 if units >= 4 * sharers else sharers // math.gcd(units, sharers)
        if not p.packed:  # a sequence is shared out alike whatever it is packed with
            splits = min(splits, panels)
    in_pairs = p.dtype == torch.bfloat16 and target.pairs
    products = (TILES if target.tiles else PAIRS) if in_pairs else WIDE
    tall = products == TILES and p.M >= LONG and not p.packed
    tile = LONG_TILE if tall else TILE[products]
    return Plan(entries, heads, splits, threads, target, products, tile)


def table(bound: Bound, tile: int) -> list[tuple[int, int, int, int]]:
    """For each tile of queries, the keys [lo, hi) that it may see and those that all of it sees."""
    found = []
    for i0 in range(0, bound.m, tile):
        i1 = min(i0 + tile, bound.m)
        found.append((*bound.span(i0, i1), *core(bound, i0, i1)))
    return found


class _Ready(NamedTuple):
    """What all calls of one plan and form have in common.

    fields  of the block: numbers of the kernel's own, strides of what backward makes
    spans   the table that the block points at
    facts   shape of (splits, B, Hq, rows, 4), the first in the workspace; packed sequences share
            the rows of one entry
    scratch, sums  where these begin in it, in bytes: memory of the workers; dq, where it comes in
            shares (splits, B, Hq, rows, D to whole vectors)
    words   of the workspace
    made    shape and strides of dq, dk, dv
    code    of the kernel, without and with exact weights, once it was asked for
    """

    fields: list[tuple[str, int]]
    spans: Tensor
    facts: tuple[int, ...]
    scratch: int
    sums: int
    words: int
    made: list[tuple[tuple[int, ...], tuple[int, ...]]]
    ran: Ran
    code: dict[bool, Code]


def backward(
    problem: Problem,
    plan: Plan,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v, bias, sinks (None where not wanted), and what ran."""
    p = problem
    pack = Pack.of(p, x, plan.tile) if p.packed else None
    filled = fill(*overlaid(p, x)) if pack else fill(p, x)
    bounds = pack.bounds(p, x) if pack else [filled.bound]
    own = _of_pack(p, plan, pack, bounds) if pack else prepared(_prepare, p, plan, filled)
    dq, dk, dv = (
        torch.empty_strided(*layout, dtype=p.dtype, device=p.device) for layout in own.made
    )
    dbias = None
    if "b" in p.grads and x.bias is not None:
        dbias = torch.zeros(
            lay_out_bias(x.bias, p.batch).shape, dtype=torch.float32, device=p.device
        )
        filled.point("dbias", dbias)
    _point(p, filled, saved, cotangents, own)
    work = torch.empty(own.words, dtype=torch.float32)
    call, start = filled.call, work.data_ptr()
    call.delta, call.work, call.work2 = start, start + own.scratch, start + own.sums
    call.dq, call.dk, call.dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
    address, suffix = filled.address, ""
    if pack:
        for t, owned in ((dq, pack.q[-1]), (dk, pack.k[-1]), (dv, pack.k[-1])):
            t[owned:].zero_()  # tokens that no sequence owns
        each = _of_sequences(p, plan, filled, pack, bounds)
        address, suffix = each.data_ptr(), "_of"
    code = _code(plan, filled, own, dbias is not None, large(saved[1]))
    pool.run(code.address("item" + suffix), address, plan.items(p), plan.threads)
    if plan.splits > 1:
        pool.run(code.address("total" + suffix), address, p.B * p.Hq, plan.threads)
    if dbias is not None and x.bias is not None:
        dbias = restore(dbias, x.bias.shape, p.batch).to(x.bias.dtype)
    dsinks = None
    if "s" in p.grads and x.sinks is not None:
        facts = work[: math.prod(own.facts)].view(own.facts)[0]
        dsinks = _dsinks(p, x.sinks, saved[1], facts, pack)
    found = [t if c in p.grads else None for c, t in zip("qkv", (dq, dk, dv), strict=True)]
    return (*found, dbias, dsinks), own.ran


def _code(plan: Plan, filled: Filled, own: _Ready, dbias: bool, exact: bool) -> Code:
    found = own.code.get(exact)
    if found is None:
        spec, target = Spec(filled.form, plan.products, plan.tile, dbias, exact), plan.target
        found = compiled(("backward", spec), target, lambda: write(spec, target))
        own.code[exact] = found
    return found


def _prepare(p: Problem, plan: Plan, filled: Filled) -> _Ready:
    rows = padded(p.M, plan.tile)
    return _laid_out(p, plan, [filled.bound], (p.B, rows, rows))


def _of_pack(p: Problem, plan: Plan, pack: Pack, bounds: list[Bound]) -> _Ready:
    longest = max(b - a for a, b in pairwise(pack.rows))
    return _laid_out(p, plan, bounds, (1, pack.rows[-1], longest))


def _laid_out(p: Problem, plan: Plan, bounds: list[Bound], room: tuple[int, int, int]) -> _Ready:
    """room: entries in the workspace, rows of each of their heads, and of the longest sequence."""
    entries, rows, longest = room
    tables = [words for bound in bounds for tile in table(bound, plan.tile) for words in tile]
    spans = torch.tensor(tables, dtype=torch.int64)
    workers, each = plan.scratch_words(p, longest)
    width = plan.room(p).D if plan.splits > 1 else 0
    share = entries * p.Hq * rows
    scratch = plan.splits * share * FACTS
    sums = scratch + workers * each
    own = {
        "splits": plan.splits,
        "rows": padded(p.M, plan.tile),
        "table": spans.data_ptr(),
        "entries": plan.entries,
        "heads": plan.heads,
        "scratch": each,
        "share": share,
    }
    fields = [(f"x{n}", own[name]) for n, name in enumerate(OWN)]
    facts = torch.empty(entries, p.Hq, rows, FACTS, dtype=torch.float32, device="meta")
    fields += steps("delta", facts.shape, facts.stride())
    made = []
    for name, heads, tokens, wide in (
        ("dq", p.Hq, p.M, p.D),
        ("dk", p.Hk, p.N, p.D),
        ("dv", p.Hk, p.N, p.E),
    ):
        shape = (tokens, heads, wide) if p.packed else (*p.batch, heads, tokens, wide)
        new = torch.empty(shape, device="meta")
        made.append((shape, new.stride()))
        entry = _entries(p, new)
        fields += steps(name, entry.shape, entry.stride())
    words = sums + plan.splits * share * width
    kind = "" if plan.products == WIDE else f" {plan.products}"
    used = 4 * words + spans.numel() * spans.element_size()
    ran = Ran((f"llvm {plan.target.isa} backward{kind}",), used, ())
    whole = (plan.splits, *facts.shape)
    return _Ready(fields, spans, whole, 4 * scratch, 4 * sums, words, made, ran, {})


def _of_sequences(p: Problem, plan: Plan, whole: Filled, pack: Pack, bounds: list[Bound]) -> Tensor:
    """The blocks of all sequences."""
    tables = whole.call.x2
    sums = 4 * plan.room(p).D
    own = {
        f"x{OWN.index('rows')}": [b - a for a, b in pairwise(pack.rows)],
        f"x{OWN.index('table')}": [tables + 8 * TABLE * (r // plan.tile) for r in pack.rows[:-1]],
        "work2": [whole.call.work2 + sums * r for r in pack.rows[:-1]],
    }
    return blocks(whole, pack, bounds, own)


def _point(
    p: Problem,
    filled: Filled,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
    own: _Ready,
) -> None:
    do, dlse = cotangents
    do = torch.zeros(p.E, dtype=p.dtype).expand(p.o_shape) if do is None else do
    for name, t in (("o", _whole_rows(saved[0])), ("lse", saved[1]), ("do", _whole_rows(do))):
        filled.point(name, _entries(p, t))
    if dlse is None:
        filled.call.dlse = ctypes.addressof(_ZERO)
    else:
        filled.point("dlse", _entries(p, dlse))
    for name, value in own.fields:
        setattr(filled.call, name, value)


def _entries(p: Problem, t: Tensor) -> Tensor:
    """Something of tokens with one batch axis and heads before tokens."""
    if not p.packed:
        return t if len(p.batch) == 1 else t.reshape(p.B, *t.shape[len(p.batch) :])
    return t.expand(p.B, *t.shape) if t.dim() == 2 else heads_first(p, t)


def _whole_rows(t: Tensor) -> Tensor:
    """o or its cotangent, each row in one piece; a copy only where it must."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _dsinks(p: Problem, sinks: Tensor, lse: Tensor, facts: Tensor, pack: Pack | None) -> Tensor:
    """The gradient of the sinks from the facts of rows (B | 1, Hq, rows, 4)."""
    lse = lse.reshape(-1, p.Hq, p.M)
    if pack:
        facts, lse = facts.index_select(2, pack.rows_of_tokens()), lse[..., : pack.q[-1]]
    else:
        facts = facts[:, :, : p.M]
    sink = per_head(sinks, p.batch, p.Hq).float()
    safe = lse.masked_fill(lse == -math.inf, 0)
    weight = torch.exp(sink[..., 0] - safe) * facts[..., 2]
    per_entry = -(weight * facts[..., 1]).sum(-1)
    return restore(per_entry.sum_to_size(sink.shape[:2]), sinks.shape, p.batch).to(sinks.dtype)
