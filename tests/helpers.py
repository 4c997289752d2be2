"""What the tests share: cases, an independent dense reference, and bounds that have a reason.

The bounds are worst-case first-order rounding analyses, element by element. With u the unit
roundoff of the accumulation type and u_out that of the inputs and outputs,

    a score is wrong by     (D + 8) u S,  S = scale |q|.|k| + softcap + |alibi| + |bias| + |sink|
    a weight is wrong by    K u times itself,  K = 4 (D + 8) max S + 2 (N + E + G M) + 6 tiles + 32:
                            the scores of the row, the sums over N, E and G M terms, the rescales
    o is wrong by           u_out |o| + K u (P |v|)
    a gradient is wrong by  u_out |g| + what the errors of p, of dp = do.v, and of
                            delta = do.o - dlse (o is stored rounded: u_out) amount to

For 16-bit types the fast kernels round P and dS to 16 bits before the second product, as every
kernel with tensor cores does: `u_p` = u_out there, and 0 for float32 and float64. They may also
use a shorter exponential: torch's own for CPUs is right to 2^-14 (seen: lse off by 6e-5), so
`u_exp` = 2^-13 there.

A weight below the smallest normal number may be 0: the exponential of NVIDIA's cards flushes it.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import nosquare as ns
from nosquare import oracle
from nosquare.backends import FORWARD, discover
from nosquare.dropout import keep_scalar, realised_rate
from nosquare.inputs import Inputs, Spec
from nosquare.mask import Both, Either, Mask
from nosquare.problem import Problem

INF = float("inf")
NAN = float("nan")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rnd(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1) -> Tensor:
    """Normal numbers that depend on the seed alone, drawn in float64 and rounded once."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g, dtype=torch.float64) * scale).to(dtype)


def force_tiles(patch: pytest.MonkeyPatch, m: int | None = 16, n: int = 16) -> None:
    """Make torch_any cut small problems into many tiles; m=None: as it would. Decisions are
    remembered: forget them."""
    tiling = importlib.import_module("nosquare.backends.torch_any.tiling")
    patch.setattr(tiling, "FORCED", None if m is None else (m, n))
    forget(patch)


def forget(patch: pytest.MonkeyPatch) -> None:
    """Forget which backend served which problem, now and when the test ends."""
    patch.setattr(importlib.import_module("nosquare.ops"), "_DECISIONS", {})


def on_cpu() -> list[str]:
    """The backends that run a plain problem on a CPU."""
    c = case()
    p = Problem.of(Inputs(c.q, c.k, c.v), Spec())
    return [name for name, backend in discover().items() if not backend.refusals(p, FORWARD)]


