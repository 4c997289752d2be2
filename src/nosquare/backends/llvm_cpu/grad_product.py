"""The matrix products of backward: a few rows by a few vectors of columns, held in registers.

A number of a tile is one word of 32 bits: a float32, or two bfloat16 that lie one after the other
along the axis that is summed over ("pairs"). So one loop serves both: broadcast a word of a, load a
row of words of b, and add their products to the float32 sums of c.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ir import Function, Module, Value
from .target import Target

ROWS = 6  # of c in registers at a time
COLUMNS = {"avx512": 4, "avx2": 2, "neon": 4}  # vectors of c beside each other in registers


@dataclass(frozen=True)
class Product:
    """c (rows, n) = a (rows, depth) b (depth, n), or c += a b, as functions of one module.

    a_row       words from one row of a to the next; a_step from one term of the sum to the next
    b_step      words from one row of b to the next; c_row of c
    adds        whether c is added to
    pairs       whether a word of a and b is two bfloat16
    """

    a_row: int
    a_step: int
    b_step: int
    c_row: int
    adds: bool
    pairs: bool

    def kernel(self, module: Module, target: Target, rows: int, columns: int) -> str:
        """The function (a, b, c, depth), a, b and c pointers to words, of `rows` rows by `columns`
        vectors; written once."""
        steps = f"{self.a_row}_{self.a_step}_{self.b_step}_{self.c_row}_{self.adds:d}"
        name, w = f"product_{rows}x{columns}_{steps}", target.lanes
        if any(f.name == name for f in module.functions):
            return name
        f = module.function(name, a="f32*", b="f32*", c="f32*", depth="i64")
        a, b, c, depth = f.parameters
        places = [[c + (r * self.c_row + j * w) for j in range(columns)] for r in range(rows)]
        sums = [[f.variable(f.splat(0.0, w)) for _ in row] for row in places]
        with f.loop(0, depth) as k:
            at = b + k * self.b_step
            right = [f.load(at + j * w, w) for j in range(columns)]
            for r in range(rows):
                left = f.splat(f.load(a + (k * self.a_step + r * self.a_row)), w)
                for j in range(columns):
                    sums[r][j].value = self._add(f, left, right[j], sums[r][j].value)
        for row, of in zip(places, sums, strict=True):
            for p, total in zip(row, of, strict=True):
                # c joins at the end: sums of sums round less than one long sum
                f.store(p, f.load(p, w) + total.value if self.adds else total.value)
        return name

    def _add(self, f: Function, a: Value, b: Value, c: Value) -> Value:
        if not self.pairs:
            return f.fma(a, b, c)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * c.lanes}"
        return f.call(name, "f32", c.lanes, c, a.bits("i32"), b.bits("i32"))

    def columns(self, f: Function, target: Target, n: int, rows: int, where: Where) -> None:
        """All n columns (a multiple of the lanes) of `rows` rows."""
        w, most = target.lanes, COLUMNS[target.isa]
        a, b, c, depth = where
        for x in range(0, n, most * w):
            kernel = self.kernel(f.module, target, rows, min(most, (n - x) // w))
            words = ", ".join(f"{v.type} {v.name}" for v in (a, b + x, c + x, depth))
            # copies of it would take most of the time to compile
            f.emit(f"call void @{kernel}({words}) noinline")


Where = tuple[Value, Value, Value, Value]  # a, b, c, depth
