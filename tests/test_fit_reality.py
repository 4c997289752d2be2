"""`nosquare fit` against the resident memory of real models on this CPU, within 5%.

A fresh process for each, forked before the first operation: warmed up by a small model of the same
kind, then the kernel's high-water mark set back (as bench/memory.py does), the model made, the work
done. So the marks hold weights, cache, activations and logits; what was there before is the
reserve. Sizes are such that a few MiB of noise do not decide. torch 2.13 and transformers 5.23 were
seen to agree within 2%.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fit_helpers import raw, transformers
from nosquare import fit
from nosquare.fit.ledger import Ledger, ledger

SOURCE = Path(__file__).resolve().parents[1] / "src"
MIB = 2**20
WITHIN = 0.05

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.access("/proc/self/clear_refs", os.W_OK),
        reason="this system has no high-water mark that can be set back",
    ),
]

_PROGRAM = """
import ctypes, gc, json, os, re, sys, traceback
os.environ["HF_HUB_OFFLINE"] = "1"
import torch, transformers
import nosquare.adapters.transformers as adapter
adapter.register()
torch.set_num_threads(1)

def status(word):
    return int(re.search(rf"{word}:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def work(kind, made, sizes, attention, B, M, past):
    config = getattr(transformers, kind + "Config")(**sizes)
    model = getattr(transformers, made)._from_config(config, attn_implementation=attention).eval()
    ids = torch.zeros(B, M, dtype=torch.long)
    with torch.no_grad():
        if kind == "Bert":
            return model(ids)
        cache = transformers.DynamicCache(config=config)
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        width = config.hidden_size // config.num_attention_heads
        one = torch.zeros(()).expand(B, heads, past, width)  # takes no memory itself
        for i in range(config.num_hidden_layers if past else 0):
            cache.update(one, one, i)
        return model(ids, past_key_values=cache, logits_to_keep=1)

def child(name, kind, made, sizes, attention, shape):
    B, M, past = shape
    small = {"hidden_size": 128, "n_embd": 128, "num_hidden_layers": 1, "n_layer": 1,
             "num_attention_heads": 2, "n_head": 2, "num_key_value_heads": 1}
    warm = {**sizes, **{k: v for k, v in small.items() if k in sizes}}
    # heads as wide as the model's, and enough tokens to be served by the same kernel: the memory
    # of its compiler is the process's, not the model's
    work(kind, made, warm, attention, 1, min(M, 1024), min(past, 4096))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    work(kind, made, sizes, attention, B, M, past)
    print(json.dumps([name, status("VmHWM") - before]), flush=True)

for job in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child(*job)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(1)
"""

LLAMA = {
    "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192,
    "max_position_embeddings": 65536,
}  # fmt: skip
GPT2 = {"n_embd": 512, "n_layer": 4, "n_head": 8, "n_positions": 4096, "vocab_size": 8192,
        "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
BERT = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "vocab_size": 8192, "max_position_embeddings": 512,
}  # fmt: skip
CASES: dict[str, tuple[str, str, dict[str, Any], str, tuple[int, int, int]]] = {
    "llama prefill": ("Llama", "LlamaForCausalLM", LLAMA, "nosquare", (1, 2048, 0)),
    "llama decode": ("Llama", "LlamaForCausalLM", LLAMA, "nosquare", (2, 1, 16384)),
    "llama eager prefill": ("Llama", "LlamaForCausalLM", LLAMA, "eager", (1, 1536, 0)),
    "llama eager decode": ("Llama", "LlamaForCausalLM", LLAMA, "eager", (2, 1, 16384)),
    "mistral prefill, in tiles": (
        *("Mistral", "MistralForCausalLM", {**LLAMA, "sliding_window": 512}, "nosquare"),
        (1, 2048, 0),
    ),
    "gpt2 prefill": ("GPT2", "GPT2LMHeadModel", GPT2, "nosquare", (2, 1536, 0)),
    "bert": ("Bert", "BertModel", BERT, "nosquare", (8, 512, 0)),
}


@pytest.fixture(scope="module")
def measured_bytes() -> dict[str, int]:
    jobs = [[name, *case] for name, case in CASES.items()]
    # a fixed threshold keeps malloc from holding on to large blocks that were freed
    fixed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    env = {**os.environ, **fixed, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _PROGRAM, json.dumps(jobs)]
    ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(line) for line in ran.stdout.splitlines() if line.startswith("["))


def predicted(name: str) -> Ledger:
    kind, _, config, attention, (B, M, past) = CASES[name]
    saved = raw(getattr(transformers, f"{kind}Config")(**config))
    return ledger(
        fit.ask(
            saved, "cpu", context=past + M, concurrency=B, phase="decode" if past else "prefill",
            dtype="float32", page=0, reserve_bytes=0, attention=attention,
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_resident_memory(name: str, measured_bytes: dict[str, int]) -> None:
    measured, account = measured_bytes[name], predicted(name)
    ratio = account.total_bytes / measured
    told = ", ".join(f"{x.population} {x.name} {x.bytes / MIB:.1f}" for x in account.lines)
    print(f"{name}: {account.total_bytes / MIB:.1f} MiB, measured {measured / MIB:.1f}; {told}")
    assert abs(ratio - 1) <= WITHIN, f"{ratio:.3f}"
