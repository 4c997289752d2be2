"""triton_any in Triton's interpreter: values of the same kernels without a GPU, on tiny cases.

Triton decides when a kernel is imported whether it will be interpreted, so the cases run in
processes of their own: here each group is started once, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import nosquare as ns
from helpers import INF, NAN, Case, case, check, forget, rnd
from kinds import masks, options
from nosquare import mask as mask_module
from nosquare import oracle
from nosquare.bound import visible

pytest.importorskip("triton", reason="triton_any is written in Triton")
# numpy, which stands for the card, warns where IEEE arithmetic gives an infinity or NaN
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
OPTIONS = options(21, 61)
GROUPS = ["sizes", "masks", "options", "hard", "packed"]


def run_inside(file: Path, group: str) -> None:
    """The tests of a group of a file, in a process that interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [*command, "-k", f"test_{group}_", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.parametrize("group", GROUPS)
def test_in_the_interpreter(group: str) -> None:
    run_inside(Path(__file__), group)


def look_at_few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a mask with arrays are looked at by twos, threes or fours, not all of them."""
    from triton.language import constexpr

    from nosquare.backends.triton_any import sight

    monkeypatch.setattr(sight, "AT_A_LOOK", constexpr(1 << 10))


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Force tiles of the forward: rows, keys, splits."""
    from nosquare.backends.triton_any import attend_plan

    def force(tile_m: int, tile_n: int, splits: int = 1) -> None:
        monkeypatch.setattr(attend_plan, "FORCED", (tile_m, tile_n, splits))
        look_at_few_tiles(monkeypatch)
        forget(monkeypatch)

    force(16, 16)
    return force


def attention(**options: Any) -> ns.State:
    return ns.attention_state(**options, backend="triton_any")


def agrees(c: Case) -> None:
    check(c, attention, grads=False)


# every tail: of rows, of keys, of widths; groups of heads folded into rows and not
SIZES: list[dict[str, Any]] = [
    {"m": 1, "n": 1, "d": 1},
    {"m": 16, "n": 32, "d": 16},
    {"m": 17, "n": 33, "d": 16, "e": 33},
    {"m": 35, "n": 19, "d": 7, "e": 3, "hq": 6, "hk": 2},
    {"m": 1, "n": 50, "d": 24, "hq": 6, "hk": 2},
    {"m": 3, "n": 50, "d": 24, "hq": 10, "hk": 2},
    {"m": 20, "n": 0, "d": 8},
    {"batch": (), "m": 5, "n": 20},
    {"batch": (2, 2), "m": 5, "n": 20, "hq": 2},
]


@inside
@pytest.mark.parametrize("mask", [None, ns.Causal(), ns.Causal("start"), ns.Window(9, 2)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.usefixtures("tiles")
def test_sizes_and_masks(sizes: dict[str, Any], mask: ns.Mask | None) -> None:
    agrees(case(mask=mask, **sizes))


@inside
@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("mask", [None, ns.Causal(), ns.Window(9, 2)], ids=str)
def test_sizes_split(tiles: Callable[..., None], mask: ns.Mask | None, splits: int) -> None:
    tiles(16, 16, splits)
    options = {"sinks": rnd(6, seed=4), "dropout": ns.Dropout(0.3, 7)}
    for m, n in ((1, 150), (3, 90), (20, 37)):
        agrees(case(m=m, n=n, d=8, e=20, hq=6, hk=2, mask=mask))
        agrees(case(m=m, n=n, d=8, e=20, hq=6, hk=2, mask=mask, **options))


@inside
@pytest.mark.usefixtures("tiles")
def test_sizes_in_any_order_in_memory() -> None:
    q = rnd(2, 33, 4, 24, seed=1).transpose(1, 2)
    k = rnd(2, 40, 2, 30, seed=2)[..., 3:27].transpose(1, 2)
    v = rnd(2, 2, 20, 80, seed=3).transpose(2, 3)[:, :, ::2]  # neither axis side by side
    agrees(Case(q, k, v, {"mask": ns.Causal()}))
    one = rnd(1, 1, 40, 24, seed=2).expand(2, 2, 40, 24)  # stride 0
    agrees(Case(q, one, one, {"mask": ns.Causal()}))


@inside
@pytest.mark.usefixtures("tiles")
def test_sizes_of_float16() -> None:
    # not bfloat16: the interpreter keeps its bits in integers, and multiplies those
    agrees(case(dtype=torch.float16, m=35, n=50, mask=ns.Causal()))


def small_masks(m: int, n: int) -> dict[str, ns.Mask]:
    return masks(2, 4, m, n, tile=8, large=12, hidden=16)


@inside
@pytest.mark.parametrize("name", list(small_masks(1, 1)))
@pytest.mark.parametrize("m", [21, 3])
@pytest.mark.usefixtures("tiles")
def test_masks_of_every_kind(m: int, name: str) -> None:
    agrees(case(m=m, n=61, d=8, mask=small_masks(m, 61)[name]))


@dataclass(frozen=True, repr=False)
class Dilated(ns.Mask):
    """A kind that no backend has heard of: every `step`-th key up to the own position."""

    step: int

    def numbers(self, m: int, n: int) -> tuple[int, ...]:
        return (n - m, self.step)

    keep = staticmethod(lambda i, j, r, c, a: (j <= i + a[0]) & ((j + 3) % a[1] == 0))
    span = staticmethod(lambda i_lo, i_hi, n, a: (0, min(n, i_hi + a[0])))
    core = staticmethod(lambda i_lo, i_hi, n, a: (0, 0))


@inside
@pytest.mark.usefixtures("tiles")
def test_masks_of_a_new_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mask_module.KINDS, "dilated", Dilated)
    c = case(m=21, n=61, d=8)
    v = c.v.clone()
    v[..., 1::3, :] = NAN  # what every third key says is never heard
    for mask in (Dilated(3), Dilated(3) & ns.Window(20, 0), Dilated(6) & ns.Prefix(40)):
        keep = visible(mask, 21, 61)[0, 0]
        want = attention(q=c.q, k=c.k, v=c.v, mask=ns.Dense(keep))
        got = attention(q=c.q, k=c.k, v=v, mask=mask)
        torch.testing.assert_close(got.o, want.o, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got.lse, want.lse, rtol=1e-6, atol=1e-6)


@inside
@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.usefixtures("tiles")
def test_options_of_every_kind(name: str) -> None:
    agrees(case(m=21, n=61, d=8, e=24, mask=ns.Causal(), **OPTIONS[name]))


@inside
@pytest.mark.parametrize("offsets", [(0, 0, 0, 0), (3, 1, 4, 1 << 40), (0, 0, 0, 7)], ids=str)
@pytest.mark.usefixtures("tiles")
def test_options_of_dropout_bit_by_bit(offsets: tuple[int, int, int, int]) -> None:
    # equal weights, and values that are the unit vectors: o shows which keys were kept
    n, drop = 48, ns.Dropout(0.37, -3, offsets)
    q, k = torch.zeros(2, 3, 20, 8), torch.zeros(2, 3, n, 8)
    o = attention(q=q, k=k, v=torch.eye(n).expand(2, 3, n, n), dropout=drop).o
    b, h, i, j = offsets
    places = range(b, b + 2), range(h, h + 3), range(i, i + 20), range(j, j + n)
    assert torch.equal(o > 0, ns.dropout_keep(-3, *places, 0.37))


@inside
@pytest.mark.parametrize("last", [40, 41])
@pytest.mark.usefixtures("tiles")
def test_hard_what_nobody_sees_reaches_nothing(last: int) -> None:
    c = case(m=21, n=61, d=8, e=24)
    k, v = c.k.clone(), c.v.clone()
    k[..., last:, :], v[..., last:, :] = NAN, INF
    bias = torch.zeros(61)
    bias[last:] = NAN
    for mask in (
        ns.Prefix(last),
        ns.Lengths(torch.tensor([last, 3])),
        ns.Dense((torch.arange(61) < last).expand(21, 61)),
        ns.Window(last - 21, 0, "start") & ns.Prefix(last),
    ):
        agrees(c.with_(k=k, v=v, mask=mask))
        agrees(c.with_(k=k, v=v, mask=mask, bias=bias[None]))


@inside
@pytest.mark.usefixtures("tiles")
def test_hard_a_row_with_nan_stays_alone() -> None:
    c = case(m=21, n=37, d=8)
    q = c.q.clone()
    q[0, 1, 7] = NAN
    state = attention(q=q, k=c.k, v=c.v)
    bad = torch.zeros(2, 4, 21, dtype=torch.bool)
    bad[0, 1, 7] = True
    assert torch.equal(state.o.isnan().all(-1), bad)
    assert torch.equal(state.lse.isnan(), bad)


@inside
@pytest.mark.usefixtures("tiles")
def test_hard_scores_that_grow_and_fall() -> None:
    c = case(m=21, n=61, d=8)
    steps = torch.linspace(-30, 30, 61)[:, None]
    for k in (c.k * steps, c.k * steps.flip(0), c.k * 100):
        agrees(c.with_(k=k, mask=ns.Causal()))


@inside
@pytest.mark.usefixtures("tiles")
def test_packed_sequences_are_calls_of_their_own() -> None:
    lengths_q, lengths_k = [5, 0, 37, 3, 2], [9, 4, 37, 0, 60]
    q, k, v = rnd(49, 4, 8, seed=1), rnd(112, 2, 8, seed=2), rnd(112, 2, 20, seed=3)
    q[47:], k[110:], v[110:] = NAN, NAN, NAN  # tokens that no sequence owns
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k))
    sinks, drop = rnd(4, seed=4), ns.Dropout(0.2, 5, (3, 0, 1, 2))
    for mask in (
        ns.Full(),
        ns.Causal() & ns.Lengths(torch.tensor([9, 4, 30, 0, 60])),
        ns.Window(7, 1) | ns.Prefix(2),
    ):
        options: dict[str, Any] = {"mask": mask, "dropout": drop, "sinks": sinks}
        got = ns.attention_varlen(q, k, v, cu_q, cu_k, backend="triton_any", **options)
        want = torch.zeros(49, 4, 20, dtype=torch.float64)
        for b in range(5):
            rows, cols = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            own = ns.Dropout(0.2, 5, (3 + b, 0, 1, 2))
            part = [t[s].transpose(0, 1).double() for t, s in ((q, rows), (k, cols), (v, cols))]
            arrays = tuple(t[b] for t in mask.tensors)
            one = ns.parse(str(mask), arrays)
            state = oracle.attention(*part, mask=one, sinks=sinks.double(), dropout=own)
            want[rows] = state.o.transpose(0, 1)
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5), mask
