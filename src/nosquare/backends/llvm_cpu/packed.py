"""Packed problems as the sequences they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ...inputs import Inputs, check_offsets
from ...problem import Problem


class Sequence(NamedTuple):
    """One sequence as a problem of one batch entry, on views of the packed arrays; and the tokens
    that it owns among the queries and among the keys."""

    problem: Problem
    x: Inputs
    queries: slice
    keys: slice


def sequences(p: Problem, x: Inputs) -> Iterator[Sequence]:
    """Those with at least one query. Raises ArgumentError where cu_q or cu_k are no offsets."""
    assert x.cu_q is not None and x.cu_k is not None
    ends = x.cu_q.tolist(), x.cu_k.tolist()
    check_offsets("cu_q", ends[0], p.M)
    check_offsets("cu_k", ends[1], p.N)
    first, h, i, j = p.offsets
    for b, (q, k) in enumerate(zip(*map(pairwise, ends), strict=True)):
        if q[0] == q[1]:
            continue
        queries, keys = slice(*q), slice(*k)
        arrays = tuple(a.expand(p.batch)[b : b + 1] for a in x.arrays)
        q_, k_, v_ = (
            t[part].transpose(0, 1).unsqueeze(0)
            for t, part in ((x.q, queries), (x.k, keys), (x.v, keys))
        )
        own = x._replace(q=q_, k=k_, v=v_, cu_q=None, cu_k=None, arrays=arrays)
        single = replace(
            p, batch=(1,), M=q[1] - q[0], N=k[1] - k[0], packed=False,
            strides=(q_.stride(), k_.stride(), v_.stride()), offsets=(first + b, h, i, j),
        )  # fmt: skip
        yield Sequence(single, own, queries, keys)
