"""Reads a listing of calls and of what they raise, written as a session at the prompt would show
it:

>>> ns.Prefix(-2) ArgumentError: A prefix is a count of keys, so it cannot be negative. n -2
Try: Prefix(0) for none.
"""

from __future__ import annotations

from typing import Any

import pytest

import nosquare as ns


def listed(text: str) -> list[Any]:
    """pytest parameters (call, expected text) of a listing; the call is the id."""
    found = []
    for block in text.strip().split("\n\n"):
        call, _, expected = block.partition("\n")
        assert call.startswith(">>> "), block
        found.append(pytest.param(call[4:], expected, id=call[4:]))
    return found


def raises(call: str, expected: str, names: dict[str, Any]) -> None:
    """Run the call; the class and the whole text must be the expected ones."""
    with pytest.raises(ns.NosquareError) as caught:
        eval(call, names)
    assert f"{type(caught.value).__name__}: {caught.value}" == expected
