"""Problem: one attention problem, frozen, checked once at the public edge.

It says everything a backend needs to decide and to plan: sizes, dtype, device, layout, features. It
holds no data, so equal problems share one decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import Inputs, Shape, Spec, check


@dataclass(frozen=True)
class Problem:
    """One attention problem.

    batch   leading axes; packed problems have (B,) sequences, with M and N the total lengths
    strides of q, k, v in elements
    scale   a number, never None
    bias, sinks, alibi   shape of the array, or None where absent
    grads   which of q, k, v, bias, sinks want a gradient: "qkvbs" or part of it; "" for inference

    p, offsets  of dropout
    aligned  q, k and v start at multiples of 16 bytes (looked at on CUDA only)
    """

    batch: Shape
    Hq: int
    Hk: int
    M: int
    N: int
    D: int
    E: int
    dtype: torch.dtype
    device: torch.device
    strides: tuple[Shape, Shape, Shape]
    scale: float
    mask: str = "full()"
    softcap: float | None = None
    bias: Shape | None = None
    sinks: Shape | None = None
    alibi: Shape | None = None
    p: float = 0.0
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0)
    packed: bool = False
    grads: str = ""
    deterministic: bool = False
    batch_invariant: bool = False
    exact_delta: bool = False
    aligned: bool = True

    @property
    def B(self) -> int:
        """Batch entries: the product of the batch axes."""
        return math.prod(self.batch)

    @property
    def G(self) -> int:
        """Query heads that share one key head."""
        return self.Hq // self.Hk if self.Hk else 1

    @property
    def o_shape(self) -> Shape:
        """Shape of o."""
        if self.packed:
            return (self.M, self.Hq, self.E)
        return (*self.batch, self.Hq, self.M, self.E)

    @property
    def lse_shape(self) -> Shape:
        """Shape of lse: that of o without its last axis; packed, (Hq, M)."""
        return (self.Hq, self.M) if self.packed else self.o_shape[:-1]

    @property
    def lse_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def token_major(self) -> bool:
        """Whether q keeps the heads of a token together, (..., M, Hq, D) in memory; o then does."""
        return self.strides[0][-3] < self.strides[0][-2]

    @property
    def dense(self) -> bool:
        """Whether q fills its memory, in one of the two orders that o may have."""
        h, m, width = self.Hq, self.M, self.D
        inner = (width, m * width) if not self.token_major else (h * width, width)
        strides = self.strides[0]
        return (strides[-2], strides[-3]) == inner and strides[-4:-3] in ((), (h * m * width,))

    def empty_o(self) -> Tensor:
        """An empty o in the promised memory order: heads inside tokens where q has it so."""
        if self.packed or not self.token_major:
            return torch.empty(self.o_shape, dtype=self.dtype, device=self.device)
        order = (*self.batch, self.M, self.Hq, self.E)
        return torch.empty(order, dtype=self.dtype, device=self.device).transpose(-2, -3)

    def promised(self, o: Tensor) -> Tensor:
        """o in the promised memory order; a copy only where it has another."""
        if self.packed or not self.token_major:
            return o.contiguous()
        return o.transpose(-2, -3).contiguous().transpose(-2, -3)

    def describe(self) -> str:
        """One line in the letters of the documentation."""
        lead = f"{self.B} packed sequences" if self.packed else f"B={self.B}"
        extras = [
            f"{name}={value}"
            for name, value in (
                ("softcap", self.softcap),
                ("bias", self.bias),
                ("sinks", self.sinks),
                ("alibi", self.alibi),
                ("dropout", self.p or None),
            )
            if value is not None
        ]
        sizes = f"Hq={self.Hq} Hk={self.Hk} M={self.M} N={self.N} D={self.D} E={self.E}"
        dtype = str(self.dtype).removeprefix("torch.")
        want = f" gradients of {self.grads}" if self.grads else ""
        return " ".join([lead, sizes, dtype, str(self.device), f"mask {self.mask}", *extras]) + want

    @staticmethod
    def of(x: Inputs, spec: Spec, grads: str = "") -> Problem:
        """Check a call and describe it. Raises ArgumentError naming what is at fault."""
        batch, _ = check(x, spec)
        q, k, v = x.q, x.k, x.v
        packed = x.cu_q is not None
        (m, hq) = q.shape[:2] if packed else (q.shape[-2], q.shape[-3])
        (n, hk) = k.shape[:2] if packed else (k.shape[-2], k.shape[-3])
        d, e = q.shape[-1], v.shape[-1]
        return Problem(
            batch=batch,
            Hq=hq,
            Hk=hk,
            M=m,
            N=n,
            D=d,
            E=e,
            dtype=q.dtype,
            device=q.device,
            strides=(tuple(q.stride()), tuple(k.stride()), tuple(v.stride())),
            scale=d**-0.5 if spec.scale is None else spec.scale,
            mask=spec.mask,
            softcap=spec.softcap,
            bias=None if x.bias is None else tuple(x.bias.shape),
            sinks=None if x.sinks is None else tuple(x.sinks.shape),
            alibi=None if x.alibi is None else tuple(x.alibi.shape),
            p=spec.p,
            offsets=spec.offsets,
            packed=packed,
            grads=grads,
            deterministic=spec.deterministic,
            batch_invariant=spec.batch_invariant,
            exact_delta=spec.exact_delta,
            aligned=not q.is_cuda or all(offset(t) == 0 for t in (q, k, v)),
        )


def offset(t: Tensor) -> int:
    """Bytes by which an array starts beyond a multiple of 16.

    0 for what has no memory: the stand-in of a transform (vmap, jvp), which no kernel will read.
    """
    try:
        return t.data_ptr() % 16
    except RuntimeError:
        return 0
