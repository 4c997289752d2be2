"""Forward on the host: the launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...axes import per_head
from ...driver import Launch
from ...inputs import Inputs, check_offsets
from ...problem import Problem
from ...receipt import Ran
from . import attend_kernel
from .attend_plan import Plan, padded, rows_of
from .attend_plan import tiles as tiles_of
from .compiled import AT, POINTERS, Described, Key, Maps, laid_out, loaded
from .form import ROWS, Form, lengths_of, mask_of, numbers
from .order import AS_COUNTED, LISTED, LONGEST_FIRST, listed

# keys and values that the programs at work read together, of a cache of 50 MiB
NEAR_BYTES = tuple(size << 20 for size in (4, 8, 16, 32))
MOST_KEPT = 1024  # problems
RAN, PACKED = Ran(("attend",)), Ran(("attend",), 4)  # a counter


class Ready(NamedTuple):
    """What the calls of a problem and a plan have in common.

    launch     with its arguments laid out
    maps       descriptors of q, k, v and o
    programs   of the grid
    order      a list of tiles on the card; None without one
    unlisted   a list would be worth making if there is another call
    """

    launch: Launch
    maps: Maps
    programs: int
    order: Tensor | None
    unlisted: bool


_READY: dict[Any, Ready] = {}
_CAPTURED: dict[int, Tensor] = {}  # lists that graphs read: they live as long as the process


def forward(p: Problem, plan: Plan, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o in the promised order, lse contiguous, and what ran."""
    key: tuple[Any, ...] = (p, plan)
    sinks = lengths = None
    if x.sinks is not None or x.arrays:
        sinks, lengths = _sinks(p, x.sinks), lengths_of(p, x.arrays)
        for more in (sinks, lengths):
            key += () if more is None else (more.dtype, more.shape, more.stride())
    o = p.empty_o()
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=p.device)
    ready = _READY.get(key)
    if ready is None or ready.unlisted or ready.order is not None:
        ready = _ready(key, p, plan, (x.q, x.k, x.v, o), sinks, lengths)
    maps = ready.maps.of((x.q, x.k, x.v, o))
    addresses, numbers = [one.address for one in maps], [lse.data_ptr()]
    for more in (sinks, lengths):
        if more is not None:
            numbers.append(more.data_ptr())
    if p.packed:
        cu_q, cu_k = _offsets(p, x)  # so have these
        counter = torch.zeros(1, dtype=torch.int32, device=p.device)
        numbers += [counter.data_ptr(), cu_q.data_ptr(), cu_k.data_ptr(), o.data_ptr()]
    index = p.device.index
    if torch._C._cuda_getDevice() == index:  # torch.cuda asks first whether there is CUDA
        stream = torch._C._cuda_getCurrentRawStream(index)
        ready.launch(ready.programs, index, stream, addresses, numbers)
    else:
        with torch.cuda.device(index):
            stream = torch._C._cuda_getCurrentRawStream(index)
            ready.launch(ready.programs, index, stream, addresses, numbers)
    return o, lse, PACKED if p.packed else RAN


def _sinks(p: Problem, sinks: Tensor | None) -> Tensor | None:
    """(Hq,), as they mostly are, or (B | 1, Hq, 1, 1), in two strides either way."""
    if sinks is None or sinks.shape == (p.Hq,):
        return sinks
    return per_head(sinks, () if p.packed else p.batch, p.Hq)


def _ready(
    key: Any, p: Problem, plan: Plan, arrays: tuple[Tensor, ...],
    sinks: Tensor | None, lengths: Tensor | None,
) -> Ready:  # fmt: skip
    """What is known of the calls of a key; a list of tiles is made for the second of them."""
    ready = _READY.get(key)
    capturing = torch.cuda.is_current_stream_capturing()
    if ready is None or (ready.unlisted and not capturing):
        ready = _prepare(p, plan, arrays, sinks, lengths, listing=ready is not None)
        if len(_READY) >= MOST_KEPT:
            _READY.clear()
        _READY[key] = ready
    if capturing and ready.order is not None:
        _CAPTURED[ready.order.data_ptr()] = ready.order
    return ready


def _offsets(p: Problem, x: Inputs) -> tuple[Tensor, Tensor]:
    """cu_q and cu_k on the card, int32; those that the host can see are checked, a kernel keeps any
    others within bounds. Raises ArgumentError."""
    found = []
    for name, cu, total in (("cu_q", x.cu_q, p.M), ("cu_k", x.cu_k, p.N)):
        assert cu is not None, "a packed problem has offsets"
        if cu.device.type == "cpu":
            check_offsets(name, cu.tolist(), total)
        found.append(cu.to(p.device, torch.int32).contiguous())
    return found[0], found[1]


