"""Kernels compiled once for a form, and handed to CUDA's driver (driver.py).

Triton's launcher would make the descriptors of TMA anew in each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from ... import driver

TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}  # said, as releases differ in what they assume
POINTERS = {
    **{torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"},
    **{torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"},
    torch.uint8: "*u8",
}
TILES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}
WORDS = {dtype: word.removeprefix("*") for dtype, word in POINTERS.items()}
MOST_KEPT = 1024  # descriptors of an argument


class Key(NamedTuple):
    """All that a compiled kernel depends on.

    boxes      of the descriptors that it takes first, with what they hold
    signature  Triton's types of the arguments after them
    constants  by name, in their order
    multiples  arguments, by place, that are multiples of 16
    """

    kernel: Any
    boxes: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    signature: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]
    multiples: tuple[tuple[int, ...], ...] = ()


def layout(box: Sequence[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(box), TILES[dtype])


def compile_for(key: Key) -> Any:
    """Triton's compiled kernel, for a Hopper card that need not be here."""
    boxes = [
        f"tensordesc<{WORDS[dtype]}[{', '.join(map(str, box))}],{layout(box, dtype)!r}>"
        for dtype, box in key.boxes
    ]
    constants = dict(key.constants)
    types = [*boxes, *key.signature, *["constexpr"] * len(constants)]
    names = key.kernel.arg_names
    assert names[len(names) - len(constants) :] == list(constants), "constants come last"
    attributes = {at: [["tt.divisibility", 16]] for at in key.multiples}
    named = dict(zip(names, types, strict=True))
    source = GluonASTSource(key.kernel, named, constants, attributes)
    return triton.compile(source, target=TARGET, options=OPTIONS)


class Described(NamedTuple):
    """How an array lies: sizes and strides in elements, and its tiles."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Loaded:
    """A compiled kernel on a device."""

    def __init__(self, key: Key, device: torch.device) -> None:
        kernel = compile_for(key)
        name, shared = kernel.metadata.name, kernel.metadata.shared
        self.types = driver.parameters(kernel.asm["ptx"], name)
        self.threads, self.shared_bytes = 32 * kernel.metadata.num_warps, shared
        self._tiles = kernel.metadata.tensordesc_meta  # as TMA takes them: some are loaded in parts
        with torch.cuda.device(device):
            self.function = driver.load(kernel.asm["cubin"], name, shared)

    def descriptor(self, number: int, t: Tensor, d: Described) -> driver.TensorMap:
        """Descriptor `number` of the kernel, of an array."""
        tiles = self._tiles[number]
        box, swizzle = tiles["block_size"], tiles["swizzle"]
        return driver.TensorMap(t.data_ptr(), t.dtype, d.shape, d.strides, box, swizzle)

    def launch(self, values: Sequence[Any], varying: Sequence[int]) -> driver.Launch:
        """With its arguments laid out, which may be tuples: see driver.Launch."""
        # Triton's kernels take two more, for memory that these do not want
        every = [*values, *[0] * (len(self.types) - len(values))]
        size = self.threads, self.shared_bytes
        return driver.Launch(self.function, self.types, *size, every, varying)


class Maps:
    """Descriptors of the arrays that a kernel takes, made once for an address: it recurs where an
    allocator gives memory."""

    def __init__(self, kernel: Loaded, described: Sequence[Described]) -> None:
        self._kernel, self._described = kernel, described
        self._made: list[dict[int, driver.TensorMap]] = [{} for _ in described]

    def of(self, arrays: Sequence[Tensor]) -> list[driver.TensorMap]:
        """Of one array each. They have to live until the launch."""
        maps = []
        for number, t in enumerate(arrays):
            made, address = self._made[number], t.data_ptr()
            found = made.get(address)
            if found is None:
                if len(made) >= MOST_KEPT:
                    made.clear()
                found = self._kernel.descriptor(number, t, self._described[number])
                made[address] = found
            maps.append(found)
        return maps


class Address:
    """Stands for an argument that each call brings."""


AT = Address()


def laid_out(kernel: Loaded, values: Any) -> driver.Launch:
    """A launch of a kernel with its arguments, which may be tuples of them; AT: each call brings
    it."""
    flat = [*_flat(values)]
    varying = [n for n, value in enumerate(flat) if value is AT]
    return kernel.launch([0 if value is AT else value for value in flat], varying)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


@lru_cache(maxsize=1024)
def loaded(key: Key, device: torch.device) -> Loaded:
    """The kernel, compiled and loaded when it is first asked for."""
    return Loaded(key, device)
