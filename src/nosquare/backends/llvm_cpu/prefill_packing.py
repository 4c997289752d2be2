"""How prefill lays numbers out: packed k and v, and the sizes of a tile's scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

from .call import Args, Form
from .ir import Function, Module, Operand, Value
from .products import ROWS
from .target import Target
from .tiles import ROWS as TILE_ROWS
from .tiles import WORDS

PANEL = 64  # keys
GROUP = 2 * TILE_ROWS  # rows multiplied at once by AMX
TILE, TILE_AMX = 48, 2 * GROUP  # rows: their q, scores and u lie in the first two caches
WIDE_TILE, WIDE_AMX = 24576, 4096  # numbers of q or u that a tile has at most: docs/log.md


@dataclass(frozen=True)
class Sizes:
    """How numbers lie in memory: a pure function of their type (as call.KINDS), D, E and target.

    pairs  k, v, q and the weights stay bfloat16, two to a word
    tiled  and are multiplied by AMX
    group  rows that are multiplied at once, and skipped at once
    """

    kind: str
    D: int
    E: int
    target: Target

    @property
    def pairs(self) -> bool:
        """See above: AVX512-BF16 takes two terms of a sum at a time, so D must be even."""
        return self.target.pairs and self.kind == "bf16" and self.D % 2 == 0

    @property
    def tiled(self) -> bool:
        """See above."""
        return self.pairs and self.target.tiles != ""

    @property
    def group(self) -> int:
        """See above."""
        return GROUP if self.tiled else ROWS

    @property
    def rows(self) -> int:
        """Rows of a tile: fewer where they are very wide; of AMX two groups, or one."""
        wide, group = max(self.D, self.E, 1), self.group
        most = min(TILE_AMX, WIDE_AMX // wide) if self.tiled else min(TILE, WIDE_TILE // wide)
        return max(most // group * group, group)

    @property
    def lone(self) -> bool:
        """Whether no tile has more than one group."""
        return self.rows == self.group

    @property
    def panels(self) -> int:
        """Panels of a block."""
        return 2 if self.tiled else 4

    @property
    def block(self) -> int:
        """Keys whose scores a row has in memory at once."""
        return self.panels * PANEL

    @property
    def s_stride(self) -> int:
        """From row to row of scores: rows do not lie at the same place of a cache set."""
        return self.block + 16

    @property
    def slots(self) -> int:
        """Groups whose scores are in memory at once: all, or with AMX those of two turns."""
        return 2 if self.tiled else self.rows // self.group

    @property
    def words(self) -> int:
        """Words of a row of q or k."""
        return self.D // 2 if self.pairs else self.D

    @property
    def depth(self) -> int:
        """Those and zeros: words of a row that are multiplied."""
        return -(-self.words // WORDS) * WORDS if self.tiled else self.words

    @property
    def q_stride(self) -> int:
        """From row to row of q in scratch memory."""
        return padded(self.depth)

    @property
    def u_stride(self) -> int:
        """From row to row of u in scratch memory, and of packed v."""
        return padded(self.E)

    @property
    def v_packed(self) -> bool:
        """Whether v is packed; else it is read where it is."""
        return self.kind != "f32"

    @property
    def v_rows(self) -> int:
        """Rows of a panel of v: of keys, or of pairs of keys."""
        return PANEL // 2 if self.pairs else PANEL

    def work_words(self, keys: int) -> tuple[int, int]:
        """Words of packed k and v of one key head."""
        panels = -(-keys // PANEL)
        v = panels * self.v_rows * self.u_stride if self.v_packed else 0
        return panels * PANEL * self.depth, v


def padded(width: int) -> int:
    """A width as it is stored in scratch memory: whole vectors of any target."""
    return -(-width // 16) * 16


def write_pack(made: Module, form: Form, sizes: Sizes) -> None:
    """The function pack(block, item, worker); an item is one panel of a key head."""
    w = sizes.target.lanes
    f = made.function("pack", block="i64*", item="i64", worker="i64")
    block, item, _ = f.parameters
    args = Args(f, block, form)
    head, j = item // args.x2, item % args.x2 * PANEL
    b, hk = head // args.Hk, head % args.Hk
    out = args.work + item * (PANEL * sizes.depth)
    with f.loop(0, PANEL, w) as jj:
        # beyond the last key its row again: nobody looks at the scores there
        rows = [args.row("k", b, hk, f.min(j + jj + n, args.N - 1)) for n in range(w)]
        if sizes.pairs:
            rows = [row.pointing_at("f32") for row in rows]
        whole = sizes.words // w * w
        with f.loop(0, whole, w) as x:
            square = [f.load(row + x, w) for row in rows]
            _turn(f, square, *_k_place(sizes, out, x, jj), w)
        if whole < sizes.words:
            lanes = f.tail(sizes.words - whole, w)
            square = [f.load(row + whole, w, lanes) for row in rows]
            place = _k_place(sizes, out, whole, jj)
            _turn(f, square, *place, sizes.depth - whole)
    if not sizes.v_packed:
        return
    to = args.work2 + item * (sizes.v_rows * sizes.u_stride)
    if sizes.pairs:
        _pair_values(f, args, sizes, (b, hk, j), to)
        return
    with f.loop(0, f.min(args.N - j, PANEL)) as jj:
        copy_row(f, args.row("v", b, hk, j + jj), to + jj * sizes.u_stride, sizes.E, w)


def _k_place(sizes: Sizes, panel: Value, x: Operand, j: Value) -> tuple[Value, int]:
    """Where word x of key j of a panel of k lies, and how far it is to the next word: panels are
    rows of keys; for AMX, tiles, each in one piece, those of the same keys one after the other."""
    if not sizes.tiled:
        return panel + x * PANEL + j, PANEL
    return panel + j // WORDS * (WORDS * sizes.depth) + x * WORDS + j % WORDS, WORDS


def v_place(sizes: Sizes, panel: Value, row: Value, x: Operand) -> Value:
    """Where 16 words from x on of a row of packed v lie: in rows; for AMX, in tiles, each in one
    piece, those of the same keys one after the other."""
    if not sizes.tiled:
        return panel + row * sizes.u_stride + x
    tile = row // WORDS * (sizes.u_stride // WORDS) + x // WORDS
    return panel + tile * (WORDS * TILE_ROWS) + row % WORDS * WORDS


def _turn(f: Function, square: list[Value], out: Value, step: int, rows: int) -> None:
    """Store the first rows of the transpose of `square`, `step` apart, by perfect shuffles."""
    w = len(square)
    half = w // 2
    low = [x for n in range(half) for x in (n, w + n)]
    high = [x + half for x in low]
    for _ in range(w.bit_length() - 1):
        square = [
            f.shuffle(square[n], order, square[n + half])
            for n in range(half)
            for order in (low, high)
        ]
    for n, row in enumerate(square[:rows]):
        f.store(out + n * step, row)


def _pair_values(
    f: Function, args: Args, sizes: Sizes, panel: tuple[Value, Value, Value], to: Value
) -> None:
    """Words (v of an even key, v of the next); 0 for the one after the last key."""
    b, hk, j = panel
    w, width = sizes.target.lanes, sizes.E
    with f.loop(0, f.min((args.N - j + 1) // 2, sizes.v_rows)) as pair:
        key = j + pair * 2
        both = key + 1 < args.N
        even = args.row("v", b, hk, key).pointing_at("i16")
        odd = args.row("v", b, hk, f.select(both, key + 1, key)).pointing_at("i16")
        for x, lanes in vectors(f, width, w):
            upper = f.select(both, f.load(odd + x, w, lanes).unsigned("i32"), f.splat(0, w, "i32"))
            word = f.load(even + x, w, lanes).unsigned("i32") | (upper << 16)
            f.store(v_place(sizes, to, pair, x).pointing_at("i32"), word)
    if sizes.tiled:  # whose products always run over whole panels
        with f.loop(f.min((args.N - j + 1) // 2, sizes.v_rows), sizes.v_rows) as pair:
            for x in range(0, sizes.u_stride, w):
                f.store(v_place(sizes, to, pair, x), f.splat(0.0, w))


def vectors(f: Function, width: int, w: int) -> list[tuple[int, Value | None]]:
    """Where the vectors of a row start, and the lanes of each; None for all."""
    return [(x, None if x + w <= width else f.tail(width - x, w)) for x in range(0, width, w)]


def copy_row(f: Function, x: Value, to: Value, width: int, w: int) -> None:
    """Copy a row of numbers as float32, with zeros up to a whole vector."""
    for at, lanes in vectors(f, width, w):
        f.store(to + at, f.load(x + at, w, lanes))
