"""`nosquare fit` against torch.cuda.max_memory_allocated, within 5%: a model of 1.7 billion
parameters with random weights.

    pytest tests/test_gpu_fit.py -m gpu -s

prints what was predicted line by line, and what was measured; and what the process takes besides
its arrays, which is what the ledger's reserve stands for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import nosquare.adapters.transformers as adapter
from fit_helpers import raw, torch, transformers
from nosquare import fit
from nosquare.fit.ledger import Ledger, ledger
from nosquare.fit.show import NAMES, size

pytestmark = pytest.mark.gpu
WITHIN = 0.05
SIZES: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 65536,
    "max_position_embeddings": 65536,
}  # fmt: skip


@pytest.fixture(scope="module")
def left_bytes() -> int:
    """What a first small model leaves allocated when it has gone: cuBLAS's workspace above all."""
    adapter.register()
    free, total = torch.cuda.mem_get_info()
    small = {**SIZES, "num_hidden_layers": 1, "vocab_size": 512}
    for attention in ("nosquare", "eager"):
        model = made(transformers.LlamaConfig(**small), attention)
        model(torch.zeros(1, 256, dtype=torch.long, device="cuda")).logits.float().sum().backward()
        del model
    gc.collect()
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    left = torch.cuda.memory_allocated()
    besides = total - after - torch.cuda.memory_reserved()
    print(f"\nbesides arrays: {size(besides)} of the card (context, kernels, other processes; "
          f"{size(total - free)} were taken before the first array), and {size(left)} that stay "
          f"allocated; torch {torch.__version__}, transformers {transformers.__version__}, "
          f"{torch.cuda.get_device_name()}")  # fmt: skip
    return left


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def made(config: Any, attention: str) -> Any:
    """A model with random weights, made on the card in bfloat16."""
    kind = type(config).__name__.removesuffix("Config")
    with torch.device("cuda"):
        return getattr(transformers, f"{kind}ForCausalLM")._from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16
        )


def measured_bytes(config: Any, attention: str, phase: str, context: int, batch: int) -> int:
    """Most bytes that torch had allocated, weights included."""
    model = made(config, attention)
    cache = transformers.DynamicCache(config=config)
    M = 1 if phase == "decode" else context
    ids = torch.zeros(batch, M, dtype=torch.long, device="cuda")
    if phase == "training":
        model.train()
        torch.cuda.reset_peak_memory_stats()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return int(torch.cuda.max_memory_allocated())
    with torch.no_grad():
        if phase == "decode":
            width = config.hidden_size // config.num_attention_heads
            one = torch.zeros((), dtype=torch.bfloat16, device="cuda")
            one = one.expand(batch, config.num_key_value_heads, context - 1, width)
            for i in range(config.num_hidden_layers):
                cache.update(one, one, i)
        torch.cuda.reset_peak_memory_stats()
        model.eval()(ids, past_key_values=cache, logits_to_keep=1)
    return int(torch.cuda.max_memory_allocated())


def compare(
    config: Any, attention: str, phase: str, context: int, batch: int, left: int
) -> tuple[Ledger, float]:
    """The ledger, and predicted over measured; both are printed."""
    q = fit.ask(
        raw(config), "cuda", context=context, concurrency=batch, phase=phase, dtype="bfloat16",
        attention=attention, page=0, optimizer="none", reserve_bytes=left,
    )  # fmt: skip
    account = ledger(q)
    measured = measured_bytes(config, attention, phase, context, batch)
    ratio = account.total_bytes / measured
    print(f"\n{config.model_type} {phase}, {attention}, {batch} x {context:,} tokens")
    for line in account.lines:
        print(f"  {NAMES[line.population]:<24} {line.name:<14} {size(line.bytes):>12}")
    print(f"  predicted {size(account.total_bytes)}, measured {size(measured)}: {ratio:.4f}")
    return account, ratio


@pytest.mark.parametrize(
    ("attention", "phase", "context", "batch"),
    [
        ("nosquare", "prefill", 8192, 4),
        ("nosquare", "decode", 16384, 8),
        ("eager", "prefill", 4096, 2),
        ("eager", "decode", 16384, 8),
        ("nosquare", "training", 2048, 4),
    ],
)
def test_allocated_memory(
    attention: str, phase: str, context: int, batch: int, left_bytes: int
) -> None:
    config = transformers.LlamaConfig(**SIZES)
    _, ratio = compare(config, attention, phase, context, batch, left_bytes)
    assert abs(ratio - 1) <= WITHIN


def test_qwen3_with_norms_over_heads(left_bytes: int) -> None:
    config = transformers.Qwen3Config(**SIZES, head_dim=128)
    _, ratio = compare(config, "nosquare", "prefill", 8192, 4, left_bytes)
    assert abs(ratio - 1) <= WITHIN


def test_windows_take_no_more_than_was_said(left_bytes: int) -> None:
    """Tiles are counted at their most, so this one is a bound."""
    config = transformers.MistralConfig(**SIZES, sliding_window=1024)
    account, ratio = compare(config, "nosquare", "prefill", 8192, 2, left_bytes)
    assert account.elsewhere["attention"] > 0
    assert ratio >= 1 - WITHIN
