"""The account of a problem, against loops written out, numbers of the seeds, and real runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import nosquare as ns
from nosquare import traffic
from nosquare.cost import Cost
from nosquare.device import Device, known
from nosquare.estimate import contiguous
from nosquare.mask import Mask
from nosquare.problem import Problem
from nosquare.traffic import ATOMIC, KEYS_OUTSIDE, QUERIES_OUTSIDE, SEPARATE, Tiling

MIB, GIB = 2**20, 2**30
H200 = known("h200")


def problem(
    m: int,
    n: int,
    d: int = 64,
    mask: Mask | str = "full()",
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Problem:
    sizes = {"B": 1, "Hq": 1, "Hk": 1, "M": m, "N": n, "D": d, "E": d}
    sizes |= {name: more.pop(name) for name in list(more) if name in sizes}
    return contiguous(sizes, dtype, str(mask), **more)


def entry(found: Cost, name: str, which: str = "forward") -> int:
    (bytes_,) = [e.bytes for e in getattr(found, which).ledger.entries if e.name == name]
    return bytes_


# ---- the numbers of the seeds -------------------------------------------------------------------


@pytest.mark.parametrize(("n", "square"), [(16384, 512 * MIB), (32768, 2 * GIB)])
def test_squares_outputs_and_flops_of_the_seeds(n: int, square: int) -> None:
    found = Cost.of(problem(n, n), H200)
    assert entry(found, "scores") == entry(found, "probabilities") == square
    assert found.forward.ledger.materialised_bytes == 2 * square
    assert found.forward.flops == 4 * n * n * 64
    assert entry(found, "o") == 2 * MIB * n // 16384
    assert entry(found, "lse") == 4 * n  # grows with N, not with N^2


def test_a_causal_mask_halves_the_arithmetic_and_no_square() -> None:
    n = 16384
    full, causal = (Cost.of(problem(n, n, mask=m), H200) for m in (ns.Full(), ns.Causal()))
    assert causal.pairs.count == n * (n + 1) // 2
    assert causal.forward.flops == 4 * 64 * n * (n + 1) // 2
    assert entry(causal, "scores") == entry(full, "scores") == 512 * MIB


def test_a_decoding_step_is_one_row_by_n() -> None:
    n = 16384
    found = Cost.of(problem(1, n, mask=ns.Causal()), H200)
    assert found.phase == "decode"
    assert found.pairs.count == n
    assert entry(found, "scores") == 2 * n
    assert entry(found, "k (cache)") == 2 * n * 64
    assert found.forward.bound_by == "memory"


# ---- arithmetic, compulsory bytes, roofline -----------------------------------------------------


def test_backward_and_the_widths() -> None:
    p = problem(5, 7, 16, "causal(end)", torch.float32, E=24, Hq=4, Hk=2, B=3, grads="qkv")
    pairs = 3 * 4 * (3 + 4 + 5 + 6 + 7)
    found = Cost.of(p, H200)
    assert found.phase == "training"
    assert found.forward.flops == 2 * pairs * (16 + 24)
    assert found.backward is not None
    assert found.backward.flops == 2 * pairs * (3 * 16 + 2 * 24)
    q, k, v, o, lse = (4 * 3 * x for x in (4 * 5 * 16, 2 * 7 * 16, 2 * 7 * 24, 4 * 5 * 24, 4 * 5))
    assert found.forward.compulsory_bytes == q + k + v + o + lse
    assert found.backward.compulsory_bytes == (q + k + v + 2 * o + lse) + (q + k + v)
    assert found.backward.ledger.with_inputs_and_outputs_bytes == (
        2 * (q + k + v) + 2 * o + lse + entry(found, "workspace", "backward")
    )
    assert found.backward.ledger.auxiliary_bytes == lse + entry(found, "workspace", "backward")


def test_only_keys_that_are_seen_must_be_read() -> None:
    window = ns.Causal() & ns.Window(before=99, after=0)
    found = Cost.of(problem(1, 4096, mask=window), H200)
    assert found.forward.compulsory_bytes == 2 * 64 * (1 + 2 * 100 + 1)  # q, 100 k and v, o
    sink = window | ns.Prefix(4)
    found = Cost.of(problem(1, 4096, mask=sink), H200)
    assert found.forward.compulsory_bytes == 2 * 64 * (1 + 2 * 104 + 1)
    lengths = ns.Lengths(torch.tensor([10, 30]))
    p = problem(64, 64, mask=lengths, B=2)
    found = Cost.of(p, H200, arrays=lengths.tensors)
    assert found.forward.compulsory_bytes == 2 * 64 * (2 * 64 + 2 * 40 + 2 * 64) + 2 * 8
    assert found.pairs.exact
    assert not Cost.of(p, H200).pairs.exact


def test_a_broadcast_bias_counts_as_it_is() -> None:
    plain, wide = problem(64, 64, Hq=8, Hk=8), problem(64, 64, Hq=8, Hk=8, bias=(8, 1, 64))
    base = Cost.of(plain, H200).forward.compulsory_bytes
    found = Cost.of(wide, H200)
    assert found.forward.compulsory_bytes == base + 2 * 8 * 64
    assert entry(found, "bias") == 2 * 8 * 64


def test_the_roofline_is_the_longer_of_two() -> None:
    facts = Device("cuda", "made up", 4, 0, bandwidth=1e9, peak_flops={"bfloat16": 1e12})
    p = problem(1024, 1024)
    found = Cost.of(p, facts).forward
    assert found.bound_by == "memory"
    assert found.roofline_us == pytest.approx(4 * 2 * 64 * 1024 / 1e9 * 1e6)
    found = Cost.of(p, replace(facts, bandwidth=1e12)).forward
    assert found.bound_by == "compute"
    assert found.roofline_us == pytest.approx(4 * 1024 * 1024 * 64 / 1e12 * 1e6)
    for missing in (replace(facts, bandwidth=0.0), replace(facts, peak_flops={"float32": 1e12})):
        found = Cost.of(p, missing).forward
        assert (found.roofline_us, found.bound_by) == (None, "unknown")


# ---- traffic ------------------------------------------------------------------------------------


def tiles_of(p: Problem, tiling: Tiling) -> list[tuple[int, int, int]]:
    """(key head, rows, keys) of each tile of one batch entry that has a visible pair."""
    seen = ns.visible(ns.parse(p.mask), p.M, p.N)[0, 0]
    m, n, found = tiling.queries(p), tiling.tile_n, []
    for h, i, j in product(range(p.Hk), range(0, p.M, m), range(0, p.N, n)):
        part = seen[i : i + m, j : j + n]
        if part.any():
            found.append((h, p.G * part.shape[0], part.shape[1]))
    return found


CASES = [
    (problem(40, 56, 8, "causal(end)", Hq=4, Hk=2, B=3, grads="qkv"), Tiling(16, 8)),
    (problem(33, 33, 16, "window(before=7,after=0)", torch.float32, E=8, grads="qkv"),
     Tiling(8, 5, backward=SEPARATE)),
    (problem(20, 31, 8, "full()", Hq=6, Hk=2, grads="qkv"), Tiling(12, 7)),
]  # fmt: skip


@pytest.mark.parametrize(("p", "tiling"), CASES)
def test_forward_traffic_is_that_of_the_loops(p: Problem, tiling: Tiling) -> None:
    b, lse = p.dtype.itemsize, 4
    moved = p.B * p.Hq * p.M * (p.D * b + p.E * b + lse)
    for _, _, keys in tiles_of(p, tiling):
        moved += p.B * keys * (p.D + p.E) * b
    assert traffic.forward(p, H200, tiling).l2_bytes == moved


@pytest.mark.parametrize("how", [ATOMIC, KEYS_OUTSIDE, SEPARATE, QUERIES_OUTSIDE])
@pytest.mark.parametrize(("p", "tiling"), CASES)
def test_backward_traffic_is_that_of_the_loops(p: Problem, tiling: Tiling, how: str) -> None:
    b, wide, tiles = p.dtype.itemsize, 4, tiles_of(p, tiling)
    d, e, all_rows, all_keys = p.D, p.E, p.Hq * p.M, p.Hk * p.N
    if how == QUERIES_OUTSIDE:
        moved = all_rows * ((2 * d + 2 * e) * b + wide)  # q, o, do, lse; dq
        for _, _, keys in tiles:
            moved += keys * (d + e) * (b + 2 * wide)  # k, v; the sums of dk and dv
        moved += all_keys * (d + e) * (wide + b)  # rounded at the end
    else:
        moved = all_rows * (2 * e * b + wide)  # delta, from o and do
        moved += 2 * all_keys * (d + e) * b  # k, v; dk, dv
        for _, rows, _ in tiles:
            moved += rows * ((d + e) * b + 2 * wide)  # q, do, lse, delta
            moved += rows * 2 * wide * d if how in (ATOMIC, KEYS_OUTSIDE) else 0
        if how in (ATOMIC, KEYS_OUTSIDE):
            moved += all_rows * d * (2 * wide + b)  # zeroed, read, written
        else:
            moved += all_rows * ((d + e) * b + 2 * wide + d * b)
            moved += sum(keys for _, _, keys in tiles) * (d + e) * b
    found = traffic.backward(p, H200, replace(tiling, backward=how))
    assert found.l2_bytes == p.B * moved
    assert sum(found.parts.values()) == found.l2_bytes


def test_traffic_of_the_research_note() -> None:
    """bf16, N = 65,536, 32 query and 8 key heads, D = 128, causal, on an H100: three tilings."""
    p = problem(65536, 65536, 128, "causal(end)", Hq=32, Hk=8)
    for (rows, keys), gigabytes in (((256, 48), 139), ((192, 16), 185), ((128, 112), 276)):
        moved = traffic.forward(p, known("h100"), Tiling(rows, keys))
        assert round(moved.l2_bytes / 1e9) == gigabytes
    moved = traffic.forward(p, known("h100"), Tiling(256, 48))
    assert moved.hbm_bytes is not None
    assert round(moved.hbm_bytes / 1e9, 2) == 2.12
    short = problem(8192, 8192, 128, "causal(end)", Hq=32, Hk=8)
    moved = traffic.forward(short, known("h100"), Tiling(256, 48))
    lse = 4 * 32 * 8192
    assert moved.hbm_bytes == Cost.of(short, known("h100")).forward.compulsory_bytes + lse


def test_tiles_that_run_together_read_keys_once() -> None:
    """4 tiles of queries walk 2 GiB of keys side by side: the cache need not hold them."""
    p = problem(512, 1 << 22, 128)
    moved = traffic.forward(p, H200, Tiling(128, 128)).hbm_bytes
    assert moved == Cost.of(p, H200).forward.compulsory_bytes + 4 * 512
    many = problem(256 * 128, 1 << 15, 128)  # two waves, and a head that half the cache holds
    once = traffic.forward(many, H200, Tiling(128, 128)).hbm_bytes
    assert once == Cost.of(many, H200).forward.compulsory_bytes + 4 * 256 * 128
    small_cache = replace(H200, cache_bytes=1 << 20)
    waves = traffic.forward(many, small_cache, Tiling(128, 128)).hbm_bytes
    assert once is not None
    assert waves == once + (256 - 132) * (1 << 15) * 2 * 128 * 2 // 132
    assert traffic.forward(many, replace(H200, cache_bytes=0), Tiling(128, 128)).hbm_bytes is None


def test_what_a_group_and_splits_add() -> None:
    wide = problem(4, 64, 8, Hq=8, Hk=1)
    once = traffic.forward(wide, H200, Tiling(32, 16)).parts["k+v"]
    assert once == 2 * 64 * 16
    assert traffic.forward(wide, H200, Tiling(4, 16)).parts["k+v"] == 4 * 2 * once
    split = traffic.forward(wide, H200, Tiling(32, 16, splits=4))
    assert split.parts["parts of splits"] == 2 * 8 * 4 * 4 * 4 * (8 + 2)
    assert split.parts["q"] == 4 * traffic.forward(wide, H200, Tiling(32, 16)).parts["q"]


@pytest.mark.parametrize(
    ("bias", "elements"),
    [((2, 12, 20), 2 * 12 * 20), ((12, 20), 12 * 20), ((2, 1, 20), 2 * 3 * 20),
     ((12, 1), 12 * 4), ((1,), 12)],
)  # fmt: skip
def test_a_bias_is_read_tile_by_tile(bias: tuple[int, ...], elements: int) -> None:
    p = problem(12, 20, 8, Hq=2, Hk=1, bias=bias)
    found = traffic.forward(p, H200, Tiling(8, 5))  # 3 x 4 tiles of 4 queries x 5 keys
    assert found.parts["bias"] == 2 * elements


def test_default_tiles_fit() -> None:
    p = problem(65536, 65536, 128, Hq=32, Hk=8)
    for name, backward, tiles in (
        ("h100", False, (128, 128)),
        ("a100", False, (128, 128)),
        ("l40s", False, (128, 64)),
        ("h100", True, (64, 128)),
    ):
        tiling = traffic.default_tiling(p, known(name), backward=backward)
        assert tiling is not None
        assert (tiling.rows, tiling.tile_n) == tiles
    assert traffic.default_tiling(p, Device("cpu", "unknown", 1, 0)) is None
    decode = problem(1, 65536, 128, Hq=32, Hk=8)
    tiling = traffic.default_tiling(decode, H200, decode=True)
    assert tiling == Tiling(16, 128, splits=132 // 8, source=tiling.source if tiling else "")
    busy = traffic.default_tiling(replace(decode, batch=(64,)), H200, decode=True)
    assert busy is not None
    assert busy.splits == 1


def algorithm_1(n: int, d: int, s: int) -> int:
    """Elements that Algorithm 1 of the FlashAttention paper moves, line by line."""
    moved = n * d + 2 * n  # 2: O, l, m are initialised
    columns, rows = -(-s // (4 * d)), min(-(-s // (4 * d)), d)  # 1
    for j in range(0, n, columns):
        keys = min(columns, n - j)
        moved += 2 * keys * d  # 6
        for i in range(0, n, rows):
            queries = min(rows, n - i)
            moved += queries * (2 * d + 2) + queries * (d + 2)  # 8 Q, O, l, m; 12, 13 O, l, m
    return moved


def algorithm_4(n: int, d: int, s: int) -> int:
    """The same of its backward pass."""
    moved = 3 * n * d  # dQ, dK, dV are initialised
    columns, rows = -(-s // (4 * d)), min(-(-s // (4 * d)), d)
    for j in range(0, n, columns):
        keys = min(columns, n - j)
        moved += 2 * keys * d
        for i in range(0, n, rows):
            queries = min(rows, n - i)
            moved += queries * (4 * d + 2) + queries * d  # Q, O, dO, dQ, l, m; dQ
        moved += 2 * keys * d  # dK, dV are written
    return moved


@pytest.mark.parametrize(("n", "d", "s"), [(96, 8, 96), (100, 8, 100), (64, 16, 16), (50, 4, 999)])
def test_the_papers_loops(n: int, d: int, s: int) -> None:
    p = problem(n, n, d, "causal(end)", Hq=2, Hk=1, B=3)
    want = 6 * algorithm_1(n, d, s), 6 * algorithm_4(n, d, s)
    assert traffic.paper_elements(p, s) == want
    assert traffic.paper_elements(p, d - 1) is None


def test_the_lower_bound() -> None:
    p = problem(4096, 4096, 64)
    assert traffic.floor_elements(p, 4096**2, 64 * 64) == 4096**2 - 4096
    assert traffic.floor_elements(p, 4096**2, 64 * 64, units=3) == 4096**2 - 3 * 4096
    assert traffic.floor_elements(p, 10, 10**6) == 0
    assert traffic.floor_elements(p, 4096**2, 64 * 64 - 1) is None  # only the order is known
    for name, mask in product(("h100", "a100", "mi300x"), ("full()", "causal(end)")):
        big = problem(131072, 131072, 128, mask, Hq=4, Hk=4, grads="qkv")
        found = Cost.of(big, known(name))
        assert found.backward is not None
        for one in (found.forward, found.backward):
            assert one.traffic is not None
            assert one.traffic.hbm_bytes is not None
            assert one.floor_bytes is not None
            assert one.floor_hbm_bytes is not None
            assert 0 < one.floor_bytes < one.traffic.l2_bytes
            assert one.floor_hbm_bytes < one.traffic.hbm_bytes <= one.traffic.l2_bytes
            assert one.compulsory_bytes <= one.traffic.hbm_bytes
