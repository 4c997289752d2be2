"""Forward on the host: the launches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...inputs import Inputs, check_offsets
from ...problem import Problem
from ...receipt import Ran
from . import compiled
from .attend_kernel import attend
from .attend_plan import Plan, grid_of, programs, workspace_bytes
from .cards import card_of
from .compiled import Arguments, Key, Launches, Pass, Place, Settings, Small, multiples, signature
from .form import (
    META,
    Call,
    Form,
    Taken,
    apart,
    arrays_of,
    call_of,
    layouts,
    lse_of,
    rows_of,
    stand_ins,
)
from .merge_kernel import merge

Layout = tuple[tuple[int, ...], tuple[int, ...]]


class Ready(NamedTuple):
    """What the calls of a problem and a plan, with arrays laid out alike, have in common.

    o, lse  shape and strides
    parts   of a workspace of `words` float32: o and lse of each part of the keys
    """

    o: Layout
    lse: Layout
    words: int
    parts: tuple[Place, ...]
    launches: Launches
    taken: Taken
    ran: Ran


_READY: dict[Any, Ready] = {}


def forward(p: Problem, plan: Plan, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o in the promised order, lse contiguous, and what ran."""
    if p.packed:
        check_on_host(p, x)
    more = arrays_of(x)
    arrays: tuple[Any, ...] = (x.q, x.k, x.v, *more)
    values = compiled.values_of(arrays)
    key = p, plan, layouts(more), compiled.unaligned(values)
    ready = _READY.get(key)
    if ready is None:
        ready = compiled.remember(_READY, key, _prepare(p, plan, apart(x)))
    if ready.taken.copied:
        arrays = (*arrays[:3], *call_of(p, x).given)  # copies have to live until the launch
        values = compiled.values_of(arrays)
    elif ready.taken.seed is not None and x.seed is not None:
        values[3 + ready.taken.seed] = int(x.seed)
    o = torch.empty_strided(*ready.o, dtype=p.dtype, device=p.device)
    lse = torch.empty_strided(*ready.lse, dtype=torch.float32, device=p.device)
    values += compiled.values_of((o, lse))
    if ready.words:
        work = torch.empty(ready.words, dtype=torch.float32, device=p.device)
        values += compiled.pointers(work, ready.parts)
    compiled.launch(ready.launches, p.device, values)
    return o, lse, ready.ran


def check_on_host(p: Problem, x: Inputs) -> None:
    """Check cu_q and cu_k where the host can see them; a kernel keeps any others within bounds.

    Raises ArgumentError.
    """
    for name, cu, total in (("cu_q", x.cu_q, p.M), ("cu_k", x.cu_k, p.N)):
        if cu is not None and cu.device.type == "cpu":
            check_offsets(name, cu.tolist(), total)


def _prepare(p: Problem, plan: Plan, x: Inputs) -> Ready:
    call = call_of(p, x)
    o, lse = _outputs(p)
    work, parts = _parts(p, plan)
    varying = (x.q, x.k, x.v, *call.given, o, lse, *work)
    passes, names = [], []
    if lse.numel():
        main = _arguments(p, plan, x, call, work or (o, lse))
        passes.append(Pass(attend, key_of(plan, call.form, main), grid_of(p, plan), main))
        names.append("attend")
    if passes and work:
        merged = merge_arguments(p, call, work, (o, lse))
        passes.append(Pass(merge, merge_key(call, plan.splits, merged), lse.numel(), merged))
        names.append("merge")
    launches = compiled.prepared(passes, card_of(p.device), p.device, varying)
    copies = () if x.bias is None or x.bias.dtype != torch.float64 else ("bias, in float32",)
    words = sum(t.numel() for t in work)
    ran = Ran(tuple(names), workspace_bytes(p, plan), copies) if passes else Ran(())
    outputs = (tuple(o.shape), o.stride()), (tuple(lse.shape), lse.stride())
    return Ready(*outputs, words, parts, launches, Taken.of(p, x, call), ran)


def _outputs(p: Problem) -> tuple[Tensor, Tensor]:
    """Stand-ins for o and lse."""
    return replace(p, device=META).empty_o(), torch.empty(p.lse_shape, device=META)


def _parts(p: Problem, plan: Plan) -> tuple[tuple[Tensor, ...], tuple[Place, ...]]:
    """Stand-ins for o and lse of each part of the keys, and where they are in a workspace; nothing
    where there is one part."""
    if plan.splits == 1:
        return (), ()
    shape = (plan.splits, p.B, p.Hq, p.M)
    rows = math.prod(shape)
    places = ((0, torch.float32), (rows * p.E, torch.float32))
    o, lse = compiled.views(torch.empty(rows * (p.E + 1), device=META), places)
    return (o[: rows * p.E].view(*shape, p.E), lse.view(shape)), places


def _arguments(
    p: Problem, plan: Plan, x: Inputs, call: Call, outputs: tuple[Tensor, ...]
) -> Arguments:
    """Of the main kernel; outputs: o and lse, or those of the parts."""
    o, lse = outputs
    if plan.splits > 1:  # (splits, B, Hq, M, E), and lse alike
        to = (o, *o.stride()[1:4], o.stride(0)), (lse, *lse.stride()[1:], lse.stride(0))
    else:
        to = (_rows(p, o), lse_of(p, lse))
    axes = tuple(Small(n) for n in programs(p, plan))
    return (*(rows_of(p, t) for t in (x.q, x.k, x.v)), *to, axes, *call.shared)


def _rows(p: Problem, o: Tensor) -> tuple[Any, ...]:
    return (*rows_of(p, o)[:4], 0)


def merge_arguments(
    p: Problem, call: Call, parts: tuple[Tensor, ...], out: tuple[Tensor, Tensor]
) -> Arguments:
    """Of the merge kernel; parts: o (splits, B, Hq, M, E) and lse, float32."""
    return (
        (parts[0], p.E, parts[0].stride(0)),
        (parts[1], 1, parts[1].stride(0)),
        *(_rows(p, out[0]), lse_of(p, out[1])),
        *(call.sizes, call.numbers, call.sinks),
    )


def merge_key(call: Call, splits: int, arguments: Arguments) -> Key:
    """What the merge kernel depends on."""
    settings = Settings((("SPLITS", splits),), 4, 2)
    return Key(call.form, signature(arguments), multiples(arguments), settings)


def key_of(plan: Plan, form: Form, arguments: Arguments) -> Key:
    """What the main kernel depends on."""
    form = replace(form, folded=plan.folded, split=plan.splits > 1)
    tiles = (("TILE_M", plan.tile_m), ("TILE_N", plan.tile_n))
    settings = Settings(tiles, plan.warps, plan.stages)
    return Key(form, signature(arguments), multiples(arguments), settings)


def offline(p: Problem, plan: Plan, x: Inputs | None = None) -> Key:
    """What the main kernel depends on, from the problem (and stand-ins for arrays) alone."""
    x = stand_ins(p, x)
    call = call_of(p, x)
    outputs = _parts(p, plan)[0] or _outputs(p)
    return key_of(plan, call.form, _arguments(p, plan, x, call, outputs))
