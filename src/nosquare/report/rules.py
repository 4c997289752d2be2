"""What one record says of a claim: a rule for each statement.

- exact means compared with a reference, within a stated tolerance;
- faster means two checked contestants, interleaved in one record, apart by more than the noise;
- a square is whole: a causal mask does not halve what is stored;
- a modelled number is no measurement;
- a name that an API gives is no evidence of the kernel that ran.

A rule is told among how many cases its record was looked for: where some of n are picked out, each
interval holds with 1 - 0.05 / n (Bonferroni), so that picking proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .claims import BEST, SQUARE, Claim, size
from .evidence import Bench, Entry
from .noise import CONFIDENCE, digits, least_rounds, paired


@dataclass(frozen=True)
class Finding:
    """What one record says of a claim.

    holds    None: it cannot say, and `missing` is why
    words    the numbers
    value    the number by which findings are ordered
    weaker   a smaller claim that this record does establish; "" for none
    contrary the opposite is established
    worst_says_all  of many findings, the one of the largest value speaks for all
    """

    record: Bench
    holds: bool | None
    words: str = ""
    value: float = 0.0
    weaker: str = ""
    missing: str = ""
    contrary: bool = False
    worst_says_all: bool = False


def _pair(bench: Bench, names: Sequence[str]) -> tuple[list[Entry], str]:
    """The entries of these contestants, each answered and checked; or what is missing."""
    found = []
    for name in names:
        entry = bench.entries.get(name)
        if entry is None:
            return [], f"{name} among the contestants"
        if entry.refused:
            return [], f"an answer of {name}, which was not timed: {entry.refused}"
        if not entry.checked:
            return [], f"a checked answer of {name}"
        found.append(entry)
    return found, ""


def _rival(claim: Claim, bench: Bench, key: Callable[[Entry], float | None]) -> str:
    """The name that `than` stands for in this record; of BEST, whose `key` is the least."""
    if claim.than != BEST:
        return claim.than
    known = {e.name: key(e) for e in bench.rivals if e.checked and not e.refused}
    ranked = {name: value for name, value in known.items() if value is not None}
    return min(ranked, key=lambda name: ranked[name]) if ranked else BEST


def _faster(claim: Claim, bench: Bench, among: int) -> Finding:
    entries, missing = _pair(bench, (claim.who, _rival(claim, bench, lambda e: e.median_us)))
    if missing:
        return Finding(bench, None, missing=missing)
    mine, theirs = entries
    confidence = 1 - (1 - CONFIDENCE) / among
    ratio = paired(theirs.samples_us, mine.samples_us, confidence)
    if ratio is None:
        return Finding(bench, None, missing="rounds in which both were timed in turn")
    if ratio.low is None:
        least = least_rounds(confidence)
        missing = f"{least} interleaved rounds, the least for a {100 * confidence:.4g}% interval"
        return Finding(bench, None, str(ratio), ratio.middle, missing=missing)
    holds = ratio.low > 1 and ratio.low >= claim.factor
    weaker = f"faster by {digits(ratio.low)}x at least" if ratio.low > 1 else ""
    contrary = ratio.high is not None and ratio.high < 1
    return Finding(bench, holds, str(ratio), ratio.middle, weaker, contrary=contrary)


def _smaller(claim: Claim, bench: Bench, among: int) -> Finding:
    square = claim.than == SQUARE
    if square and bench.case.M != bench.case.N:
        return Finding(bench, None, missing="a case with a square: M x N is none here")
    rival = _rival(claim, bench, lambda e: e.peak_bytes)
    entries, missing = _pair(bench, (claim.who,) if square else (claim.who, rival))
    for entry in entries:
        if entry.peak_bytes is None:
            missing = missing or f"a measured peak of {entry.name}"
    if missing:
        return Finding(bench, None, missing=missing)
    mine = entries[0].peak_bytes or 0
    theirs = bench.square_bytes if square else entries[1].peak_bytes or 0
    ratio = theirs / max(mine, 1)
    against = "calculated for one square" if square else f"for {rival}"
    words = f"{digits(ratio)}x (peak {size(mine)}, {size(theirs)} {against})"
    weaker = f"smaller by {digits(ratio)}x" if ratio > 1 else ""
    return Finding(bench, ratio > 1 and ratio >= claim.factor, words, ratio, weaker)


def _moves_less(claim: Claim, bench: Bench, among: int) -> Finding:
    rival = _rival(claim, bench, moved_bytes)
    entries, missing = _pair(bench, (claim.who, rival))
    moved = [moved_bytes(entry) for entry in entries]
    for entry, amount in zip(entries, moved, strict=True):
        if amount is None:
            missing = missing or f"measured traffic of {entry.name}: a modelled figure is none"
    if missing:
        return Finding(bench, None, missing=missing)
    mine, theirs = (float(amount or 0) for amount in moved)
    ratio = theirs / max(mine, 1)
    words = f"{digits(ratio)}x ({size(mine)}, {size(theirs)} for {rival})"
    weaker = f"fewer bytes by {digits(ratio)}x" if ratio > 1 else ""
    return Finding(bench, ratio > 1 and ratio >= claim.factor, words, ratio, weaker)


def moved_bytes(entry: Entry) -> float | None:
    """Bytes between the chip and its main memory, read and written; None where not measured."""
    traffic = entry.traffic or {}
    parts = [traffic.get("dram_read_bytes"), traffic.get("dram_write_bytes")]
    return None if None in parts else float(sum(p for p in parts if p is not None))


def _exact(claim: Claim, bench: Bench, among: int) -> Finding:
    entry = bench.entries.get(claim.who)
    if entry is None or not entry.checks:
        return Finding(bench, None, missing=f"an answer of {claim.who} compared with a reference")
    compared = {c["what"] for c in entry.checks}
    if bench.case.wants_grads and not {"dq", "dk", "dv"} <= compared:
        return Finding(bench, None, missing="gradients compared with a reference")
    worst = max(entry.checks, key=lambda c: c["error"] / c["bound"] if c["bound"] else 0.0)
    share = worst["error"] / worst["bound"] if worst["bound"] else 0.0
    words = f"{worst['what']} off by {worst['error']:.1e} of {worst['bound']:.1e} allowed"
    if claim.limit is not None:
        worst = max(entry.checks, key=lambda c: c["error"])
        share = worst["error"]
        words = f"{worst['what']} off by {worst['error']:.1e}"
    holds = entry.checked and (claim.limit is None or worst["error"] <= claim.limit)
    weaker = f"within {worst['error']:.1e}, not within {claim.limit:g}" if (
        claim.limit is not None and entry.checked) else ""  # fmt: skip
    return Finding(bench, holds, words, share, weaker, worst_says_all=True)


def _fits(claim: Claim, bench: Bench, among: int) -> Finding:
    entries, missing = _pair(bench, (claim.who,))
    if entries and entries[0].peak_bytes is None:
        missing = f"a measured peak of {claim.who}"
    if missing:
        return Finding(bench, None, missing=missing)
    peak = entries[0].peak_bytes or 0
    total = peak + bench.input_bytes
    words = f"{size(total)}: peak {size(peak)} beyond {size(bench.input_bytes)} of inputs"
    return Finding(bench, total <= (claim.limit or 0), words, total)


def _ran(claim: Claim, bench: Bench, among: int) -> Finding:
    entry = bench.entries.get(claim.who)
    if entry is None:
        return Finding(bench, None, missing=f"{claim.who} among the contestants")
    seen = kernels_seen(entry)
    if not seen:
        label = f" ({entry.ran})" if entry.ran else ""
        why = f"kernel names from a profiler: a label{label} does not prove what ran"
        return Finding(bench, None, missing=why)
    holds = any(claim.kernel.lower() in name.lower() for name in seen)
    return Finding(bench, holds, f"a profiler saw {', '.join(seen)}")


def kernels_seen(entry: Entry) -> tuple[str, ...]:
    """Names of kernels that a profiler saw, in receipts or beside traffic; () where none looked."""
    found: list[str] = []
    for receipt in entry.receipts:
        found += (receipt.get("measured") or {}).get("kernels") or []
    found += [kernel["name"] for kernel in (entry.traffic or {}).get("kernels") or []]
    return tuple(dict.fromkeys(found))


Rule = Callable[[Claim, Bench, int], Finding]
RULES: Mapping[str, Rule] = {
    "fits": _fits,
    "smaller": _smaller,
    "moves less": _moves_less,
    "faster": _faster,
    "exact": _exact,
    "ran": _ran,
}
