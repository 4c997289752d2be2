"""Backward on the host: its workspace, its block, the gradients in the user's shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...axes import lay_out_bias, per_head, restore
from ...bound import Bound
from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from .. import Grads
from . import pool
from .call import Filled, fill
from .compiled import compiled
from .grad_kernel import OWN, TABLE, write
from .grad_packed import Pack, blocks, heads_first, overlaid
from .grad_packing import KEYS, PAIRS, TILE, TILES, WIDE, Room, padded
from .grad_weights import FACTS, Spec
from .target import Target
from .visible import core

# products (pairs times D) below which torch's own backward is done sooner, as measured
SOON, SOON_CAUSAL = 1 << 24, 1 << 22
LARGE_LSE = 1024.0  # float32 keeps an lse of this size to 6e-5, and p is as exact as its lse


@dataclass(frozen=True)
class Plan:
    """Items of backward: `entries` batch entries by `heads` key heads each, and each of those in
    `splits` shares of the panels of keys; on at most `threads` threads. products: how matrices are
    multiplied (grad_packing.py)."""

    entries: int
    heads: int
    splits: int
    threads: int
    target: Target
    products: str = WIDE

    @property
    def tile(self) -> int:
        """Queries of a tile."""
        return TILE[self.products]

    def items(self, p: Problem) -> int:
        """How many there are."""
        return p.B // self.entries * (p.Hk // self.heads) * self.splits

    def scratch_words(self, p: Problem, rows: int) -> tuple[int, int]:
        """Workers, and the words of scratch memory of each, for heads of so many rows."""
        room = Room(p.D, p.E, self.target, self.products)
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
    """Nothing: it runs whatever the package takes."""
    return []


def slower(p: Problem) -> list[str]:
    """Where torch's own backward, if it has one, is faster, in the user's terms."""
    work = p.B * p.Hq * p.M * p.N * p.D
    if work < (SOON if p.mask == "full()" else SOON_CAUSAL):
        return [f"at {work:,} products a pass torch's own backward is done sooner"]
    return []


def workspace_bytes(p: Problem, plan: Plan) -> int | None:
    """Bytes that its receipt will name; None where they depend on the lengths of packed
    sequences."""
    if p.packed:
        return None
    rows = padded(p.M, plan.tile)
    workers, words = plan.scratch_words(p, rows)
    shared = FACTS * plan.splits
    if plan.splits > 1:
        shared += plan.splits * Room(p.D, p.E, plan.target, plan.products).D
    words = workers * words + p.B * p.Hq * rows * shared
    return 4 * words + 8 * TABLE * (rows // plan.tile)


def plan(p: Problem, target: Target) -> Plan:
    """One item a key head, or shares of one where these are fewer than the threads."""
    threads = torch.get_num_threads()
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
        splits = 1 if units >= 4 * threads else threads // math.gcd(units, threads)
        if not p.packed:  # a sequence is shared out alike whatever it is packed with
            splits = min(splits, panels)
    in_pairs = p.dtype == torch.bfloat16 and target.pairs
    products = (TILES if target.tiles else PAIRS) if in_pairs else WIDE
    return Plan(entries, heads, splits, threads, target, products)


def table(bound: Bound, tile: int) -> list[tuple[int, int, int, int]]:
    """For each tile of queries, the keys [lo, hi) that it may see and those that all of it sees."""
    found = []
    for i0 in range(0, bound.m, tile):
        i1 = min(i0 + tile, bound.m)
        found.append((*bound.span(i0, i1), *core(bound, i0, i1)))
    return found


@dataclass
class _Space:
    """What backward works in, and what it gives.

    facts (splits, B, Hq, rows, 4); scratch (workers, words); sums of dq where they are in shares
    (splits, B, Hq, rows, D to whole vectors): float32. dq, dk, dv as q, k, v; dbias float32 as the
    kernel indexes it. Packed sequences share the rows of one entry.
    """

    facts: Tensor
    scratch: Tensor
    sums: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None

    @property
    def bytes(self) -> int:
        """Beyond inputs and outputs, and the table of spans."""
        return 4 * (self.facts.numel() + self.scratch.numel() + self.sums.numel())


def backward(
    problem: Problem,
    plan: Plan,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v, bias, sinks (None where not wanted), and what ran."""
    p, target = problem, plan.target
    pack = Pack.of(p, x, plan.tile) if p.packed else None
    whole = fill(*overlaid(p, x)) if pack else fill(p, x)
    lse = saved[1]
    large = bool(((lse.abs() > LARGE_LSE) & (lse > -math.inf)).any())
    spec = Spec(whole.form, plan.products, "b" in p.grads and x.bias is not None, large)
    space = _space(p, plan, x, spec, pack)
    _point(p, whole, saved, cotangents, space)
    bounds = pack.bounds(p, x) if pack else [whole.bound]
    tables = [words for bound in bounds for tile in table(bound, plan.tile) for words in tile]
    spans = torch.tensor(tables, dtype=torch.int64)
    own = {
        "splits": plan.splits,
        "rows": padded(p.M, plan.tile),
        "table": spans.data_ptr(),
        "entries": plan.entries,
        "heads": plan.heads,
        "scratch": space.scratch.shape[1],
        "share": math.prod(space.facts.shape[1:4]),
    }
    for n, name in enumerate(OWN):
        setattr(whole.call, f"x{n}", own[name])
    address, suffix = whole.address, ""
    if pack:
        each = _of_sequences(plan, whole, pack, bounds, space)
        address, suffix = each.data_ptr(), "_of"
    code = compiled(("backward", spec), target, lambda: write(spec, target))
    pool.run(code.address("item" + suffix), address, plan.items(p), plan.threads)
    if plan.splits > 1:
        pool.run(code.address("total" + suffix), address, p.B * p.Hq, plan.threads)
    name = f"llvm {target.isa} backward" + (f" {spec.products}" if spec.pairs else "")
    used = space.bytes + spans.numel() * spans.element_size()
    return _gradients(p, x, lse, space, pack), Ran((name,), used, ())


