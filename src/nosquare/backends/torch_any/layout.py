"""How torch_any sees a problem: views of the user's arrays, outputs, sums of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...axes import lay_out_bias, per_head, restore, varies_partly
from ...bound import Bound, Rectangle
from ...inputs import Inputs, check_offsets
from ...problem import Problem
from ...spelling import parse
from .. import Grads
from .tiling import Plan, plan

if TYPE_CHECKING:
    from .tiles import Tile


@dataclass(frozen=True)
class Work:
    """One problem, or one sequence of a packed one, laid out for tiles.

    q (B, Hq, M, D)  k (B, Hk, N, D)  v (B, Hk, N, E): views in the user's dtype
    bias (B | 1, Hq | 1, M | 1, N | 1)  sinks, alibi (B | 1, Hq, 1, 1): in `dtype`
    dtype   of products and state
    tokens  the rows of q and of k that a packed sequence owns; None when not packed
    """

    problem: Problem
    plan: Plan
    dtype: torch.dtype
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    alibi: Tensor | None
    bound: Bound
    seed: Tensor | None
    offsets: tuple[int, int, int, int]
    copies: tuple[str, ...] = ()
    tokens: tuple[slice, slice] | None = None

    def rows(self, t: Tensor, where: Rectangle) -> Tensor:
        """The queries of a rectangle, (b, h, m, width), of an array (..., Hq, M, width): of q, o,
        do, dq or lse[..., None]; packed arrays come as (Hq, total, width). A view where it can be
        one."""
        i = where.i
        assert isinstance(i, slice)
        if self.tokens is not None and t.dim() == 3:
            return t[where.h, self.tokens[0]][:, i].unsqueeze(0)
        return t.reshape(self.problem.B, *t.shape[-3:])[where.b, where.h, i]

    def keys(self, tile: Tile, j: slice) -> Tensor:
        """k of a tile of keys, (R, n, D) in `dtype`."""
        return self._tile_of(self.k, tile, j)

    def values(self, tile: Tile, j: slice) -> Tensor:
        """v of a tile of keys, (R, n, E) in `dtype`."""
        return self._tile_of(self.v, tile, j)

    def _tile_of(self, t: Tensor, tile: Tile, j: slice) -> Tensor:
        part = t[tile.where.b, tile.key_heads, j].to(self.dtype)
        return part.reshape(part.shape[0] * part.shape[1], *part.shape[2:])

    def scratch(self, count: int) -> list[Tensor]:
        """Buffers for `count` score tiles of the largest size."""
        p, a = self.problem, self.plan
        size = min(a.entries, p.B) * min(a.heads, p.Hk) * p.G * min(a.tile_m, p.M)
        size *= min(a.tile_n, p.N)
        return [torch.empty(size, dtype=self.dtype, device=p.device) for _ in range(count)]


def pieces(problem: Problem, chosen: Plan, x: Inputs) -> Iterator[Work]:
    """The problem itself, or the sequences of a packed one, one after the other."""
    if problem.packed:
        yield from _sequences(problem, x)
        return
    mask = parse(problem.mask, x.arrays)
    p = problem
    flat, copies = [], []
    for name, t in zip("qkv", (x.q, x.k, x.v), strict=True):
        rest = t.shape[-3:]
        try:
            flat.append(t.view(p.B, *rest))
        except RuntimeError:  # batch axes that no single stride can step through
            flat.append(t.reshape(p.B, *rest))
            copies.append(f"{name}, whose batch axes are not evenly strided")
    wide = [("bias", x.bias, 3)] if x.bias is not None else []
    wide += [
        (f"an array of {leaf}", a, len(lay))
        for leaf in mask.leaves
        for a, lay in zip(leaf.tensors, leaf.lay, strict=True)
    ]
    copies += [
        f"{name}, which varies along some batch axes only"
        for name, t, width in wide
        if varies_partly(t.shape[: max(t.dim() - width, 0)], p.batch)
    ]
    dtype = problem.lse_dtype
    yield Work(
        problem=problem,
        plan=chosen,
        dtype=dtype,
        q=flat[0],
        k=flat[1],
        v=flat[2],
        bias=None if x.bias is None else lay_out_bias(x.bias, p.batch),
        sinks=None if x.sinks is None else per_head(x.sinks, p.batch, p.Hq).to(dtype),
        alibi=None if x.alibi is None else per_head(x.alibi, p.batch, p.Hq).to(dtype),
        bound=Bound(mask, p.batch, p.Hq, p.M, p.N, p.device),
        seed=None if x.seed is None else x.seed.to(p.device),
        offsets=problem.offsets,
        copies=tuple(copies),
    )


def _sequences(problem: Problem, x: Inputs) -> Iterator[Work]:
    assert x.cu_q is not None and x.cu_k is not None
    cu_q, cu_k = x.cu_q.tolist(), x.cu_k.tolist()
    check_offsets("cu_q", cu_q, problem.M)
    check_offsets("cu_k", cu_k, problem.N)
    batch = problem.batch[0]
    for b in range(batch):
        rows, cols = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        arrays = tuple(a.expand(batch)[b : b + 1] for a in x.arrays)
        p = replace(
            problem,
            batch=(1,),
            M=rows.stop - rows.start,
            N=cols.stop - cols.start,
            packed=False,
        )
        own = Inputs(
            x.q[rows].transpose(0, 1)[None],
            x.k[cols].transpose(0, 1)[None],
            x.v[cols].transpose(0, 1)[None],
            None,
            x.sinks,
            x.alibi,
            x.seed,
            arrays=arrays,
        )
        (work,) = pieces(p, plan(p, ""), own)
        ob, oh, oi, oj = work.offsets
        yield replace(work, offsets=(ob + b, oh, oi, oj), tokens=(rows, cols))


def outputs(p: Problem) -> tuple[Tensor, Tensor]:
    """Empty o and lse. In a packed problem, rows that no sequence owns are (0, -inf)."""
    o, lse = p.empty_o(), torch.empty(p.lse_shape, dtype=p.lse_dtype, device=p.device)
    if p.packed:
        o.zero_()
        lse.fill_(float("-inf"))
    return o, lse


@dataclass
class Sums:
    """Gradients as they are summed, of q, k, v, bias, sinks; None where not wanted.

    k, v, bias, sinks are summed in float32 (float64); q is written once, in its own dtype.
    """

    problem: Problem
    x: Inputs
    sums: list[Tensor | None]

    def of(self, work: Work) -> list[Tensor | None]:
        """The part of the sums that a piece of work adds to, laid out as the tiles index it."""
        dq, dk, dv, dbias, dsinks = self.sums
        dq = None if dq is None else heads_first(self.problem, dq)
        if work.tokens is not None:
            _, cols = work.tokens
            dk = None if dk is None else dk[:, :, cols]
            dv = None if dv is None else dv[:, :, cols]
        return [dq, dk, dv, dbias, dsinks]

    def finish(self) -> Grads:
        """The gradients in the user's shapes and dtypes."""
        dq, dk, dv, dbias, dsinks = self.sums
        if self.problem.packed:
            dk, dv = (t if t is None else t[0].transpose(0, 1) for t in (dk, dv))
        if dsinks is not None:
            dsinks = dsinks[..., 0, 0]
        given = self.x[:5]
        return tuple(
            None if t is None or g is None else restore(t, g.shape, self.problem.batch).to(g.dtype)
            for t, g in zip((dq, dk, dv, dbias, dsinks), given, strict=True)
        )


