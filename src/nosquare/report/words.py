"""How suites, cases and numbers are said, the same on the page, in the terminal and in README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..bench import cuda
from ..bench.aims import TITLES
from .evidence import Bench

NONE = "-"


def suite_title(bench: Bench) -> str:
    """What the cases of a record's suite have in common, in words."""
    if bench.suite == "-":
        return "cases of one's own"
    names = {name: suite.title for name, suite in (cuda.SUITES | cuda.HELD).items()}
    return {**TITLES, **names, "traffic": "bytes that one call moves"}.get(
        bench.suite, f"suite {bench.suite}"
    )


def shared(cases: Sequence[Bench]) -> tuple[str, list[str]]:
    """The words that all cases share, and what is left of each; a single case is left whole."""
    words = [str(b.case).split() for b in cases]
    if len(words) < 2:
        return "", [" ".join(w) for w in words]
    common = [w for w in words[0] if all(w in other for other in words)]
    rest = [" ".join(w for w in case if w not in common) for case in words]
    return " ".join(common), [label or "as it is" for label in rest]


def time(time_us: float | None) -> str:
    """A time with its unit, three digits or so."""
    if time_us is None:
        return NONE
    for unit, scale in (("us", 1.0), ("ms", 1e3), ("s", 1e6)):
        number = time_us / scale
        if number < 999.5 or unit == "s":
            return f"{number:.3g} {unit}"
    raise AssertionError("a second is the last unit")


def rate(bench: Bench, time_us: float | None) -> tuple[float, str]:
    """(number a second, unit): GF/s of the flop convention; for decoding, GB/s of k and v."""
    if bench.case.phase == "decode":
        amount, unit = bench.case.cache_bytes, "GB/s"
    else:
        amount, unit = bench.flops, "GF/s"
    return (amount / time_us / 1000 if time_us else 0.0), unit


def rate_words(number: float, unit: str) -> str:
    """A rate of so many GF/s or GB/s, in three digits."""
    if number >= 9995:
        number, unit = number / 1000, unit.replace("G", "T", 1)
    return f"{number:,.0f} {unit}" if number >= 99.5 else f"{number:.3g} {unit}"


def listed(words: Iterable[str]) -> str:
    """As in "forward, backward and decode"; "" for none."""
    *most, last = [*words] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def count(number: int, what: str) -> str:
    """As in "1 case" and "3 cases"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
