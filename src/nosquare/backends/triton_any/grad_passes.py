"""The passes of backward, described: their grids, arguments and constants, and what they write.

Nothing is run or allocated here: what has no memory yet is a stand-in on the device "meta".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...axes import Shape, lay_out_bias, per_head
from ...inputs import Inputs
from ...problem import Problem
from . import compiled, sights
from .compiled import Arguments, Count, Place, Small
from .form import META, NOTHING, Call, lse_of, padded, rows_of
from .grad_bias import bias_kernel
from .grad_facts import delta_kernel, products_kernel, share_kernel
from .grad_keys import keys_kernel
from .grad_plan import (
    FACT_PART,
    FACT_ROWS,
    OWN,
    PAIRS,
    SHARE,
    Plan,
    Tile,
    by_keys,
    by_queries,
    planes,
    products_side,
    room,
    sighted,
    tiles_of,
)
from .grad_queries import queries_kernel
from .grad_sinks import sinks_kernel
from .grad_sums import sums_kernel
from .sight import sight

SINK_ROWS = 1024  # rows at once of a program of the sinks kernel
SUMS = (64, 64)  # what a program of the sums kernel adds at once: parts, and numbers of each


class Step(NamedTuple):
    """A kernel of backward: its grid, the arguments before those that all kernels share, its
    constants after F, by name."""

    kernel: Any
    grid: int
    arguments: tuple[tuple[Any, ...], ...]
    tiles: tuple[tuple[str, int], ...]
    warps: int = 4
    stages: int = 1


@dataclass
class Work:
    """The arrays of one backward, to describe its passes.

    rows   o, lse, do and, where there is one, dlse, with rows in one piece
    made   what the passes write, by name: dq, dk, dv, dbias, dsinks; and sums of dq, dbias, dsinks
           that are float32 and not yet what they will be
    left   sums that torch is to finish, with the shapes that these gradients are laid out in
    facts  of rows, see grad_facts.py; like what is made they are stand-ins without memory
    seen   of the mask before a pass, by its name: see sights.py
    """

    p: Problem
    plan: Plan
    x: Inputs
    rows: tuple[Tensor, ...]
    made: dict[str, Tensor]
    left: dict[str, tuple[int, ...]]
    facts: list[Tensor]
    seen: dict[str, Tensor]

    @staticmethod
    def of(p: Problem, plan: Plan, x: Inputs, rows: tuple[Tensor, ...]) -> Work:
        """Everything described, nothing run."""
        facts = compiled.views(torch.empty(words(p, plan), device=META), places(p, plan))
        seen = {
            name: torch.empty(sights.words(p, tiles), dtype=torch.int32, device=META)
            for name, tiles in sighted(p, plan).items()
        }
        work = Work(p, plan, x, rows, {}, {}, facts, seen)
        if "q" in p.grads or by_queries(p, plan):
            work.made["dq"] = _like(p, x.q)
        if by_keys(p, plan):
            work.made["dk"], work.made["dv"] = _like(p, x.k), _like(p, x.v)
        if plan.add:
            work.made["sums of dq"] = torch.empty(_entries(p), p.Hq, p.M, p.D, device=META)
        if plan.bias and x.bias is not None:
            parts = (p.B, p.Hq, 1, p.N) if plan.bias == "n" else (p.B, p.Hq, p.M, 1)
            laid = tuple(lay_out_bias(x.bias, p.batch).shape)
            work._share("dbias", x.bias, laid, laid if plan.bias in PAIRS else parts)
        if "s" in p.grads and x.sinks is not None:
            laid = tuple(per_head(x.sinks, () if p.packed else p.batch, p.Hq).shape)
            work._share("dsinks", x.sinks, laid, (_entries(p), p.Hq, 1, 1))
        return work

    def _share(self, name: str, of: Tensor, laid: Shape, parts: Shape) -> None:
        """Who makes a gradient laid out as `laid`, of which a pass can write `parts`: that pass
        alone, a kernel that sums after it, or torch."""
        whole = math.prod(laid) == of.numel()  # not where `of` varies along some batch axes only
        # Triton's interpreter cuts numbers off to bfloat16, where a card rounds
        whole = whole and not (compiled.INTERPRETED and of.dtype == torch.bfloat16)
        pairs = name == "dbias" and self.plan.bias in PAIRS
        if whole and laid == parts and of.dtype.itemsize <= 4 and (pairs or name == "dsinks"):
            self.made[name] = torch.empty(laid, dtype=of.dtype, device=META)
            return
        self.made[f"sums of {name}"] = torch.empty(parts, device=META)
        if whole and laid[2:] == parts[2:]:
            self.made[name] = torch.empty(laid, dtype=of.dtype, device=META)
        else:
            self.left[name] = laid

    def inside(self) -> tuple[str, ...]:
        """Of what is made, sums that kernels alone see: they lie in the workspace, after the
        facts."""
        seen = {*self.zeroed(), *(f"sums of {name}" for name in ("dq", *self.left))}
        return tuple(name for name in self.made if name.startswith("sums of") and name not in seen)

    def workspace(self) -> tuple[int, tuple[Place, ...]]:
        """Its words, float32, and where the facts, what lies inside and what is seen begin."""
        end, found = words(self.p, self.plan), [*places(self.p, self.plan)]
        for name in self.inside():
            found.append((end, torch.float32))
            end += room(self.made[name].numel())
        for t in self.seen.values():
            found.append((end, t.dtype))
            end += t.numel()
        return end, tuple(found)

    def outputs(self) -> dict[str, tuple[Any, ...]]:
        """Shape, strides and dtype of what is made and not inside: gradients have the shapes of
        their arrays."""
        found, inside = {}, self.inside()
        users = {"dbias": self.x.bias, "dsinks": self.x.sinks}
        for name, t in self.made.items():
            if name in inside:
                continue
            user = users.get(name)
            shape = t.shape if user is None else user.shape
            strides = t.stride() if user is None else torch.empty(shape, device=META).stride()
            found[name] = tuple(shape), strides, t.dtype
        return found

    def zeroed(self) -> tuple[str, ...]:
        """What is to be 0 before they run."""
        p, made = self.p, ["sums of dq"] if self.plan.add else []
        if self.plan.bias == OWN and p.mask != "full()":
            made.append("sums of dbias" if "sums of dbias" in self.made else "dbias")
        return tuple(made)

    def passes(self, call: Call) -> Iterator[Step]:
        """The kernels, in the order in which they run."""
        p, plan, x = self.p, self.plan, self.x
        q, k, v = (rows_of(p, t) for t in (x.q, x.k, x.v))
        do, facts, exact = rows_of(p, self.rows[2])[:4], self._facts(), plan.exact
        yield self._delta(facts)
        if plan.exact:
            yield Step(
                share_kernel,
                tiles_of(p, p.M, SHARE[0]) * p.Hq,
                (q, k, facts),
                (("TILE_M", SHARE[0]), ("TILE_N", SHARE[1])),
            )
        own = (q, k, v, do, facts)
        if p.exact_delta:
            side = products_side(p)
            tiles = (("TILE_M", side), ("TILE_N", side), ("EXACT", int(exact)))
            yield Step(products_kernel, tiles_of(p, p.M, side) * p.Hq, own, tiles)
        if by_keys(p, plan):
            yield from self._sight(call, "keys")
            yield self._keys(own, exact, self._told(call, "keys"))
        if by_queries(p, plan):
            yield from self._sight(call, "queries")
            yield self._queries(own, exact, self._told(call, "queries"))
        if plan.bias == "mn":
            yield self._pairs(own, exact)
        if "s" in p.grads and x.sinks is not None:
            yield self._sinks(facts)
        for name in ("dbias", "dsinks"):
            if name in self.made and f"sums of {name}" in self.made:
                yield self._sums(name)

    def _written(self, name: str) -> Tensor:
        """What the pass of a gradient writes."""
        return self.made.get(f"sums of {name}", self.made.get(name, self.facts[0]))

    def _facts(self) -> tuple[Any, ...]:
        p, facts = self.p, self.facts
        share = facts[2] if self.plan.exact else facts[0]
        keys = facts[-1] if p.p > 0 else facts[0]
        return (facts[0], facts[1], share, keys, 0 if p.packed else p.Hq * room(p.M), room(p.M))

    def _delta(self, facts: tuple[Any, ...]) -> Step:
        p = self.p
        o, lse, do, dlse = (*self.rows, self.rows[1])[:4]
        return Step(
            delta_kernel,
            tiles_of(p, p.M, FACT_ROWS) * p.Hq,
            (
                *(rows_of(p, o)[:4], lse_of(p, lse), rows_of(p, do)[:4]),
                *(lse_of(p, dlse), facts),
            ),
            (
                ("TILE_M", FACT_ROWS),
                ("PART", min(padded(p.E), FACT_PART)),
                ("HAS_DLSE", int(len(self.rows) == 4)),
                ("SUMMED", int(p.exact_delta)),
            ),
        )

    def _sight(self, call: Call, name: str) -> Iterator[Step]:
        """The kernel that looks at the mask's arrays before a pass, if there is one."""
        if name not in self.seen:
            return
        tile = getattr(self.plan, name)
        tiles, keys = self._tiles(name), name == "queries"
        of = (self.p, call.form.mask, tiles, self.seen[name])
        grid, arguments, constants = sights.launched(*of, (tile.m, tile.n), keys)
        yield Step(sight, grid, arguments, constants, sights.WARPS)

    def _told(self, call: Call, name: str) -> tuple[Any, ...]:
        """What a pass takes of it."""
        if name not in self.seen:
            return NOTHING
        return sights.told(self.p, call.form.mask, self._tiles(name), self.seen[name])

    def _tiles(self, name: str) -> int:
        """Of a head of an entry, or of all packed sequences."""
        return sighted(self.p, self.plan)[name] // max(_entries(self.p), 1)

    def _keys(self, own: Arguments, exact: bool, seen: tuple[Any, ...]) -> Step:
        p, tile, by_key = self.p, self.plan.keys, self.plan.bias == "n"
        rows: tuple[Any, ...] = (self.facts[0], 0, 0, 0)  # not used
        partial = rows
        if self.plan.add:
            rows = (self.made["sums of dq"], 0 if p.packed else p.Hq * p.M * p.D, p.M * p.D, p.D)
        if by_key:
            partial = (self._written("dbias"), Count(p.Hq * p.N), Count(p.N), 0)
        at_once, add = sights.AT_ONCE, self.plan.add
        constants = _constants(tile, AT_ONCE=at_once, EXACT=exact, ADD=add, BY_KEY=by_key)
        arguments = (
            *own,
            *(rows_of(p, self.made[name])[:4] for name in ("dk", "dv")),
            rows,
            partial,
            seen,
        )
        grid = tiles_of(p, p.N, tile.n) * p.Hk
        return Step(keys_kernel, grid, arguments, constants, tile.warps, tile.stages)

    def _queries(self, own: Arguments, exact: bool, seen: tuple[Any, ...]) -> Step:
        p, tile, by_query = self.p, self.plan.queries, self.plan.bias in ("m", "-")
        partial: tuple[Any, ...] = (self.facts[0], 0, 0, 0)  # not used
        own_pairs = self.plan.bias == OWN
        if by_query:
            partial = (self._written("dbias"), Count(p.Hq * p.M), Count(p.M), 0)
        if own_pairs:
            partial = (self._written("dbias"), p.Hq * p.M * p.N, p.M * p.N, p.N)
        constants = _constants(tile, EXACT=exact, BY_QUERY=by_query, OWN=own_pairs)
        grid = tiles_of(p, p.M, tile.m) * p.Hq
        arguments = (*own, rows_of(p, self.made["dq"])[:4], partial, seen)
        return Step(queries_kernel, grid, arguments, constants, tile.warps, tile.stages)

    def _pairs(self, own: Arguments, exact: bool) -> Step:
        tile, t = self.plan.pairs, self._written("dbias")
        b, h, m, n = t.shape
        constants = _constants(tile, EXACT=exact, BY_ENTRY=b > 1, BY_HEAD=h > 1)
        grid = -(-m // tile.m) * -(-n // tile.n) * b * h
        arguments = (*own, (t, *t.stride()[:3]))
        return Step(bias_kernel, grid, arguments, constants, tile.warps, tile.stages)

    def _sinks(self, facts: tuple[Any, ...]) -> Step:
        p = self.p
        arguments = lse_of(p, self.rows[1]), facts, (self._written("dsinks"), Count(p.Hq), 1)
        constants = (("ROWS", SINK_ROWS), ("EXACT", int(self.plan.exact)))
        return Step(sinks_kernel, _entries(p) * p.Hq, arguments, constants)

    def _sums(self, name: str) -> Step:
        parts, out = self.made[f"sums of {name}"], self.made[name]
        (b, h, *rest), (rows, width) = out.shape, SUMS
        numbers = math.prod(rest)
        arguments = [
            (t, Small(t.shape[0]), Small(t.shape[1]), Count(numbers)) for t in (parts, out)
        ]
        constants = (("ROWS", rows), ("WIDTH", width))
        return Step(sums_kernel, b * h * -(-numbers // width), tuple(arguments), constants)


def _constants(tile: Tile, **more: int) -> tuple[tuple[str, int], ...]:
    sizes = {"TILE_M": tile.m, "TILE_N": tile.n, "STAGES": tile.stages}
    return tuple((sizes | {name: int(value) for name, value in more.items()}).items())


def whole(p: Problem, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """o, lse, do and dlse with one batch axis, each row in one piece; copies where they must be."""
    o, lse, do, *dlse = rows
    return (
        _whole_rows(p, o),
        lse.contiguous(),
        _whole_rows(p, do),
        *(t.contiguous() for t in dlse),
    )


def _whole_rows(p: Problem, t: Tensor) -> Tensor:
    rows = t if t.stride(-1) == 1 else t.contiguous()
    return rows if p.packed else rows.reshape(p.B, *rows.shape[-3:])


def _like(p: Problem, t: Tensor) -> Tensor:
    """A stand-in for a gradient, in the memory order of its array where rows are whole there."""
    new = torch.empty_like(t, device=META)
    if new.stride(-1) != 1 or len(p.batch) > 1:
        new = torch.empty(t.shape, dtype=t.dtype, device=META)
    return new


def _entries(p: Problem) -> int:
    return 1 if p.packed else p.B


def words(p: Problem, plan: Plan) -> int:
    """Of the workspace: the facts of rows."""
    return planes(p, plan) * _entries(p) * p.Hq * room(p.M)


def places(p: Problem, plan: Plan) -> tuple[Place, ...]:
    """Where each of the facts begins in it; the keys of dropout are the last."""
    size = _entries(p) * p.Hq * room(p.M)
    found = [(n * size, torch.float32) for n in range(2 + plan.exact)]
    if p.p > 0:
        found.append(((2 + plan.exact) * size, torch.int32))
    return tuple(found)
