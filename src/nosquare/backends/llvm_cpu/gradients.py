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
from .grad_packing import KEYS, TILE, Room, padded
from .grad_weights import FACTS, Spec
from .target import Target
from .visible import core

# products (pairs times D) below which torch's own backward is done sooner, as measured
SOON, SOON_CAUSAL = 1 << 24, 1 << 22
LARGE_LSE = 1024.0  # float32 keeps an lse of this size to 6e-5, and p is as exact as its lse


@dataclass(frozen=True)
class Plan:
    """Items of backward: `entries` batch entries by `heads` key heads each, and each of those in
    `splits` shares of the panels of keys; on `threads` threads."""

    entries: int
    heads: int
    splits: int
    threads: int
    target: Target

    def __str__(self) -> str:
        shares = f" in {self.splits} shares of keys" if self.splits > 1 else ""
        return (
            f"backward, {self.target.isa}, tiles {TILE} x {KEYS}, {self.entries} batch entries x "
            f"{self.heads} key heads an item{shares}, {self.threads} threads"
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
    rows = padded(p.M, TILE)
    room = Room(p.D, p.E, plan.target, _in_pairs(p, plan.target))
    words = plan.splits * p.B * p.Hq * rows * (FACTS + room.D) + plan.threads * room.words
    return 4 * words + 8 * TABLE * (rows // TILE)


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
    return Plan(entries, heads, splits, threads, target)


def table(bound: Bound, rows: int) -> list[tuple[int, ...]]:
    """For each tile of queries, the keys [lo, hi) that it may see and those that all of it sees."""
    found = []
    for i0 in range(0, rows, TILE):
        i1 = min(i0 + TILE, bound.m)
        found.append((*bound.span(i0, i1), *core(bound, i0, i1)))
    return found


@dataclass
class _Space:
    """What backward works in, and what it gives.

    facts (splits, B, Hq, rows, 4) and dq (splits, B, Hq, rows, D to whole vectors) float32;
    dk, dv as k and v; dbias float32 as the kernel indexes it. Packed sequences share the rows of
    one entry.
    """

    facts: Tensor
    dq: Tensor
    scratch: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None

    @property
    def bytes(self) -> int:
        """Beyond inputs and outputs, and the table of spans."""
        return sum(t.numel() * t.element_size() for t in (self.facts, self.dq, self.scratch))


def backward(
    problem: Problem,
    plan: Plan,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v, bias, sinks (None where not wanted), and what ran."""
    p, target = problem, plan.target
    pack = Pack.of(p, x, TILE) if p.packed else None
    whole = fill(*overlaid(p, x)) if pack else fill(p, x)
    lse = saved[1]
    large = bool(((lse.abs() > LARGE_LSE) & (lse > -math.inf)).any())
    spec = Spec(whole.form, _in_pairs(p, target), "b" in p.grads and x.bias is not None, large)
    space = _space(p, plan, x, spec, pack)
    _point(p, whole, saved, cotangents, space)
    bounds = pack.bounds(p, x) if pack else [whole.bound]
    tables = [table(bound, padded(bound.m, TILE)) for bound in bounds]
    spans = torch.tensor([words for tiles in tables for words in tiles], dtype=torch.int64)
    own = {
        "splits": plan.splits,
        "rows": padded(p.M, TILE),
        "table": spans.data_ptr(),
        "entries": plan.entries,
        "heads": plan.heads,
        "scratch": space.scratch.shape[1],
        "share": math.prod(space.facts.shape[1:4]),
    }
    for n, name in enumerate(OWN):
        setattr(whole.call, f"x{n}", own[name])
    code = compiled(("backward", spec), target, lambda: write(spec, target))
    items = p.B // plan.entries * (p.Hk // plan.heads) * plan.splits
    if pack:
        rows = {"rows": [b - a for a, b in pairwise(pack.rows)]}
        starts = [spans.data_ptr() + 8 * TABLE * (row // TILE) for row in pack.rows[:-1]]
        rows |= {"table": starts}
        each = blocks(whole, pack, bounds, {f"x{OWN.index(name)}": v for name, v in rows.items()})
        pool.run(code.address("packed"), each.data_ptr(), items, plan.threads)
    else:
        pool.run(code.address("item"), whole.address, items, plan.threads)
    name = f"llvm {target.isa} backward" + (" bf16 products" if spec.pairs else "")
    used = space.bytes + spans.numel() * spans.element_size()
    return _gradients(p, x, lse, space, pack), Ran((name,), used, ())


def _in_pairs(p: Problem, target: Target) -> bool:
    return p.dtype == torch.bfloat16 and target.isa == "avx512" and "avx512bf16" in target.features


def _space(p: Problem, plan: Plan, x: Inputs, spec: Spec, pack: Pack | None) -> _Space:
    entries, rows = (1, pack.rows[-1]) if pack else (p.B, padded(p.M, TILE))
    lead = (plan.splits, entries, p.Hq, rows)
    room = Room(p.D, p.E, plan.target, spec.pairs)
    bias = lay_out_bias(x.bias, p.batch).shape if spec.dbias and x.bias is not None else None
    make = torch.zeros if pack else torch.empty  # tokens that no sequence owns have gradient 0
    return _Space(
        facts=torch.empty(*lead, FACTS),
        dq=torch.zeros(*lead, room.D),
        scratch=torch.empty(plan.threads, room.words),
        dk=make(x.k.shape, dtype=p.dtype),
        dv=make(x.v.shape, dtype=p.dtype),
        dbias=None if bias is None else torch.zeros(bias),
    )


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
    arrays = {
        "o": _entries(p, _whole_rows(saved[0])),
        "lse": _entries(p, saved[1]),
        "do": _entries(p, _whole_rows(do)),
        "dlse": _entries(p, dlse),
        "dk": _entries(p, space.dk),
        "dv": _entries(p, space.dv),
        "delta": space.facts[0],
        "dq": space.dq[0],
    }
    if space.dbias is not None:
        arrays["dbias"] = space.dbias
    for name, t in arrays.items():
        filled.point(name, t)
    filled.call.work = space.scratch.data_ptr()


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
    total = space.dq[0] if space.dq.shape[0] == 1 else space.dq.sum(0)
    dq, facts = torch.empty(x.q.shape, dtype=p.dtype), space.facts[0]
    lse = lse.reshape(-1, p.Hq, p.M)
    if pack:
        tokens, owned = pack.rows_of_tokens(), pack.q[-1]
        dq[owned:].zero_()
        found = total[0].index_select(1, tokens)[..., : p.D].transpose(0, 1)
        torch.mul(found, p.scale, out=dq[:owned])
        facts, lse = facts.index_select(2, tokens), lse[..., :owned]
    else:
        torch.mul(total[:, :, : p.M, : p.D].view(x.q.shape), p.scale, out=dq)
        facts = facts[:, :, : p.M]
    dsinks = None
    if "s" in p.grads and x.sinks is not None:
        sink = per_head(x.sinks, p.batch, p.Hq).float()
        safe = lse.masked_fill(lse == -math.inf, 0)
        weight = torch.exp(sink[..., 0] - safe) * facts[..., 2]
        per_entry = -(weight * facts[..., 1]).sum(-1)
        dsinks = per_entry.sum_to_size(sink.shape[:2])
    found = (dq, space.dk, space.dv, space.dbias, dsinks)
    return tuple(
        None
        if t is None or given is None or letter not in p.grads
        else restore(t, given.shape, p.batch).to(given.dtype)
        for letter, t, given in zip("qkvbs", found, x[:5], strict=True)
    )
