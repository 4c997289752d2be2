"""Read a transformers mask function without making the square it describes.

transformers says which keys a query may see with a function of four positions,
``visible(batch, head, query, key)``, built from closures (``and_masks``,
``sliding_window_overlay``, ...). Called with arrays it makes M x N booleans. Here it is called once
with symbols, so that it writes down its own expression, and the expression is sorted into the few
shapes that need O(M + N):

    c1 <= key - query <= c2    Band: causal, sliding windows, and their intersections
    f(query) == g(key)         Same: packed sequences, chunks, blocks
    f(key) or f(query)         Keys, Queries: padding, prefixes

joined by ``&`` and ``|``.  f and g are evaluated on one axis only, with transformers' own code; so
what is read is what the function does, not what its name promises.  Anything else raises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import errors

Tensor = torch.Tensor


class Unreadable(Exception):
    """The expression is not one of the shapes above; the message says which part."""


# What a mask function may do to a position. All are elementwise, so that evaluating them on a whole
# axis at once means what the scalar function means.
_BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "mod": operator.mod, "and": operator.and_, "or": operator.or_,
}  # fmt: skip
_OPERATIONS: dict[str, Callable[..., Any]] = _BINARY | {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne, "neg": operator.neg, "abs": operator.abs,
    "invert": operator.invert,
}  # fmt: skip
_TORCH_NAMES: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": op for name, op in _OPERATIONS.items()},
    **{name: op for name, op in _OPERATIONS.items() if name not in ("and", "or", "mod")},
    "__getitem__": operator.getitem, "floor_divide": operator.floordiv, "remainder": operator.mod,
    "logical_and": operator.and_, "logical_or": operator.or_, "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
}  # fmt: skip


class Symbol:
    """One scalar of a mask function: a position, or an expression of positions.

    op is None for a position (its name in args), else the operation that made it from args. axes
    is the set of positions it depends on: letters of "bhqk".
    """

    __slots__ = ("args", "axes", "op")
    device = torch.device("cpu")  # mask functions ask, to move constants; symbols have no place

    def __init__(self, op: Callable[..., Any] | None, args: tuple[Any, ...]) -> None:
        self.op, self.args = op, args
        self.axes: frozenset[str] = (
            frozenset(args) if op is None else frozenset().union(*(_axes(a) for a in args))
        )

    def to(self, *_: object, **__: object) -> Symbol:
        return self

    def new_ones(self, _shape: tuple[int, ...], dtype: torch.dtype = torch.bool) -> Tensor:
        return torch.ones((), dtype=dtype)

    def new_zeros(self, _shape: tuple[int, ...], dtype: torch.dtype = torch.bool) -> Tensor:
        return torch.zeros((), dtype=dtype)

    def __bool__(self) -> bool:
        raise Unreadable("it branches on a position (`if`, `and`, `or`, `not`)")

    def __getitem__(self, index: object) -> Symbol:
        raise Unreadable("it indexes one table with another's entry")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.to, torch.Tensor.bool, torch.Tensor.long) and not kwargs:
            return args[0]
        name = getattr(func, "__name__", str(func))
        reflected = _BINARY.get(name[3:-2]) if name.startswith("__r") else None
        if reflected is not None:
            return Symbol(reflected, (args[1], args[0]))
        if name not in _TORCH_NAMES or kwargs:
            raise Unreadable(f"it calls {name} on a position")
        return Symbol(_TORCH_NAMES[name], tuple(args))

    __hash__ = object.__hash__


def _axes(value: object) -> frozenset[str]:
    """Positions a value depends on; constants on none."""
    if isinstance(value, Symbol):
        return value.axes
    if isinstance(value, tuple):
        return frozenset().union(*(_axes(v) for v in value))
    return frozenset()


def _install_operators() -> None:
    """Give Symbol Python's operators; each only writes itself down."""

    def make(op: Callable[..., Any], swap: bool) -> Callable[..., Symbol]:
        if swap:
            return lambda self, other: Symbol(op, (other, self))
        return lambda self, *other: Symbol(op, (self, *other))

    for name, op in _OPERATIONS.items():
        setattr(Symbol, f"__{name}__", make(op, swap=False))
    for name, op in _BINARY.items():
        setattr(Symbol, f"__r{name}__", make(op, swap=True))


_install_operators()


# --------------------------------------------------------------------------- what can be said
@dataclass(frozen=True)
class Band:
    """lo <= key - query <= hi in positions; None is no limit. table: positions are table[b, .]."""

    lo: int | None
    hi: int | None
    table: Tensor | None = None