def _prepare(
    p: Problem, plan: Plan, arrays: tuple[Tensor, ...],
    sinks: Tensor | None, lengths: Tensor | None, listing: bool,
) -> Ready:  # fmt: skip
    tiles, heads = tiles_of(p, plan), p.Hq // plan.group
    total = tiles * heads * (1 if p.packed else p.B)
    units = torch.cuda.get_device_properties(p.device).multi_processor_count
    programs = min(units, total)
    uneven = len(set(rows_of(p, plan).keys)) > 1
    way, turns, order = LONGEST_FIRST if uneven else AS_COUNTED, -(-total // programs), None
    if uneven and listing:
        pair = p.N * (p.D + p.E) * p.dtype.itemsize
        near = [max(1, size // pair) * p.G // plan.group for size in NEAR_BYTES]
        order = listed(rows_of(p, plan).keys, heads * p.B, near, programs).to(p.device)
        way, turns = LISTED, len(order)
    described = described_as(p, plan, [(tuple(t.shape), t.stride()) for t in arrays])
    of_sinks = (0, 0) if sinks is None else _broadcast(sinks)
    of_lengths = (0, 0) if lengths is None else _broadcast(lengths[:, None])
    values = (
        *((AT, *d.shape, *d.strides) for d in described),
        (AT, 0 if p.packed else p.Hq * p.M, p.M),
        (0 if sinks is None else AT, *of_sinks),
        (0 if lengths is None else AT, of_lengths[0]),
        *(0 if order is None else order.data_ptr(), turns, (tiles, heads, total, way)),
        *((p.M, p.N, p.G // plan.group, p.B), numbers(p)),
        *(((AT, AT, AT), (AT, *arrays[3].stride()[:2], p.E)) if p.packed else ((0,) * 3, (0,) * 4)),
        mask_of(p)[1] or (0,),
    )
    types = [None if t is None else t.dtype for t in (sinks, lengths)]
    kernel = loaded(key_of(p, plan, described, *types), p.device)
    launch, maps = laid_out(kernel, values), Maps(kernel, described)
    return Ready(launch, maps, programs, order, uneven and order is None)


def _broadcast(t: Tensor) -> tuple[int, int]:
    """Strides of the first two axes, 0 where they have one element; of one axis, the second's."""
    if t.dim() == 1:
        return 0, t.stride(0) if len(t) > 1 else 0
    first, second = (s if n > 1 else 0 for n, s in zip(t.shape[:2], t.stride()[:2], strict=True))
    return first, second


def described_as(p: Problem, plan: Plan, arrays: list[Any]) -> tuple[Described, ...]:
    """q, k, v and o, of these shapes and strides: (entry, row, head, width), with their tiles."""
    d, e = padded(p.D), padded(p.E)
    assert d is not None and e is not None, "refused"
    rows, keys = (1, ROWS // plan.group, plan.group), (1, plan.tile_n, 1)
    boxes = (*rows, d), (*keys, d), (*keys, e), (*rows, e)
    found = []
    for (shape, strides), box in zip(arrays, boxes, strict=True):
        if p.packed:
            sizes, steps = (1, *shape), (0, *strides)
        else:
            *batch, heads, length, width = shape
            entry = next((s for n, s in zip(batch[::-1], strides[-4::-1], strict=True) if n > 1), 0)
            sizes, steps = (p.B, length, heads, width), (entry, strides[-2], strides[-3], 1)
        found.append(Described(sizes, _steps(sizes, steps), box))
    return tuple(found)


def _steps(sizes: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...]:
    # an axis of one has any stride, and TMA takes multiples of 16 bytes
    return *(s if n > 1 else 8 for n, s in zip(sizes[:-1], steps[:-1], strict=True)), 1


def offline(p: Problem, plan: Plan, x: Inputs) -> Key:
    """The key of a problem's kernel, from stand-ins for what it has beside q, k and v."""
    widths = p.D, p.D, p.E, p.E
    heads, rows = (p.Hq, p.Hk, p.Hk, p.Hq), (p.M, p.N, p.N, p.M)
    sizes = list(zip(heads, rows, widths, strict=True))
    shapes = [(r, h, w) if p.packed else (*p.batch, h, r, w) for h, r, w in sizes]
    arrays = [(shape, (0,) * len(shape)) for shape in shapes]
    types = [None if t is None else t.dtype for t in (x.sinks, next(iter(x.arrays), None))]
    return key_of(p, plan, described_as(p, plan, arrays), *types)


def key_of(
    p: Problem,
    plan: Plan,
    described: tuple[Described, ...],
    sinks: torch.dtype | None = None,
    lengths: torch.dtype | None = None,
) -> Key:
    """What the code of a problem's kernel depends on; sinks, lengths: dtypes of the arrays."""
    code, mask = mask_of(p)
    rows = rows_of(p, plan)
    d, e = described[0].box[-1], described[-1].box[-1]
    form = Form(
        *(d, e, plan.group, code, rows.hidden, rows.more, rows.half, rows.even),
        softcap=p.softcap is not None,
        sinks=sinks is not None,
        lengths=lengths is not None,
        packed=p.packed,
    )
    signature = (
        *(("*fp32", "i64", "i64"), (POINTERS[sinks or torch.float32], "i64", "i64")),
        *((POINTERS[lengths or torch.int32], "i64"), ("*i32",), "i32", ("i32",) * 4),
        *(("i32",) * 4, ("fp32",) * 3, ("*i32",) * 3, (POINTERS[p.dtype], "i64", "i64", "i32")),
        ("i64",) * (len(mask) or 1),
    )
    constants = (
        *(("F", form), ("TILE_M", plan.tile_m), ("TILE_N", plan.tile_n), ("STAGES", plan.stages)),
        *(("Q_STAGES", plan.q_stages), ("GROUPS", plan.groups), ("REGISTERS", plan.registers)),
        *(("ALIAS", plan.alias), ("BUFFER", plan.buffer)),
    )
    boxes = tuple((p.dtype, d.box) for d in described)
    return Key(attend_kernel.attend, boxes, signature, constants)
