"""Every mask kind of the house. A new kind is one class here; backends, tests and bench find it.

A kind says which pairs (query i, key j) are visible, three times, and the three must agree:

    keep(i, j, r, c, a)        pair by pair, from operators alone, so that a kernel compiler can
                               inline it; a = numbers(M, N); r and c are what the kind's first and
                               second array say of query i, of key j, or of the pair
    span(i_lo, i_hi, N, a)     keys outside [lo, hi) are visible to no row of i_lo <= i < i_hi
    core(i_lo, i_hi, N, a)     keys inside [lo, hi) are visible to every row of i_lo <= i < i_hi

Query i stands at position i + N - M when the mask is aligned to the "end" (as if the queries were
the last M tokens: the default, right for decoding and chunked prefill), at i when aligned to the
"start".

Masks compose with & and |. str(mask) spells a mask and spelling.parse(text, tensors) reads it;
arrays are spelled t0, t1, ... in the order of mask.tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from .errors import ArgumentError

Numbers = tuple[int, ...]
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Mask:
    """Base of all kinds. Masks are immutable values; compose them with & and |."""

    # lay[k] names the last axes of the k-th array: "Hq" heads, "M" queries, "N" keys, "M/block"
    # tiles of them; the axes before those are batch axes. All of them broadcast.
    lay: ClassVar[tuple[tuple[str, ...], ...]] = ()

    keep: ClassVar[Callable[..., Any]]
    span: ClassVar[Callable[..., Any]]
    core: ClassVar[Callable[..., Any]]
    # whether every key of span(i_lo, i_hi) is visible to one of these rows (where it is not empty):
    # a kernel that reads the span alone then reads nothing that nobody sees
    tight: ClassVar[bool] = False

    def numbers(self, m: int, n: int) -> Numbers:
        """The integers of this kind for M queries and N keys: the argument `a` of its functions."""
        return ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The arrays this mask refers to, in the order in which str() numbers them."""
        if not self.lay:
            return ()
        return tuple(
            value
            for field in fields(self)  # type: ignore[arg-type]
            if isinstance(value := getattr(self, field.name), Tensor)
        )

    @property
    def leaves(self) -> tuple[Mask, ...]:
        """The kinds this mask is composed of; itself when it is a single kind."""
        return (self,)

    def __and__(self, other: Mask) -> Mask:
        return _join("&", self, other)

    def __or__(self, other: Mask) -> Mask:
        return _join("|", self, other)

    def __str__(self) -> str:
        if type(self).__hash__ is not object.__hash__ and not torch.compiler.is_compiling():
            return _spell_once(self)  # equal when their numbers are, so one spelling serves all
        text: str | None = self.__dict__.get("_text")
        if text is None:
            text = self._spell(0)
            object.__setattr__(self, "_text", text)
        return text

    __repr__ = __str__

    def _spell(self, first: int) -> str:
        words = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                words.append(f"t{first}")
                first += 1
            elif field.name != "align":
                words.append(f"{field.name}={value}")
            elif len(fields(self)) == 1:  # type: ignore[arg-type]
                words.append(value)  # causal(end)
            elif value != "end":
                words.append(f"align={value}")
        return f"{type(self).__name__.lower()}({','.join(words)})"


@lru_cache(maxsize=4096)
def _spell_once(mask: Mask) -> str:
    return mask._spell(0)


@dataclass(frozen=True, repr=False)
class Full(Mask):
    """Every key is visible to every query."""

    tight = True
    keep = staticmethod(lambda i, j, r, c, a: j >= 0)
    span = staticmethod(lambda i_lo, i_hi, n, a: (0, n))
    core = staticmethod(lambda i_lo, i_hi, n, a: (0, n))


def _check_align(align: str) -> None:
    if align not in ("end", "start"):
        raise ArgumentError(
            "A mask is aligned to the end or to the start.",
            {"align": repr(align)},
            'align="end" (query i stands at i + N - M) or align="start" (it stands at i).',
        )


