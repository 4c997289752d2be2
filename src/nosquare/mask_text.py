"""Masks as kernel code, written from the masks' own keep, span, core and numbers.

For each form of a mask (its kinds, how they are joined, what its arrays look like) three functions
are written, for every compiler whose kernels are Python functions in the words of Triton's
language. A backend gives the two words they use, `jit` and `tl` (compiled):

    keep(mask, b, h, i, j, m, n)       the visible pairs: bool, of the shapes of h, i and j
                                       broadcast together. It says nothing of j >= n.
    span(mask, i_lo, i_hi, m, n)       (lo, hi): keys outside are visible to no row i_lo <= i < i_hi
    core(mask, i_lo, i_hi, m, n)       (lo, hi): keys inside are visible to each of these rows

`mask` is one tuple of kernel arguments: for each kind its integers (int64), then for each of its
arrays (pointer, stride of b, h, m, n). m and n are the sizes of the problem, or of one sequence of
a packed one: the numbers of a kind are computed from them in the kernel. span and core take scalars
or vectors of rows. Where tensors have layouts, those of h, i and j are such that they broadcast.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .bound import Bound
from .mask import Both, Mask
from .traced import Traced, least, most, traced

INTEGERS = {torch.int64: "tl.int64"}  # narrower ids are compared as int32


class ArrayForm(NamedTuple):
    """What the code of an array depends on: its dtype; whether it varies along heads, queries,
    keys."""

    dtype: torch.dtype
    along_h: bool
    along_m: bool
    along_n: bool


class LeafForm(NamedTuple):
    """One kind: its fields that are no integers and no arrays, those that are integers, its tiles'
    side, its arrays."""

    kind: type[Mask]
    fixed: tuple[tuple[str, Any], ...]
    integers: tuple[str, ...]
    block: int
    arrays: tuple[ArrayForm, ...]


class JoinForm(NamedTuple):
    """Parts joined by & or |."""

    sign: str
    parts: tuple[Any, ...]


MaskForm = LeafForm | JoinForm


@dataclass(frozen=True, eq=False)
class MaskText:
    """The three functions as text, decorated by `jit`, and what a kernel may know beforehand.

    has_core  False: no key is known to be visible to all rows, so no loop need be written for such
    tight     every key of a span is visible to some row of it, so none of its values need be hidden
    low       False: whatever span and core say begins at key 0. True: nobody knows
    looks     it has arrays: whether a tile has anything to see is known only when they are read
    holes     one varies along queries and keys, or is joined by |: tiles in the midst of others may
              have nothing
    along_h   an array varies along heads: what one head sees says nothing of the others
    by_head   holes, or along_h: a program of several heads asks for each of them
    """

    source: str
    has_core: bool
    tight: bool
    low: bool
    looks: bool
    holes: bool
    along_h: bool
    by_head: bool

    def __repr__(self) -> str:
        """Part of the key of a compiled kernel."""
        facts = self.has_core, self.tight, self.low, self.looks, self.holes, self.along_h
        return f"mask {sha256(self.source.encode()).hexdigest()} {facts}"


@dataclass(frozen=True, eq=False, repr=False)
class MaskCode(MaskText):
    """A mask inside kernels; see the module. A kernel takes it as a constant."""

    keep: Any
    span: Any
    core: Any


def form_of(bound: Bound) -> MaskForm:
    """The form of a mask whose arrays are laid out."""
    if bound.parts:
        assert isinstance(bound.mask, Both)
        return JoinForm(bound.mask.sign, tuple(form_of(part) for part in bound.parts))
    values = _fields(bound.mask)
    integers = tuple(name for name, value in values if _is_count(name, value))
    fixed = tuple((name, value) for name, value in values if name not in integers)
    arrays = (ArrayForm(a.dtype, *(n > 1 for n in a.shape[1:])) for a in bound.arrays)
    return LeafForm(type(bound.mask), fixed, integers, bound.block, tuple(arrays))


def arguments(bound: Bound, count: Callable[[int], int]) -> Iterator[int | Tensor]:
    """The kernel's argument `mask`, for the functions of text(form_of(bound)).

    count  what wraps an integer of the mask, which kernels take in 64 bits; strides stay plain
    """
    for part in bound.parts:
        yield from arguments(part, count)
    if bound.parts:
        return
    yield from (count(value) for name, value in _fields(bound.mask) if _is_count(name, value))
    for array in bound.arrays:
        yield array
        yield from (s if n > 1 else 0 for n, s in zip(array.shape, array.stride(), strict=True))


def _fields(mask: Mask) -> list[tuple[str, Any]]:
    named = ((f.name, getattr(mask, f.name)) for f in fields(mask))  # type: ignore[arg-type]
    return [(name, value) for name, value in named if not isinstance(value, Tensor)]


def _is_count(name: str, value: Any) -> bool:
    # the side of a tile is written into the code: most are powers of 2, and then a shift
    return isinstance(value, int) and not isinstance(value, bool) and name != "block"


def text(form: MaskForm) -> MaskText:
    """The functions of a form.

    Raises TypeError for a kind whose functions branch on what only the kernel knows.
    """
    keep, span, core = _Text(), _Text(), _Text()
    keep.result = _keep(form, keep)
    lo, hi = _span(form, span)
    span.result = span.interval(lo, hi)
    inner = _core(form, core)
    core.result = "0, 0" if inner is None else core.interval(*inner)
    arrays = _arrays(form)
    joined = bool(arrays) and _either(form)
    holes = joined or any(a.along_m and a.along_n for a in arrays)
    along_h = any(array.along_h for array in arrays)
    tight = isinstance(form, LeafForm) and form.kind.tight
    source = "\n".join(
        (
            keep.function("keep", "b, h, i, j, m, n"),
            span.function("span", "i_lo, i_hi, m, n"),
            core.function("core", "i_lo, i_hi, m, n"),
        )
    )
    return MaskText(
        source,
        has_core=inner is not None,
        tight=bool(tight),
        low=_low(form),
        looks=bool(arrays),
        holes=holes,
        along_h=along_h,
        by_head=holes or along_h,
    )


def compiled(written: MaskText, words: Mapping[str, Any]) -> MaskCode:
    """The text as functions of a kernel compiler: words are its `jit` and `tl`."""
    made = load(written.source, words)
    return MaskCode(**vars(written), **{name: made[name] for name in ("keep", "span", "core")})


def load(source: str, words: Mapping[str, Any]) -> dict[str, Any]:
    """Names after the text has run where `words` are known. Its lines are kept for inspect, as
    compilers read the source of a function."""
    name = f"<mask {sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = dict(words)
    exec(compile(source, name, "exec"), names)
    return names


def _arrays(form: MaskForm) -> tuple[ArrayForm, ...]:
    if isinstance(form, LeafForm):
        return form.arrays
    return tuple(array for part in form.parts for array in _arrays(part))


def _either(form: MaskForm) -> bool:
    return isinstance(form, JoinForm) and (form.sign == "|" or any(map(_either, form.parts)))


class _Text:
    """A function as it is written: its lines, how much of `mask` it has read, its result."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.used = 0
        self.result: Any = ""

    def name(self, value: Any) -> Traced:
        """The value under a name of its own."""
        word = f"x{len(self.lines)}"
        self.lines.append(f"{word} = {value}")
        return Traced(word)

    def argument(self) -> Traced:
        """The next of the kernel's arguments of the mask."""
        self.used += 1
        return Traced(f"mask[{self.used - 1}]")

    def interval(self, lo: Any, hi: Any) -> str:
        """[lo, hi), as (0, 0) where it is empty."""
        lo, hi = self.name(lo), self.name(hi)
        return f"tl.where({lo} < {hi}, {lo}, 0), tl.where({lo} < {hi}, {hi}, 0)"

    def function(self, name: str, parameters: str) -> str:
        lines = [*self.lines, f"return {self.result}"]
        body = "".join(f"    {line}\n" for line in lines)
        return f"@jit\ndef {name}(mask, {parameters}):\n{body}"


