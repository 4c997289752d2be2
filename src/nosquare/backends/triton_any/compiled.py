"""Kernels compiled once for a form and a card, and launched without asking Triton again.

A kernel takes tuples of pointers and numbers, one constant F (form.py) and constant tile sizes. Its
signature is read off the arguments; what may be assumed of them (multiples of 16) is said by the
caller, so that no length makes another kernel. In Triton's interpreter the same kernels run on
arrays of a CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from .cards import Card

POINTERS = {
    **{torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"},
    **{torch.float64: "*fp64", torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8"},
    **{torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"},
}
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


def multiples(arguments: Arguments, aligned: bool | None) -> tuple[tuple[int, int, int], ...]:
    """What may be assumed: (parameter, place in it, a power of 2 up to 16 that divides it).

    Of pointers by what they are (aligned=None), or that those of the first five parameters, q, k, v
    and the outputs, start at multiples of 16 bytes (aligned=True); of strides by what they are.
    """
    found = []
    for n, values in enumerate(arguments):
        for at, value in enumerate(values):
            power = 1
            if isinstance(value, Tensor):
                fits = value.data_ptr() % 16 == 0 if aligned is None else aligned and n < 5
                power = 16 if fits else 1
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


class Loaded(NamedTuple):
    """A kernel for one key and one device.

    compiled   Triton's; the kernel itself in the interpreter
    pointers   parameters whose tuples hold arrays
    constants  the arguments after the tuples
    """

    compiled: Any
    pointers: tuple[int, ...]
    constants: tuple[Any, ...]


def interpreted(kernel: Any) -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 when they were imported."""
    return isinstance(kernel, InterpretedFunction)


@lru_cache(maxsize=4096)
def launcher(kernel: Any, key: Key, card: Card, device: torch.device) -> Loaded:
    """What `launch` takes: the kernel for this key, compiled when it is first asked for. One for
    each device, since a loaded kernel belongs to it."""
    return Loaded(
        kernel if interpreted(kernel) else compile_for(kernel, key, card),
        tuple(n for n, types in enumerate(key.signature) if any(t[0] == "*" for t in types)),
        (key.form, *(value for _, value in key.settings.tiles)),
    )


def launch(ready: Loaded, device: torch.device, grid: int, arguments: Arguments) -> None:
    """Run a kernel over a grid of one axis, on the current stream of the device."""
    compiled, pointers, constants = ready
    if interpreted(compiled):
        plain = [tuple(_plain(value) for value in values) for values in arguments]
        compiled[(grid,)](*plain, *constants)
        return
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            launch(ready, device, grid, arguments)
        return
    given: list[Any] = [*arguments, *constants]
    for n in pointers:  # as addresses: Triton would ask the driver where each tensor lies
        given[n] = tuple([v.data_ptr() if isinstance(v, Tensor) else v for v in given[n]])
    stream = torch.cuda.current_stream(device).cuda_stream
    run = compiled.run  # loads the kernel when it is first asked for
    run(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *given)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, Small | Count) else value
