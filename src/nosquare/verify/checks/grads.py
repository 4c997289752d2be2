"""Gradients: against float64, whatever the layout of the gradient that arrives."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..registry import check
from ..subject import Ask, Inapplicable, gradients
from ..trial import Case, Trial, judged, within
from ..truth import gaps_of_gradients
from ..verdict import Finding


@check("gradients-full", "gradients", "dq, dk and dv are those of the definition.",
       "pytorch/pytorch#133671")  # fmt: skip
def plain(t: Trial) -> Finding:
    sizes = ((1, 1, 8), (5, 7, 16), (49, 32, 32), (70, 133, 64))
    return t.agree(Case(f"M={m} N={n} D={d}", t.qkv(m, n, d, b=2), grads=True) for m, n, d in sizes)


@check("gradients-causal", "gradients", "Gradients under a causal mask.")
def causal(t: Trial) -> Finding:
    return t.agree(
        Case(f"M={m} N={n} causal", t.qkv(m, n, 32), Ask(causal=True), grads=True)
        for m, n in ((5, 5), (33, 33), (130, 130), (33, 70))
    )


@check("gradients-masked", "gradients", "Gradients under a mask that differs from head to head.")
def masked(t: Trial) -> Finding:
    g = torch.Generator().manual_seed(4)
    keep = torch.rand(1, 2, 17, 33, generator=g) > 0.4
    keep[..., 0] = True
    return t.agree([Case("M=17 N=33", t.qkv(17, 33), Ask(keep=keep.to(t.device)), grads=True)])


@check("gradients-of-sum", "gradients", "A gradient that arrives expanded (o.sum()) is read right.")
def of_sum(t: Trial) -> Finding:
    one = t.zeros(1).add(1)
    return t.agree(
        Case(
            f"M={m} N={n}, do = 1 expanded", t.qkv(m, n, 32), grads=True, do=one.expand(1, 2, m, 32)
        )
        for m, n in ((5, 7), (65, 65))
    )


@check("gradients-any-layout", "gradients", "A gradient may arrive in another layout than o has.",
       "docs/log.md (cuDNN on an H200)")  # fmt: skip
def any_layout(t: Trial) -> Finding:
    def cases() -> Iterator[Case]:
        b, h, m, d = 2, 4, 65, 32
        for label, do in (
            ("tokens before heads", t.rnd(b, m, h, d, seed=9).transpose(1, 2)),
            ("heads before tokens", t.rnd(b, h, m, d, seed=9)),
            ("width not innermost", t.rnd(b, h, d, m, seed=9).mT),
        ):
            yield Case(
                f"do with {label}, 2x4x65x32", t.qkv(m, m, d, b=b, heads=(h, h)), grads=True, do=do
            )

    return t.agree(cases())


@check("gradients-one-query", "gradients", "One query (M = 1), forward and backward.",
       "NVIDIA/cudnn-frontend#1072")  # fmt: skip
def one_query(t: Trial) -> Finding:
    return t.agree(Case(f"M=1 N={n} D=64", t.qkv(1, n, 64), grads=True) for n in (1, 33, 128))


@check("gradients-of-some", "gradients", "Only some of q, k, v may require a gradient.")
def of_some(t: Trial) -> Finding:
    gaps = []
    for wanted in ("v", "q", "k"):
        x = t.qkv(17, 33, 32)
        place = "qkv".index(wanted)
        x[place].requires_grad_()
        o = t.attend(x)
        if not o.requires_grad:
            raise Inapplicable("its output carries no gradient")
        do = t.rnd(*o.shape, seed=9)
        found = [torch.zeros_like(y) for y in x]
        found[place] = gradients(o, (x[place],), do)[0]
        gap = gaps_of_gradients(found, x, do, t.options(x, Ask()), t.dtype)[place]
        if not gap.ok:
            return judged(gap, f"only {wanted} requires a gradient, M=17 N=33")
        gaps.append(gap)
    return within(gaps)
