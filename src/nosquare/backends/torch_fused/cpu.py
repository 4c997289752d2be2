"""torch's flash attention for CPUs: all dtypes forward, float32 and float64 backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...axes import lay_out_bias
from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from .. import FORWARD, Grads

if TYPE_CHECKING:
    from . import Plan

NAME = "flash attention for CPUs"
KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
# the overload itself: looking it up by its arguments costs microseconds on every call
_backward: Any = getattr(getattr(torch.ops.aten, f"{KERNEL}_backward", None), "default", None)


def refusals(p: Problem, phase: str) -> list[str]:
    """What this engine cannot do, or does outside the contract."""
    why = []
    short = p.dtype in (torch.bfloat16, torch.float16)
    if _backward is None or not hasattr(torch, KERNEL):
        why.append("this torch does not have it")
    if short and phase != FORWARD:
        # measured: the error of dk and dv grows with N; float32 sums are the contract
        why.append(f"it sums gradients in {str(p.dtype).removeprefix('torch.')}")
    if p.bias is not None and short:
        why.append(f"it rounds a bias to {str(p.dtype).removeprefix('torch.')}")
    if p.bias is not None and phase != FORWARD:
        why.append("with a bias, rows that see nothing need care that its backward does not take")
    if len(p.batch) > 1 and not _even(p):
        why.append("the batch axes are not evenly strided")
    return why


ENGINES: dict[str, Callable[[Problem, str], list[str]]] = {NAME: refusals}


def ran(p: Problem, phase: str, fold: bool, keys: int) -> Ran:
    """What the kernel is called, and the memory that it takes inside: as torch's source lays its
    buffers out for the threads that it has now (seen with torch's profiler, tests/test_cost.py)."""
    rows, threads, wide = p.G if fold else p.M, torch.get_num_threads(), p.lse_dtype.itemsize
    tile_m = min(256 if rows >= 768 else 64 if rows >= 192 else 32, rows)
    tile_n = min(512, keys)
    if phase != FORWARD:
        # do, which comes laid out as o does, is copied where tokens do not lie outside heads
        do = 0 if p.token_major or 1 in (p.M, p.Hq) else p.B * p.Hq * p.M * p.E
        buffers = do + 2 * threads * tile_m * tile_n + tile_m
        return Ran((f"{KERNEL}_backward",), wide * buffers)
    tile = wide * (tile_m * tile_n + 2 * tile_m + tile_m * p.E)
    if p.dtype.itemsize < wide:  # weights in the 16-bit type
        tile += p.dtype.itemsize * tile_m * tile_n
    return Ran((KERNEL,), threads * tile)


def forward(p: Problem, plan: Plan, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o in the promised memory order, lse as the kernel lays it out."""
    if plan.direct:
        o, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            x.q, x.k, x.v, 0.0, plan.causal, scale=p.scale
        )
        return o, lse, plan.ran
    q, k, v = _flat(p, plan, x)
    bias = None if x.bias is None else lay_out_bias(x.bias, p.batch).to(p.dtype)
    if bias is not None and bias.shape[-1] > 1:
        bias = bias[..., : plan.keys]
    if plan.fold:
        q = q.reshape(p.B, p.Hk, p.G, p.D)
    o, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, plan.causal, attn_mask=bias, scale=p.scale
    )
    if plan.fold:
        o, lse = o.reshape(p.B, p.Hq, 1, p.E), lse.reshape(p.B, p.Hq, 1)
    if bias is not None:  # the kernel says 0 for a row that sees nothing
        lse = lse.masked_fill(_dead(bias, p.M, plan.causal), float("-inf"))
    if len(p.batch) != 1:
        o = o.reshape(p.o_shape)
    return p.promised(o), lse.reshape(p.lse_shape), plan.ran


def backward(
    p: Problem, plan: Plan, x: Inputs, saved: tuple[Tensor, Tensor], do: Tensor
) -> tuple[Grads, Ran]:
    """Gradients of q, k, v in the layout the kernel gives them."""
    if do.stride(-1) != 1:
        do = do.contiguous()
    if plan.direct:
        grads = _backward(do, x.q, x.k, x.v, *saved, 0.0, plan.causal, scale=p.scale)
        wanted = [g if name in p.grads else None for name, g in zip("qkv", grads, strict=True)]
        return (*wanted, None, None), plan.ran
    q, k, v = _flat(p, plan, x)
    o, lse = saved[0].reshape(q.shape), saved[1].reshape(q.shape[:-1])
    grads = _backward(do.reshape(q.shape), q, k, v, o, lse, 0.0, plan.causal, scale=p.scale)
    out = []
    for name, g, given in zip("qkv", grads, (x.q, x.k, x.v), strict=True):
        if g.shape[-2] != given.shape[-2]:  # keys that nobody sees
            g = torch.nn.functional.pad(g, (0, 0, 0, given.shape[-2] - g.shape[-2]))
        out.append(g.reshape(given.shape) if name in p.grads else None)
    return (*out, None, None), plan.ran


def _dead(bias: Tensor, m: int, causal: bool) -> Tensor:
    """Rows whose bias hides every key that they may see: bool (B | 1, Hq | 1, M | 1)."""
    n = bias.shape[-1]
    if not causal or n == 1:
        return torch.isneginf(bias.amax(-1))
    if bias.shape[-2] > 1:
        above = torch.ones(m, n, dtype=torch.bool, device=bias.device).triu(1)
        return (torch.isneginf(bias) | above).all(-1)
    best = bias[..., 0, :].cummax(-1).values  # over the keys up to each
    return torch.isneginf(best[..., torch.arange(m, device=bias.device).clamp(max=n - 1)])


def _flat(p: Problem, plan: Plan, x: Inputs) -> list[Tensor]:
    """q, k, v with one batch axis, without the keys that nobody sees."""
    q, k, v = x.q, x.k, x.v
    if plan.keys != p.N:
        k, v = k[..., : plan.keys, :], v[..., : plan.keys, :]
    if len(p.batch) == 1:
        return [q, k, v]
    return [t.reshape(p.B, *t.shape[-3:]) for t in (q, k, v)]


def _even(p: Problem) -> bool:
    """Whether the batch axes of q, k and v can be stepped through with one stride each."""
    return all(
        p.batch[a + 1] == 1 or p.batch[a] == 1 or s[a] == s[a + 1] * p.batch[a + 1]
        for s in p.strides
        for a in range(len(p.batch) - 1)
    )
