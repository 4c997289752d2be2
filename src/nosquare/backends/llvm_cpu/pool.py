"""One parallel region: workers take items from a counter until none is left.

A kernel for this pool is   void kernel(block, i64 item, i64 worker)   with 0 <= worker < threads: a
number of its own for scratch memory. Items are taken in order, but which worker takes which depends
on the moment, so a result may depend on the item alone.

The workers are torch's own OpenMP threads where torch has GNU OpenMP loaded, so that no core has
two pools; otherwise, and in the child of a fork (GNU OpenMP does not survive one), Python threads
that live as long as the call.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from .compiled import compiled
from .ir import Module
from .target import host

_HOME = os.getpid()  # where OpenMP may be used
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # lets other Python threads run meanwhile


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("kernel", "block", "items", "next", "workers")]


def run(kernel: int, block: int, items: int, threads: int) -> None:
    """kernel(block, item, worker) for every item, on at most `threads` threads; addresses are
    those of a compiled kernel and of its block."""
    region = _Region(kernel, block, items)
    address = ctypes.addressof(region)
    threads = min(threads, items)
    worker = _worker()
    if threads <= 1:
        worker.alone(address)
        return
    openmp = _openmp() if os.getpid() == _HOME else None
    if openmp is not None:
        openmp(worker.address, address, threads, 0)
        return
    others = [threading.Thread(target=worker.alone, args=(address,)) for _ in range(1, threads)]
    for thread in others:
        thread.start()
    worker.alone(address)
    for thread in others:
        thread.join()


@cache
def _openmp() -> Any:
    """GOMP_parallel of the library that torch has loaded; None where it has another or none."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line}
        entry = ctypes.CDLL(min(paths)).GOMP_parallel
    except (OSError, ValueError, AttributeError):
        return None
    if len(paths) > 1:  # which of them is torch's is not known
        return None
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return entry


class _Worker(NamedTuple):
    """Takes items of a region until none is left: for C, and for this thread."""

    address: int
    alone: Callable[[int], None]


@cache
def _worker() -> _Worker:
    address = compiled("pool", host(), _write).address("worker")
    return _Worker(address, _WORKER(address))


def _write() -> Module:
    module = Module()
    f = module.function("worker", region="i64*")
    region = f.parameters[0]
    kernel, block = f.constant(region, "ptr"), f.constant(region + 1, "ptr")
    items, following = f.load(region + 2), region + 3
    me = f.take(region + 4)
    with f.loop(0, items):  # no worker takes more than all; a late one leaves at its first
        item = f.take(following)
        with f.when(item >= items):
            f.leave()
        f.emit(f"call void {kernel.name}(ptr {block.name}, i64 {item.name}, i64 {me.name})")
    return module
