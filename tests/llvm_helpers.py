"""What the tests of llvm_cpu's forward share: cases, and attention by its prefill kernel alone."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import nosquare as ns
from helpers import Case, check
from kinds import options
from nosquare.errors import UnsupportedError
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem

pytest.importorskip("llvmlite", reason="llvm_cpu generates code with llvmlite")
from nosquare.backends.llvm_cpu import prefill
from nosquare.backends.llvm_cpu.target import Target, host

ISAS = ["neon"] if platform.machine() in ("arm64", "aarch64") else ["avx512", "avx2"]


def target_of(isa: str) -> Target:
    """This machine with one of its vector extensions, or "tiles": AVX-512 with AMX emulated. Skips
    where it has not got that."""
    try:
        if isa != "tiles":
            return host(isa)
        found = host("avx512")
    except UnsupportedError:
        pytest.skip(f"this processor has no {'avx512' if isa == 'tiles' else isa}")
    if not found.pairs:
        pytest.skip("this processor cannot multiply pairs of bfloat16")
    return replace(found, tiles="emulated")


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, mask: ns.Mask | None = None, **options: Any
) -> tuple[Problem, Inputs]:
    """The problem and the inputs of a call, as the public functions make them."""
    mask, get = mask or ns.Full(), options.get
    drop = get("dropout")
    seed = drop.seed_tensor() if drop else None
    x = Inputs(q, k, v, get("bias"), get("sinks"), get("alibi"), seed, None, None, mask.tensors)
    p, offsets = (drop.p, drop.offsets) if drop else (0.0, (0, 0, 0, 0))
    return Problem.of(x, Spec(str(mask), get("scale"), get("softcap"), p, offsets)), x


def attention_on(isa: str) -> Callable[..., ns.State]:
    """Attention by the prefill kernel alone."""

    def attend(**options: Any) -> ns.State:
        p, x = problem_of(**options)
        o, lse, _ = prefill.forward(p, prefill.plan(p, target_of(isa)), x)
        return ns.State(o, lse)

    return attend


def agrees(c: Case, isa: str) -> None:
    check(c, attention_on(isa), grads=False)


# every tail: of rows (6), of tiles (48), of panels (64) and blocks (256), of vectors, of groups
SIZES = [
    {"m": 1, "n": 1, "d": 1},
    {"m": 48, "n": 64, "d": 64},
    {"m": 49, "n": 65, "d": 16, "e": 33},
    {"m": 13, "n": 700, "d": 7, "e": 130},
    {"m": 131, "n": 257, "d": 72, "hq": 6, "hk": 2},
    {"m": 5, "n": 40, "d": 640, "e": 520, "hq": 2, "hk": 1},
]


OPTIONS = options(61, 203)


# the beginning of a program: arrays that end where the memory that may be read does
AT_THE_EDGE = """import ctypes, mmap, sys, torch
import nosquare as ns
from nosquare.backends.llvm_cpu import target
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem

kept, libc = [], ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def at_the_edge(t):  # a copy whose last byte is the last one before a page that may not be read
    size = t.numel() * t.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, pages + mmap.PAGESIZE)
    kept.append(room)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    assert libc.mprotect(start + pages, mmap.PAGESIZE, 0) == 0
    flat = torch.frombuffer(room, dtype=t.dtype, count=t.numel(), offset=pages - size)
    return flat.view(t.shape).copy_(t)
"""