def load_forward_mode() -> None:
    """Import what torch's forward mode imports at its first use, which torch 2.13 itself
    deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


# ---- masks, written independently of nosquare.mask ----------------------------------------------


def truth(mask: Mask | None, batch: tuple[int, ...], hq: int, m: int, n: int) -> Tensor:
    """Which pairs are visible, (*batch, Hq, M, N), from the words of the contract alone."""
    shape = (*batch, hq, m, n)
    if isinstance(mask, Both):
        parts = torch.stack([truth(p, batch, hq, m, n) for p in mask.parts])
        return parts.any(0) if isinstance(mask, Either) else parts.all(0)
    i, j = torch.arange(m)[:, None], torch.arange(n)[None]
    pos = i + (n - m) if getattr(mask, "align", "end") == "end" else i
    if mask is None or isinstance(mask, ns.Full):
        keep = torch.ones(m, n, dtype=torch.bool)
    elif isinstance(mask, ns.Causal):
        keep = j <= pos
    elif isinstance(mask, ns.Window):
        before = m + n if mask.before is None else mask.before
        after = m + n if mask.after is None else mask.after
        keep = (pos - j <= before) & (j - pos <= after)
    elif isinstance(mask, ns.Prefix):
        keep = (j < mask.n).expand(m, n)
    elif isinstance(mask, ns.Lengths):
        keep = j < mask.n_keys.cpu()[..., None, None, None]
    elif isinstance(mask, ns.Documents):
        keep = (mask.q_ids.cpu()[..., None] == mask.k_ids.cpu()[..., None, :])[..., None, :, :]
    elif isinstance(mask, ns.Dense):
        keep = mask.visible.cpu()
    elif isinstance(mask, ns.BlockSparse):
        tall = mask.layout.cpu().repeat_interleave(mask.block, -2)[..., :m, :]
        keep = tall.repeat_interleave(mask.block, -1)[..., :n]
    else:
        raise AssertionError(f"helpers.truth does not know {type(mask).__name__}: say it here")
    return keep.expand(shape)


# ---- one problem --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """q, k, v and the options of one call; do and dlse are made to fit."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.q.shape[:-3])

    def tensors(self) -> dict[str, Tensor]:
        """The inputs that have gradients."""
        more = {n: self.options[n] for n in ("bias", "sinks") if self.options.get(n) is not None}
        return {"q": self.q, "k": self.k, "v": self.v, **more}

    def with_(self, **tensors: Tensor) -> Case:
        own = {n: tensors.pop(n) for n in ("q", "k", "v") if n in tensors}
        return replace(self, **own, options={**self.options, **tensors})

    def cotangents(self) -> tuple[Tensor, Tensor]:
        shape = (*self.q.shape[:-1], self.v.shape[-1])
        wide = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        do = rnd(*shape, seed=101, dtype=self.q.dtype).to(self.q.device)
        return do, rnd(*shape[:-1], seed=102, dtype=wide).to(self.q.device)


