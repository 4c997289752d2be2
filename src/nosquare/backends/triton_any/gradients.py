"""Backward on the host: its workspace, its launches, the gradients in the user's shapes.

facts of rows     delta, -lse, dropout's keys (grad_facts.py), once a row; delta as a sum over
                  keys, where that is asked, by a pass of its own
dk, dv            keys outside, queries inside (grad_keys.py)
dq                queries outside, keys inside (grad_queries.py); or, where the order of sums
                  may change from run to run, by atomics from the first pass
dbias             with dk or dq where it varies along keys or queries alone, else by its own
                  pass (grad_bias.py)
dsinks            from the facts (grad_sinks.py)

What a bias or sinks share among entries or heads is summed last (grad_sums.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...axes import restore
from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from .. import Grads
from . import compiled
from .compiled import Key, Launches, Place, Settings, multiples, signature
from .form import (
    META,
    Call,
    Taken,
    apart,
    arrays_of,
    call_of,
    layouts,
    stand_ins,
)
from .grad_passes import Step, Work, whole
from .grad_plan import Plan, workspace_bytes


class Ready(NamedTuple):
    """What the backwards of a problem and a plan, with arrays laid out alike, have in common.

    made    shape, strides and dtype of what the passes write, by name: see Work
    left    what torch is to sum, and to which shape
    zeroed  what passes add to, or leave where no pair is visible
    found   names of the gradients of q, k, v, bias, sinks; of none where it is not wanted
    words, parts  of the workspace, float32: where the facts of rows, sums and sights are in it
    turned  whether o, lse or their cotangents are copied in each call
    """

    made: dict[str, tuple[Any, ...]]
    left: dict[str, tuple[int, ...]]
    zeroed: tuple[str, ...]
    found: tuple[str, ...]
    words: int
    parts: tuple[Place, ...]
    launches: Launches
    turned: bool
    taken: Taken
    ran: Ran


_READY: dict[Any, Ready] = {}


def backward(
    problem: Problem,
    plan: Plan,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v, bias, sinks (None where not wanted), and what ran."""
    p = problem
    do, dlse = cotangents
    if do is None:
        do = torch.zeros(p.E, dtype=p.dtype, device=p.device).expand(p.o_shape)
    rows: tuple[Tensor, ...] = (*saved, do) if dlse is None else (*saved, do, dlse)
    more = arrays_of(x)
    arrays: tuple[Any, ...] = (x.q, x.k, x.v, *rows, *more)
    values = compiled.values_of(arrays)
    laid = tuple([(t.dtype, t.stride()) for t in rows])
    key = p, plan, laid, layouts(more), compiled.unaligned(values)
    ready = _READY.get(key)
    if ready is None:
        ready = compiled.remember(_READY, key, _prepare(p, plan, apart(x), rows))
    if ready.turned or ready.taken.copied:
        rows = whole(p, rows) if ready.turned else rows
        more = call_of(p, x).given if ready.taken.copied else more
        arrays = (*arrays[:3], *rows, *more)  # copies have to live until the launch
        values = compiled.values_of(arrays)
    if ready.taken.seed is not None and x.seed is not None:
        values[3 + len(rows) + ready.taken.seed] = int(x.seed)
    made = {
        name: torch.empty_strided(shape, strides, dtype=dtype, device=p.device)
        for name, (shape, strides, dtype) in ready.made.items()
    }
    work = torch.empty(ready.words, dtype=torch.float32, device=p.device)
    for name in ready.zeroed:
        made[name].zero_()
    values += compiled.values_of(made.values())
    values += compiled.pointers(work, ready.parts)
    compiled.launch(ready.launches, p.device, values)
    if ready.left or plan.add:
        _finish(p, x, made, ready.left)
    return tuple([made.get(name) for name in ready.found]), ready.ran


def _finish(
    p: Problem, x: Inputs, made: dict[str, Tensor], left: dict[str, tuple[int, ...]]
) -> None:
    """Sum what is left to sum, into the user's shapes and dtypes."""
    batch = () if p.packed else p.batch
    for name, laid in left.items():
        like = x.bias if name == "dbias" else x.sinks
        assert like is not None
        total = made[f"sums of {name}"].sum_to_size(laid)
        total = total[..., 0, 0] if name == "dsinks" else total
        made[name] = restore(total, like.shape, batch).to(like.dtype)
    if "sums of dq" in made and "q" in p.grads:
        total = made["sums of dq"]
        total = total[0].transpose(0, 1) if p.packed else total.view(made["dq"].shape)
        torch.mul(total, p.scale, out=made["dq"])


def _prepare(p: Problem, plan: Plan, x: Inputs, rows: tuple[Tensor, ...]) -> Ready:
    given = tuple(t.detach() for t in rows)  # objects of their own, as those of x
    laid = whole(p, given)
    copied = [a.data_ptr() != b.data_ptr() for a, b in zip(given, laid, strict=True)]
    call = call_of(p, x)
    work = Work.of(p, plan, x, laid)
    made, (words, parts) = work.outputs(), work.workspace()
    alone = [work.made[name] for name in made]
    inside = *work.facts, *(work.made[name] for name in work.inside()), *work.seen.values()
    varying = (x.q, x.k, x.v, *laid, *call.given, *alone, *inside)
    passes = [_pass(call, one) for one in work.passes(call) if one.grid]
    names = [one.kernel.fn.__name__.replace("_", " ") for one in passes]
    copies = ("the cotangent of o, whose rows are strided",) if copied[2] else ()
    return Ready(
        made=made,
        left=work.left,
        zeroed=work.zeroed(),
        found=(*(f"d{c}" if c in p.grads else "" for c in "qkv"), "dbias", "dsinks"),
        words=words,
        parts=parts,
        launches=compiled.prepared(passes, plan.card, p.device, varying),
        turned=any(copied),
        taken=Taken.of(p, x, call),
        ran=Ran(tuple(names), workspace_bytes(p, plan), copies),
    )


def offline(p: Problem, plan: Plan, x: Inputs) -> Iterator[tuple[Any, Key]]:
    """The kernels and what their code depends on, from the problem and stand-ins for arrays."""
    o = replace(p, device=META).empty_o()
    x = stand_ins(p, x)
    call = call_of(p, x)
    rows = whole(p, (o, torch.empty(p.lse_shape, device=META), torch.empty_like(o)))
    for each in Work.of(p, plan, x, rows).passes(call):
        one = _pass(call, each)
        yield one.kernel, one.key


def _pass(call: Call, one: Step) -> compiled.Pass:
    arguments = (*one.arguments, *call.shared)
    settings = Settings(one.tiles, one.warps, one.stages)
    key = Key(call.form, signature(arguments), multiples(arguments), settings)
    return compiled.Pass(one.kernel, key, one.grid, arguments)
