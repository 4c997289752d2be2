"""Is a contestant right? Asked before it is timed.

The truth is nosquare.oracle in float64 on the very numbers that the contestant gets: for some batch
entries and key heads (each with its whole group of query heads), on sampled rows when only o is
wanted, on all rows, summed block by block, when gradients are; on the device that the case runs on.
Of packed sequences each is looked at by itself, with one key head, but where the gradients of
all are too much: then the longest, the shortest, and as many others as are worth it.
Who draws its dropout mask from torch's generator is checked at a small size, in the same formula,
with that very mask: it is asked again from the same state of the generator, for values that are
rows of the identity, and where its answer is not 0 the pair was kept.

The bound says what rounding may do, relative to what it does to the plain formula:

    bound = 4 * (error of the dense formula in float32) + (4 * u + sqrt(n) * u32) * max |truth|

Tiles and threads reorder the float32 sums: the first term covers that with room for an unlucky
order, and sqrt(n) * u32 is what a plain running sum of n = max(M, N) terms adds (Higham and Mary
2019), where the dense formula sums in pairs; u32 = 2^-24. u is the dtype's unit roundoff, for at
most four roundings to it on the way (weights, gradients of scores, o where backward reads it, and
the result), or 2^-20, what the fastest exponential of torch's kernels keeps, where that is larger.
For float64, the dense float32 error is scaled by 2^-29, and u = u32 = 2^-53. In float32, a key too
many in a row of 4096 moves o by hundreds of times the bound. A peer that sums gradients in a 16-bit
dtype may round as often more as that takes (Contestant.roundings); its check says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import oracle
from ..axes import lay_out_bias, per_head
from ..bound import Bound, Rectangle, cut
from ..inputs import Inputs, Spec
from ..problem import Problem
from ..score import alibi as alibi_scores
from .cases import Case, Data, cut_heads
from .contestants import Contestant, prepare

SAMPLED_ROWS, SAMPLED_HEADS = 64, 4
# On a CPU and on another device: visible or not, how many pairs of float64 gradients are worth
# checking; and how many scores are held at once.
GRADIENT_ELEMENTS, BLOCK_ELEMENTS = (1 << 23, 1 << 30), (1 << 22, 1 << 26)
REPLAY_TOKENS = 256  # at this size torch's dropout is checked
ROUNDINGS, ALLOWANCE = 4, 4
EXP_ERROR = 2.0**-20
FLOAT32_TO_64 = 2.0**-29


@dataclass(frozen=True)
class Check:
    """One comparison. error, bound: largest absolute differences; how: with what, and where."""

    what: str
    error: float
    bound: float
    how: str

    @property
    def ok(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= self.bound

    def __str__(self) -> str:
        return f"{self.what} error {self.error:.1e}, bound {self.bound:.1e}"


@dataclass(frozen=True)
class Errors:
    """The distance of one array from the truth, and the size of the truth: largest and rms."""

    what: str
    most: float
    truth_most: float
    rms: float
    truth_rms: float

    @property
    def relative(self) -> float:
        """rms of the distance over rms of the truth; NaN where that is 0."""
        return self.rms / self.truth_rms if self.truth_rms else float("nan")


@dataclass(frozen=True)
class Truth:
    """What is right about one part of a case, and how far float32 is from it.

    entry, key_head  the part it is about
    case   that part as a case of its own
    rows   the query rows of o that are in it
    """

    entry: int
    key_head: int
    case: Case
    rows: Tensor
    right: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]


def truths(data: Data, every_row: bool = False) -> list[Truth]:
    """The oracle's answers about a sample of the case; shared by all contestants.

    every_row  of the heads that are looked at; else a sample of them where only o is wanted
    """
    found = []
    for b, h in _sequences(data) if data.case.packed else _heads(data):
        part = data.part(b, h)
        rows = _rows(part, every_row)
        right, plain = (_dense(part, rows, t) for t in (torch.float64, torch.float32))
        found.append(Truth(b, h, part.case, rows, right, plain))
    return found


def judge(contestant: Contestant, data: Data, out: Mapping[str, Tensor],
          known: Sequence[Truth]) -> tuple[list[Check], list[Errors]]:  # fmt: skip
    """A contestant's answer `out` beside what is known to be right: is it, and if so, how far off.

    Who draws its own dropout mask is judged by another answer, at a small size.
    """
    if contestant.own_dropout and data.case.dropout:
        return _replayed(contestant, data)
    checks = _checks(data, out, known, contestant.roundings(data))
    return checks, errors(data, out, known) if all(c.ok for c in checks) else []


def check(contestant: Contestant, data: Data, out: Mapping[str, Tensor],
          known: Sequence[Truth]) -> list[Check]:  # fmt: skip
    """The first half of `judge`."""
    return judge(contestant, data, out, known)[0]


def _checks(data: Data, out: Mapping[str, Tensor], known: Sequence[Truth],
            roundings: float) -> list[Check]:  # fmt: skip
    how = f"float64 oracle: {_looked_at(data.case, known)}"
    if roundings:
        how += f"; gradients may round {roundings:.1f} times more, summed in their own dtype"
    pairs: dict[str, list[tuple[float, float]]] = {}
    for name, mine, right, plain, case in _pieces(out, data, known):
        more = roundings if name != "o" else 0.0
        pairs.setdefault(name, []).append(_compare(mine, right, plain, case, more))
    # the worst is the one nearest to its bound, or NaN
    worst = {name: max(found, key=_nearness) for name, found in pairs.items()}
    return [Check(name, error, bound, how) for name, (error, bound) in worst.items()]


def _looked_at(case: Case, known: Sequence[Truth]) -> str:
    if case.packed:
        count = sum(t.rows.numel() for t in known)
        return f"{len(known)} of {case.B} sequences, a key head of each; {count} of {case.M} rows"
    heads = ", ".join(f"entry {t.entry} key head {t.key_head}" for t in known)
    return f"{heads}; {known[0].rows.numel()} of {case.M} rows"


def errors(data: Data, out: Mapping[str, Tensor], known: Sequence[Truth]) -> list[Errors]:
    """How far an answer `out` is from what is known to be right, over all parts of it together."""
    apart: dict[str, list[Tensor]] = {}
    right: dict[str, list[Tensor]] = {}
    for one in _pieces(out, data, known):
        apart.setdefault(one.name, []).append((one.mine.double() - one.right).flatten())
        right.setdefault(one.name, []).append(one.right.flatten())
    return [_errors(name, torch.cat(apart[name]), torch.cat(right[name])) for name in apart]


def _errors(name: str, off: Tensor, true: Tensor) -> Errors:
    return Errors(name, *(float(t.abs().max()) for t in (off, true)),
                  *(float(t.square().mean().sqrt()) for t in (off, true)))  # fmt: skip


def _compare(mine: Tensor, right: Tensor, plain: Tensor, case: Case,
             more: float = 0.0) -> tuple[float, float]:  # fmt: skip
    """(error, bound) of one array: the contestant's, the truth, the dense float32 one.

    more  roundings beyond ROUNDINGS
    """
    if mine.shape != right.shape:
        return float("nan"), 0.0
    yardstick = float((plain - right).abs().max())
    largest = float(right.abs().max())
    if case.dtype == torch.float64:
        yardstick, u, u_sum = yardstick * FLOAT32_TO_64, 2.0**-53, 2.0**-53
    else:
        u, u_sum = max(EXP_ERROR, torch.finfo(case.dtype).eps / 2), 2.0**-24
    share = (ROUNDINGS + more) * u + max(case.M, case.N) ** 0.5 * u_sum
    error = float((mine.double() - right).abs().max())
    return error, ALLOWANCE * yardstick + share * largest


def _nearness(pair: tuple[float, float]) -> float:
    error, bound = pair
    return float("inf") if error != error else error / bound if bound else error


def _rows(data: Data, every_row: bool) -> Tensor:
    case, device = data.case, data.device
    if every_row or case.wants_grads or case.M <= SAMPLED_ROWS:
        return torch.arange(case.M, device=device)
    return torch.linspace(0, case.M - 1, SAMPLED_ROWS, device=device).long()


def _heads(data: Data) -> list[tuple[int, int]]:
    """The (entry, key head) that are looked at: spread evenly, the last always among them; and,
    where gradients are sums over the batch and that is not too much, the last head of all entries.
    """
    case, count = data.case, SAMPLED_HEADS
    worth = GRADIENT_ELEMENTS[data.device.type != "cpu"] // (case.G * case.M * case.N)
    if case.wants_grads:
        count = min(max(worth, 1), count)
    every = case.B * case.Hk
    count = min(count, every)
    found = [divmod(every - 1 - n * every // count, case.Hk) for n in range(count)]
    if case.wants_grads and _summed_names(case) and worth >= case.B:
        found += [(b, case.Hk - 1) for b in reversed(range(case.B))]
    return [*dict.fromkeys(found)]


def _sequences(data: Data) -> list[tuple[int, int]]:
    """The (sequence, key head) of a packed case that are looked at: the heads in turn, the last
    first; where gradients are sums over the batch, the last alone."""
    case, sizes = data.case, data.lengths
    longest_first = sorted((b for b in range(case.B) if sizes[b]), key=lambda b: -sizes[b])
    order, worth = [*longest_first[:1], *longest_first[:0:-1]], float("inf")
    if case.wants_grads:
        worth = GRADIENT_ELEMENTS[data.device.type != "cpu"] // case.G
    turn = 0 if _summed_names(case) else 1
    found: list[tuple[int, int]] = []
    for b in order:
        worth -= sizes[b] ** 2
        if found and worth < 0:
            break
        found.append((b, case.Hk - 1 - len(found) * turn % case.Hk))
    return found


def _summed_names(case: Case) -> list[str]:
    """The gradients that are sums over the batch, and of one key head's group alone."""
    summed = _bias_apart(case) and not case.bias.startswith("B")
    return ["dbias"] * summed + ["dsinks"] * case.sinks


