"""One fresh process: one attention, one measurement, one JSON result.

    python -m nosquare.demo.worker '{"job": "text", "attention": "eager", "context": 4096, ...}'

Lines on standard output are JSON: {"done": fraction, "doing": words} while it works, then one
{"result": ...}. A fresh process is what makes a peak of memory mean something: nothing another
attention left behind is in it.
"""

from __future__ import annotations

import ctypes
import json
import math
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
MIB = 2**20
HEADS_Q, HEADS_K, WIDTH = 9, 3, 64  # SmolLM2's attention, for the single call
SCORED_EVERY = 4  # tokens: scoring all of them takes seconds in every process and says no more
WARM_UP_TOKENS = 256  # for the model
WARM_UP_CONTEXT = 2048  # for the single call
ROWS64 = 128  # query rows the float64 reference holds at once


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.manual_seed(0)
    if "threads" in job:
        torch.set_num_threads(job["threads"])
    jobs: dict[str, Callable[..., dict[str, Any]]] = {
        "text": run_text, "encoder": run_encoder, "call": run_call,
    }  # fmt: skip
    run = jobs[job.pop("job")]
    job.pop("threads", None)
    _say({"result": run(**job)})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _doing(words: str, done: float) -> None:
    _say({"doing": words, "done": done})


# --------------------------------------------------------------------------- memory
class Peak:
    """Highest resident size since start(), above the resident size at start(), in bytes.

    On Linux the kernel's own high-water mark is set back first; elsewhere, or where that is not
    allowed, the mark of the whole process life is used, and how says so.
    """

    def start(self) -> None:
        if sys.platform == "linux":
            # Freed blocks that the allocator keeps would be reused unseen: hand them back.
            getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
        self.how = "kernel high-water mark, set back after warm-up"
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            self.how = "high-water mark of the whole process"
        self.before = _status("VmRSS") or _lifetime_peak()

    def bytes(self) -> int:
        return max(0, (_status("VmHWM") or _lifetime_peak()) - self.before)


def _status(field: str) -> int | None:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _lifetime_peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --------------------------------------------------------------------------- attentions
def _prepare(attention: str) -> str:
    """Register what the name needs; returns the name transformers knows it by."""
    if attention == "nosquare":
        from ..adapters import transformers as adapter

        adapter.register()
    elif attention == "float64":
        import transformers

        # Padding as the small 2-D mask; causality is the module's own.
        from transformers.masking_utils import flash_attention_mask

        transformers.AttentionInterface.register("float64", attention64)
        transformers.AttentionMaskInterface.register("float64", flash_attention_mask)
    return attention


