"""`nosquare plan`: what a case will cost, before anything runs."""

from __future__ import annotations

import json
import re

import torch

from .bench.cases import Case
from .cost import PHASES
from .device import Device, measured
from .errors import ArgumentError
from .estimate import cost, present

_PHASE_OF = {"forward": "prefill", "decode": "decode"}  # of a case; all others train


def plan(
    line: str,
    device: str | None = None,
    phase: str | None = None,
    tiles: str | None = None,
    as_json: bool = False,
    measure: bool = False,
) -> None:
    """Print the account of a case.

    line     as bench/cases.py spells a case; its sizes alone are used, so any will do
    device   a torch device of this machine, or the short name of a card; None: the card or the
             processor that is here
    phase    "training", "prefill" or "decode"; None: the case's own
    tiles    "128x128": rows (queries times the query heads of a group) by keys
    measure  take the rates of this machine from a calibration of a second or two; a CPU's are
             always taken so

    Raises ArgumentError for words that it does not know.
    """
    case = Case.parse(line)
    phase = phase or _PHASE_OF.get(case.phase, "training")
    word = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if phase not in PHASES:
        raise ArgumentError(
            "There is no such phase.",
            {"phase": repr(phase), "phases": ", ".join(PHASES)},
            "--phase decode, or leave it out.",
        )
    if measure and word.partition(":")[0] not in ("cpu", "cuda"):
        raise ArgumentError(
            "Only a device of this machine can be measured.",
            {"device": repr(word)},
            "--device cpu or --device cuda.",
        )
    sides = _tiles(tiles)
    where: str | Device = word
    if measure or word == "cpu":
        present(word)
        where = measured(word)
    account = cost(case.problem(phase == "training"), where, phase=phase, tiles=sides)
    print(json.dumps(account.as_json(), indent=2) if as_json else account)


def _tiles(words: str | None) -> tuple[int, int] | None:
    if words is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", words)
    if not found:
        raise ArgumentError(
            "Tiles are rows by keys, two positive counts.",
            {"tiles": repr(words)},
            "--tiles 128x128.",
        )
    return int(found[1]), int(found[2])
