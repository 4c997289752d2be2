"""What the programs are made of: the request, norms, activations, feed-forwards, experts.

Each function writes down, array by array, the code of transformers 5 that its docstring names.
d is the bytes of one element of an activation; x32 an array in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model import Experts, Layer, Model
from .tape import Tape

FLOAT32, INT64 = 4, 8  # bytes


@dataclass(frozen=True)
class Run:
    """One forward of a model: B sequences, M new tokens in each, after `past` that are cached.

    d          bytes of one element of an activation
    eager      transformers' eager attention rather than nosquare's
    page       tokens in a page of the cache; 0: transformers' DynamicCache, one array for the keys
               of a layer and one for its values, copied as they grow
    cuda       on a card rather than a CPU
    optimizer  of training
    """

    model: Model
    B: int
    M: int
    past: int = 0
    d: int = 2
    eager: bool = False
    page: int = 0
    training: bool = False
    cuda: bool = True

    @property
    def T(self) -> int:
        """Tokens of this forward."""
        return self.B * self.M

    @property
    def N(self) -> int:
        """Tokens in a sequence, the cached ones included."""
        return self.past + self.M

    @property
    def hidden(self) -> int:
        """Bytes of one hidden state of all tokens."""
        return self.T * self.model.H * self.d


def norm(t: Tape, r: Run, source: str, out: str, rows: int, width: int, style: str) -> None:
    """A norm over the last axis of `source`, which stays alive.

    LlamaRMSNorm, Gemma2RMSNorm and GptOssRMSNorm compute in float32; nn.LayerNorm is one operator.
    """
    size, statistics = rows * width, rows * FLOAT32
    if style in ("gpt2", "bert"):
        t.new(out, size * r.d)
        statistics = rows * (FLOAT32 if r.cuda else r.d)
        t.passing("mean and deviation", 2 * statistics)
        t.keep(source)
        t.save("mean and deviation", 2 * statistics)
        return
    wide = r.d == FLOAT32  # x.to(float32) is x itself
    x = source if wide else "x32"
    if not wide:
        t.new("x32", size * FLOAT32)
    t.new("squares", size * FLOAT32)
    t.new("variance", statistics)
    t.free("squares")
    t.new("scale", statistics)
    if style == "gemma":  # it gives its variance no name
        t.free("variance")
    t.new("scaled", size * FLOAT32)
    t.keep(x, "scale")
    t.free("scale")
    _free_unless(t, wide, "x32")
    if style == "gemma":  # (x32 * scale) * (1 + weight), then the cast
        t.new("out32", size * FLOAT32)
        t.keep("scaled")
        t.free("scaled")
        t.save("1 + weight", width * FLOAT32)
        if not wide:
            t.new("cast", size * r.d)
            t.free("out32")
        t.renamed("out32" if wide else "cast", out)
        return
    if style == "gpt_oss":  # the weight before the cast
        t.keep("scaled")
        t.new("weighted", size * FLOAT32)
        if not wide:
            t.new(out, size * r.d)
            t.free("weighted")
        else:
            t.renamed("weighted", out)
        t.free("scaled", "variance")
        return
    if not wide:
        t.new("cast", size * r.d)
    t.keep("scaled" if wide else "cast")
    t.new(out, size * r.d)
    t.free("scaled", "variance")
    _free_unless(t, wide, "cast")


def _free_unless(t: Tape, absent: bool, name: str) -> None:
    if not absent:
        t.free(name)


# arrays of the input's size that an activation of ACT2FN holds at most beside it, its result
# included: one for a fused operator; those written in Python make more (activations.py)
_PYTHON = {"gelu_new": 3, "gelu_fast": 4, "quick_gelu": 2}
_SAVED_BY_PYTHON = {"gelu_new": 3, "gelu_fast": 5, "quick_gelu": 1}


def activation(t: Tape, r: Run, source: str, out: str, size: int) -> None:
    """An activation of `size` elements; `source` stays alive."""
    name = r.model.activation
    beside = _PYTHON.get(name, 1)
    for n in range(beside - 1):
        t.new(f"part {n} of {name}", size * r.d)
    t.new(out, size * r.d)
    for n in range(beside - 1):
        t.free(f"part {n} of {name}")
    t.keep(source)
    t.save(f"parts of {name}", _SAVED_BY_PYTHON.get(name, 0) * size * r.d)


def gated(t: Tape, r: Run, source: str, out: str, width: int) -> None:
    """LlamaMLP: down(act(gate(x)) * up(x)); `source` stays alive."""
    inner = r.T * width
    t.new("gate", inner * r.d)
    activation(t, r, "gate", "activated gate", inner)
    t.free("gate")
    t.new("up", inner * r.d)
    t.new("gate x up", inner * r.d)
    t.keep(source, "activated gate", "up", "gate x up")
    t.free("activated gate", "up")
    t.new(out, r.hidden)
    t.free("gate x up")


def feedforward(t: Tape, r: Run, layer: Layer, source: str, out: str) -> None:
    """The feed-forward or the experts of a layer; `source` stays alive."""
    x = layer.experts
    if x is None:
        gated(t, r, source, out, layer.I)
        return
    if r.model.family == "qwen2_moe":  # Qwen2MoeSparseMoeBlock: the shared one first, gated
        gated(t, r, source, "shared", x.shared)
        _route(t, r, x, source)
        _grouped(t, r, x, source, "routed")
        t.new("shared gate", r.T * r.d)
        t.new("gated shared", r.hidden)
        t.keep("shared", "shared gate")
        t.free("shared", "shared gate")
        t.new(out, r.hidden)
        t.free("routed", "gated shared", "router", "chosen")
        return
    _route(t, r, x, source)
    if not x.shared:
        _grouped(t, r, x, source, out)
        t.free("router", "chosen")
        return
    _grouped(t, r, x, source, "routed")  # DeepseekV3MoE
    gated(t, r, source, "shared", x.shared)
    t.new(out, r.hidden)
    t.free("routed", "shared", "router", "chosen")


def _weight_bytes(r: Run) -> int:
    """Bytes of a routing weight: mixtral and deepseek leave them in float32."""
    return r.d if r.model.family in ("qwen2_moe", "qwen3_moe", "gpt_oss") else FLOAT32


def _route(t: Tape, r: Run, x: Experts, source: str) -> None:
    """MixtralTopKRouter and its like: a score of each expert, in float32; the chosen remain."""
    scores, weight = r.T * x.count, _weight_bytes(r)
    deepseek = r.model.family.startswith("deepseek")
    if deepseek and r.d != FLOAT32:
        t.new("x32", r.T * r.model.H * FLOAT32)
        t.new("weight32", x.count * r.model.H * FLOAT32)
    t.new("router", scores * (FLOAT32 if deepseek else r.d))
    if deepseek and r.d != FLOAT32:
        t.keep("x32", "weight32")
        t.free("x32", "weight32")
    t.keep(source)
    t.passing("probabilities of experts", scores * FLOAT32 * (1 if r.d == FLOAT32 else 2))
    if r.model.family != "gpt_oss":  # which has a softmax over the chosen ones alone
        t.save("router's probabilities", scores * FLOAT32)
    if r.model.family in ("mixtral", "deepseek_v3"):  # they divide the weights by their sum
        t.save("sums of the chosen", r.T * FLOAT32)
    t.new("chosen", r.T * x.chosen * (INT64 + weight))


def _grouped(t: Tape, r: Run, x: Experts, source: str, out: str) -> None:
    """grouped_mm_experts_forward: every token once for each expert that it is sent to."""
    S, H, d = r.T * x.chosen, r.model.H, r.d
    weight = _weight_bytes(r)
    t.new("order", S * (2 * INT64 + weight + FLOAT32) + x.count * 2 * FLOAT32)
    t.new("sorted tokens", S * H * d)
    t.new("gate and up", S * 2 * x.width * d)
    if x.bias:
        t.new("biases", S * 2 * x.width * d)
    _apply_gate(t, r, S * x.width)
    t.keep("sorted tokens", "gate and up", "gate x up")
    t.free("gate and up")
    if x.bias:  # the old array is let go when the new one is there
        t.new("biases of down", S * H * d)
        t.free("biases")
    t.new("down", S * H * d)
    t.free("gate x up")
    t.new("weighted", S * H * max(d, weight))
    t.keep("down")
    t.new("inverse order", S * INT64)
    t.new("in order", S * H * max(d, weight))
    t.free("weighted")
    t.new(out, r.hidden)
    if weight > d:
        t.passing("sum in float32", r.T * H * weight)
    twice = r.model.family in ("mixtral", "deepseek_v3", "gpt_oss")
    orders = S * INT64 * (5 if x.bias else 4) + x.count * FLOAT32
    t.save("orders and weights", orders + S * weight * (2 if twice else 1))
    t.free("order", "sorted tokens", "down", "inverse order", "in order")
    if x.bias:
        t.free("biases of down")


def _apply_gate(t: Tape, r: Run, inner: int) -> None:
    """act(gate) * up; GptOssExperts clamps both halves and has an activation of its own."""
    if r.model.family == "gpt_oss":
        inside = ("gate", "up", "sigmoid", "gate x sigmoid")
        for name in inside:
            t.new(name, inner * r.d)
        t.keep(*inside)
        t.new("gate x up", inner * r.d)
        t.free(*inside)
        return
    t.new("activated gate", inner * r.d)
    t.new("gate x up", inner * r.d)
    t.keep("activated gate")
    t.free("activated gate")
