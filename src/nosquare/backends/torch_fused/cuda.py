"""torch's fused kernels for NVIDIA and AMD cards: cuDNN, FlashAttention-2, memory-efficient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...inputs import Inputs
from ...problem import Problem
from ...receipt import Ran
from .. import FORWARD, Grads

if TYPE_CHECKING:
    from . import Plan

CUDNN, FLASH, EFFICIENT = "cuDNN attention", "flash attention", "memory-efficient attention"
MOST_BLOCKS, MOST_STRIDE = 2**16 - 1, 2**31 - 1  # of a CUDA grid's second and third axis; of an int
WIDE_CUDNN = 91900  # the version that was seen right for D up to 256, and 1.4 to 2.2 times as fast
_aten: Any = torch.ops.aten


def _shared(p: Problem, phase: str) -> list[str]:
    """What none of the three does within the contract."""
    why = []
    if p.bias is not None:
        # seen on an H200 with torch 2.11: wrong by 0.2 when the first block of a bias is finfo.min,
        # an error when the bias broadcasts along its last axis
        why.append("its bias is wrong or refused for some values and strides")
    if len(p.batch) > 1:
        why.append("it takes one batch axis")
    for name, strides in zip("qkv", p.strides, strict=True):
        # a view that is off by a few bytes is a misaligned address there, and the process is lost;
        # stride 0 has given wrong results
        if any(s % (16 // p.dtype.itemsize) for s in strides[:-1]) or 0 in strides:
            why.append(f"{name} is expanded, or its rows do not start at multiples of 16 bytes")
    if p.aligned is False:
        why.append("q, k or v does not start at a multiple of 16 bytes")
    if p.D % 8:
        why.append("D is not a multiple of 8")
    if p.deterministic and phase != FORWARD:
        why.append("its backward is deterministic only by a setting of the whole process")
    if p.mask == "causal(start)" and p.M != p.N:
        why.append("causal(start) with M != N")
    return why


def _grid(p: Problem) -> list[str]:
    if max(p.B, p.Hq) <= MOST_BLOCKS:
        return []
    # seen on an H200 with torch 2.11: "invalid argument"
    return [f"more than {MOST_BLOCKS:,} batch entries or heads"]


def _flash(p: Problem, phase: str) -> list[str]:
    return _half(p, phase) + _grid(p)


def _half(p: Problem, phase: str) -> list[str]:
    why = _shared(p, phase)
    if p.dtype not in (torch.bfloat16, torch.float16):
        why.append("bfloat16 and float16 only")
    if p.D > 256:
        why.append("D is at most 256")
    return why


def _cudnn(p: Problem, phase: str) -> list[str]:
    why = _half(p, phase)
    if p.D > 128 and (torch.backends.cudnn.version() or 0) < WIDE_CUDNN:
        why.append("D is at most 128 before cuDNN 9.19")
    if phase != FORWARD and (p.M % 128 or p.N % 128):
        # seen on an H200 with cuDNN 9: where a row's lse is below -88.7, what it pads a tile with
        # becomes exp(-lse) = inf, and the gradients NaN (pytorch/pytorch#196678)
        why.append("its backward can give NaN when M or N is not a multiple of 128")
    if torch.version.hip or torch.cuda.get_device_capability(p.device)[0] < 9:
        why.append("slower than flash attention before sm_90")
    if not torch.backends.cudnn.is_available():
        why.append("there is no cuDNN")
    return why


def _efficient(p: Problem, phase: str) -> list[str]:
    why = _shared(p, phase) + _grid(p)
    if p.dtype != torch.float32:
        # its 16-bit backward has read o with the wrong strides; flash attention serves those
        why.append("float32 only")
    if p.G > 1:
        why.append("it has no grouped heads")
    if any(s > MOST_STRIDE for strides in p.strides for s in strides):
        why.append("its strides are 32-bit integers")
    return why


ENGINES: dict[str, Callable[[Problem, str], list[str]]] = {
    CUDNN: _cudnn,
    FLASH: _flash,
    EFFICIENT: _efficient,
}


def forward(p: Problem, plan: Plan, x: Inputs) -> tuple[Tensor, Tensor, Ran]:
    """o in the promised memory order, lse contiguous."""
    q, k, v = _flat(p, x)
    if plan.engine == FLASH:
        o, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, plan.causal, False, scale=p.scale
        )
    elif plan.engine == CUDNN:
        o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, plan.causal, False, scale=p.scale
        )
    else:
        o, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, plan.causal, scale=p.scale
        )
        lse = lse[..., : p.M]  # it comes padded to whole tiles
    o = p.promised(o.reshape(p.o_shape))
    return o, lse.reshape(p.lse_shape).contiguous(), Ran((plan.engine,), None)


def backward(
    p: Problem, plan: Plan, x: Inputs, saved: tuple[Tensor, Tensor], do: Tensor
) -> tuple[Grads, Ran]:
    """Gradients of q, k and v."""
    q, k, v = _flat(p, x)
    o, lse = saved[0].reshape(q.shape), saved[1].reshape(q.shape[:-1])
    # in the memory order of o: seen on an H200 with torch 2.11, cuDNN reads others as if they were
    # that, and an address off by an element ends the process
    do = p.promised(do.reshape(p.o_shape)).reshape(q.shape)
    if do.data_ptr() % 16:
        do = do.clone()
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # dropout's state: there is none
    if plan.engine == FLASH:
        grads = _aten._scaled_dot_product_flash_attention_backward(
            *(do, q, k, v, o, lse, None, None, p.M, p.N, 0.0, plan.causal, unused, unused),
            scale=p.scale,
        )
    elif plan.engine == CUDNN:
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *(do, q, k, v, o, lse.unsqueeze(-1), unused, unused, None, None, None, p.M, p.N),
            *(0.0, plan.causal),
            scale=p.scale,
        )
    else:
        lse = torch.nn.functional.pad(lse, (0, -p.M % 32))
        do, o = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (do, o))  # its own order
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            *(do, q, k, v, None, o, lse, unused, unused, 0.0, [True, True, True, False]),
            plan.causal,
            scale=p.scale,
        )
    given = (x.q, x.k, x.v)
    out = [
        g.reshape(t.shape) if name in p.grads else None
        for name, g, t in zip("qkv", grads, given, strict=False)
    ]
    return (*out, None, None), Ran((f"{plan.engine} backward",), None)


def _flat(p: Problem, x: Inputs) -> list[Tensor]:
    return [t.reshape(p.B, *t.shape[-3:]) for t in (x.q, x.k, x.v)]
