"""torch.nn.functional.scaled_dot_product_attention, to the letter, in O(N) memory.

    o = ns.sdpa(q, k, v, is_causal=True)      # in place of F.scaled_dot_product_attention

The same signature, broadcasting, alignment (is_causal counts from the top left), use of the
generator and types of errors. Where torch's kernels disagree with each other, its math path and its
documentation decide: a mask with is_causal is refused, and so is a value tensor shorter than the
keys (torch's CPU kernel reads past its end); a mask may have no axis or one. What is dropped is
nosquare's choice, the same on every device.
"""

from __future__ import annotations

from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention
from ..dropout import Dropout
from ..errors import ArgumentError, UnsupportedError
from ..mask import Causal, Dense, Mask

_CAUSAL = Causal("start")
_CAUSAL_END = Causal("end")
_INF = float("inf")


# Code that catches what torch raises must catch what we raise: each of these is an ArgumentError
# (and so a ValueError, which torch raises for a CausalBias) and also torch's own type.
class SdpaRuntimeError(ArgumentError, RuntimeError):
    """Shapes, dtypes, devices or options that cannot go together; torch raises RuntimeError."""


class SdpaTypeError(ArgumentError, TypeError):
    """An argument of another Python type than torch takes; torch raises TypeError."""


class SdpaIndexError(ArgumentError, IndexError):
    """enable_gqa without an axis of heads; torch raises IndexError."""


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the signature and the rules of torch's scaled_dot_product_attention.

    query (..., M, D)  key (..., N, D)  value (..., N, E), two axes or more, one dtype of float64,
    float32, bfloat16, float16; leading axes broadcast, a single key head serves all query heads
    attn_mask   bool (True is visible) or additive (the dtype of query, or float32), broadcast to
                (..., M, N), read in tiles and never expanded; an additive one has a gradient. Or a
                CausalBias of torch.nn.attention.bias
    dropout_p   drops weights whenever it is above 0; the mask comes from torch's generator
    is_causal   query i sees keys j <= i (top left)
    scale       None: 1 / sqrt(D)
    enable_gqa  query (..., Hq, M, D) with key and value heads that divide Hq
    returns     (..., M, E) in the dtype of query; 0 in rows that see no key

    Raises SdpaRuntimeError, SdpaTypeError, SdpaIndexError (each an ArgumentError and torch's own
    type) for an ill-formed call, ArgumentError for a CausalBias with is_causal, UnsupportedError
    for nested and sparse tensors and for dtypes without attention.
    """
    if (  # the plain case at the cost of a few microseconds; everything else is read with care
        attn_mask is None
        and type(query) is type(key) is type(value) is Tensor
        and not (query.is_nested or key.is_nested or value.is_nested)
        and len(qs := query.shape) == len(ks := key.shape) == len(vs := value.shape) == 4
        and qs[0] == ks[0] == vs[0]
        and qs[1] == ks[1] == vs[1]
        and qs[3] > 0
        and (is_causal is False or is_causal is True)
        and type(dropout_p) is float
        and dropout_p == 0.0
        and (scale is None or (type(scale) is float and -_INF < scale < _INF))
        and (enable_gqa is False or enable_gqa is True)
        and query.layout is key.layout is value.layout is torch.strided
    ):
        try:
            return attention(query, key, value, mask=_CAUSAL if is_causal else None, scale=scale)
        except ArgumentError as error:
            raise _as_torch(error, query) from None
    _check_kinds(query, key, value, attn_mask, is_causal, enable_gqa)
    p = _number("dropout_p", dropout_p)
    factor = None if scale is None else _number("scale", scale)
    try:
        return _general((query, key, value), attn_mask, p, is_causal, factor, enable_gqa)
    except (SdpaRuntimeError, SdpaIndexError):
        raise
    except ArgumentError as error:
        raise _as_torch(error, query) from None


def _general(
    qkv: tuple[Tensor, Tensor, Tensor],
    attn_mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Any call that has passed _check_kinds. Raises as sdpa does."""
    if not 0.0 <= p <= 1.0:
        raise SdpaRuntimeError(
            "dropout_p is a probability.", {"dropout_p": p}, "a number from 0 to 1."
        )
    q, k, v, lead = (_grouped if enable_gqa else _broadcast)(*qkv)
    mask: Mask | None = _CAUSAL if is_causal else None
    bias = None
    if attn_mask is not None:
        full = (*lead, q.shape[-2], k.shape[-2])
        mask, bias = _read_mask(attn_mask, full, q)
    if q.shape[-1] == 0 == k.shape[-1]:  # every score is 0, whatever the scale
        q, k, scale = torch.nn.functional.pad(q, (0, 1)), torch.nn.functional.pad(k, (0, 1)), 1.0
    if scale is not None and not -_INF < scale < _INF:
        q, scale = q * scale, 1.0  # NaN then comes out by itself, as in torch
    # at p = 1 nothing is left; 0 times the undropped output also has torch's gradients, all 0
    drop = Dropout(p, _draw_seed(q.device)) if 0.0 < p < 1.0 else None
    o = attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout=drop)
    o = o * 0.0 if p == 1.0 else o
    return o if lead else o.squeeze(0)


