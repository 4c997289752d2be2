"""gluon_sm90's backward: which tiles of queries a program goes through, worked out here."""

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
KEYS = 128


def _pair(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.as_tensor(a), torch.as_tensor(b)


LANGUAGE = SimpleNamespace(
    arange=lambda lo, hi, layout: torch.arange(lo, hi),
    minimum=lambda a, b: torch.minimum(*_pair(a, b)),
    maximum=lambda a, b: torch.maximum(*_pair(a, b)),
    where=lambda c, a, b: torch.where(torch.as_tensor(c), *_pair(a, b)),
    min=lambda x, axis: x.amin(axis), max=lambda x, axis: x.amax(axis),
    sum=lambda x, axis: x.sum(axis), cdiv=lambda a, b: -(-a // b),
    int32=torch.int32, int64=torch.int64,
)  # fmt: skip
WORDS = {"jit": lambda function: function, "tl": LANGUAGE}
MASKS: dict[str, Mask] = {
    "full": ns.Full(), "causal": ns.Causal(), "start": ns.Causal("start"),
    "window": ns.Window(200, 30), "narrow": ns.Window(20, 0), "future": ns.Window(0, 90),
    "wide": ns.Window(400, 300), "prefix": ns.Prefix(150), "joined": ns.Causal() | ns.Prefix(333),
    "both": ns.Causal() & ns.Window(140, None),
}  # fmt: skip
SIZES = [(384, 384), (300, 700), (500, 200), (1, 512), (129, 130), (700, 640), (5, 1)]


@pytest.fixture
def queries_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel's function, on tensors."""
    from nosquare.backends.gluon_sm90 import grad_places as module

    monkeypatch.setattr(module, "gl", LANGUAGE)
    monkeypatch.setattr(module, "NOBODY", 1 << 30)
    return module.queries_of.fn


@pytest.mark.parametrize("at_once", [2, 128])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_each_visible_pair_is_gone_through_once_and_looked_at_where_it_may_be_hidden(
    queries_of: Any, name: str, tile: int, at_once: int
) -> None:
    from nosquare.backends.gluon_sm90 import grad_plan

    mask, whole_seen = MASKS[name], 0
    for m, n in SIZES:
        line = f"backward bfloat16 B1 Hq1 Hk1 M{m} N{n} D64 {mask}"
        p = replace(Case.parse(line).problem(), device=CARD)
        origin, end_of_rows = grad_plan.seen_rows(p)
        visible = ns.visible(mask, m, n).view(m, n)
        rows = visible.any(1).nonzero()
        if not len(rows):
            assert origin == end_of_rows
            continue
        assert (origin, end_of_rows) == (int(rows[0]), int(rows[-1]) + 1)
        bound = Bound(mask, (1,), 1, m, n)
        code = compiled(text(form_of(bound)), WORDS)
        form = SimpleNamespace(mask=code, hidden=grad_plan.hidden(p))
        values = tuple(map(torch.as_tensor, arguments(bound, int)))
        for end in (n, n // 3, 0):
            form.hidden = form.hidden or end < n
            seen = visible & (torch.arange(n) < end)
            for k_lo in range(0, n, KEYS):
                here = (*_pair(m, n), end)
                places = queries_of(k_lo, here, origin, values, form, tile, KEYS, at_once, None)
                first, low, high, last = map(int, places)
                assert first <= low <= high <= last
                assert high == last or code.low or not form.hidden
                there = slice(origin + first * tile, min(origin + last * tile, m))
                keys = slice(k_lo, min(k_lo + KEYS, n))
                assert seen[there, keys].sum() == seen[:, keys].sum()
                whole = slice(origin + low * tile, min(origin + high * tile, m))
                if whole.start < whole.stop:
                    assert seen[whole, keys].all()
                    assert k_lo + KEYS <= end
                    whole_seen += 1
    assert whole_seen or name in ("narrow", "future")


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_who_takes_turns_waits_for_the_tile_of_keys_before_its_own_or_for_nobody(
    queries_of: Any, name: str, tile: int
) -> None:
    """Tiles of keys that add to a tile of queries lie in one row, under masks that rise."""
    from nosquare.backends.gluon_sm90 import grad_plan

    mask = MASKS[name]
    for m, n in SIZES:
        line = f"backward bfloat16 B1 Hq1 Hk1 M{m} N{n} D64 {mask}"
        p = replace(Case.parse(line).problem(), device=CARD)
        assert grad_plan.rising(p)
        bound, origin = Bound(mask, (1,), 1, m, n), grad_plan.seen_rows(p)[0]
        form = SimpleNamespace(mask=compiled(text(form_of(bound)), WORDS), hidden=False)
        values = tuple(map(torch.as_tensor, arguments(bound, int)))
        for end in (n, n // 3):
            here, adds = (*_pair(m, n), end), []
            for k_lo in range(0, n, KEYS):
                first, _, _, last = map(int, queries_of(
                    k_lo, here, origin, values, form, tile, KEYS, 128, None))  # fmt: skip
                adds.append(range(first, last))
            for t in range(-(-m // tile)):
                those = [number for number, queries in enumerate(adds) if t in queries]
                assert those == [*range(those[0], those[-1] + 1)] if those else True


@pytest.mark.parametrize(("tiles", "heads", "entries", "together"), [
    (5, 3, 2, 1), (5, 3, 2, 4), (1, 4, 1, 4), (7, 2, 3, 6), (8, 1, 1, 1),
])  # fmt: skip
def test_each_tile_of_keys_has_a_program_and_later_keys_a_later_one(
    monkeypatch: pytest.MonkeyPatch, tiles: int, heads: int, entries: int, together: int
) -> None:
    from nosquare.backends.gluon_sm90 import grad_places as module

    monkeypatch.setattr(module, "gl", LANGUAGE)
    found = []
    for program in range(tiles * heads * entries):
        monkeypatch.setattr(LANGUAGE, "program_id", lambda axis, at=program: at, raising=False)
        grid = (tiles, heads, heads * entries, together)
        tile, head, entry = map(int, module.key_tile.fn(grid))
        assert tile == 0 or (tile - 1, head, entry) in found
        found.append((tile, head, entry))
    assert len(set(found)) == len(found)
    assert max(found) == (tiles - 1, heads - 1, entries - 1)


def test_from_the_last_place_on() -> None:
    from nosquare.backends.gluon_sm90 import grad_places as module

    for ordered, want in ((False, [3, 4, 5]), (True, [5, 4, 3])):
        form = SimpleNamespace(ordered=ordered)
        assert [module.place_of.fn(x, 3, 6, form) for x in range(3, 6)] == want


def test_the_work_of_each_tile_of_keys() -> None:
    from nosquare.backends.gluon_sm90 import grad_plan

    line = "backward bfloat16 B1 Hq1 Hk1 M300 N200 D128 causal(end)"
    p = replace(Case.parse(line).problem(), device=CARD)
    assert grad_plan.seen_rows(p) == (100, 300)
    assert (grad_plan.shift(p), grad_plan.pitch(p)) == (0, 300)
    odd = replace(p, M=301)
    assert grad_plan.seen_rows(odd) == (101, 301)
    assert (grad_plan.shift(odd), grad_plan.pitch(odd)) == (3, 304)
    assert (101 + grad_plan.shift(odd)) % 4 == 0
    assert grad_plan.workspace_bytes(odd) == 4 * (2 * 304 + 301 * 128)
    turns = replace(odd, deterministic=True)
    assert grad_plan.workspace_bytes(turns) == 4 * (2 * 304 + 301 * 128 + 5)
