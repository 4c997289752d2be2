"""Groups of query heads, scores, and the normaliser that is returned."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..registry import check
from ..subject import FLASH_ATTN, SDPA, Ask, Inapplicable, Refusal, gradients
from ..trial import Case, Trial, judged, leaves, within
from ..truth import Gap, Options, gap_of_lse, gap_of_o, gaps_of_gradients, largest
from ..verdict import CONVENTION, FAIL, PASS, Finding

# ---- heads ----


@check("group-mapping", "heads", "Query head h reads key head h // (Hq / Hk).",
       "onnx/onnx#7274")  # fmt: skip
def group_mapping(t: Trial) -> Finding:
    for heads in ((4, 2), (6, 2), (8, 4)):
        q, k, v = x = t.qkv(17, 33, heads=heads)
        gap = gap_of_o(o := t.attend(x), x, Options(), t.dtype)
        where = f"Hq={heads[0]} Hk={heads[1]}"
        if not gap.ok:
            cycled = [y.repeat(1, heads[0] // heads[1], 1, 1) for y in (k, v)]
            if gap_of_o(o, (q, cycled[0], cycled[1]), Options(), t.dtype).ok:
                return Finding(FAIL, f"{where}: it reads key head h % Hk", gap.error, gap.bound)
            return judged(gap, where)
    return within([gap])


@check("one-key-head", "heads", "One key head serves all query heads.")
def one_key_head(t: Trial) -> Finding:
    x = t.qkv(33, 33, heads=(5, 1))
    return t.agree(
        Case(f"Hq=5 Hk=1 M=N=33{' causal' * causal}", x, Ask(causal=causal))
        for causal in (False, True)
    )


@check("group-gradients", "heads", "dk and dv are summed over the group that reads the key head.")
def group_gradients(t: Trial) -> Finding:
    return t.agree(
        Case(f"Hq={hq} Hk={hk} M=33 N=40", t.qkv(33, 40, heads=(hq, hk)), grads=True)
        for hq, hk in ((4, 2), (6, 2), (4, 1))
    )


@check("uneven-heads", "heads", "Hq that is no multiple of Hk is refused, not answered.")
def uneven_heads(t: Trial) -> Finding:
    try:
        t.attend(t.qkv(9, 9, heads=(6, 4)))
    except Refusal as refusal:
        return Finding(PASS, f"refused, as it must be: {refusal}")
    return Finding(FAIL, "Hq=6 Hk=4 is answered")


# ---- scores ----


@check("scale", "score", "Any scale is obeyed, 0 and negative ones too, under a mask as well.",
       "docs/log.md (torch on a CPU)")  # fmt: skip
def scale(t: Trial) -> Finding:
    return t.agree(
        Case(f"scale={s} {'causal' * causal}".strip() + ", M=N=33", t.qkv(33, 33),
             Ask(causal=causal, scale=s))
        for s in (0.5, 0.0, -0.25, 3.0)
        for causal in (False, True)
    )  # fmt: skip


@check("equal-scores", "score", "Where all scores are equal, o is the mean of v.",
       "Dao-AILab/flash-attention#2322")  # fmt: skip
def equal_scores(t: Trial) -> Finding:
    def cases() -> Iterator[Case]:
        for n in (1, 33, 200):
            q, k, v = t.qkv(5, n)
            yield Case(f"q = 0, N={n}", (q * 0, k, v))
            yield Case(f"k constant, N={n}", (q, k[:, :, :1].expand(k.shape), v))

    return t.agree(cases())


@check("large-scores", "score", "Scores up to 1e4, ties among them, neither overflow nor give NaN.",
       "pytorch/pytorch#119320, pytorch/pytorch#60939")  # fmt: skip
def large_scores(t: Trial) -> Finding:
    def cases() -> Iterator[Case]:
        # in float16 the product q.k = 102,400 would overflow before the scale of 1/8
        q, k = (t.zeros(1, 2, n, 64) + 40 for n in (4, 70))
        k[..., 1::2, :] = -40
        k[..., 5, 0] = 40.5
        yield Case("q.k = 102,400 with ties, D=64", (q, k, t.rnd(1, 2, 70, 64, seed=3)))
        for size in (300, 3000, 10_000):
            q, k, v = t.qkv(33, 65, 32)
            now = largest(q.double() @ k.double().mT) * 32**-0.5  # the largest score
            yield Case(f"scores to {size}, M=33 N=65", (q * (size / now), k, v))

    return t.agree(cases())


@check("large-score-gradients", "score", "Gradients stay finite under large scores.",
       "pytorch/pytorch#119320, pytorch/pytorch#125674")  # fmt: skip
def large_score_gradients(t: Trial) -> Finding:
    for size in (3, 30):
        q, k, v = t.qkv(33, 65, 32)
        x = leaves((q * size, k * size, v))
        o = t.attend(x, Ask())
        found = gradients(o, x, t.rnd(*o.shape, seed=9))
        for name, g in zip(("dq", "dk", "dv"), found, strict=True):
            if not g.isfinite().all():
                words = f"q and k about {size}, M=33 N=65: {name} is not finite"
                return Finding(FAIL, words, torch.nan, 0.0)
    return Finding(PASS, "finite")


@check("very-negative-scores", "score", "Rows whose lse is below -88.7 have right o and gradients.",
       "pytorch/pytorch#196678, NVIDIA/cudnn-frontend#1072")  # fmt: skip
def very_negative_scores(t: Trial) -> Finding:
    def cases() -> Iterator[Case]:
        for m, n in ((1, 128), (33, 65), (130, 130), (192, 192)):
            q, k, v = t.qkv(m, n, 64)
            low = ((q.abs() + 1) * 4, -(k.abs() + 1), v)
            yield Case(f"M={m} N={n} D=64", low, grads=True)

    return t.agree(cases())


@check("bias", "score", "A float mask is added to the scaled scores.")
def bias(t: Trial) -> Finding:
    return t.agree(
        Case(f"bias {shape}", t.qkv(17, 33, b=2), Ask(bias=t.rnd(*shape, seed=5)))
        for shape in ((17, 33), (1, 33), (17, 1), (2, 1, 17, 33), (1, 2, 17, 33))
    )


@check("bias-gradient", "score", "A bias has a gradient, summed over the axes it broadcasts on.",
       "pytorch/pytorch#148476")  # fmt: skip
def bias_gradient(t: Trial) -> Finding:
    for shape in ((1, 2, 17, 33), (1, 33)):
        x = t.qkv(17, 33)
        leaf = t.rnd(*shape, seed=5).requires_grad_()
        o = t.attend(x, Ask(bias=leaf))
        do = t.rnd(*o.shape, seed=9)
        found = gradients(o, (leaf,), do)[0]
        whole = (*x, leaf)
        zeros = [torch.zeros_like(y) for y in x]
        gap = gaps_of_gradients([*zeros, found], whole, do, Options(), t.dtype)[3]
        if not gap.ok:
            return judged(gap, f"bias {shape}, only it requires a gradient")
    return within([gap])


# ---- lse ----


def _with_lse(t: Trial) -> None:
    if t.subject.style == SDPA:
        raise Inapplicable("SDPA's signature returns no lse")


@check("lse-value", "lse", "lse is the natural logarithm of the sum of exp(scale q.k), in float32.",
       "sgl-project/sglang#40903, flashinfer-ai/flashinfer#2113")  # fmt: skip
def lse_value(t: Trial) -> Finding:
    _with_lse(t)
    gaps = []
    for m, n, ask in (
        (1, 1, Ask()),
        (5, 33, Ask()),
        (33, 130, Ask(causal=True)),
        (17, 17, Ask(scale=2.0)),
    ):
        x = t.qkv(m, n)
        _, lse = t.subject.state(*x, ask)
        options = t.options(x, ask)
        gap = gap_of_lse(lse, x, options, t.dtype)
        if not gap.ok:
            for words, factor in (("base 2", math.log(2)), ("the sign is minus", -1.0)):
                if gap_of_lse(lse.double() * factor, x, options, t.dtype).ok:
                    return Finding(CONVENTION, words)
            if lse.dtype in (torch.bfloat16, torch.float16):
                return Finding(CONVENTION, f"returned in {str(lse.dtype).removeprefix('torch.')}")
            return judged(gap, f"M={m} N={n}")
        gaps.append(gap)
    return within(gaps)


@check("lse-empty-rows", "lse", "Rows that see no key have lse = -inf.",
       "Dao-AILab/flash-attention (softmax.h), meta-pytorch/attention-gym#205")  # fmt: skip
def lse_empty_rows(t: Trial) -> Finding:
    _with_lse(t)
    x = t.qkv(9, 4)
    _, lse = t.subject.state(*x, Ask(causal=True))
    rows: Tensor = lse[..., :5].float()
    if rows.isneginf().all():
        return Finding(PASS, "-inf")
    if rows.isposinf().all():
        return Finding(CONVENTION, "+inf")
    if (rows < -1e30).all():
        return Finding(CONVENTION, f"the finite number {float(rows.max()):.3g}")
    return Finding(FAIL, f"M=9 N=4 causal: {float(rows.flatten()[0]):.3g}", largest(rows), 0.0)


@check("lse-under-dropout", "lse", "Dropout does not enter the lse.")
def lse_under_dropout(t: Trial) -> Finding:
    _with_lse(t)
    x = t.qkv(17, 65)
    torch.manual_seed(3)
    _, lse = t.subject.state(*x, Ask(dropout=0.5))
    return judged(gap_of_lse(lse, x, Options(), t.dtype), "M=17 N=65 p=0.5")


@check("softcap", "score", "softcap: s becomes softcap * tanh(s / softcap).")
def softcap(t: Trial) -> Finding:
    if t.subject.style != FLASH_ATTN:
        raise Inapplicable("SDPA's signature has no softcap")
    q, k, v = t.qkv(17, 33)
    q = q * 8
    o = t.attend((q, k, v), Ask(words=(("softcap", 5.0),)))
    z = (q.double() @ k.double().mT) * 16**-0.5
    # as a bias: what is missing from z to the capped score
    capped = Options(bias=5.0 * torch.tanh(z / 5.0) - z)
    gap: Gap = gap_of_o(o, (q, k, v), capped, t.dtype)
    return judged(gap, "M=17 N=33 softcap=5")
