"""Sums over entries and heads of what other passes left of a gradient.

    out[b, h, x] = sum of parts[b', h', x] over the entries b' and heads h' that share b and h

In one order: repeatable.
"""

import triton
import triton.language as tl


@triton.jit
def sums_kernel(
    parts, out, sizes, numbers, bias, sinks, alibi, drop, mask, cu,
    F: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """parts: (pointer to float32, entries, heads, width), contiguous; out alike, with 1 entry or 1
    head where it broadcasts. A program for each WIDTH numbers of a head of out."""
    width = parts[3]
    tiles = tl.cdiv(width, WIDTH)
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    b, h = head // out[2], head % out[2]
    shared = parts[2] // out[2]  # heads, and below entries too, that are summed
    rows = shared * (parts[1] // out[1])
    x = (tile * WIDTH + tl.arange(0, WIDTH))[None, :]
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, rows, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        at = ((b + row // shared) * parts[2] + h + row % shared).to(tl.int64) * width + x
        total += tl.load(parts[0] + at, mask=(row < rows) & (x < width), other=0.0)
    to = out[0] + head.to(tl.int64) * width + x
    tl.store(to, tl.sum(total, 0)[None, :].to(out[0].dtype.element_ty), mask=x < width)