def attention64(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The reference: attention in float64, a block of query rows at a time, so without a square.

    query (B, Hq, M, D), key, value (B, Hk, N, D), attention_mask (B, N) True = a real token or
    None -> (B, M, Hq, D), None in query's dtype. For M = N only.
    """
    batch, heads, M, width = query.shape
    groups = heads // key.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    q = query.double() * (width**-0.5 if scaling is None else scaling)
    causal = getattr(module, "is_causal", False)
    out = torch.empty(batch, M, heads, value.shape[-1], dtype=query.dtype)
    for first in range(0, M, ROWS64):
        last = min(first + ROWS64, M)
        n = last if causal else M
        s = q[:, :, first:last] @ k[:, :, :n].mT
        if causal:
            hidden = torch.arange(n)[None, :] > torch.arange(first, last)[:, None]
            s.masked_fill_(hidden, -math.inf)
        if attention_mask is not None:
            s.masked_fill_(~attention_mask[:, None, None, :n].bool(), -math.inf)
        out[:, first:last] = (torch.softmax(s, -1) @ v[:, :, :n]).transpose(1, 2).to(query.dtype)
    return out, None


def _receipts(log: Any) -> list[dict[str, Any]]:
    """What ran: one entry per operation and backend, with its number of calls."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for receipt in log:
        groups.setdefault((receipt.op, receipt.backend), []).append(receipt)
    return [
        {
            "op": op,
            "backend": backend,
            "calls": len(group),
            "copying": sum(bool(r.copies) for r in group),
            "workspace_bytes": max(r.workspace_bytes or 0 for r in group),
            "first": str(group[0]),
            "last": str(group[-1]),
        }
        for (op, backend), group in groups.items()
    ]


class _Log:
    """nosquare's receipts when nosquare runs; an empty list otherwise."""

    def __init__(self, attention: str) -> None:
        self.attention = attention
        self.entries: list[dict[str, Any]] = []

    def __enter__(self) -> _Log:
        if self.attention == "nosquare":
            import nosquare

            self.context = nosquare.receipts()
            self.log = self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.attention == "nosquare":
            self.context.__exit__(*error)
            self.entries = _receipts(self.log)


# --------------------------------------------------------------------------- jobs
@torch.no_grad()
def run_text(attention: str, context: int, tokens: int) -> dict[str, Any]:
    """SmolLM2 reads `context` tokens of real text, then writes `tokens` more, greedily.

    tokens=0 stops after reading. logprobs: natural log-probability of every SCORED_EVERYth token
    of the text. times in seconds, memory in bytes.
    """
    from transformers import DynamicCache

    from . import models

    _doing("loading the model", 0.0)
    model, tokenizer = models.smollm2(_prepare(attention))
    text, _ = models.real_text()
    ids = tokenizer(text[: 12 * context], return_tensors="pt").input_ids[:, :context]
    assert ids.shape[1] == context, "the text is long enough for every allowed context"
    base, head = model.model, model.lm_head
    _doing("warming up", 0.02)
    cache = DynamicCache(config=model.config)
    base(ids[:, :WARM_UP_TOKENS], past_key_values=cache)
    if tokens:
        base(ids[:, :1], past_key_values=cache)
    cache = DynamicCache(config=model.config)
    hooks = _layer_progress(base.layers, "reading", 0.05, 0.85 if tokens else 1.0)
    peak = Peak()
    peak.start()
    with _Log(attention) as log:
        start = time.perf_counter()
        hidden = base(ids, past_key_values=cache).last_hidden_state
        step = head(hidden[:, -1:]).argmax(-1)
        prefill_s = time.perf_counter() - start
        for hook in hooks:
            hook.remove()
        _keep_freed_blocks()
        written, start = [], time.perf_counter()
        for n in range(tokens):
            written.append(int(step))
            if n + 1 < tokens:
                step = head(base(step, past_key_values=cache).last_hidden_state).argmax(-1)
            if n % 8 == 0:
                _doing("writing", 0.85 + 0.13 * n / tokens)
        generate_s = time.perf_counter() - start
    peak_bytes = peak.bytes()
    return {
        "prefill_s": prefill_s,
        "generate_s": generate_s,
        "peak_bytes": peak_bytes,
        "peak_how": peak.how,
        "cache_bytes": sum(
            x.numel() * x.element_size()
            for layer in cache.layers
            for x in (layer.keys, layer.values)
        ),
        "tokens": written,
        "written": tokenizer.decode(written),
        "logprobs": _logprobs(head, hidden[0], ids[0]),
        "receipts": log.entries,
    }


def _keep_freed_blocks() -> None:
    """From here on glibc keeps what is freed, as it does by default. Giving it back made the peak
    of reading repeatable (see run.py); in writing it would only cost page faults."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # not glibc: nothing was changed there
    for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(option, 1 << 30)


def _layer_progress(layers: Any, words: str, first: float, last: float) -> list[Any]:
    """Report after each layer of the next forward."""

    def report(i: int) -> Callable[..., None]:
        done = first + (last - first) * (i + 1) / len(layers)
        return lambda *_: _doing(words, done)

    return [layer.register_forward_hook(report(i)) for i, layer in enumerate(layers)]


def _logprobs(head: Any, hidden: Tensor, ids: Tensor) -> list[float]:
    """Of every fourth token; in pieces, since all logits at once would be a far larger array than
    any attention's."""
    found: list[float] = []
    for chosen in torch.arange(0, len(ids) - 1, SCORED_EVERY).split(256):
        logits = head(hidden[chosen])
        told = logits.gather(1, ids[chosen + 1, None])[:, 0]
        found += (told - logits.logsumexp(-1)).tolist()
    return found


@torch.no_grad()
def run_encoder(attention: str, paragraphs: int) -> dict[str, Any]:
    """MiniLM embeds a padded batch of real paragraphs. embeddings: unit vectors, (batch, 384)."""
    from . import models

    _doing("loading the model", 0.0)
    model, tokenizer = models.minilm(_prepare(attention))
    text, _ = models.real_text()
    pieces = [p.strip() for p in text.split("\n\n") if 20 < len(p.strip()) < 1500][:paragraphs]
    batch = tokenizer(pieces, padding=True, truncation=True, max_length=256, return_tensors="pt")
    model(**batch)
    peak, times = Peak(), []
    peak.start()
    with _Log(attention) as log:
        for n in range(7):
            start = time.perf_counter()
            hidden = model(**batch).last_hidden_state
            times.append(time.perf_counter() - start)
            _doing("embedding", (n + 1) / 7)
    peak_bytes = peak.bytes()
    real = batch.attention_mask[..., None]
    mean = (hidden * real).sum(1) / real.sum(1)
    return {
        "seconds": sorted(times)[len(times) // 2],
        "peak_bytes": peak_bytes,
        "peak_how": peak.how,
        "lengths": batch.attention_mask.sum(1).tolist(),
        "padded_to": batch.input_ids.shape[1],
        "embeddings": torch.nn.functional.normalize(mean, dim=-1).tolist(),
        "receipts": log.entries,
    }


@torch.no_grad()
def run_call(attention: str, contexts: list[int]) -> dict[str, Any]:
    """One causal attention call at each context, its mask included: extra peak in bytes."""
    calls = {"eager": _eager, "sdpa-mask": _sdpa_mask, "sdpa": _sdpa, "nosquare": _nosquare}
    call, peak, found = calls[attention], Peak(), []
    for n in (min(max(contexts), WARM_UP_CONTEXT), *contexts):
        q = torch.randn(1, HEADS_Q, n, WIDTH)
        k, v = (torch.randn(1, HEADS_K, n, WIDTH) for _ in range(2))
        peak.start()
        out = call(q, k, v)
        found.append(peak.bytes())
        del q, k, v, out
        _doing(f"{n:,} tokens", len(found) / (len(contexts) + 1))
    return {"peak_bytes": found[1:], "peak_how": peak.how}


def _visible(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril_()


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask = torch.zeros(n, n).masked_fill_(~_visible(n), torch.finfo(q.dtype).min)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores + mask
    return torch.softmax(scores, -1) @ v


def _sdpa_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=_visible(q.shape[2]), enable_gqa=True
    )


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def _nosquare(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import nosquare

    return nosquare.attention(q, k, v, mask=nosquare.Causal())


if __name__ == "__main__":
    main()