@dataclass(frozen=True, repr=False)
class Causal(Mask):
    """Keys up to the query's own position: j <= i + N - M (align "end") or j <= i ("start").

    Raises ArgumentError for any other alignment.
    """

    align: str = "end"

    def __post_init__(self) -> None:
        _check_align(self.align)

    def numbers(self, m: int, n: int) -> Numbers:
        """(shift,): how far query 0 stands from key 0."""
        return (n - m if self.align == "end" else 0,)

    tight = True
    keep = staticmethod(lambda i, j, r, c, a: j <= i + a[0])
    span = staticmethod(lambda i_lo, i_hi, n, a: (0, min(n, i_hi + a[0])))
    core = staticmethod(lambda i_lo, i_hi, n, a: (0, min(n, i_lo + a[0] + 1)))


@dataclass(frozen=True, repr=False)
class Window(Mask):
    """Keys near the query's own position: position - before <= j <= position + after.

    before, after  counts of keys, the own position not among them; None is unbounded. A "window of
                   W tokens including the own" is Window(before=W - 1, after=0).
    align          as in Causal

    Raises ArgumentError for a negative count or an unknown alignment.
    """

    before: int | None = None
    after: int | None = None
    align: str = "end"

    def __post_init__(self) -> None:
        _check_align(self.align)
        _check_counts(before=self.before or 0, after=self.after or 0)
        if any(side is not None and side < 0 for side in (self.before, self.after)):
            raise ArgumentError(
                "A window's sides are counts of keys, so they cannot be negative.",
                {"before": self.before, "after": self.after},
                "None for a side without bound, 0 for a side without keys.",
            )

    def numbers(self, m: int, n: int) -> Numbers:
        """(first, last): offsets from i of the first and of the last visible key."""
        shift = n - m if self.align == "end" else 0
        reach = m + n  # as good as unbounded
        before = reach if self.before is None else min(self.before, reach)
        after = reach if self.after is None else min(self.after, reach)
        return (shift - before, shift + after)

    tight = True
    keep = staticmethod(lambda i, j, r, c, a: (j >= i + a[0]) & (j <= i + a[1]))
    span = staticmethod(lambda i_lo, i_hi, n, a: (max(0, i_lo + a[0]), min(n, i_hi + a[1])))
    core = staticmethod(lambda i_lo, i_hi, n, a: (max(0, i_hi - 1 + a[0]), min(n, i_lo + a[1] + 1)))


@dataclass(frozen=True, repr=False)
class Prefix(Mask):
    """The first n keys are visible to all. Causal() | Prefix(n) is a prefix language model.

    Raises ArgumentError for a negative n. A prefix for each batch entry is `| Lengths(n)`.
    """

    n: int

    def __post_init__(self) -> None:
        _check_counts(n=self.n)
        if self.n < 0:
            raise ArgumentError(
                "A prefix is a count of keys, so it cannot be negative.",
                {"n": self.n},
                "Prefix(0) for none.",
            )

    def numbers(self, m: int, n: int) -> Numbers:
        """(n,): the length of the prefix."""
        return (min(self.n, n),)

    tight = True
    keep = staticmethod(lambda i, j, r, c, a: j < a[0])
    span = staticmethod(lambda i_lo, i_hi, n, a: (0, min(n, a[0])))
    core = staticmethod(lambda i_lo, i_hi, n, a: (0, min(n, a[0])))


@dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """Batch entry b has n_keys[b] keys: j < n_keys[b]. The rest is padding and is never read.

    n_keys  (...) integers, one a batch entry (one a sequence in attention_varlen)

    Raises ArgumentError when they are not an integer tensor.
    """

    n_keys: Tensor
    lay = ((),)

    def __post_init__(self) -> None:
        _check_integers("n_keys", self.n_keys)

    keep = staticmethod(lambda i, j, r, c, a: j < r)
    span = staticmethod(lambda i_lo, i_hi, n, a: (0, n))
    core = staticmethod(lambda i_lo, i_hi, n, a: (0, 0))


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Query and key see each other when their ids are equal: packed documents, padding of any form.

    q_ids  (..., M) integers
    k_ids  (..., N) integers; an id that no query carries hides the key from everybody

    Raises ArgumentError when they are not integer tensors.
    """

    q_ids: Tensor
    k_ids: Tensor
    lay = (("M",), ("N",))

    def __post_init__(self) -> None:
        _check_integers("q_ids", self.q_ids)
        _check_integers("k_ids", self.k_ids)

    keep = staticmethod(lambda i, j, r, c, a: r == c)
    span = staticmethod(lambda i_lo, i_hi, n, a: (0, n))
    core = staticmethod(lambda i_lo, i_hi, n, a: (0, 0))


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A mask given pair by pair, as torch's: True is visible. It is read in tiles, never expanded.

    visible  (..., Hq, M, N) bool; every axis broadcasts

    Raises ArgumentError when the tensor is not bool.
    """

    visible: Tensor
    lay = (("Hq", "M", "N"),)

    def __post_init__(self) -> None:
        _check_bool("visible", self.visible)

    keep = staticmethod(lambda i, j, r, c, a: r)
    span = staticmethod(lambda i_lo, i_hi, n, a: (0, n))
    core = staticmethod(lambda i_lo, i_hi, n, a: (0, 0))


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(Mask):
    """Whole square tiles of pairs are absent from the work: layout[i // block, j // block] is
    visible.

    layout  (..., Hq, ceil(M / block), ceil(N / block)) bool; leading axes broadcast
    block   the side of a tile, a positive count

    Raises ArgumentError when the layout is not bool or the block is not positive.
    """

    layout: Tensor
    block: int
    lay = (("Hq", "M/block", "N/block"),)

    def __post_init__(self) -> None:
        _check_bool("layout", self.layout)
        _check_counts(block=self.block)
        if self.block < 1:
            raise ArgumentError(
                "A block-sparse layout needs tiles of at least one key.",
                {"block": self.block},
                "block=128.",
            )

    keep = staticmethod(lambda i, j, r, c, a: r)
    span = staticmethod(lambda i_lo, i_hi, n, a: (0, n))
    core = staticmethod(lambda i_lo, i_hi, n, a: (0, 0))


@dataclass(frozen=True, eq=False, repr=False)
class Both(Mask):
    """Visible where all parts say so: a & b."""

    parts: tuple[Mask, ...]
    sign = "&"
    join = staticmethod(operator.and_)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The arrays of all parts, in order."""
        return tuple(t for part in self.parts for t in part.tensors)

    @property
    def leaves(self) -> tuple[Mask, ...]:
        """The kinds of all parts, in order."""
        return tuple(leaf for part in self.parts for leaf in part.leaves)

    def _spell(self, first: int) -> str:
        words = []
        for part in self.parts:
            text = part._spell(first)
            first += len(part.tensors)
            words.append(f"({text})" if isinstance(part, Both) else text)
        return self.sign.join(words)


@dataclass(frozen=True, eq=False, repr=False)
class Either(Both):
    """Visible where any part says so: a | b."""

    sign = "|"
    join = staticmethod(operator.or_)


KINDS: dict[str, type[Mask]] = {
    kind.__name__.lower(): kind
    for kind in (Full, Causal, Window, Prefix, Lengths, Documents, Dense, BlockSparse)
}


def _join(sign: str, a: Mask, b: Mask) -> Mask:
    if not (isinstance(a, Mask) and isinstance(b, Mask)):
        raise ArgumentError(
            f"Only masks compose with {sign}.",
            {"left": repr(a)[:60], "right": repr(b)[:60]},
            "ns.Dense(tensor) for a bool tensor.",
        )
    kind = Both if sign == "&" else Either
    parts = [part for m in (a, b) for part in (m.parts if type(m) is kind else (m,))]
    return kind(tuple(parts))


def _check_bool(name: str, x: Any) -> None:
    what = f"`{name}` must be a bool tensor, True where the key is visible."
    _check_array(name, x, (torch.bool,), what, f"{name}=({name} != 0), or pass numbers as bias=.")


def _check_integers(name: str, x: Any) -> None:
    _check_array(name, x, INTEGERS, f"`{name}` must hold integers.", "torch.tensor([5, 3]).")


def _check_array(name: str, x: Any, dtypes: Sequence[Any], what: str, attempt: str) -> None:
    if not isinstance(x, Tensor) or x.dtype not in dtypes:
        shown = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)[:60]
        raise ArgumentError(what, {name: shown}, attempt)


def _check_counts(**counts: Any) -> None:
    if bad := {name: repr(n) for name, n in counts.items() if not isinstance(n, int | Integral)}:
        raise ArgumentError("A count of keys is an integer.", bad, "int(...).")
