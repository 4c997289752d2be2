"""`nosquare fit` reads configs: parameters equal those of the real models, faults get words."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

import nosquare as ns
from fit_helpers import FAMILIES, config_of, ours, raw, real, torch
from nosquare.fit.families import KNOWN, model_of
from nosquare.fit.fields import read
from nosquare.fit.model import Model

# Facts of published models: what their config.json says, and the parameters their cards state.
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    **LLAMA, "model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096,
    "max_position_embeddings": 32768,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "vocab_size": 129280, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "vocab_size": 50257}  # fmt: skip
BERT = {"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30522,
        "max_position_embeddings": 512, "type_vocab_size": 2}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "llama-3-8B": (LLAMA, 8_030_261_248),
    "mistral-7B-v0.1": (MISTRAL, 7_241_732_096),
    "qwen2.5-7B": (
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
         "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
         "vocab_size": 152064, "max_position_embeddings": 131072, "use_sliding_window": False,
         "sliding_window": 131072, "max_window_layers": 28, "tie_word_embeddings": False},
        7_615_616_512,
    ),
    "gemma-2-9b": (
        {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
         "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
         "sliding_window": 4096},
        9_241_705_984,
    ),
    "gpt2": (GPT2, 124_439_808),
    "bert-base-uncased": (BERT, 109_482_240),
    "mixtral-8x7B": (
        {**MISTRAL, "model_type": "mixtral", "num_local_experts": 8, "sliding_window": None},
        46_702_792_704,
    ),
    "deepseek-v2-lite": (
        {"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
         "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
         "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
         "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "qk_nope_head_dim": 128, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
         "vocab_size": 102400, "max_position_embeddings": 163840},
        15_706_484_224,
    ),
}  # fmt: skip


def total(model: Model) -> int:
    return sum(model.parameters().values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    config, count = PUBLISHED[name]
    assert total(model_of(config)) == count


def test_deepseek_v3_without_its_prediction_module() -> None:
    """671 billion, of which the module that predicts further tokens (MTP) is no part."""
    assert round(total(model_of(DEEPSEEK_V3)) / 1e9) == 671


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in FAMILIES),
    *((kind, {"tie_word_embeddings": True}) for kind in FAMILIES),
    *((kind, {"tie_word_embeddings": False}) for kind in FAMILIES if kind != "Bert"),
    *((kind, {"attention_bias": True}) for kind in ("Qwen3", "Gemma2", "Gemma3Text", "Qwen3Moe")),
    ("Llama", {"attention_bias": False, "mlp_bias": False, "head_dim": 24}),
    ("Mistral", {"sliding_window": None}),
    ("Llama", {"num_key_value_heads": None}),
    ("GptOss", {"attention_bias": False}),
    ("GPT2", {"n_inner": 100}),
    ("Qwen2Moe", {"decoder_sparse_step": 2, "qkv_bias": False}),
    ("DeepseekV3", {"q_lora_rank": None, "attention_bias": True}),
    ("DeepseekV2", {"q_lora_rank": 20, "attention_bias": True, "mlp_bias": True}),
    ("DeepseekV3", {"first_k_dense_replace": 3, "attention_bias": True}),
]


@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=lambda x: str(x))
def test_parameters_equal_those_of_the_real_model(kind: str, changes: dict[str, Any]) -> None:
    config = config_of(kind, **changes)
    with torch.device("meta"):
        model = real(config, "eager")
    assert total(ours(config)) == sum(p.numel() for p in model.parameters())


def test_every_known_family_is_among_them() -> None:
    built = {raw(config_of(kind))["model_type"] for kind in FAMILIES}
    assert built == set(KNOWN)


def test_kinds_of_layers() -> None:
    gemma3 = model_of(raw(config_of("Gemma3Text", num_hidden_layers=8)))
    assert {kind: len(layers) for kind, layers in gemma3.kinds().items()} == {
        "window 96": 7, "full": 1,
    }  # fmt: skip
    latent = model_of(DEEPSEEK_V3).layers[0].attention
    assert (latent.kind, latent.cached_width) == ("latent", 576)
    assert [layer.experts is None for layer in model_of(DEEPSEEK_V3).layers[:5]] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_only_the_language_model_of_a_multimodal_one() -> None:
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
             "num_hidden_layers": 34, "sliding_window": 1024}  # fmt: skip
    model = model_of({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": inner,
                      "vision_config": {"hidden_size": 1152}})  # fmt: skip
    assert (model.family, model.dtype, len(model.kinds())) == ("gemma3_text", "bfloat16", 2)
    assert "Only the language model (gemma3_text) of this gemma3 is counted" in model.notes[0]
    del inner["model_type"]  # older files leave it out
    assert model_of({"model_type": "gemma3", "text_config": inner}).family == "gemma3_text"


def test_notes_on_what_a_config_asks_for_beyond_its_layers() -> None:
    quantised, mtp = model_of(DEEPSEEK_V3).notes
    assert "quantised" in quantised
    assert "(MTP) are not counted" in mtp


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in LLAMA.items() if k != key}


def said(config: dict[str, Any], kind: type[Exception] = ns.ArgumentError) -> str:
    with pytest.raises(kind) as error:
        model_of(config)
    return str(error.value)


def test_an_unknown_family() -> None:
    told = said({"model_type": "t5"}, ns.UnsupportedError)
    assert_expected_inline(
        told.replace(", ".join(KNOWN), "<KNOWN>"),
        """\
