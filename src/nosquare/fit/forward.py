"""A forward of a model of transformers 5, array by array: what coexists, and when it is most.

The programs are those of modeling_llama.py (and mistral, qwen, mixtral, deepseek, gpt_oss, which
share its shape), modeling_gemma2/3.py, modeling_gpt2.py and modeling_bert.py. A line here is a line
there; tests/test_fit_forward.py runs the real modules and counts their arrays.

Python keeps more alive than the mathematics needs: the caller of a layer holds its input until the
layer returns, the model holds the embeddings to the end, and eager attention's probabilities live
until their layer returns.
"""

from __future__ import annotations

from .heads import attend, cached, core, grow, held_before, seen
from .model import Layer
from .pieces import FLOAT32, INT64, Run, activation, feedforward, norm
from .tape import ATTENTION, LOGITS, Tape, cache_role


def forward(r: Run) -> Tape:
    """The tape of one forward, up to its logits. In training, without the loss."""
    t = Tape(r.training)
    _cache_before(t, r)
    _start(t, r)
    layer = {"gpt2": _gpt2_layer, "bert": _bert_layer}.get(r.model.style, _layer)
    for i, each in enumerate(r.model.layers):
        t.mark()
        layer(t, r, each, i)
        t.renamed("layer output", "layer input")
    t.mark()
    _finish(t, r)
    return t


def _cache_before(t: Tape, r: Run) -> None:
    if not cached(r) or not r.past:
        return
    for i, layer in enumerate(r.model.layers):
        a = layer.attention
        tokens = r.B * held_before(r, a) * r.d
        widths = {"k": a.K, "v": a.Hk * a.E}
        if a.latent is not None:
            widths = {"latent": a.latent.rank, "k rotated": a.latent.rope}
        for name, width in widths.items():
            t.new(f"cached {name} of layer {i}", tokens * width, cache_role(a.kind))


def _start(t: Tape, r: Run) -> None:
    """Token ids (the caller's), embeddings, positions, masks: alive to the end."""
    m = r.model
    t.new("token ids", r.T * INT64)
    if m.style == "bert":
        for name in ("words", "types", "words and types"):
            t.new(name, r.hidden)
        t.new("position embeddings", r.M * m.H * r.d)
        t.new("sum of embeddings", r.hidden)
        t.save("type ids", r.M * INT64)
        t.free("words and types")
        norm(t, r, "sum of embeddings", "embeddings", r.T, m.H, "bert")
        t.free("words", "types", "position embeddings", "sum of embeddings")
        _drop(t, r, "embeddings")
        t.new("layer input", 0)  # the embeddings themselves
        return
    if m.style == "gemma":  # scaled
        t.new("raw embeddings", r.hidden)
        t.new("embeddings", r.hidden)
        t.free("raw embeddings")
    else:
        t.new("embeddings", r.hidden)
    t.new("position ids", r.M * INT64)
    if m.style == "gpt2":
        t.keep("position ids")
        t.new("position embeddings", r.M * m.H * r.d)
        t.new("layer input", r.hidden)
        _drop(t, r, "layer input")
    else:
        t.new("layer input", 0)  # the embeddings themselves
        if r.d == FLOAT32:
            t.keep("embeddings")
    if r.eager:
        _masks(t, r)
    if m.style != "gpt2":
        t.new("cosines and sines", _table_bytes(r))
        t.keep("cosines and sines")


def _masks(t: Tape, r: Run) -> None:
    """eager_mask: squares of booleans, then one of numbers for each sequence."""
    attentions = [layer.attention for layer in r.model.layers]
    full = next((a for a in attentions if a.window is None), None)
    sliding = next((a for a in attentions if a.window is not None), None)
    if r.model.style == "gemma" or r.model.family in ("gpt_oss", "qwen2_moe"):  # always both
        full, sliding = full or attentions[0], sliding or attentions[0]
    elif r.model.family in ("qwen2", "qwen3"):
        full = full or attentions[0]
    for name, a, squares in (("full", full, 1), ("sliding", sliding, 3)):
        if a is None:
            continue
        pairs = r.M * seen(r, a)
        t.new("which are visible", squares * pairs, ATTENTION)
        t.new(f"mask, {name}", r.B * pairs * r.d, ATTENTION)
        t.free("which are visible")


def _table_bytes(r: Run) -> int:
    """Cosines and sines of the positions: one set for each kind of layer in gemma3."""
    m, a = r.model, r.model.layers[0].attention
    if m.family == "deepseek_v2":  # complex numbers, of float32
        assert a.latent is not None
        return r.M * a.latent.rope * FLOAT32
    width = a.D if a.latent is None else a.latent.rope
    width = width // 2 if m.family == "gpt_oss" else width
    sets = len(m.kinds()) if m.family == "gemma3_text" else 1
    return sets * 2 * r.M * width * r.d


