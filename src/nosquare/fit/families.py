"""config.json of each known family -> Model. A new family is one function and one line in KNOWN.

The meaning and the defaults of fields are those of transformers 5 (configuration_<family>.py),
since a saved config leaves out what equals a default. Sizes without which nothing can be said are
asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import UnsupportedError
from .fields import Fields
from .model import Attention, Experts, Latent, Layer, Model

SLIDING, FULL = "sliding_attention", "full_attention"


def model_of(raw: Mapping[str, Any]) -> Model:
    """The model that a config.json describes.

    Raises UnsupportedError for a family that is not known here, ArgumentError naming the field
    that is missing or contradicts another.
    """
    notes: tuple[str, ...] = ()
    family = raw.get("model_type")
    if isinstance(raw.get("text_config"), dict):
        outer, raw = raw, {"dtype": raw.get("dtype", raw.get("torch_dtype")), **raw["text_config"]}
        family = raw.get("model_type", "gemma3_text" if family == "gemma3" else None)
        raw.setdefault("tie_word_embeddings", outer.get("tie_word_embeddings"))
        notes = (
            f"Only the language model ({family}) of this {outer.get('model_type')} is counted: no "
            "vision or audio tower, no projector.",
        )
    if not isinstance(family, str) or family not in KNOWN:
        raise UnsupportedError(
            "This kind of model is not known here.",
            {"model_type": family if family is not None else "missing", "known": ", ".join(KNOWN)},
            'one of these; many variants of llama can be read as model_type "llama".',
        )
    x = Fields(raw, family)
    model = KNOWN[family](x)
    if x.raw.get("quantization_config"):
        notes += ("The config says that its checkpoint is quantised: see --weights-dtype.",)
    if x.raw.get("num_nextn_predict_layers"):
        notes += ("Modules that predict further tokens (MTP) are not counted.",)
    limit = x.count("max_position_embeddings", "n_positions", default=model.limit)
    return replace(model, limit=limit, dtype=x.dtype(), notes=(*model.notes, *notes), family=family)


def _heads(x: Fields, **more: Any) -> Attention:
    """Query and key heads, and their width, as most families write them."""
    Hq = x.count("num_attention_heads")
    Hk = x.count("num_key_value_heads", default=Hq)
    if Hq % Hk:
        x.contradiction(num_attention_heads=Hq, num_key_value_heads=Hk)
    H = x.count("hidden_size")
    D = x.count("head_dim", default=0) or H // Hq
    if "head_dim" not in x.raw and H % Hq:
        x.contradiction(hidden_size=H, num_attention_heads=Hq)
    return Attention(Hq, Hk, D, D, **more)


def _windows(x: Fields, sliding: Callable[[int], bool]) -> list[int | None]:
    """The window of each layer: from layer_types, else where `sliding` says so."""
    n = x.count("num_hidden_layers")
    types = x.raw.get("layer_types") or [SLIDING if sliding(i) else FULL for i in range(n)]
    if not isinstance(types, list) or len(types) != n:
        found = f"{len(types)} of them" if isinstance(types, list) else repr(types)
        x.contradiction(num_hidden_layers=n, layer_types=found)
    odd = sorted({str(word) for word in types} - {SLIDING, FULL})
    if odd:
        raise UnsupportedError(
            "The config has a kind of layer that is not known here.",
            {"layer_types": ", ".join(odd), "known": f"{FULL}, {SLIDING}"},
            "a model whose layers are of these kinds.",
        )
    if SLIDING not in types:
        return [None] * n
    window = x.count("sliding_window")
    return [window if word == SLIDING else None for word in types]


def _build(x: Fields, attention: Attention, windows: list[int | None], **more: Any) -> Model:
    """A decoder whose layers differ in their windows only."""
    width = x.count("intermediate_size")
    bias = x.flag("mlp_bias", default=False)
    layers = tuple(Layer(replace(attention, window=w), width, bias=bias) for w in windows)
    return _decoder(x, layers, **more)


def _decoder(x: Fields, layers: tuple[Layer, ...], tied: bool = False, **more: Any) -> Model:
    style = more.pop("style", "llama")
    activation = x.word("hidden_act", "hidden_activation", default="silu")
    return Model(
        family=x.family,
        style=style,
        H=x.count("hidden_size"),
        vocab=x.count("vocab_size"),
        layers=layers,
        activation=activation,
        tied=x.flag("tie_word_embeddings", default=tied),
        **more,
    )


def _qkvo(x: Fields, default: bool = False) -> str:
    return "qkvo" if x.flag("attention_bias", default=default) else ""


def _llama(x: Fields) -> Model:
    everywhere: list[int | None] = [None] * x.count("num_hidden_layers")
    return _build(x, _heads(x, bias=_qkvo(x)), everywhere)


def _one_window(x: Fields, default: int | None) -> list[int | None]:
    """mistral and mixtral: one window for all layers, or none (null)."""
    window: int | None = default
    if "sliding_window" in x.given:
        window = x.count("sliding_window", default=0) or None
    return [window] * x.count("num_hidden_layers")


def _mistral(x: Fields) -> Model:
    return _build(x, _heads(x), _one_window(x, default=4096))


def _late_windows(x: Fields) -> list[int | None]:
    """qwen2 and qwen3: only with use_sliding_window, from layer max_window_layers on."""
    on = x.flag("use_sliding_window", default=False)
    first = x.count("max_window_layers", default=28, least=0)
    return _windows(x, lambda i: on and i >= first)


def _qwen2(x: Fields) -> Model:
    return _build(x, _heads(x, bias="qkv"), _late_windows(x))


def _qwen3(x: Fields) -> Model:
    x = x.with_defaults(head_dim=128)
    return _build(x, _heads(x, bias=_qkvo(x), norms=True), _late_windows(x))


def _gemma2(x: Fields) -> Model:
    x = x.with_defaults(head_dim=256, sliding_window=4096, hidden_activation="gelu_pytorch_tanh")
    capped = x.number("attn_logit_softcapping", default=50.0) > 0
    return _build(
        x,
        _heads(x, bias=_qkvo(x), softcap=capped),
        _windows(x, lambda i: i % 2 == 0),
        style="gemma",
        norms=4,
        tied=True,
        logit_cap=x.number("final_logit_softcapping", default=30.0) > 0,
    )


def _gemma3(x: Fields) -> Model:
    # published configs leave these out (google/gemma-3-4b-it)
    x = x.with_defaults(
        head_dim=256, sliding_window=4096, hidden_activation="gelu_pytorch_tanh",
        num_attention_heads=8, num_key_value_heads=4, vocab_size=262208,
        max_position_embeddings=131072,
    )  # fmt: skip
    every = x.count("sliding_window_pattern", default=6)
    return _build(
        x,
        _heads(x, bias=_qkvo(x), norms=True),
        _windows(x, lambda i: (i + 1) % every != 0),
        style="gemma",
        norms=4,
        tied=True,
        logit_cap=x.number("final_logit_softcapping", default=0.0) > 0,
    )


def _experts(x: Fields, width: str, chosen: int, **more: Any) -> Experts:
    n = x.count("num_experts", "num_local_experts", "n_routed_experts")
    k = x.count("num_experts_per_tok", default=chosen)
    if k > n:
        x.contradiction(num_experts=n, num_experts_per_tok=k)
    return Experts(n, k, x.count(width), **more)


def _mixtral(x: Fields) -> Model:
    experts = _experts(x, "intermediate_size", 2)
    layers = tuple(
        Layer(replace(_heads(x), window=w), 0, experts=experts)
        for w in _one_window(x, default=None)
    )
    return _decoder(x, layers)


def _some_dense(
    x: Fields, attention: Attention, windows: list[int | None], experts: Experts
) -> tuple[Layer, ...]:
    """qwen's rule: every decoder_sparse_step-th layer has experts, but those in mlp_only_layers."""
    step = x.count("decoder_sparse_step", default=1)
    dense = x.raw.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        x.contradiction(mlp_only_layers=repr(dense), wanted="a list of layers")
    plain = {i for i in range(len(windows)) if i in dense or (i + 1) % step}
    width = x.count("intermediate_size") if plain else 0
    return tuple(
        Layer(
            replace(attention, window=w),
            width if i in plain else 0,
            experts=None if i in plain else experts,
        )
        for i, w in enumerate(windows)
    )


