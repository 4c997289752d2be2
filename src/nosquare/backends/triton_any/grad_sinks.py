"""The gradient of the sinks: minus the sum, over the rows of a head, of the sink's weight times
delta.

    dsink = - sum_i exp(sink - lse_i) share_i delta_i
"""

import triton
import triton.language as tl

from .grad_tile import LOG2E


@triton.jit
def sinks_kernel(
    lse, facts, dsinks, sizes, numbers, bias, sinks, alibi, drop, mask, cu,
    F: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A program for each head of each entry. lse, dsinks: (pointer, stride of b, h, ...); facts:
    see grad_facts.py. Rows without a key and a sink weigh nothing."""
    heads, m = sizes[1], sizes[4]
    h = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    sink = tl.load(sinks[0] + b * sinks[1] + h * sinks[2]).to(tl.float32)
    first = b * facts[4] + h * facts[5]
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, m, ROWS):
        i = start + tl.arange(0, ROWS)
        there = i < m
        log = tl.load(lse[0] + b * lse[1] + h * lse[2] + i, mask=there, other=float("-inf"))
        delta = tl.load(facts[1] + first + i, mask=there, other=0.0)
        nothing = log == float("-inf")
        weight = tl.exp2((sink - tl.where(nothing, 0.0, log)) * LOG2E)
        if EXACT:
            weight *= tl.load(facts[2] + first + i, mask=there, other=0.0)
        total -= tl.where(nothing, 0.0, weight * delta)
    to = dsinks[0] + b * dsinks[1] + h * dsinks[2]
    tl.store(to, tl.sum(total, 0).to(dsinks[0].dtype.element_ty))
