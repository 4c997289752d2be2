"""How numbers are said in the tables of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence

MIB = 2**20
NONE = "-"


def two(number: float) -> str:
    """With two digits after the point; NONE for NaN."""
    return NONE if math.isnan(number) else f"{number:.2f}"


def percent(share: float) -> str:
    """A share in whole percent; NONE for NaN."""
    return NONE if math.isnan(share) else "<1%" if share < 0.01 else f"{share:.0%}"


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of the ratios that are numbers; NaN when there are none."""
    known = [r for r in ratios if not math.isnan(r)]
    return math.exp(math.fsum(map(math.log, known)) / len(known)) if known else math.nan
