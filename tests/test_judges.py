"""The judge that ships with torch, in our words: its samples of the operator against its math path.

The whole of it, and two judges more, are run by hand: see judges.py.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import judges
from helpers import force_tiles
from test_sdpa import math

# torch.testing._internal, where the samples are, imports it
pytest.importorskip("expecttest", reason="torch's samples of operators need expecttest")

# Roundings allowed, of the largest number. The samples have width 8 and at most 6 keys: a number is
# a sum of some ten products, a gradient one of some hundred. The 16-bit types sum in float32, and
# round the weights and the result; for a gradient also the 8 products of do * o, from the stored o.
ROOM = {torch.float64: (128, 128), torch.float32: (128, 128)}
ROOM |= {torch.bfloat16: (4, 32), torch.float16: (4, 32)}


def samples(dtype: torch.dtype) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """((q, k, v), keywords) of torch's samples; those with dropout draw from another generator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    name = "nn.functional.scaled_dot_product_attention"
    op = next(op for op in op_db if op.name == name)
    for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
        if not sample.kwargs.get("dropout_p"):
            yield (sample.input, *sample.args), sample.kwargs


def near(got: Tensor, want: Tensor, dtype: torch.dtype, gradient: bool = False) -> bool:
    room = ROOM[dtype][gradient] * torch.finfo(dtype).eps * (1 + float(want.detach().abs().max()))
    return got.shape == want.shape and bool(((got - want).abs() <= room).all())


def judge(attend: Callable[..., Tensor], dtype: torch.dtype, twice: bool = False) -> Counter[str]:
    """How many checks of each kind there were, and how many failed: "value", "value failed"."""
    score: Counter[str] = Counter()

    def note(kind: str, good: bool) -> None:
        score.update({kind: 1, f"{kind} failed": int(not good)})

    for number, (x, options) in enumerate(samples(dtype)):
        # the definition, in float64: of the low dtypes, the numbers that are stored
        wide = [t.detach().double().requires_grad_() for t in x]
        fixed = {
            n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t
            for n, t in options.items()
        }
        got, want = attend(*x, **options), math(*wide, **fixed)
        note("value", got.dtype == dtype and near(got.double(), want, dtype))
        do = torch.randn_like(want).to(dtype)
        pairs = zip(
            torch.autograd.grad(got, x, do),
            torch.autograd.grad(want, wide, do.double()),
            strict=True,
        )
        note("gradient", all(near(a.double(), b, dtype, True) for a, b in pairs))
        apart = [torch.stack([t.detach()] * 2, -1)[..., 0] for t in x]  # every second number
        note("strides", near(attend(*apart, **options).double(), want, dtype))
        if not any(isinstance(t, Tensor) for t in options.values()):
            two = [torch.stack([t.detach(), t.detach() / 2]) for t in x]
            mapped = torch.vmap(lambda *t, o=options: attend(*t, **o))(*two)
            halved = math(*(t.detach() / 2 for t in wide), **fixed)
            note("vmap", near(mapped.double(), torch.stack([want.detach(), halved]), dtype))
        if twice and number % 4 == 0:
            good = torch.autograd.gradgradcheck(
                lambda *t, o=options: attend(*t, **o), x, fast_mode=True, raise_exception=False
            )
            note("second derivative", good)
    return score


def failures(score: Counter[str]) -> dict[str, int]:
    return {kind: n for kind, n in score.items() if kind.endswith("failed") and n}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_torchs_samples_in_tiles_of_two(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_tiles(monkeypatch, 2, 2)  # undone when the test ends, unlike that of judges
    wide = dtype == torch.float64
    score = judge(judges.sdpa_tiles2, dtype, twice=wide)
    assert not failures(score)
    assert min(score[kind] for kind in ("value", "gradient", "strides", "vmap")) > 8
    assert (score["second derivative"] > 1) == wide


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_samples_by_choice(dtype: torch.dtype) -> None:
    assert not failures(judge(judges.sdpa, dtype))


def test_the_wrong_control_fails() -> None:
    """It is smooth, so only a comparison can find it out: every value and gradient must fail."""
    score = judge(judges.wrong, torch.float64)
    for kind in ("value", "gradient", "strides", "vmap"):
        assert score[f"{kind} failed"] == score[kind] > 8
