"""Fields of a config.json, with words for what is missing, ill-formed or contradictory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ArgumentError


class Fields:
    """The fields of one config.

    given  every key, those set to null included; raw: the keys that have a value
    """

    def __init__(self, given: Mapping[str, Any], family: str) -> None:
        self.given, self.family = dict(given), family
        self.raw = {key: value for key, value in self.given.items() if value is not None}

    def with_defaults(self, **values: Any) -> Fields:
        """The same with values for fields that are absent or null."""
        return Fields({**values, **self.raw}, self.family)

    def without(self, name: str) -> Fields:
        """The same without a field that means nothing to the family."""
        return Fields({k: v for k, v in self.given.items() if k != name}, self.family)

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number, under the first of `names` that is there.

        Raises ArgumentError when it is no such number, or is missing and has no default.
        """
        name = next((name for name in names if name in self.raw), None)
        if name is None:
            if default is None:
                self._missing(names)
            return default
        value = self.raw[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._odd(name, value, f"a whole number, at least {least}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number; null means 0. Raises ArgumentError when it is something else."""
        value = self.given.get(name, default)
        value = 0.0 if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._odd(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false. Raises ArgumentError when it is something else."""
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            self._odd(name, value, "true or false")
        return value

    def word(self, *names: str, default: str) -> str:
        """A word, under the first of `names` that is there. Raises ArgumentError for no word."""
        name = next((name for name in names if name in self.raw), names[0])
        value = self.raw.get(name, default)
        if not isinstance(value, str):
            self._odd(name, value, "a word")
        return value

    def dtype(self) -> str:
        """What the weights are kept in, as the config says; "" when it does not."""
        return self.word("dtype", "torch_dtype", default="").removeprefix("torch.")

    def contradiction(self, **fields: object) -> NoReturn:
        """Raise ArgumentError: these fields cannot go together."""
        raise ArgumentError(
            "Two fields of the config contradict each other.",
            fields,
            "the config.json that came with the weights, unchanged.",
        )

    def _missing(self, names: tuple[str, ...]) -> NoReturn:
        raise ArgumentError(
            "The config lacks a field without which its memory cannot be told.",
            {"missing": names[0], "model_type": self.family},
            f'"{names[0]}": a number, as in the config.json that came with the weights.',
        )

    def _odd(self, name: str, value: object, wanted: str) -> NoReturn:
        raise ArgumentError(
            "A field of the config is not what it should be.",
            {name: repr(value), "wanted": wanted},
            "the config.json that came with the weights, unchanged.",
        )


def read(where: str) -> dict[str, Any]:
    """The config in a file, in a folder's config.json, or on standard input ("-").

    Nothing is ever fetched: the name of a model on a hub is a missing file here. Raises
    ArgumentError when there is no file, it cannot be read, or it is no JSON object.
    """
    path = Path(where)
    try:
        if where == "-":
            text = sys.stdin.read()
        else:
            text = (path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ArgumentError(
            "The config cannot be read.",
            {"path": where, "why": why},
            "a config.json, its folder, or - for standard input; nothing is fetched.",
        ) from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(
            "The config is not JSON.",
            {"path": where, "where": f"line {error.lineno}, column {error.colno}",
             "why": error.msg},
            "the config.json that came with the weights, unchanged.",
        ) from None  # fmt: skip
    if not isinstance(config, dict):
        raise ArgumentError(
            "The config is JSON, but no object.",
            {"path": where, "found": type(config).__name__},
            "the config.json that came with the weights, unchanged.",
        )
    return config
