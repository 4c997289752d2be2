"""The driver's launches, with a library that only looks at what it is given."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nosquare import driver

PTX = """
.visible .entry attend(
	.param .align 64 .b8 attend_param_0[128],
	.param .u32 attend_param_1,
	.param .u64 attend_param_2,
	.param .u64 .ptr .global .align 1 attend_param_3,
	.param .f32 attend_param_4
)
.reqntid 384
"""
TYPES = ["map", "u32", "u64", "u64", "f32"]
KERNEL = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
)  # fmt: skip


def test_the_parameters_of_a_kernel_are_read_off_its_text() -> None:
    assert driver.parameters(PTX, "attend") == TYPES


class Library:
    """Stands for libcuda."""

    def __init__(self, codes: list[int]) -> None:
        self.codes = codes
        self.seen: list[Any] = []
        self.cuLaunchKernel = KERNEL(self._launch)

    def _launch(self, function: Any, *rest: Any) -> int:
        sizes, (stream, parameters, extra) = rest[:7], rest[7:]
        raw = {"u32": 4, "f32": 4, "u64": 8}
        read: list[Any] = [parameters[0]]
        for n, kind in enumerate(TYPES[1:], 1):
            read.append(ctypes.string_at(parameters[n], raw[kind]))
        self.seen.append((function, sizes, stream, read, extra))
        return self.codes.pop(0)

    def cuGetErrorString(self, code: int, text: Any) -> int:
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"no such luck"
        return 0


def launch(monkeypatch: pytest.MonkeyPatch, codes: list[int]) -> tuple[Library, driver.Launch]:
    library = Library(codes)
    monkeypatch.setattr(driver, "library", lambda: library)
    values = [4096, 7, -2, 0, 0.5]
    return library, driver.Launch(1234, TYPES, 384, 200_000, values, [0, 3])


def test_a_launch_brings_what_varies_and_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    library, run = launch(monkeypatch, [0, 0])
    run(132, 0, 99, [8192], [0x1234567890])
    run(1, 0, 0, [64], [5])
    (function, sizes, stream, read, extra), (_, again, _, second, _) = library.seen
    assert (function, stream, extra) == (1234, 99, None)
    assert sizes == (132, 1, 1, 384, 1, 1, 200_000)
    assert read[0] == 8192
    assert read[1:] == [struct.pack("<I", 7), struct.pack("<q", -2),
                        struct.pack("<Q", 0x1234567890), struct.pack("<f", 0.5)]  # fmt: skip
    assert again[0] == 1
    assert second[0] == 64
    assert second[3] == struct.pack("<Q", 5)


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    library, run = launch(monkeypatch, [201, 0])
    set_to: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", set_to.append, raising=False)
    run(1, 3, 0, [64], [5])
    assert set_to == [3]
    assert len(library.seen) == 2


def test_what_the_driver_says_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = launch(monkeypatch, [700])
    with pytest.raises(driver.DriverError, match=r"could not launch a kernel: no such luck \(700"):
        run(1, 0, 0, [64], [5])


def test_a_descriptor_is_aligned_and_lies_the_other_way_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    def encode(to: Any, dtype: int, rank: int, address: Any, *rest: Any) -> int:
        sizes, strides, box, steps, *more = rest
        seen.update(to=to.value, dtype=dtype, rank=rank, address=address.value, more=more)
        seen.update(sizes=[*sizes], strides=[*strides], box=[*box], steps=[*steps])
        return 0

    library = SimpleNamespace(cuTensorMapEncodeTiled=encode)
    monkeypatch.setattr(driver, "library", lambda: library)
    found = driver.TensorMap(
        4096, torch.bfloat16, (2, 300, 8, 128), (307200, 1024, 128, 1), (1, 64, 1, 64), 3
    )
    assert found.address == seen["to"]
    assert found.address % 64 == 0
    assert (seen["dtype"], seen["rank"], seen["address"]) == (9, 4, 4096)
    assert seen["sizes"] == [128, 8, 300, 2]
    assert seen["strides"][:3] == [256, 2048, 614400]  # bytes
    assert seen["box"] == [64, 1, 64, 1]
    assert seen["steps"] == [1, 1, 1, 1]
    assert seen["more"] == [0, 3, 2, 0]


@pytest.mark.parametrize(("shared", "asked"), [(1000, 0), (200_000, 1)])
def test_a_kernel_is_given_the_memory_it_needs(
    monkeypatch: pytest.MonkeyPatch, shared: int, asked: int
) -> None:
    attributes: list[Any] = []

    def get_function(to: Any, module: Any, name: bytes) -> int:
        ctypes.cast(to, ctypes.POINTER(ctypes.c_void_p))[0] = 77
        assert name == b"attend"
        return 0

    library = SimpleNamespace(
        cuModuleLoadData=lambda to, cubin: 0,
        cuModuleGetFunction=get_function,
        cuFuncSetAttribute=lambda *given: attributes.append(given[1:]) or 0,
    )
    monkeypatch.setattr(driver, "library", lambda: library)
    assert driver.load(b"ELF", "attend", shared) == 77
    assert attributes == [(8, shared)] * asked


def test_a_kernel_of_gluon_takes_what_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="gluon_sm90 is written in Triton's Gluon")
    import test_gluon_host as host
    from nosquare.backends import gluon_sm90
    from nosquare.backends.gluon_sm90 import attend
    from nosquare.backends.gluon_sm90.compiled import compile_for
    from nosquare.bench.cases import Case
    from nosquare.bench.tune import stand_ins

    line = "forward bfloat16 B2 Hq8 Hk2 M300 N600 D128 window(before=100,after=0) sinks"
    p, found = host.problem(line), host.Recorded()
    key = attend.offline(p, gluon_sm90.plan(p, "forward"), stand_ins(Case.parse(line)))
    kernel = compile_for(key)
    types = driver.parameters(kernel.asm["ptx"], kernel.metadata.name)
    values: list[Any] = []
    monkeypatch.setattr(found, "launch", lambda given, varying: values.extend(given))
    monkeypatch.setattr(attend, "loaded", lambda key, device: found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    q = torch.empty(2, 8, 300, 128, dtype=torch.bfloat16)
    k = torch.empty(2, 2, 600, 128, dtype=torch.bfloat16)
    attend._prepare(
        p, gluon_sm90.plan(p, "forward"), (q, k, k, q), torch.zeros(2, 8, 1, 1), None, False
    )
    assert len(types) == len(values) + 2
    for kind, value in zip(types, values, strict=False):
        assert isinstance(value, float) == (kind == "f32")
        assert kind in ("map", "u64") or value < 2**31
    assert [n for n, kind in enumerate(types) if kind == "map"] == [0, 9, 18, 27]