@dataclass(frozen=True)
class Same:
    """A pair is visible where the ids agree. q_ids (B, M), k_ids (B, N), int64."""

    q_ids: Tensor
    k_ids: Tensor


@dataclass(frozen=True)
class Keys:
    """Keys visible to every query. keep (B, N), bool."""

    keep: Tensor


@dataclass(frozen=True)
class Queries:
    """Queries that see every key, the others none. keep (B, M), bool."""

    keep: Tensor


@dataclass(frozen=True)
class All:
    """Every part holds; no parts: everything is visible."""

    parts: tuple[Rule, ...]


@dataclass(frozen=True)
class Any_:
    """Some part holds; no parts: nothing is visible."""

    parts: tuple[Rule, ...]


Rule = Band | Same | Keys | Queries | All | Any_


@dataclass(frozen=True)
class Axes:
    """Where the call's queries and keys stand: b (B, 1), q (1, M), k (1, N), int64."""

    b: Tensor
    q: Tensor
    k: Tensor

    def rows(self, value: object, axis: str) -> Tensor:
        """Value of a one-axis expression, shape (B, length of the axis)."""
        got = self._at(value)
        got = got if isinstance(got, Tensor) else torch.as_tensor(got)
        size = self.b.shape[0], getattr(self, axis).shape[1]
        return got.to(self.b.device).expand(size)

    def _at(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._at(v) for v in value)
        if not isinstance(value, Symbol):
            return value.to(self.b.device) if isinstance(value, Tensor) else value
        if value.op is None:
            return getattr(self, value.args[0])
        return value.op(*(self._at(a) for a in value.args))


def read(function: Callable[..., Any], axes: Axes) -> Rule:
    """The rule a mask function states for these positions.

    Memory O(B * (M + N)). Raises UnsupportedError, naming the function, when it is not made of
    bands, same-id tests and one-axis tests.
    """
    positions = [Symbol(None, (axis,)) for axis in "bhqk"]
    try:
        return _rule(function(*positions), axes)
    except errors.UnsupportedError:
        raise
    except Exception as error:  # whatever a stranger's function does to a symbol, it is unreadable
        reason = str(error) if isinstance(error, Unreadable) else f"reading it raised {error!r}"
        raise errors.UnsupportedError(
            "A mask function of this model cannot be kept symbolic, and nosquare makes no "
            "M x N mask instead.",
            {"mask function": describe(function), "reason": reason},
            "build it from comparisons of positions and of per-token ids joined by & and |, "
            'or attn_implementation="sdpa" for this model.',
        ) from error


def describe(function: Callable[..., Any]) -> str:
    """Name of a mask function with the functions it was composed of."""
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
    held: list[Callable[..., Any]] = []
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        held += [c for c in (content if isinstance(content, tuple) else (content,)) if callable(c)]
    inside = ", ".join(describe(h) for h in held)
    return f"{name}({inside})" if inside else name


# --------------------------------------------------------------------------- sorting expressions
_FLIP = {operator.lt: operator.gt, operator.le: operator.ge, operator.gt: operator.lt,
         operator.ge: operator.le, operator.eq: operator.eq}  # fmt: skip


def _rule(value: Any, axes: Axes) -> Rule:
    if not isinstance(value, Symbol):
        return All(()) if bool(value) else Any_(())
    if "h" in value.axes:
        raise Unreadable("it depends on the head")
    if not value.axes >= {"q", "k"}:
        if "q" in value.axes:
            return Queries(axes.rows(value, "q").bool())
        return Keys(axes.rows(value, "k").bool())
    if value.op is operator.and_:
        return _all([_rule(a, axes) for a in value.args])
    if value.op is operator.or_:
        return Any_(tuple(_rule(a, axes) for a in value.args))
    if value.op in _FLIP:
        left, right = value.args
        return _comparison(value.op, left, right, axes)
    raise Unreadable("a pair's visibility is not a comparison")


