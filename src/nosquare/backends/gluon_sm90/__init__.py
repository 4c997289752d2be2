"""gluon_sm90: forward kernels for NVIDIA's Hopper cards (H100, H200), in Gluon.

What costs most there, 16-bit products of plain scores under masks made of intervals. The rest is
triton_any's, and few rows with many keys, which yields() leaves to it. Needs triton, which a CUDA
build of torch brings along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from ...traffic import Tiling
from .. import FORWARD, Grads
from .versions import unsupported

STEP = 16  # bytes, of which TMA wants strides and addresses to be multiples
MOST_POSITIONS = 1 << 30  # counted in 32 bits, and a window may reach M + N beyond them
MOST_TILES = 1 << 31
MANY_KEYS = 16  # tiles of keys from which sharing them out is worth a second kernel
# First on Hopper: torch's kernels are ahead in one of its records (docs/records/cuda_hopper.jsonl).
RANK = 200


def refusals(problem: Problem, phase: str) -> list[str]:
    """What stands against it; empty when it can run the phase."""
    p = problem
    if p.device.type != "cuda":
        return [f"it has kernels for GPUs, and the tensors are on {p.device.type}"]
    if _capability(p.device) != (9, 0):
        return ["it has kernels for Hopper cards (sm_90), and this is another"]
    why = [unsupported()] if unsupported() else []
    halves = (torch.bfloat16, torch.float16)
    extras = (("bias", p.bias), ("alibi", p.alibi), ("dropout", p.p or None))
    step = STEP // p.dtype.itemsize
    why += [
        reason
        for reason, there in (
            ("it computes bfloat16 and float16", p.dtype not in halves),
            *((f"it has no {name}", value is not None) for name, value in extras),
            ("of masks given as arrays it reads lengths alone", _other_arrays(p)),
            ("there is nothing to compute", 0 in (p.B, p.Hq, p.M, p.N, p.E)),
            ("the scale is not above 0", not p.scale > 0),
            ("rows of q, k and v need a multiple of 16 bytes", p.D % step or p.E % step),
            ("q, k and v do not start at multiples of 16 bytes", not p.aligned),
            ("positions do not fit 32 bits", p.M + p.N >= MOST_POSITIONS),
        )
        if there
    ]
    return why or _strides(p) or (_tiles(p) if phase == FORWARD else _gradients(p))


def yields(problem: Problem, phase: str) -> list[str]:
    """Why a kernel that shares the keys of a row out should have a problem that this could run: so
    few tiles of rows that half of the card or more would idle while they go through many keys."""
    from .attend_plan import plan, rows_of, tiles

    if phase != FORWARD:
        return _few_keys(problem)
    p, chosen = problem, plan(problem)
    if chosen is None or p.packed:  # keys of packed sequences are not shared out
        return []
    # which backend runs a row may not depend on what else is in the batch either
    entries = 1 if p.batch_invariant else p.B
    busy, units = tiles(p, chosen) * p.Hq // chosen.group * entries, _units(p.device)
    if 2 * busy > units or max(rows_of(p, chosen).keys) < MANY_KEYS:
        return []
    return [
        f"so few queries would keep {busy} of {units} multiprocessors busy: a kernel that shares "
        "out the keys of a query keeps more of them busy"
    ]


def _few_keys(p: Problem) -> list[str]:
    """Why another backend should have a backward that this could run: most of its tiles would be
    empty, or most of the card."""
    from .attend_plan import padded
    from .grad_plan import plan, tiles

    width, least, chosen = padded(max(p.D, p.E)) or 0, min(p.D, p.E), plan(p)
    if least * 3 < width * 2:
        return [f"D {p.D} and E {p.E} fill less than two thirds of its tiles, {width} wide"]
    if chosen is not None and chosen.tile_m > p.M:
        return [f"{p.M} queries do not fill one of its tiles, {chosen.tile_m} long"]
    entries = 1 if p.batch_invariant else p.B
    busy, units = tiles(p) * p.Hk * entries, _units(p.device)
    if 2 * busy <= units:
        return [f"so few keys would keep {busy} of {units} multiprocessors busy"]
    return []


def _other_arrays(p: Problem) -> bool:
    from .form import parts_of

    return parts_of(p) is None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


@cache
def _units(device: torch.device) -> int:
    """Multiprocessors of a card."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _strides(p: Problem) -> list[str]:
    """Why TMA cannot read arrays that lie so."""
    step = STEP // p.dtype.itemsize
    for strides, heads, length in zip(p.strides, (p.Hq, p.Hk, p.Hk), (p.M, p.N, p.N), strict=True):
        sizes = (length, heads) if p.packed else (*p.batch, heads, length)
        used = [s for n, s in zip(sizes, strides, strict=False) if n > 1]
        if strides[-1] != 1 or any(s % step or s <= 0 for s in used):
            return ["strides of q, k and v are not multiples of 16 bytes, above 0"]
        batch = [(n, s) for n, s in zip(sizes[:-2], strides, strict=False) if n > 1]
        if any(a[1] != b[1] * b[0] for a, b in pairwise(batch)):
            return ["the batch axes are not evenly strided"]
    return []


