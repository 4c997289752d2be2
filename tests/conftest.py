"""What every test gets: a seed, memory full of NaN, a fixed number of threads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import wraps
from typing import Any

import hypothesis
import pytest
import torch

if "NOSQUARE_TEST_THREADS" in os.environ:
    torch.set_num_threads(int(os.environ["NOSQUARE_TEST_THREADS"]))

# Time limits on single examples fail on busy machines. In CI every run tries the same examples.
hypothesis.settings.register_profile("here", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("here")

POISONED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # these take minutes each: begun last, they would keep one processor busy and leave the others
    items.sort(key=lambda item: "_in_the_interpreter" not in item.name)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make`, with the memory it leaves unwritten filled with NaN."""

    @wraps(make)
    def full_of_nan(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = make(*args, **kwargs)
        if torch.compiler.is_compiling() or x.layout is not torch.strided or 0 in x.stride():
            return x
        if x.dtype in POISONED:
            with torch.no_grad():
                x.fill_(torch.nan)
        return x

    return full_of_nan


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that a kernel forgets to write must fail its test, whatever the allocator hands out."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)
