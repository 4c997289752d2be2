"""Kernels compiled once for a form and a card, and launched without asking Triton again.

A kernel takes tuples of pointers and numbers, one constant F (form.py) and constant tile sizes. Its
signature is read off the arguments; what may be assumed of them (multiples of 16) is said by the
caller, so that no length makes another kernel. In Triton's interpreter the same kernels run on
arrays of a CPU.

What the calls of a problem have in common is worked out once (Launches); a call adds its addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .cards import Card

POINTERS = {
    **{torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"},
    **{torch.float64: "*fp64", torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8"},
    **{torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"},
}
# whether kernels run on arrays of a CPU: TRITON_INTERPRET=1 when they were imported
INTERPRETED = bool(triton.knobs.runtime.interpret)
Arguments = tuple[tuple[Any, ...], ...]  # of a kernel: a tuple for each parameter


class Small(int):
    """An integer that a kernel takes in 32 bits."""


class Count(int):
    """An integer of 64 bits of which nothing is assumed. Plain ones are strides: what divides them
    may be assumed, so that another stride may make another kernel."""


class Settings(NamedTuple):
    """Constants of a kernel after F, by name, and how it is compiled."""

    tiles: tuple[tuple[str, int], ...]
    warps: int
    stages: int


def signature(arguments: Arguments) -> tuple[tuple[str, ...], ...]:
    """Triton's types of the arguments."""
    return tuple(tuple(_type(value) for value in values) for values in arguments)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if isinstance(value, Small) else "i64"


def multiples(arguments: Arguments) -> tuple[tuple[int, int, int], ...]:
    """What may be assumed of arguments like these, of pointers (16 where they start at a multiple
    of 16 bytes) and strides: (parameter, place in it, a power of 2 up to 16 that divides it)."""
    found = []
    for n, values in enumerate(arguments):
        for at, value in enumerate(values):
            power = 1
            if isinstance(value, Tensor):
                power = 16 if value.data_ptr() % 16 == 0 else 1
            elif type(value) is int:
                power = min(value & -value, 16) if value else 16
            if power > 1:
                found.append((n, at, power))
    return tuple(found)


class Key(NamedTuple):
    """All that a compiled kernel depends on, but for the kernel and the card."""

    form: Any
    signature: tuple[tuple[str, ...], ...]
    multiples: tuple[tuple[int, int, int], ...]
    settings: Settings


def compile_for(kernel: Any, key: Key, card: Card) -> Any:
    """Triton's compiled kernel for a card, which need not be here."""
    names = kernel.arg_names
    types: dict[str, Any] = dict(zip(names, key.signature, strict=False))
    constants = {"F": key.form, **dict(key.settings.tiles)}
    types |= dict.fromkeys(constants, "constexpr")
    assert list(types) == list(names), "a kernel takes its tuples, then F, then its tiles"
    attributes = {(n, at): [["tt.divisibility", power]] for n, at, power in key.multiples}
    source = ASTSource(kernel, types, constants, attributes)
    target = GPUTarget(card.backend, card.arch, card.warp)
    options = {"num_warps": key.settings.warps, "num_stages": key.settings.stages}
    return triton.compile(source, target=target, options=options)


@lru_cache(maxsize=4096)
def launcher(kernel: Any, key: Key, card: Card, device: torch.device) -> Any:
    """Triton's compiled kernel for this key, compiled when it is first asked for; the kernel itself
    in the interpreter. One for each device, since a loaded kernel belongs to it."""
    return kernel if INTERPRETED else compile_for(kernel, key, card)


class Pass(NamedTuple):
    """A kernel to run: what its code depends on, its grid of one axis, its arguments."""

    kernel: Any
    key: Key
    grid: int
    arguments: Arguments


class Launches(NamedTuple):
    """Kernels that run one after the other, and their arguments but for what differs from call to
    call. An itemgetter picks a tuple in one step.

    numbers  that stand beside addresses
    tuples   pickers of the arguments that hold something of a call, from (*values, *numbers)
    known    the other arguments, and the constants
    runs     (compiled, grid, picker of a kernel's arguments from (*tuples, *known))
    """

    numbers: tuple[int | float, ...]
    tuples: tuple[Callable[[Any], Any], ...]
    known: tuple[Any, ...]
    runs: tuple[tuple[Any, int, Callable[[Any], Any]], ...]


