"""Shapes and strides: any size, any view, nothing written where it should not be."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..registry import check
from ..subject import SDPA, Ask, Inapplicable, gradients
from ..trial import Case, Trial, leaves
from ..truth import Triple
from ..verdict import FAIL, PASS, Finding


@check("odd-sizes", "shapes", "Any M, N, D >= 1; the default scale is that of the true D.",
       "Dao-AILab/flash-attention#1347")  # fmt: skip
def odd_sizes(t: Trial) -> Finding:
    sizes = [(1, 1, 1), (1, 2, 3), (3, 5, 5), (2, 1, 8), (17, 70, 16), (37, 53, 59), (65, 33, 111),
             (9, 17, 257)]  # fmt: skip
    return t.agree(Case(f"M={m} N={n} D={d}", t.qkv(m, n, d)) for m, n, d in sizes)


@check("value-width", "shapes", "The width E of v may differ from the width D of q and k.",
       "pytorch/pytorch#110832")  # fmt: skip
def value_width(t: Trial) -> Finding:
    sizes = [(8, 16), (16, 8), (64, 128), (40, 24)]
    return t.agree(Case(f"M=17 N=33 D={d} E={e}", t.qkv(17, 33, d, e)) for d, e in sizes)


def _tokens_before_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _width_not_innermost(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def _every_second_token(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 2)[:, :, ::2]


def _views(t: Trial) -> Iterator[Case]:
    """Each operand in turn in a layout of its own."""
    b, h, n, d = 2, 4, 62, 32
    q, k, v = t.qkv(n, n, d, b=b, heads=(h, h))
    for name, place in (("v", 2), ("k", 1), ("q", 0)):
        for view in (_tokens_before_heads, _width_not_innermost, _every_second_token):
            x = [q, k, v]
            x[place] = view(x[place])
            label = view.__name__.strip("_").replace("_", " ")
            yield Case(f"{name} with {label}, {b}x{h}x{n}x{d}", (x[0], x[1], x[2]))


@check("transposed-views", "shapes", "q, k and v may have any strides, each its own.",
       "ROCm/pytorch#3230, pytorch/pytorch#112577")  # fmt: skip
def transposed_views(t: Trial) -> Finding:
    return t.agree(_views(t))


def _off_by_one(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@check("offset-by-one", "shapes", "A view may start at any element, whatever its alignment.",
       "pytorch/pytorch#127523, facebookresearch/xformers#813")  # fmt: skip
def offset_by_one(t: Trial) -> Finding:
    q, k, v = t.qkv(64, 64, 64)
    return t.agree(
        Case(f"{name} one element off, 1x2x64x64", x)
        for name, x in (
            ("q", (_off_by_one(q), k, v)),
            ("k", (q, _off_by_one(k), v)),
            ("v", (q, k, _off_by_one(v))),
        )
    )


@check("expanded-views", "shapes", "Strides of 0 (expanded heads, batches, tokens) are read right.",
       "pytorch/pytorch#191937")  # fmt: skip
def expanded_views(t: Trial) -> Finding:
    q, k, v = t.qkv(5, 33, 64, b=2, heads=(4, 4))
    one = [x[:, :1].expand(x.shape) for x in (k, v)]
    wide = t.qkv(5, 33, 512, heads=(4, 4))
    still = [x[:, :1].expand(x.shape) for x in wide[1:]]
    cases = [
        Case("k, v expanded over heads, 2x4x33x64", (q, one[0], one[1])),
        Case("q expanded over the batch, 2x4x5x64", (q[:1].expand(q.shape), k, v)),
        Case("v expanded over tokens, 2x4x33x64", (q, k, v[:, :, :1].expand(v.shape))),
        Case("k, v expanded over heads, 1x4x33x512", (wide[0], still[0], still[1])),
    ]
    return t.agree(cases)


@check("zero-sizes", "shapes", "Sizes of 0 are answered; without keys o = 0.",
       "Dao-AILab/flash-attention#1713")  # fmt: skip
def zero_sizes(t: Trial) -> Finding:
    return t.agree(
        Case(f"B={b} M={m} N={n}", t.qkv(m, n, b=b))
        for b, m, n in ((1, 3, 0), (1, 0, 3), (0, 3, 5), (1, 0, 0))
    )


@check("batch-axes", "shapes", "Any number of batch axes, none included.", "pytorch/pytorch#144960")
def batch_axes(t: Trial) -> Finding:
    if t.subject.style != SDPA:
        raise Inapplicable("flash_attn's signature has four axes")

    def shaped(*lead: int) -> Triple:
        return tuple(t.rnd(*lead, n, 16, seed=n) for n in (5, 7, 7))  # type: ignore[return-value]

    return t.agree(
        Case(f"axes {lead}", shaped(*lead)) for lead in ((), (3,), (2, 2, 3), (1, 2, 1, 3))
    )


@check("mask-shapes", "shapes", "A mask broadcasts along each of its axes, expanded or not.",
       "pytorch/pytorch#120810")  # fmt: skip
def mask_shapes(t: Trial) -> Finding:
    b, h, m, n = 2, 3, 7, 11
    x = t.qkv(m, n, b=b, heads=(h, h))
    g = torch.Generator().manual_seed(40)
    cases = []
    for shape in ((1, n), (m, n), (m, 1), (b, 1, 1, n), (1, h, m, n), (b, h, m, n), (h, 1, n)):
        keep = torch.rand(shape, generator=g) > 0.4
        keep[..., 0] = True
        keep = keep.to(t.device)
        bias = t.zeros(*shape).masked_fill(~keep, -torch.inf)
        cases += [
            Case(f"bool mask {shape}", x, Ask(keep=keep)),
            Case(f"-inf mask {shape}", x, Ask(bias=bias)),
            Case(f"bool mask {shape} expanded", x, Ask(keep=keep.expand(b, h, m, n))),
        ]
    return t.agree(cases)


@check("mask-of-one-axis", "shapes", "A mask of one axis, (N,), is one for all rows.")
def mask_of_one_axis(t: Trial) -> Finding:
    keep = t.mask(11)
    keep[4:] = False
    return t.agree([Case("M=7 N=11, mask (11,)", t.qkv(7, 11), Ask(keep=keep))])


@check(
    "inputs-untouched", "shapes", "A call changes none of its inputs and returns memory of its own."
)
def inputs_untouched(t: Trial) -> Finding:
    x, fresh = t.qkv(33, 65, 32), t.qkv(33, 65, 32)
    wanting = leaves(t.qkv(33, 65, 32))
    o = t.attend(x)
    with_grad = t.attend(wanting)
    do = t.rnd(*with_grad.shape, seed=9)
    if with_grad.requires_grad:
        gradients(with_grad, wanting, do)
    given = [*x, *wanting, do]
    before = [*fresh, *fresh, t.rnd(*do.shape, seed=9)]
    for name, tensor, was in zip("q k v q k v do".split(), given, before, strict=True):
        if not torch.equal(tensor.detach(), was):
            return Finding(FAIL, f"{name} has changed, 1x2x33x32")
    o.detach().fill_(7.0)
    if all(torch.equal(tensor, was) for tensor, was in zip(x, fresh, strict=True)):
        return Finding(PASS)
    return Finding(FAIL, "the output shares memory with an input")
