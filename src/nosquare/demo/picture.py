"""The demo's two pictures of memory against context: a PNG and bars in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20

# name of the contestant -> (label, colour, marker); one look in both pictures
LOOKS = {
    "eager": ("eager: the whole square", "#c1440e", "o"),
    "sdpa-mask": ("torch sdpa, boolean mask", "#d99a2b", "s"),
    "sdpa": ("torch sdpa, is_causal", "#5b6f8f", "^"),
    "nosquare": ("nosquare", "#0b7a75", "D"),
}

Curves = Mapping[str, Mapping[int, int]]  # contestant -> context in tokens -> bytes


def draw(path: Path, curves: Curves, whole: Mapping[str, int], context: int, notes: str) -> None:
    """Write the PNG: one call's extra memory against context, and the whole model's beside it.

    curves  bytes of one attention call (9 query heads, 3 key heads, D = 64, float32)
    whole   contestant -> bytes of the whole model at `context` tokens
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "font.size": 11, "axes.edgecolor": "#888888", "axes.labelcolor": "#333333",
        "text.color": "#222222", "xtick.color": "#333333", "ytick.color": "#333333",
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 5.2), width_ratios=(2.1, 1), facecolor="white", layout="constrained"
        )
        _draw_curves(left, curves)
        _draw_whole(right, whole, context)
        figure.text(0.008, -0.035, notes, fontsize=8.5, color="#777777")
        figure.savefig(path, dpi=160, bbox_inches="tight")
        plt.close(figure)


def _draw_curves(axes: Any, curves: Curves) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    contexts = sorted({n for points in curves.values() for n in points})
    for name, points in curves.items():
        label, colour, marker = LOOKS[name]
        x = sorted(points)
        y = [max(points[n], 2**16) / MIB for n in x]
        # nosquare is drawn wide and beneath, so that a line that coincides with it is still seen
        ours = name == "nosquare"
        line, mark, fill = (4.5, 9, colour) if ours else (1.6, 6, "white")
        axes.plot(x, y, color=colour, marker=marker, markersize=mark, markerfacecolor=fill,
                  linewidth=line, label=label, zorder=2 if ours else 3)  # fmt: skip
        last, up = x[-1], _nudge(name, curves, x[-1])
        axes.annotate(_size(points[last]), (last, y[-1]), xytext=(10, up),
                      textcoords="offset points", va="center", color=colour)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _size(y * MIB)))
    axes.set_xlim(contexts[0] * 0.85, contexts[-1] * 1.75)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("extra peak memory")
    axes.set_title("One attention call", loc="left", fontweight="bold", fontsize=12)
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
    axes.legend(frameon=False, loc="upper left")


def _nudge(name: str, curves: Curves, n: int) -> int:
    """Points to move a line's label down or up, away from another line that ends close by."""
    mine = curves[name][n]
    close = [
        o for o in curves if o != name and 0.75 < (curves[o].get(n, 0) + 1) / (mine + 1) < 1.33
    ]
    return 0 if not close else -7 if name == "nosquare" else 7


def _draw_whole(axes: Any, whole: Mapping[str, int], context: int) -> None:
    names = list(whole)
    heights = [whole[n] / MIB for n in names]
    axes.bar(range(len(names)), heights, width=0.62, color=[LOOKS[n][1] for n in names])
    for x, height in enumerate(heights):
        axes.annotate(_size(height * MIB), (x, height), xytext=(0, 4),
                      textcoords="offset points", ha="center", fontsize=10)  # fmt: skip
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("extra peak memory (MiB)")
    axes.set_title(f"SmolLM2-135M, {context:,} tokens", loc="left", fontweight="bold", fontsize=12)
    axes.yaxis.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def bars(console: Any, curves: Curves, contexts: Sequence[int]) -> None:
    """Print one bar a contestant for some contexts; all on one linear scale."""
    from rich.bar import Bar
    from rich.table import Table

    most = max(points[n] for points in curves.values() for n in contexts if n in points)
    table = Table(box=None, padding=(0, 1), title_justify="left", title_style="bold",
                  title="Extra peak memory of one attention call, by context")  # fmt: skip
    for title in ("tokens", "attention", "", "MiB"):
        table.add_column(title, justify="right" if title in ("tokens", "MiB") else "left")
    for n in contexts:
        for name, points in curves.items():
            if n in points:
                bar = Bar(most, 0, max(points[n], most // 300), width=44, color=LOOKS[name][1])
                first = f"{n:,}" if name == next(iter(curves)) else ""
                table.add_row(first, name, bar, f"{points[n] / MIB:,.1f}")
    console.print(table)


def _size(amount: float) -> str:
    """1536 * 2^20 -> '1.5 GiB'."""
    for unit, size in (("GiB", 2**30), ("MiB", MIB), ("KiB", 2**10)):
        if amount >= size:
            value = amount / size
            return f"{value:.1f} {unit}" if value < 9.95 else f"{value:,.0f} {unit}"
    return f"{amount:.0f} B"
