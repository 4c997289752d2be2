"""The programs of `nosquare fit` against the real modules of transformers, byte for byte.

The witness (fit_helpers.Live) watches every operator of a real forward and counts the arrays that
are alive. It cannot see inside nosquare's operator, so tiles are left out of both sides here.
"""

from __future__ import annotations

from typing import Any

import pytest

from fit_helpers import (
    FAMILIES,
    config_of,
    live_forward_bytes,
    one_thread_no_tiles,
    ours,
    real,
    torch,
)
from nosquare.fit.forward import forward
from nosquare.fit.pieces import Run

__all__ = ["one_thread_no_tiles"]  # a fixture: pytest finds it here by name
pytestmark = pytest.mark.usefixtures("one_thread_no_tiles")

# B, M, past: two prefills, a chunk of one, a decoding step
PREFILL, BATCH, CHUNK, DECODE = (1, 256, 0), (2, 256, 0), (2, 64, 256), (3, 1, 300)


def predicted(config: Any, B: int, M: int, past: int, dtype: Any, attention: str) -> int:
    run = Run(ours(config), B, M, past, d=dtype.itemsize, eager=attention == "eager", cuda=False)
    return forward(run).peak_bytes


@pytest.mark.parametrize("attention", ["nosquare", "eager"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_array_of_a_forward_is_counted(kind: str, attention: str) -> None:
    for dtype, shapes in (
        (torch.float32, (BATCH, DECODE)),
        (torch.bfloat16, (PREFILL, CHUNK, DECODE)),
    ):
        config = config_of(kind)
        model = real(config, attention, dtype)
        for B, M, past in shapes:
            if kind == "Bert" and past:
                continue
            measured = live_forward_bytes(model, B, M, past)
            assert predicted(config, B, M, past, dtype, attention) == measured, (dtype, B, M, past)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu_new"},
        {"hidden_act": "quick_gelu"},
        {"hidden_act": "gelu_fast"},
        {"hidden_act": "relu"},
        {"num_key_value_heads": 8},
        {"tie_word_embeddings": True, "vocab_size": 4096},
    ],
    ids=str,
)
def test_variants_of_llama(changes: dict[str, Any]) -> None:
    config = config_of("Llama", **changes)
    for attention in ("nosquare", "eager"):
        model = real(config, attention)
        for shape in (BATCH, DECODE):
            measured = live_forward_bytes(model, *shape)
            assert predicted(config, *shape, torch.float32, attention) == measured, shape


def test_the_wrong_model_is_caught() -> None:
    """The witness tells a program of another family apart: the comparison can fail."""
    config = config_of("Llama")
    measured = live_forward_bytes(real(config), *BATCH)
    assert predicted(config_of("Gemma2"), *BATCH, torch.float32, "nosquare") != measured
