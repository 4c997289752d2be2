"""Eager calls: reverse and forward mode, any order, and vmap.

First derivatives come from the backend's own backward. Everything beyond (gradient of a gradient,
forward mode, their mixtures) is a derivative of torch_any's sum over blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .axes import lay_out_bias, per_head, restore
from .backends import torch_any
from .errors import UnsupportedError
from .inputs import Inputs, Spec
from .measure import confirmed, watched
from .observe import WATCHER
from .ops import LETTERS, run_backward, run_forward, wanted
from .problem import Problem
from .receipt import LOGS, WATCHERS, Receipt, note, versions
from .spelling import parse


def attend(spec: Spec, x: Inputs) -> Tensor:
    """o of one call, by the entrance that fits how it was called."""
    if _traced(x.q) or _transformed():
        return attend_state(spec, x)[0]
    grads = wanted(x)
    if not grads:
        return run_forward(spec, x, "")[0]
    o: Tensor = _apply_eager(spec, grads, x, False, *x[:5])
    return o


def attend_state(spec: Spec, x: Inputs) -> tuple[Tensor, Tensor]:
    """(o, lse) of one call, likewise."""
    if _traced(x.q):
        o, lse = torch.ops.nosquare.forward(*x[:9], list(x.arrays), *spec, wanted(x))
        return o, lse
    if _transformed():
        o, lse = _apply(spec, LETTERS, *x[:9], *x.arrays)
        return o, lse
    grads = wanted(x)
    o, lse = _apply_eager(spec, grads, x, True, *x[:5]) if grads else run_forward(spec, x, "")
    return o, lse.contiguous()


class Attention(torch.autograd.Function):
    """(spec, grads, *Inputs) -> (o, lse)."""

    @staticmethod
    def forward(spec: Spec, grads: str, *tensors: Any) -> tuple[Tensor, Tensor]:
        return run_forward(spec, _inputs(tensors), grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.spec = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[2:], *output)
        if _transformed():
            ctx.save_for_forward(*inputs[2:])
            ctx.layouts = [t.stride() for t in output]

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, o, lse = ctx.saved_tensors
        found = _pull(ctx.spec, ctx.needs_input_grad[2:7], (o, lse), (do, dlse), tensors)
        return (None, None, *found, *(None,) * (len(tensors) - 5))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        x = _inputs(ctx.saved_tensors)
        problem = _higher(x, ctx.spec, "forward derivative")
        arrays = _flat(problem, x)
        moved = _like(arrays, _flat(problem, _five(tangents[2:7]), x))
        program = torch_any.program(problem, x).jvp()
        o, lse = _noted("forward derivative", problem, program, *arrays, *moved)
        o = _laid_out(o.reshape(problem.o_shape), ctx.layouts[0])
        return o, _laid_out(lse.reshape(problem.lse_shape), ctx.layouts[1])

    @staticmethod
    def vmap(info: Any, in_dims: Any, spec: Spec, grads: str, *tensors: Any) -> Any:
        x = _batched(info, in_dims[2:], spec, _inputs(tensors))
        return _apply(spec, grads, *x[:9], *x.arrays), (0, 0)


class EagerAttention(torch.autograd.Function):
    """Attention where no transform is active: (spec, grads, Inputs, state, q, k, v, bias, sinks).

    The same in fewer microseconds: what has no gradient rides in Inputs, nothing is prepared
    for forward mode, and lse is an output only where the state is wanted.
    """

    @staticmethod
    def forward(ctx: Any, spec: Spec, grads: str, x: Inputs, state: bool, *tensors: Any) -> Any:
        o, lse = run_forward(spec, x, grads)
        ctx.set_materialize_grads(False)
        # without q, k, v and bias: hooks on saved tensors would not let go of those
        ctx.call = spec, (*x[5:9], *x.arrays)
        ctx.save_for_backward(*tensors, o, lse)
        return (o, lse) if state else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        *tensors, o, lse = ctx.saved_tensors
        spec, rest = ctx.call
        every = (*tensors, *rest)
        found = _pull(spec, ctx.needs_input_grad[4:9], (o, lse), (do, dlse), every)
        return (*(None,) * 4, *found)


class AttentionBackward(torch.autograd.Function):
    """(spec, grads, o, lse, do, dlse, *Inputs) -> the wanted gradients, in the order of LETTERS.

    o and lse are functions of the inputs; the derivatives below are total ones, so those of o and
    lse are none.
    """

    @staticmethod
    def forward(
        spec: Spec, grads: str, o: Tensor, lse: Tensor, do: Any, dlse: Any, *tensors: Any
    ) -> tuple[Tensor, ...]:
        found = run_backward(spec, _inputs(tensors), grads, (o, lse), (do, dlse))
        return tuple(g for g in found if g is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.spec, ctx.grads = inputs[:2]
        ctx.layouts = [t.stride() for t in output]
        ctx.save_for_backward(*inputs[4:])
        ctx.save_for_forward(*inputs[4:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        do, dlse, *tensors = ctx.saved_tensors
        x = _inputs(tensors)
        problem = _higher(x, ctx.spec, "second derivative")
        arrays = _flat(problem, x)
        given = dict(zip(ctx.grads, cotangents, strict=True))
        pulled = _like(arrays, _flat(problem, _five([given.get(c) for c in LETTERS]), x))
        outer = _cotangents(problem, do, dlse)
        twice = torch_any.program(problem, x).vjp().vjp()
        found = list(_noted("second derivative", problem, twice, *arrays, *outer, *pulled))
        names = [c for c, t in zip(LETTERS, x[:5], strict=True) if t is not None]
        back = {
            c: restore(g if c != "s" else g[..., 0, 0], t.shape, problem.batch)
            for c, g, t in zip(names, found, [t for t in x[:5] if t is not None], strict=False)
        }
        d_do, d_dlse = found[-2:]
        return (
            (None,) * 4
            + (None if do is None else d_do.reshape(do.shape),)
            + (None if dlse is None else d_dlse.reshape(dlse.shape),)
            + tuple(back.get(c) for c in LETTERS)
            + (None,) * (len(tensors) - 5)
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        do, dlse, *tensors = ctx.saved_tensors
        x = _inputs(tensors)
        problem = _higher(x, ctx.spec, "mixed derivative")
        arrays = [*_flat(problem, x), *_cotangents(problem, do, dlse)]
        moved = [
            *_like(arrays, _flat(problem, _five(tangents[6:11]), x)),
            *_cotangents(problem, *tangents[4:6]),
        ]
        program = torch_any.program(problem, x).vjp().jvp()
        out = _noted("mixed derivative", problem, program, *arrays, *moved)
        present = [(c, t) for c, t in zip(LETTERS, x[:5], strict=True) if t is not None]
        moved = [
            restore(g if c != "s" else g[..., 0, 0], t.shape, problem.batch)
            for g, (c, t) in zip(out, present, strict=True)
            if c in ctx.grads
        ]
        return tuple(_laid_out(t, s) for t, s in zip(moved, ctx.layouts, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: Any, spec: Spec, grads: str, *rest: Any) -> Any:
        x = _batched(info, in_dims[6:], spec, _inputs(rest[4:]))
        saved = [
            t if t is None else _front(t, d, info.batch_size)
            for t, d in zip(rest[:4], in_dims[2:6], strict=True)
        ]
        out = _apply_backward(spec, grads, *saved, *x[:9], *x.arrays)
        # bias and sinks were padded with axes of size 1 between the new axis and their own
        shapes = {
            c: _own_shape(t, d)
            for c, t, d in zip(LETTERS, rest[4:9], in_dims[6:11], strict=True)
            if t is not None
        }
        out = tuple(g.reshape(info.batch_size, *shapes[c]) for c, g in zip(grads, out, strict=True))
        return out, (0,) * len(out)


WATCHERS.append(WATCHER)  # a log also hears of attention that is not called through this file
_apply: Callable[..., Any] = Attention.apply
_apply_backward: Callable[..., Any] = AttentionBackward.apply
# the base class's apply: Function.apply only adds, on every call, what transforms need
_apply_eager: Callable[..., Any] = super(torch.autograd.Function, EagerAttention).apply


def _pull(
    spec: Spec,
    needs: tuple[bool, ...],
    saved: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None],
    tensors: Any,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias and sinks, None where `needs` does not ask for one."""
    grads = _letters(needs)
    if not grads or (cotangents[0] is None and cotangents[1] is None):
        return (None,) * 5
    if not (torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()):
        return run_backward(spec, _inputs(tensors), grads, saved, cotangents)
    found = _apply_backward(spec, grads, *saved, *cotangents, *tensors)
    spread = dict(zip(grads, found, strict=True))
    return tuple(spread.get(c) for c in LETTERS)


