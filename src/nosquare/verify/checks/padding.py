"""Numbers that nobody may see: in masked keys, in unused slots, in a neighbouring row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..registry import check
from ..subject import SDPA, Ask, gradients
from ..trial import Case, Trial, judged, leaves
from ..truth import Options, Triple, gap_of_o, gaps_of_gradients, largest
from ..verdict import FAIL, PASS, Finding

INF = float("inf")


@dataclass(frozen=True)
class Hidden:
    """A call in which no row sees some keys. clean: zeros stand in k and v there.

    what  how they are hidden, for the report; unseen: (N,) bool
    """

    clean: Triple
    ask: Ask
    unseen: Tensor
    what: str

    def filled(self, in_k: float, in_v: float) -> Triple:
        """q, k, v with these numbers in the keys that nobody sees."""
        q, k, v = self.clean
        at = self.unseen[:, None]
        return q, k.masked_fill(at, in_k), v.masked_fill(at, in_v)


def hidden(t: Trial, n: int = 90) -> Hidden:
    """SDPA: a bool mask ends each row at a length. flash_attn: a window begins behind the keys."""
    m = 20
    q, k, v = t.qkv(m, n, b=2)
    places = torch.arange(n, device=t.device)
    if t.subject.style == SDPA:
        ask, unseen, what = Ask(keep=(places < 70)[None]), places >= 70, "keys from 70 on masked"
    else:
        ask, unseen = Ask(window=(10, 0)), places < n - m - 10
        what = "window=(10, 0)"
    at = unseen[:, None]
    clean = (q, k.masked_fill(at, 0), v.masked_fill(at, 0))
    return Hidden(clean, ask, unseen, f"M={m} N={n}, {what}")


def _stays_out(t: Trial, fills: tuple[tuple[str, float, float], ...]) -> Finding:
    call = hidden(t)
    return t.agree(
        Case(f"{call.what}, {words}", call.filled(in_k, in_v), call.ask, call.clean)
        for words, in_k, in_v in fills
    )


@check("nan-padding", "padding", "NaN in a key or a value that no row sees reaches no output.",
       "pytorch/pytorch#101967, Dao-AILab/flash-attention#1745")  # fmt: skip
def nan_padding(t: Trial) -> Finding:
    nan = torch.nan
    return _stays_out(t, (("NaN in v", 0, nan), ("NaN in k", nan, 0), ("NaN in both", nan, nan)))


@check("inf-padding", "padding", "Infinities in a key or a value that no row sees reach no output.",
       "flashinfer-ai/flashinfer#941")  # fmt: skip
def inf_padding(t: Trial) -> Finding:
    return _stays_out(t, (("inf in v", 0, INF), ("inf in k", INF, 0), ("-inf in both", -INF, -INF)))


def _huge(t: Trial) -> tuple[float, float]:
    """Numbers for k and v: their products with ordinary numbers stay finite in float32."""
    return (6e4, 6e4) if t.dtype == torch.float16 else (1e18, 1e30)


@check("huge-padding", "padding", "Huge finite numbers in masked keys leave the rest exact.",
       "pytorch/pytorch#41508")  # fmt: skip
def huge_padding(t: Trial) -> Finding:
    in_k, in_v = _huge(t)
    return _stays_out(t, ((f"{in_k:g} in k, {in_v:g} in v", in_k, in_v),))


def _gradients(t: Trial, in_k: float, in_v: float, words: str) -> Finding:
    call = hidden(t)
    x = leaves(call.filled(in_k, in_v))
    o = t.attend(x, call.ask)
    do = t.rnd(*o.shape, seed=99)
    found = gradients(o, x, do)
    options = t.options(call.clean, call.ask)
    where = f"{call.what}, {words}"
    for gap in gaps_of_gradients(found, call.clean, do, options, t.dtype):
        if not gap.ok:
            return Finding(FAIL, f"{where}: {gap}", gap.error, gap.bound)
    for name, g in (("dk", found[1]), ("dv", found[2])):
        spilt = largest(g[..., call.unseen, :])
        if spilt != 0.0:
            return Finding(FAIL, f"{where}: {name} of a hidden key is not 0", spilt, 0.0)
    return Finding(PASS, "exactly 0 for hidden keys")


@check("padding-gradients", "padding", "Keys that no row sees have dk = dv = 0, others the right.",
       "pytorch/pytorch#41508")  # fmt: skip
def padding_gradients(t: Trial) -> Finding:
    return _gradients(t, *_huge(t), "huge numbers there")


@check("nan-padding-gradients", "padding", "NaN in keys that no row sees reaches no gradient.",
       "huggingface/transformers#46765")  # fmt: skip
def nan_padding_gradients(t: Trial) -> Finding:
    return _gradients(t, torch.nan, torch.nan, "NaN there")


@check("nan-query", "padding",
       "NaN in one query comes out in its own row, where it is not hidden, and in no other.",
       "pytorch/pytorch#141128")  # fmt: skip
def nan_query(t: Trial) -> Finding:
    q, k, v = t.qkv(20, 40)
    poisoned = q.clone()
    poisoned[:, :, 7] = torch.nan
    o = t.attend((poisoned, k, v)).detach()
    rest = torch.arange(20, device=t.device) != 7
    if not o[:, :, 7].isnan().all():
        return Finding(FAIL, "M=20 N=40: a row of NaN came out as numbers")
    gap = gap_of_o(o[:, :, rest], (q[:, :, rest], k, v), Options(), t.dtype)
    return judged(gap, "M=20 N=40, in other rows")
