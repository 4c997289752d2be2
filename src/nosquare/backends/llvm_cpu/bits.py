"""Lanes as bits of a word and back, and float32 as bfloat16 in one instruction."""

from __future__ import annotations

from .ir import Function, Value


def word_of(f: Function, keep: Value) -> Value:
    """One bit of an i64 for each lane (i1), the first lane lowest."""
    low = f.emit(f"bitcast {keep.type} {keep.name} to i{keep.lanes}", f"i{keep.lanes}")
    return f.emit(f"zext i{keep.lanes} {low.name} to i64", "i64")


def lanes_of(f: Function, word: Value, lanes: int) -> Value:
    """The low bits of an i64, an i1 for each lane."""
    low = f.emit(f"trunc i64 {word.name} to i{lanes}", f"i{lanes}")
    return f.emit(f"bitcast i{lanes} {low.name} to <{lanes} x i1>", "i1", lanes)


def to_bf16(f: Function, x: Value) -> Value:
    """float32 to the bits (i16) of the nearest bfloat16, on a processor with AVX512-BF16."""
    name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * x.lanes}"
    to = f"<{x.lanes} x bfloat>"
    f.module.declarations[name] = f"declare {to} @{name}({x.type})"
    half = f.emit(f"call {to} @{name}({x.type} {x.name})", "bf16", x.lanes)
    return f.emit(f"bitcast {to} {half.name} to <{x.lanes} x i16>", "i16", x.lanes)
