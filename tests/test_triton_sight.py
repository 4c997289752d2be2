"""What triton_any sees of a mask's arrays before it goes through tiles, in Triton's interpreter.

The tiles that are worked on, with masks and without, are held against a square of visible pairs;
the values against the oracle. As in test_triton_interpret.py, in a process of its own.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import nosquare as ns
from helpers import INF, NAN, Case, case, check, rnd
from nosquare.bound import visible

pytest.importorskip("triton", reason="triton_any is written in Triton")
from test_triton_backward import small
from test_triton_interpret import INTERPRETED, attention, inside, run_inside

__all__ = ["small"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
M, N, HEADS, BATCH = 70, 200, 2, 2


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.parametrize("group", ["masks", "runs"])
def test_in_the_interpreter(group: str) -> None:
    run_inside(Path(__file__), group)


def documents(q_lengths: list[int], k_lengths: list[int], names: list[int]) -> ns.Documents:
    """Documents of these lengths and ids, which may come again."""
    ids = torch.tensor(names)
    q_ids, k_ids = (ids.repeat_interleave(torch.tensor(x)) for x in (q_lengths, k_lengths))
    return ns.Documents(q_ids[None], k_ids[None])


def masks() -> dict[str, ns.Mask]:
    """Of M queries, N keys, HEADS and BATCH."""
    i, j = torch.arange(M)[:, None], torch.arange(N)
    long = documents([70, 0], [170, 30], [3, 4])
    inner = documents([5, 34, 31], [21, 100, 79], [0, 1, 2])
    again = documents([40, 20, 10], [90, 70, 40], [5, 6, 5])
    empty = documents([20, 40, 10], [0, 150, 50], [1, 2, 3])
    by_head = torch.tensor([150, 30])[:, None, None]
    return {
        "one long run": long,
        "begin inside tiles": inner,
        "one that comes again": again,
        "rows that see nothing": empty,
        "documents and causal": inner & ns.Causal(),
        "documents and a window": long & ns.Window(100, 3),
        "lengths": ns.Lengths(torch.tensor([0, 131])),
        "all of it": ns.Lengths(torch.tensor([N, 1])),
        "lengths and causal": ns.Lengths(torch.tensor([180, 0])) & ns.Causal(),
        "lengths or a prefix": ns.Lengths(torch.tensor([100, 7])) | ns.Prefix(40),
        "pairs": ns.Dense((j < 2 * i + 40) & (j // 33 != 1)),
        "pairs of an entry": ns.Dense(torch.stack([(j < i + 60), (j > i + 9)])[:, None]),
        "pairs of a head": ns.Dense((j + i < by_head) | (j > 170)),
        "keys of a head": ns.Dense(j < by_head),
        "tiles": ns.BlockSparse(rnd(3, 7, seed=5) < 0.8, 32),
        "either": again | ns.Window(50, 0),
    }


# (entries, heads) of the cases of a mask, where it is not one of each: the interpreter is slow
SIZES = {
    "one long run": (BATCH, HEADS),
    **dict.fromkeys(("lengths", "all of it", "lengths and causal"), (BATCH, 1)),
    **dict.fromkeys(("lengths or a prefix", "pairs of an entry"), (BATCH, 1)),
    **dict.fromkeys(("pairs of a head", "keys of a head"), (1, HEADS)),
}


class Tiles(NamedTuple):
    """Tiles that are gone through: with the mask, and whole ones without."""

    masked: int
    whole: int


def of_tiles(
    mask: ns.Mask, sizes: tuple[int, int], m: int, n: int, keys: bool, partial: bool = True
) -> Tiles:
    """What there is to go through for a tile of m rows (keys: across them by tiles of n keys) or of
    n keys, by the square of pairs of so many entries and heads. partial: rows beyond M make no tile
    less whole, if keys; keys beyond N do, and so do both if not keys."""
    seen = visible(mask, M, N, sizes[1], sizes[:1])
    pad = (0, -N % n, 0, -M % m)

    def cut(x: Tensor, fill: bool) -> Tensor:
        x = torch.nn.functional.pad(x, pad, value=fill)
        return x.unflatten(-1, (-1, n)).unflatten(-3, (-1, m)).transpose(-3, -2)

    some = cut(seen, False).any(-1).any(-1)
    exists = cut(torch.ones_like(seen), not (keys and partial)).any(-1, keepdim=True)
    hidden = ~cut(seen, False) & exists
    every = ~hidden.any(-1).any(-1)
    if not keys:
        some, every = some.transpose(-1, -2), every.transpose(-1, -2)
    holes = isinstance(mask, ns.Dense | ns.BlockSparse) and mask.tensors[0].shape[-2] > 1
    holes = holes or "|" in str(mask)
    masked = whole = 0
    for one, run in zip(some.flatten(0, -2), every.flatten(0, -2), strict=True):
        at = one.nonzero().flatten().tolist()
        if not at:
            continue
        longest = max(map(len, "".join("x" if r else " " for r in run.tolist()).split()), default=0)
        tiles = len(at) if holes else at[-1] + 1 - at[0]
        masked, whole = masked + tiles - longest, whole + longest
    return Tiles(masked, whole)


@pytest.fixture
def visits(small: None, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """(function of a tile, with the mask): how often it was called."""
    from nosquare.backends.triton_any import attend_kernel, grad_keys, grad_queries

    found: Counter[tuple[str, bool]] = Counter()

    def counted(name: str, place: int, run: Any, *of: Any) -> Any:
        found[name, bool(of[place])] += 1
        return run(*of)

    for where, name, place in (
        (attend_kernel, "_visit", 15),
        (grad_keys, "_queries", 13),
        (grad_queries, "_keys", 12),
    ):
        run = partial(counted, name, place, getattr(where, name))
        monkeypatch.setattr(where, name, run)
    return found


@inside
@pytest.mark.parametrize("name", list(masks()))
def test_masks_with_runs_are_gone_through_without_looking(
    visits: Counter[tuple[str, bool]], name: str
) -> None:
    mask = masks()[name]
    sizes = batch, heads = SIZES.get(name, (1, 1))
    c = case(batch=(batch,), hq=heads, hk=1, m=M, n=N, d=8, mask=mask)
    with ns.receipts() as log:
        check(c, attention)
    assert log[0].kernels == ("sight", "attend")
    assert [name for name in log[1].kernels if name == "sight"] == ["sight", "sight"]
    names = ("_visit", "_queries", "_keys")
    found = {f: Tiles(visits[f, True], visits[f, False]) for f in names}
    assert found == {
        "_visit": of_tiles(mask, sizes, 16, 16, True),
        "_queries": of_tiles(mask, sizes, 16, 32, False),
        "_keys": of_tiles(mask, sizes, 16, 32, True, partial=False),
    }


@inside
@pytest.mark.usefixtures("small")
def test_runs_meet_no_key_that_nobody_sees() -> None:
    """Nothing of the last tile, or of what lengths leave, is loaded as if it were there."""
    for last in (160, 161, 175):
        c = case(m=M, n=N, d=8, mask=ns.Lengths(torch.tensor([last, 0])))
        k, v = c.k.clone(), c.v.clone()
        k[0, :, last:], v[0, :, last:], k[1], v[1] = NAN, INF, INF, NAN
        check(Case(c.q, k, v, c.options), attention)


@inside
@pytest.mark.usefixtures("small")
def test_runs_of_options() -> None:
    more: dict[str, Any] = {
        "softcap": 2.0,
        "alibi": rnd(4, seed=4).abs(),
        "sinks": rnd(4, seed=6),
        "bias": rnd(M, N, seed=5),
        "dropout": ns.Dropout(0.5, 9),
    }
    mask = masks()["begin inside tiles"]
    for options in ({}, more, *({name: value} for name, value in more.items())):
        check(case(m=M, n=N, d=8, e=20, mask=mask, **options), attention)


@inside
@pytest.mark.usefixtures("small")
def test_runs_follow_arrays_that_change_in_place() -> None:
    """Nothing that was seen in one call is known in the next."""
    ids = torch.zeros(1, N, dtype=torch.int64)
    q, k, v = rnd(1, 2, M, 8, seed=1), rnd(1, 2, N, 8, seed=2), rnd(1, 2, N, 8, seed=3)
    for at in (0, 30, 131):
        ids[:, at:] += 1
        check(Case(q, k, v, {"mask": ns.Documents(ids[:, N - M :], ids)}), attention)


@inside
@pytest.mark.usefixtures("small")
def test_runs_of_packed_sequences() -> None:
    lengths_q, lengths_k = [35, 0, 17, 3], [60, 40, 0, 80]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k))
    q, k, v = rnd(58, 4, 8, seed=1), rnd(184, 2, 8, seed=2), rnd(184, 2, 20, seed=3)
    q[55:], k[180:], v[180:] = NAN, NAN, NAN  # tokens that no sequence owns
    do = rnd(58, 4, 20, seed=4)
    do[55:] = NAN
    for lengths in ([60, 40, 0, 80], [49, 0, 0, 64]):
        for mask in (ns.Lengths(torch.tensor(lengths)), ns.Causal()):
            both = ns.Lengths(torch.tensor(lengths)) & mask
            found = []
            for backend, dtype in (("triton_any", torch.float32), ("torch_any", torch.float64)):
                leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
                with ns.receipts() as log:
                    o = ns.attention_varlen(*leaves, cu_q, cu_k, mask=both, backend=backend)
                assert ("sight" in log[0].kernels) == (backend == "triton_any")
                grads = torch.autograd.grad(o, leaves, do.to(dtype))
                found.append([t.double() for t in (o.detach(), *grads)])
            for got, want in zip(*found, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
