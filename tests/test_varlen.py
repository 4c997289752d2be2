"""Packed sequences: what each would be alone, and nothing from or to what no sequence owns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import helpers
import nosquare as ns
from helpers import DTYPES, NAN, Case, Exact, bounds, close, name_of, rnd
from nosquare import oracle
from nosquare.api import varlen_state

# sequences without queries, without keys, without either, and longer than the others
LQ, LK = [7, 0, 5, 0, 30, 1], [9, 4, 0, 0, 21, 40]
Lengths = tuple[list[int], list[int]]  # of the queries and of the keys of each sequence


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.force_tiles(monkeypatch)


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(dtype)


def packed(
    dtype: torch.dtype = torch.float32,
    hq: int = 4,
    hk: int = 2,
    d: int = 8,
    e: int = 8,
    tail: int = 3,
    lengths: Lengths = (LQ, LK),
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with `tail` tokens that no sequence owns, full of NaN."""
    m, n = (sum(of) + tail for of in lengths)
    q = rnd(m, hq, d, seed=1, dtype=dtype)
    k, v = (rnd(n, hk, w, seed=s, dtype=dtype) for w, s in ((d, 2), (e, 3)))
    for t in (q, k, v):
        t[t.shape[0] - tail :] = NAN
    return q, k, v


def alone(b: int, x: list[Tensor], options: dict[str, Any], lengths: Lengths = (LQ, LK)) -> Case:
    """Sequence b as a case of its own, with its own length, dropout offsets and number of keys."""
    q, k, v = x
    cq, ck = (offsets(of).tolist() for of in lengths)
    own = [t[lo:hi].transpose(0, 1) for t, (lo, hi) in zip(
        (q, k, v), ((cq[b], cq[b + 1]), (ck[b], ck[b + 1]), (ck[b], ck[b + 1])), strict=True
    )]  # fmt: skip
    mine = dict(options)
    if (drop := options.get("dropout")) is not None:
        first, *rest = drop.offsets
        mine["dropout"] = ns.Dropout(drop.p, drop.seed, (first + b, *rest))
    if (mask := options.get("mask")) is not None:
        arrays = [t.expand(len(lengths[0]))[b] for t in mask.tensors]
        mine["mask"] = ns.parse(str(mask), arrays)
    return Case(*own, mine)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal(end)": {"mask": ns.Causal()},
    "causal(start)": {"mask": ns.Causal("start")},
    "window": {"mask": ns.Window(3, 1)},
    "prefix": {"mask": ns.Causal() | ns.Prefix(4)},
    "lengths": {"mask": ns.Lengths(torch.tensor([9, 0, 1, 2, 17, 30])) & ns.Causal()},
    "lengths of all": {"mask": ns.Lengths(torch.tensor([6]))},
    "sinks": {"mask": ns.Causal(), "sinks": rnd(4, seed=9)},
    "dropout": {"dropout": ns.Dropout(0.3, 5)},
    "dropout+offsets": {"dropout": ns.Dropout(0.3, 5, (7, 1, 100, 3)), "mask": ns.Causal()},
    "all": {
        "mask": ns.Causal(),
        "softcap": 2.0,
        "scale": 0.4,
        "alibi": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        "sinks": rnd(4, seed=9),
        "dropout": ns.Dropout(0.2, 1),
    },
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS)
def test_each_sequence_is_as_if_alone(options: str, dtype: torch.dtype) -> None:
    compare(packed(dtype, e=6), OPTIONS[options])


