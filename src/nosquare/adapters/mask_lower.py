"""Turn a rule that was read from transformers into a nosquare mask.

Positions differ: transformers' query i stands at i + q_offset and its key j at j + kv_offset, while
nosquare counts from the call's own first key. Everything is O(M + N): limits that no pair of the
call can reach are dropped, so that a decode step or an unpadded batch has no mask at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import errors
from ..mask import Causal, Documents, Lengths, Mask, Window
from .mask_reader import All, Any_, Band, Keys, Queries, Rule, Same

Tensor = torch.Tensor


@dataclass(frozen=True)
class Frame:
    """One call: M queries, the first n keys, and the distance from key 0 to the place of query 0.

    batch is B, device where ids and lengths are made.
    """

    M: int
    n: int
    shift: int
    batch: int
    device: torch.device


def visible_keys(rule: Rule, M: int, N: int, shift: int) -> int:
    """How many leading keys the rule can show at all: N, or fewer where causality ends them."""
    farthest = _farthest(rule)
    return N if farthest is None else max(0, min(N, M + shift + farthest))


def _farthest(rule: Rule) -> int | None:
    """Largest key - query that can be visible; None is no limit."""
    if isinstance(rule, Band):
        return rule.hi
    if isinstance(rule, All):
        limits = [x for x in map(_farthest, rule.parts) if x is not None]
        return min(limits) if limits else None
    if isinstance(rule, Any_) and rule.parts:
        alternatives = [_farthest(p) for p in rule.parts if p != Any_(())]
        known = [x for x in alternatives if x is not None]
        return max(known) if known and len(known) == len(alternatives) else None
    return None


def lower(rule: Rule, frame: Frame) -> Mask | None:
    """The mask of a rule; None means that every pair of the call is visible.

    Raises UnsupportedError for a band that has no anchor, which transformers never makes.
    """
    if isinstance(rule, Any_):
        return _either(rule.parts, frame)
    parts = rule.parts if isinstance(rule, All) else (rule,)
    terms: list[Mask | None] = [_band([p for p in parts if isinstance(p, Band)], frame)]
    sames = [Same(p.q_ids, p.k_ids[:, : frame.n]) for p in parts if isinstance(p, Same)]
    terms += _tokens(
        [p.keep[:, : frame.n] for p in parts if isinstance(p, Keys)],
        [p.keep for p in parts if isinstance(p, Queries)],
        sames,
        frame,
    )
    terms += [lower(p, frame) for p in parts if isinstance(p, Any_)]
    kept = [t for t in terms if t is not None]
    if not kept:
        return None
    mask = kept[0]
    for term in kept[1:]:
        mask = mask & term
    return mask


def _nothing(frame: Frame) -> Mask:
    return Lengths(torch.zeros(frame.batch, dtype=torch.int64, device=frame.device))


def _either(parts: Sequence[Rule], frame: Frame) -> Mask | None:
    possible = _alternatives(parts)
    if not possible:
        return _nothing(frame)
    masks = [lower(p, frame) for p in possible]
    union = masks[0]
    for mask in masks[1:]:
        union = None if union is None or mask is None else union | mask
    return union


def _alternatives(parts: Sequence[Rule]) -> list[Rule]:
    flat: list[Rule] = []
    for part in parts:
        flat += _alternatives(part.parts) if isinstance(part, Any_) else [part]
    return flat


def _band(bands: Sequence[Band], frame: Frame) -> Mask | None:
    """One mask for the intersection of bands."""
    if any(b.table is not None for b in bands):
        raise errors.UnsupportedError(
            "A mask compares positions from a table that does not count by one within a sequence.",
            {"needs": "packed position_ids that rise by 1 and restart with each sequence"},
            'packing without gaps, or attn_implementation="sdpa".',
        )
    M, n, shift = frame.M, frame.n, frame.shift
    # In call indices: low <= j - i <= high. j - i itself lies in 1 - M ... n - 1.
    low = max([1 - M, *(b.lo + shift for b in bands if b.lo is not None)])
    high = min([n - 1, *(b.hi + shift for b in bands if b.hi is not None)])
    if low == 1 - M and high == n - 1:
        return None
    if low > high:
        return _nothing(frame)
    for align, place in (("end", n - M), ("start", 0)):
        before = None if low == 1 - M else place - low
        after = None if high == n - 1 else high - place
        if before is None and after == 0:
            return Causal(align=align)
        if (before is None or before >= 0) and (after is None or after >= 0):
            return Window(before=before, after=after, align=align)
    raise errors.UnsupportedError(
        "A sliding window lies beside the queries' own positions.",
        {"keys minus queries": f"{low} ... {high}", "M, N": f"{M}, {n}"},
        'attn_implementation="sdpa" for this model.',
    )


def _tokens(
    keys: Sequence[Tensor], queries: Sequence[Tensor], sames: list[Same], frame: Frame
) -> list[Mask | None]:
    """Masks of padding and ids.

    Looks at values to find the cheapest form, so it waits for the device, once a forward; never
    while torch.compile traces, where looking would break the graph.
    """
    terms: list[Mask | None] = []
    sames = [s for s in sames if not _one_sequence(s)]
    keep_k = _both(keys)
    if keep_k is not None and _known((keep_k[:, 1:] <= keep_k[:, :-1]).all()):
        terms.append(Lengths(keep_k.sum(-1)))  # padding on the right is only a length
        keep_k = None
    keep_q = _both(queries)
    if keep_k is not None or keep_q is not None:
        same = sames.pop() if sames else None
        size = (frame.batch, frame.M), (frame.batch, frame.n)
        zeros = [torch.zeros(s, dtype=torch.int64, device=frame.device) for s in size]
        q_ids, k_ids = (same.q_ids, same.k_ids) if same is not None else zeros
        alone = torch.minimum(q_ids.amin(), k_ids.amin()) if frame.n and frame.M else 0
        if keep_k is not None:
            k_ids = torch.where(keep_k, k_ids, alone - 1)
        if keep_q is not None:
            q_ids = torch.where(keep_q, q_ids, alone - 2)
        sames.append(Same(q_ids, k_ids))
    for same in sames:
        least = torch.minimum(same.q_ids.amin(), same.k_ids.amin())
        terms.append(Documents(same.q_ids - least, same.k_ids - least))
    return terms


def _both(keeps: Sequence[Tensor]) -> Tensor | None:
    """Conjunction of one-axis tests; None when nothing is hidden."""
    keeps = [k for k in keeps if not _known(k.all())]
    if not keeps:
        return None
    both = keeps[0]
    for keep in keeps[1:]:
        both = both & keep
    return both


def _one_sequence(same: Same) -> bool:
    """All queries and keys of each batch entry carry one id."""
    first = same.q_ids[:, :1]
    return _known((same.q_ids == first).all()) and _known((same.k_ids == first).all())


def _known(fact: Tensor) -> bool:
    """Whether a fact about values is true, as far as values may be looked at."""
    return not torch.compiler.is_compiling() and bool(fact)
