"""Pairs and tiles in closed form are those that counting one by one gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nosquare as ns
from nosquare import mask as masks
from nosquare import pairs as counting
from nosquare.bound import Bound, Rectangle
from nosquare.mask import Both, Either, Mask
from nosquare.pairs import Pairs, Visits, pairs, reached, visited, visits
from nosquare.pairs.lines import Crossing, Line, floor_sum
from nosquare.problem import Problem

MILLION = 1 << 20


def problem(
    mask: Mask | str, m: int, n: int, hq: int = 1, hk: int = 1, batch: tuple[int, ...] = (1,)
) -> Problem:
    """A problem of these sizes, with contiguous strides and no array."""
    strides = tuple((h * s * 8, s * 8, 8, 1) for h, s in ((hq, m), (hk, n), (hk, n)))
    cpu = torch.device("cpu")
    return Problem(batch, hq, hk, m, n, 8, 8, torch.float32, cpu, strides, 1.0, str(mask))


def by_hand(mask: Mask, m: int, n: int, hq: int = 1, batch: tuple[int, ...] = (1,)) -> int:
    return int(ns.visible(mask, m, n, hq, batch).sum())


def spans(mask: Mask, rows: range, m: int, n: int) -> set[int]:
    """The keys that the spans of the kinds let some row of a tile see."""
    if isinstance(mask, Both):
        parts = [spans(part, rows, m, n) for part in mask.parts]
        return set.union(*parts) if isinstance(mask, Either) else set.intersection(*parts)
    return set(range(*mask.span(rows.start, rows.stop, n, mask.numbers(m, n))))


def tiles_by_hand(mask: Mask, m: int, n: int, tile_m: int, tile_n: int) -> Visits:
    total = Visits()
    for i in range(0, m, tile_m):
        rows = range(i, min(i + tile_m, m))
        for j in sorted({key // tile_n for key in spans(mask, rows, m, n)}):
            width = min((j + 1) * tile_n, n) - j * tile_n
            total += Visits(1, len(rows) * width, width, len(rows))
    return total


# ---- interval masks -----------------------------------------------------------------------------

count = st.integers(0, 9)
aligned = st.sampled_from(["end", "start"])
kinds = st.one_of(
    st.just(ns.Full()),
    st.builds(ns.Causal, aligned),
    st.builds(ns.Window, st.none() | count, st.none() | count, aligned),
    st.builds(ns.Prefix, st.integers(0, 20)),
)
composed = st.recursive(
    kinds,
    lambda parts: st.builds(
        lambda a, b, either: a | b if either else a & b, parts, parts, st.booleans()
    ),
    max_leaves=5,
)
lengths = st.integers(0, 17)


@settings(max_examples=300)
@given(composed, lengths, lengths)
def test_pairs_of_interval_masks(mask: Mask, m: int, n: int) -> None:
    assert pairs(problem(mask, m, n)) == Pairs(by_hand(mask, m, n), True)


@settings(max_examples=300)
@given(composed, lengths, lengths, st.integers(1, 7), st.integers(1, 7))
def test_tiles_of_interval_masks(mask: Mask, m: int, n: int, tile_m: int, tile_n: int) -> None:
    p = problem(mask, m, n)
    assert visits(p, tile_m, tile_n) == tiles_by_hand(mask, m, n, tile_m, tile_n)
    assert visited(p, 1, 1) == pairs(p).count


@given(composed, lengths, lengths)
def test_what_is_reached(mask: Mask, m: int, n: int) -> None:
    seen = ns.visible(mask, m, n)[0, 0]
    rows, keys = reached(problem(mask, m, n))
    assert rows == int(seen.any(1).sum())
    assert int(seen.any(0).sum()) <= keys <= n
    if m == 1:
        assert keys == int(seen.sum())


@given(kinds, kinds, lengths, lengths, st.integers(1, 7), st.integers(1, 7))
def test_tiles_are_those_that_bound_lets_pass(
    a: Mask, b: Mask, m: int, n: int, tile_m: int, tile_n: int
) -> None:
    """Of one kind and of a | b, every tile that bound.Bound.tile does not call hidden."""
    for mask in (a, a | b):
        bound, found = Bound(mask, (1,), 1, m, n), 0
        for i in range(0, m, tile_m):
            for j in range(0, n, tile_n):
                i_hi, j_hi = min(i + tile_m, m), min(j + tile_n, n)
                tile = Rectangle(slice(0, 1), slice(0, 1), slice(i, i_hi), slice(j, j_hi))
                found += (i_hi - i) * (j_hi - j) * (bound.tile(tile) is not False)
        assert visited(problem(mask, m, n), tile_m, tile_n) == found


def test_known_numbers() -> None:
    n = 16384
    assert pairs(problem(ns.Causal(), n, n)).count == n * (n + 1) // 2
    assert pairs(problem(ns.Full(), 1, n)).count == n  # a decoding step is 1 x N
    assert pairs(problem(ns.Causal(), 1, n)).count == n
    assert pairs(problem(ns.Causal("start"), 1, n)).count == 1
    window = ns.Causal() & ns.Window(before=4095, after=0)
    assert pairs(problem(window, n, n)).count == 4096 * 4097 // 2 + (n - 4096) * 4096
    assert pairs(problem(ns.Causal(), n, n, 32, 8, (2, 3))).count == 6 * 32 * n * (n + 1) // 2


def test_long_sequences_are_counted_and_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kinds are asked a few times, however long the sequences are."""
    asked = 0
    span = ns.Causal.span

    def counted(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return span(*args)

    monkeypatch.setattr(ns.Causal, "span", staticmethod(counted))
    p = problem(ns.Causal(), MILLION, MILLION)
    assert pairs(p).count == MILLION * (MILLION + 1) // 2
    tiles = MILLION // 128
    assert visits(p, 128, 128).tiles == tiles * (tiles + 1) // 2
    assert asked < 20


@given(st.integers(0, 30), st.integers(1, 9), st.integers(-20, 20), st.integers(-50, 50))
def test_floor_sum(n: int, divisor: int, slope: int, base: int) -> None:
    want = sum((slope * t + base) // divisor for t in range(n))
    assert floor_sum(n, divisor, slope, base) == want


@given(
    st.integers(-9, 9), st.integers(-4, 4), st.integers(0, 5), st.integers(1, 9), st.integers(1, 17)
)
def test_lines_answer_for_all_or_say_where(
    base: int, slope: int, lo: int, n: int, other: int
) -> None:
    line = Line(base, slope, lo, lo + n)
    values = [base + slope * t for t in range(lo, lo + n)]
    for compare in (int.__lt__, int.__le__, int.__gt__, int.__ge__, int.__eq__, int.__floordiv__):
        want = [compare(v, other) for v in values]
        found, t = answer(getattr(line, compare.__name__), other)
        if t is None:
            assert [found] * n == want
        else:
            assert lo < t < lo + n
            assert compare is int.__eq__ or len(set(want)) > 1


def answer(ask: Callable[[int], Any], other: int) -> tuple[Any, int | None]:
    """What a Line says, or the t at which it changes its mind."""
    try:
        return ask(other), None
    except Crossing as crossing:
        return None, crossing.t


# ---- new kinds: one class, and nothing here to change -------------------------------------------


@dataclass(frozen=True, repr=False)
class Chunks(Mask):
    """Keys of the query's own chunk, up to itself."""

    size: int

    def numbers(self, m: int, n: int) -> tuple[int, ...]:
        return (n - m, self.size)

    keep = staticmethod(lambda i, j, r, c, a: (j <= i + a[0]) & (j >= (i + a[0]) // a[1] * a[1]))
    span = staticmethod(
        lambda i_lo, i_hi, n, a: (max(0, (i_lo + a[0]) // a[1] * a[1]), min(n, i_hi + a[0]))
    )
    core = staticmethod(
        lambda i_lo, i_hi, n, a: (
            max(0, (i_hi - 1 + a[0]) // a[1] * a[1]),
            min(n, i_lo + a[0] + 1),
        )
    )


@dataclass(frozen=True, repr=False)
class Even(Mask):
    """Even keys: no interval."""

    keep = staticmethod(lambda i, j, r, c, a: j % 2 == 0)
    span = staticmethod(lambda i_lo, i_hi, n, a: (0, n))
    core = staticmethod(lambda i_lo, i_hi, n, a: (0, 0))


@dataclass(frozen=True, repr=False)
class Squares(Mask):
    """Keys up to the square of the position: an interval, of arithmetic that Lines do not know."""

    keep = staticmethod(lambda i, j, r, c, a: j <= i * i)
    span = staticmethod(lambda i_lo, i_hi, n, a: (0, min(n, (i_hi - 1) * (i_hi - 1) + 1)))
    core = staticmethod(lambda i_lo, i_hi, n, a: (0, min(n, i_lo * i_lo + 1)))


@pytest.fixture
def new_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Chunks, Even, Squares):
        monkeypatch.setitem(masks.KINDS, kind.__name__.lower(), kind)


@pytest.mark.parametrize("mask", [Chunks(5), Chunks(5) | ns.Prefix(2), Even(), Even() & ns.Causal(),
                                  Squares(), Squares() & ns.Causal()])  # fmt: skip
@pytest.mark.parametrize(("m", "n"), [(1, 9), (13, 13), (4, 17), (17, 4), (6, 0)])
def test_new_kinds_are_counted(new_kinds: None, mask: Mask, m: int, n: int) -> None:
    p = problem(mask, m, n)
    assert pairs(p) == Pairs(by_hand(mask, m, n), True)
    if not isinstance(mask.leaves[0], Squares):
        assert visits(p, 3, 4) == tiles_by_hand(mask, m, n, 3, 4)


def test_a_new_interval_kind_is_counted_in_closed_form(
    new_kinds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "LOOKED_AT", 0)
    assert pairs(problem(Chunks(8192), MILLION, MILLION)).count == 128 * 8192 * 8193 // 2
    assert not pairs(problem(Even(), 8, 8)).exact


# ---- masks with arrays --------------------------------------------------------------------------


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


B, M, N = 2, 11, 13
LENGTHS = ns.Lengths(ids(4, 13))
DOCUMENTS = ns.Documents(
    torch.stack([ids(*[0] * 5, *[1] * 4, *[3] * 2), ids(*[7] * 11)]),
    torch.stack([ids(*[0] * 5, *[1] * 4, *[2] * 4), ids(*[7] * 3, *[5] * 4, *[7] * 6)]),
)
RANDOM = torch.rand(B, 4, M, N, generator=torch.Generator().manual_seed(0)) < 0.4
ARRAYS = {
    "lengths": LENGTHS,
    "lengths, causal": LENGTHS & ns.Causal(),
    "lengths or a prefix": LENGTHS & ns.Window(2, 2) | ns.Prefix(3),
    "documents": DOCUMENTS,
    "documents, causal": DOCUMENTS & ns.Causal("start"),
    "documents or a window": DOCUMENTS & ns.Causal("start") | ns.Window(1, 1),
    "documents of random ids": ns.Documents(
        torch.randint(3, (M,), generator=torch.Generator().manual_seed(1)),
        torch.randint(3, (N,), generator=torch.Generator().manual_seed(2)),
    ),
    "dense over keys": ns.Dense(RANDOM[:, :1, :1]),
    "dense over queries": ns.Dense(RANDOM[:1, :1, :, :1]) & ns.Causal(),
    "dense over heads": ns.Dense(RANDOM[:, :, :1]),
    "dense": ns.Dense(RANDOM) & ns.Causal(),
    "block sparse": ns.BlockSparse(RANDOM[0, 0, :3, :4], 4) | ns.Window(0, 0),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_pairs_of_masks_with_arrays(name: str) -> None:
    mask = ARRAYS[name]
    p = problem(mask, M, N, 4, 2, (B,))
    assert pairs(p, mask.tensors) == Pairs(by_hand(mask, M, N, 4, (B,)), True)


@pytest.mark.parametrize("name", ARRAYS)
def test_tiles_of_masks_with_arrays(name: str) -> None:
    """No visible pair lies outside the tiles that are visited; tiles of 1 x 1 are the pairs."""
    mask = ARRAYS[name]
    p, seen = problem(mask, M, N, 4, 2, (B,)), ns.visible(mask, M, N, 4, (B,))
    assert visited(p, 1, 1, mask.tensors) == int(seen.sum())
    for tile_m, tile_n in ((3, 4), (4, 4), (M, 1), (5, N)):
        needed = 0
        for i in range(0, M, tile_m):
            for j in range(0, N, tile_n):
                part = seen[:, :, i : i + tile_m, j : j + tile_n]
                needed += int(part.flatten(2).any(2).sum()) * prod(part.shape[2:])
        found = visited(p, tile_m, tile_n, mask.tensors)
        assert needed <= found <= B * 4 * M * N
        if "," not in name and " or " not in name and " over queries" not in name:
            assert found == needed, (tile_m, tile_n)  # one kind: its tiles are the needed ones


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("on_meta", [False, True])
def test_without_arrays_it_is_a_bound(name: str, on_meta: bool) -> None:
    mask = ARRAYS[name]
    p = problem(mask, M, N, 4, 2, (B,))
    found = pairs(p, [t.to("meta") for t in mask.tensors] if on_meta else ())
    assert not found.exact
    assert by_hand(mask, M, N, 4, (B,)) <= found.count <= B * 4 * M * N
    if name == "lengths, causal":
        assert found.count == B * 4 * by_hand(ns.Causal(), M, N)


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_is_visible_where_there_is_nothing(m: int, n: int) -> None:
    for mask in (
        ns.Documents(torch.zeros(m, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)),
        ns.Lengths(ids(0, 0)) | ns.Documents(torch.arange(m), torch.arange(n)),
        ns.Dense(torch.ones(m, n, dtype=torch.bool)),
    ):
        p = problem(mask, m, n, batch=(B,))
        assert pairs(p, mask.tensors) == Pairs(0, True)
        assert visits(p, 2, 2, mask.tensors) == Visits()
        assert reached(p, mask.tensors) == (0, 0)


def test_what_lengths_let_be_read() -> None:
    p = problem(LENGTHS, M, N, 4, 2, (B,))
    assert reached(p, LENGTHS.tensors) == (4 * 2 * M, 4 * (4 + 13))
    assert reached(p) == (4 * 2 * M, 4 * 2 * N)


def test_many_documents_take_runs_and_not_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "LOOKED_AT", 0)
    owner = torch.arange(MILLION) // 4096
    mask = ns.Documents(owner, owner) & ns.Causal()
    assert pairs(problem(mask, MILLION, MILLION), mask.tensors) == Pairs(
        256 * 4096 * 4097 // 2, True
    )


def test_too_many_pairs_to_look_at_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "LOOKED_AT", M * N - 1)
    mask = ARRAYS["dense"]
    found = pairs(problem(mask, M, N, 4, 2, (B,)), mask.tensors)
    assert found == Pairs(B * 4 * by_hand(ns.Causal(), M, N), False)


# ---- packed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [ns.Full(), ns.Causal(), ns.Lengths(ids(2, 0, 6))])
def test_packed_sequences(mask: Mask) -> None:
    sizes = [(3, 4), (0, 2), (5, 7)]
    cu: Sequence[Tensor] = [torch.tensor([0, *(s[i] for s in sizes)]).cumsum(0) for i in (0, 1)]
    p = replace(problem(mask, 8, 13, 4, 2, (3,)), packed=True)
    alone = [
        ns.Lengths(mask.n_keys[b : b + 1]) if isinstance(mask, ns.Lengths) else mask
        for b in range(3)
    ]
    want = sum(by_hand(own, m, n, 4) for own, (m, n) in zip(alone, sizes, strict=True))
    assert pairs(p, mask.tensors, (cu[0], cu[1])) == Pairs(want, True)
    assert pairs(p) == Pairs(4 * 8 * 13, False)
