"""Precision: float32 is IEEE float32, and 16 bits lose no more than the plain formula does."""

from __future__ import annotations

import torch
from torch import Tensor

from ..registry import check
from ..subject import Inapplicable, gradients
from ..trial import Trial, judged, leaves
from ..truth import Options, cast, dense, gap_of_o, off
from ..verdict import CONVENTION, FAIL, PASS, Finding

RATIO = 2.0  # flash_attn's own tests: the error may be twice that of the formula in the same dtype


@check("float32-is-ieee", "precision",
       "float32 products have 24 bits, not the 11 of tf32, also where the process allows tf32.",
       "pytorch/pytorch (torch.backends.fp32_precision)")  # fmt: skip
def float32_is_ieee(t: Trial) -> Finding:
    if t.dtype != torch.float32:
        raise Inapplicable("this is about float32")
    x = t.qkv(128, 160, 64)
    gap = gap_of_o(t.attend(x), x, Options(), t.dtype)
    if not gap.ok:
        return judged(gap, "M=128 N=160 D=64")
    with torch.backends.flags(fp32_precision="tf32"):  # as a process that allows tf32
        o = t.attend(x)
    allowed = gap_of_o(o, x, Options(), t.dtype)
    if not allowed.ok:
        words = f"follows the process's switch to tf32: then {allowed}"
        return Finding(CONVENTION, words, allowed.error, allowed.bound)
    return judged(gap, "M=128 N=160 D=64")


@check("error-of-the-formula", "precision",
       "The root mean square error is at most twice that of the plain formula in the same dtype.",
       "Dao-AILab/flash-attention#1071")  # fmt: skip
def error_of_the_formula(t: Trial) -> Finding:
    if torch.finfo(t.dtype).bits != 16:
        raise Inapplicable("this is about 16-bit types")
    x = t.qkv(130, 520, 64, heads=(4, 4))
    right, plain = dense(*cast(x, torch.float64)).o, dense(*x).o
    mine, theirs = (
        float((o.double() - right).square().mean().sqrt()) for o in (t.attend(x), plain)
    )
    words = f"{mine / theirs:.2f} times the formula's error of {theirs:.1e}, M=130 N=520"
    good = mine <= RATIO * theirs
    return Finding(PASS if good else FAIL, words, mine, RATIO * theirs)


# Not a power of two, so that a sum which is rounded on its way shows it.
ADDEND = 1.1


@check("long-sums", "precision", "Sums over keys do not stall: with equal scores and v = c, o = c.",
       "Dao-AILab/flash-attention#2250")  # fmt: skip
def long_sums(t: Trial) -> Finding:
    n = 8192  # a bfloat16 sum of ones stalls at 256, a float16 one at 2048
    q, k = t.zeros(1, 2, 3, 16), t.rnd(1, 2, n, 16, seed=2)
    v = t.zeros(1, 2, n, 16) + ADDEND
    return _near("o", t.attend((q, k, v)), float(v[0, 0, 0, 0]), n, f"N={n}", t.dtype)


@check("long-gradient-sums", "precision", "Sums over queries do not stall: with equal weights and "
       "do = c, dv = c M / N.", "docs/log.md (torch on a CPU)")  # fmt: skip
def long_gradient_sums(t: Trial) -> Finding:
    m, n = 16384, 16
    q, k = t.rnd(1, 1, m, 16, seed=2), t.zeros(1, 1, n, 16)
    x = leaves((q, k, t.rnd(1, 1, n, 16, seed=3)))
    o = t.attend(x)
    do = torch.full_like(o, ADDEND)  # every weight is 1/16, exactly
    want = float(do[0, 0, 0, 0]) * m / n
    return _near("dv", gradients(o, x, do)[2], want, m, f"M={m} N={n}", t.dtype)


def _near(name: str, got: Tensor, want: float, n: int, where: str, dtype: torch.dtype) -> Finding:
    """One rounding to the dtype, and a running sum of n terms in float32 (float64 for float64)."""
    u_sum = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    bound = (torch.finfo(dtype).eps + n * u_sum) * want
    error = off(got, torch.full_like(got, want, dtype=torch.float64))
    words = f"{name}: error {error:.1e}, bound {bound:.1e}"
    if error <= bound:
        return Finding(PASS, words, error, bound)
    seen = float(got.flatten()[0])
    return Finding(FAIL, f"{where}: {name} is {seen:.5g}, not {want:.5g}", error, bound)