@cache
def _letters(needs: tuple[bool, ...]) -> str:
    return "".join(c for c, need in zip(LETTERS, needs, strict=True) if need)


def _traced(q: Tensor) -> bool:
    """Whether a tracer or a dispatch mode watches, so that the call must be an operator."""
    return (
        torch.compiler.is_compiling()
        or (type(q) is not Tensor and not isinstance(q, torch.nn.Parameter))
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _transformed() -> bool:
    """Whether a functorch transform or forward mode is active."""
    functorch: bool = torch._C._are_functorch_transforms_active()
    return functorch or torch.autograd.forward_ad._current_level >= 0


def _inputs(tensors: Any) -> Inputs:
    return Inputs._make((*tensors[:9], tuple(tensors[9:])))


def _five(given: Any) -> Inputs:
    """Something given (or None) for each of q, k, v, bias and sinks."""
    return Inputs._make((*given, None, None, None, None, ()))


def _higher(x: Inputs, spec: Spec, what: str) -> Problem:
    """The problem of a higher derivative. torch_any alone has them."""
    problem = Problem.of(x, spec)
    torch_any.refuse_packed(problem)
    if spec.backend not in (None, "torch_any"):
        raise UnsupportedError(
            f"{spec.backend} has no {what}.",
            {"problem": problem.describe(), spec.backend: "first derivatives in reverse mode only"},
            'backend="torch_any", or backend=None.',
        )
    return problem


def _noted(what: str, problem: Problem, program: Callable[..., Any], *arrays: Tensor) -> Any:
    """A higher derivative, with a receipt in every open log."""
    if not LOGS:
        return program(*arrays)
    out, sight = watched(lambda: program(*arrays), problem.device)
    kernels = ("torch rows",)
    plan = f"blocks of {torch_any.higher.block_rows(problem.B * problem.Hq, problem.N)} rows"
    version = versions(kernels)
    receipt = Receipt(what, problem, "torch_any", plan, kernels, 0, version=version)
    note(receipt if sight is None else confirmed(receipt, sight))
    return out


def _flat(p: Problem, x: Inputs, like: Inputs | None = None) -> list[Any]:
    """q, k, v and, where `like` has them, bias and sinks, as torch_any.program takes them."""
    like = like or x
    out: list[Any] = [None if t is None else t.reshape(p.B, *t.shape[-3:]) for t in (x.q, x.k, x.v)]
    if like.bias is not None:
        out.append(None if x.bias is None else lay_out_bias(x.bias, p.batch))
    if like.sinks is not None:
        out.append(None if x.sinks is None else per_head(x.sinks, p.batch, p.Hq))
    return out


def _like(arrays: list[Any], given: list[Any]) -> list[Tensor]:
    """`given`, with zeros for what is absent."""
    pairs = zip(arrays, given, strict=False)
    return [torch.zeros_like(a) if t is None else t for a, t in pairs]


def _cotangents(p: Problem, do: Tensor | None, dlse: Tensor | None) -> list[Tensor]:
    """do (B, Hq, M, E) and dlse (B, Hq, M), zeros where absent."""
    shape = (p.B, p.Hq, p.M)
    return [
        torch.zeros(*shape, p.E, dtype=p.dtype, device=p.device)
        if do is None
        else do.reshape(*shape, p.E),
        torch.zeros(shape, dtype=p.lse_dtype, device=p.device)
        if dlse is None
        else dlse.reshape(shape),
    ]


def _laid_out(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The same numbers in the memory order of `strides`: forward mode wants a tangent laid out in
    memory as its value is."""
    order = sorted(range(t.dim()), key=lambda axis: -strides[axis])
    back = sorted(range(t.dim()), key=order.__getitem__)
    return t.permute(order).contiguous().permute(back)


def _own_shape(t: Tensor, dim: int | None) -> tuple[int, ...]:
    """Shape without the axis that vmap added."""
    shape = list(t.shape)
    if dim is not None:
        shape.pop(dim)
    return tuple(shape)


def _front(t: Tensor, dim: int | None, size: int, width: int = 0) -> Tensor:
    """The vmapped axis first (stride 0 where t has none), then axes of size 1 up to `width`."""
    t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    missing = width - (t.dim() - 1)
    return t if missing <= 0 else t.reshape(size, *(1,) * missing, *t.shape[1:])


def _batched(info: Any, in_dims: Any, spec: Spec, x: Inputs) -> Inputs:
    """The inputs of a vmapped call with the new axis as the first batch axis."""
    if x.cu_q is not None or in_dims[6] is not None:
        raise UnsupportedError(
            "vmap over packed calls or over dropout seeds is not possible.",
            {"packed": x.cu_q is not None, "seed": "batched" if in_dims[6] is not None else "one"},
            "a loop, or a batch axis: attention takes any number of them.",
        )
    if spec.p and info.randomness != "different":
        raise UnsupportedError(
            "Under vmap every entry draws its own dropout mask.",
            {"randomness": info.randomness},
            'torch.vmap(..., randomness="different").',
        )
    size = info.batch_size
    axes = x.q.dim() - (in_dims[0] is not None) - 3  # batch axes before vmap
    kinds = [lay for leaf in parse(spec.mask, x.arrays).leaves for lay in leaf.lay]

    def optional(t: Tensor | None, dim: int | None, width: int) -> Tensor | None:
        return None if t is None else _front(t, dim, size, axes + width)

    arrays = tuple(
        a if d is None else _front(a, d, size, axes + len(lay))
        for a, d, lay in zip(x.arrays, in_dims[9:], kinds, strict=True)
    )
    q, k, v = (_front(t, d, size) for t, d in zip(x[:3], in_dims[:3], strict=True))
    bias, sinks = optional(x.bias, in_dims[3], 3), optional(x.sinks, in_dims[4], 1)
    alibi = optional(x.alibi, in_dims[5], 1)
    return Inputs(q, k, v, bias, sinks, alibi, x.seed, None, None, arrays)
