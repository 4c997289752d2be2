"""Facts of the device that a record was made on, where anybody knows them."""

from __future__ import annotations

from ..device import Device, by_card_name
from .evidence import Bench


def facts(bench: Bench) -> Device | None:
    """Bandwidth and peak rates of the record's device; None where they are not known.

    Of a card, the datasheet's. A processor's rates are nowhere tabled, and those measured here
    would say nothing of the machine of a record.
    """
    gpu = bench.data["machine"].get("gpu")
    return by_card_name(gpu["name"]) if gpu else None
