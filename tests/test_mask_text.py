"""The text of masks, run by Python on numbers of torch: it says what the mask itself says."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import nosquare as ns
from nosquare.bound import Bound
from nosquare.mask import Mask
from nosquare.mask_text import arguments, compiled, form_of, text


def _tensor(x: Any) -> Tensor:
    return torch.as_tensor(x)


WORDS = {
    "jit": lambda function: function,
    "tl": SimpleNamespace(
        where=lambda c, a, b: torch.where(c, _tensor(a), _tensor(b)),
        minimum=lambda a, b: torch.minimum(_tensor(a), _tensor(b)),
        maximum=lambda a, b: torch.maximum(_tensor(a), _tensor(b)),
        int32=torch.int32,
        int64=torch.int64,
    ),
}
# without arrays: a pointer plus an offset is nothing to torch
MASKS = {
    "full": ns.Full(),
    "causal": ns.Causal(),
    "causal from the start": ns.Causal("start"),
    "window": ns.Window(3, 2),
    "window without end": ns.Window(3, None),
    "window without beginning": ns.Window(None, 2),
    "prefix": ns.Prefix(5),
    "nothing": ns.Prefix(0),
    "prefix and causal": ns.Causal() | ns.Prefix(5),
    "causal window": ns.Causal() & ns.Window(3, None),
    "two far apart": ns.Prefix(2) | (ns.Window(2, 2) & ns.Causal()),
}
SIZES = [(7, 11), (11, 7), (8, 8), (1, 9)]


def numbers(pair: Any) -> tuple[int, int]:
    lo, hi = pair
    return int(lo), int(hi)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("m", "n"), SIZES)
def test_text_says_what_the_mask_says(name: str, m: int, n: int) -> None:
    bound = Bound(MASKS[name], (1,), 1, m, n)
    code = compiled(text(form_of(bound)), WORDS)
    values = tuple(map(torch.tensor, arguments(bound, int)))
    i, j = torch.arange(m)[:, None], torch.arange(n)[None]
    sizes = torch.tensor(m), torch.tensor(n)
    visible = ns.visible(bound.mask, m, n, 1, (1,))[0, 0]
    assert torch.equal(code.keep(values, 0, 0, i, j, *sizes).expand(m, n), visible)
    for start in range(m):
        for stop in range(start + 1, m + 1):
            rows = torch.tensor(start), torch.tensor(stop)
            lo, hi = numbers(code.span(values, *rows, *sizes))
            assert (lo, hi) == bound.span(start, stop)
            core = numbers(code.core(values, *rows, *sizes))
            assert visible[start:stop, slice(*core)].all()
            assert code.has_core or core == (0, 0)
            assert code.low or (lo, core[0]) == (0, 0)


ids = torch.zeros(1, 8, dtype=torch.int32)
FACTS = {
    "has_core": (ns.Causal(), ns.Causal() & ns.Lengths(torch.tensor([3]))),
    "tight": (ns.Window(3, 2), ns.Window(3, 2) | ns.Causal()),
    "low": (ns.Window(3, 2) | ns.Causal(), ns.Lengths(torch.tensor([3])) & ns.Causal("start")),
    "looks": (ns.Documents(ids, ids), ns.Causal()),
    "holes": (ns.Dense(torch.ones(8, 8) > 0), ns.Documents(ids, ids)),
    "along_h": (ns.Dense(torch.ones(2, 8, 8) > 0), ns.Dense(torch.ones(8, 8) > 0)),
    "by_head": (ns.Dense(torch.ones(2, 8, 1) > 0), ns.Dense(torch.ones(8, 1) > 0)),
}


@pytest.mark.parametrize("fact", FACTS)
def test_facts(fact: str) -> None:
    yes, no = (text(form_of(Bound(mask, (1,), 2, 8, 8))) for mask in FACTS[fact])
    assert getattr(yes, fact)
    assert not getattr(no, fact)


def test_equal_forms_give_equal_keys_and_others_do_not() -> None:
    a, b, c = (
        repr(text(form_of(Bound(mask, (1,), 1, 8, 8))))
        for mask in (ns.Window(3, 2), ns.Window(4, 1), ns.Window(3, None))
    )
    assert a == b
    assert a != c


@dataclass(frozen=True)
class _Branching(Mask):
    keep = staticmethod(lambda i, j, r, c, a: j <= i if j > 0 else j >= 0)
    span = staticmethod(lambda i_lo, i_hi, n, a: (0, n))
    core = staticmethod(lambda i_lo, i_hi, n, a: (0, 0))


def test_a_kind_that_branches_is_refused() -> None:
    with pytest.raises(TypeError, match="may not branch on a value of the kernel"):
        text(form_of(Bound(_Branching(), (1,), 1, 8, 8)))
