"""Backward on the host: its workspace, its launches, the gradients in the user's shapes.

facts of rows     delta, -lse, dropout's keys (grad_facts.py), once a row
dk, dv            keys outside, queries inside (grad_keys.py)
dq                queries outside, keys inside (grad_queries.py); or, where the order of sums
                  may change from run to run, by atomics from the first pass
dbias             with dk or dq where it varies along keys or queries alone, else by its own
                  pass (grad_bias.py)
dsinks            from the facts
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...axes import lay_out_bias, per_head, restore
from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from .. import Grads
from .compiled import Arguments, Count, Key, Settings, launch, launcher, multiples, signature
from .form import Call, call_of, lse_of, padded, rows_of, stand_ins
from .grad_bias import bias_kernel
from .grad_facts import delta_kernel, share_kernel
from .grad_keys import keys_kernel
from .grad_plan import (
    AT_ONCE,
    FACT_PART,
    FACT_ROWS,
    SHARE,
    Plan,
    Tile,
    planes,
    room,
    tiles_of,
    workspace_bytes,
)
from .grad_queries import queries_kernel


def offline(p: Problem, plan: Plan, x: Inputs) -> Iterator[tuple[Any, Key]]:
    """The kernels and what their code depends on, from the problem and stand-ins for arrays."""
    meta = replace(p, device=torch.device("meta"))
    o, lse = meta.empty_o(), torch.empty(p.lse_shape, device="meta")
    x = stand_ins(p, x)
    call = call_of(p, x)
    for one in _Work.of(meta, plan, x, (o, lse), (o, None)).passes(call):
        arguments = (*one.arguments, *call.shared)
        yield one.kernel, _key(call, one, arguments)


def _key(call: Call, one: _Pass, arguments: Arguments) -> Key:
    settings = Settings(one.tiles, one.warps, one.stages)
    return Key(call.form, signature(arguments), multiples(arguments, None), settings)


_KNOWN: dict[Any, tuple[Key, Any]] = {}
_MOST_KNOWN = 4096


class _Pass(NamedTuple):
    """One kernel of a backward: its grid, its own arguments, its constants after F, by name."""

    kernel: Any
    grid: int
    arguments: tuple[tuple[Any, ...], ...]
    tiles: tuple[tuple[str, int], ...]
    warps: int = 4
    stages: int = 1


def backward(
    problem: Problem,
    plan: Plan,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v, bias, sinks (None where not wanted), and what ran."""
    p = problem
    call = call_of(p, x)
    work = _Work.of(p, plan, x, saved, cotangents)
    names, known = [], work.known(call)
    for one in work.passes(call):
        if one.grid:
            _run(p, plan, call, one, known)
            names.append(one.kernel.fn.__name__.replace("_", " "))
    dbias = None
    if work.dbias is not None and x.bias is not None:
        laid = lay_out_bias(x.bias, p.batch).shape
        dbias = restore(work.dbias.sum_to_size(laid), x.bias.shape, p.batch).to(x.bias.dtype)
    dsinks = None
    if "s" in p.grads and x.sinks is not None:
        dsinks = _dsinks(p, plan, x.sinks, saved[1], work.facts)
    if plan.add and "q" in p.grads:
        sums = work.dq_sums[0].transpose(0, 1) if p.packed else work.dq_sums.view(work.dq.shape)
        torch.mul(sums, p.scale, out=work.dq)
    found = zip("qkv", (work.dq, work.dk, work.dv), strict=True)
    grads = (*(t if c in p.grads else None for c, t in found), dbias, dsinks)
    return grads, Ran(tuple(names), workspace_bytes(p, plan), work.copies)


def _run(p: Problem, plan: Plan, call: Call, one: _Pass, known: Any) -> None:
    """Launch a pass. known: what its code depends on beside the problem and the plan, where that
    is little: then the kernel is found by it."""
    arguments = (*one.arguments, *call.shared)
    key: Any = None
    ready: Any = None
    if known is not None:
        known = (one.kernel, p, plan, known)
        key, ready = _KNOWN.get(known, (None, None))
    if key is None:
        key = _key(call, one, arguments)
        ready = launcher(one.kernel, key, plan.card, p.device)
        if known is not None and len(_KNOWN) < _MOST_KNOWN:
            _KNOWN[known] = key, ready
    launch(ready, p.device, one.grid, arguments)


