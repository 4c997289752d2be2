"""Is a ratio outside the noise? The sign test's interval, which assumes no distribution.

Contestants ran interleaved: round r gives one time of each, close together, so that drift of the
machine meets both. The ratio of a round is theirs over mine; its median over n rounds lies between
the k-th smallest and the k-th largest ratio with confidence 1 - 2 P(Binomial(n, 1/2) < k)
(the sign test, inverted). k is the largest that leaves 95%. Below six rounds there is none: even
smallest to largest holds only 1 - 2 / 2^n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """Median over the rounds of their time over mine: above 1, mine is faster.

    low, high   of the interval; None where there are too few rounds for one
    """

    middle: float
    low: float | None
    high: float | None
    rounds: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{digits(self.middle)}x ({self.rounds} rounds)"
        return f"{digits(self.middle)}x ({digits(self.low)} to {digits(self.high)})"


def digits(number: float) -> str:
    """A ratio in three digits or so: 0.98, 1.57, 12.3, 140."""
    return (
        f"{number:.2f}"
        if number < 9.995
        else f"{number:.1f}"
        if number < 99.95
        else f"{number:,.0f}"
    )


def order_rank(n: int, confidence: float = CONFIDENCE) -> int:
    """The k of the interval from the k-th smallest to the k-th largest of n; 0: there is none."""
    k, tail = 0, 0.0
    while k < n:
        tail += math.comb(n, k) / 2**n
        if 1 - 2 * tail < confidence:
            break
        k += 1
    return k


def least_rounds(confidence: float = CONFIDENCE) -> int:
    """Rounds below which there is no interval: six for 95%, since 1 - 2 / 2^6 = 0.969."""
    return math.ceil(math.log2(2 / (1 - confidence)))


def paired(
    theirs: Sequence[float], mine: Sequence[float], confidence: float = CONFIDENCE
) -> Ratio | None:
    """The ratio of two contestants of one record; None where their rounds do not pair up."""
    if len(theirs) != len(mine) or not mine or min(*theirs, *mine) <= 0:
        return None
    ratios = sorted(t / m for t, m in zip(theirs, mine, strict=True))
    k = order_rank(len(ratios), confidence)
    low, high = (ratios[k - 1], ratios[-k]) if k else (None, None)
    return Ratio(median(ratios), low, high, len(ratios))
