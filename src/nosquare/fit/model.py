"""A model as memory sees it: sizes of its layers, and how many parameters each part has.

Words: H hidden size, V vocabulary, I width inside a feed-forward, A = Hq D width of all queries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import ArgumentError

# parts of the weights, in the order of the table
EMBEDDINGS, ATTENTION, FEEDFORWARD, EXPERTS, NORMS, HEAD = (
    "embeddings", "attention", "feed-forward", "experts", "norms", "head",
)  # fmt: skip
PARTS = (EMBEDDINGS, ATTENTION, FEEDFORWARD, EXPERTS, NORMS, HEAD)
# what rounding to 8 or 4 bits is for: the large matrices inside the layers
MATRICES = (ATTENTION, FEEDFORWARD, EXPERTS)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): keys and values are made from one narrow vector.

    rank    width of the vector that is cached (kv_lora_rank)
    rope    width of the rotated key that is cached beside it (qk_rope_head_dim)
    q_rank  width of the queries' own vector; None: queries come straight from the hidden state
    """

    rank: int
    rope: int
    q_rank: int | None = None


@dataclass(frozen=True)
class Attention:
    """Attention of one layer.

    Hq, Hk   query and key heads; D width of q and k, E of v
    window   keys that a query sees, its own included; None: all
    bias     which projections have one: letters of "qkvo"
    norms    the weights of norms over heads: 0, or D for each of q and k
    """

    Hq: int
    Hk: int
    D: int
    E: int
    window: int | None = None
    bias: str = ""
    norms: bool = False
    sinks: bool = False
    softcap: bool = False
    latent: Latent | None = None

    @property
    def A(self) -> int:
        """Width of all queries."""
        return self.Hq * self.D

    @property
    def K(self) -> int:
        """Width of all keys."""
        return self.Hk * self.D

    @property
    def cached_width(self) -> int:
        """Elements that one token leaves in the cache of this layer, keys and values together."""
        if self.latent is not None:
            return self.latent.rank + self.latent.rope
        return self.Hk * (self.D + self.E)

    @property
    def kind(self) -> str:
        """Its kind of cache in words."""
        if self.latent is not None:
            return "latent"
        return "full" if self.window is None else f"window {self.window:,}"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of one feed-forward.

    count, chosen   experts there are, and experts a token is sent to; width I of each
    shared          I of the feed-forward that every token passes; 0: none
    shared_gate     it has a gate of its own
    bias            router and experts have biases
    """

    count: int
    chosen: int
    width: int
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Layer:
    """One layer: attention, then a feed-forward of width I, or experts.

    gated  down(act(gate(x)) * up(x)) rather than down(act(up(x)))
    """

    attention: Attention
    I: int
    gated: bool = True
    bias: bool = False
    experts: Experts | None = None


@dataclass(frozen=True)
class Model:
    """A language model, or an encoder.

    style      whose program its forward is: "llama", "gemma", "gpt2", "bert"
    norms      norms in a layer; norm: "rms" (H weights) or "layer" (2 H)
    positions  learned position embeddings; types: learned token types
    tied       the head's matrix is the embeddings'
    causal     writes tokens: has a cache and a head. An encoder has neither
    logit_cap  logits pass tanh: copies of them
    limit      max_position_embeddings
    dtype      what the config says the weights are kept in; "" when it says nothing
    gpus       over how many this is divided; vocab is what one of them holds
    notes      what the user should know about the reading
    """

    family: str
    style: str
    H: int
    vocab: int
    layers: tuple[Layer, ...]
    activation: str = "silu"
    norms: int = 2
    positions: int = 0
    types: int = 0
    tied: bool = False
    causal: bool = True
    logit_cap: bool = False
    dropout: bool = False
    limit: int = 0
    dtype: str = ""
    gpus: int = 1
    notes: tuple[str, ...] = ()

    @property
    def norm_width(self) -> int:
        """Weights of one norm over the hidden state."""
        return self.H if self.style in ("llama", "gemma") else 2 * self.H

    def kinds(self) -> Mapping[str, list[Attention]]:
        """Layers by kind of cache, in the order of first appearance."""
        found: dict[str, list[Attention]] = {}
        for layer in self.layers:
            found.setdefault(layer.attention.kind, []).append(layer.attention)
        return found

    def parameters(self) -> Counter[str]:
        """How many each part has; a tied head counts once, as embeddings."""
        count: Counter[str] = Counter()
        count[EMBEDDINGS] = (self.vocab + self.positions + self.types) * self.H
        for layer in self.layers:
            count.update(self.parameters_of(layer))
        count[NORMS] += self.norm_width  # the last one; of an encoder, that of its embeddings
        if not self.causal:
            count[HEAD] = self.H * self.H + self.H  # the pooler
        elif not self.tied:
            count[HEAD] = self.vocab * self.H
        return count

    def parameters_of(self, layer: Layer) -> Counter[str]:
        """How many each part of one layer has."""
        count: Counter[str] = Counter()
        count[ATTENTION] = _attention(layer.attention, self.H)
        if layer.experts is None:
            count[FEEDFORWARD] = _feedforward(self.H, layer.I, layer.gated, layer.bias)
        else:
            count[EXPERTS] = _experts(self.H, layer)
        count[NORMS] = self.norms * self.norm_width + _inner_norms(layer.attention)
        return count

    def divided(self, gpus: int) -> Model:
        """What one of `gpus` holds under tensor parallelism (Megatron-LM, arXiv:1909.08053).

        Heads, feed-forward widths and the vocabulary are divided; norms, routers, latents and the
        hidden state are not. Fewer key heads than GPUs: each holds one, copies of each other.

        Raises ArgumentError for a number that does not divide the model.
        """
        if gpus == 1:
            return self
        layers = []
        for layer in self.layers:
            a, experts = layer.attention, layer.experts
            even = a.Hq % gpus == 0 and (a.Hk % gpus == 0 or gpus % a.Hk == 0)
            widths = [layer.I] if experts is None else [experts.width, experts.shared]
            if not even or any(width % gpus for width in widths):
                raise ArgumentError(
                    "The model does not divide evenly over so many GPUs.",
                    {"gpus": gpus, "query heads": a.Hq, "key heads": a.Hk,
                     "feed-forward widths": ", ".join(map(str, widths))},
                    "a number that divides the heads and the widths, such as --gpus 2.",
                )  # fmt: skip
            if experts is not None:
                experts = replace(
                    experts, width=experts.width // gpus, shared=experts.shared // gpus
                )
            heads = replace(a, Hq=a.Hq // gpus, Hk=max(a.Hk // gpus, 1))
            layers.append(replace(layer, attention=heads, I=layer.I // gpus, experts=experts))
        vocab = -(-self.vocab // gpus)
        return replace(self, layers=tuple(layers), vocab=vocab, gpus=gpus)


def _attention(a: Attention, H: int) -> int:
    o = a.Hq * a.E
    if a.latent is None:
        widths = {"q": a.A, "k": a.K, "v": a.Hk * a.E, "o": H}
        matrices = H * (a.A + a.K + a.Hk * a.E) + o * H
        return matrices + sum(widths[letter] for letter in a.bias) + a.sinks * a.Hq
    z = a.latent
    down, nope = z.rank + z.rope, a.D - z.rope
    q = H * a.A if z.q_rank is None else H * z.q_rank + z.q_rank * a.A
    count = q + H * down + z.rank * a.Hq * (nope + a.E) + o * H
    # here the biases are those of the down projections and of the output
    widths = {"q": z.q_rank or 0, "k": down, "v": 0, "o": H}
    return count + sum(widths[letter] for letter in a.bias)


def _inner_norms(a: Attention) -> int:
    if a.latent is not None:
        return a.latent.rank + (a.latent.q_rank or 0)
    return 2 * a.D if a.norms else 0


def _feedforward(H: int, width: int, gated: bool, bias: bool) -> int:
    ways = 2 if gated else 1
    return (ways + 1) * H * width + bias * (ways * width + H)


def _experts(H: int, layer: Layer) -> int:
    x = layer.experts
    assert x is not None
    count = x.count * (_feedforward(H, x.width, True, x.bias) + H + x.bias)  # each with its router
    if x.shared:
        count += _feedforward(H, x.shared, True, layer.bias) + x.shared_gate * H
    return count