def gradients(p: Problem, x: Inputs) -> Sums:
    """Zeroed sums for the gradients that problem.grads wants."""
    dtype, device = p.lse_dtype, p.device
    entries = 1 if p.packed else p.B

    def zeros(letter: str, *shape: int) -> Tensor | None:
        return torch.zeros(shape, dtype=dtype, device=device) if letter in p.grads else None

    dq = torch.zeros(x.q.shape, dtype=p.dtype, device=device) if "q" in p.grads else None
    dbias = dsinks = None
    if x.bias is not None:
        dbias = zeros("b", *lay_out_bias(x.bias, p.batch).shape)
    if x.sinks is not None:
        dsinks = zeros("s", *per_head(x.sinks, p.batch, p.Hq).shape)
    dk, dv = zeros("k", entries, p.Hk, p.N, p.D), zeros("v", entries, p.Hk, p.N, p.E)
    return Sums(p, x, [dq, dk, dv, dbias, dsinks])


def heads_first(p: Problem, t: Tensor) -> Tensor:
    """(total, Hq, width) of a packed problem as (Hq, total, width), a view; others unchanged."""
    return t.transpose(0, 1) if p.packed else t


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that these arrays take."""
    return sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def ieee_float32(device: torch.device) -> Iterator[None]:
    """float32 products in float32, whatever the process has allowed (tf32, bf16 through oneDNN)."""
    switch: Any = {
        "cuda": torch.backends.cuda.matmul,
        "cpu": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    }.get(device.type)
    before = "ieee" if switch is None else switch.fp32_precision
    if before in ("ieee", "none"):
        yield
        return
    switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        switch.fp32_precision = before