def _of_sequences(
    plan: Plan, whole: Filled, pack: Pack, bounds: list[Bound], space: _Space
) -> Tensor:
    """The blocks of all sequences."""
    tables = whole.call.x2
    sums = 4 * space.sums.shape[-1]
    own = {
        f"x{OWN.index('rows')}": [b - a for a, b in pairwise(pack.rows)],
        f"x{OWN.index('table')}": [tables + 8 * TABLE * (r // plan.tile) for r in pack.rows[:-1]],
        "work2": [whole.call.work2 + sums * r for r in pack.rows[:-1]],
    }
    return blocks(whole, pack, bounds, own)


def _space(p: Problem, plan: Plan, x: Inputs, spec: Spec, pack: Pack | None) -> _Space:
    rows = pack.rows[-1] if pack else padded(p.M, plan.tile)
    longest = max(b - a for a, b in pairwise(pack.rows)) if pack else rows
    lead = (plan.splits, 1 if pack else p.B, p.Hq, rows)
    width = Room(p.D, p.E, plan.target, plan.products).D
    bias = lay_out_bias(x.bias, p.batch).shape if spec.dbias and x.bias is not None else None
    space = _Space(
        facts=torch.empty(*lead, FACTS),
        scratch=torch.empty(plan.scratch_words(p, longest)),
        sums=torch.empty(*lead, width) if plan.splits > 1 else torch.empty(0, width),
        dq=torch.empty(x.q.shape, dtype=p.dtype),
        dk=torch.empty(x.k.shape, dtype=p.dtype),
        dv=torch.empty(x.v.shape, dtype=p.dtype),
        dbias=None if bias is None else torch.zeros(bias),
    )
    if pack:  # tokens that no sequence owns
        for t, owned in ((space.dq, pack.q[-1]), (space.dk, pack.k[-1]), (space.dv, pack.k[-1])):
            t[owned:].zero_()
    return space


def _point(
    p: Problem,
    filled: Filled,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
    space: _Space,
) -> None:
    do, dlse = cotangents
    do = torch.zeros(p.E, dtype=p.dtype).expand(p.o_shape) if do is None else do
    dlse = torch.zeros(()).expand(p.lse_shape) if dlse is None else dlse
    for name, t in (
        ("o", _whole_rows(saved[0])),
        ("lse", saved[1]),
        ("do", _whole_rows(do)),
        ("dlse", dlse),
        ("dq", space.dq),
        ("dk", space.dk),
        ("dv", space.dv),
    ):
        filled.point(name, _entries(p, t))
    filled.point("delta", space.facts[0])
    if space.dbias is not None:
        filled.point("dbias", space.dbias)
    filled.call.work, filled.call.work2 = space.scratch.data_ptr(), space.sums.data_ptr()


def _entries(p: Problem, t: Tensor) -> Tensor:
    """Something of tokens with one batch axis and heads before tokens."""
    if not p.packed:
        return t.reshape(p.B, *t.shape[len(p.batch) :])
    return t.expand(p.B, *t.shape) if t.dim() == 2 else heads_first(p, t)


def _whole_rows(t: Tensor) -> Tensor:
    """o or its cotangent, each row in one piece; a copy only where it must."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _gradients(p: Problem, x: Inputs, lse: Tensor, space: _Space, pack: Pack | None) -> Grads:
    """The gradients in the user's shapes and dtypes."""
    dsinks = None
    if "s" in p.grads and x.sinks is not None:
        lse, facts = lse.reshape(-1, p.Hq, p.M), space.facts[0]
        if pack:
            facts, lse = facts.index_select(2, pack.rows_of_tokens()), lse[..., : pack.q[-1]]
        else:
            facts = facts[:, :, : p.M]
        sink = per_head(x.sinks, p.batch, p.Hq).float()
        safe = lse.masked_fill(lse == -math.inf, 0)
        weight = torch.exp(sink[..., 0] - safe) * facts[..., 2]
        per_entry = -(weight * facts[..., 1]).sum(-1)
        dsinks = per_entry.sum_to_size(sink.shape[:2])
    found = (space.dq, space.dk, space.dv, space.dbias, dsinks)
    return tuple(
        None
        if t is None or given is None or letter not in p.grads
        else restore(t, given.shape, p.batch).to(given.dtype)
        for letter, t, given in zip("qkvbs", found, x[:5], strict=True)
    )
