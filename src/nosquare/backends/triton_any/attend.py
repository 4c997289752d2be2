"""Forward on the host: the launches."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...inputs import Inputs, check_offsets
from ...problem import Problem
from ...receipt import Ran
from . import compiled
from .attend_kernel import attend
from .attend_plan import Plan, grid_of, programs
from .cards import card_of
from .compiled import Arguments, Key, Settings, Small, multiples, signature
from .form import Call, Form, call_of, lse_of, rows_of, stand_ins
from .merge_kernel import merge


def forward(p: Problem, plan: Plan, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o in the promised order, lse contiguous, and what ran."""
    o = p.empty_o()
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=p.device)
    if not lse.numel():
        return o, lse, Ran(())
    if p.packed:
        check_on_host(p, x)
    call = call_of(p, x)
    copies = () if x.bias is None or x.bias.dtype != torch.float64 else ("bias, in float32",)
    if plan.splits == 1:
        _attend(p, plan, x, call, (_rows(p, o), lse_of(p, lse)))
        return o, lse, Ran(("attend",), 0, copies)
    shape = (plan.splits, p.B, p.Hq, p.M)
    o_parts = torch.empty((*shape, p.E), dtype=torch.float32, device=p.device)
    lse_parts = torch.empty(shape, dtype=torch.float32, device=p.device)
    _attend(p, plan, x, call, _parts(o_parts, lse_parts))
    _merge(p, plan, call, (o_parts, lse_parts), (o, lse))
    work = 4 * (o_parts.numel() + lse_parts.numel())
    return o, lse, Ran(("attend", "merge"), work, copies)


def check_on_host(p: Problem, x: Inputs) -> None:
    """Check cu_q and cu_k where the host can see them; a kernel keeps any others within bounds.

    Raises ArgumentError.
    """
    for name, cu, total in (("cu_q", x.cu_q, p.M), ("cu_k", x.cu_k, p.N)):
        if cu is not None and cu.device.type == "cpu":
            check_offsets(name, cu.tolist(), total)


def _bare(p: Problem, x: Inputs) -> bool:
    """Whether the types of all arguments follow from the problem."""
    return not (x.arrays or p.packed) and x.bias is x.sinks is x.alibi is None


def _parts(o: Tensor, lse: Tensor) -> Any:
    """Of a split: o (splits, B, Hq, M, E), lse alike."""
    return (o, *o.stride()[1:4], o.stride(0)), (lse, *lse.stride()[1:], lse.stride(0))


def _rows(p: Problem, o: Tensor) -> tuple[Any, ...]:
    return (*rows_of(p, o)[:4], 0)


def _arguments(p: Problem, plan: Plan, x: Inputs, call: Call, outputs: Any) -> Arguments:
    axes = tuple(Small(n) for n in programs(p, plan))
    return (*(rows_of(p, t) for t in (x.q, x.k, x.v)), *outputs, axes, *call.shared)


def _attend(p: Problem, plan: Plan, x: Inputs, call: Call, outputs: Any) -> None:
    if _bare(p, x):
        ready = _ready(p, plan, call.form.seed_ptr)
        arrays = (x.q, x.k, x.v, outputs[0][0], outputs[1][0])
        places = ((t, *steps) for t, steps in zip(arrays, ready.steps, strict=True))
        rest = call.shared if x.seed is not None else ready.rest
        compiled.launch(ready.loaded, p.device, ready.grid, (*places, ready.axes, *rest))
        return
    arguments = _arguments(p, plan, x, call, outputs)
    key = key_of(plan, call.form, arguments, None)
    loaded = compiled.launcher(attend, key, card_of(p.device), p.device)
    compiled.launch(loaded, p.device, grid_of(p, plan), arguments)


def _merge(
    p: Problem, plan: Plan, call: Call, parts: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor]
) -> None:
    arguments = merge_arguments(p, call, parts, out)
    key = merge_key(call, plan.splits, arguments)
    loaded = compiled.launcher(merge, key, card_of(p.device), p.device)
    compiled.launch(loaded, p.device, p.B * p.Hq * p.M, arguments)


def merge_arguments(
    p: Problem, call: Call, parts: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor]
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
    return Key(call.form, signature(arguments), multiples(arguments, None), settings)


class Ready(NamedTuple):
    """A kernel for all calls of a problem and a plan, and its arguments but for the arrays.

    steps  the strides of q, k, v, o, lse       rest  what follows the grid's axes
    """

    loaded: compiled.Loaded
    grid: int
    steps: tuple[tuple[int, ...], ...]
    axes: tuple[Any, ...]
    rest: tuple[tuple[Any, ...], ...]


def key_of(plan: Plan, form: Form, arguments: Arguments, aligned: bool | None) -> Key:
    """What the main kernel depends on; aligned as in compiled.multiples."""
    form = replace(form, folded=plan.folded, split=plan.splits > 1)
    tiles = (("TILE_M", plan.tile_m), ("TILE_N", plan.tile_n))
    settings = Settings(tiles, plan.warps, plan.stages)
    return Key(form, signature(arguments), multiples(arguments, aligned), settings)


def offline(p: Problem, plan: Plan, x: Inputs | None = None) -> Key:
    """What the main kernel depends on, from the problem (and stand-ins for arrays) alone."""
    return _template(p, plan, x)[0]


def _template(p: Problem, plan: Plan, x: Inputs | None) -> tuple[Key, Arguments]:
    x = stand_ins(p, x)
    call = call_of(p, x)
    if plan.splits > 1:
        rows = torch.empty((plan.splits, p.B, p.Hq, p.M, p.E), device="meta")
        outputs = _parts(rows, rows[..., 0].contiguous())
    else:
        o = replace(p, device=torch.device("meta")).empty_o()
        outputs = (_rows(p, o), lse_of(p, torch.empty(p.lse_shape, device="meta")))
    arguments = _arguments(p, plan, x, call, outputs)
    return key_of(plan, call.form, arguments, p.aligned), arguments


@lru_cache(maxsize=4096)
def _ready(p: Problem, plan: Plan, seed_ptr: bool) -> Ready:
    seed = None
    if p.p > 0:
        seed = torch.empty((), dtype=torch.int64, device="meta" if seed_ptr else "cpu")
    nothing = torch.empty(0, device="meta")
    key, arguments = _template(p, plan, Inputs(nothing, nothing, nothing, seed=seed))
    steps = tuple(values[1:] for values in arguments[:5])
    loaded = compiled.launcher(attend, key, card_of(p.device), p.device)
    return Ready(loaded, grid_of(p, plan), steps, arguments[5], arguments[6:])
