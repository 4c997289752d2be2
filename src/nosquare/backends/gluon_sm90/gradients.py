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
from .compiled import AT, POINTERS, Described, Key, Maps, laid_out, loaded
from .form import ROWS, GradForm, lengths_of, mask_of, numbers
from .grad_plan import (
    FACT_ROWS,
    GradPlan,
    blocks,
    hidden,
    pitch,
    seen_rows,
    shift,
    tiles,
    together,
    words,
    workspace_bytes,
)

MOST_KEPT = 1024  # problems
STEP = 16  # bytes, of which TMA wants strides and addresses to be multiples
AT_ONCE = 128  # see queries_of()
COPIED = "the cotangent of o, whose rows TMA cannot read"


class Given(NamedTuple):
    """What a call brings beside q, k and v, with one batch axis.

    sinks   (B | 1, Hq, 1, 1), where their gradient is wanted; lengths (B | 1,)
    copied  do had to be
    """

    o: Tensor
    lse: Tensor
    do: Tensor
    dlse: Tensor | None
    sinks: Tensor | None
    lengths: Tensor | None
    copied: bool

    def aligned(self) -> tuple[bool, bool]:
        """Whether o and do begin at multiples of 16 bytes."""
        return self.o.data_ptr() % STEP == 0, self.do.data_ptr() % STEP == 0

    def laid(self) -> tuple[Any, ...]:
        """How all of it lies."""
        every = (t for t in self[:6] if isinstance(t, Tensor))
        there = tuple(t is None for t in self[3:6])
        return self.copied, self.aligned(), there, *((t.dtype, t.shape, t.stride()) for t in every)


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
    given = _given(p, x, saved, cotangents)
    dq, dk, dv = (_empty(p, t) for t in (q, k, v))
    of_facts, of_sums, of_turns = words(p)
    facts = torch.empty(2, of_facts // 2, dtype=torch.float32, device=p.device)
    ref, delta = facts[0], facts[1]
    sums = torch.empty(of_sums, dtype=torch.float32, device=p.device)
    turns = torch.empty(of_turns, dtype=torch.int32, device=p.device) if of_turns else None
    arrays = q, k, v, given.do, dk, dv, sums, ref, delta
    key = p, plan, given.laid()
    ready = _READY.get(key)
    if ready is None:
        if len(_READY) >= MOST_KEPT:
            _READY.clear()
        ready = _READY[key] = _prepare(p, plan, given, arrays, dq)
    parts = None
    with torch.cuda.device(p.device):
        stream = torch._C._cuda_getCurrentRawStream(p.device.index)

        def run(one: Pass, *others: Tensor | None) -> None:
            maps = one.maps.of(arrays) if one.maps else []  # they have to live until the launch
            numbers = [t.data_ptr() for t in others if t is not None]
            one.launch(one.programs, p.device.index, stream, [m.address for m in maps], numbers)

        run(ready.facts, given.o, given.lse, given.do, given.dlse, ref, delta, sums, turns)
        run(ready.main, given.lengths, turns)
        run(ready.rounded, sums, dq)
        if ready.of_sinks is not None:
            parts = torch.empty(p.B, p.Hq, dtype=torch.float32, device=p.device)
            run(ready.of_sinks, given.lse, delta, given.sinks, parts)
    found = zip("qkv", (dq, dk, dv), (x.q, x.k, x.v), strict=True)
    grads = [t.view(like.shape) if c in p.grads else None for c, t, like in found]
    return (grads[0], grads[1], grads[2], None, _of_sinks(p, x, given, parts)), ready.ran


def _of_sinks(p: Problem, x: Inputs, given: Given, parts: Tensor | None) -> Tensor | None:
    """The gradient in the user's shape and dtype, from that of each entry and head."""
    if parts is None or x.sinks is None or given.sinks is None:
        return None
    total = parts.sum_to_size(given.sinks.shape[0], p.Hq)
    return restore(total, x.sinks.shape, p.batch).to(x.sinks.dtype)


def _given(
    p: Problem,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> Given:
    (o, lse), (do, dlse) = saved, cotangents
    do = torch.zeros_like(o) if do is None else do
    # contiguous() would give back a view that begins between multiples of 16 bytes
    readable = do if _readable(do) else do.clone(memory_format=torch.contiguous_format)
    laid = readable.reshape(p.B, p.Hq, p.M, p.E)
    wanted = x.sinks is not None and "s" in p.grads
    return Given(
        o=o.reshape(p.B, p.Hq, p.M, p.E),
        lse=lse.reshape(p.B, p.Hq, p.M),
        do=laid,
        dlse=None if dlse is None else dlse.reshape(p.B, p.Hq, p.M),
        sinks=per_head(x.sinks, p.batch, p.Hq) if wanted and x.sinks is not None else None,
        lengths=lengths_of(p, x.arrays),
        copied=laid.data_ptr() != do.data_ptr(),
    )


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


def _prepare(
    p: Problem, plan: GradPlan, given: Given, arrays: tuple[Tensor, ...], dq: Tensor
) -> Ready:
    heads, sinks, lengths = p.B * p.Hq, given.sinks, given.lengths
    of_rows = heads * blocks(p)
    turns = (AT, blocks(p)) if plan.ordered else (0, 0)
    strides = [(AT, *t.stride()[:3]) if t is not None else (0,) * 4 for t in given[:4]]
    facts = *strides, AT, AT, AT, turns[0], (p.M, p.Hq, p.E, pitch(p), shift(p))
    facts_key = key_of_facts(p, facts, given.aligned(), given.dlse is not None, plan.ordered)
    laid = [(tuple(t.shape), t.stride()) for t in arrays]
    key, described = key_of_main(p, plan, laid, None if lengths is None else lengths.dtype)
    apart = 0 if lengths is None or lengths.shape[0] == 1 else lengths.stride(0)
    sizes = (p.M, p.N, p.G, seen_rows(p)[0], p.Hq, shift(p))
    main = (
        *[(AT, *d.shape, *d.strides) for d in described],
        (0 if lengths is None else AT, apart),
        *(turns, (tiles(p), p.Hk, p.Hk * p.B, together(p, plan)), sizes, numbers(p), p.scale),
        mask_of(p)[1] or (0,),
    )
    rounded = AT, (AT, *dq.stride()[:3]), p.scale, (p.M, p.Hq, p.D)
    names: tuple[str, ...] = ("facts", "gradients", "rounded")
    of_sinks = None
    if sinks is not None:
        names = (*names, "of sinks")
        steps = [s if n > 1 else 0 for n, s in zip(sinks.shape[:2], sinks.stride(), strict=False)]
        values = (AT, *given.lse.stride()), AT, (AT, *steps), AT, (p.M, p.Hq, pitch(p), shift(p))
        of_sinks = _pass(p, key_of_sinks(sinks.dtype), values, heads)
    maps = Maps(loaded(key, p.device), described)
    return Ready(
        facts=_pass(p, facts_key, facts, of_rows),
        main=_pass(p, key, main, tiles(p) * p.Hk * p.B, maps),
        rounded=_pass(p, key_of_rounded(p, dq), rounded, of_rows),
        of_sinks=of_sinks,
        ran=Ran(names, workspace_bytes(p), (COPIED,) if given.copied else ()),
    )


def _pass(p: Problem, key: Key, values: Any, programs: int, maps: Maps | None = None) -> Pass:
    return Pass(programs, laid_out(loaded(key, p.device), values), maps)


# ---- what the code of each kernel depends on ----------------------------------------------------


def offline(p: Problem, plan: GradPlan, x: Inputs) -> Key:
    """The key of the kernel that multiplies, from stand-ins for what there is beside q, k and v."""
    queries, keys = (p.B, p.Hq, p.M), (p.B, p.Hk, p.N)
    shapes = [(*rows, p.D) for rows in (queries, keys)] + [(*rows, p.E) for rows in (keys, queries)]
    laid = [(shape, (0,) * 4) for shape in (*shapes, *shapes[1:3])]
    lengths = next(iter(x.arrays), None)
    return key_of_main(p, plan, laid, None if lengths is None else lengths.dtype)[0]


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
    softcap, padding = p.softcap is not None, lengths is not None
    form = GradForm(d, e, code, hidden(p), softcap, padding, plan.ordered)
    signature = (
        (POINTERS[lengths or torch.int32], "i64"),
        *(
            ("*i32", "i32"),
            ("i32",) * 4,
            ("i32",) * 6,
            ("fp32",) * 3,
            "fp32",
            ("i64",) * (len(mask) or 1),
        ),
    )
    constants = (
        *(("F", form), ("TILE_M", plan.tile_m), ("STAGES", plan.stages)),
        *(("REGISTERS", plan.registers), ("AT_ONCE", AT_ONCE)),
    )
    dtypes = *[p.dtype] * 6, *[torch.float32] * 3
    held = tuple((dtype, one.box) for dtype, one in zip(dtypes, described, strict=True))
    return Key(grad_kernel.gradients, held, signature, constants), tuple(described)


def key_of_facts(
    p: Problem, values: Any, aligned: tuple[bool, bool], has_dlse: bool, ordered: bool
) -> Key:
    """Of grad_rows.facts, from its arguments; aligned: o and do begin at multiples of 16 bytes."""
    kind = POINTERS[p.dtype]
    whole = ((kind, "i64", "i64", "i64"), ("*fp32", "i64", "i64", "i64"))
    signature = *whole, *whole, "*fp32", "*fp32", "*fp32", "*i32", ("i32",) * 5
    constants = (
        *(("E", padded(p.E)), ("D", padded(p.D)), ("TILE_M", FACT_ROWS)),
        *(("HAS_DLSE", has_dlse), ("ORDERED", ordered)),
    )
    known: dict[tuple[int, ...], bool] = {(0, 0): aligned[0], (2, 0): aligned[1], (6,): True}
    known |= {(at, n): values[at][n] % 16 == 0 for at in (0, 2) for n in (1, 2, 3)}
    known[8, 2] = p.E % 16 == 0
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
