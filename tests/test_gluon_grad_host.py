"""gluon_sm90's backward on the host: what it launches, allocates and gives back. No card is needed:
kernels are stand-ins, and gradients hold nothing of use."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nosquare.bench.cases import Case
from nosquare.inputs import Inputs

pytest.importorskip("triton", reason="gluon_sm90 is written in Triton's Gluon")

CPU = torch.device("cpu")
LINE = "backward bfloat16 B2 Hq8 Hk2 M300 N600 D128 causal(end)"


class Recorded:
    """Stands for all loaded kernels: remembers what was launched."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.calls: list[tuple[str, int, int, int]] = []
        self.varying: dict[str, tuple[int, int]] = {}

    def of(self, key: Any, device: Any) -> Any:
        name = key.kernel.fn.__name__

        def launch(values: list[Any], varying: list[int]) -> Any:
            self.prepared.append(name)
            self.varying[name] = (len(key.boxes), len(varying))

            def run(grid: int, device: int, stream: int, maps: Any, numbers: Any) -> None:
                self.calls.append((name, grid, len(maps), len(numbers)))

            return run

        def descriptor(number: int, t: torch.Tensor, described: Any) -> Any:
            assert all(s % 8 == 0 for s in described.strides[:-1]) or t.dtype == torch.float32
            return SimpleNamespace(address=number)

        return SimpleNamespace(launch=launch, descriptor=descriptor)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    from nosquare.backends.gluon_sm90 import gradients

    found = Recorded()
    monkeypatch.setattr(gradients, "loaded", found.of)
    monkeypatch.setattr(gradients, "_READY", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return found


def call(line: str, grads: str = "qkv", turned: bool = False, **more: Any) -> Any:
    """Gradients and what ran; do and dlse of `more`, else do alone."""
    from nosquare.backends import gluon_sm90

    c = Case.parse(line)

    def array(heads: int, rows: int, width: int) -> torch.Tensor:
        if turned:
            return torch.zeros(c.B, rows, heads, width, dtype=c.dtype).transpose(1, 2)
        return torch.zeros(c.B, heads, rows, width, dtype=c.dtype)

    q, k, v = array(c.Hq, c.M, c.D), array(c.Hk, c.N, c.D), array(c.Hk, c.N, c.E)
    o, lse = array(c.Hq, c.M, c.E), torch.zeros(c.B, c.Hq, c.M)
    p = replace(c.problem(), device=CPU, grads=grads, deterministic="deterministic" in more)
    plan = gluon_sm90.plan(p, "backward")
    x = Inputs(q, k, v)._replace(sinks=more.get("sinks"))
    cotangents = more.get("do", torch.zeros_like(o)), more.get("dlse")
    return p, gluon_sm90.backward(p, plan, x, (o, lse), cotangents)


def test_three_launches_whose_arguments_are_all_given(launched: Recorded) -> None:
    _, (grads, ran) = call(LINE, dlse=torch.zeros(2, 8, 300))
    assert ran.kernels == ("facts", "gradients", "rounded")
    assert ran.copies == ()
    # 16 heads of 5 tiles of 64 rows; 5 tiles of keys of 4 key heads
    assert [(name, grid) for name, grid, *_ in launched.calls] == [
        ("facts", 80), ("gradients", 20), ("rounded", 80),
    ]  # fmt: skip
    for name, _, maps, numbers in launched.calls:
        assert (maps, maps + numbers) == launched.varying[name]
    assert [None if g is None else g.shape for g in grads] == [
        (2, 8, 300, 128), (2, 2, 600, 128), (2, 2, 600, 128), None, None,
    ]  # fmt: skip
    assert ran.workspace_bytes == 4 * (2 * 16 * 300 + 16 * 300 * 128)


def test_taking_turns_needs_a_number_for_each_tile_of_queries(launched: Recorded) -> None:
    p, (_, ran) = call(LINE, deterministic=True)
    # 2 entries of 8 heads, 5 tiles of 64 rows
    assert ran.workspace_bytes == 4 * (2 * 16 * 300 + 16 * 300 * 128 + 16 * 5)
    assert p.deterministic
    plain = dict(launched.varying)
    for name, _, maps, numbers in launched.calls:
        assert (maps, maps + numbers) == launched.varying[name]
    call(LINE)
    assert [launched.varying[n][1] - plain[n][1] for n in plain] == [-1, -1, 0]


def test_calls_that_are_laid_out_alike_are_prepared_once(launched: Recorded) -> None:
    for _ in range(3):
        call(LINE)
    assert launched.prepared == ["facts", "gradients", "rounded"]
    assert len(launched.calls) == 9
    call(LINE, do=None)  # that of lse alone
    call(LINE, turned=True)
    assert len(launched.prepared) == 6  # zeros lie as o does; token-major problems are others


def test_gradients_lie_as_their_arrays_do_and_only_where_wanted(launched: Recorded) -> None:
    _, (grads, _) = call(LINE, turned=True)
    assert all(g.transpose(1, 2).is_contiguous() for g in grads[:3])
    _, (grads, _) = call(LINE, "kv")
    assert grads[0] is None
    assert grads[1].is_contiguous()


@pytest.mark.parametrize(
    ("do", "copied"),
    [
        (torch.zeros((), dtype=torch.bfloat16).expand(2, 8, 300, 128), True),
        (torch.zeros(2, 8, 300, 256, dtype=torch.bfloat16)[..., ::2], True),
        (torch.zeros(2, 8, 300, 129, dtype=torch.bfloat16)[..., 1:], True),
        (torch.zeros(2 * 8 * 300 * 128 + 1, dtype=torch.bfloat16)[1:].view(2, 8, 300, 128), True),
        (torch.zeros(2, 8, 300, 136, dtype=torch.bfloat16)[..., 8:], False),
        (torch.zeros(2, 300, 8, 128, dtype=torch.bfloat16).transpose(1, 2), False),
        (torch.zeros(4, 8, 300, 128, dtype=torch.bfloat16)[::2], False),
    ],
    ids=[
        "one number",
        "every second",
        "odd start",
        "odd start, no gaps",
        "part of rows",
        "tokens first",
        "entries",
    ],
)
def test_a_cotangent_that_tma_cannot_read_is_copied_and_the_receipt_says_so(
    launched: Recorded, do: torch.Tensor, copied: bool
) -> None:
    _, (_, ran) = call(LINE, do=do)
    assert bool(ran.copies) == copied


@pytest.mark.parametrize("shape", [(8,), (2, 8), (1, 8)], ids=str)
def test_the_gradient_of_sinks_is_in_the_users_shape(
    launched: Recorded, shape: tuple[int, ...]
) -> None:
    sinks = torch.zeros(shape, dtype=torch.bfloat16)
    _, (grads, ran) = call(f"{LINE} sinks", "qkvs", sinks=sinks)
    assert ran.kernels[-1] == "of sinks"
    assert (grads[4].shape, grads[4].dtype) == (sinks.shape, sinks.dtype)
    _, (grads, ran) = call(f"{LINE} sinks", "qkv", sinks=sinks)
    assert grads[4] is None
    assert "of sinks" not in ran.kernels
