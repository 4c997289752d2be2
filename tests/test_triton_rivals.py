"""What triton_any leaves to torch's own kernels. That those take it: test_triton_gpu.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nosquare.backends import BACKWARD, BACKWARD_LSE, FORWARD
from triton_compiled import cards, problem

from nosquare.backends.triton_any.rivals import faster  # isort: skip


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch was built for cards."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


PLAIN: dict[str, Any] = {"heads": (16, 16), "mask": "causal(end)"}


@pytest.mark.parametrize(
    ("more", "phase", "left"),
    [
        ({}, FORWARD, True),
        ({}, BACKWARD, True),
        ({"mask": "full()"}, FORWARD, True),
        ({"heads": (16, 4)}, FORWARD, True),
        ({"m": 1}, FORWARD, True),
        ({}, BACKWARD_LSE, False),
        ({"m": 4000, "n": 4000}, FORWARD, True),
        ({"m": 4000, "n": 4000}, BACKWARD, False),
        ({"deterministic": True}, BACKWARD, False),
        ({"m": 1024}, FORWARD, False),
        ({"mask": "causal(start)", "m": 1}, FORWARD, False),
        ({"mask": "window(before=9,after=0)"}, FORWARD, False),
        ({"d": 100}, FORWARD, False),
        ({"d": 256}, FORWARD, True),
        ({"d": 256, "m": 4000, "n": 4000}, BACKWARD, True),
        ({"d": 256, "dtype": torch.float32}, FORWARD, True),
        ({"d": 256, "p": 0.1}, FORWARD, False),
        ({"e": 64}, FORWARD, False),
        ({"dtype": torch.float32}, FORWARD, False),
        ({"p": 0.1}, FORWARD, False),
        ({"softcap": 3.0}, FORWARD, False),
        ({"sinks": (16,)}, FORWARD, False),
        ({"bias": (16, 1, 4096)}, FORWARD, False),
        ({"aligned": False}, FORWARD, False),
        ({"packed": True}, FORWARD, False),
        ({"batch_invariant": True}, FORWARD, False),
    ],
    ids=str,
)
def test_on_hopper(more: dict[str, Any], phase: str, left: bool) -> None:
    assert bool(faster(problem(**{**PLAIN, **more}), phase, cards.NAMED["sm_90"])) == left


@pytest.mark.parametrize("name", ["sm_80", "sm_100", "gfx942"])
def test_where_nothing_was_timed_torch_keeps_what_it_has(name: str) -> None:
    card = cards.NAMED[name]
    for p in (problem(**PLAIN), problem(d=256, **PLAIN), problem(dtype=torch.float32, **PLAIN)):
        assert name in faster(p, FORWARD, card)[0]
    for more in ({"p": 0.1}, {"softcap": 3.0}, {"heads": (16, 4), "dtype": torch.float32}):
        assert not faster(problem(**{**PLAIN, **more}), FORWARD, card)