def _comparison(op: Callable[..., Any], left: Any, right: Any, axes: Axes) -> Rule:
    if isinstance(right, Symbol) and right.op is operator.abs:
        op, left, right = _FLIP[op], right, left
    if isinstance(left, Symbol) and left.op is operator.abs and not _axes(right):
        if op not in (operator.lt, operator.le):
            raise Unreadable("it keeps pairs that are far apart")
        inner = left.args[0]
        return _all([_comparison(op, inner, right, axes), _comparison(op, -inner, right, axes)])
    linear = _linear(Symbol(operator.sub, (left, right)))
    band = _band(op, *linear) if linear is not None else None
    if band is not None and (band.table is None or op is not operator.eq):
        return band
    if op is operator.eq:
        for q_side, k_side in ((left, right), (right, left)):
            if "k" not in _axes(q_side) and "q" not in _axes(k_side):
                return Same(axes.rows(q_side, "q").long(), axes.rows(k_side, "k").long())
    raise Unreadable("it compares query and key other than by their distance or by equal ids")


Linear = tuple[dict[tuple[Any, ...], int], dict[tuple[Any, ...], Symbol], int]


def _linear(value: Any) -> Linear | None:
    """value as sum(coefficient * atom) + constant, or None; atoms are positions and table[b, .]."""
    if isinstance(value, int) or (isinstance(value, Tensor) and value.dim() == 0):
        return {}, {}, int(value)
    if not isinstance(value, Symbol):
        return None
    if value.op is None:
        return {(None, value.args[0]): 1}, {}, 0
    if value.op is operator.getitem:
        table, index = value.args
        where = index[1] if isinstance(index, tuple) and len(index) == 2 else None
        if isinstance(table, Tensor) and isinstance(where, Symbol) and where.op is None:
            key = (id(table), where.args[0])
            return {key: 1}, {key: value}, 0
        return None
    parts = [_linear(a) for a in value.args]
    if any(p is None for p in parts):
        return None
    if value.op is operator.neg:
        return _combine(({}, {}, 0), parts[0], -1)
    if value.op in (operator.add, operator.sub):
        return _combine(parts[0], parts[1], 1 if value.op is operator.add else -1)
    return None


def _combine(a: Linear | None, b: Linear | None, sign: int) -> Linear | None:
    if a is None or b is None:
        return None
    terms = dict(a[0])
    for atom, coefficient in b[0].items():
        terms[atom] = terms.get(atom, 0) + sign * coefficient
    return {t: c for t, c in terms.items() if c}, {**a[1], **b[1]}, a[2] + sign * b[2]


def _band(
    op: Callable[..., Any],
    terms: dict[tuple[Any, ...], int],
    atoms: dict[tuple[Any, ...], Symbol],
    constant: int,
) -> Band | None:
    """terms + constant (op) 0 as a band of key - query, or None when it is not one."""
    if len({table for table, _ in terms}) != 1 or {axis for _, axis in terms} != {"q", "k"}:
        return None
    table_id = next(iter(terms))[0]
    of_key = terms[table_id, "k"]
    if of_key not in (1, -1) or terms[table_id, "q"] != -of_key:
        return None
    table = None if table_id is None else atoms[table_id, "k"].args[0]
    if of_key == -1:
        op, constant = _FLIP[op], -constant
    if op is operator.eq:
        return Band(-constant, -constant, table)
    if op in (operator.lt, operator.le):
        return Band(None, -constant - (op is operator.lt), table)
    return Band(-constant + (op is operator.gt), None, table)


def _all(rules: Sequence[Rule]) -> Rule:
    """Conjunction, flattened; bands over a table of positions become bands over positions."""
    flat: list[Rule] = []
    for rule in rules:
        flat += rule.parts if isinstance(rule, All) else (rule,)
    ids = [r for r in flat if isinstance(r, Same)]
    plain = [_untable(r, ids) if isinstance(r, Band) and r.table is not None else r for r in flat]
    return plain[0] if len(plain) == 1 else All(tuple(plain))


def _untable(band: Band, ids: Sequence[Same]) -> Band:
    """A band of table[key] - table[query] where, within equal ids, the table counts by one.

    Packed sequences restart their positions; inside one sequence distances are the same either way.
    """
    table = band.table
    assert table is not None
    for same in ids:
        q_ids, k_ids = same.q_ids, same.k_ids
        if q_ids.shape != k_ids.shape or table.shape[-1] < k_ids.shape[1]:
            continue
        rows = table[:, : k_ids.shape[1]].to(k_ids.device)
        step, change = rows[:, 1:] - rows[:, :-1], k_ids[:, 1:] - k_ids[:, :-1]
        counts = ((step == 1) & (change == 0)) | (change > 0)
        if torch.equal(q_ids, k_ids) and bool(counts.all()):
            return Band(band.lo, band.hi)
    return band  # its sequences may still be named by an outer conjunction
