"""An account in words, aligned, for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ..traffic import fast_elements

if TYPE_CHECKING:
    from . import Cost, PassCost

COLUMNS = 80
_NAME, _VALUE = 23, 11  # widths of the first two columns


def account(cost: Cost) -> str:
    """The whole account of a problem: what was counted, each pass, and what was assumed."""
    p, d = cost.problem, cost.device
    dtype = str(p.dtype).removeprefix("torch.")
    rates = [amount(d.bandwidth, "B/s")] if d.bandwidth else []
    if dtype in d.peak_flops:
        rates.append(f"{dtype} {amount(d.peak_flops[dtype], 'FLOP/s')}")
    source = f" ({d.source})" if rates else ""
    facts = ", ".join([d.name, f"{d.units} units", *rates]) + source
    square = (1 if p.packed else p.B) * p.Hq * p.M * p.N
    share = f", {cost.pairs.count / square:.1%} of B x Hq x M x N" if square else ""
    sure = "exactly" if cost.pairs.exact else "at most"
    rows = [
        _fact("problem", p.describe().replace(" meta ", " ")),
        _fact("device", facts),
        _fact("phase", cost.phase),
        _fact("pairs", f"{sure} {cost.pairs.count:,} visible{share}"),
    ]
    rows += ["", "forward", *_pass_rows(cost, cost.forward, backward=False)]
    if cost.backward is not None:
        rows += ["", "backward", *_pass_rows(cost, cost.backward, backward=True)]
    notes = [
        textwrap.fill(n, COLUMNS, subsequent_indent="    " if n[:1] == " " else "  ")
        for n in cost.notes
    ]
    return "\n".join([*rows, *([""] if notes else []), *notes])


def size(count_bytes: float) -> str:
    """536870912 -> "512.00 MiB"."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count_bytes >= factor:
            return f"{count_bytes / factor:,.2f} {unit}"
    return f"{count_bytes:,.0f} B"


def amount(number: float, unit: str) -> str:
    """1.4e14, "FLOP" -> "140.00 TFLOP"."""
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:,.2f} {prefix}{unit}"
    return f"{number:,.0f} {unit}"


def duration(time_us: float) -> str:
    """1234.5 -> "1.234 ms"."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if time_us >= factor:
            return f"{time_us / factor:,.3f} {unit}"
    return f"{time_us:,.3f} us"


def _fact(name: str, words: str) -> str:
    return textwrap.fill(f"{name:<10}{words}", COLUMNS, subsequent_indent=" " * 10)


def _row(name: str, value: str, words: str = "") -> str:
    """Name, value and words; the words go on below themselves."""
    start = f"  {name:<{_NAME}}{value:>{_VALUE}}  "
    lines = textwrap.wrap(words, COLUMNS - len(start)) or [""]
    return f"\n{'':{len(start)}}".join([start + lines[0], *lines[1:]]).rstrip()


def _pass_rows(cost: Cost, c: PassCost, backward: bool) -> list[str]:
    formula = "2 pairs (3 D + 2 E)" if backward else "2 pairs (D + E)"
    rows = [
        _row("arithmetic", amount(c.flops, "FLOP"), formula),
        _row("must move", size(c.compulsory_bytes), "inputs read once, outputs written once"),
    ]
    if c.roofline_us is not None:
        words = f"{c.bound_by}-bound; a floor, not a forecast"
        rows.append(_row("roofline", duration(c.roofline_us), words))
    else:
        rows.append(_row("roofline", "unknown", "the device's rates are not known"))
    rows += _traffic_rows(cost, c, backward)
    return [*rows, *_ledger_rows(c)]


def _traffic_rows(cost: Cost, c: PassCost, backward: bool) -> list[str]:
    on_cpu = cost.device.kind == "cpu"
    near, far = ("own cache", "last cache") if on_cpu else ("SM", "L2")
    rows = []
    if c.traffic is not None:
        t = c.traffic.tiling
        how = f"; {t.backward}" if backward else ""
        rows.append(f"  moves, by a model ({t}{how})")
        rows.append(
            _row(
                "  own <-> last cache" if on_cpu else "  SM <-> L2",
                size(c.traffic.l2_bytes),
                ", ".join(f"{name} {size(n)}" for name, n in c.traffic.parts.items()),
            )
        )
        known = c.traffic.hbm_bytes is not None
        memory = size(c.traffic.hbm_bytes or 0) if known else "unknown"
        rows.append(_row(f"  {far} <-> memory", memory))
    sizes = fast_elements(cost.problem, cost.device)
    yardsticks = [
        ("FlashAttention paper", c.paper_bytes, f"Algorithm {4 if backward else 1}, a model"),
        (f"Saha-Ye, {near}", c.floor_bytes, "a lower bound"),
        (f"Saha-Ye, {far}", c.floor_hbm_bytes, "a lower bound"),
    ]
    if any(n is not None for _, n, _ in yardsticks):
        rows.append("  beside it, with one level of S elements of fast memory")
    for (name, n, words), elements in zip(yardsticks, sizes, strict=True):
        if n is not None:
            rows.append(_row(f"  {name}", size(n), f"{words}; S = {elements:,}"))
    return rows


def _ledger_rows(c: PassCost) -> list[str]:
    ledger = c.ledger
    rows = ["  there at the peak"]
    for role in ("input", "output", "saved", "workspace"):
        mine = [e for e in ledger.entries if e.role == role]
        words = ", ".join(f"{e.name} {size(e.bytes)}" for e in mine if e.name != role)
        if mine:
            rows.append(_row(f"  {role}", size(ledger.total(role)), words))
    rows += [
        _row("  auxiliary", size(ledger.auxiliary_bytes), "saved and workspace"),
        _row("  all of it", size(ledger.with_inputs_and_outputs_bytes), "with inputs and outputs"),
        "  a materialised implementation would add",
    ]
    squares = [e for e in ledger.entries if e.role == "materialised"]
    names = ", ".join(f"{e.name} {size(e.bytes)}" for e in squares)
    words = f"{names}; reuse in place can lower it, one square remains"
    return [*rows, _row("  squares", size(ledger.materialised_bytes), words)]
