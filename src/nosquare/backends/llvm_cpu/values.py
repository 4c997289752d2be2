"""Values of a kernel that is being written: what they are and what operators do. See ir.py."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from .ir import Function

Operand = Union["Value", int, float]

# what LLVM calls a type in registers, and in memory where that differs
_LLVM = {"f32": "float", "f16": "half", "bf16": "i16", "bool": "i8", "f64": "double"}
BITS = {"i1": 1, "bool": 8, "i8": 8, "i16": 16, "bf16": 16, "f16": 16, "i32": 32, "f32": 32}
BITS |= {"i64": 64, "f64": 64}
COMPUTES = {"bf16": "f32", "f16": "f32", "bool": "i1"}
_SUFFIX = {"float": "f32", "half": "f16", "double": "f64"}


def element_bytes(kind: str) -> int:
    """Bytes of one element in memory."""
    return max(1, BITS[kind] // 8)


def llvm_type(kind: str, lanes: int = 0) -> str:
    name = "ptr" if kind.endswith("*") else _LLVM.get(kind, kind)
    return f"<{lanes} x {name}>" if lanes else name


def mangled(type_: str) -> str:
    """The suffix of an intrinsic's name for a type: v16f32, i64, p0."""
    if type_.startswith("<"):
        count, _, name = type_[1:-1].partition(" x ")
        return f"v{count}{mangled(name)}"
    return "p0" if type_ == "ptr" else _SUFFIX.get(type_, type_)


class Value:
    """Something in a register: a scalar (lanes = 0), a vector, or a pointer."""

    __hash__ = None  # type: ignore[assignment]  # == emits a comparison

    def __init__(self, f: Function, name: str, kind: str, lanes: int = 0) -> None:
        self.f, self.name, self.kind, self.lanes = f, name, kind, lanes

    @property
    def type(self) -> str:
        """As LLVM spells it."""
        return llvm_type(self.kind, self.lanes)

    @property
    def real(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.kind[0] == "f" and not self.kind.endswith("*")

    def __bool__(self) -> bool:
        raise TypeError("a value is known when the kernel runs: f.when(value), f.select(value)")

    def _binary(self, real: str, integer: str, other: Operand, swap: bool = False) -> Value:
        a, b = self.f.alike(self, other)
        if swap:
            a, b = b, a
        word = real if a.real else integer
        assert word, f"no such operation on {a.type}"
        return self.f.emit(f"{word} {a.type} {a.name}, {b.name}", a.kind, a.lanes)

    def _compare(self, real: str, integer: str, other: Operand) -> Value:
        a, b = self.f.alike(self, other)
        word = f"fcmp {real}" if a.real else f"icmp {integer}"
        return self.f.emit(f"{word} {a.type} {a.name}, {b.name}", "i1", a.lanes)

    def __add__(self, other: Operand) -> Value:
        if self.kind.endswith("*"):
            step = self.f.value(other, "i64")
            to = llvm_type(self.kind[:-1])
            return self.f.emit(
                f"getelementptr {to}, ptr {self.name}, {step.type} {step.name}", self.kind
            )
        return self._binary("fadd", "add", other)

    def __radd__(self, other: Operand) -> Value:
        return self + other

    def __sub__(self, other: Operand) -> Value:
        return self._binary("fsub", "sub", other)

    def __rsub__(self, other: Operand) -> Value:
        return self._binary("fsub", "sub", other, swap=True)

    def __mul__(self, other: Operand) -> Value:
        return self._binary("fmul", "mul", other)

    def __rmul__(self, other: Operand) -> Value:
        return self * other

    def __truediv__(self, other: Operand) -> Value:
        return self._binary("fdiv", "", other)

    def __rtruediv__(self, other: Operand) -> Value:
        return self._binary("fdiv", "", other, swap=True)

    def __floordiv__(self, other: Operand) -> Value:  # of what is not negative
        return self._binary("", "sdiv", other)

    def __mod__(self, other: Operand) -> Value:
        return self._binary("", "srem", other)

    def __and__(self, other: Operand) -> Value:
        return self._binary("", "and", other)

    def __or__(self, other: Operand) -> Value:
        return self._binary("", "or", other)

    def __xor__(self, other: Operand) -> Value:
        return self._binary("", "xor", other)

    def __lshift__(self, other: Operand) -> Value:
        return self._binary("", "shl", other)

    def __rshift__(self, other: Operand) -> Value:
        return self._binary("", "lshr", other)

    def __invert__(self) -> Value:
        return self ^ -1

    def __neg__(self) -> Value:
        if self.real:
            return self.f.emit(f"fneg {self.type} {self.name}", self.kind, self.lanes)
        return 0 - self

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return self._compare("oeq", "eq", other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return self._compare("une", "ne", other)  # type: ignore[arg-type]

    def __lt__(self, other: Operand) -> Value:
        return self._compare("olt", "slt", other)

    def __le__(self, other: Operand) -> Value:
        return self._compare("ole", "sle", other)

    def __gt__(self, other: Operand) -> Value:
        return self._compare("ogt", "sgt", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compare("oge", "sge", other)

    def below(self, other: Operand) -> Value:
        """Integers compared without sign: self < other."""
        return self._compare("", "ult", other)

    def pointing_at(self, kind: str) -> Value:
        """The same address as a pointer to elements of `kind`."""
        return Value(self.f, self.name, f"{kind}*")

    def to(self, kind: str) -> Value:
        """Converted: integers are cut or widened with their sign (i1 becomes 0 and 1), float32 is
        cut to an integer towards zero, integers become the nearest float32."""
        if kind == self.kind:
            return self
        wide = BITS[kind] > BITS[self.kind]
        if self.real and kind[0] == "f":
            word = "fpext" if wide else "fptrunc"
        elif self.real:
            word = "fptosi"
        elif kind[0] == "f":
            word = "uitofp" if self.kind == "i1" else "sitofp"
        else:
            word = ("zext" if self.kind == "i1" else "sext") if wide else "trunc"
        return self._cast(word, kind)

    def unsigned(self, kind: str) -> Value:
        """An integer widened with zeros."""
        return self._cast("zext", kind)

    def bits(self, kind: str) -> Value:
        """The same bits under a type of equal width: "f32" and "i32"."""
        return self._cast("bitcast", kind)

    def _cast(self, word: str, kind: str) -> Value:
        to = llvm_type(kind, self.lanes)
        return self.f.emit(f"{word} {self.type} {self.name} to {to}", kind, self.lanes)


def literal(x: float, kind: str) -> str:
    """A number as LLVM spells it; floating-point numbers by the bits of the nearest double."""
    if kind[0] != "f":
        return str(int(x)).lower()
    single = struct.unpack("f", struct.pack("f", x))[0] if kind == "f32" else x
    return f"0x{struct.pack('>d', single).hex().upper()}"