This kind of model is not known here.
  model_type  t5
  known       <KNOWN>
  Try: one of these; many variants of llama can be read as model_type "llama".""",
    )
    assert "missing" in said({"hidden_size": 64}, ns.UnsupportedError)


def test_a_missing_field() -> None:
    assert_expected_inline(
        said(without("hidden_size")),
        """\
The config lacks a field without which its memory cannot be told.
  missing     hidden_size
  model_type  llama
  Try: "hidden_size": a number, as in the config.json that came with the weights.""",
    )
    for key in ("num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        assert f"missing     {key}" in said(without(key))


def test_an_odd_field() -> None:
    assert_expected_inline(
        said({**LLAMA, "hidden_size": "4096"}),
        """\
A field of the config is not what it should be.
  hidden_size  '4096'
  wanted       a whole number, at least 1
  Try: the config.json that came with the weights, unchanged.""",
    )
    assert "at least 1" in said({**LLAMA, "num_hidden_layers": 0})
    assert "true or false" in said({**LLAMA, "tie_word_embeddings": "no"})
    assert "a word" in said({**LLAMA, "hidden_act": 3})
    assert "a number" in said({**PUBLISHED["gemma-2-9b"][0], "attn_logit_softcapping": "x"})


def test_fields_that_contradict_each_other() -> None:
    assert_expected_inline(
        said({**LLAMA, "num_key_value_heads": 5}),
        """\
Two fields of the config contradict each other.
  num_attention_heads  32
  num_key_value_heads  5
  Try: the config.json that came with the weights, unchanged.""",
    )
    assert "hidden_size" in said({**LLAMA, "hidden_size": 4097})
    qwen = PUBLISHED["qwen2.5-7B"][0]
    assert "layer_types" in said({**qwen, "layer_types": ["full_attention"]})
    moe = PUBLISHED["mixtral-8x7B"][0]
    assert "num_experts_per_tok" in said({**moe, "num_experts_per_tok": 9})
    assert "n_head" in said({**GPT2, "n_head": 7})


def test_layers_and_parts_that_are_not_known() -> None:
    qwen = {**PUBLISHED["qwen2.5-7B"][0], "layer_types": ["linear_attention"] * 28}
    assert "linear_attention" in said(qwen, ns.UnsupportedError)
    assert "Cross-attention" in said({**GPT2, "add_cross_attention": True}, ns.UnsupportedError)
    assert "decodes" in said({**BERT, "is_decoder": True}, ns.UnsupportedError)


BASES = [config for config, _ in PUBLISHED.values()] + [DEEPSEEK_V3]
VALUES = st.sampled_from(
    [None, True, 0, 1, 3, -1, 2.5, "x", [], [1, "a"], ["full_attention"] * 32, {}, {"a": 1}]
)


@settings(max_examples=300)
@given(
    base=st.sampled_from(BASES),
    changes=st.dictionaries(st.sampled_from(sorted({k for b in BASES for k in b})), VALUES),
    more=st.dictionaries(
        st.sampled_from("layer_types mlp_only_layers text_config head_dim dtype n_inner".split()),
        VALUES,
    ),
)
def test_odd_configs_get_words_or_numbers(
    base: dict[str, Any], changes: dict[str, Any], more: dict[str, Any]
) -> None:
    """Never a traceback of another kind."""
    with suppress(ns.NosquareError):
        assert total(model_of({**base, **changes, **more})) > 0


def test_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(LLAMA)))
    assert read(str(path)) == read(str(tmp_path)) == read("-") == LLAMA


def test_files_that_are_no_config(tmp_path: Path) -> None:
    def refused(name: str, content: bytes | None) -> str:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ns.ArgumentError) as error:
            read(str(path))
        return str(error.value).replace(str(tmp_path), "<folder>")

    assert_expected_inline(
        refused("absent.json", None),
        """\
The config cannot be read.
  path  <folder>/absent.json
  why   No such file or directory
  Try: a config.json, its folder, or - for standard input; nothing is fetched.""",
    )
    assert_expected_inline(
        refused("broken.json", b'{"a": 1,\n}'),
        """\
The config is not JSON.
  path   <folder>/broken.json
  where  line 2, column 1
  why    Expecting property name enclosed in double quotes
  Try: the config.json that came with the weights, unchanged.""",
    )
    assert_expected_inline(
        refused("list.json", b"[1]"),
        """\
The config is JSON, but no object.
  path   <folder>/list.json
  found  list
  Try: the config.json that came with the weights, unchanged.""",
    )
    assert "it is not text" in refused("weights.bin", b"\xff\xfe\x00\xd8")