def _qwen2_moe(x: Fields) -> Model:
    shared = x.count("shared_expert_intermediate_size", default=5632)
    experts = _experts(x, "moe_intermediate_size", 4, shared=shared, shared_gate=True)
    bias = "qkv" if x.flag("qkv_bias", default=True) else ""
    on = x.flag("use_sliding_window", default=False)
    first = x.count("max_window_layers", default=28, least=0)
    windows = _windows(x, lambda i: on and i % 2 == 0 and i < first)
    return _decoder(x, _some_dense(x, _heads(x, bias=bias), windows, experts))


def _qwen3_moe(x: Fields) -> Model:
    experts = _experts(x, "moe_intermediate_size", 8)
    on = x.flag("use_sliding_window", default=False)
    windows = _windows(x, lambda i: on)
    heads = _heads(x, bias=_qkvo(x), norms=True)
    return _decoder(x, _some_dense(x, heads, windows, experts))


def _deepseek(x: Fields) -> Model:
    v3 = x.family == "deepseek_v3"
    Hq, rope = x.count("num_attention_heads"), x.count("qk_rope_head_dim", default=64)
    nope = x.count("qk_nope_head_dim", default=128)
    q_rank: int | None = 1536  # transformers' default; null says that there is none
    if "q_lora_rank" in x.given:
        q_rank = x.count("q_lora_rank", default=0) or None
    latent = Latent(x.count("kv_lora_rank", default=512), rope, q_rank)
    attention = Attention(
        Hq,
        Hq,
        nope + rope,
        x.count("v_head_dim", default=128),
        bias=("qko" if q_rank else "ko") if x.flag("attention_bias", default=False) else "",
        latent=latent,
    )
    shared = x.count("n_shared_experts", default=1 if v3 else 2, least=0)
    width = x.count("moe_intermediate_size")
    experts = _experts(x, "moe_intermediate_size", 8, shared=shared * width)
    dense = x.count("first_k_dense_replace", default=3 if v3 else 0, least=0)
    bias = x.flag("mlp_bias", default=False) and not v3
    layers = tuple(
        Layer(attention, x.count("intermediate_size"), bias=bias)
        if i < dense
        else Layer(attention, 0, bias=bias, experts=experts)
        for i in range(x.count("num_hidden_layers"))
    )
    return _decoder(x, layers)


