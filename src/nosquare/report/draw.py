"""Charts as inline SVG: text stays text, colours are the page's, and marks differ in shape too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 24, 36
FOREST = 140  # width of the small picture of an interval

# what draws a mark of radius r about the origin, one shape a series
_SHAPES: tuple[Callable[[float], str], ...] = (
    lambda r: f"M{-r},0a{r},{r} 0 1,0 {2 * r},0a{r},{r} 0 1,0 {-2 * r},0z",
    lambda r: f"M{-r},{-r}h{2 * r}v{2 * r}h{-2 * r}z",
    lambda r: f"M0,{-1.25 * r}L{1.2 * r},{0.9 * r}H{-1.2 * r}z",
    lambda r: f"M0,{-1.35 * r}L{1.35 * r},0L0,{1.35 * r}L{-1.35 * r},0z",
    lambda r: f"M0,{1.25 * r}L{1.2 * r},{-0.9 * r}H{-1.2 * r}z",
    lambda r: f"M{-r},{-r}L{r},{r}M{-r},{r}L{r},{-r}",
)


@dataclass(frozen=True)
class Look:
    """How a series is drawn. number: of its colour and its mark; None: a grey guide.

    stroke  "line", "dash", "dots", or "" for none        marked  a mark at each point
    """

    name: str
    number: int | None = None
    stroke: str = "line"
    marked: bool = True

    @staticmethod
    def of(name: str, number: int) -> Look:
        """The look of a contestant; colours and marks come round after six, then with dashes."""
        return Look(name, number, "line" if number < len(_SHAPES) else "dash")

    @property
    def colour(self) -> str:
        """The class that carries the colour."""
        return "" if self.number is None else f" k{self.number % len(_SHAPES)}"

    def mark(self, x: float, y: float, r: float = 4.0) -> str:
        """The SVG of one mark; the first series' are filled."""
        if self.number is None:
            return ""
        full = " full" if self.number == 0 else ""
        shape = _SHAPES[self.number % len(_SHAPES)](r)
        where = f"translate({x:.1f} {y:.1f})"
        return f'<path class="mark{full}{self.colour}" d="{shape}" transform="{where}"/>'


@dataclass(frozen=True)
class Series:
    """Points of one look, in data units; drawn in the order of x."""

    look: Look
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """One axis. words: of a tick; ticks: where they stand, or () for a choice of its own.

    base  of a logarithmic axis's ticks: powers of 2; or 1, 2 and 5 times powers of 10
    """

    label: str
    words: Callable[[float], str]
    log: bool = True
    base: int = 2
    ticks: Sequence[float] = ()
    low: float | None = None
    high: float | None = None


def chart(
    name: str, title: str, about: str, axes: tuple[Axis, Axis], data: Sequence[Series]
) -> str:
    """An SVG of `data`. name: an id that is unique in the page; about: what a listener is told."""
    across = _Scale(axes[0], [p[0] for s in data for p in s.points], LEFT, WIDTH - RIGHT)
    up = _Scale(axes[1], [p[1] for s in data for p in s.points], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-t {name}-d">',
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(about)}</desc>',
        f'<text x="0" y="11">{escape(axes[1].label)}</text>' if axes[1].label else "",
    ]
    for value in up.ticks():
        y = up.at(value)
        parts.append(f'<path class="grid" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">'
                     f"{escape(axes[1].words(value))}</text>")  # fmt: skip
    base = HEIGHT - BOTTOM
    parts.append(f'<path class="axis" d="M{LEFT},{base}H{WIDTH - RIGHT}"/>')
    for value in across.ticks():
        x = across.at(value)
        parts.append(f'<path class="axis" d="M{x:.1f},{base}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">'
                     f"{escape(axes[0].words(value))}</text>")  # fmt: skip
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">'
                 f"{escape(axes[0].label)}</text>")  # fmt: skip
    # guides first, our own last, so that ours is never hidden
    for series in sorted(
        data, key=lambda s: -1 if s.look.number is None else 1 / (1 + s.look.number)
    ):
        parts.append(_drawn(series, across, up))
    return "".join([*parts, "</svg>"])


def _drawn(series: Series, across: _Scale, up: _Scale) -> str:
    look = series.look
    points = [(across.at(x), up.at(y)) for x, y in sorted(series.points)]
    path = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    stroke = "" if look.stroke == "line" else f" {look.stroke}"
    line = f'<path class="line{stroke}{look.colour}" d="M{path}"/>' if look.stroke else ""
    return line + ("".join(look.mark(x, y) for x, y in points) if look.marked else "")


def key(looks: Sequence[Look]) -> str:
    """The legend of some charts, as a list."""
    items = []
    for look in looks:
        stroke = "" if look.stroke == "line" else f" {look.stroke}"
        line = f'<path class="line{stroke}{look.colour}" d="M0,7H34"/>' if look.stroke else ""
        mark = look.mark(17, 7) if look.marked else ""
        items.append(f'<li><svg viewBox="0 0 34 14" aria-hidden="true">{line}{mark}</svg>'
                     f"{escape(look.name)}</li>")  # fmt: skip
    return f'<ul class="key">{"".join(items)}</ul>'


def forest(low: float, middle: float, high: float, span: tuple[float, float]) -> str:
    """An interval of a ratio on a logarithmic axis that spans `span`, with a rule at 1."""

    def at(value: float) -> float:
        share = math.log(value / span[0]) / math.log(span[1] / span[0])
        return 6 + min(max(share, 0), 1) * (FOREST - 12)

    look = Look("", 0 if low > 1 else 1 if high < 1 else None)
    mark = look.mark(at(middle), 10) or (
        f'<path class="mark" d="M0,-4v8" transform="translate({at(middle):.1f} 10)"/>'
    )
    return (
        f'<svg viewBox="0 0 {FOREST} 20" aria-hidden="true">'
        f'<path class="axis" d="M{at(1):.1f},0v20"/>'
        f'<path class="line{look.colour}" d="M{at(low):.1f},10H{at(high):.1f}"/>{mark}</svg>'
    )


class _Scale:
    """From data to places on one axis."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        low = min([*values, *axis.ticks]) if axis.low is None else axis.low
        high = max([*values, *axis.ticks]) if axis.high is None else axis.high
        if axis.log:
            low, high = (low / 1.15, high * 1.15) if low < high else (low / 2, high * 2)
        else:
            high = high * 1.05 if low < high else low + 1
        self.axis, self.low, self.high, self.start, self.end = axis, low, high, start, end

    def at(self, value: float) -> float:
        """Where a value lies."""
        low, high = self.low, self.high
        if self.axis.log:
            share = math.log(value / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """The axis's own ticks, or about five round ones."""
        if self.axis.ticks:
            return list(self.axis.ticks)
        if not self.axis.log:
            step = _round_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step)
            return [step * n for n in range(first, math.floor(self.high / step) + 1)]
        octaves = math.log2(self.high / self.low)
        if self.axis.base == 10:
            steps = (1, 2, 5) if octaves < 10 else (1,)
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
            return [m * 10.0**n for n in powers for m in steps
                    if self.low <= m * 10.0**n <= self.high]  # fmt: skip
        step = max(round(octaves / 5), 1)
        first = math.ceil(math.log2(self.low))
        return [2.0**n for n in range(first, math.floor(math.log2(self.high)) + 1, step)]


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)