def compare(
    x: tuple[Tensor, Tensor, Tensor],
    given: dict[str, Any],
    lengths: Lengths = (LQ, LK),
    backend: str | None = None,
) -> None:
    """o, lse and all gradients of every sequence against the oracle of that sequence; with a
    tail of NaN, whose output is 0, whose lse is -inf and whose gradients are 0."""
    used, (cq, ck) = [sum(of) for of in lengths], (offsets(of).tolist() for of in lengths)
    leaves = [t.requires_grad_() for t in x]
    if "sinks" in given:
        leaves.append(given["sinks"].clone().requires_grad_())
        given = {**given, "sinks": leaves[3]}
    got = varlen_state(*leaves[:3], *(offsets(of) for of in lengths), **given, backend=backend)
    do, dlse = rnd(*got.o.shape, seed=7, dtype=x[0].dtype), rnd(*got.lse.shape, seed=8)
    do[used[0] :], dlse = NAN, dlse.to(got.lse.dtype)
    dq, dk, dv, *rest = torch.autograd.grad([got.o, got.lse], leaves, [do, dlse])
    total, room = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for b in range(len(lengths[0])):
        rows, cols = slice(cq[b], cq[b + 1]), slice(ck[b], ck[b + 1])
        c = alone(b, [t.detach() for t in x], given, lengths)
        own_do, own_dlse = do[rows].transpose(0, 1), dlse[:, rows]
        allowed = bounds(Exact.of(c), own_do, own_dlse)
        exact = {n: t.detach().double().requires_grad_() for n, t in c.tensors().items()}
        want = oracle.attention(**{**c.options, **exact})
        close("o", got.o[rows].transpose(0, 1), want.o, allowed["o"])
        close("lse", got.lse[:, rows], want.lse, allowed["lse"])
        grads = torch.autograd.grad(
            [want.o, want.lse], list(exact.values()), [own_do.double(), own_dlse.double()]
        )
        for name, g, w in zip("qkv", (dq[rows], dk[cols], dv[cols]), grads, strict=False):
            close(f"d{name} of sequence {b}", g.transpose(0, 1), w, allowed[name])
        if rest:
            total, room = total + grads[3], room + allowed["sinks"]
    if rest:
        close("dsinks", rest[0], total, room)
    assert not got.o[used[0] :].any()
    assert got.lse[:, used[0] :].isneginf().all()
    for g, owned in ((dq, used[0]), (dk, used[1]), (dv, used[1])):
        assert not g[owned:].any()


def test_the_comparison_can_fail() -> None:
    """Dropout counted from the start of the pack, not of each sequence, is another mask."""
    q, k, v = packed()
    drop = ns.Dropout(0.5, 5)
    got = ns.attention_varlen(q, k, v, offsets(LQ), offsets(LK), dropout=drop)
    c = alone(4, [q, k, v], {"dropout": ns.Dropout(0.5, 5, (0, 0, sum(LQ[:4]), sum(LK[:4])))})
    x = Exact.of(c)
    with pytest.raises(AssertionError):
        close(
            "o", got[sum(LQ[:4]) :][: LQ[4]].transpose(0, 1), x.o, bounds(x, *c.cotangents())["o"]
        )


def test_packing_a_padded_batch_changes_nothing() -> None:
    """The same sequences padded to one length with ns.Lengths, dropout included."""
    lengths, n = [5, 0, 12, 7], 12
    x = [rnd(4, 2, n, 8, seed=s) for s in (1, 2, 3)]
    drop, cu = ns.Dropout(0.3, 9), offsets(lengths)
    mask = ns.Lengths(torch.tensor(lengths)) & ns.Causal("start")
    padded = Exact.of(Case(*x, {"mask": mask, "dropout": drop}))
    allowed = bounds(padded, *padded.case.cotangents())["o"]
    flat = [torch.cat([t[b, :, :m].transpose(0, 1) for b, m in enumerate(lengths)]) for t in x]
    got = ns.attention_varlen(*flat, cu, cu, mask=ns.Causal(), dropout=drop)
    for b, (lo, m) in enumerate(zip(cu.tolist(), lengths, strict=False)):
        own = got[lo : lo + m].transpose(0, 1)
        close("o", own, padded.o[b, :, :m], allowed[b, :, :m])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_either_width(dtype: torch.dtype) -> None:
    q, k, v = packed()
    a = ns.attention_varlen(q, k, v, offsets(LQ, dtype), offsets(LK, dtype))
    assert torch.equal(a, ns.attention_varlen(q, k, v, offsets(LQ), offsets(LK)))