def _bias_apart(case: Case) -> bool:
    """Whether there is a bias, and each key head's group has its own."""
    return bool(case.bias) and (case.bias.split(",")[-3] == "Hq" or case.Hk == 1)


class _Piece(NamedTuple):
    """A part of a contestant's answer, what is right there, what float32 makes of it, and the case
    whose M and N are summed over."""

    name: str
    mine: Tensor
    right: Tensor
    plain: Tensor
    case: Case


def _pieces(out: Mapping[str, Tensor], data: Data, known: Sequence[Truth]) -> Iterator[_Piece]:
    """All of an answer that the truths are about."""
    case = data.case
    for truth in known:
        for name, mine in _part_of(out, data, truth).items():
            yield _Piece(name, mine, truth.right[name], truth.plain[name], truth.case)
    for head in dict.fromkeys(truth.key_head for truth in known):
        alike = [truth for truth in known if truth.key_head == head]
        for name in _summed_names(case) if len(alike) == case.B else ():
            group = slice(head * case.G, (head + 1) * case.G)
            if (own := cut_heads(out.get(name), group, case)) is not None:
                right, plain = (
                    torch.stack([one[name] for one in which]).sum(0)
                    for which in ([t.right for t in alike], [t.plain for t in alike])
                )
                yield _Piece(name, own, right, plain, case)


