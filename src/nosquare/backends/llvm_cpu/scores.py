"""The score of a pair and its dropout, as code for one row against a vector of keys.

Every kernel here takes them from this file; score.py and dropout.py say what they are, visible.py
has the mask. Scores are in base 2 (times log2 e, which costs nothing: it goes into the factor of q)
where nothing is added to them, else in natural units: a bias of finfo.min must stay finite, and
times log2 e it would not.
"""

from __future__ import annotations

import math

from ...dropout import LEVELS
from . import elementary
from .call import Args, Form
from .ir import Function, Value
from .visible import Place

LOG2E = math.log2(math.e)
LN2 = math.log(2)
# the two mixers of dropout.py, as signed words
_W64 = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX64 = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))
_A32, _B32 = 0x7FEB352D, 0x846CA68B - (1 << 32)


def is_natural(form: Form) -> bool:
    """Whether scores are in natural units rather than base 2."""
    return form.alibi or form.sinks or form.bias is not None


def is_plain(form: Form) -> bool:
    """Whether a score is the product of q, multiplied by factor(), and k."""
    return not (form.softcap or form.alibi or form.bias)


def factor(args: Args, form: Form) -> Value:
    """What q is multiplied by before its product with k."""
    if form.softcap:
        return args.scale / args.softcap
    return args.scale if is_natural(form) else args.scale * LOG2E


def score(f: Function, args: Args, form: Form, at: Place, z: Value) -> tuple[Value, Value]:
    """Scores of the keys of `at` from z = (factor q) . k; and what softcap has made of z, t = tanh
    z: ds/dz is 1 - t t of what it is without softcap. Lanes outside at.where hold anything."""
    s = bent = z
    if form.softcap:
        bent = elementary.tanh(f, z)
        s = bent * (args.softcap if is_natural(form) else args.softcap * LOG2E)
    if form.alibi:
        key = at.j0.to("i32") + f.iota(at.lanes)
        far = (at.i + args.N - args.M).to("i32") - key
        s = s - f.load(args.row("alibi", at.b, at.h)) * f.max(far, 0 - far).to("f32")
    if form.bias is not None:
        s = s + _bias(f, args, form, at)
    return s, bent


def _bias(f: Function, args: Args, form: Form, at: Place) -> Value:
    row = args.row("bias", at.b, at.h, at.i)
    if not form.bias_keys:
        x = f.load(row)
    elif form.bias_unit:
        x = f.load(row + at.j0, at.lanes, at.where)
    else:
        j = f.splat(at.j0, at.lanes) + f.iota(at.lanes, "i64")
        x = f.gather(row, j * f.splat(args.bias_n, at.lanes), at.where)
    return x.to("f32")


def row_keys(args: Args, b: Value, h: Value, i: Value) -> tuple[Value, Value]:
    """The two dropout keys of a row, i32: dropout.row_keys."""
    key = _mix64(args.seed + _W64)
    for index, offset in ((b, args.off_b), (h, args.off_h), (i, args.off_i)):
        key = _mix64(key + (index + offset) * _W64)
    return key.to("i32"), (key >> 32).to("i32")


def kept(f: Function, args: Args, keys: tuple[Value, Value], j: Value) -> Value:
    """Which pairs dropout keeps, an i1 for each lane: of keys (i32) or of j (i64) one is a vector,
    or both are."""
    j = j + args.off_j
    one = f.value(1, "i64", j.lanes)
    pair = f.emit(f"ashr {j.type} {j.name}, {one.name}", "i64", j.lanes).to("i32")
    x = pair ^ keys[0]
    x = (x ^ (x >> 16)) * _A32
    x = (x ^ (x >> 15) ^ keys[1]) * _B32
    x = x ^ (x >> 16)
    # an even key has the low half of its pair's word, an odd one the high half
    bits = (x >> ((j & 1).to("i32") << 4)) & (LEVELS - 1)
    # signed 16-bit bits < threshold - 32768, moved up by 32768
    return (bits ^ (LEVELS // 2)) >= args.threshold.to("i32")


def _mix64(x: Value) -> Value:
    for shift, by in _MIX64:
        x = x ^ (x >> shift)
        x = x if by == 1 else x * by
    return x
