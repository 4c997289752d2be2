"""What backward knows of rows before it begins, and what is left to do when it has ended.

    ref   = -lse log2 e          -inf in rows that see no key, so that their weights are 0
    delta = rowsum(do o) - dlse  0 in such rows, whose do may hold anything

float32, (B Hq, rows): row i is at i + shift, so that the first that sees a key is at a multiple of
4, and so is the first of every head: TMA reads from multiples of 16 bytes on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

INF = gl.constexpr(float("inf"))
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _across(width, together):
    """A layout of rows, so many numbers of a row side by side in a thread: 16 bytes."""
    threads = min(width // together, 32)
    return gl.BlockedLayout([1, together], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def facts(
    o, lse, do, dlse, ref, delta, sums, turns, sizes,
    E: gl.constexpr, D: gl.constexpr, TILE_M: gl.constexpr, HAS_DLSE: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """ref and delta of TILE_M rows of a head; and 0 over their sums of dq, and over a turn.

    o, do: (pointer, stride of entry, head, row). lse, dlse: (pointer, stride of entry, head, row).
    sums: float32 (B Hq, m, D). sizes: (m, heads, width of o, places of a head, shift). E, D: of
    tiles.
    """
    m, heads, e_width, pitch, shift = sizes
    tiles = gl.cdiv(m, TILE_M)
    tile = gl.program_id(0) % tiles
    head = gl.program_id(0) // tiles
    h = head % heads
    b = head // heads
    layout: gl.constexpr = _across(E, 8)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    i = tile * TILE_M + gl.arange(0, TILE_M, rows)
    e = gl.arange(0, E, gl.SliceLayout(0, layout))
    inside = (i < m)[:, None] & (e < e_width)[None, :]
    row = i.to(gl.int64)[:, None]
    o_at = o[0] + b * o[1] + h * o[2] + row * o[3] + e[None, :]
    do_at = do[0] + b * do[1] + h * do[2] + row * do[3] + e[None, :]
    out = gl.load(o_at, mask=inside, other=0.0).to(gl.float32)
    cotangent = gl.load(do_at, mask=inside, other=0.0).to(gl.float32)
    total = gl.sum(gl.where(out == 0.0, 0.0, out * cotangent), 1)
    log = gl.load(lse[0] + b * lse[1] + h * lse[2] + i * lse[3], mask=i < m, other=0.0)
    if HAS_DLSE:
        at = dlse[0] + b * dlse[1] + h * dlse[2] + i * dlse[3]
        total -= gl.load(at, mask=i < m, other=0.0)
    nothing = log == -INF
    total = gl.where(nothing, 0.0, total)
    at = head.to(gl.int64) * pitch + i + shift
    gl.store(ref + at, gl.where(nothing, -INF, -log * LOG2E), mask=i < m)
    gl.store(delta + at, total, mask=i < m)
    wide: gl.constexpr = _across(D, 4)
    row = (tile * TILE_M + gl.arange(0, TILE_M, gl.SliceLayout(1, wide)))[:, None]
    d = gl.arange(0, D, gl.SliceLayout(0, wide))[None, :]
    to = sums + ((head * m).to(gl.int64) + row) * D + d
    gl.store(to, gl.zeros([TILE_M, D], gl.float32, wide), mask=row < m)
    if ORDERED:
        gl.store(turns + gl.program_id(0), 0)


@gluon.jit
def rounded(sums, dq, scale, sizes, D: gl.constexpr, TILE_M: gl.constexpr):
    """dq = scale sums, in its own dtype, of TILE_M rows of a head. dq: (pointer, stride of entry,
    head, row); sums: float32 (B Hq, m, D); sizes: (m, heads, width of q)."""
    m, heads, width = sizes
    tiles = gl.cdiv(m, TILE_M)
    tile = gl.program_id(0) % tiles
    head = gl.program_id(0) // tiles
    layout: gl.constexpr = _across(D, 8)
    row = (tile * TILE_M + gl.arange(0, TILE_M, gl.SliceLayout(1, layout)))[:, None]
    d = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    inside = (row < m) & (d < width)
    x = gl.load(sums + ((head * m).to(gl.int64) + row) * D + d, mask=inside, other=0.0)
    to = dq[0] + (head // heads) * dq[1] + (head % heads) * dq[2] + row.to(gl.int64) * dq[3] + d
    gl.store(to, (x * scale).to(dq[0].dtype.element_ty), mask=inside)


@gluon.jit
def of_sinks(lse, delta, sinks, dsinks, sizes, BLOCK: gl.constexpr):
    """dsink = - sum over the rows of a head of exp(sink - lse) delta, float32 (B, Hq).

    lse: (pointer, stride of entry, head, row); sinks: (pointer, stride of entry, head); sizes: (m,
    heads, places of a head, shift).
    """
    m, heads, pitch, shift = sizes
    head = gl.program_id(0)
    h = head % heads
    b = head // heads
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    sink = gl.load(sinks[0] + b * sinks[1] + h * sinks[2]).to(gl.float32)
    total = gl.zeros([BLOCK], gl.float32, layout)
    for start in range(0, m, BLOCK):
        i = start + gl.arange(0, BLOCK, layout)
        at = lse[0] + b * lse[1] + h * lse[2] + i * lse[3]
        log = gl.load(at, mask=i < m, other=INF)
        weight = gl.exp2((sink - log) * LOG2E)
        some = gl.load(delta + head.to(gl.int64) * pitch + i + shift, mask=i < m, other=0.0)
        total -= gl.where(log == -INF, 0.0, weight * some)
    gl.store(dsinks + head, gl.sum(total, 0))
