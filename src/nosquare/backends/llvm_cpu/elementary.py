"""exp2, tanh and log of float32, scalars and vectors, without a branch."""

from __future__ import annotations

from .ir import Function, Value

# 2^r = 1 + c1 r + ... + c5 r^5 for |r| <= 1/2: the smallest largest relative error, 9.2e-8
_EXP2 = (0.69314697760, 0.24022242085, 0.05550733743, 0.00967151264, 0.00132647272)
# the same for 0 <= r < 1: 8.3e-8
_EXP2_UP = (0.69315131180, 0.24016445025, 0.05579991269, 0.00901703094, 0.00186712977)

# tanh x = x P(x^2) / Q(x^2) for |x| <= 9, beyond which float32 has 1 (as in Eigen's ptanh)
_TANH_P = (
    *(4.89352455891786e-03, 6.37261928875436e-04, 1.48572235717979e-05, 5.12229709037114e-08),
    *(-8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16),
)
_TANH_Q = (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)
# and of degree 4: 2.9e-6
_EXP2_BRIEF = (0.69304484499, 0.24128020384, 0.05224247631, 0.01342668298)
_FLOOR = 1  # how to round, in the words of the instruction
_TANH_ONE = 7.90531110763549805


def exp2(f: Function, x: Value, brief: bool = False) -> Value:
    """2^x for x <= 127: relative error below 2^-22, exact at integers, 0 below -126, NaN of NaN.
    brief: for what is rounded to 16 bits, an error of up to 2^-18 where that is sooner."""
    if x.lanes == 16:
        terms = _EXP2_BRIEF if brief else _EXP2_UP
        return f.select(x < -126.0, 0.0, _exp2_16(f, x, terms))
    whole = f.intrinsic("roundeven", x)
    p = _polynomial(f, x - whole, (1.0, *_EXP2))
    # the cut of a NaN is no number to LLVM until it is frozen; any number will do
    cut = whole.to("i32")
    cut = f.emit(f"freeze {cut.type} {cut.name}", "i32", x.lanes)
    scaled = (p.bits("i32") + (cut << 23)).bits("f32")
    return f.select(x < -126.0, 0.0, scaled)


def exp2_gradual(f: Function, x: Value) -> Value:
    """As exp2, but what is below 2^-126 is rounded to the numbers there are, not set to 0."""
    if x.lanes == 16:
        return _exp2_16(f, x, _EXP2_UP)
    x = f.max(-200.0, x)  # NaN stays
    whole = f.intrinsic("roundeven", x)
    p = _polynomial(f, x - whole, (1.0, *_EXP2))
    cut = whole.to("i32")
    cut = f.emit(f"freeze {cut.type} {cut.name}", "i32", x.lanes)
    # two factors of at least 2^-100 each: no exponent leaves its bits
    half = (cut + 256 >> 1) - 128
    first = (p.bits("i32") + (half << 23)).bits("f32")
    return first * ((cut - half + 127) << 23).bits("f32")


def _exp2_16(f: Function, x: Value, terms: tuple[float, ...]) -> Value:
    """By the instructions of AVX-512 that split x and put its whole part into the exponent."""
    rest = _avx512(f, "reduce", f"i32 {_FLOOR}", x)
    p = _polynomial(f, rest, (1.0, *terms))
    return _avx512(f, "scalef", f"{x.type} {x.name}", p)  # which takes the floor of x itself


def _avx512(f: Function, what: str, more: str, x: Value) -> Value:
    name, of = f"llvm.x86.avx512.mask.{what}.ps.512", x.type
    second, _, _ = more.rpartition(" ")
    immediate = second + " immarg" if second == "i32" else second
    f.module.declarations[name] = f"declare {of} @{name}({of}, {immediate}, {of}, i16, i32 immarg)"
    words = f"{of} {x.name}, {more}, {of} zeroinitializer, i16 -1, i32 4"
    return f.emit(f"call {of} @{name}({words})", "f32", 16)


def tanh(f: Function, x: Value) -> Value:
    """tanh x within a few units in the last place, NaN of NaN."""
    t = f.max(-_TANH_ONE, f.min(_TANH_ONE, x))
    square = t * t
    return t * _polynomial(f, square, _TANH_P) / _polynomial(f, square, _TANH_Q)


def log(f: Function, x: Value) -> Value:
    """The natural logarithm of a scalar, by libm: for once a row."""
    return f.call("logf", "f32", 0, x)


def _polynomial(f: Function, x: Value, coefficients: tuple[float, ...]) -> Value:
    """c0 + c1 x + c2 x^2 + ... by Horner's rule."""
    p = f.value(coefficients[-1], "f32", x.lanes)
    for c in reversed(coefficients[:-1]):
        p = f.fma(p, x, c)
    return p
