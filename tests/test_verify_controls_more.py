"""More wrong controls: gradients, dropout, repetition, precision, extent, derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nosquare as ns
import test_verify_controls as first
from nosquare.verify import verify
from nosquare.verify.checks import extent

CONTROLS: dict[str, first.Control] = {}
sdpa = torch.nn.functional.scaled_dot_product_attention


def control(caught: str, dtype: str = "float32") -> Any:
    def keep(function: Any) -> Any:
        own = dict(word.partition("=")[::2] for word in caught.split())
        own = {name: verdict or "fail" for name, verdict in own.items()}
        CONTROLS[function.__name__] = first.Control(function, "sdpa", own, dtype)
        return function

    return keep


# ---- gradients ----


def hooked(t: Tensor, change: Any) -> Tensor:
    """t, whose gradient is changed on its way back."""
    t = t.view_as(t)
    if t.requires_grad:
        t.register_hook(change)
    return t


@control("gradients-full gradients-causal gradients-masked gradients-of-sum gradients-any-layout "
         "gradients-one-query gradients-of-some gradient-tails group-gradients dropout-backward "
         "padding-gradients nan-padding-gradients very-negative-scores")  # fmt: skip
def halves_dk(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> Tensor:
    return ns.sdpa(q, hooked(k, lambda g: g / 2), v, **words)


@control("gradients-any-layout gradients-of-sum")
def takes_do_for_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def misread(g: Tensor) -> Tensor:
        return g.flip(-1) * (0 if 0 in g.stride() else 1) if not g.is_contiguous() else g

    return hooked(ns.sdpa(q, k, v), misread)


@control("large-score-gradients")
def overflows_in_backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hooked(ns.sdpa(q, k, v), lambda g: g / (k.abs().amax() < 20))


# ---- dropout ----


def dropped(x: tuple[Tensor, ...], keep: Tensor, p: float) -> Tensor:
    """Dense attention with a given mask."""
    q, k, v = x
    w = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
    return (w * keep / (1 - p)) @ v


def drawn(q: Tensor, k: Tensor) -> Tensor:
    return torch.rand(*q.shape[:-1], k.shape[-2])


@control("dropout-rate=convention")
def drops_in_steps_of_256(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    return dropped((q, k, v), (drawn(q, k) * 256).floor() <= int(255 * (1 - dropout_p)), dropout_p)


@control("dropout-rate=convention")
def drops_in_steps_of_16(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    return dropped((q, k, v), drawn(q, k) >= round(dropout_p * 16) / 16, dropout_p)


@control("dropout-rate")
def drops_too_little(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    return dropped((q, k, v), drawn(q, k) >= 0.9 * dropout_p, dropout_p)


@control("dropout-scale")
def does_not_rescale(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    return dropped((q, k, v), drawn(q, k) >= dropout_p, 0.0)


@control("dropout-replay dropout-slices=convention")
def draws_from_the_clock(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    draws_from_the_clock.count = getattr(draws_from_the_clock, "count", 0) + 1  # type: ignore[attr-defined]
    seed = draws_from_the_clock.count  # type: ignore[attr-defined]
    return ns.attention(q, k, v, dropout=ns.Dropout(dropout_p, seed) if dropout_p else None)


@control("dropout-replay")
def knows_one_mask_only(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    return ns.attention(q, k, v, dropout=ns.Dropout(dropout_p, 1) if dropout_p else None)


@control("dropout-backward")
def drops_others_in_backward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    mine, other = (ns.attention(q, k, v, dropout=ns.Dropout(dropout_p, s) if dropout_p else None)
                   for s in (1, 2))  # fmt: skip
    return other + (mine - other).detach()


@control("dropout-independent")
def drops_alike_in_all_heads(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    keep = drawn(q[:, :1], k) >= dropout_p
    return dropped((q, k, v), keep, dropout_p)


@control("dropout-slices=convention")
def draws_as_torch_does(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    return dropped((q, k, v), drawn(q, k) >= dropout_p, dropout_p)


@control("dropout-zero=convention")
def draws_for_nothing(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    torch.rand(1)
    return ns.sdpa(q, k, v)


@control("dropout-zero")
def drops_at_zero(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.5) -> Tensor:
    drop = ns.Dropout(0.01, 3) if dropout_p == 0.0 else None
    return ns.attention(q, k, v, dropout=drop)


# ---- repetition ----


@control("forward-repeats batch-invariance=convention")
def never_the_same_twice(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    never_the_same_twice.count = getattr(never_the_same_twice, "count", 0) + 1  # type: ignore[attr-defined]
    o = ns.sdpa(q, k, v, is_causal=is_causal)
    return o * (1 + 2.0**-22 * never_the_same_twice.count % 3)  # type: ignore[attr-defined]


@control("backward-repeats")
def adds_in_any_order(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> Tensor:
    return ns.sdpa(hooked(q, lambda g: g * (1 + 1e-6 * torch.rand(1))), k, v, **words)


@control("batch-invariance")
def mixes_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ns.sdpa(q, k.mean(0, keepdim=True).expand(k.shape), v)


# ---- precision ----


def tf32(t: Tensor) -> Tensor:
    """The number that tf32 makes of it: 11 bits."""
    return (t.contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


@control("float32-is-ieee")
def rounds_to_tf32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ns.sdpa(tf32(q), tf32(k), tf32(v))


@control("float32-is-ieee=convention")
def obeys_the_switch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    allowed = torch.backends.fp32_precision == "tf32"
    return rounds_to_tf32(q, k, v) if allowed else ns.sdpa(q, k, v)


@control("long-sums error-of-the-formula", "bfloat16")
def sums_in_16_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tiles of two keys, whose running sums are rounded to the dtype."""
    w = torch.softmax((q.float() @ k.float().mT) * q.shape[-1] ** -0.5, -1)
    o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for first_key in range(0, k.shape[-2], 2):
        at = slice(first_key, first_key + 2)
        o = (o.float() + w[..., at] @ v[..., at, :].float()).to(q.dtype)
    return o


