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
from . import compiled, sights
from .attend_kernel import attend
from .attend_plan import Plan, grid_of, programs, sight_words, sighted, workspace_bytes
from .cards import card_of
from .compiled import Arguments, Key, Launches, Pass, Place, Settings, Small, multiples, signature
from .form import (
    META,
    NOTHING,
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
from .sight import sight

Layout = tuple[tuple[int, ...], tuple[int, ...]]


class Ready(NamedTuple):
    """What the calls of a problem and a plan, with arrays laid out alike, have in common.

    o, lse  shape and strides
    parts   of a workspace of `words` of 32 bits: o and lse of each part of the keys, or sights
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
    if lse.numel() and sighted(p, plan):
        passes.append(sight_pass(p, plan, call, *work))
        names.append("sight")
    if lse.numel():
        main = _arguments(p, plan, x, call, (o, lse), work)
        passes.append(Pass(attend, key_of(p, plan, call.form, main), grid_of(p, plan), main))
        names.append("attend")
    if lse.numel() and plan.splits > 1:
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
    """Stand-ins for what is in a workspace, and where: o and lse of each part of the keys, or
    sights; nothing where there are neither."""
    if sighted(p, plan):
        place = ((0, torch.int32),)
        return tuple(compiled.views(torch.empty(sight_words(p, plan), device=META), place)), place
    if plan.splits == 1:
        return (), ()
    shape = (plan.splits, p.B, p.Hq, p.M)
    rows = math.prod(shape)
    places = ((0, torch.float32), (rows * p.E, torch.float32))
    o, lse = compiled.views(torch.empty(rows * (p.E + 1), device=META), places)
    return (o[: rows * p.E].view(*shape, p.E), lse.view(shape)), places


def _arguments(
    p: Problem, plan: Plan, x: Inputs, call: Call, out: tuple[Tensor, ...], work: tuple[Tensor, ...]
) -> Arguments:
    """Of the main kernel; out: o and lse; work: see _parts."""
    o, lse = work if plan.splits > 1 else out
    if plan.splits > 1:  # (splits, B, Hq, M, E), and lse alike
        to = (o, *o.stride()[1:4], o.stride(0)), (lse, *lse.stride()[1:], lse.stride(0))
    else:
        to = (_rows(p, o), lse_of(p, lse))
    axes = programs(p, plan)
    seen = sights.told(p, call.form.mask, axes[0], *work) if sighted(p, plan) else NOTHING
    rows = (rows_of(p, t) for t in (x.q, x.k, x.v))
    return (*rows, *to, tuple(Small(n) for n in axes), seen, *call.shared)


def sight_pass(p: Problem, plan: Plan, call: Call, to: Tensor) -> Pass:
    """The kernel that looks for the tiles of keys first."""
    tiles, sides = programs(p, plan)[0], (plan.tile_m, plan.tile_n)
    grid, own, constants = sights.launched(p, call.form.mask, tiles, to, sides, True)
    arguments = (*own, *call.shared)
    settings = Settings(constants, sights.WARPS, 1)
    key = Key(call.form, signature(arguments), multiples(arguments), settings)
    return Pass(sight, key, grid, arguments)


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


def key_of(p: Problem, plan: Plan, form: Form, arguments: Arguments) -> Key:
    """What the main kernel depends on."""
    form = replace(form, folded=plan.folded, split=plan.splits > 1, sighted=sighted(p, plan))
    tiles = (("TILE_M", plan.tile_m), ("TILE_N", plan.tile_n))
    settings = Settings(tiles, plan.warps, plan.stages)
    return Key(form, signature(arguments), multiples(arguments), settings)


def offline(p: Problem, plan: Plan, x: Inputs | None = None) -> Key:
    """What the main kernel depends on, from the problem (and stand-ins for arrays) alone."""
    x = stand_ins(p, x)
    call = call_of(p, x)
    arguments = _arguments(p, plan, x, call, _outputs(p), _parts(p, plan)[0])
    return key_of(p, plan, call.form, arguments)