def _tiles(p: Problem) -> list[str]:
    from .attend_plan import alive, plan, tiles

    chosen = plan(p)
    if chosen is None:
        return [f"it has no tiles for D {p.D} and E {p.E}"]
    if tiles(p, chosen) * p.B * p.Hq >= MOST_TILES:
        return ["more tiles than 31 bits count"]
    if p.packed:
        return []
    lo, hi = alive(p)
    if lo > 0 and "t0" in p.mask:
        return ["keys before those that anybody sees would be read where an entry is short"]
    if lo > 0 and hi - lo < chosen.tile_n:
        return [f"nobody sees more than {hi - lo} keys, and those before them would be read"]
    return []


def _gradients(p: Problem) -> list[str]:
    """What stands against backward alone."""
    from .form import bound_of
    from .grad_plan import plan, rising, seen_rows, tiles

    if p.packed:
        return ["its backward takes no packed sequences"]
    if p.exact_delta:
        return ["its backward has no exact_delta: it takes delta from o"]
    if p.deterministic and not rising(p):
        return ["later rows may see earlier keys: tiles of keys have no order of turns"]
    if plan(p) is None:
        return [f"its backward has no tiles for D {p.D} and E {p.E}"]
    if max(tiles(p), p.M) * p.B * p.Hq >= MOST_TILES:
        return ["more tiles or rows than 31 bits count"]
    first, last = seen_rows(p)
    if first == last:
        return ["no row sees a key"]
    if last < p.M:
        return [f"rows from {last} on see no key, and their q and do would be read"]
    if "t0" in p.mask and bound_of(p).span(p.M - 1, p.M)[0] > 0:
        return ["rows that see nothing but padding where an entry is short would be read"]
    return []


def plan(problem: Problem, phase: str) -> Any:
    """Tiles for the problem."""
    from . import attend_plan, grad_plan

    return attend_plan.plan(problem) if phase == FORWARD else grad_plan.plan(problem)


def plans(problem: Problem, phase: str, timed: Sequence[Any] = ()) -> list[Any]:
    """Other plans worth timing; of backward there are none."""
    if phase != FORWARD:
        return []
    from .search import plans as found

    return [*found(problem, phase, timed)]


def builds(problem: Problem, plan: Any, phase: str, x: Inputs) -> Mapping[Any, Callable[[], Any]]:
    """What compiles the kernel of a plan ahead; of backward, the one that multiplies."""
    from .search import builds as found

    return found(problem, plan, phase, x)


def workspace_bytes(problem: Problem, plan: Any, phase: str) -> int | None:
    """Bytes that the receipt of this phase will name."""
    if phase == FORWARD:
        return 4 if problem.packed else 0
    from .grad_plan import workspace_bytes as found

    return found(problem)


def tiling(problem: Problem, plan: Any, phase: str) -> Tiling:
    """The schedule, as the model of traffic.py takes it."""
    from . import attend_plan, grad_plan

    if phase == FORWARD:
        return attend_plan.tiling(problem, plan)
    return grad_plan.tiling(problem, plan)


def forward(problem: Problem, plan: Any, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o, lse and what ran."""
    return _forward()(problem, plan, x)  # type: ignore[no-any-return]


@cache
def _forward() -> Any:
    """What runs forward: triton is loaded when it is first asked for."""
    from .attend import forward as found

    return found


def backward(
    problem: Problem,
    plan: Any,
    x: Inputs,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v, bias, sinks (None where not wanted), and what ran."""
    return _backward()(problem, plan, x, saved, cotangents)  # type: ignore[no-any-return]


@cache
def _backward() -> Any:
    from .gradients import backward as found

    return found