# ---- arguments ----------------------------------------------------------------------------------


def _check_kinds(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    """Python types, layouts and combinations that no shape can mend."""
    given = {"query": query, "key": key, "value": value}
    for name, t in {**given, **({} if attn_mask is None else {"attn_mask": attn_mask})}.items():
        if not isinstance(t, Tensor):
            raise SdpaTypeError(
                f"{name} is not a tensor.", {name: type(t).__name__}, f"torch.as_tensor({name})."
            )
        if t.is_nested:
            raise UnsupportedError(
                "Nested tensors are not read here.",
                {name: f"nested, {t.dim()} axes, {t.dtype}"},
                "ns.attention_varlen on the packed values and the offsets of the sequences.",
            )
        if t.layout is not torch.strided:
            raise UnsupportedError(
                "Attention reads dense tensors.", {name: str(t.layout)}, f"{name}.to_dense()."
            )
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool | torch.SymBool):
            raise SdpaTypeError(
                f"{name} is True or False.", {name: repr(flag)}, f"{name}=bool(...)."
            )
    if attn_mask is not None and is_causal:
        if _variant(attn_mask) is not None:  # torch's sentence: its own tests ask for the words
            raise ArgumentError(
                "CausalBias should not be used with causal=True.",
                {"attn_mask": "CausalBias", "is_causal": True},
                "is_causal=False; a CausalBias is causal by itself.",
            )
        raise SdpaRuntimeError(
            "A call has either a mask or is_causal=True.",
            {"attn_mask": _line(attn_mask), "is_causal": True},
            "is_causal=False with the causal part in the mask, or "
            "ns.attention(..., mask=ns.Dense(keep) & ns.Causal('start')).",
        )
    if min(t.dim() for t in given.values()) < 2:
        raise SdpaRuntimeError(
            "query, key and value have at least two axes: (length, width).",
            {name: _line(t) for name, t in given.items()},
            "unsqueeze the axes that are missing.",
        )


def _number(name: str, given: Any) -> float:
    """A Python number, from what torch takes for one: also a tensor of one element."""
    if isinstance(given, float | int | torch.SymFloat | torch.SymInt):
        return given  # type: ignore[return-value]  # a traced number stays one
    try:
        return float(given.item())  # a tensor, a number of numpy
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise SdpaTypeError(f"{name} is a number.", {name: repr(given)}, f"{name}=0.1.") from None


def _as_torch(error: ArgumentError, query: Tensor) -> Exception:
    """An error of the core as one that is also of the type torch raises."""
    dtype = query.dtype
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize == 1):
        return UnsupportedError(error.sentence, error.values, error.attempt)
    return SdpaRuntimeError(error.sentence, error.values, error.attempt)


def _line(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} {t.device}"


# ---- leading axes -------------------------------------------------------------------------------


class _Aligned(NamedTuple):
    """q (..., Hq, M, D), k (..., Hk, N, D), v (..., Hk, N, E) with the same batch axes.

    lead  torch's leading axes of the output: (..., Hq), or () when q, k, v were given without any
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lead: tuple[int, ...]


def _broadcast(q: Tensor, k: Tensor, v: Tensor) -> _Aligned:
    """Leading axes as torch broadcasts them. Views; a key head that is alone stays alone."""
    lead = _common([t.shape[:-2] for t in (q, k, v)], q, k, v)
    if not lead:
        return _Aligned(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), lead)
    alone = all(t.dim() == 2 or t.shape[-3] == 1 for t in (k, v))
    heads = 1 if alone else lead[-1]
    k, v = (_spread(t, (*lead[:-1], heads)) for t in (k, v))
    return _Aligned(_spread(q, lead), k, v, lead)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> _Aligned:
    """enable_gqa: the axis before the last two is that of the heads, the others broadcast. Views,
    unless k and v have different numbers of heads."""
    if min(t.dim() for t in (q, k, v)) < 3:
        raise SdpaIndexError(
            "enable_gqa needs an axis of heads: (..., heads, length, width).",
            {n: _line(t) for n, t in zip(("query", "key", "value"), (q, k, v), strict=True)},
            "unsqueeze(-3), or enable_gqa=False.",
        )
    hq, hk, hv = (t.shape[-3] for t in (q, k, v))
    if hq and (not hk or not hv or hq % hk or hq % hv):
        raise SdpaRuntimeError(
            "The query heads must be a whole multiple of the key heads and of the value heads.",
            {"query": f"{hq} heads", "key": f"{hk} heads", "value": f"{hv} heads"},
            "query head h reads key head h // (Hq / Hk); check the axis order "
            "(batch, head, length, width).",
        )
    if hk != hv:
        h = lcm(hk, hv)
        k = k if hk == h else k.repeat_interleave(h // hk, -3)
        v = v if hv == h else v.repeat_interleave(h // hv, -3)
    batch = _common([t.shape[:-3] for t in (q, k, v)], q, k, v)
    q, k, v = (_spread(t, (*batch, t.shape[-3])) for t in (q, k, v))
    return _Aligned(q, k, v, (*batch, hq))


def _spread(t: Tensor, lead: tuple[int, ...]) -> Tensor:
    """t with the given leading axes, by strides of 0."""
    return t if t.shape[:-2] == lead else t.expand(*lead, *t.shape[-2:])


def _common(heads: list[torch.Size], q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape that leading axes broadcast to."""
    if heads[0] == heads[1] == heads[2]:
        return tuple(heads[0])
    try:
        return tuple(torch.broadcast_shapes(*heads))
    except RuntimeError:
        raise SdpaRuntimeError(
            "The leading axes of query, key and value do not broadcast to one shape.",
            {n: _line(t) for n, t in zip(("query", "key", "value"), (q, k, v), strict=True)},
            "equal axes or axes of size 1; enable_gqa=True where query has more heads.",
        ) from None


