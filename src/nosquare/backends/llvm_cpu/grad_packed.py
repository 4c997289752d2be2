"""Backward of packed sequences: all of them in one parallel region.

A pack is seen as B batch entries that lie on top of each other (their batch stride is 0), and each
sequence has a block of its own, a copy of the one of the whole pack that starts at its own tokens:
an item finds its block by the entry that it belongs to.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...bound import Bound
from ...inputs import Inputs, check_offsets
from ...problem import Problem
from .call import FIELDS, Filled, bind
from .grad_packing import padded

_AT = {name: at for at, name in enumerate(FIELDS)}
_QUERIES, _KEYS = "q o lse do dlse dq", "k v dk dv"  # arrays of tokens, in the order of the pack
_ROWS = "delta"  # workspace: every sequence begins at a tile of its own


@dataclass(frozen=True)
class Pack:
    """Where sequences begin: q and k have the B + 1 offsets of tokens; rows those of the workspace,
    whole tiles each."""

    q: list[int]
    k: list[int]
    rows: list[int]

    @staticmethod
    def of(p: Problem, x: Inputs, tile: int) -> Pack:
        """For tiles of so many rows. Raises ArgumentError where cu_q or cu_k are no offsets."""
        assert x.cu_q is not None and x.cu_k is not None
        q, k = x.cu_q.tolist(), x.cu_k.tolist()
        check_offsets("cu_q", q, p.M)
        check_offsets("cu_k", k, p.N)
        return Pack(q, k, [0, *accumulate(padded(m, tile) for _, m in _spans(q))])

    def bounds(self, p: Problem, x: Inputs) -> list[Bound]:
        """The mask of each sequence."""
        sizes = [(m, n) for (a, m), (b, n) in zip(_spans(self.q), _spans(self.k), strict=True)]
        known = {s: bind(replace(p, M=s[0], N=s[1]), x.arrays) for s in set(sizes)}
        return [known[s] for s in sizes]

    def rows_of_tokens(self) -> Tensor:
        """For each token of a sequence, its row of the workspace, int64."""
        shift = torch.tensor([row - q for row, q in zip(self.rows, self.q, strict=True)][:-1])
        lengths = torch.tensor(self.q).diff()
        return torch.arange(self.q[-1]) + shift.repeat_interleave(lengths)


def _spans(offsets: list[int]) -> list[tuple[int, int]]:
    """(start, length)"""
    return [(a, b - a) for a, b in pairwise(offsets)]


def overlaid(p: Problem, x: Inputs) -> tuple[Problem, Inputs]:
    """The pack as B entries of all tokens: what its form, and the block of the whole, follow
    from."""
    q, k, v = (heads_first(p, t) for t in (x.q, x.k, x.v))
    strides = (q.stride(), k.stride(), v.stride())
    return replace(p, packed=False, strides=strides), x._replace(q=q, k=k, v=v, cu_q=None)


def heads_first(p: Problem, t: Tensor) -> Tensor:
    """(total, H, width) as (B, H, total, width), every entry the same memory."""
    return t.transpose(0, 1).expand(p.B, *t.transpose(0, 1).shape)


def blocks(filled: Filled, pack: Pack, bounds: list[Bound], own: dict[str, list[int]]) -> Tensor:
    """(B, fields) int64: the block of every sequence. own: fields that each has for itself."""
    starts = torch.tensor([pack.q[:-1], pack.k[:-1], pack.rows[:-1]])
    steps = [[0] * len(FIELDS) for _ in starts]
    for step, names, axis in zip(steps, (_QUERIES, _KEYS, _ROWS), "mnm", strict=True):
        for name in names.split():
            step[_AT[name]] = getattr(filled.call, f"{name}_{axis}") * _bytes(filled, name)
    found = torch.frombuffer(filled.call, dtype=torch.int64) + starts.T @ torch.tensor(steps)
    numbers = torch.tensor([_numbers(bound) for bound in bounds], dtype=torch.int64)
    filled.alive.append(numbers)
    size = numbers.shape[1] * numbers.element_size()
    own = own | {
        "M": [m for _, m in _spans(pack.q)],
        "N": [n for _, n in _spans(pack.k)],
        "numbers": [numbers.data_ptr() + b * size for b in range(len(bounds))],
    }
    found[:, [_AT[name] for name in own]] = torch.tensor(list(own.values())).T
    return found


def _numbers(bound: Bound) -> list[int]:
    """Of all kinds of the mask, leaf after leaf."""
    if bound.parts:
        return [n for part in bound.parts for n in _numbers(part)]
    return list(bound.numbers)


def _bytes(filled: Filled, name: str) -> int:
    kind = filled.form.pointers.get(name, "f32")
    return ctypes.sizeof(ctypes.c_float) if kind == "f32" else 2
