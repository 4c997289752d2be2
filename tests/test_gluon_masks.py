"""Masks in Gluon's kernels, compiled for Hopper, which need not be here: each form's functions are
taken where tensors have layouts, and say of their ends what a loop may know beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nosquare as ns
from nosquare.bound import Bound
from nosquare.mask_text import MaskCode, arguments, form_of

pytest.importorskip("triton", reason="gluon_sm90 is written in Gluon, a part of Triton")
pytest.importorskip("triton.experimental.gluon", reason="this Triton is older than Gluon")
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from nosquare.backends.gluon_sm90 import masks

BATCH, HEADS, M, N = 2, 4, 40, 100
ids = torch.arange(BATCH * N).view(BATCH, N) // 7
MASKS: dict[str, ns.Mask] = {
    "full": ns.Full(),
    "causal": ns.Causal(),
    "causal from the start": ns.Causal("start"),
    "window": ns.Window(20, 3),
    "window without end": ns.Window(20, None),
    "prefix": ns.Prefix(21),
    "prefix and causal": ns.Causal() | ns.Prefix(21),
    "causal window": ns.Causal() & ns.Window(20, None),
    "lengths": ns.Causal() & ns.Lengths(torch.tensor([50, N])),
    "documents": ns.Documents(ids[:, :M], ids),
    "dense": ns.Dense(torch.ones(HEADS, M, N, dtype=torch.bool)),
    "tiles": ns.BlockSparse(torch.ones(3, 7, dtype=torch.bool), 16),
}
POINTERS = {torch.bool: "*i1", torch.int64: "*i64"}
LAYOUT = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
# as scores lie after a product of Hopper's tensor cores
ACCUMULATOR = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])


@gluon.jit
def asks(mask, m, n, pairs_ptr, ends_ptr, CODE: gl.constexpr, L: gl.constexpr):
    """What the three functions say of 64 rows and 64 keys."""
    first = gl.program_id(0) * 64
    i = gl.expand_dims(first + gl.arange(0, 64, layout=gl.SliceLayout(1, L)), 1)
    j = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, L)), 0)
    keep = CODE.keep(mask, gl.program_id(1), gl.program_id(2), i, j, m, n)
    gl.store(pairs_ptr + i * 64 + j, gl.where(keep & (j < n), 1.0, 0.0), mask=i < m)
    lo, hi = CODE.span(mask, first, first + 64, m, n)
    if not CODE.low:
        lo = 0
    gl.store(ends_ptr, lo)
    gl.store(ends_ptr + 1, hi)
    if CODE.has_core:
        lo, hi = CODE.core(mask, first, first + 64, m, n)
        gl.store(ends_ptr + 2, lo)
        gl.store(ends_ptr + 3, hi)


def types(values: Iterator[Any]) -> tuple[str, ...]:
    """Triton's types of a mask's arguments; a tuple may not be empty."""
    of = (POINTERS[v.dtype] if isinstance(v, torch.Tensor) else "i64" for v in values)
    return tuple(of) or ("i32",)


def bound(mask: ns.Mask) -> Bound:
    return Bound(mask, (BATCH,), HEADS, M, N)


def compiled(mask: ns.Mask, code: MaskCode, layout: Any) -> Any:
    """The kernel above for a Hopper card."""
    signature = {
        **{"mask": types(arguments(bound(mask), int)), "m": "i32", "n": "i32"},
        **{"pairs_ptr": "*fp32", "ends_ptr": "*i32", "CODE": "constexpr", "L": "constexpr"},
    }
    source = GluonASTSource(asks, signature, {"CODE": code, "L": layout})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@pytest.mark.parametrize("layout", [LAYOUT, ACCUMULATOR], ids=["blocked", "accumulator"])
@pytest.mark.parametrize("name", MASKS)
def test_every_form_compiles_for_hopper(name: str, layout: Any) -> None:
    code = masks.code(form_of(bound(MASKS[name])))
    found = compiled(MASKS[name], code, layout)
    assert ".target sm_90a" in found.asm["ptx"]
    stores = [line for line in found.asm["ttgir"].splitlines() if "tt.store" in line]
    assert len(stores) == (5 if code.has_core else 3)
    assert found.asm["ttgir"].count("tt.load") == len(list(bound(MASKS[name]).mask.tensors))


def test_what_begins_at_key_0() -> None:
    low = {name for name, mask in MASKS.items() if masks.code(form_of(bound(mask))).low}
    assert low == {"window", "window without end", "causal window"}


def test_other_numbers_make_no_new_code() -> None:
    one, other = (masks.code(form_of(bound(ns.Window(before, 3)))) for before in (20, 31))
    assert one is other
    assert repr(one) != repr(masks.code(form_of(bound(ns.Window(None, 3)))))
