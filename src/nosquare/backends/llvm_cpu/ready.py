"""Whether kernels can be generated and run here, found out once a process, when first asked.

A processor or a system that says no is one of many: then the next backend serves, and says why.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache

from ...errors import UnsupportedError
from .compiled import compiled
from .ir import Module
from .target import Target, host

_INSTALL = 'pip install "nosquare[cpu]"'


@cache
def why_not() -> str | None:
    """Why no code can be generated here, in words; None where it can."""
    try:
        import llvmlite.binding

        target = host()
    except ImportError:
        return f"llvmlite, which generates its kernels, is not installed: {_INSTALL}"
    except UnsupportedError as e:
        return f"{e.sentence} It calls itself {e.values['processor']}."
    except Exception as e:  # the library does not load, or knows this processor not at all
        return f"llvmlite, which generates its kernels, does not work here: {_first_line(e)}"
    if not _may_run_new_code():
        return "this system lets no process run code that it has generated (W^X)"
    try:
        right = _probe(target)
    except Exception as e:  # LLVM is older or newer than what ir.py writes for
        version = llvmlite.__version__
        return f"llvmlite {version} does not compile its kernels: {_first_line(e)}; {_INSTALL}"
    return None if right else "its code computes wrong numbers on this processor"


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"


def _may_run_new_code() -> bool:
    """Whether memory that was written to may become executable, as LLVM makes it. Where it may not
    (SELinux without execmem, MemoryDenyWriteExecute of systemd), LLVM does not notice, and the
    first call of a kernel would end the process."""
    if os.name != "posix":
        return True
    try:
        protect = ctypes.CDLL(None).mprotect
    except (OSError, AttributeError):
        return True
    size = mmap.PAGESIZE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as page:
        start = ctypes.c_char.from_buffer(page)
        address = ctypes.c_void_p(ctypes.addressof(start))
        answer = protect(address, ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC)
        del start, address  # the page cannot be given back while something points into it
    return bool(answer == 0)


def _probe(target: Target) -> bool:
    """Whether the smallest kernel there is can be compiled, and is right: p = 2 p + 1 in all lanes
    but the last, with a constant in all lanes, a mask and a fused product."""

    def write() -> Module:
        module = Module()
        f = module.function("probe", p="f32*")
        (p,) = f.parameters
        where = f.tail(target.lanes - 1, target.lanes)
        f.store(p, f.fma(f.load(p, target.lanes, where), 2.0, 1.0), where)
        return module

    numbers = (ctypes.c_float * target.lanes)(*range(target.lanes))
    address = compiled("probe", target, write).address("probe")
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(numbers))
    *found, last = numbers
    return found == [2.0 * n + 1.0 for n in range(target.lanes - 1)] and last == target.lanes - 1
