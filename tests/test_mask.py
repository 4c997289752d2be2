"""Every mask kind: keep, span and core agree with an independent truth; spellings round-trip;
bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nosquare as ns
from helpers import rnd, truth
from nosquare.bound import Bound, Rectangle
from nosquare.mask import KINDS, Mask

SIDES = st.none() | st.integers(0, 12)
ALIGN = st.sampled_from(["end", "start"])
Sizes = tuple[int, int, int, int]  # batch, heads, M, N


def array(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def made(kind: str, sizes: Sizes, draw: st.DrawFn) -> Mask:
    """A random mask of one kind. A new kind fails here until it is given a line."""
    b, h, m, n = sizes
    seed = draw(st.integers(0, 99))
    match kind:
        case "full":
            return ns.Full()
        case "causal":
            return ns.Causal(draw(ALIGN))
        case "window":
            return ns.Window(draw(SIDES), draw(SIDES), draw(ALIGN))
        case "prefix":
            return ns.Prefix(draw(st.integers(0, 30)))
        case "lengths":
            return ns.Lengths((array(seed, b) * (n + 2)).long())
        case "documents":
            q_ids, k_ids = (array(seed, b, m) * 4).int(), (array(seed + 1, n) * 3).int()
            return ns.Documents(q_ids, k_ids)
        case "dense":
            shape = draw(st.sampled_from([(h, m, n), (1, n), (m, 1), (b, 1, 1, n), (b, h, m, n)]))
            return ns.Dense(array(seed, *shape) < 0.5)
        case "blocksparse":
            side = draw(st.integers(1, 9))
            return ns.BlockSparse(array(seed, h, -(-m // side), -(-n // side)) < 0.5, side)
    raise AssertionError(f"say here how to make a mask of kind {kind}")


@st.composite
def problems(draw: st.DrawFn, kind: str = "") -> tuple[Mask, Sizes]:
    sizes = tuple(draw(st.integers(1, high)) for high in (2, 2, 20, 20))

    def mask(depth: int) -> Mask:
        if depth == 0 or draw(st.booleans()):
            return made(draw(st.sampled_from(sorted(KINDS))), sizes, draw)  # type: ignore[arg-type]
        left, right = mask(depth - 1), mask(depth - 1)
        return left & right if draw(st.booleans()) else left | right

    return (made(kind, sizes, draw) if kind else mask(2)), sizes  # type: ignore[arg-type,return-value]


def agrees(mask: Mask, sizes: Sizes, i: slice) -> None:
    """keep is the truth; outside span nothing is kept; inside core everything is; tile is keep."""
    b, h, m, n = sizes
    want = truth(mask, (b,), h, m, n)
    assert torch.equal(ns.visible(mask, m, n, h, (b,)), want)
    bound = Bound(mask, (b,), h, m, n)
    lo, hi = bound.span(i.start, i.stop)
    assert 0 <= lo <= hi <= n
    rows = want[:, :, i]
    assert not rows[..., :lo].any()
    assert not rows[..., hi:].any()
    for leaf in (part for part in [bound] if not part.parts):
        c_lo, c_hi = leaf.mask.core(i.start, i.stop, n, leaf.numbers)
        assert rows[..., max(c_lo, 0) : max(c_hi, 0)].all()
    for j in (slice(0, n), slice(lo, hi), slice(n // 3, n // 2 + 1), slice(n - 1, n)):
        tile = bound.tile(Rectangle(slice(0, b), slice(0, h), i, j))
        expected = rows[..., j]
        got = tile.expand(expected.shape) if isinstance(tile, Tensor) else torch.tensor(tile)
        assert torch.equal(got.expand(expected.shape), expected)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_each_kind_agrees_with_the_truth(kind: str, data: st.DataObject) -> None:
    mask, sizes = data.draw(problems(kind))
    lo = data.draw(st.integers(0, sizes[2] - 1))
    agrees(mask, sizes, slice(lo, data.draw(st.integers(lo + 1, sizes[2]))))


@given(data=st.data())
def test_compositions_agree_with_the_truth(data: st.DataObject) -> None:
    mask, sizes = data.draw(problems())
    lo = data.draw(st.integers(0, sizes[2] - 1))
    agrees(mask, sizes, slice(lo, data.draw(st.integers(lo + 1, sizes[2]))))


@given(problem=problems())
def test_spelling_round_trips(problem: tuple[Mask, Sizes]) -> None:
    mask, (b, h, m, n) = problem
    again = ns.parse(str(mask), mask.tensors)
    assert str(again) == str(mask)
    assert [type(leaf) for leaf in again.leaves] == [type(leaf) for leaf in mask.leaves]
    assert all(x is y for x, y in zip(again.tensors, mask.tensors, strict=True))
    assert torch.equal(ns.visible(again, m, n, h, (b,)), truth(mask, (b,), h, m, n))


def test_the_checks_can_fail() -> None:
    """A span one key short, and a core one key long, are caught."""

    class Short(ns.Causal):
        span = staticmethod(lambda i_lo, i_hi, n, a: (0, min(n, i_hi + a[0] - 1)))

    class Long(ns.Causal):
        core = staticmethod(lambda i_lo, i_hi, n, a: (0, min(n, i_lo + a[0] + 2)))

    for wrong in (Short(), Long()):
        with pytest.raises(AssertionError):
            agrees(wrong, (1, 1, 8, 8), slice(2, 5))
    agrees(ns.Causal(), (1, 1, 8, 8), slice(2, 5))


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (ns.Full(), "full()"),
        (ns.Causal(), "causal(end)"),
        (ns.Causal("start"), "causal(start)"),
        (ns.Window(3, None), "window(before=3,after=None)"),
        (ns.Window(0, 1, "start"), "window(before=0,after=1,align=start)"),
        (ns.Prefix(4), "prefix(n=4)"),
        (ns.Lengths(torch.tensor([1])), "lengths(t0)"),
        (ns.Documents(torch.tensor([1]), torch.tensor([1])), "documents(t0,t1)"),
        (ns.Dense(torch.tensor([[True]])), "dense(t0)"),
        (ns.BlockSparse(torch.tensor([[True]]), 8), "blocksparse(t0,block=8)"),
        (ns.Causal() & ns.Prefix(1) & ns.Full(), "causal(end)&prefix(n=1)&full()"),
        (ns.Causal() & (ns.Prefix(1) | ns.Full()), "causal(end)&(prefix(n=1)|full())"),
        (
            (ns.Lengths(torch.tensor([1])) & ns.Causal()) | ns.Dense(torch.tensor([[True]])),
            "(lengths(t0)&causal(end))|dense(t1)",
        ),
    ],
)
def test_spellings(mask: Mask, text: str) -> None:
    assert str(mask) == text
    assert repr(mask) == text
    assert str(ns.parse(f" {text} ", mask.tensors)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "causal",
        "causal(",
        "causal(middle)",
        "causal(end)+full()",
        "~causal(end)",
        "causal(end)&1",
        "causal(end, start)",
        "causal(**5)",
        "window(before=-1)",
        "window(before=x)",
        "window(before=1.5)",
        "prefix()",
        "prefix(n=1,m=2)",
        "lengths(t1)",
        "lengths(5)",
        "nonsense(3)",
        "__import__('os')",
        "full().keep",
        "|".join(["full()"] * 5000),
    ],
    ids=lambda text: text[:24] or "empty",
)
def test_bad_spellings(text: str) -> None:
    with pytest.raises(ns.ArgumentError):
        ns.parse(text, [torch.tensor([3])])


BATCH, HQ, M, N = (2,), 4, 5, 7
MISFITS: list[tuple[str, Mask]] = [
    ("lengths: 3 for 2 entries", ns.Lengths(torch.tensor([1, 2, 3]))),
    ("lengths: an axis too many", ns.Lengths(torch.ones(3, 2, dtype=torch.int64))),
    ("documents: q too short", ns.Documents(torch.zeros(4).long(), torch.zeros(7).long())),
    ("documents: k broadcast", ns.Documents(torch.zeros(5).long(), torch.zeros(1).long())),
    ("documents: 3 entries", ns.Documents(torch.zeros(3, 5).long(), torch.zeros(7).long())),
    ("dense: N + 1", ns.Dense(torch.ones(5, 8).bool())),
    ("dense: 3 heads", ns.Dense(torch.ones(3, 5, 7).bool())),
    ("dense: key heads", ns.Dense(torch.ones(2, 5, 7).bool())),
    ("dense: 3 entries", ns.Dense(torch.ones(3, 1, 5, 7).bool())),
    ("blocksparse: pairs, not tiles", ns.BlockSparse(torch.ones(5, 7).bool(), 4)),
    ("blocksparse: too few tiles", ns.BlockSparse(torch.ones(2, 1, 2).bool(), 2)),
    ("inside a composition", ns.Causal() & (ns.Full() | ns.Dense(torch.ones(5, 8).bool()))),
]


@pytest.mark.parametrize("mask", [m for _, m in MISFITS], ids=[name for name, _ in MISFITS])
def test_arrays_that_do_not_fit(mask: Mask) -> None:
    q, k = rnd(*BATCH, HQ, M, 8), rnd(*BATCH, 2, N, 8)
    with pytest.raises(ns.ArgumentError, match="does not fit the problem"):
        ns.attention(q, k, k, mask=mask)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ns.Lengths([3, 5]),
        lambda: ns.Lengths(torch.tensor([3.0])),
        lambda: ns.Documents([0], [0]),
        lambda: ns.Documents(torch.tensor([0]), torch.tensor([0.5])),
        lambda: ns.Dense([[True]]),
        lambda: ns.Dense(torch.zeros(3, 3)),
        lambda: ns.BlockSparse(torch.ones(2, 2), 8),
        lambda: ns.BlockSparse(torch.ones(2, 2).bool(), 0),
        lambda: ns.BlockSparse(torch.ones(2, 2).bool(), 1.5),
        lambda: ns.Prefix(-1),
        lambda: ns.Prefix(1.5),
        lambda: ns.Window(-1, 0),
        lambda: ns.Window(0, 1.5),
        lambda: ns.Causal("top"),
        lambda: ns.Window(1, 1, "top"),
        lambda: ns.Causal() & torch.ones(2, 2).bool(),
        lambda: ns.Causal() | None,
    ],
)
def test_bad_masks(make: Any) -> None:
    with pytest.raises(ns.ArgumentError):
        make()


def test_windows_of_any_size_are_exact_integers() -> None:
    """A window far beyond the sequence is unbounded, not an overflow."""
    assert ns.visible(ns.Window(1 << 62, 1 << 80), 5, 9).all()
    assert ns.visible(ns.Prefix(1 << 80), 5, 9).all()
    assert torch.equal(ns.visible(ns.Window(1 << 62, 0), 5, 9), ns.visible(ns.Causal(), 5, 9))


def test_masks_are_values() -> None:
    assert ns.Causal() == ns.Causal("end") != ns.Causal("start")
    assert len({ns.Window(1, 2), ns.Window(1, 2), ns.Window(2, 1)}) == 2
    with pytest.raises(AttributeError):
        ns.Causal().align = "start"  # type: ignore[misc]