def _numbers(form: LeafForm, text: _Text) -> tuple[Any, ...]:
    """The kind's numbers, int32, from the sizes m and n of the kernel."""
    mask = object.__new__(form.kind)
    for name, value in form.fixed:
        object.__setattr__(mask, name, value)
    for name in form.integers:
        object.__setattr__(mask, name, text.argument())
    found = traced(form.kind.numbers)(mask, Traced("m"), Traced("n"))
    return tuple(v if isinstance(v, int) else text.name(f"{v}.to(tl.int32)") for v in found)


def _keep(form: MaskForm, text: _Text) -> Any:
    if isinstance(form, JoinForm):
        return Traced("(" + f" {form.sign} ".join(str(_keep(p, text)) for p in form.parts) + ")")
    a = _numbers(form, text)
    r, c = (*(_array(array, form.block, text) for array in form.arrays), None, None)[:2]
    return text.name(traced(form.kind.keep)(Traced("i"), Traced("j"), r, c, a))


def _array(array: ArrayForm, block: int, text: _Text) -> Traced:
    """What an array says of the pairs, queries or keys; 0 beyond the sizes."""
    start, b, h, m, n = (text.argument() for _ in range(5))
    scaled = f" // {block}" if block > 1 else ""
    terms, inside = [f"b * {b}", f"h * {h}"], []
    if array.along_m:
        terms.append(f"(i{scaled}) * {m}")
        inside.append("(i < m)")
    if array.along_n:
        terms.append(f"(j{scaled}) * {n}")
        inside.append("(j < n)")
    guard = f", mask={' & '.join(inside)}, other=0" if inside else ""
    loaded = f"tl.load({start} + {' + '.join(terms)}{guard})"
    if array.dtype == torch.bool:
        return text.name(f"({loaded} != 0)")
    return text.name(f"{loaded}.to({INTEGERS.get(array.dtype, 'tl.int32')})")


