"""Every size around those of tiles. Behind the last key of a head, memory holds NaN."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..registry import check
from ..subject import Ask
from ..trial import Case, Trial
from ..truth import Triple
from ..verdict import Finding

TILES = (0, 16, 32, 64, 128)
RESTS = range(1, 18)


def _fenced(x: Tensor) -> Tensor:
    """The same numbers as a view into memory that goes on with NaN behind each head's rows."""
    *lead, n, d = x.shape
    room = x.new_full((*lead, n + 8, d), torch.nan)
    room[..., :n, :] = x
    return room[..., :n, :]


def _weighty(t: Trial, m: int, n: int) -> Triple:
    """q, k, v in which the last key counts: its value is large."""
    q, k, v = t.qkv(m, n)
    v[..., -1, :] += 32
    return q, _fenced(k), _fenced(v)


def _clean(x: Triple) -> Triple:
    return x[0].contiguous(), x[1].contiguous(), x[2].contiguous()


@check("key-tails", "tails", "Every N: the last key counts, and nothing behind it does.",
       "pegainfer-project/pegainfer#291")  # fmt: skip
def key_tails(t: Trial) -> Finding:
    def cases() -> Iterator[Case]:
        for n in sorted({tile + rest for tile in TILES for rest in RESTS}):
            x = _weighty(t, 5, n)
            yield Case(f"M=5 N={n}", x, clean=_clean(x))

    return t.agree(cases())


@check("causal-tails", "tails", "Every M = N under a causal mask.")
def causal_tails(t: Trial) -> Finding:
    def cases() -> Iterator[Case]:
        for n in sorted({tile + rest for tile in TILES for rest in (1, 2, 15, 16, 17)}):
            x = _weighty(t, n, n)
            yield Case(f"M=N={n} causal", x, Ask(causal=True), clean=_clean(x))

    return t.agree(cases())


@check("query-tails", "tails", "Every M: each row is written, and from its own query.",
       "Dao-AILab/flash-attention#41")  # fmt: skip
def query_tails(t: Trial) -> Finding:
    def cases() -> Iterator[Case]:
        for m in sorted({tile + rest for tile in TILES for rest in (1, 2, 7, 8, 9, 15, 16, 17)}):
            q, k, v = t.qkv(m, 33)
            yield Case(f"M={m} N=33", (_fenced(q), k, v), clean=(q, k, v))

    return t.agree(cases())


@check("width-tails", "tails", "Every width around those of vectors and tiles.",
       "Dao-AILab/flash-attention#1214")  # fmt: skip
def width_tails(t: Trial) -> Finding:
    widths = [*range(1, 18), 31, 32, 33, 40, 63, 64, 65, 72, 96, 127, 128, 129, 192]
    return t.agree(Case(f"M=9 N=33 D={d}", t.qkv(9, 33, d)) for d in widths)


@check("gradient-tails", "tails", "Gradients at sizes around those of tiles.")
def gradient_tails(t: Trial) -> Finding:
    sizes = ((1, 1), (1, 17), (15, 17), (16, 33), (33, 64), (65, 31), (64, 129), (129, 65))
    return t.agree(
        Case(f"M={m} N={n}", (q, _fenced(k), _fenced(v)), clean=(q, k, v), grads=True)
        for m, n in sizes
        for q, k, v in [t.qkv(m, n, 32)]
    )
