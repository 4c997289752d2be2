"""The one door to the backends: decide, launch, note. And the operators that tracers see.

torch.compile and torch.export see torch.ops.nosquare.forward and .backward, with fakes and a first
derivative; eager calls enter through autograd.py, and both end in run_forward and run_backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .backends import BACKWARD, BACKWARD_LSE, FORWARD, Choice, Grads, choose
from .inputs import Inputs, Spec
from .measure import confirmed, watched
from .problem import Problem, offset
from .receipt import LOGS, Receipt, note, versions

LETTERS = "qkvbs"  # q, k, v, bias, sinks: the inputs that have gradients
_DECISIONS: dict[Any, tuple[Problem, Choice]] = {}
_KEPT_DECISIONS = 4096


def run_forward(spec: Spec, x: Inputs, grads: str) -> tuple[Tensor, Tensor]:
    """Decide (one look-up when warm), launch, note. Raises ArgumentError and UnsupportedError."""
    problem, choice = decide(spec, x, FORWARD, grads)
    if LOGS:
        o, lse, _ = _noted(
            *(FORWARD, problem, choice, x),
            lambda: choice.backend.forward(problem, choice.plan, x),
        )
    else:
        o, lse, _ = choice.backend.forward(problem, choice.plan, x)
    return o, lse


def run_backward(
    spec: Spec,
    x: Inputs,
    grads: str,
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
) -> Grads:
    """Gradients of q, k, v, bias, sinks; None where `grads` does not want one.

    saved (o, lse) as forward gave them; cotangents (do, dlse), either may be None
    """
    phase = BACKWARD if cotangents[1] is None else BACKWARD_LSE
    problem, choice = decide(spec, x, phase, grads)
    out: Grads
    backward = choice.backend.backward
    if LOGS:
        out, _ = _noted(
            *(BACKWARD, problem, choice, x),
            lambda: backward(problem, choice.plan, x, saved, cotangents),
        )
    else:
        out, _ = backward(problem, choice.plan, x, saved, cotangents)
    return out


def decide(spec: Spec, x: Inputs, phase: str, grads: str) -> tuple[Problem, Choice]:
    """The checked problem and who runs it; remembered by the form of the call."""
    q, k, v = x.q, x.k, x.v
    form = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype
    # plans on a CPU share the work among torch's threads
    where = q.device, k.device, v.device, torch.get_num_threads()
    key: tuple[Any, ...] = (spec, phase, grads, form, where)
    if q.is_cuda:  # vector loads need 16 bytes; a CPU does not care
        key += (offset(q), offset(k), offset(v))
    if not (x.bias is x.sinks is x.alibi is x.seed is x.cu_q is x.cu_k is None):
        for i, t in enumerate(x[3:9]):
            if t is not None:
                key += (i, t.shape, t.stride(), t.dtype, t.device)
    for t in x.arrays:
        key += (t.shape, t.device)
    hit = _DECISIONS.get(key)
    if hit is None:
        problem = Problem.of(x, spec, grads)
        hit = problem, choose(problem, phase, spec.backend)
        if len(_DECISIONS) >= _KEPT_DECISIONS:
            _DECISIONS.clear()
        _DECISIONS[key] = hit
    return hit


def wanted(x: Inputs) -> str:
    """Letters of the inputs that require a gradient, none where gradients are off."""
    if not torch.is_grad_enabled():
        return ""
    # spelt out, and not a generator: this is on the path of every call
    letters = "q" if x.q.requires_grad else ""
    if x.k.requires_grad:
        letters += "k"
    if x.v.requires_grad:
        letters += "v"
    if x.bias is not None and x.bias.requires_grad:
        letters += "b"
    if x.sinks is not None and x.sinks.requires_grad:
        letters += "s"
    return letters


def _noted(op: str, problem: Problem, choice: Choice, x: Inputs, launch: Callable[[], Any]) -> Any:
    """What `launch` gives, with a receipt in every open log. It gives what ran last of all."""
    out, sight = watched(launch, problem.device)
    ran = out[-1]
    receipt = Receipt(
        op,
        problem,
        choice.name,
        str(choice.plan),
        ran.kernels,
        ran.workspace_bytes,
        ran.copies,
        choice.refusals,
        versions(ran.kernels),
    )
    note(receipt if sight is None else confirmed(receipt, sight, x.arrays))
    return out


# ---- what tracers see ---------------------------------------------------------------------------

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? alibi, Tensor? seed, "
    "Tensor? cu_q, Tensor? cu_k, Tensor[] arrays"
)
_SPEC = (
    "str mask, float? scale, float? softcap, float p, int[] offsets, str? backend, "
    "bool deterministic, bool batch_invariant, bool exact_delta, str grads"
)
_LIBRARY = torch.library.Library("nosquare", "DEF")
_LIBRARY.define(f"forward({_TENSORS}, {_SPEC}) -> (Tensor o, Tensor lse)")
_LIBRARY.define(
    f"backward(Tensor o, Tensor lse, Tensor? do, Tensor? dlse, {_TENSORS}, {_SPEC}) -> Tensor[]"
)


def _unpack(args: tuple[Any, ...]) -> tuple[Spec, Inputs, str]:
    """The arguments of the schema as Spec, Inputs and the letters of the wanted gradients."""
    tensors, arrays, words = args[:9], args[9], args[10:]
    spec = Spec._make((*words[:4], tuple(words[4]), *words[5:9]))
    return spec, Inputs._make((*tensors, tuple(arrays))), words[9]


def _forward_op(*args: Any) -> tuple[Tensor, Tensor]:
    o, lse = run_forward(*_unpack(args))
    return o, lse.contiguous()  # the layout that the fake promises


def _backward_op(o: Tensor, lse: Tensor, do: Any, dlse: Any, *args: Any) -> list[Tensor]:
    spec, x, grads = _unpack(args)
    found = run_backward(spec, x, grads, (o, lse), (do, dlse))
    return [g.contiguous() for g in found if g is not None]  # the layout that the fake promises


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    spec, x, grads = _unpack(args)
    p = Problem.of(x, spec, grads)
    return p.empty_o(), x.q.new_empty(p.lse_shape, dtype=p.lse_dtype)


def _backward_fake(o: Tensor, lse: Tensor, do: Any, dlse: Any, *args: Any) -> list[Tensor]:
    _, x, grads = _unpack(args)
    return [
        t.new_empty(t.shape)
        for c, t in zip(LETTERS, x[:5], strict=True)
        if c in grads and t is not None
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.words, ctx.arrays = inputs[10:], len(inputs[9])
    ctx.save_for_backward(*output, *inputs[:9], *inputs[9])


def _op_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    o, lse, *tensors = ctx.saved_tensors
    grads = "".join(c for c, need in zip(LETTERS, ctx.needs_input_grad[:5], strict=True) if need)
    found: list[Tensor] = []
    if grads and not (do is None and dlse is None):
        arrays = tensors[9:]
        found = torch.ops.nosquare.backward(
            o, lse, do, dlse, *tensors[:9], arrays, *ctx.words[:-1], grads
        )
    spread = dict(zip(grads, found, strict=False))
    nothing = (None,) * len(ctx.words)
    return (*(spread.get(c) for c in LETTERS), *(None,) * 4, [None] * ctx.arrays, *nothing)


_LIBRARY.impl("forward", _forward_op, "CompositeExplicitAutograd")
_LIBRARY.impl("backward", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("nosquare::forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("nosquare::backward", _backward_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "nosquare::forward", _op_backward, setup_context=_setup_context, lib=_LIBRARY
)
