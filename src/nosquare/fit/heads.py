"""Attention of one layer, array by array: projections, rotary positions, cache, the core.

The core is either nosquare's, which adds o, lse and what its tiles take, or transformers' eager
one, which adds repeated keys and values, scores and probabilities. A latent cache (MLA) is
expanded to keys and values by transformers; a paged runtime is taken to absorb the expansion into
the queries at decoding, as the paper describes (DeepSeek-V2, arXiv:2405.04434, section 2.1).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..backends import FORWARD
from ..estimate import contiguous, workspace_bytes
from ..problem import Problem
from .model import Attention, Layer
from .pieces import FLOAT32, INT64, Run, norm
from .tape import ATTENTION, Tape, cache_role

# torch_any works on this many scores at once on a card, 512 rows at a time
# (backends/torch_any/tiling.py)
TILE_ELEMENTS, TILE_ROWS = 1 << 25, 512


def attend(t: Tape, r: Run, layer: Layer, i: int, source: str, out: str) -> None:
    """LlamaAttention and its like: from the normed hidden state to `out`."""
    a = layer.attention
    if a.latent is not None:
        _latent(t, r, a, i, source)
    else:
        _project(t, r, a, source)
        _rotate(t, r, a.A, a.K)
        t.free("q", "k")
        t.renamed("q rotated", "q")
        t.renamed("k rotated", "k")
        if cached(r):
            grow(t, r, a, i, ("k", a.K), ("v", a.Hk * a.E))
            t.free("k", "v")
    core(t, r, a, "q" if a.latent is None else "q whole")
    t.new(out, r.hidden)
    t.keep("o")
    t.free(*(name for name in _LOCAL if name in t.live))


# what the variables of an attention module refer to until it returns
_LOCAL = ("q", "k", "v", "o", "q whole", "q rotated", "k rotated", "narrow kv", "latent")


def absorbed(r: Run, a: Attention) -> bool:
    """Whether the core works on the cached latents themselves, as one key head of their width."""
    return a.latent is not None and r.page > 0 and not (r.training or r.eager) and r.M == 1


def cached(r: Run) -> bool:
    """Whether this forward writes transformers' own cache, array by array."""
    return r.page == 0 and not r.training and r.model.causal


def _project(t: Tape, r: Run, a: Attention, source: str) -> None:
    sizes = {"q": (a.A, a.Hq), "k": (a.K, a.Hk), "v": (a.Hk * a.E, 0)}
    late = r.model.style == "gemma"  # Gemma3Attention makes all three, then norms two
    for name, (width, heads) in sizes.items():
        t.new(name, r.T * width * r.d)
        if a.norms and heads and not late:
            _head_norm(t, r, a, name, heads)
    t.keep(source)
    if a.norms and late:
        _head_norm(t, r, a, "q", a.Hq)
        _head_norm(t, r, a, "k", a.Hk)


def _head_norm(t: Tape, r: Run, a: Attention, name: str, heads: int) -> None:
    norm(t, r, name, "normed heads", r.T * heads, a.D, r.model.style)
    t.free(name)
    t.renamed("normed heads", name)