def case(
    batch: tuple[int, ...] = (2,),
    hq: int = 4,
    hk: int = 2,
    m: int = 37,
    n: int = 53,
    d: int = 16,
    e: int | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Case:
    q, k = rnd(*batch, hq, m, d, seed=1, dtype=dtype), rnd(*batch, hk, n, d, seed=2, dtype=dtype)
    return Case(q, k, rnd(*batch, hk, n, d if e is None else e, seed=3, dtype=dtype), options)


@dataclass
class Exact:
    """The same attention, dense and in float64, written without nosquare's own pieces."""

    case: Case
    p: Tensor  # weights before dropout
    dropped: Tensor  # weights after it
    factor: Tensor  # keep / (1 - rate), 1 without dropout
    size: Tensor  # S of the module's docstring, of the visible pairs
    o: Tensor
    lse: Tensor

    @staticmethod
    def of(c: Case) -> Exact:
        get = c.options.get
        (hq, m, d), n = c.q.shape[-3:], c.k.shape[-2]
        q, k, v = (t.detach().double().cpu() for t in (c.q, c.k, c.v))
        g = hq // max(k.shape[-3], 1)
        k, v = k.repeat_interleave(g, -3), v.repeat_interleave(g, -3)
        keep = truth(get("mask"), c.batch, hq, m, n)
        live = keep.any(-2)[..., None]
        k, v = k.masked_fill(~live, 0), v.masked_fill(~live, 0)  # what nobody sees may be NaN
        q = q.masked_fill(~keep.any(-1)[..., None], 0)
        scale = d**-0.5 if get("scale") is None else get("scale")
        s = q @ k.transpose(-1, -2) * scale
        size = q.abs() @ k.abs().transpose(-1, -2) * abs(scale)
        if get("softcap") is not None:
            s = get("softcap") * torch.tanh(s / get("softcap"))
            size = size * 2 + get("softcap")
        if get("alibi") is not None:
            far = (torch.arange(m)[:, None] + (n - m) - torch.arange(n)).abs()
            slope = get("alibi").double().cpu()[..., None, None] * far
            s, size = s - slope, size + slope.abs()
        if get("bias") is not None:
            bias = get("bias").detach().double().cpu()
            s, size = s + bias, size + bias.abs().masked_fill(bias.isinf(), 0)
        s, size = s.masked_fill(~keep, -INF), size.masked_fill(~keep, 0)
        logits = s
        if get("sinks") is not None:
            sink = get("sinks").detach().double().cpu()[..., None, None].expand(*s.shape[:-1], 1)
            logits = torch.cat([s, sink], -1)
            size = size + sink.abs().masked_fill(sink.isinf(), 0)
        lse = torch.logsumexp(logits, -1) if logits.shape[-1] else s.new_full(s.shape[:-1], -INF)
        p = torch.exp(s - lse.masked_fill(lse == -INF, 0)[..., None])
        factor = kept(get("dropout"), s.shape)
        dropped = p * factor
        return Exact(c, p, dropped, factor, size, dropped @ v, lse)


def kept(dropout: ns.Dropout | None, shape: torch.Size) -> Tensor:
    """keep / (1 - rate) for every pair, one scalar call each."""
    if dropout is None:
        return torch.ones(shape, dtype=torch.float64)
    *batch, hq, m, n = shape
    ob, oh, oi, oj = dropout.offsets
    keep = ns.dropout_keep(
        dropout.seed,
        range(ob, ob + math.prod(batch)),
        range(oh, oh + hq),
        range(oi, oi + m),
        range(oj, oj + n),
        dropout.p,
    )
    if keep.numel():  # the scalar semantics of record, at a few places
        for b, h, i, j in ((0, 0, 0, 0), (-1, -1, -1, -1), (0, -1, m // 2, n // 3)):
            at = [x % s for x, s in zip((b, h, i, j), keep.shape, strict=True)]
            want = keep_scalar(
                int(dropout.seed), ob + at[0], oh + at[1], oi + at[2], oj + at[3], dropout.p
            )
            assert bool(keep[tuple(at)]) == want
    return keep.reshape(shape).double() / (1 - realised_rate(dropout.p))


# ---- bounds -------------------------------------------------------------------------------------


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def bounds(x: Exact, do: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    """The allowed error of o, lse and every gradient: see the module's docstring."""
    c = x.case
    dtype, get = c.q.dtype, c.options.get
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    u, u_out = unit(wide), unit(dtype)
    u_p, u_exp = (0.0, 0.0) if dtype == wide else (u_out, 2.0**-13)
    (hq, m, d), (hk, n, e) = c.q.shape[-3:], c.v.shape[-3:]
    g = hq // max(hk, 1)
    q, k, v, do = (t.detach().double().cpu().abs() for t in (c.q, c.k, c.v, do))
    keep = truth(get("mask"), c.batch, hq, m, n)
    k, v = (t.repeat_interleave(g, -3).masked_fill(~keep.any(-2)[..., None], 0) for t in (k, v))
    q = q.masked_fill(~keep.any(-1)[..., None], 0)
    do = do.masked_fill(~keep.any(-1)[..., None], 0)
    top = x.size.amax(-1, keepdim=True) if n else x.size.new_zeros(*x.size.shape[:-1], 1)
    tiles = n / 16
    big = 4 * (d + 8) * top + 2 * (n + e + m * g) + 6 * tiles + 32
    if get("softcap") is not None:  # the slope 1 - tanh(z)^2 is recomputed from a rounded z
        big = big + 4 * (d + 8) * top / get("softcap")
    ku = big * u + 2 * u_p + u_exp
    scale = d**-0.5 if get("scale") is None else abs(get("scale"))
    flushed = keep * torch.finfo(wide).tiny  # of a weight
    pv = x.dropped @ v
    along = x.factor * (do @ v.transpose(-1, -2))  # |dp|
    delta = (do * pv).sum(-1, keepdim=True) + dlse.double().cpu().abs()[..., None]
    ds = x.p * ((along + delta) * ku + delta * (u_out + ku)) + flushed * (along + delta)

    def grouped(t: Tensor) -> Tensor:
        return t.reshape(*c.batch, hk, g, *t.shape[-2:]).sum(-3) if hk else t

    out = {
        "o": ku * pv + (flushed * x.factor) @ v,
        "lse": ((d + 8) * top[..., 0] * 2 + n + 6 * tiles + 8) * u + u_exp,
        "q": scale * (ds @ k),
        "k": scale * grouped(ds.transpose(-1, -2) @ q),
        "v": grouped((ku * x.dropped + flushed * x.factor).transpose(-1, -2) @ do),
    }
    if get("bias") is not None:
        out["bias"] = ds.sum_to_size(get("bias").shape)
    if get("sinks") is not None:
        sink = get("sinks").detach().double().cpu()[..., None]
        share = torch.exp(sink - x.lse).nan_to_num()  # 0 where nothing is seen, no sink either
        weight = share[..., None] * delta * (2 * ku + u_out)
        out["sinks"] = weight[..., 0].sum(-1).sum_to_size(get("sinks").shape)
    return out


def close(name: str, got: Tensor, want: Tensor, allowed: Tensor) -> float:
    """Assert |got - want| <= allowed + one rounding of `got`; infinities must match. Worst
    ratio."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not got.numel():
        return 0.0
    info = torch.finfo(got.dtype)
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert not got.isnan().any(), f"{name}: NaN at {got.isnan().nonzero()[0].tolist()}"
    endless = want.isinf()
    assert torch.equal(got[endless], want[endless]), f"{name}: infinities differ"
    # below the smallest normal number the spacing is absolute; 64 of them for what is flushed to 0
    room = allowed + want.abs() * info.eps / 2 + info.tiny * max(info.eps, 2.0**-20) * 64
    ratio = ((got - want).abs() / room).masked_fill(endless, 0)
    worst = float(ratio.max())
    at = [int(n) for n in torch.unravel_index(ratio.argmax(), ratio.shape)]
    assert worst <= 1, (
        f"{name}: error {float((got - want).abs()[tuple(at)]):.3e} at {at} is {worst:.2f} x the "
        f"bound; got {float(got[tuple(at)]):.6g}, want {float(want[tuple(at)]):.6g}"
    )
    return worst


# ---- the comparison -----------------------------------------------------------------------------

Attend = Callable[..., ns.State]


def moved(c: Case, device: str) -> Case:
    """The case with all its tensors on a device."""

    def move(value: Any) -> Any:
        if isinstance(value, Mask):
            return ns.parse(str(value), [t.to(device) for t in value.tensors])
        return value.to(device) if isinstance(value, Tensor) else value

    return Case(
        *(t.to(device) for t in (c.q, c.k, c.v)), {n: move(x) for n, x in c.options.items()}
    )


def check(
    c: Case,
    attend: Attend = ns.attention_state,
    *,
    through_lse: bool = True,
    grads: bool = True,
    device: str = "cpu",
) -> float:
    """Compare o, lse and all gradients of `attend` with the oracle in float64. Worst error / bound.

    c is on the CPU; `attend` gets it on `device`.
    """
    do, dlse = c.cotangents()
    if not through_lse:
        dlse = torch.zeros_like(dlse)
    allowed = bounds(Exact.of(c), do, dlse)
    there = c if device == "cpu" else moved(c, device)
    mine = {n: t.detach().requires_grad_(grads) for n, t in there.tensors().items()}
    got = attend(**{**there.options, **mine})
    theirs = {n: t.detach().double().requires_grad_(grads) for n, t in c.tensors().items()}
    want = oracle.attention(**{**c.options, **theirs})
    assert got.o.dtype == c.q.dtype
    assert got.lse.dtype == (torch.float64 if c.q.dtype == torch.float64 else torch.float32)
    ratios = [
        close("o", got.o, want.o, allowed["o"]),
        close("lse", got.lse, want.lse, allowed["lse"]),
    ]
    if not grads:
        return max(ratios)
    outs, cots = ([got.o, got.lse], [do, dlse]) if through_lse else ([got.o], [do])
    found = torch.autograd.grad(outs, list(mine.values()), [t.to(device) for t in cots])
    wide = [t.double() for t in (do, dlse)]
    exact = torch.autograd.grad([want.o, want.lse], list(theirs.values()), wide)
    for (name, t), g, w in zip(mine.items(), found, exact, strict=True):
        assert g.dtype == t.dtype, name
        ratios.append(close("d" + name, g, w, allowed[name]))
    return max(ratios)
