"""The checks: small functions, each with a name, a group, and the sentence that it asks about.

A check is written down in one of the files of checks/, under @check. It gets a Trial and returns a
Finding. A Refusal or an Inapplicable that it lets pass becomes the verdict of that name; any
other exception is a crash, and fails.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from ..errors import ArgumentError
from . import checks as folder
from .trial import Trial
from .verdict import Finding

GROUPS = {
    "shapes": "shapes and strides",
    "alignment": "alignment of causal masks and windows",
    "rows": "rows that see no key",
    "padding": "non-finite numbers that nobody sees",
    "heads": "groups of query heads",
    "score": "scores",
    "lse": "the normaliser that is returned",
    "gradients": "gradients",
    "dropout": "dropout",
    "repeat": "determinism",
    "precision": "precision",
    "tails": "sizes around those of tiles",
    "extent": "long, many and far apart",
    "derivatives": "derivatives beyond the first (not required: right, or refused)",
    "compile": "torch.compile (only where it is asked for)",
}
ON_REQUEST = frozenset({"compile"})


@dataclass(frozen=True)
class Check:
    """One check.

    says    what the contract says, one sentence
    guards  public reports of the bug that it looks for, "owner/repository#number"; may be empty
    """

    name: str
    group: str
    says: str
    guards: str
    run: Callable[[Trial], Finding]


_FOUND: dict[str, Check] = {}


def check(
    name: str, group: str, says: str, guards: str = ""
) -> Callable[[Callable[[Trial], Finding]], Callable[[Trial], Finding]]:
    """Make a function of a Trial one of the checks."""

    def keep(function: Callable[[Trial], Finding]) -> Callable[[Trial], Finding]:
        assert group in GROUPS, group
        assert name not in _FOUND and name not in GROUPS, name
        _FOUND[name] = Check(name, group, says, guards, function)
        return function

    return keep


@cache
def checks() -> dict[str, Check]:
    """All checks by name, group by group in the order of GROUPS."""
    for info in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{info.name}")
    order = list(GROUPS)
    return dict(sorted(_FOUND.items(), key=lambda item: order.index(item[1].group)))


def chosen(only: Sequence[str] | None) -> list[Check]:
    """The checks of some groups, or of these names; None: all but those that only run on request.

    Raises ArgumentError for a name that is neither.
    """
    known = checks()
    if only is None:
        return [c for c in known.values() if c.group not in ON_REQUEST]
    unknown = [word for word in only if word not in GROUPS and word not in known]
    if unknown or not only:
        raise ArgumentError(
            "There is no such group of checks, and no such check.",
            {"given": ", ".join(map(repr, unknown)) or "nothing", "groups": ", ".join(GROUPS)},
            "one of the groups, or a check that `nosquare verify --list` names.",
        )
    return [c for c in known.values() if c.group in only or c.name in only]