def test_no_sequence_at_all() -> None:
    q, k, v = (t.requires_grad_() for t in packed())
    cu = torch.tensor([0])
    o = ns.attention_varlen(q, k, v, cu, cu)
    assert not o.any()
    assert all(not g.any() for g in torch.autograd.grad(o.sum(), (q, k, v)))
    empty = [t[:0] for t in packed()]
    assert ns.attention_varlen(*empty, cu, cu).shape == (0, 4, 8)


def test_strided_packs() -> None:
    """q, k, v as slices of one fused projection, (total, heads, 3 * width)."""
    fused = rnd(sum(LQ), 4, 24)
    views = fused.chunk(3, -1)
    cu = offsets(LQ)
    got = ns.attention_varlen(*views, cu, cu, mask=ns.Causal())
    want = ns.attention_varlen(*(t.contiguous() for t in views), cu, cu, mask=ns.Causal())
    assert torch.equal(got, want)


def test_batch_invariance_of_packs() -> None:
    """A sequence has the same bits whatever it is packed with."""
    q, k, v = packed()
    whole = ns.attention_varlen(q, k, v, offsets(LQ), offsets(LK), batch_invariant=True)
    rows, cols = slice(sum(LQ[:4]), sum(LQ[:5])), slice(sum(LK[:4]), sum(LK[:5]))
    one = ns.attention_varlen(
        q[rows], k[cols], v[cols], offsets([30]), offsets([21]), batch_invariant=True
    )
    assert torch.equal(one, whole[rows])


Q, K = rnd(9, 4, 8), rnd(9, 2, 8)
GOOD = torch.tensor([0, 4, 9])
BAD = {
    "falling": (torch.tensor([0, 5, 4]), "must rise from 0"),
    "not from 0": (torch.tensor([1, 4, 9]), "must rise from 0"),
    "too long": (torch.tensor([0, 4, 10]), "must rise from 0"),
    "negative": (torch.tensor([0, -1, 9]), "must rise from 0"),
    "other count": (torch.tensor([0, 9]), "disagree on the number of sequences"),
    "empty": (torch.tensor([], dtype=torch.int32), "must be a 1-d int32 or int64 tensor"),
    "2-d": (GOOD[None], "must be a 1-d int32 or int64 tensor"),
    "float": (GOOD.float(), "must be a 1-d int32 or int64 tensor"),
    "int16": (GOOD.short(), "must be a 1-d int32 or int64 tensor"),
    "list": ([0, 4, 9], "is not a tensor"),
    "none": (None, "needs cu_q and cu_k"),
}


@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
@pytest.mark.parametrize("bad", BAD)
def test_bad_offsets(bad: str, side: str) -> None:
    cu, message = BAD[bad]
    given: dict[str, Any] = {"cu_q": GOOD, "cu_k": GOOD, side: cu}
    with pytest.raises(ns.ArgumentError, match=message):
        ns.attention_varlen(Q, K, K, **given)


def test_refusals_of_packed_calls() -> None:
    for mask in (ns.Dense(torch.ones(9, 9).bool()), ns.Documents(GOOD, GOOD)):
        with pytest.raises(ns.ArgumentError, match="no common query and key axes"):
            ns.attention_varlen(Q, K, K, GOOD, GOOD, mask=ns.Causal() & mask)
    with pytest.raises(ns.ArgumentError, match="takes no bias"):
        ns.attention_varlen(Q, K, K, GOOD, GOOD, bias=torch.zeros(9, 9))
    with pytest.raises(ns.ArgumentError, match="one number a sequence"):
        ns.attention_varlen(Q, K, K, GOOD, GOOD, mask=ns.Lengths(torch.tensor([1, 2, 3])))
    with pytest.raises(ns.ArgumentError, match="three axes"):
        ns.attention_varlen(Q[None], K[None], K[None], GOOD, GOOD)
    with pytest.raises(ns.ArgumentError, match="sinks does not broadcast"):
        ns.attention_varlen(Q, K, K, GOOD, GOOD, sinks=torch.zeros(2, 4))
