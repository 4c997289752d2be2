"""The quadratic artefact, only on request and in slices: attention weights from (q, k, lse).

Rows are worked on in blocks, so the memory beyond the result is one block of rows times N.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import score
from .axes import lay_out_bias, per_head
from .bound import Bound, Rectangle, cut
from .errors import ArgumentError
from .inputs import Inputs, Spec
from .mask import INTEGERS, Full, Mask
from .problem import Problem

Chosen = int | slice | Sequence[int] | Tensor | None
BLOCK_ELEMENTS = 1 << 22


@torch.no_grad()
def weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    rows: Chosen = None,
    heads: Chosen = None,
    top_k: int | None = None,
    column_sums: bool = False,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention weights p = exp(s - lse) of chosen query rows and heads.

    q (..., Hq, M, D)  k (..., Hk, N, D)  lse (..., Hq, M): that of attention_state with the same
    mask, scale, softcap, bias and alibi (and sinks: a row then sums to less than 1)
    rows, heads  which queries and query heads: an int, a slice, a list, a 1-d tensor; None is all
    top_k        the largest weights of each row instead: (values, indices), (..., heads, rows,
                 top_k)
    column_sums  instead, each key's weight summed over the rows: (..., heads, N)
    returns      (..., heads, rows, N) in the dtype of lse; no gradient

    Raises ArgumentError for shapes that do not fit, or when both top_k and column_sums are asked
    for.
    """
    mask = mask or Full()
    x = Inputs(q, k, k, bias, None, alibi, arrays=mask.tensors)
    p = Problem.of(x, Spec(str(mask), scale, softcap))
    if tuple(lse.shape) != p.lse_shape:
        raise ArgumentError(
            "lse does not belong to these queries.",
            {"lse": tuple(lse.shape), "expected": p.lse_shape},
            "ns.attention_state(q, k, v, ...).lse.",
        )
    if top_k is not None and (column_sums or not 0 < top_k <= p.N):
        raise ArgumentError(
            "top_k must lie between 1 and N, and cannot be combined with column_sums.",
            {"top_k": top_k, "N": p.N, "column_sums": column_sums},
            "two calls, one for each.",
        )
    i, h = _indices(rows, p.M, "rows", q.device), _indices(heads, p.Hq, "heads", q.device)
    step = max(BLOCK_ELEMENTS // max(p.B * p.N, 1), 1)
    out: list[list[Tensor]] = []
    for head in h.tolist():
        blocks = [_block(p, x, lse, mask, head, part) for part in i.split(step)]
        if column_sums:
            out.append([torch.stack([w.sum(1) for w in blocks]).sum(0)])
        elif top_k is not None:
            found = [w.topk(top_k, -1) for w in blocks]
            out.append([torch.cat([f[c] for f in found], 1) for c in (0, 1)])
        else:
            out.append([torch.cat(blocks, 1)])
    if not out:
        shape = (p.B, p.N) if column_sums else (p.B, i.numel(), top_k or p.N)
        out.append([lse.new_zeros(shape), i.new_zeros(shape)][: 1 if top_k is None else 2])
    joined = [torch.stack(part, 1)[:, : h.numel()] for part in zip(*out, strict=True)]
    shaped = [t.reshape(*p.batch, *t.shape[1:]) for t in joined]
    return shaped[0] if top_k is None else (shaped[0], shaped[1])


def _block(p: Problem, x: Inputs, lse: Tensor, mask: Mask, head: int, i: Tensor) -> Tensor:
    """Weights (B, rows, N) of one head."""
    where = Rectangle(slice(0, p.B), slice(head, head + 1), i, slice(0, p.N))
    wide = lse.dtype
    q = x.q.reshape(p.B, *x.q.shape[-3:])[:, head].index_select(1, i).to(wide)
    k = x.k.reshape(p.B, *x.k.shape[-3:])[:, head // p.G].to(wide)
    s = (q @ k.transpose(-1, -2) * p.scale)[:, None]
    if p.softcap is not None:
        score.cap_(s, p.softcap)
    if x.alibi is not None:
        slopes = cut(per_head(x.alibi, p.batch, p.Hq).to(wide), where)
        s += score.alibi(slopes, i + (p.N - p.M), torch.arange(p.N, device=i.device))
    if x.bias is not None:
        s += cut(lay_out_bias(x.bias, p.batch), where)
    s.masked_fill_(~Bound(mask, p.batch, p.Hq, p.M, p.N, p.device).keep(where), float("-inf"))
    total = lse.reshape(p.B, p.Hq, p.M)[:, head].index_select(1, i)[:, None, :, None]
    # a row that saw nothing has lse = -inf: its weights are 0, not exp(-inf + inf)
    return torch.exp(s - total.masked_fill(torch.isneginf(total), 0))[:, 0]


def _indices(chosen: Chosen, size: int, name: str, device: torch.device) -> Tensor:
    """The chosen indices as a 1-d int64 tensor. Raises ArgumentError when one is out of range."""
    every = torch.arange(size, device=device)
    if chosen is None or isinstance(chosen, slice):
        return every[chosen or slice(None)]
    index = torch.as_tensor(chosen, device=device).reshape(-1)
    if index.numel() and index.dtype not in INTEGERS:
        raise ArgumentError(
            f"{name} are chosen by integers.",
            {name: f"{tuple(index.shape)} {index.dtype}"},
            f"{name}=mask.nonzero() for a bool mask.",
        )
    index = index.long()
    if index.numel() and not (-size <= int(index.min()) and int(index.max()) < size):
        raise ArgumentError(
            f"{name} names something that does not exist.",
            {name: index.tolist()[:8], "there are": size},
            f"{name} from 0 to {size - 1}.",
        )
    return torch.where(index < 0, index + size, index)
