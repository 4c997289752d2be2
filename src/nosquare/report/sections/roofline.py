"""The roofline: rates against arithmetic intensity, where the rates of the device are known."""

from __future__ import annotations

from collections.abc import Sequence

from ...device import Device
from ..draw import Axis, Look, Series, chart, key
from ..evidence import Bench, Entry
from ..facts import facts
from ..modelled import cost_of
from ..page import anchor, figure, nothing, panel

UNKNOWN = (
    "No roofline: the peak rates of this processor are in no record and in no table of datasheets."
)
TERA = 1e12


def roof_share(bench: Bench, entry: Entry) -> float | None:
    """The roof's time over the measured one; None where the device's rates are not known."""
    floor_us = _floor_us(bench)
    return floor_us / entry.median_us if floor_us and entry.median_us else None


def roofline(cases: Sequence[Bench]) -> str:
    """A panel for each dtype whose peak rate is known."""
    device = facts(cases[0])
    if device is None:
        return nothing(UNKNOWN)
    panels, used, looks = [], list[Bench](), dict[str, Look]()
    for dtype in dict.fromkeys(_dtype(b) for b in cases):
        mine = [b for b in cases if _dtype(b) == dtype]
        if device.peak_flops.get(dtype) and device.bandwidth:
            panels.append(panel(dtype, _chart(f"roof-{dtype}-", dtype, mine, device, looks)))
            used += mine
    if not panels:
        return nothing(UNKNOWN)
    caption = (
        "Arithmetic of the visible pairs over compulsory bytes, both axes logarithmic. Roof: "
        f"{device.bandwidth / TERA:.3g} TB/s and the peak rate of the dtype ({device.source})."
    )
    roof = Look(f"roof ({device.source})", None, "line", False)
    return figure(key([*looks.values(), roof]), panels, caption, [b.source for b in used])


def _chart(
    name: str, dtype: str, cases: Sequence[Bench], device: Device, looks: dict[str, Look]
) -> str:
    points: dict[str, list[tuple[float, float]]] = {}
    for bench in cases:
        flops, moved = _work(bench)
        for entry in bench.entries.values():
            if entry.median_us:
                looks.setdefault(entry.name, Look(entry.name, len(looks), "", True))
                rate = flops / entry.median_us * 1e6 / TERA
                points.setdefault(entry.name, []).append((flops / moved, rate))
    peak = device.peak_flops[dtype] / TERA
    ridge = peak * TERA / device.bandwidth
    across = [x for found in points.values() for x, _ in found]
    ends = (min([*across, ridge / 2]), max([*across, ridge * 2]))
    roof = [(x, min(peak, x * device.bandwidth / TERA)) for x in (ends[0], ridge, ends[1])]
    data = [Series(Look("roof", None, "line", False), roof)]
    data += [Series(looks[who], found) for who, found in points.items()]
    axes = (
        Axis("flops a byte", lambda x: f"{x:,.0f}" if x >= 1 else f"{x:.2g}", base=10),
        Axis("TFLOP/s", lambda y: f"{y:,.0f}" if y >= 1 else f"{y:.2g}", base=10),
    )
    told = "; ".join(
        f"{who}: " + ", ".join(f"{y:.3g} at {x:.3g}" for x, y in sorted(found))
        for who, found in points.items()
    )
    about = f"Roof: {peak:.4g} TFLOP/s from {ridge:.3g} flops a byte on. {told}."
    return chart(name + anchor(cases[0].source), dtype, about, axes, data)


def _dtype(bench: Bench) -> str:
    return str(bench.case.dtype).removeprefix("torch.")


def _work(bench: Bench) -> tuple[int, int]:
    """(flops of the record, compulsory bytes of its passes)."""
    found = cost_of(bench.case, facts(bench))
    passes = [found.forward] if bench.case.phase != "backward" else []
    passes += [found.backward] if found.backward is not None and bench.case.wants_grads else []
    return bench.flops, sum(part.compulsory_bytes for part in passes)


def _floor_us(bench: Bench) -> float | None:
    """The longer of the record's flops at the peak rate and its compulsory bytes at bandwidth."""
    device = facts(bench)
    rate = device.peak_flops.get(_dtype(bench), 0.0) if device else 0.0
    if device is None or not rate or not device.bandwidth:
        return None
    flops, moved = _work(bench)
    return max(flops / rate, moved / device.bandwidth) * 1e6