def _part_of(out: Mapping[str, Tensor], data: Data, truth: Truth) -> dict[str, Tensor]:
    """The same part of a contestant's answer, but for what is summed over the batch."""
    case, b, h = data.case, truth.entry, truth.key_head
    group, own = slice(h * case.G, (h + 1) * case.G), slice(h, h + 1)
    found = {}
    for name, t in out.items():
        if name == "o":
            found[name] = data.entry(t.detach(), b, group)[:, :, truth.rows]
        elif name == "dq":
            found[name] = data.entry(t, b, group)
        elif name in ("dk", "dv"):
            found[name] = data.entry(t, b, own)
        elif name == "dbias" and case.bias.startswith("B") and _bias_apart(case):
            cropped = cut_heads(t[b : b + 1], group, case)
            assert cropped is not None
            found[name] = cropped
    return found


def _dense(part: Data, rows: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """o of the rows and, where the case has gradients, all of them, by oracle.rows in one dtype.

    returns float64: o (1, G, rows, E), dq, dk, dv, dbias, dsinks
    """
    c = part.case
    leaves = {n: t.detach().to(dtype).requires_grad_(c.wants_grads) for n, t in part.leaves.items()}
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    bias, sinks = leaves.get("bias"), leaves.get("sinks")
    seed = torch.tensor(part.seed) if c.dropout else None
    x = Inputs(q, k, v, bias, sinks, part.alibi, seed, arrays=part.mask.tensors)
    spec = Spec(str(part.mask), None, c.softcap, c.dropout, (*part.first, 0, 0))
    problem = Problem.of(x, spec)
    fixed = oracle.Fixed.of(problem, x)
    outs, total = [], {n: torch.zeros_like(t, dtype=torch.float64) for n, t in leaves.items()}
    held = BLOCK_ELEMENTS[part.device.type != "cpu"]
    for index in torch.split(rows, max(held // (c.G * c.N), 1)):
        where = Rectangle(slice(0, 1), slice(0, c.G), index, slice(0, c.N))
        piece = None if bias is None else cut(lay_out_bias(bias, (1,)), where)
        sink = None if sinks is None else per_head(sinks, (1,), c.G)
        with torch.set_grad_enabled(c.wants_grads):
            o, _ = oracle.rows(fixed, index, q.index_select(2, index), k, v, piece, sink)
        outs.append(o.detach().double())
        if c.wants_grads:
            do = part.do.index_select(2, index).to(dtype)
            for name, grad in zip(
                total, torch.autograd.grad(o, [*leaves.values()], do), strict=True
            ):
                total[name] += grad
    found = {"o": torch.cat(outs, 2)}
    return found | ({f"d{n}": t for n, t in total.items()} if c.wants_grads else {})


def _replayed(contestant: Contestant, data: Data) -> tuple[list[Check], list[Errors]]:
    """Dropout at a small size, with the mask that the contestant draws from a known state."""
    case = data.case
    small = replace(case, M=min(case.M, REPLAY_TOKENS), N=min(case.N, REPLAY_TOKENS))
    data = Data.of(small, data.device)
    cards = [data.device] if data.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cards):
        torch.manual_seed(1)
        ready = prepare(contestant, data)
        if small.phase != "backward":
            torch.manual_seed(1)
        out = ready.outputs()
        weight = _drawn_again(contestant, data) / (1 - small.dropout)
    right, plain = (_dense_with(data, weight, t) for t in (torch.float64, torch.float32))
    how = f"float64 formula with its own dropout mask drawn again, M = {small.M}, N = {small.N}"
    checks = [
        Check(name, *_compare(t.detach(), right[name], plain[name], small), how)
        for name, t in out.items()
    ]
    if not all(c.ok for c in checks):
        return checks, []
    return checks, [_errors(n, t.detach().double() - right[n], right[n]) for n, t in out.items()]


def _drawn_again(contestant: Contestant, data: Data) -> Tensor:
    """Which pairs a contestant keeps: float64 (B, Hq, M, N), 1 or 0, for some E keys at a time.

    The softmax of normal numbers is nowhere 0, so a weight is 0 where it was dropped or hidden.
    """
    c = data.case
    kept = torch.zeros(c.B, c.Hq, c.M, c.N, dtype=torch.float64, device=data.device)
    for first in range(0, c.N, c.E):
        width = min(c.E, c.N - first)
        v = torch.zeros_like(data.v)
        v[:, :, first : first + width, :width] = torch.eye(width, device=data.device).to(c.dtype)
        torch.manual_seed(1)
        with contestant.within():  # gradients on, as before: they may decide which kernel serves
            o = contestant.attend(replace(data, v=v))().detach()
        kept[..., first : first + width] = o[..., :width] != 0
    return kept


def _dense_with(data: Data, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Dense attention whose weights are multiplied by `weight` (B, Hq, M, N), and its gradients."""
    c = data.case
    leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in data.leaves.items()}
    k, v = (leaves[n].repeat_interleave(c.G, 1) for n in "kv")
    s = leaves["q"] @ k.mT * c.D**-0.5 + leaves.get("bias", 0)
    if data.alibi is not None:
        place = torch.arange(c.M, device=data.device) + (c.N - c.M)
        keys = torch.arange(c.N, device=data.device)
        s = s + alibi_scores(data.alibi[:, None, None].to(dtype), place, keys)
    bound = Bound(data.mask, (c.B,), c.Hq, c.M, c.N, data.device)
    everything = Rectangle(slice(0, c.B), slice(0, c.Hq), slice(0, c.M), slice(0, c.N))
    s = s.masked_fill(~bound.keep(everything), float("-inf"))
    o = (torch.softmax(s, -1) * weight.to(dtype)) @ v
    grads = torch.autograd.grad(o, [*leaves.values()], data.do.to(dtype))
    found = {"o": o} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}
    return {n: t.detach().double() for n, t in found.items()}
