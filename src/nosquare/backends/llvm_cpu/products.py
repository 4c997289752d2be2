"""Products of small matrices that stay in registers: what prefill and backward spend their time in.

c (6, columns)  =  [c +]  a (6, count)  b (count, columns)

The 6 x columns sums (or fewer rows of them) live in vector registers while `count` runs: 6 x 4
vectors of 32, 6 x 2 of 16. In pairs, a number of a and b is two bfloat16 side by side along the
axis summed over, and one instruction (AVX512-BF16) adds both their products to a float32 sum.
"""

from __future__ import annotations

from typing import NamedTuple

from .ir import Function, Operand, Value, Variable
from .target import Target

ROWS = 6


class Matrix(NamedTuple):
    """Words of 32 bits in rows: word (r, c) is at + r * stride + c * step; step is 1 but for a."""

    at: Value
    stride: Operand
    step: int = 1

    def row(self, r: Operand) -> Value:
        """Where row r starts."""
        return self.at + r * self.at.f.value(self.stride, "i64")


class Sums(NamedTuple):
    """The sums of one product: columns of them, in vectors of `lanes`, and rows; `fresh` where c is
    only written; whether words are pairs."""

    columns: int
    lanes: int
    pairs: bool
    fresh: bool = False
    rows: int = ROWS


def column_blocks(width: int, target: Target) -> dict[int, int]:
    """First column -> columns, of blocks whose sums have registers."""
    step = target.lanes * (4 if target.vectors >= 32 else 2)
    return {x: min(step, width - x) for x in range(0, width, step)}


def product(f: Function, a: Matrix, b: Matrix, c: Matrix, count: Operand, sums: Sums) -> None:
    """Emit c = a b or c += a b. Whole vectors of c are written; of b, its columns are read."""
    w = sums.lanes
    vectors = -(-sums.columns // w)
    tail = f.tail(sums.columns % w, w) if sums.columns % w else None
    rows = [a.row(r) for r in range(sums.rows)]
    places = [[c.row(r) + v * w for v in range(vectors)] for r in range(sums.rows)]
    zero = f.splat(0.0, w)
    totals: list[list[Variable]] = [[f.variable(zero) for _ in line] for line in places]
    with f.loop(0, count) as k:
        line = b.row(k)
        right = [
            f.load(line + v * w, w, tail if v == vectors - 1 else None) for v in range(vectors)
        ]
        for row, into in zip(rows, totals, strict=True):
            left = f.splat(f.load(row + k * a.step), w)
            for total, x in zip(into, right, strict=True):
                total.value = _added(f, left, x, total.value, sums.pairs)
    for of_row, found in zip(places, totals, strict=True):
        for at, total in zip(of_row, found, strict=True):
            # c joins at the end: sums of sums round less than one long sum
            f.store(at, total.value if sums.fresh else f.load(at, w) + total.value)


def _added(f: Function, a: Value, b: Value, c: Value, pairs: bool) -> Value:
    if not pairs:
        return f.fma(a, b, c)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * c.lanes}"
    return f.call(name, "f32", c.lanes, c, a.bits("i32"), b.bits("i32"))
