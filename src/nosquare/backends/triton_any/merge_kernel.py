"""Parts of the keys merged: one program for each row.

    top = max of lse and the sink    l = sum exp(lse_part - top) + exp(sink - top)
    o = sum exp(lse_part - top) o_part / (l kept)    lse = top + ln l

Parts that saw no key have lse -inf and weigh nothing. They are added in one order: repeatable.
"""

import triton
import triton.language as tl

from .attend_kernel import LOG2E


@triton.jit
def merge(
    o_parts, lse_parts, o, lse, sizes, numbers, sinks,
    F: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """o_parts: (pointer, stride of row, part) float32, rows contiguous; lse_parts alike; o, lse:
    (pointer, stride of b, h, row)."""
    Hq, m = sizes[1], sizes[4]
    row = tl.program_id(0)
    i = row % m
    h = (row // m) % Hq
    b = row // m // Hq
    e = tl.arange(0, F.E_PAD)
    at = lse_parts[0] + row * lse_parts[1]
    logs = tl.load(at + tl.arange(0, SPLITS) * lse_parts[2])
    top = tl.max(logs, 0)
    sink = float("-inf")
    if F.sinks:
        sink = tl.load(sinks[0] + b * sinks[1] + h * sinks[2]).to(tl.float32)
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    l = tl.sum(tl.exp2((logs - safe) * LOG2E), 0)
    E_PAD: tl.constexpr = F.E_PAD
    u = tl.zeros([E_PAD], tl.float32)
    for part in tl.range(0, SPLITS):
        weight = tl.exp2((tl.load(at + part * lse_parts[2]) - safe) * LOG2E)
        there = o_parts[0] + row * o_parts[1] + part * o_parts[2] + e
        u += weight * tl.load(there, mask=e < F.E, other=0.0)
    if F.sinks:
        l += tl.exp2((sink - safe) * LOG2E)
    share = l * numbers[5] if F.dropout else l
    out = u / tl.where(l > 0, share, 1.0)
    o_at = o[0] + b * o[1] + h * o[2] + i * o[3] + e
    tl.store(o_at, out.to(o[0].dtype.element_ty), mask=e < F.E)
    tl.store(lse[0] + b * lse[1] + h * lse[2] + i * lse[3], top + tl.log(l))
