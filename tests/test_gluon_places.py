"""gluon_sm90: the numbers that its kernels work out, worked out here: every visible pair is counted
once, nothing hidden is, and no row is multiplied that nobody sees."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nosquare as ns
from nosquare.bench.cases import Case
from nosquare.bound import Bound
from nosquare.mask import Mask
from nosquare.mask_text import arguments, compiled, form_of, text

pytest.importorskip("triton", reason="gluon_sm90 is written in Triton's Gluon")

CARD = torch.device("cuda", 0)


class Int(int):
    """An integer of a kernel: // rounds towards 0, and what comes of it is one too."""

    def __add__(self, other: int) -> Int:
        return Int(int(self) + int(other))

    def __sub__(self, other: int) -> Int:
        return Int(int(self) - int(other))

    def __mul__(self, other: int) -> Int:
        return Int(int(self) * int(other))

    def __rsub__(self, other: int) -> Int:
        return Int(int(other) - int(self))

    def __floordiv__(self, other: int) -> Int:
        return Int(int(int(self) / int(other)))

    def __neg__(self) -> Int:
        return Int(-int(self))

    def to(self, _dtype: Any) -> Int:
        return self

    __radd__, __rmul__ = __add__, __mul__


def _cdiv(a: int, b: int) -> Int:
    return (Int(a) + (b - 1)) // b


LANGUAGE = SimpleNamespace(
    minimum=lambda a, b: Int(min(a, b)), maximum=lambda a, b: Int(max(a, b)), cdiv=_cdiv,
    where=lambda c, a, b: Int(a if c else b), int32=None, int64=None,
)  # fmt: skip
WORDS = {"jit": lambda function: function, "tl": LANGUAGE}


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The functions of places.py, on integers."""
    from nosquare.backends.gluon_sm90 import places as module

    monkeypatch.setattr(module, "gl", LANGUAGE)
    names = ("span_of", "tiles_of_keys", "alive_of", "start_of")
    return SimpleNamespace(**{name: getattr(module, name).fn for name in names})


def groups_of(p: Any, plan: Any, places: Any, mask: Mask, form: Any, end: int) -> Any:
    """As the kernel goes through them: for each group of rows (first row of the tile, of the group,
    [(first key that is loaded, first and last key that is its own, whether pairs are looked at,
    of a tile of keys)]). end: the first key that is padding."""
    bound = Bound(mask, (1,), 1, p.M, p.N)
    code = compiled(text(form_of(bound)), WORDS)
    values = tuple(Int(v) for v in arguments(bound, int))
    form = SimpleNamespace(**vars(form), mask=code)
    here = (Int(p.M), Int(p.N), Int(end))
    wide = plan.tile_n
    alive = places.alive_of(here, values, form, wide)
    for tile in range(0, p.M * plan.group, plan.tile_m):
        lo, hi, _, _ = places.span_of(Int(tile), here, values, form, plan.tile_m)
        first, last = places.tiles_of_keys(lo, hi, alive, wide)
        for c in range(plan.groups):
            row = Int(tile + 64 * c)
            lo, hi, c_lo, c_hi = places.span_of(row, here, values, form, 64)
            mine, top = places.tiles_of_keys(lo, hi, alive, wide)
            top = max(min(top, last), first + 1)
            mine = max(min(mine, top - 1), first)
            low = min(max(_cdiv(c_lo - alive[2], wide), mine), top - 1)
            high = top - 1
            if form.more:
                high = max(min((c_hi - alive[2]) // wide, high), low)
            seen = []
            for t in range(mine, top):
                start = places.start_of(Int(t), alive, form, wide)
                begin = alive[2] + t * wide
                own = (start, start + wide)
                if not form.even:
                    own = (max(begin, lo), min(begin + wide, hi))
                looked = form.hidden if t == top - 1 else not low <= t < high
                width = wide // 2 if t == top - 1 and form.half and c % 2 == 0 else wide
                seen.append((start, width, own, looked))
            yield row, seen, alive


MASKS: dict[str, Mask] = {
    "full": ns.Full(), "causal": ns.Causal(), "start": ns.Causal("start"),
    "window": ns.Window(200, 30), "past": ns.Window(300, 0), "future": ns.Window(0, 90),
    "prefix": ns.Prefix(150), "joined": ns.Causal() | ns.Prefix(333),
    "both": ns.Causal() & ns.Window(140, None),
}  # fmt: skip
SIZES = [(384, 384), (300, 700), (500, 200), (1, 512), (129, 130), (64, 40), (5, 1)]


@pytest.mark.parametrize("kind", ["plain", "lengths", "packed", "folded"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_each_visible_pair_is_counted_once(
    places: Any, name: str, kind: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nosquare.backends import gluon_sm90
    from nosquare.backends.gluon_sm90.attend_plan import rows_of

    monkeypatch.setattr(gluon_sm90, "_capability", lambda device: (9, 0))
    mask, heads = MASKS[name], "Hq4 Hk1" if kind == "folded" else "Hq1 Hk1"
    more = "&lengths(t0)" if kind == "lengths" else ""
    ran = 0
    for m, n in SIZES:
        m = min(m, 20) if kind == "folded" else m
        line = f"forward bfloat16 B1 {heads} M{m} N{n} D{width} {mask}"
        p = replace(Case.parse(line).problem(), device=CARD, packed=kind == "packed")
        if kind == "lengths":
            p = replace(p, mask=f"({p.mask}){more}" if "|" in p.mask else p.mask + more)
        if kind == "packed":
            p = replace(p, strides=((width, width, 1),) * 3)
        if gluon_sm90.refusals(p, "forward"):
            continue
        ran += 1
        plan = gluon_sm90.plan(p, "forward")
        rows = rows_of(p, plan)
        form = SimpleNamespace(
            group=plan.group, hidden=rows.hidden, more=rows.more, half=rows.half,
            even=rows.even, packed=p.packed,
        )  # fmt: skip
        for end in (n, 0, n // 3, min(n, 128)) if kind == "lengths" else (n,):
            visible = ns.visible(mask, m, n).view(m, n) & (torch.arange(n) < end)
            somebody = visible.any(0)
            counted = torch.zeros(m * plan.group, n, dtype=torch.int64)
            for row, seen, alive in groups_of(p, plan, places, mask, form, end):
                for start, wide, (lo, hi), looked in seen:
                    count_tile(counted, visible, row, start, wide, (lo, hi), looked, plan.group)
                    stop = min(start + plan.tile_n, n)
                    if kind == "packed":  # what follows is cleared
                        stop = min(stop, alive[1])
                        assert start >= 0
                    assert somebody[max(start, 0) : stop].all() or not somebody.any()
            assert torch.equal(counted, visible.repeat_interleave(plan.group, 0).long())
    assert ran


def count_tile(
    counted: torch.Tensor, visible: torch.Tensor, row: int, start: int, wide: int,
    own: tuple[int, int], looked: bool, group: int,
) -> None:  # fmt: skip
    """Count the pairs of 64 rows and the keys of a tile that get a weight."""
    m, n = visible.shape
    there, keys = slice(row, min(row + 64, m * group)), slice(max(start, 0), min(start + wide, n))
    if there.start >= there.stop or keys.start >= keys.stop:
        return
    if not looked:
        counted[there, keys] += 1
        return
    j = torch.arange(n)[keys]
    pairs = visible.repeat_interleave(group, 0)[there, keys]
    counted[there, keys] += pairs & (own[0] <= j) & (j < own[1])
