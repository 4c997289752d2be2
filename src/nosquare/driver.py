"""Kernels of an NVIDIA card, loaded and launched by CUDA's driver itself.

Triton's own launcher is C that it compiles where it runs, and it takes its arguments apart anew in
each call. Here the arguments lie ready as the driver wants them, and a call writes those that have
changed. Needs libcuda, which a CUDA build of torch brings its users to have; nothing of Triton.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any

import torch

MAP_BYTES, MAP_ALIGNED = 128, 64  # a descriptor of TMA
_NO_CONTEXT = 201
_MAX_DYNAMIC_SHARED = 8  # an attribute of functions, in the driver's numbers
_WORDS = {torch.bfloat16: 9, torch.float16: 6, torch.float32: 7}  # of descriptors, its numbers
_PROMOTION = 2  # of what is read into the second cache: 128 bytes at a time


class DriverError(RuntimeError):
    """What the driver said."""


@cache
def library() -> Any:
    """libcuda. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        words = (text.value or b"an unknown error").decode()
        raise DriverError(f"CUDA could not {what}: {words} ({code})")


def load(cubin: bytes, name: str, shared_bytes: int) -> int:
    """A kernel of a compiled module, loaded in the current context; its handle. Raises DriverError.

    It is never unloaded: whoever asks keeps what it gets.
    """
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(library().cuModuleLoadData(ctypes.byref(module), cubin), f"load the kernel {name}")
    found = library().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    _check(found, f"find the kernel {name}")
    if shared_bytes > 48 * 1024:
        asked = library().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes)
        _check(asked, f"give the kernel {name} {shared_bytes} bytes of shared memory")
    assert function.value is not None
    return function.value


def parameters(ptx: str, name: str) -> list[str]:
    """The types of a kernel's parameters, in PTX's words; "map" for a descriptor of TMA."""
    body = ptx[re.search(rf"\.entry\s+{re.escape(name)}\s*\(", ptx).end() :]  # type: ignore[union-attr]
    found = []
    for line in body[: body.index(")")].split(","):
        words = line.replace("\t", " ").split()
        word = next(w for w in words[1:] if re.fullmatch(r"\.[usfb]\d+", w))
        found.append("map" if f"[{MAP_BYTES}]" in line else word[1:])
    return found


class TensorMap:
    """A descriptor of TMA: where an array is, how it lies, and the tiles that are read of it.

    shape, strides, box  in elements, the last axis the one whose elements are neighbours
    swizzle              how a tile lies in shared memory, in the driver's numbers
    """

    def __init__(
        self, address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int],
        box: Sequence[int], swizzle: int,
    ) -> None:  # fmt: skip
        rank, size = len(shape), dtype.itemsize
        self._room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNED)
        start = ctypes.addressof(self._room)
        self.address = start + -start % MAP_ALIGNED
        code = library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address), _WORDS[dtype], rank, ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*shape[::-1]),
            (ctypes.c_uint64 * rank)(*(s * size for s in strides[-2::-1])),
            (ctypes.c_uint32 * rank)(*box[::-1]), (ctypes.c_uint32 * rank)(*[1] * rank),
            0, swizzle, _PROMOTION, 0,
        )  # fmt: skip
        _check(code, f"describe an array of shape {tuple(shape)} and strides {tuple(strides)}")


class Launch:
    """A kernel with its arguments laid out.

    function      its handle
    types         of its parameters, as parameters() gives them
    threads       of a block; shared_bytes of its own
    values        the arguments: integers, floats, addresses of descriptors
    varying       which of them a call brings
    """

    def __init__(
        self, function: int, types: Sequence[str], threads: int, shared_bytes: int,
        values: Sequence[Any], varying: Sequence[int],
    ) -> None:  # fmt: skip
        assert len(types) == len(values), "each parameter has an argument"
        self._numbers = (ctypes.c_uint64 * len(types))()
        start = ctypes.addressof(self._numbers)
        self._pointers = (ctypes.c_void_p * len(types))(*(start + 8 * n for n in range(len(types))))
        for n, (kind, value) in enumerate(zip(types, values, strict=True)):
            if kind == "map":
                self._pointers[n] = value
            else:
                self._numbers[n] = _bits(kind, value)
        self._maps = [n for n in varying if types[n] == "map"]
        self._plain = [n for n in varying if types[n] != "map"]
        self._block = (threads, 1, 1, shared_bytes)
        self._function = ctypes.c_void_p(function)
        self._lock = Lock()
        self._launch = library().cuLaunchKernel

    def __call__(
        self, grid: int, device: int, stream: int, maps: Sequence[int], numbers: Sequence[int]
    ) -> None:
        """Launch a grid of one axis on a stream of a device, which is the current one.

        maps     addresses of the descriptors that vary, in their order
        numbers  the other arguments that vary

        Raises DriverError.
        """
        with self._lock:
            for n, value in zip(self._maps, maps, strict=True):
                self._pointers[n] = value
            for n, value in zip(self._plain, numbers, strict=True):
                self._numbers[n] = value
            where = grid, 1, 1, *self._block, ctypes.c_void_p(stream), self._pointers, None
            code = self._launch(self._function, *where)
            if code == _NO_CONTEXT:  # a thread in which torch has not yet worked on a card
                torch._C._cuda_setDevice(device)
                code = self._launch(self._function, *where)
        _check(code, "launch a kernel")


def _bits(kind: str, value: Any) -> int:
    if kind == "f32":
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(value) & (2**64 - 1)