def _gpt_oss(x: Fields) -> Model:
    x = x.with_defaults(head_dim=64, sliding_window=128)
    experts = _experts(x, "intermediate_size", 4, bias=True)
    heads = _heads(x, bias=_qkvo(x, default=True), sinks=True)
    windows = _windows(x, lambda i: i % 2 == 0)
    layers = tuple(Layer(replace(heads, window=w), 0, experts=experts) for w in windows)
    return _decoder(x, layers)


def _gpt2(x: Fields) -> Model:
    H, Hq = x.count("n_embd", "hidden_size"), x.count("n_head", "num_attention_heads")
    if H % Hq:
        x.contradiction(n_embd=H, n_head=Hq)
    _refuse_cross_attention(x)
    attention = Attention(Hq, Hq, H // Hq, H // Hq, bias="qkvo")
    width = x.count("n_inner", default=4 * H)
    n, positions = x.count("n_layer", "num_hidden_layers"), x.count("n_positions", default=1024)
    return Model(
        family=x.family,
        style="gpt2",
        H=H,
        vocab=x.count("vocab_size"),
        layers=(Layer(attention, width, gated=False, bias=True),) * n,
        activation=x.word("activation_function", default="gelu_new"),
        positions=positions,
        tied=x.flag("tie_word_embeddings", default=True),
        dropout=x.number("resid_pdrop", default=0.1) > 0,
        limit=positions,
    )


def _bert(x: Fields) -> Model:
    _refuse_cross_attention(x)
    if x.flag("is_decoder", default=False):
        raise UnsupportedError(
            "A bert that decodes is not known here.",
            {"is_decoder": True},
            "is_decoder false: the encoder.",
        )
    attention = _heads(x.without("num_key_value_heads"), bias="qkvo")
    layer = Layer(attention, x.count("intermediate_size"), gated=False, bias=True)
    positions = x.count("max_position_embeddings", default=512)
    return Model(
        family=x.family,
        style="bert",
        H=x.count("hidden_size"),
        vocab=x.count("vocab_size"),
        layers=(layer,) * x.count("num_hidden_layers"),
        activation=x.word("hidden_act", default="gelu"),
        positions=positions,
        types=x.count("type_vocab_size", default=2),
        causal=False,
        dropout=x.number("hidden_dropout_prob", default=0.1) > 0,
        limit=positions,
        notes=("An encoder: no cache, no logits. Its pooler is counted as head; the head of a "
               "task (masked words, classes) is not.",),
    )  # fmt: skip


def _refuse_cross_attention(x: Fields) -> None:
    if x.flag("add_cross_attention", default=False):
        raise UnsupportedError(
            "Cross-attention is not known here.",
            {"add_cross_attention": True},
            "add_cross_attention false: the model by itself.",
        )


KNOWN: dict[str, Callable[[Fields], Model]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "bert": _bert,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}