@dataclass
class _Work:
    """The arrays of one backward: the user's as kernels take them, what is made, the workspace."""

    p: Problem
    plan: Plan
    x: Inputs
    o: Tensor
    lse: Tensor
    do: Tensor
    dlse: Tensor | None
    facts: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_sums: Tensor
    dbias: Tensor | None
    copies: tuple[str, ...]

    @staticmethod
    def of(
        p: Problem,
        plan: Plan,
        x: Inputs,
        saved: tuple[Tensor, Tensor],
        cotangents: tuple[Tensor | None, Tensor | None],
    ) -> _Work:
        """Everything made, nothing run."""
        given, dlse = cotangents
        do = torch.zeros(p.E, dtype=p.dtype, device=p.device) if given is None else given
        do = do.expand(p.o_shape) if given is None else do
        rows = _whole_rows(p, do)
        copied = rows.data_ptr() != do.data_ptr()
        entries = 1 if p.packed else p.B
        wide: dict[str, Any] = {"dtype": torch.float32, "device": p.device}
        facts = torch.empty(planes(p, plan), entries, p.Hq, room(p.M), **wide)
        dq, dk, dv = (_like(p, t) for t in (x.q, x.k, x.v))
        sums = torch.zeros(entries, p.Hq, p.M, p.D, **wide) if plan.add else facts
        return _Work(
            p=p,
            plan=plan,
            x=x,
            o=_whole_rows(p, saved[0]),
            lse=saved[1].contiguous(),
            do=rows,
            dlse=None if dlse is None else dlse.contiguous(),
            facts=facts,
            dq=dq,
            dk=dk,
            dv=dv,
            dq_sums=sums,
            dbias=_empty_dbias(p, plan, x),
            copies=("the cotangent of o, whose rows are strided",) if copied else (),
        )

    def known(self, call: Call) -> Any:
        """What the code depends on beside the problem and the plan: how arrays lie in memory. None
        where arrays of a mask, a bias or the like make that too much to look up."""
        x = self.x
        if x.arrays or self.p.packed or not (x.bias is x.sinks is x.alibi is None):
            return None
        given = (x.q, x.k, x.v, self.o, self.lse, self.do)
        aligned = tuple([t.data_ptr() % 16 for t in given])
        dlse = None if self.dlse is None else self.dlse.data_ptr() % 16
        return aligned, dlse, self.o.stride(), self.do.stride(), call.form.seed_ptr

    def passes(self, call: Call) -> Iterator[_Pass]:
        """The kernels, in the order in which they run."""
        p, plan, x = self.p, self.plan, self.x
        q, k, v = (rows_of(p, t) for t in (x.q, x.k, x.v))
        do, facts, exact = rows_of(p, self.do)[:4], self._facts(), plan.exact
        yield self._delta(facts)
        if plan.exact:
            yield _Pass(
                share_kernel,
                tiles_of(p, p.M, SHARE[0]) * p.Hq,
                (q, k, facts),
                (("TILE_M", SHARE[0]), ("TILE_N", SHARE[1])),
            )
        own = (q, k, v, do, facts)
        if {"k", "v"} & set(p.grads) or plan.bias == "n" or (plan.add and "q" in p.grads):
            yield self._keys(own, exact)
        if ("q" in p.grads and not plan.add) or plan.bias in ("m", "-"):
            yield self._queries(own, exact)
        if plan.bias == "mn":
            yield self._pairs(own, exact)

    def _facts(self) -> tuple[Any, ...]:
        p, plan = self.p, self.plan
        planes = list(self.facts)
        share = planes[2] if plan.exact else planes[0]
        keys = self.facts[2 + plan.exact :].view(torch.int32) if p.p > 0 else planes[0]
        return (planes[0], planes[1], share, keys, 0 if p.packed else p.Hq * room(p.M), room(p.M))

    def _delta(self, facts: tuple[Any, ...]) -> _Pass:
        p = self.p
        dlse = self.lse if self.dlse is None else self.dlse
        return _Pass(
            delta_kernel,
            tiles_of(p, p.M, FACT_ROWS) * p.Hq,
            (
                *(rows_of(p, self.o)[:4], lse_of(p, self.lse), rows_of(p, self.do)[:4]),
                *(lse_of(p, dlse), facts),
            ),
            (
                ("TILE_M", FACT_ROWS),
                ("PART", min(padded(p.E), FACT_PART)),
                ("HAS_DLSE", int(self.dlse is not None)),
            ),
        )

    def _keys(self, own: Arguments, exact: bool) -> _Pass:
        p, tile, by_key = self.p, self.plan.keys, self.plan.bias == "n"
        rows: tuple[Any, ...] = (self.facts, 0, 0, 0)  # not used
        partial = rows
        if self.plan.add:
            rows = (self.dq_sums, 0 if p.packed else p.Hq * p.M * p.D, p.M * p.D, p.D)
        if by_key:
            partial = (self.dbias, Count(p.Hq * p.N), Count(p.N), 0)
        constants = _constants(tile, AT_ONCE=AT_ONCE, EXACT=exact, ADD=self.plan.add, BY_KEY=by_key)
        arguments = (*own, rows_of(p, self.dk)[:4], rows_of(p, self.dv)[:4], rows, partial)
        grid = tiles_of(p, p.N, tile.n) * p.Hk
        return _Pass(keys_kernel, grid, arguments, constants, tile.warps, tile.stages)

    def _queries(self, own: Arguments, exact: bool) -> _Pass:
        p, tile, by_query = self.p, self.plan.queries, self.plan.bias in ("m", "-")
        partial: tuple[Any, ...] = (self.facts, 0, 0)  # not used
        if by_query:
            partial = (self.dbias, Count(p.Hq * p.M), Count(p.M))
        constants = _constants(tile, EXACT=exact, BY_QUERY=by_query)
        grid = tiles_of(p, p.M, tile.m) * p.Hq
        arguments = (*own, rows_of(p, self.dq)[:4], partial)
        return _Pass(queries_kernel, grid, arguments, constants, tile.warps, tile.stages)

    def _pairs(self, own: Arguments, exact: bool) -> _Pass:
        tile, t = self.plan.pairs, self.dbias
        assert t is not None
        b, h, m, n = t.shape
        constants = _constants(tile, EXACT=exact, BY_ENTRY=b > 1, BY_HEAD=h > 1)
        grid = -(-m // tile.m) * -(-n // tile.n) * b * h
        arguments = (*own, (t, *t.stride()[:3]))
        return _Pass(bias_kernel, grid, arguments, constants, tile.warps, tile.stages)


def _constants(tile: Tile, **more: int) -> tuple[tuple[str, int], ...]:
    sizes = {"TILE_M": tile.m, "TILE_N": tile.n, "STAGES": tile.stages}
    return tuple((sizes | {name: int(value) for name, value in more.items()}).items())


def _whole_rows(p: Problem, t: Tensor) -> Tensor:
    """o or its cotangent with one batch axis, each row in one piece; a copy only where it must."""
    rows = t if t.stride(-1) == 1 else t.contiguous()
    return rows if p.packed else rows.reshape(p.B, *rows.shape[-3:])


def _like(p: Problem, t: Tensor) -> Tensor:
    """An empty gradient, in the memory order of what it is of where rows are whole there."""
    new = torch.empty_like(t)
    if new.stride(-1) != 1 or len(p.batch) > 1:
        new = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    return new


def _empty_dbias(p: Problem, plan: Plan, x: Inputs) -> Tensor | None:
    """dbias as its pass writes it: (B | 1, Hq | 1, M, N), or the partial sums of each head."""
    if not plan.bias or x.bias is None:
        return None
    laid = lay_out_bias(x.bias, p.batch).shape
    if plan.bias == "mn":
        final = math.prod(laid) == x.bias.numel()
        dtype = x.bias.dtype if final and x.bias.dtype.itemsize <= 4 else torch.float32
        return torch.empty(laid, dtype=dtype, device=p.device)
    last = (1, p.N) if plan.bias == "n" else (p.M, 1)
    return torch.empty(p.B, p.Hq, *last, dtype=torch.float32, device=p.device)


def _dsinks(p: Problem, plan: Plan, sinks: Tensor, lse: Tensor, facts: Tensor) -> Tensor:
    """The gradient of the sinks: -sum of the sink's weight times delta."""
    sink = per_head(sinks, () if p.packed else p.batch, p.Hq).float()[..., 0]
    lse = lse.reshape(-1, p.Hq, p.M).float()
    nothing = lse == -math.inf
    weight = torch.exp(sink - lse.masked_fill(nothing, 0)).masked_fill(nothing, 0)
    if plan.exact:
        weight = weight * facts[2, ..., : p.M]
    total = -(weight * facts[1, ..., : p.M]).sum(-1)
    laid = total.sum_to_size(sink.shape[:2])
    return restore(laid, sinks.shape, () if p.packed else p.batch).to(sinks.dtype)