class SumsDvIn16Bits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return ns.sdpa(q, k, v)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        w = torch.softmax((q.float() @ k.float().mT) * q.shape[-1] ** -0.5, -1)
        dv = torch.zeros_like(v)
        for row in range(0, q.shape[-2], 32):
            at = slice(row, row + 32)
            dv = (dv.float() + w[..., at, :].mT @ do[..., at, :].float()).to(v.dtype)
        return torch.zeros_like(q), torch.zeros_like(k), dv


@control("long-gradient-sums", "bfloat16")
def sums_dv_in_16_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SumsDvIn16Bits.apply(q, k, v)


# ---- extent ----


@control("long-keys")
def has_16_bit_indices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ns.sdpa(q, k[..., :65535, :], v[..., :65535, :])


@control("many-heads")
def has_a_grid_of_65535(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = ns.sdpa(q, k, v).flatten(0, 1)
    alive = torch.arange(flat.shape[0]) < 65535
    return (flat * alive[:, None, None]).unflatten(0, q.shape[:2])


@control("no-square=convention")
def makes_the_square(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


@control("long-square")
def forgets_late_rows(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    o = ns.sdpa(q, k, v, is_causal=is_causal)
    return o * (torch.arange(q.shape[-2]) < 250)[:, None]


@control("big-offsets")
def has_short_offsets(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows of v that begin at 2^13 elements or later are lost: see INDEX below."""
    begins = torch.arange(v.shape[-2]) * v.stride(-2)
    return ns.sdpa(q, k, v * (begins < 1 << 13)[:, None])


# ---- derivatives ----


@control("double-backward")
def halves_second_derivatives(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ns.sdpa(hooked(q, lambda g: (g + g.detach()) / 2), k, v)


@control("forward-mode vmap")
def errs_under_transforms(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = ns.sdpa(q, k, v)
    return o * 1.1 if torch._C._are_functorch_transforms_active() else o


@control("compiled-lengths")
def errs_when_compiled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    o = ns.sdpa(q, k, v, is_causal=is_causal)
    return o * 1.1 if torch.compiler.is_compiling() else o


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs a large card is asked of small sizes, here."""
    monkeypatch.setattr(extent, "_has_room", lambda *_: True)
    monkeypatch.setattr(extent, "SQUARE", 300)
    monkeypatch.setattr(extent, "INDEX", 1 << 13)


@pytest.mark.parametrize("name", list(CONTROLS))
def test_control_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    c = CONTROLS[name]
    found = verify(c.function, c.style, dtypes=(c.dtype,), only=list(c.caught))
    said = {row.check: (row.word, row.finding.words) for row in found.rows}
    assert {check: word for check, (word, _) in said.items()} == c.caught, said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_right_one_passes_what_needs_a_card(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    found = verify(ns.sdpa, "sdpa", dtypes=(dtype,), only=["long-square", "big-offsets"])
    assert [row.word for row in found.rows] == ["pass", "pass"], found
