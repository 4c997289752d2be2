"""The sum of `nosquare fit` by hand, and what fits by brute force."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nosquare import fit
from nosquare.device import Device
from nosquare.fit.families import model_of
from nosquare.fit.ledger import NO_LIMIT, POPULATIONS, Ledger, held_tokens, largest, ledger
from nosquare.fit.request import GIB, Request
from nosquare.fit.show import Report, square_bytes, the_square
from test_fit_config import BERT, DEEPSEEK_V3, GPT2, LLAMA, MISTRAL, PUBLISHED

GEMMA2 = PUBLISHED["gemma-2-9b"][0]
TINY: dict[str, Any] = {**LLAMA, "hidden_size": 64, "intermediate_size": 160,
                        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
                        "vocab_size": 96}  # fmt: skip


def account(config: dict[str, Any], context: int, concurrency: int = 1, **options: Any) -> Ledger:
    options = {"phase": "decode", "reserve_bytes": 0, "device": "h200", **options}
    return ledger(fit.ask(config, context=context, concurrency=concurrency, **options))


# ---- the sum ----


def test_llama_3_8b_decoding_131072_tokens_by_hand() -> None:
    found = account(LLAMA, 131_072, 8)
    assert found.of("weights") == 2 * 8_030_261_248
    assert found.of("cache") == 128 * GIB  # 8 x 131,072 x 32 layers x 2 x 8 heads x 128 x 2 bytes
    assert found.of("logits") == 8 * 128_256 * 2
    assert found.total_bytes == sum(found.of(each) for each in POPULATIONS)
    assert not found.fits
    assert found.headroom_bytes == 143_771 * 2**20 - found.total_bytes


def test_a_prefill_is_most_inside_a_feed_forward() -> None:
    """Embeddings, the layer's input, its middle and its norm, 4 H; three arrays of the width I; two
    tables of D; ids and positions of 8 bytes."""
    found, M = account(LLAMA, 4096, phase="prefill"), 4096
    assert found.of("activations") == M * (2 * (4 * 4096 + 3 * 14336 + 2 * 128) + 2 * 8)
    assert found.of("logits") == found.of("attention") == 0
    assert found.elsewhere["logits"] == 2 * 128_256
    assert found.elsewhere["attention"] == M * 32 * 4  # lse


def test_eager_prefill_holds_the_square_in_three_widths() -> None:
    """Scores in bfloat16, in float32, and probabilities in float32: 10 bytes a pair of a head; then
    the mask, 2 bytes a pair, and keys and values repeated to 32 heads."""
    found = account(LLAMA, 4096, phase="prefill", attention="eager")
    pairs, repeated = 4096 * 4096, 2 * 4096 * 32 * 128 * 2
    assert found.of("attention") == pairs * 32 * 10 + pairs * 2 + repeated


def test_pages_are_whole() -> None:
    for context, tokens in ((1, 16), (16, 16), (17, 32)):
        assert account(LLAMA, context).of("cache") == tokens * 131_072
    assert account(LLAMA, 17, page=256).of("cache") == 256 * 131_072
    assert account(LLAMA, 17, page=1).of("cache") == 17 * 131_072


def test_a_window_holds_its_own_tokens_and_a_page() -> None:
    layer = model_of(MISTRAL).layers[0].attention
    assert held_tokens(layer, 4000, 16) == 4000
    assert held_tokens(layer, 10**6, 16) == 4096 + 16  # its first page may be cut anywhere
    assert held_tokens(layer, 10**6, 1) == 4096
    assert account(MISTRAL, 10**6).of("cache") == 4112 * 32 * 2 * 8 * 128 * 2


def test_kinds_of_layers_are_lines_of_their_own() -> None:
    lines = [x for x in account(GEMMA2, 8192).lines if x.population == "cache"]
    token = 2 * 8 * 256 * 2
    assert [(x.name, x.bytes) for x in lines] == [
        ("window 4,096", 21 * 4112 * token), ("full", 21 * 8192 * token),
    ]  # fmt: skip


def test_a_latent_cache() -> None:
    assert account(DEEPSEEK_V3, 16).of("cache") == 16 * 61 * 576 * 2
    keys_and_what_they_are_cut_of = 4096 * 128 * (192 + 128 + 128) * 2
    assert account(DEEPSEEK_V3, 4096, page=0).of("activations") > keys_and_what_they_are_cut_of
    assert account(DEEPSEEK_V3, 4096).of("activations") < keys_and_what_they_are_cut_of / 50


def test_dtypes() -> None:
    base = account(LLAMA, 1024)
    assert account(LLAMA, 1024, kv_dtype="float8").of("cache") * 2 == base.of("cache")
    small = account(LLAMA, 1024, weights_dtype="int4")
    matrices = 5_637_144_576 + 1_342_177_280
    rest = 8_030_261_248 - matrices
    assert small.of("weights") == matrices // 2 + rest * 2
    assert account(LLAMA, 1024, dtype="float32").of("weights") == 4 * 8_030_261_248
    assert account({**LLAMA, "torch_dtype": "float32"}, 1024).request.dtype == "float32"
    assert account(GPT2, 1024).request.dtype == "bfloat16"  # its config names none


def test_over_eight_gpus() -> None:
    one, eight = account(LLAMA, 8192, 4), account(LLAMA, 8192, 4, gpus=8)
    assert eight.of("cache") * 8 == one.of("cache")
    assert eight.of("weights") == (2 * 8_030_261_248 - 2 * 266_240) // 8 + 2 * 266_240
    # 8 key heads over 16: each holds one, so the cache is halved no further
    assert account(LLAMA, 8192, 4, gpus=16).of("cache") == eight.of("cache")


def test_training_by_hand() -> None:
    """At the loss: log-softmax, two gradients of its size, all in float32; what is saved; Adam's
    two averages and the float32 copy. Without Adam the step's end is no larger."""
    found, tokens = account(LLAMA, 512, 4, phase="training"), 2048
    assert found.of("logits") == 3 * tokens * 128_256 * 4
    assert found.of("optimizer") == 12 * 8_030_261_248
    # a layer keeps x32, scale and cast of two norms, two normed, q, k, v, o, lse and four of I
    norms = 2 * (4 * 4096 + 4 + 2 * 4096) + 2 * 2 * 4096
    layer = norms + 2 * (2 * 4096 + 2 * 1024 + 4 * 14336) + 32 * 4
    last = 4 * 4096 + 4 + 2 * 4096  # and the last norm; tables and labels
    saved = tokens * (32 * layer + last) + 512 * 2 * 128 * 2 + 4 * 513 * 8
    assert found.of("saved") == saved
    assert account(LLAMA, 512, 4, phase="training", optimizer="none").of("optimizer") == 0


