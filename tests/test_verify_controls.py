"""Wrong controls: functions that are nosquare but for one defect, each caught by the checks meant
for it. A test at the end sees to it that every check has caught something."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import nosquare as ns
from nosquare.verify import Verdicts, checks, verify
from nosquare.verify.target import subject_of

flash = subject_of("nosquare", "flash_attn").function
INF, NAN = float("inf"), float("nan")


class Control(NamedTuple):
    """A defect, and the verdict of each check that must notice it."""

    function: Callable[..., Any]
    style: str
    caught: dict[str, str]
    dtype: str


CONTROLS: dict[str, Control] = {}


def control(caught: str, style: str = "sdpa", dtype: str = "float32") -> Callable[..., Any]:
    """caught: names of checks that must say fail, or name=verdict."""
    pairs = [word.partition("=") for word in caught.split()]

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        verdicts = {name: verdict or "fail" for name, _, verdict in pairs}
        CONTROLS[function.__name__] = Control(function, style, verdicts, dtype)
        return function

    return keep


# ---- the softmax itself ----


@control("odd-sizes key-tails causal-tails gradients-full bias mask-polarity")
def averages_tiles(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False,
                   scale: Any = None) -> Tensor:  # fmt: skip
    """The outputs of tiles without their normalisers: the wrong control of the seeds."""
    keep = attn_mask
    if is_causal:
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    parts = []
    for first in range(0, k.shape[-2], 8):
        at = slice(first, first + 8)
        own = None if keep is None else keep[..., at]
        parts.append(ns.sdpa(q, k[..., at, :], v[..., at, :], attn_mask=own, scale=scale))
    return torch.stack(parts).mean(0)


@control("key-tails causal-tails gradient-tails long-keys width-tails")
def drops_the_last_key(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    if is_causal and q.shape[-2] > 1:
        o = ns.sdpa(q, k, v, is_causal=True)
        return torch.cat(
            [o[..., :-1, :], ns.sdpa(q[..., -1:, :], k[..., :-1, :], v[..., :-1, :])], -2
        )
    return ns.sdpa(q, k[..., :-1, :], v[..., :-1, :])


@control("query-tails odd-sizes")
def leaves_the_last_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = ns.sdpa(q, k, v)
    return torch.cat([o[..., :-1, :], o[..., -1:, :] * NAN], -2)


@control("key-tails")
def reads_one_key_too_many(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = k.shape[-2] + (k.untyped_storage().nbytes() > k.nbytes)  # where there is one
    return ns.sdpa(q, *(t.as_strided((*t.shape[:-2], n, t.shape[-1]), t.stride()) for t in (k, v)))


@control("odd-sizes width-tails")
def scales_by_the_padded_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ns.sdpa(q, k, v, scale=(-(-q.shape[-1] // 8) * 8) ** -0.5)


@control("value-width")
def forgets_wide_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = ns.sdpa(q, k, v)
    return torch.cat([o[..., : q.shape[-1]], o[..., q.shape[-1] :] * 0], -1)


@control("large-scores large-score-gradients very-negative-scores")
def never_subtracts_the_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(q @ k.mT * q.shape[-1] ** -0.5)
    return e @ v / e.sum(-1, keepdim=True)


@control("scale")
def ignores_the_sign_of_scale(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False,
                              scale: float = 1.0) -> Tensor:  # fmt: skip
    return ns.sdpa(q, k, v, is_causal=is_causal, scale=abs(scale))


@control("equal-scores")
def counts_one_key_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ns.sdpa(q, torch.cat([k, k[..., :1, :]], -2), torch.cat([v, v[..., :1, :]], -2))


# ---- layouts ----


def contiguous_strides(t: Tensor) -> list[int]:
    return list(torch.empty(t.shape, device="meta").stride())


@control("transposed-views")
def takes_v_for_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ns.sdpa(q, k, v.as_strided(v.shape, contiguous_strides(v)))


@control("offset-by-one")
def ignores_where_a_view_starts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ns.sdpa(*(t.as_strided(t.shape, t.stride(), 0) for t in (q, k, v)))


@control("expanded-views")
def misreads_stride_0(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ns.sdpa(q, k, v.flip(-1) if 0 in v.stride() else v)


@control("zero-sizes")
def stumbles_over_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k[0, 0, 0]
    return ns.sdpa(q, k, v)


@control("batch-axes")
def mixes_outer_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = ns.sdpa(q, k, v)
    return o if o.dim() < 4 else o.roll(1, 1)


@control("mask-shapes gradients-masked")
def takes_the_mask_of_row_0(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    return ns.sdpa(q, k, v, attn_mask=None if attn_mask is None else attn_mask[..., :1, :])


@control("mask-of-one-axis")
def wants_two_axes(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    if attn_mask is not None:
        attn_mask.stride(-2)
    return ns.sdpa(q, k, v, attn_mask=attn_mask)


@control("inputs-untouched")
def scales_q_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q.detach().mul_(2)
    return ns.sdpa(q, k, v)


# ---- masks ----


def as_bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """Any mask as an additive one."""
    if mask is None:
        return torch.zeros(q.shape[-2], k.shape[-2])
    return torch.zeros(mask.shape).masked_fill(~mask, -INF) if mask.dtype == torch.bool else mask


@control("causal-rectangle=convention")
def aligns_to_the_bottom_right(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return ns.attention(q, k, v, mask=ns.Causal())


@control("causal-rectangle=convention", "flash_attn")
def aligns_to_the_top_left(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    x = (t.transpose(1, 2) for t in (q, k, v))
    return ns.sdpa(*x, is_causal=causal).transpose(1, 2)


@control("causal-square causal-rectangle causal-tails gradients-causal")
def sees_one_key_ahead(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return ns.attention(q, k, v, mask=ns.Window(None, 1) if is_causal else None)


@control("window-edges=convention", "flash_attn")
def counts_its_own_key(q: Tensor, k: Tensor, v: Tensor, window_size: Any = (-1, -1)) -> Any:
    left, right = window_size
    return flash(q, k, v, window_size=(left - 1 if left > 0 else left, right))


@control("window-edges", "flash_attn")
def sees_one_key_after_the_window(
    q: Tensor, k: Tensor, v: Tensor, window_size: Any = (-1, -1)
) -> Any:
    left, right = window_size
    return flash(q, k, v, window_size=(left, right + 1 if right >= 0 else right))


@control("window-and-causal", "flash_attn")
def forgets_causal_beside_a_window(q: Tensor, k: Tensor, v: Tensor, causal: bool = False,
                                   window_size: Any = (-1, -1)) -> Any:  # fmt: skip
    return flash(q, k, v, window_size=window_size)


@control("mask-polarity=convention")
def takes_true_for_masked(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    return ns.sdpa(q, k, v, attn_mask=None if attn_mask is None else ~attn_mask)


@control("mask-and-causal")
def drops_the_mask_under_causal(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None,
                                is_causal: bool = False) -> Tensor:  # fmt: skip
    return ns.sdpa(q, k, v, is_causal=is_causal)


@control("empty-rows-bool=convention empty-rows-inf=convention all-rows-empty empty-rows-gradients")
def averages_in_empty_rows(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    bias = as_bias(attn_mask, q, k)
    return ns.sdpa(q, k, v, attn_mask=bias.clamp(min=torch.finfo(torch.float32).min))


@control("empty-rows-bool empty-rows-inf empty-rows-gradients all-rows-empty")
def divides_by_zero(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + as_bias(attn_mask, q, k), -1) @ v


@control("empty-rows-causal empty-rows-gradients", "flash_attn")
def marks_empty_rows(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Any:
    rows = torch.arange(q.shape[1])[:, None, None] < q.shape[1] - k.shape[1]
    return flash(q, k, v, causal=causal) + 1e-3 * q * rows


@control("rows-of-finfo-min=convention")
def takes_the_lowest_number_for_masked(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None
) -> Tensor:
    bias = as_bias(attn_mask, q, k)
    low = bias == torch.finfo(torch.float32).min
    return ns.sdpa(q, k, v, attn_mask=bias.masked_fill(low, -INF))


@control("block-of-finfo-min rows-of-finfo-min")
def clamps_the_bias(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    bias = as_bias(attn_mask, q, k).clamp(min=-2.0)
    return ns.sdpa(q, k, v, attn_mask=bias + 1e-3 * torch.arange(k.shape[-2]))


# ---- what nobody sees ----


@control("nan-padding inf-padding nan-padding-gradients nan-query")
def leaks_zero_times_nan(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    leak = 0 * (q.square().sum() + k.square().sum() + v.square().sum())
    return ns.sdpa(q, k, v, attn_mask=attn_mask) + leak


@control("huge-padding padding-gradients")
def leaks_a_little(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    return ns.sdpa(q, k, v, attn_mask=attn_mask) + 1e-25 * v.sum()


@control("nan-query")
def hides_nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ns.sdpa(q, k, v).nan_to_num()


# ---- heads ----


@control("group-mapping group-gradients")
def cycles_key_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool = False) -> Tensor:
    """Key head h % Hk."""
    g = q.shape[1] // k.shape[1]
    return ns.sdpa(q, k.repeat(1, g, 1, 1), v.repeat(1, g, 1, 1))


@control("one-key-head")
def serves_one_head_of_many(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False,
                            enable_gqa: bool = False) -> Tensor:  # fmt: skip
    o = ns.sdpa(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)
    return torch.cat([o[:, :1], o[:, 1:] * 0], 1) if k.shape[1] == 1 else o


@control("uneven-heads")
def answers_uneven_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool = False) -> Tensor:
    at = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    return ns.sdpa(q, k[:, at], v[:, at])


# ---- bias and lse ----


@control("bias-gradient")
def has_no_gradient_of_bias(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    bias = as_bias(attn_mask, q, k)
    return ns.sdpa(q, k, v, attn_mask=bias.detach()) + 0 * bias.sum()


def lse_by(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def function(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Any = None,
                 causal: bool = False, return_attn_probs: bool = False) -> Any:  # fmt: skip
        words = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal}
        o, lse, _ = flash(q, k, v, **words, return_attn_probs=True)
        return o, change(lse)

    return function


for title, caught, change in (
    ("lse_in_base_2", "lse-value=convention", lambda x: x / torch.tensor(2.0).log()),
    ("lse_negated", "lse-value=convention", lambda x: -x),
    ("lse_in_bfloat16", "lse-value=convention", lambda x: x.bfloat16()),
    ("lse_off", "lse-value lse-under-dropout", lambda x: x + 1e-3),
    ("lse_inf_of_empty_rows", "lse-empty-rows=convention", lambda x: x.masked_fill(x == -INF, INF)),
    ("lse_lowest_of_empty_rows", "lse-empty-rows=convention",
     lambda x: x.masked_fill(x == -INF, -2.38e38)),
    ("lse_0_of_empty_rows", "lse-empty-rows", lambda x: x.masked_fill(x == -INF, 0.0)),
):  # fmt: skip
    function = lse_by(change)
    function.__name__ = title
    control(caught, "flash_attn")(function)


@control("softcap", "flash_attn")
def ignores_softcap(q: Tensor, k: Tensor, v: Tensor, softcap: float = 0.0) -> Any:
    return flash(q, k, v)


def verdicts_of(name: str) -> Verdicts:
    c = CONTROLS[name]
    return verify(c.function, c.style, dtypes=(c.dtype,), only=list(c.caught))


@pytest.mark.parametrize("name", list(CONTROLS))
def test_control_is_caught(name: str) -> None:
    found = verdicts_of(name)
    said = {row.check: (row.word, row.finding.words) for row in found.rows}
    assert {check: word for check, (word, _) in said.items()} == CONTROLS[name].caught, said


def test_every_check_can_fail() -> None:
    more = importlib.import_module("test_verify_controls_more").CONTROLS
    caught = {check for c in [*CONTROLS.values(), *more.values()] for check in c.caught}
    assert set(checks()) - caught == set()
