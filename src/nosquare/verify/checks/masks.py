"""Which pairs are visible: corners, windows, masks; and rows that are left with no key."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..registry import check
from ..subject import FLASH_ATTN, Ask, Inapplicable, Refusal, gradients
from ..trial import Case, Trial, judged, leaves, off_by, within
from ..truth import Gap, Options, Triple, gap_of_o, gaps_of_gradients, largest, off, room
from ..verdict import CONVENTION, FAIL, PASS, Finding

RECTANGLES = ((2, 5), (5, 2), (1, 7), (70, 130), (130, 70))


def _corner(t: Trial, m: int, n: int, corner: str) -> Tensor:
    """The causal mask of M x N, aligned to one corner."""
    return t.mask(m, n).tril(0 if corner == "top left" else n - m)


@check("causal-square", "alignment", "causal: query i sees the keys up to i.")
def causal_square(t: Trial) -> Finding:
    return t.agree(Case(f"M=N={n}", t.qkv(n, n), Ask(causal=True)) for n in (1, 2, 17, 64, 130))


@check("causal-rectangle", "alignment",
       "Causal for M != N is aligned to the top left (SDPA) or the bottom right (flash_attn).",
       "pytorch/pytorch#108108, Dao-AILab/flash-attention#282")  # fmt: skip
def causal_rectangle(t: Trial) -> Finding:
    corners = [t.subject.corner]
    corners += [c for c in ("top left", "bottom right") if c not in corners]
    gaps: dict[str, list[Gap]] = {corner: [] for corner in corners}
    for m, n in RECTANGLES:
        x = t.qkv(m, n)
        o = t.attend(x, Ask(causal=True))
        for corner in corners:
            gaps[corner].append(gap_of_o(o, x, Options(_corner(t, m, n, corner)), t.dtype))
    for corner in corners:
        if all(gap.ok for gap in gaps[corner]):
            style = "SDPA" if t.subject.corner == "top left" else "flash_attn"
            own = corner == t.subject.corner
            words = f"{corner}, as {style} says" if own else f"{corner}; {style} says {corners[0]}"
            return Finding(PASS if own else CONVENTION, words)
    first = next(n for n, gap in enumerate(gaps[corners[0]]) if not gap.ok)
    m, n = RECTANGLES[first]
    return off_by(gaps[corners[0]][first], f"neither corner, M={m} N={n}")


WINDOWS = ((16, 16, (3, 0)), (16, 16, (0, 0)), (33, 33, (5, 2)), (70, 200, (5, 3)),
           (200, 70, (5, 3)), (129, 129, (63, 0)), (129, 129, (32, 64)), (40, 40, (-1, 0)),
           (40, 40, (7, -1)))  # fmt: skip


@check("window-edges", "alignment",
       "A window (l, r) holds keys i + N - M - l to i + N - M + r, both included; -1 is no limit.",
       "Dao-AILab/flash-attention#1133, huggingface/transformers#39408")  # fmt: skip
def window_edges(t: Trial) -> Finding:
    gaps, other = [], []
    for m, n, (left, right) in WINDOWS:
        x, ask = t.qkv(m, n), Ask(window=(left, right))
        o = t.attend(x, ask)
        gaps.append(gap_of_o(o, x, t.options(x, ask), t.dtype))
        shorter = replace(ask, window=(left - 1 if left > 0 else left, right))
        other.append(gap_of_o(o, x, t.options(x, shorter), t.dtype))
    if all(gap.ok for gap in gaps):
        return within(gaps)
    if all(gap.ok for gap in other):
        return Finding(CONVENTION, "the left count includes the query's own key")
    first = next(n for n, gap in enumerate(gaps) if not gap.ok)
    m, n, window = WINDOWS[first]
    return off_by(gaps[first], f"M={m} N={n} window={window}")


@check("window-and-causal", "alignment", "A window under a causal mask keeps what both keep.")
def window_and_causal(t: Trial) -> Finding:
    return t.agree(
        Case(f"M={m} N={n} window={w} causal", t.qkv(m, n), Ask(causal=True, window=w))
        for m, n, w in ((16, 16, (3, 4)), (40, 70, (9, -1)), (129, 129, (64, -1)))
    )


@check("mask-polarity", "alignment", "In a bool mask True marks the keys that take part.")
def mask_polarity(t: Trial) -> Finding:
    x = t.qkv(6, 10)
    keep = t.mask(6, 10).tril(3)
    o = t.attend(x, Ask(keep=keep))
    gap = gap_of_o(o, x, Options(keep), t.dtype)
    if not gap.ok and gap_of_o(o, x, Options(~keep), t.dtype).ok:
        return Finding(CONVENTION, "True marks the keys that are left out")
    return judged(gap, "M=6 N=10")


@check("mask-and-causal", "alignment",
       "A mask beside causal=True is obeyed, or refused: neither is silently dropped.",
       "Dao-AILab/flash-attention (cute: mask_mod drops causal)")  # fmt: skip
def mask_and_causal(t: Trial) -> Finding:
    x = t.qkv(9, 9)
    keep = t.mask(9, 9)
    keep[:, 2:4] = False
    try:
        o = t.attend(x, Ask(keep=keep, causal=True))
    except Refusal as refusal:
        return Finding(PASS, f"refused, as it may be: {refusal}")
    both = gap_of_o(o, x, Options(keep & t.mask(9, 9).tril()), t.dtype)
    for words, seen in (("the mask", t.mask(9, 9).tril()), ("causal=True", keep)):
        if not both.ok and gap_of_o(o, x, Options(seen), t.dtype).ok:
            return Finding(FAIL, f"M=N=9: {words} is silently ignored", both.error, both.bound)
    return judged(both, "M=N=9")


# ---- rows that see no key ----


def _holes(t: Trial) -> Tensor:
    """A mask of 6 x 10 whose rows 2 and 5 see nothing."""
    keep = t.mask(6, 10).tril(6)
    keep[2] = keep[5] = False
    return keep


def _empty_rows(t: Trial, x: Triple, ask: Ask, where: str) -> Finding:
    """Rows that see nothing are exactly 0, the others right."""
    o = t.attend(x, ask)
    options = t.options(x, ask)
    seen = options.keep
    if seen is None:
        assert options.bias is not None
        seen = options.bias > -torch.inf
    empty = ~seen.any(-1)
    rows = o[..., empty, :].detach()
    rest = gap_of_o(o.masked_fill(empty[:, None], 0), x, options, t.dtype)
    if not rest.ok:
        return off_by(rest, f"{where}, in a row that sees keys")
    if rows.isnan().any():
        return Finding(FAIL, f"{where}: NaN in the row that sees nothing", torch.nan, 0.0)
    if not rows.any():
        return Finding(PASS, "exactly 0")
    v = x[2].detach().double().repeat_interleave(o.shape[-3] // x[2].shape[-3], -3)
    mean = v.mean(-2, keepdim=True)
    bound = room(t.dtype, 0.0, v.shape[-2], 0.0, largest(v.abs().mean(-2)))
    if off(rows, mean.expand(rows.shape)) <= bound:
        return Finding(CONVENTION, "the row that sees nothing averages v")
    return Finding(FAIL, f"{where}: the row that sees nothing is not 0", largest(rows), 0.0)


@check("empty-rows-bool", "rows", "A row of a bool mask without any True gives 0, never NaN.",
       "pytorch/pytorch#103749")  # fmt: skip
def empty_rows_bool(t: Trial) -> Finding:
    return _empty_rows(t, t.qkv(6, 10, 8), Ask(keep=_holes(t)), "M=6 N=10")


@check("empty-rows-inf", "rows", "A row of an additive mask that is -inf throughout gives 0.",
       "pytorch/pytorch#103963")  # fmt: skip
def empty_rows_inf(t: Trial) -> Finding:
    bias = t.zeros(6, 10).masked_fill(~_holes(t), -torch.inf)
    return _empty_rows(t, t.qkv(6, 10, 8), Ask(bias=bias), "M=6 N=10")


@check("empty-rows-causal", "rows",
       "Rows that causal (M > N) or a window leave without keys give 0.")  # fmt: skip
def empty_rows_causal(t: Trial) -> Finding:
    if t.subject.style != FLASH_ATTN:
        raise Inapplicable("at the top left every row sees key 0")
    found = _empty_rows(t, t.qkv(5, 2, 8), Ask(causal=True), "M=5 N=2 causal")
    if found.verdict != PASS or "window_size" not in (t.subject.parameters or ["window_size"]):
        return found
    return _empty_rows(t, t.qkv(90, 33, 8), Ask(window=(3, 1)), "M=90 N=33 window=(3, 1)")


@check("empty-rows-gradients", "rows", "A row that sees nothing has gradient 0, never NaN.",
       "pytorch/pytorch#103749")  # fmt: skip
def empty_rows_gradients(t: Trial) -> Finding:
    if t.subject.style == FLASH_ATTN:
        x, ask, where = t.qkv(5, 2, 8), Ask(causal=True), "M=5 N=2 causal"
    else:
        x, ask, where = t.qkv(6, 10, 8), Ask(keep=_holes(t)), "M=6 N=10"
    x = leaves(x)
    o = t.attend(x, ask)
    do = t.rnd(*o.shape, seed=99)
    found = gradients(o, x, do)
    options = t.options(x, ask)
    assert options.keep is not None
    for gap in gaps_of_gradients(found, x, do, options, t.dtype):
        if not gap.ok:
            return off_by(gap, where)
    spilt = largest(found[0][..., ~options.keep.any(-1), :])
    if spilt:
        return Finding(FAIL, f"{where}: dq of the row that sees nothing is not 0", spilt, 0.0)
    return Finding(PASS, "exactly 0")


@check("all-rows-empty", "rows", "Where no row sees any key, o and all gradients are 0.",
       "pytorch/pytorch#41508")  # fmt: skip
def all_rows_empty(t: Trial) -> Finding:
    x = leaves(t.qkv(9, 33, 8))
    o = t.attend(x, Ask(keep=t.mask(9, 33, value=False)))
    arrays = {"o": o}
    if o.requires_grad:
        do = t.rnd(*o.shape, seed=99)
        arrays |= dict(zip(("dq", "dk", "dv"), gradients(o, x, do), strict=True))
    for name, tensor in arrays.items():
        if largest(tensor) != 0.0:  # NaN too
            return Finding(FAIL, f"M=9 N=33: {name} is not 0", largest(tensor), 0.0)
    return Finding(PASS, "exactly 0")


def _lowest(t: Trial, *shape: int) -> tuple[Tensor, float]:
    """Zeros for a mask, and the number that Hugging Face masks write for what is hidden."""
    # float16's lowest number, -65504, does not swallow a score: there the mask is float32
    dtype = torch.float32 if t.dtype == torch.float16 else t.dtype
    return torch.zeros(shape, dtype=dtype, device=t.device), torch.finfo(dtype).min


@check("rows-of-finfo-min", "rows",
       "An additive mask of finfo.min is a number: a row of nothing else averages v.",
       "pytorch/pytorch#109517")  # fmt: skip
def rows_of_finfo_min(t: Trial) -> Finding:
    x = t.qkv(3, 20, 8)
    bias, low = _lowest(t, 3, 20)
    bias[2] = low
    o = t.attend(x, Ask(bias=bias))
    seen = t.mask(3, 20)
    seen[2] = False
    rest = gap_of_o(o.masked_fill(~seen.any(-1)[:, None], 0), x, Options(seen), t.dtype)
    if not rest.ok:
        return off_by(rest, "M=3 N=20, in a row without it")
    row, v = o[..., 2, :].detach(), x[2].double()
    if not largest(row):
        return Finding(CONVENTION, "such a row counts as empty: 0")
    bound = room(t.dtype, 0.0, 20, 0.0, largest(v.abs().mean(-2)))
    return judged(Gap("o", off(row, v.mean(-2)), bound), "M=3 N=20, the row of finfo.min")


@check("block-of-finfo-min", "rows", "A first block of keys at finfo.min does not count.",
       "pytorch/pytorch#109517")  # fmt: skip
def block_of_finfo_min(t: Trial) -> Finding:
    for n in (40, 200):
        x = t.qkv(9, n, 64)
        bias, low = _lowest(t, 9, n)
        hidden = 20 if n == 40 else 128
        bias[:, :hidden] = low
        found = judged(
            gap_of_o(t.attend(x, Ask(bias=bias)), x, Options(bias == 0), t.dtype),
            f"M=9 N={n}, the first {hidden} at finfo.min",
        )
        if found.verdict == FAIL:
            return found
    return found
