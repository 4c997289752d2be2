"""A step of training, array by array: forward with what autograd keeps, loss, backward.

    model(ids, labels=ids, use_cache=False).loss.backward()

without gradient checkpointing; gradients are made anew in each step, zero_grad(set_to_none=True).
The loss is ForCausalLMLoss of transformers: logits in float32, then log_softmax, whose result is
kept. Backward lets go of what a layer kept as it passes, and adds the gradients of its weights.
What is kept is counted array by array; gradients in flight inside a layer are counted where they
are most, which is less exact: tests/test_fit_training.py says by how much.
"""

from __future__ import annotations

from ..backends import BACKWARD
from . import heads
from .forward import forward
from .model import EMBEDDINGS, HEAD, Attention, Layer
from .pieces import FLOAT32, INT64, Run
from .tape import ATTENTION, GRADIENTS, LOGITS, Tape


def training(r: Run, weight_bytes: int) -> Tape:
    """The tape of a whole step; weight_bytes is the size of one element of a weight."""
    t = forward(r)
    if r.model.causal:
        _loss(t, r)
    layers = [sum(r.model.parameters_of(layer).values()) for layer in r.model.layers]
    parameters, matrix = r.model.parameters(), r.model.vocab * r.model.H
    tied = r.model.tied and r.model.causal
    head = matrix if tied else parameters[HEAD]
    t.new("gradients of the head", head * weight_bytes, GRADIENTS)
    t.new("gradient of the hidden state", r.hidden)
    t.passing("gradients of the last norm", 3 * r.T * r.model.H * FLOAT32)  # through the last norm
    t.unwind()
    for i, layer in reversed(list(enumerate(r.model.layers))):
        t.new(f"gradients of layer {i}", layers[i] * weight_bytes, GRADIENTS)
        t.passing("gradients in flight", _feedforward_flight(r, layer))
        t.unwind()
        t.new("tiles", 0 if r.eager else heads.tile_bytes(r, layer.attention, BACKWARD), ATTENTION)
        t.passing("gradients in flight", _attention_flight(r, layer.attention))
        t.free("tiles")
        t.unwind()
    # the tied matrix gets a second gradient, which is then added to the first
    t.new("gradients of the embeddings", parameters[EMBEDDINGS] * weight_bytes, GRADIENTS)
    if tied:
        t.free("gradients of the head")
    return t


def _loss(t: Tape, r: Run) -> None:
    """ForCausalLMLoss and its backward, up to the gradient of the logits."""
    whole = r.T * r.model.vocab * r.model.gpus * FLOAT32
    t.save("labels", r.B * (r.M + 1) * INT64)
    if r.d != FLOAT32:
        t.new("logits in float32", whole, LOGITS)
    t.new("log-softmax", whole, LOGITS)
    if r.d != FLOAT32:
        t.free("logits in float32")
    t.free("logits")  # only the loss is held
    t.new("gradient of log-softmax", whole, LOGITS)
    t.new("gradient in float32", whole, LOGITS)
    t.free("gradient of log-softmax", "log-softmax")
    if r.d != FLOAT32:
        t.new("gradient of the logits", whole // FLOAT32 * r.d, LOGITS)
        t.free("gradient in float32")
        t.renamed("gradient of the logits", "gradient in float32")
    t.passing("gradients of the head", r.model.vocab * r.model.H * r.d + r.hidden)
    t.free("gradient in float32", "last hidden")


def _feedforward_flight(r: Run, layer: Layer) -> int:
    """Gradients inside a feed-forward at once: of the product and of both its factors.

    The product itself has gone by then; the gradient of the layer's output is twice there, as the
    sum passes it to both sides.
    """
    x = layer.experts
    width = layer.I if x is None else x.chosen * (x.width + r.model.H) + x.shared
    return r.T * ((2 if layer.gated else 1) * width + r.model.H) * r.d


def _attention_flight(r: Run, a: Attention) -> int:
    """Gradients inside attention at once; with eager attention, squares of them."""
    if not r.eager:
        return r.T * (a.A + 2 * a.K + a.Hq * a.E + r.model.H) * r.d
    squares = r.B * a.Hq * r.M * r.M
    wide = r.d != FLOAT32 and r.model.style not in ("gpt2", "bert")
    if r.model.dropout:  # what was dropped goes as its gradient comes
        return squares * r.d
    # probabilities that the product kept have gone when the gradients of scores are made
    return squares * (2 * FLOAT32 - r.d if wide else 2 * r.d)