def _skip_arrays(form: LeafForm, text: _Text) -> None:
    text.used += 5 * len(form.arrays)


def _interval(form: LeafForm, text: _Text, function: Callable[..., Any]) -> tuple[Any, Any]:
    a = _numbers(form, text)
    _skip_arrays(form, text)
    lo, hi = traced(function)(Traced("i_lo"), Traced("i_hi"), Traced("n"), a)
    return lo, hi


def _span(form: MaskForm, text: _Text) -> tuple[Any, Any]:
    if isinstance(form, LeafForm):
        return _interval(form, text, form.kind.span)
    spans = [_span(part, text) for part in form.parts]
    if form.sign == "&":
        return most(*(lo for lo, _ in spans)), least(*(hi for _, hi in spans))
    named = [(text.name(lo), text.name(hi)) for lo, hi in spans]  # an empty one must not count
    los = [Traced(f"tl.where({lo} < {hi}, {lo}, n)") for lo, hi in named]
    his = [Traced(f"tl.where({lo} < {hi}, {hi}, 0)") for lo, hi in named]
    return least(*los), most(*his)


def _core(form: MaskForm, text: _Text) -> tuple[Any, Any] | None:
    """None where no key is ever known to be visible to all rows."""
    if isinstance(form, LeafForm):
        lo, hi = _interval(form, text, form.kind.core)
        return None if type(hi) is int and hi <= 0 else (lo, hi)
    found = [_core(part, text) for part in form.parts]
    known = [core for core in found if core is not None]
    if form.sign == "&":
        if len(known) < len(found):
            return None
        return most(*(lo for lo, _ in known)), least(*(hi for _, hi in known))
    if not known:
        return None
    lo, hi = (text.name(x) for x in known[0])
    for other in known[1:]:  # the larger of them
        a, z = (text.name(x) for x in other)
        wider = text.name(f"({z} - {a}) > ({hi} - {lo})")
        lo, hi = (
            text.name(f"tl.where({wider}, {a}, {lo})"),
            text.name(f"tl.where({wider}, {z}, {hi})"),
        )
    return lo, hi


def _low(form: MaskForm) -> bool:
    if isinstance(form, JoinForm):
        return any(map(_low, form.parts))
    known = [_span(form, _Text()), _core(form, _Text())]
    return any(type(ends[0]) is not int or ends[0] > 0 for ends in known if ends is not None)
