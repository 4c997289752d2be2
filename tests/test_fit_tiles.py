"""What `nosquare fit` says that attention takes inside, against the receipts of real models."""

from __future__ import annotations

import pytest

import nosquare as ns
from fit_helpers import adapter, config_of, ours, real, torch, transformers
from nosquare.backends import BACKWARD, FORWARD
from nosquare.fit import heads
from nosquare.fit.pieces import Run
from nosquare.fit.tape import ATTENTION
from nosquare.fit.training import training

# with and without a window, a cap, sinks; D = E and not; an encoder
KINDS = ["Llama", "Mistral", "Gemma2", "GptOss", "DeepseekV3", "Bert"]


@pytest.fixture(autouse=True)
def _registered() -> None:
    adapter.register()


def said(run: Run, phase: str = FORWARD) -> list[int]:
    return [heads.tile_bytes(run, layer.attention, phase) for layer in run.model.layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("B", "M", "past"), [(2, 256, 0), (1, 64, 256), (3, 1, 300)])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_takes_what_its_receipts_name(
    kind: str, B: int, M: int, past: int, dtype: torch.dtype
) -> None:
    if kind == "Bert" and past:
        pytest.skip("an encoder has no cache")
    config = config_of(kind)
    model = real(config, dtype=dtype).eval()
    options = {}
    with torch.no_grad():
        if kind != "Bert":
            options["past_key_values"] = transformers.DynamicCache(config=config)
        for tokens in (past - min(M, past), min(M, past)):
            if tokens:
                model(torch.zeros(B, tokens, dtype=torch.long), **options)
        with ns.receipts() as log:
            model(torch.zeros(B, M, dtype=torch.long), **options)
    run = Run(ours(config), B, M, past, d=dtype.itemsize, cuda=False)
    assert said(run) == [r.workspace_bytes for r in log]


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_training_takes_what_its_receipts_name(kind: str) -> None:
    config = config_of(kind)
    model = real(config).train()
    ids = torch.zeros(2, 192, dtype=torch.long)
    with ns.receipts() as log:
        model(ids, labels=ids, use_cache=False).loss.backward()
    run = Run(ours(config), 2, 192, d=4, training=True, cuda=False)
    forward, backward = (
        [r.workspace_bytes for r in log if r.op == op] for op in (FORWARD, BACKWARD)
    )
    assert said(run) == forward
    assert said(run, BACKWARD) == backward[::-1]
    assert training(run, 4).peaks[ATTENTION] >= max(*forward, *backward)


def test_on_a_card_that_need_not_be_here_torchs_kernels_take_nothing() -> None:
    run = Run(ours(config_of("Llama")), 2, 256)
    assert said(run) == said(run, BACKWARD) == [0] * 3
    run = Run(ours(config_of("Gemma2")), 2, 256)
    assert min(said(run)) > 0
