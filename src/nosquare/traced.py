"""Values of a kernel that is being written: a mask's own functions, called with them, give text.

Mask.keep, span, core and numbers are made of operators, min and max alone. Called with Traced
values (and with min and max that accept them) they return the expression of their result, which
mask_text.py puts into a function. So a new kind of mask needs nothing here. Triton's // and %
round towards 0, as C does: a kind that uses them keeps their operands from falling below 0.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import FunctionType
from typing import Any


class Traced:
    """An expression of kernel code; operators give longer ones. Integers fold where they can."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __bool__(self) -> bool:
        raise TypeError(f"a mask's functions may not branch on a value of the kernel: {self.text}")

    def __add__(self, other: Any) -> Traced:
        return self if _is(other, 0) else _binary("+", self, other)

    def __radd__(self, other: Any) -> Traced:
        return self if _is(other, 0) else _binary("+", other, self)

    def __sub__(self, other: Any) -> Traced:
        return self if _is(other, 0) else _binary("-", self, other)

    def __neg__(self) -> Traced:
        return Traced(f"(-{self})")

    def __invert__(self) -> Traced:
        return Traced(f"(~{self})")


def _is(value: Any, number: int) -> bool:
    return type(value) is int and value == number


def _binary(sign: str, a: Any, b: Any) -> Traced:
    return Traced(f"({a} {sign} {b})")


def _operator(sign: str, swapped: bool) -> Callable[[Traced, Any], Traced]:
    if swapped:
        return lambda self, other: _binary(sign, other, self)
    return lambda self, other: _binary(sign, self, other)


for _sign, _name in (
    *(("*", "mul"), ("//", "floordiv"), ("%", "mod"), ("-", "sub")),
    *(("&", "and"), ("|", "or"), ("^", "xor"), ("<<", "lshift"), (">>", "rshift")),
):
    if _name != "sub":
        setattr(Traced, f"__{_name}__", _operator(_sign, False))
    setattr(Traced, f"__r{_name}__", _operator(_sign, True))
for _sign, _name in (
    *(("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge"), ("==", "eq"), ("!=", "ne")),
):
    setattr(Traced, f"__{_name}__", _operator(_sign, False))


def least(*values: Any) -> Any:
    """min() of traced values and integers."""
    return _extreme(builtins.min, "tl.minimum", values)


def most(*values: Any) -> Any:
    """max() of traced values and integers."""
    return _extreme(builtins.max, "tl.maximum", values)


def _extreme(plain: Any, word: str, values: tuple[Any, ...]) -> Any:
    known = [v for v in values if not isinstance(v, Traced)]
    text = [v for v in values if isinstance(v, Traced)]
    if not text:
        return plain(known)
    parts: list[Any] = [*text, *([plain(known)] if known else [])]
    found = parts[0]
    for part in parts[1:]:
        found = Traced(f"{word}({found}, {part})")
    return found


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a min and a max that accept traced values.

    Raises TypeError, when called, where the function branches on a value.
    """
    words = {**function.__globals__, "min": least, "max": most}
    return FunctionType(
        function.__code__,
        words,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
