"""Whether some lse is so large that its own rounding is felt in the weights: backward then divides
the weights of each row by their sum."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from torch import Tensor

from .compiled import compiled
from .ir import Module
from .target import Target, host

LARGE_LSE = 1024.0  # float32 keeps an lse of this size to 6e-5, and p is as exact as its lse


def large(lse: Tensor) -> bool:
    """Whether one of them is beyond LARGE_LSE, and not -inf: such rows see nothing."""
    rows = lse.contiguous()
    return _counter()(rows.data_ptr(), rows.numel()) > 0


@cache
def _counter() -> Callable[[int, int], int]:
    code = compiled("large lse", host(), lambda: _write(host()))
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    return kind(code.address("count"))


def _write(target: Target) -> Module:
    module, w = Module(), target.lanes
    f = module.function("count", returns="i64", lse="f32*", n="i64")
    lse, n = f.parameters
    found = f.variable(0, "i64")
    with f.loop(0, n, w) as j:
        x = f.load(lse + j, w, f.tail(n - j, w))  # 0 beyond the end
        beyond = (x > LARGE_LSE) | ((x < -LARGE_LSE) & (x > float("-inf")))
        found.value = found.value + f.count(beyond).to("i64")
    f.ret(found.value)
    return module
