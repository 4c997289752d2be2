"""Scores inside the kernels: what products become, and sums and maxima over the rows of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .places import start_of
from .shim import one_by_one

INF = gl.constexpr(float("inf"))
ROWS = gl.constexpr(64)  # of a warp group: what one product takes


@gluon.jit
def row_max(s):
    """Of each row, in four chains of maxima a thread instead of two."""
    return gl.max(gl.max(gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8]), 1), 1)


@gluon.jit
def part_sums(p):
    """Sums of each row in 8 parts: those of a thread alone, joined once at the end."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def with_nothing(p):
    """p with as many columns of 0 after it."""
    both = gl.permute(gl.join(p, gl.zeros_like(p)), (0, 2, 1))
    return gl.reshape(both, [p.shape[0], 2 * p.shape[1]])


@gluon.jit
def scored(s, t, rows, bounds, alive, here, numbers, mask, F: gl.constexpr,
            TILE_N: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Scores of tile t from products; MASKED: -inf where hidden."""
    if F.softcap:  # cap tanh(x): (cap) (1 - 2 / (1 + exp(2 x)))
        s = numbers[1] - 2.0 * numbers[1] / (1.0 + gl.exp2(s * numbers[2]))
    if MASKED:
        layout: gl.constexpr = s.type.layout
        COUNT: gl.constexpr = s.shape[1]
        step = gl.arange(0, COUNT, gl.SliceLayout(0, layout))
        j = one_by_one(start_of(t, alive, F, TILE_N) + step)[None, :]
        i = (rows // F.group)[:, None]
        s = gl.where(F.mask.keep(mask, 0, 0, i, j, here[0], here[1]), s, -INF)
        if not F.even:
            lo, hi = bounds
            begin = alive[2] + t * TILE_N
            s = gl.where(j >= gl.maximum(begin, lo), s, -INF)
            s = gl.where(j < gl.minimum(begin + TILE_N, hi), s, -INF)
    return s
