"""Scores inside kernels.

A score is kept in one of two units:

    plain     the raw product q.k, of which the exponential takes c2 = |scale| log2(e) times; a
              negative scale has turned the sign of q, which is exact
    else      natural, after scale, softcap, alibi and bias: a bias of finfo.min must stay finite,
              and times log2(e) it would not; c2 = log2(e)

numbers = (unit, c2, scale, softcap, sign, kept): unit is |scale| or 1, so that unit times a score
is natural; sign is what q is multiplied by; kept = 1 - rate of dropout.
"""

import triton
import triton.language as tl


@triton.jit
def capped(raw, numbers):
    """softcap * tanh(scale * raw / softcap)."""
    scale, softcap = numbers[2], numbers[3]
    # 1 - 2 / (1 + e^2x): right to a rounding of 1, which is one of softcap in the score
    grown = tl.exp2(raw * (scale / softcap * 2.8853900817779268))  # 2 log2(e)
    return softcap * (1.0 - 2.0 / (1.0 + grown))


@triton.jit
def cap_slope(score, numbers):
    """The derivative of softcap at the pair whose capped score is given."""
    ratio = score / numbers[3]
    return 1.0 - ratio * ratio


@triton.jit
def biased(score, b, h, i, j, m, n, bias, alibi, F: tl.constexpr, BOUNDED: tl.constexpr):
    """The score plus alibi and bias. Rows from m on repeat the last; BOUNDED: keys from n on may
    come, and nothing is read there."""
    if F.alibi:
        slope = tl.load(alibi[0] + b * alibi[1] + h * alibi[2]).to(tl.float32)
        score -= slope * tl.abs(i + (n - m) - j).to(tl.float32)
    if F.bias is not None:
        at = bias[0] + b * bias[1] + h * bias[2]
        if F.bias == "m" or F.bias == "mn":
            at += tl.minimum(i, m - 1) * bias[3]
        if F.bias == "n" or F.bias == "mn":
            # numbers side by side are read many at a time, unless each has a bound of its own
            at += j if F.bias_unit else j * bias[4]
            more = tl.load(at, mask=j < n, other=0.0) if BOUNDED else tl.load(at)
        else:
            more = tl.load(at)
        score += more.to(tl.float32)
    return score


@triton.jit
def scored(raw, b, h, i, j, m, n, numbers, bias, alibi, F: tl.constexpr, BOUNDED: tl.constexpr):
    """From products q.k to scores before the mask, in the units of the module's docstring."""
    if F.plain:
        return raw
    else:
        score = capped(raw, numbers) if F.softcap else raw * numbers[2]
        return biased(score, b, h, i, j, m, n, bias, alibi, F, BOUNDED)
