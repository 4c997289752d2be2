"""Small models of every family that `nosquare fit` knows, and a count of their live arrays."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import nosquare.adapters.transformers as adapter  # noqa: E402
from nosquare.fit import heads  # noqa: E402
from nosquare.fit.families import model_of  # noqa: E402
from nosquare.fit.model import Model  # noqa: E402


@pytest.fixture
def one_thread_no_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The adapter registered, one thread, and nothing said of what lies inside its operator."""
    adapter.register()
    monkeypatch.setattr(heads, "tile_bytes", lambda *_: 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
WINDOW: dict[str, Any] = {"head_dim": 16, "sliding_window": 96}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 8, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 48, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}  # fmt: skip
# transformers' name of a family -> what is special in its small config
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": WINDOW,
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma2": WINDOW,
    "Gemma3Text": WINDOW,
    "GPT2": {},
    "Bert": {"num_key_value_heads": 8},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "shared_expert_intermediate_size": 80, "use_sliding_window": True, "sliding_window": 96,
        "max_window_layers": 2, **MOE,
    },
    "Qwen3Moe": {"head_dim": 16, "mlp_only_layers": [1], **MOE},
    "DeepseekV3": DEEPSEEK,
    "DeepseekV2": {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"},
    "GptOss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
_CLASSES = {"Bert": "BertModel", "GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def config_of(kind: str, **changes: Any) -> Any:
    """The small config of a family."""
    config = getattr(transformers, f"{kind}Config")
    return config(**{**SIZES, **FAMILIES[kind], **changes})


def raw(config: Any) -> dict[str, Any]:
    """What transformers would save as config.json."""
    return dict(json.loads(config.to_json_string(use_diff=True)))


def real(config: Any, attention: str = "nosquare", dtype: Any = torch.float32) -> Any:
    """The model of transformers, with random weights."""
    kind = type(config).__name__.removesuffix("Config")
    made = getattr(transformers, _CLASSES.get(kind, f"{kind}ForCausalLM"))
    return made._from_config(config, attn_implementation=attention, dtype=dtype)


def ours(config: Any) -> Model:
    """The same model as `nosquare fit` sees it."""
    return model_of(raw(config))


class Live(TorchDispatchMode):
    """Counts the bytes of all arrays that are alive, and their most: an independent witness.

    Every array that an operator returns is counted when it first appears and until Python and
    autograd let it go; `known` arrays (the weights) are not.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        known = [*model.parameters(), *model.buffers()]
        self._known = {x.untyped_storage()._cdata for x in known}
        self._alive: dict[int, int] = {}
        self.bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.see(x)
        return out

    def see(self, x: Any) -> None:
        """Count an array from now on."""
        storage = x.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive or not n_bytes:
            return
        self._alive[key] = n_bytes
        self.bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.bytes -= self._alive.pop(key)


def live_forward_bytes(model: Any, B: int, M: int, past: int = 0) -> int:
    """Most bytes alive during a forward of M tokens after `past` cached ones, weights excluded."""
    model.eval()
    live = Live(model)
    with torch.no_grad():
        if not hasattr(model, "lm_head"):
            with live:
                model(torch.zeros(B, M, dtype=torch.long))
            return live.peak_bytes
        cache = transformers.DynamicCache(config=model.config)
        options = {"past_key_values": cache, "logits_to_keep": 1}
        for n in _steps(past, M):
            model(torch.zeros(B, n, dtype=torch.long), **options)
        with live:
            if past:
                _see_cache(live, cache)
            model(torch.zeros(B, M, dtype=torch.long), **options)
    return live.peak_bytes


def _steps(past: int, M: int) -> list[int]:
    """Forwards that fill a cache with `past` tokens, the last of them of M tokens."""
    return [n for n in (past - min(M, past), min(M, past)) if n]


def _see_cache(live: Live, cache: Any) -> None:
    for layer in cache.layers:
        for name in ("keys", "values"):
            live.see(getattr(layer, name))
