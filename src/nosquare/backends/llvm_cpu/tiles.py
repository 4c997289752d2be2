"""AMX: eight registers that each hold a tile, 16 rows of 16 words, and multiply.

A word of c is a float32. A word of a and b is two bfloat16 that follow each other along the axis
that is summed over: a (16, 32) lies as in memory, b (32, 16) in pairs of rows.

    tiles = Tiles(f)               in a kernel that has called configure() on this thread
    tiles.zero(0)
    with f.loop(0, depth, WORDS) as k:
        tiles.load(4, a + k, a_stride)
        tiles.load(5, b + k * b_stride, b_stride)
        tiles.product(0, 4, 5)     tile 0 += tile 4 tile 5
    tiles.store(0, c, c_stride)

Emulated, tiles are arrays on the stack of the function that uses them: for tests, on processors
without AMX. No tile may live from one function into another.
"""

from __future__ import annotations

from collections.abc import Iterator

from .ir import Function, Operand, Value
from .target import Target

ROWS = WORDS = 16
COUNT = 8
_BF16 = -65536  # the bits of the upper of two


class Tiles:
    """Emits instructions on tiles, by their numbers."""

    def __init__(self, f: Function, target: Target) -> None:
        self.f = f
        self._emulated: list[Value | None] | None = None
        if target.tiles == "emulated":
            self._emulated = [None] * COUNT

    def configure(self) -> None:
        """Before the first use in a kernel: every tile is 16 rows of 64 bytes."""
        f = self.f
        if self._emulated is not None:
            return
        words = f.array("i64", 8)  # palette 1; eight 16-bit widths; eight 8-bit heights
        for n in range(8):
            bits = {0: 1, 2: 0x40004000400040, 3: 0x40004000400040, 6: 0x1010101010101010}
            f.store(words + n, f.value(bits.get(n, 0), "i64"))
        self._call("ldtilecfg", f"ptr {words.name}")

    def release(self) -> None:
        """After the last use in a kernel: the thread's state is small again."""
        if self._emulated is None:
            self._call("tilerelease", "")

    def zero(self, tile: int) -> None:
        """All words 0."""
        if self._emulated is None:
            self._call("tilezero", f"i8 {tile}")
            return
        for row in range(ROWS):
            self.f.store(self._row(tile, row), self.f.splat(0.0, WORDS))

    def load(self, tile: int, p: Value, stride: Operand) -> None:
        """16 rows of 16 words, `stride` words apart."""
        if self._emulated is None:
            step = self.f.value(stride, "i64") * 4
            self._call("tileloadd64", f"i8 {tile}, ptr {p.name}, i64 {step.name}")
            return
        for at, row in self._rows(tile, p, stride):
            self.f.store(row, self.f.load(at, WORDS))

    def store(self, tile: int, p: Value, stride: Operand) -> None:
        """The reverse of load."""
        if self._emulated is None:
            step = self.f.value(stride, "i64") * 4
            self._call("tilestored64", f"i8 {tile}, ptr {p.name}, i64 {step.name}")
            return
        for at, row in self._rows(tile, p, stride):
            self.f.store(at, self.f.load(row, WORDS))

    def product(self, c: int, a: int, b: int) -> None:
        """c += a b, in float32."""
        if self._emulated is None:
            self._call("tdpbf16ps", f"i8 {c}, i8 {a}, i8 {b}")
            return
        f = self.f
        with f.loop(0, ROWS) as row:
            total = f.variable(f.load(self._row(c, row), WORDS))
            with f.loop(0, WORDS) as k:
                left = f.splat(f.load(self._row(a, row) + k).bits("i32"), WORDS)
                right = f.load(self._row(b, k), WORDS).bits("i32")
                for x, y in ((left << 16, right << 16), (left & _BF16, right & _BF16)):
                    total.value = f.fma(x.bits("f32"), y.bits("f32"), total.value)
            f.store(self._row(c, row), total.value)

    def _rows(self, tile: int, p: Value, stride: Operand) -> Iterator[tuple[Value, Value]]:
        """Where each row lies in memory, and in the emulated tile."""
        for row in range(ROWS):
            at = p.pointing_at("f32") + self.f.value(stride, "i64") * row
            yield at, self._row(tile, row)

    def _row(self, tile: int, row: Operand) -> Value:
        assert self._emulated is not None
        at = self._emulated[tile]
        if at is None:
            at = self._emulated[tile] = self.f.array("f32", ROWS * WORDS)
        return at + self.f.value(row, "i64") * WORDS

    def _call(self, name: str, words: str) -> None:
        types = ", ".join(word.split()[0] for word in words.split(", ") if word)
        full = f"llvm.x86.{name}"
        immediate = types.replace("i8", "i8 immarg")
        self.f.module.declarations[full] = f"declare void @{full}({immediate})"
        self.f.emit(f"call void @{full}({words})")