def _layer(t: Tape, r: Run, layer: Layer, i: int) -> None:
    """LlamaDecoderLayer; gemma norms what attention and feed-forward give, too."""
    m, style = r.model, "gpt_oss" if r.model.family == "gpt_oss" else r.model.style
    norm(t, r, "layer input", "normed", r.T, m.H, style)
    attend(t, r, layer, i, "normed", "attended")
    t.free("normed")
    if style == "gemma":
        norm(t, r, "attended", "normed attended", r.T, m.H, style)
        t.free("attended")
        t.renamed("normed attended", "attended")
    t.new("middle", r.hidden)
    t.free("attended")
    t.mark()
    norm(t, r, "middle", "normed", r.T, m.H, style)
    feedforward(t, r, layer, "normed", "fed")
    t.free("normed")
    if style == "gemma":
        norm(t, r, "fed", "normed fed", r.T, m.H, style)
        t.free("fed")
        t.renamed("normed fed", "fed")
    t.new("layer output", r.hidden)
    t.free("fed", "middle")
    _end(t)


def _end(t: Tape) -> None:
    """A layer returns: its input goes, and eager attention's probabilities."""
    t.free("layer input")
    if "probabilities" in t.live:
        t.free("probabilities")


def _gpt2_layer(t: Tape, r: Run, layer: Layer, i: int) -> None:
    """GPT2Block: one projection for q, k and v; attention's output lives to the end."""
    m, a = r.model, layer.attention
    norm(t, r, "layer input", "normed", r.T, m.H, "gpt2")
    t.new("q", 3 * r.T * a.A * r.d)  # k and v are views of it
    t.new("k", 0)
    t.new("v", 0)
    t.keep("normed")
    if cached(r):
        grow(t, r, a, i, ("k", a.K), ("v", a.K))
    core(t, r, a)
    t.new("attended", r.hidden)
    t.keep("o")
    t.free("q", "k", "v", "o")
    _drop(t, r, "attended")
    t.new("middle", r.hidden)
    t.free("normed")
    t.mark()
    norm(t, r, "middle", "normed", r.T, m.H, "gpt2")
    _plain(t, r, "normed", layer.I)
    t.new("fed", r.hidden)
    t.free("inner")
    _drop(t, r, "fed")
    t.new("layer output", r.hidden)
    t.free("normed", "fed", "middle", "attended")
    _end(t)


def _bert_layer(t: Tape, r: Run, layer: Layer, i: int) -> None:
    """BertLayer: norms after the sums."""
    m, a = r.model, layer.attention
    for name in ("q", "k", "v"):
        t.new(name, r.T * a.A * r.d)
    t.keep("layer input")
    core(t, r, a)
    t.free("q", "k", "v")
    t.new("attended", r.hidden)
    t.keep("o")
    _drop(t, r, "attended")
    t.new("sum", r.hidden)
    norm(t, r, "sum", "middle", r.T, m.H, "bert")
    t.free("sum", "attended", "o")
    t.mark()
    _plain(t, r, "middle", layer.I)
    t.new("fed", r.hidden)
    _drop(t, r, "fed")
    t.new("sum", r.hidden)
    norm(t, r, "sum", "layer output", r.T, m.H, "bert")
    t.free("sum", "fed", "inner", "middle")
    _end(t)


def _plain(t: Tape, r: Run, source: str, width: int) -> None:
    """act(up(x)), named "inner"."""
    t.new("up", r.T * width * r.d)
    t.keep(source)
    activation(t, r, "up", "inner", r.T * width)
    t.free("up")
    t.keep("inner")


def _drop(t: Tape, r: Run, name: str) -> None:
    """nn.Dropout in training: which are kept is a boolean on a card, a number on a CPU."""
    if not (r.training and r.model.dropout):
        return
    t.save("kept by dropout", r.hidden // r.d * (1 if r.cuda else r.d))
    t.new("dropped", r.hidden)
    t.free(name)
    t.renamed("dropped", name)


def _finish(t: Tape, r: Run) -> None:
    """The last norm, then the logits: of every token in training, else of the last of each."""
    m = r.model
    if not m.causal:  # the pooler reads one token of each sequence
        if r.training:
            t.free("layer input")
        return
    style = "gpt_oss" if m.family == "gpt_oss" else m.style
    norm(t, r, "layer input", "last hidden", r.T, m.H, style)
    t.keep("last hidden")
    t.free("layer input")
    for name in [n for n in t.live if n.startswith(("mask", "position", "cosines", "embeddings"))]:
        t.free(name)
    logits = r.B * (r.M if r.training else 1) * m.vocab * r.d
    t.new("logits", logits, LOGITS)
    if m.gpus > 1:  # every GPU gets all of them
        t.new("all logits", logits * m.gpus, LOGITS)
        t.free("logits")
        t.renamed("all logits", "logits")
    if m.logit_cap:
        t.save("tanh", t.live["logits"].bytes)
    for _ in range(3 if m.logit_cap else 0):  # over the cap, tanh, times the cap
        t.new("capped", t.live["logits"].bytes, LOGITS)
        t.free("logits")
        t.renamed("capped", "logits")