# ---- masks --------------------------------------------------------------------------------------


def _read_mask(
    attn_mask: Tensor, full: tuple[int, ...], q: Tensor
) -> tuple[Mask | None, Tensor | None]:
    """(mask, bias) that attn_mask stands for; full is the shape (..., M, N) of the scores."""
    variant = _variant(attn_mask)
    if variant is not None:
        return _causal_bias(attn_mask, variant, full, q), None
    _check_shape(tuple(attn_mask.shape), full, _line(attn_mask))
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype := _computed_in(q)):
        raise SdpaRuntimeError(
            "A mask is bool, or in float32 or the dtype of query.",
            {"attn_mask": _line(attn_mask), "query": str(dtype).removeprefix("torch.")},
            "(attn_mask != 0) for a mask of ones and zeros, attn_mask.to(query.dtype) for numbers "
            "to add.",
        )
    if attn_mask.dtype == torch.bool:
        return Dense(_unexpanded(attn_mask)), None
    return None, attn_mask if attn_mask.requires_grad else _unexpanded(attn_mask)


def _variant(attn_mask: Tensor) -> str | None:
    """The name of the variant of a CausalBias, None for any other tensor. Its class is not
    imported: that would load all of torch's compiler."""
    if type(attn_mask) is Tensor:
        return None
    return getattr(getattr(attn_mask, "variant", None), "name", None)


def _causal_bias(bias: Any, variant: str, full: tuple[int, ...], q: Tensor) -> Mask:
    """What torch makes of a CausalBias: only the sizes of one at the lower right matter, and not
    when they are equal."""
    rows, cols = bias.seq_len_q, bias.seq_len_kv
    if variant == "UPPER_LEFT" or rows == cols:
        return _CAUSAL
    if (rows, cols) == full[-2:]:
        return _CAUSAL_END
    # what still broadcasts has one row or one column
    _check_shape((rows, cols), full, f"CausalBias {rows} x {cols}, {variant}")
    i = torch.arange(rows, device=q.device)[:, None] + (cols - rows)
    return Dense(torch.arange(cols, device=q.device) <= i)


def _check_shape(shape: tuple[int, ...], full: tuple[int, ...], shown: str) -> None:
    tail = full[len(full) - len(shape) :]
    if len(shape) > len(full) or any(n not in (1, m) for n, m in zip(shape, tail, strict=True)):
        raise SdpaRuntimeError(
            "attn_mask does not broadcast to the scores.",
            {"attn_mask": shown, "scores": full},
            "axes (..., M, N) counted from the last; size 1 broadcasts.",
        )


def _unexpanded(t: Tensor) -> Tensor:
    """An expanded tensor with size 1 where its stride is 0: a view with the same numbers, which
    stays small wherever axes have to be merged."""
    for axis, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if stride == 0 and size > 1:
            t = t.narrow(axis, 0, 1)
    return t


def _computed_in(q: Tensor) -> torch.dtype:
    """The dtype that q will have: autocast leaves only float64 alone."""
    kind = q.device.type
    if kind == "meta" or q.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return q.dtype
    return torch.get_autocast_dtype(kind)


# ---- dropout ------------------------------------------------------------------------------------


def _draw_seed(device: torch.device) -> Tensor:
    """A 0-d int64 seed from torch's generator, on the device so that nothing waits for it."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return torch.randint(2**62, (), dtype=torch.int64, device=device)
    # Under vmap one seed serves all entries: their number enters the mask as a batch axis does.
    with torch._C._DisableFuncTorch():
        return torch.randint(2**62, (), dtype=torch.int64, device=device)