def prepared(
    passes: Iterable[Pass], card: Card, device: torch.device, varying: Sequence[Any]
) -> Launches:
    """Launches from the arguments of one call, of which they keep nothing that is in `varying`.

    varying  what differs from call to call, found among the arguments by what it is, not by what it
             equals: no object may stand for two
    """
    at = {id(value): n for n, value in enumerate(varying)}
    numbers: list[int | float] = []
    tuples: dict[Any, Callable[[Any], Any]] = {}
    known: list[Any] = []
    runs: list[tuple[Any, int, list[int]]] = []
    for one in passes:
        picked: list[int] = []  # places in tuples, and -1 - those in known
        for values in one.arguments:
            if not any(id(value) in at for value in values):
                picked.append(-1 - len(known))
                known.append(tuple(_plain(value) for value in values))
                continue
            alike = tuple((at.get(id(value)), type(value), _plain(value)) for value in values)
            alike = tuple((n, kind, None if n is not None else v) for n, kind, v in alike)
            if alike not in tuples:
                assert len(values) > 1, "itemgetter makes a tuple of several values"
                first = len(varying) + len(numbers)
                numbers += [value for n, _, value in alike if n is None]
                fresh = iter(range(first, len(varying) + len(numbers)))
                tuples[alike] = itemgetter(*(next(fresh) if n is None else n for n, _, _ in alike))
            picked.append(list(tuples).index(alike))
        for constant in (one.key.form, *(value for _, value in one.key.settings.tiles)):
            picked.append(-1 - len(known))
            known.append(constant)
        runs.append((launcher(one.kernel, one.key, card, device), one.grid, picked))
    return Launches(
        tuple(numbers),
        tuple(tuples.values()),
        tuple(known),
        tuple(
            (kernel, grid, itemgetter(*(n if n >= 0 else len(tuples) - 1 - n for n in picked)))
            for kernel, grid, picked in runs
        ),
    )


def launch(launches: Launches, device: torch.device, values: Sequence[Any]) -> None:
    """Run the kernels on the current stream of the device.

    values  of this call, in the order of `varying`: addresses (in the interpreter arrays), seeds
    """
    every = (*values, *launches.numbers)
    pool = (*[pick(every) for pick in launches.tuples], *launches.known)
    if INTERPRETED:
        for kernel, grid, pick in launches.runs:
            kernel[(grid,)](*pick(pool))
    elif torch._C._cuda_getDevice() == device.index:  # torch.cuda asks first whether there is CUDA
        _run(launches.runs, device.index, pool)
    else:
        with torch.cuda.device(device):
            _run(launches.runs, device.index, pool)


def _run(runs: Any, index: int, pool: tuple[Any, ...]) -> None:
    # as Triton asks for it: torch.cuda.current_stream makes an object first
    stream = torch._C._cuda_getCurrentRawStream(index)
    for kernel, grid, pick in runs:
        run = kernel.run  # loads the kernel when it is first asked for
        start = (grid, 1, 1, stream, kernel.function, kernel.packed_metadata)
        run(*start, None, None, None, *pick(pool))


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, Small | Count) else value


def values_of(arrays: Iterable[Any]) -> list[Any]:
    """Arrays, and numbers among them, as `launch` takes them."""
    if INTERPRETED:
        return [*arrays]
    return [a if isinstance(a, int) else a.data_ptr() for a in arrays]


def unaligned(values: Sequence[Any]) -> tuple[int, ...]:
    """Which of the addresses are no multiple of 16. The interpreter does not care."""
    every = 0
    for start in () if INTERPRETED else values:
        every |= start
    return tuple([n for n, start in enumerate(values) if start % 16]) if every & 15 else ()


Place = tuple[int, torch.dtype]


def views(work: Tensor, places: Iterable[Place]) -> list[Tensor]:
    """Parts of a workspace, float32 of one axis, that begin at these places and have these types of
    32 bits."""
    return [work[start:].view(dtype) for start, dtype in places]


def pointers(work: Tensor, places: Iterable[Place]) -> list[Any]:
    """`views` as `launch` takes them."""
    if INTERPRETED:
        return views(work, places)
    first = work.data_ptr()
    return [first + 4 * start for start, _ in places]


_Made = TypeVar("_Made")
MOST_READY = 4096  # problems whose launches are remembered


def remember(ready: dict[Any, _Made], key: Any, made: _Made) -> _Made:
    """Keep what was made for a key; a full dictionary begins anew."""
    if len(ready) >= MOST_READY:
        ready.clear()
    ready[key] = made
    return made
