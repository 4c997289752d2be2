"""Backward on the host: workspace and launches.

facts of rows    ref and delta, and 0 over the sums of dq     grad_rows.facts
dk, dv           and dq, added up in memory, float32          grad_kernel.gradients
dq               rounded to its own dtype                     grad_rows.rounded
dsinks           from the facts                               grad_rows.of_sinks
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...axes import per_head, restore
from ...driver import Launch
from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from .. import Grads
from . import grad_kernel, grad_rows
from .attend_plan import padded
from .compiled import POINTERS, Described, Key, Maps, loaded
from .form import ROWS, GradForm, lengths_of, mask_of, numbers
from .grad_plan import (
    GradPlan,
    hidden,
    pitch,
    seen_rows,
    shift,
    tiles,
    words,
    workspace_bytes,
)

MOST_KEPT = 1024  # problems
STEP = 16  # bytes, of which TMA wants strides and addresses to be multiples
FACT_ROWS, AT_ONCE = 64, 128  # of a program of each small kernel; see queries_of()
COPIED = "the cotangent of o, whose rows TMA cannot read"


class Pass(NamedTuple):
    """A launch: its programs, its arguments laid out, its descriptors."""

    programs: int
    launch: Launch
    maps: Maps | None


class Ready(NamedTuple):
    """What the backwards of a problem and a plan, with arrays laid out alike, have in common."""

    facts: Pass
    main: Pass
    rounded: Pass
    of_sinks: Pass | None
    ran: Ran


_READY: dict[Any, Ready] = {}


def backward(
    p: Problem,
    plan: GradPlan,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v, sinks (None where not wanted), and what ran."""
    q, k, v = (t.reshape(p.B, *t.shape[-3:]) for t in (x.q, x.k, x.v))
    o, lse, do, dlse, copied = _rows_of(p, saved, cotangents)
    sinks = lengths = None
    if x.sinks is not None and "s" in p.grads:
        sinks = per_head(x.sinks, p.batch, p.Hq)
    if x.arrays:
        lengths = lengths_of(p, x.arrays)
    given = [o, lse, do, *(t for t in (dlse, sinks, lengths) if t is not None)]
    aligned = o.data_ptr() % STEP == 0, do.data_ptr() % STEP == 0
    key = (p, plan, copied, aligned, *[(t.dtype, t.shape, t.stride()) for t in given])
    dq, dk, dv = (_empty(p, t) for t in (q, k, v))
    of_facts, of_sums = words(p)
    facts = torch.empty(2, of_facts // 2, dtype=torch.float32, device=p.device)
    ref, delta = facts[0], facts[1]
    sums = torch.empty(of_sums, dtype=torch.float32, device=p.device)
    described = (q, k, v, do, dk, dv, sums, ref, delta)
    ready = _READY.get(key)
    if ready is None:
        if len(_READY) >= MOST_KEPT:
            _READY.clear()
        rows = o, lse, do, dlse
        ready = _prepare(p, plan, described, dq, rows, aligned, sinks, lengths, copied)
        _READY[key] = ready
    dsinks = None
    with torch.cuda.device(p.device):
        stream = torch._C._cuda_getCurrentRawStream(p.device.index)

        def run(one: Pass, arrays: tuple[Tensor, ...], others: list[int]) -> None:
            maps = one.maps.of(arrays) if one.maps else []  # they have to live until the launch
            addresses = [m.address for m in maps]
            one.launch(one.programs, p.device.index, stream, addresses, others)

        of_rows = [t.data_ptr() for t in (o, lse, do, dlse) if t is not None]
        run(ready.facts, (), [*of_rows, ref.data_ptr(), delta.data_ptr(), sums.data_ptr()])
        more = [] if lengths is None else [lengths.data_ptr()]
        run(ready.main, described, more)
        run(ready.rounded, (), [sums.data_ptr(), dq.data_ptr()])
        if ready.of_sinks is not None and sinks is not None and x.sinks is not None:
            parts = torch.empty(p.B, p.Hq, dtype=torch.float32, device=p.device)
            given_sinks = [t.data_ptr() for t in (lse, delta, sinks, parts)]
            run(ready.of_sinks, (), given_sinks)
            total = parts.sum_to_size(sinks.shape[0], p.Hq)
            dsinks = restore(total, x.sinks.shape, p.batch).to(x.sinks.dtype)
    found = zip("qkv", (dq, dk, dv), (x.q, x.k, x.v), strict=True)
    grads = [t.view(like.shape) if c in p.grads else None for c, t, like in found]
    return (grads[0], grads[1], grads[2], None, dsinks), ready.ran


def _rows_of(
    p: Problem, saved: tuple[Tensor, Tensor], cotangents: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    """o, lse, do and dlse with one batch axis; whether do had to be copied."""
    o, lse = saved
    do, dlse = cotangents
    if do is None:
        do = torch.zeros_like(o)
    laid = do if _readable(do) else do.contiguous()
    laid = laid.reshape(p.B, p.Hq, p.M, p.E)
    o, lse = o.reshape(p.B, p.Hq, p.M, p.E), lse.reshape(p.B, p.Hq, p.M)
    if dlse is not None:
        dlse = dlse.reshape(p.B, p.Hq, p.M)
    return o, lse, laid, dlse, laid.data_ptr() != do.data_ptr()


def _readable(t: Tensor) -> bool:
    """By TMA."""
    step = STEP // t.element_size()
    *batch, heads, rows, _ = t.shape
    strides = t.stride()
    steps = [s for n, s in zip((*batch, heads, rows), strides, strict=False) if n > 1]
    if strides[-1] != 1 or t.data_ptr() % STEP or any(s % step or s <= 0 for s in steps):
        return False
    return t.reshape(-1, heads, rows, t.shape[-1]).data_ptr() == t.data_ptr()


def _empty(p: Problem, like: Tensor) -> Tensor:
    """A gradient of q, k or v (B, heads, rows, width), without gaps: heads inside tokens where its
    array has them so."""
    b, heads, rows, width = like.shape
    if like.stride(1) < like.stride(2):
        order = torch.empty(b, rows, heads, width, dtype=p.dtype, device=p.device)
        return order.transpose(1, 2)
    return torch.empty(b, heads, rows, width, dtype=p.dtype, device=p.device)


class Address:
    """Stands for an argument that each call brings."""


AT = Address()


def _prepare(
    p: Problem, plan: GradPlan, arrays: tuple[Tensor, ...], dq: Tensor,
    rows: tuple[Tensor, Tensor, Tensor, Tensor | None], aligned: tuple[bool, bool],
    sinks: Tensor | None, lengths: Tensor | None, copied: bool,
) -> Ready:  # fmt: skip
    _o, lse, _do, dlse = rows
    heads, device = p.B * p.Hq, p.device
    strides = [(AT, *t.stride()[:3]) if t is not None else (0,) * 4 for t in rows]
    facts_values = *strides, AT, AT, AT, (p.M, p.Hq, p.E, pitch(p), shift(p))
    facts_key = key_of_facts(p, facts_values, aligned, dlse is not None)
    main_key, described = key_of_main(
        p, plan, [(tuple(t.shape), t.stride()) for t in arrays],
        None if lengths is None else lengths.dtype,
    )  # fmt: skip
    kernel = loaded(main_key, device)
    of_lengths = 0 if lengths is None or lengths.shape[0] == 1 else lengths.stride(0)
    sizes = (p.M, p.N, p.G, seen_rows(p)[0], p.Hq, shift(p))
    main_values = (
        *[(AT, *d.shape, *d.strides) for d in described],
        (0 if lengths is None else AT, of_lengths),
        *((tiles(p), p.Hk), sizes, numbers(p), p.scale, mask_of(p)[1] or (0,)),
    )
    rounded_values = AT, (AT, *dq.stride()[:3]), p.scale, (p.M, p.Hq, p.D)
    of_sinks, of_rows = None, heads * -(-p.M // FACT_ROWS)
    names = ["facts", "gradients", "rounded"]
    if sinks is not None:
        names.append("of sinks")
        steps = [s if n > 1 else 0 for n, s in zip(sinks.shape[:2], sinks.stride(), strict=False)]
        values = (*((AT, *lse.stride()), AT, (AT, *steps), AT, (p.M, p.Hq, pitch(p), shift(p))),)
        of_sinks = _pass(p, key_of_sinks(sinks.dtype), values, heads)
    copies = (COPIED,) if copied else ()
    return Ready(
        facts=_pass(p, facts_key, facts_values, of_rows),
        main=_pass(p, main_key, main_values, tiles(p) * p.Hk * p.B, Maps(kernel, described)),
        rounded=_pass(p, key_of_rounded(p, dq), rounded_values, of_rows),
        of_sinks=of_sinks,
        ran=Ran(tuple(names), workspace_bytes(p), copies),
    )


def _pass(p: Problem, key: Key, values: Any, programs: int, maps: Maps | None = None) -> Pass:
    flat = [*_flat(values)]
    varying = [n for n, value in enumerate(flat) if value is AT]
    launch = loaded(key, p.device).launch([0 if v is AT else v for v in flat], varying)
    return Pass(programs, launch, maps)


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


# ---- what the code of each kernel depends on ----------------------------------------------------


def key_of_main(
    p: Problem, plan: GradPlan, arrays: list[Any], lengths: torch.dtype | None
) -> tuple[Key, tuple[Described, ...]]:
    """Of grad_kernel.gradients, and its arrays: q, k, v, do, dk, dv, which are given as (shape,
    strides), sums of dq, ref, delta."""
    d, e = padded(p.D), padded(p.E)
    assert d is not None and e is not None, "refused"
    queries, keys = (1, plan.tile_m, 1), (1, ROWS, 1)
    boxes = (*queries, d), (*keys, d), (*keys, e), (*queries, e), (*keys, d), (*keys, e)
    described = []
    for (shape, strides), box in zip(arrays[:6], boxes, strict=True):
        b, heads, rows, width = shape
        sizes, order = (b, rows, heads, width), (strides[0], strides[2], strides[1])
        # an axis of one has any stride, and TMA takes multiples of 16 bytes
        steps = [s if n > 1 else 8 for n, s in zip(sizes[:3], order, strict=True)]
        described.append(Described(sizes, (*steps, 1), box))
    half = (1, ROWS, d // 2) if plan.tile_m == ROWS else (1, ROWS, d)
    facts = Described((p.B * p.Hq, p.M + shift(p)), (pitch(p), 1), (1, plan.tile_m))
    described += [Described((p.B * p.Hq, p.M, d), (p.M * d, d, 1), half), facts, facts]
    code, mask = mask_of(p)
    form = GradForm(d, e, code, hidden(p), p.softcap is not None, lengths is not None)
    signature = (
        (POINTERS[lengths or torch.int32], "i64"),
        *(("i32",) * 2, ("i32",) * 6, ("fp32",) * 3, "fp32", ("i64",) * (len(mask) or 1)),
    )
    constants = (
        *(("F", form), ("TILE_M", plan.tile_m), ("STAGES", plan.stages)),
        *(("REGISTERS", plan.registers), ("AT_ONCE", AT_ONCE), ("EARLY", plan.early)),
    )
    dtypes = *[p.dtype] * 6, *[torch.float32] * 3
    held = tuple((dtype, one.box) for dtype, one in zip(dtypes, described, strict=True))
    return Key(grad_kernel.gradients, held, signature, constants), tuple(described)


def key_of_facts(p: Problem, values: Any, aligned: tuple[bool, bool], has_dlse: bool) -> Key:
    """Of grad_rows.facts, from its arguments; aligned: o and do begin at multiples of 16 bytes."""
    kind = POINTERS[p.dtype]
    whole = ((kind, "i64", "i64", "i64"), ("*fp32", "i64", "i64", "i64"))
    signature = *whole, *whole, "*fp32", "*fp32", "*fp32", ("i32",) * 5
    constants = (
        *(("E", padded(p.E)), ("D", padded(p.D)), ("TILE_M", FACT_ROWS)),
        ("HAS_DLSE", has_dlse),
    )
    known: dict[tuple[int, ...], bool] = {(0, 0): aligned[0], (2, 0): aligned[1], (6,): True}
    known |= {(at, n): values[at][n] % 16 == 0 for at in (0, 2) for n in (1, 2, 3)}
    known[7, 2] = p.E % 16 == 0
    multiples = tuple(at for at, is_one in known.items() if is_one)
    return Key(grad_rows.facts, (), signature, constants, multiples)


def key_of_rounded(p: Problem, dq: Tensor) -> Key:
    """Of grad_rows.rounded."""
    signature = "*fp32", (POINTERS[p.dtype], "i64", "i64", "i64"), "fp32", ("i32",) * 3
    constants = ("D", padded(p.D)), ("TILE_M", FACT_ROWS)
    known: dict[tuple[int, ...], bool] = {
        (1, n + 1): s % 16 == 0 for n, s in enumerate(dq.stride()[:3])
    }
    known |= {(0,): True, (1, 0): True, (3, 2): p.D % 16 == 0}
    multiples = tuple(at for at, is_one in known.items() if is_one)
    return Key(grad_rows.rounded, (), signature, constants, multiples)


def key_of_sinks(dtype: torch.dtype) -> Key:
    """Of grad_rows.of_sinks."""
    lse = ("*fp32", "i64", "i64", "i64")
    signature = lse, "*fp32", (POINTERS[dtype], "i64", "i64"), "*fp32", ("i32",) * 4
    return Key(grad_rows.of_sinks, (), signature, (("BLOCK", 1024),))