def _rotate(t: Tape, r: Run, q_width: int, k_width: int) -> None:
    """apply_rotary_pos_emb: q and k stay alive beside "q rotated" and "k rotated"."""
    halves = r.model.family in ("gpt_oss", "deepseek_v3")
    for name, width in (("q", q_width), ("k", k_width)):
        w = r.T * width * r.d
        if halves:  # each half by itself, then put together
            t.new("first", w // 2)
            t.passing("products", w)
            t.new("second", w // 2)
            t.passing("products", w)
            t.new(f"{name} rotated", w)
            t.free("first", "second")
            continue
        t.new("x cos", w)  # x cos + rotate_half(x) sin
        t.new("minus x2", w // 2)
        t.new("turned", w)
        t.free("minus x2")
        t.new("turned sin", w)
        t.free("turned")
        t.new(f"{name} rotated", w)
        t.free("x cos", "turned sin")


def storage(r: Run, a: Attention, past: int, new: int) -> int:
    """Tokens in the array of one sequence once `new` tokens have joined `past`, DynamicCache.

    A sliding layer keeps window - 1 tokens as a view, so the array they were cut from stays.
    """
    if new == 0:
        return 0
    kept = past if a.window is None else min(past, a.window - 1)
    return kept + new


def held_before(r: Run, a: Attention) -> int:
    """Tokens in a layer's arrays before this forward: what the one before it, as long, left."""
    before = min(r.M, r.past)
    return storage(r, a, r.past - before, before)


def grow(t: Tape, r: Run, a: Attention, i: int, *arrays: tuple[str, int]) -> None:
    """DynamicLayer.update: torch.cat makes a new array beside the old one, then lets that go."""
    tokens = r.B * storage(r, a, r.past, r.M)
    sliding = a.window is not None
    for name, width in arrays:
        t.new(f"new {name}", tokens * width * r.d, cache_role(a.kind))
        if not sliding:
            _replace(t, r, i, name)
    if sliding:  # both are made before either old one goes
        for name, _ in arrays:
            _replace(t, r, i, name)


def _replace(t: Tape, r: Run, i: int, name: str) -> None:
    if r.past:
        t.free(f"cached {name} of layer {i}")
    t.renamed(f"new {name}", f"cached {name} of layer {i}")


def _latent(t: Tape, r: Run, a: Attention, i: int, source: str) -> None:
    """DeepseekV3Attention: narrow vectors first, then queries, keys and values of all heads."""
    z = a.latent
    assert z is not None
    if z.q_rank is not None:
        t.new("narrow q", r.T * z.q_rank * r.d)
        norm(t, r, "narrow q", "normed narrow q", r.T, z.q_rank, "llama")
        t.free("narrow q")
        t.keep("normed narrow q")
    t.new("q", r.T * a.A * r.d)
    if z.q_rank is not None:
        t.free("normed narrow q")
    t.new("narrow kv", r.T * (z.rank + z.rope) * r.d)
    norm(t, r, "narrow kv", "latent", r.T, z.rank, "llama")
    t.keep(source)
    if r.model.family == "deepseek_v2":  # complex numbers, in float32
        w = r.T * (a.Hq + 1) * z.rope * FLOAT32
        if r.d != FLOAT32:
            t.new("q and k as complex", w)
        t.passing("products", w)
        t.new("q rotated", r.T * a.Hq * z.rope * r.d)
        t.new("k rotated", r.T * z.rope * r.d)
        if r.d != FLOAT32:
            t.free("q and k as complex")
    else:
        _rotate(t, r, a.Hq * z.rope, z.rope)
    if cached(r):
        grow(t, r, a, i, ("latent", z.rank), ("k rotated", z.rope))
        t.free("latent", "k rotated")
    t.new("q whole", r.T * a.A * r.d)
    if absorbed(r, a):
        t.new("q absorbed", r.T * a.Hq * (z.rank + z.rope) * r.d)
        t.free("q whole")
        t.renamed("q absorbed", "q whole")
    else:  # expand_kv, for every cached token
        tokens = r.B * r.N
        t.new("v", tokens * a.Hq * (a.D - z.rope + a.E) * r.d)  # with k before its rotated part
        t.new("k", tokens * a.A * r.d)
        t.keep("latent")


def core(t: Tape, r: Run, a: Attention, q: str = "q") -> None:
    """From q, k, v to "o", in which the heads of a token lie together."""
    if r.eager:
        _eager(t, r, a, q)
        return
    # q that was put together from parts lies head by head, and so does its o
    parts = a.latent is not None or r.model.family == "gpt_oss"
    o = "o by heads" if parts and r.M > 1 else "o"
    width = a.latent.rank if a.latent is not None and absorbed(r, a) else a.E
    t.new(o, r.T * a.Hq * width * r.d)
    t.new("lse", r.T * a.Hq * FLOAT32, ATTENTION)
    t.passing("tiles", tile_bytes(r, a), ATTENTION)
    t.keep(q, "k", "v", o, "lse")
    t.free("lse")
    if o != "o":
        _copied(t, r, a)


def tile_bytes(r: Run, a: Attention, phase: str = FORWARD) -> int:
    """What attention takes inside at most, beside its results.

    On a CPU, as the backend says that would run it here. On a card, which need not be here:
    nothing to speak of in torch's fused kernels, which serve where there is no window, cap or sink
    and D = E; else torch_any's tiles of scores, q, k, v and o.
    """
    if not r.cuda:
        return _said(_problem(r, a), phase, torch.get_num_threads())
    if phase != FORWARD or not (_windowed(r, a) or a.softcap or a.sinks or a.D != a.E):
        return 0
    scores = min(r.T * a.Hq * seen(r, a), TILE_ELEMENTS)
    return FLOAT32 * (scores + scores * 3 * (a.D + a.E) // TILE_ROWS)


@lru_cache(maxsize=1024)
def _said(p: Problem, phase: str, threads: int) -> int:
    """What the backend says that would run a phase on this CPU, with its threads as they are."""
    return workspace_bytes(p, torch.device("cpu"), phase) or 0


def _problem(r: Run, a: Attention) -> Problem:
    """The problem of one layer, as the adapter of transformers puts it."""
    D, E, Hk = a.D, a.E, a.Hk
    if a.latent is not None and absorbed(r, a):
        D, E, Hk = a.latent.rank + a.latent.rope, a.latent.rank, 1
    mask = "causal(end)" if r.model.causal else "full()"
    if a.window is not None and _windowed(r, a):
        mask += f"&window(before={a.window - 1},after=0)"
    return contiguous(
        {"B": r.B, "Hq": a.Hq, "Hk": Hk, "M": r.M, "N": seen(r, a), "D": D, "E": E},
        torch.float32 if r.d == FLOAT32 else torch.bfloat16,
        mask,
        softcap=1.0 if a.softcap else None,
        sinks=(a.Hq,) if a.sinks else None,
        grads="qkv" if r.training else "",
    )


def _windowed(r: Run, a: Attention) -> bool:
    return a.window is not None and a.window < seen(r, a)


def seen(r: Run, a: Attention) -> int:
    """Keys that the core is given for each sequence."""
    return r.N if a.window is None else min(r.past, a.window - 1) + r.M


def _eager(t: Tape, r: Run, a: Attention, q: str) -> None:
    """eager_attention_forward: the square, several times over, in one layer at a time."""
    keys, d = seen(r, a), r.d
    S = r.B * a.Hq * r.M * keys
    # repeat_kv; a paged cache must be gathered into one array in any case, a latent is expanded
    repeated = a.Hq > a.Hk or (r.page > 0 and r.past > 0 and a.latent is None)
    if repeated:
        t.new("repeated k", r.B * a.Hq * keys * a.D * d, ATTENTION)
        t.new("repeated v", r.B * a.Hq * keys * a.E * d, ATTENTION)
    moved = 0 if r.B == 1 or r.M == 1 or a.latent is not None else r.T * a.A * d
    t.new("q for the product", moved, ATTENTION)
    t.new("scores", S * d, ATTENTION)
    t.free("q for the product")
    # times the scale; over the cap, tanh, times the cap; plus the mask
    if a.softcap:
        t.save("tanh", S * d)
    for _ in range(1 + 3 * a.softcap + r.model.causal):
        t.new("next scores", S * d, ATTENTION)
        t.free("scores")
        t.renamed("next scores", "scores")
    _softmax(t, r, a, S)
    if r.training and r.model.dropout:
        t.save("kept by dropout", S * (1 if r.cuda else d))
        t.save("probabilities that are kept", S * d)
    if a.latent is not None:  # v is a slice of a wider array
        t.new("v for the product", r.B * a.Hq * keys * a.E * d, ATTENTION)
    t.new("o by heads", r.T * a.Hq * a.E * d, ATTENTION)
    if a.latent is not None:
        t.keep("v for the product")
        t.free("v for the product")
    t.keep("probabilities", q)
    if not repeated:
        t.keep(*("kv" if a.latent is None else "k"))
    if r.model.style == "gpt2" and r.M == 1:  # GPT-2 leaves the copy to the reshape that follows
        t.renamed("o by heads", "o")
    else:
        _copied(t, r, a)
    if repeated:
        t.keep("repeated k", "repeated v")
        t.free("repeated k", "repeated v")


def _softmax(t: Tape, r: Run, a: Attention, S: int) -> None:
    """From "scores" to "probabilities", S elements; in float32 where the model wants that."""
    d = r.d
    if a.sinks:  # the sink is one more column; GptOss stays in its own dtype
        rows = r.T * a.Hq
        wider = (S + rows) * d
        t.new("with sink", wider, ATTENTION)
        t.new("row maxima", rows * d, ATTENTION)
        t.save("where they are", rows * INT64)
        t.new("less maxima", wider, ATTENTION)
        t.free("with sink", "row maxima")
        t.new("probabilities", wider, ATTENTION)
        t.free("scores", "less maxima")
        return
    wide = r.model.style not in ("gpt2", "bert") and d != FLOAT32
    if wide:
        t.new("scores32", S * FLOAT32, ATTENTION)
        t.new("probabilities32", S * FLOAT32, ATTENTION)
        t.free("scores32")
    t.new("probabilities", S * d, ATTENTION)
    t.free("scores")
    if wide:
        t.keep("probabilities32")
        t.free("probabilities32")


def _copied(t: Tape, r: Run, a: Attention) -> None:
    """transpose(1, 2).contiguous()."""
    t.new("o", r.T * a.Hq * a.E * r.d)
    t.free("o by heads")
