"""Kernels compiled once for a form, and launched without making descriptors of TMA anew.

A descriptor says where an array is and how it lies. Triton makes one for each array in each call;
here they are kept by address, which recurs where memory is taken from an allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    **{torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"},
    **{torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"},
    torch.uint8: "*u8",
}
TILES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MOST_KEPT = 1024  # descriptors of one argument


class Key(NamedTuple):
    """All that a compiled kernel depends on.

    boxes      of the descriptors that it takes first
    signature  Triton's types of the arguments after them
    constants  by name, in their order
    """

    kernel: Any
    dtype: torch.dtype
    boxes: tuple[tuple[int, ...], ...]
    signature: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]


def layout(box: Sequence[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(box), TILES[dtype])


def compile_for(key: Key) -> Any:
    """Triton's compiled kernel, for a Hopper card that need not be here."""
    boxes = [
        f"tensordesc<{WORDS[key.dtype]}[{', '.join(map(str, box))}],{layout(box, key.dtype)!r}>"
        for box in key.boxes
    ]
    constants = dict(key.constants)
    types = [*boxes, *key.signature, *["constexpr"] * len(constants)]
    names = key.kernel.arg_names
    assert names[len(names) - len(constants) :] == list(constants), "constants come last"
    source = GluonASTSource(key.kernel, dict(zip(names, types, strict=True)), constants, {})
    return triton.compile(source, target=TARGET, options={"num_warps": 4})


@lru_cache(maxsize=1024)
def launcher(key: Key, device: torch.device) -> Launcher:
    """The kernel, loaded on a device."""
    return Launcher(compile_for(key), key, device)


class Described(NamedTuple):
    """How an array lies: sizes and strides in elements, and its tiles."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Launcher:
    """A compiled kernel on a device."""

    def __init__(self, kernel: Any, key: Key, device: torch.device) -> None:
        self.kernel, self.device = kernel, device
        with torch.cuda.device(device):
            run = kernel.run  # loads it
        self.function, self.packed = kernel.function, kernel.packed_metadata
        self.constants = tuple(value for _, value in key.constants)
        self.raw = _raw(run)
        self.run = run
        self.metadata = kernel.metadata.tensordesc_meta

    def descriptor(self, number: int, t: Tensor, d: Described) -> tuple[Any, ...]:
        """What stands for descriptor `number` among the arguments, of an array."""
        made = TensorDescriptor(t, [*d.shape], [*d.strides], [*d.box], layout(d.box, t.dtype))
        if self.raw is None:
            return (made,)
        from triton.backends.nvidia.driver import make_tensordesc_arg

        return tuple(make_tensordesc_arg(made, self.metadata[number]))

    def __call__(self, grid: int, descriptors: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Launch on the current stream of the device."""
        index = self.device.index
        if torch._C._cuda_getDevice() == index:
            self._launch(grid, index, descriptors, arguments)
        else:
            with torch.cuda.device(self.device):
                self._launch(grid, index, descriptors, arguments)

    def _launch(
        self, grid: int, index: int, descriptors: Sequence[Any], arguments: Sequence[Any]
    ) -> None:
        stream = torch._C._cuda_getCurrentRawStream(index)
        rest = (self.packed, None, None, None, *descriptors, *arguments, *self.constants)
        if self.raw is None:
            self.run(grid, 1, 1, stream, self.function, *rest)
        else:
            run = self.run
            modes = run.launch_cooperative_grid, run.launch_pdl
            self.raw(grid, 1, 1, stream, self.function, *modes, None, None, *rest)


def _raw(run: Any) -> Callable[..., None] | None:
    """Triton's launcher in C, which takes descriptors that have been made; None where it is not
    found as in Triton 3.6: then Triton makes them in each call."""
    launch = run.launch
    if not triton.__version__.startswith("3.6."):
        return None
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
    found: Callable[..., None] = cells["launcher"].cell_contents
    return found