def test_a_chunked_prefill_holds_less_and_the_same_cache() -> None:
    whole, parts = (account(LLAMA, 32768, phase="prefill", chunk=c) for c in (0, 2048))
    assert parts.of("cache") == whole.of("cache")
    assert parts.of("activations") * 15 < whole.of("activations") < parts.of("activations") * 17


def test_an_encoder_has_neither_cache_nor_logits() -> None:
    found = account(BERT, 512, 8, phase="prefill")
    assert found.of("cache") == found.of("logits") == 0
    assert found.of("weights") == 2 * 109_482_240


# ---- what fits ----


@settings(max_examples=15)
@given(
    config=st.sampled_from([TINY, {**TINY, "model_type": "mistral", "sliding_window": 40}]),
    phase=st.sampled_from(["prefill", "decode", "training"]),
    attention=st.sampled_from(["nosquare", "eager"]),
    page=st.sampled_from([0, 1, 16]),
    memory_bytes=st.integers(200_000, 500_000),
    fixed=st.integers(1, 20),
)
def test_the_largest_that_fits_is_that_of_trying_all(
    config: dict[str, Any], phase: str, attention: str, page: int, memory_bytes: int, fixed: int
) -> None:
    device = Device("cuda", "small", 0, memory_bytes)
    q = Request(model_of(config), device, fixed, fixed, phase, attention=attention, page=page)
    for field in ("context", "concurrency"):
        if largest(q, field) == NO_LIMIT:
            assert ledger(replace(q, **{field: 10**9})).total_bytes <= memory_bytes
            continue
        tried = 0
        while ledger(replace(q, **{field: tried + 1})).total_bytes <= memory_bytes:
            tried += 1
        assert largest(q, field) == tried


def test_windows_in_all_layers_leave_decoding_without_a_limit() -> None:
    report = Report.of(fit.ask(MISTRAL, "h200", context=4096, phase="decode"))
    assert report.context == NO_LIMIT
    assert 0 < report.concurrency < 1000
    assert "no limit" in the_square(report)[-1]


@pytest.mark.parametrize("phase", ["prefill", "decode", "training"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_more_tokens_never_take_less(name: str, phase: str) -> None:
    """What the search relies on."""
    config = {**PUBLISHED[name][0], "num_hidden_layers": 3}
    if config["model_type"] == "bert" and phase == "decode":
        return
    for attention in ("nosquare", "eager"):
        totals = [
            account(config, context, phase=phase, attention=attention, page=page).total_bytes
            for page in (0, 16)
            for context in (1, 16, 17, 255, 4096, 4097, 9000)
        ]
        assert totals[:7] == sorted(totals[:7])
        assert totals[7:] == sorted(totals[7:])


def test_a_square_half_the_size_is_not_twice_the_context() -> None:
    """Decoding: eager adds repeated keys and values, so ours holds 13% more tokens, not twice."""
    report = Report.of(fit.ask(LLAMA, "h200", context=8192, concurrency=8, phase="decode"))
    assert 1.12 < report.context / report.other_context < 1.14
    assert "1.13 times as many" in the_square(report)[-1]
    assert square_bytes(report.ledger.request) == 8 * 32 * 8192 * 2
