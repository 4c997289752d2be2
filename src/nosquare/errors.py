"""The two errors of the house, and the one formatter that words them.

NosquareError
  ArgumentError     (ValueError)           the call is ill-formed
  UnsupportedError  (NotImplementedError)  the call is well-formed, and nobody here can run it
"""

from __future__ import annotations

from collections.abc import Mapping


def compose(sentence: str, values: Mapping[str, object], attempt: str) -> str:
    """Word an error: one sentence, the offending values aligned, a step that works."""
    width = max((len(name) for name in values), default=0)
    lines = [sentence, *(f"  {name:<{width}}  {value}" for name, value in values.items())]
    if attempt:
        lines.append(f"  Try: {attempt}")
    return "\n".join(lines)


class NosquareError(Exception):
    """Base of both. `sentence`, `values` and `attempt` are kept for whoever handles the error."""

    def __init__(
        self, sentence: str, values: Mapping[str, object] | None = None, attempt: str = ""
    ) -> None:
        super().__init__(sentence, dict(values or {}), attempt)
        self.sentence, self.values, self.attempt = sentence, dict(values or {}), attempt

    def __str__(self) -> str:
        return compose(self.sentence, self.values, self.attempt)


class ArgumentError(NosquareError, ValueError):
    """The call is ill-formed: shapes, dtypes, devices or values that cannot go together."""


class UnsupportedError(NosquareError, NotImplementedError):
    """The call is well-formed, but no backend (or not the named one) can run it."""
