"""What the records say of a claim: established, narrower, or not established.

The rules are those of three short texts on attention and memory; `rules` has those for one record,
and here are those for what it may be made to say:

- an attention-only number never supports a claim about the whole workload;
- the size of a square, calculated, says nothing of what fits;
- a phase speaks for itself: forward says nothing of training, prefill nothing of decode;
- what a proposal states or offers is not what a record holds;
- a claim is established for the recorded cases, on the machines that were measured, no further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from .claims import BEST, CALCULATED, CONDITIONS, MEASURED, PARTS, SQUARE, STATEMENTS, Claim
from .evidence import Bench, Book, Source
from .rules import RULES, Finding
from .words import count, listed

ESTABLISHED, NARROWER, NOT = "established", "narrower", "not established"
VERDICTS = (ESTABLISHED, NARROWER, NOT)


@dataclass(frozen=True)
class Grade:
    """The verdict on a claim.

    because  one or two sentences
    instead  what is established where the claim is not; "" where nothing is
    missing  what would have to be recorded
    records  those it rests on
    """

    claim: Claim
    verdict: str
    because: str
    instead: str = ""
    missing: tuple[str, ...] = ()
    records: tuple[Source, ...] = ()


def grade(claim: Claim, book: Book) -> Grade:
    """Grade one claim by all records of a book."""
    return _workload(claim, book) if claim.scope == "workload" else _attention(claim, book)


def standard(book: Book) -> list[Claim]:
    """The claims that a reader of these records would make or meet."""
    made = []
    for machine, suite in dict.fromkeys((b.source.machine, b.suite) for b in book.bench):
        about = partial(Claim, words=(f"suite={suite}",), machine=machine)
        mine = [b for b in book.bench if (b.source.machine, b.suite) == (machine, suite)]
        entries = [e for b in mine for e in b.entries.values()]
        several = any(len(b.rivals) > 1 for b in mine)
        if any(e.samples_us for e in entries):
            made += [about("faster"), *([about("faster", than=BEST)] if several else [])]
            made.append(about("exact"))
        if any(e.peak_bytes is not None for e in entries):
            made.append(about("smaller"))
            if any(b.case.M == b.case.N for b in mine):
                made.append(about("smaller", than=SQUARE))
        if any(e.traffic for e in entries):
            made.append(about("moves less", than=BEST))
    if not any(c.statement == "moves less" for c in made):
        made.append(Claim("moves less"))
    return [*made, Claim("faster", "workload"), Claim("fits", "workload", factor=2.0)]


def case_words(bench: Bench) -> frozenset[str]:
    """What a claim's words are looked up in: the case, its suite, and E where it equals D."""
    return frozenset([*str(bench.case).split(), f"suite={bench.suite}", f"E{bench.case.E}"])


# ---- attention alone ----


def _attention(claim: Claim, book: Book) -> Grade:
    matching = [b for b in book.bench if claim.matches(case_words(b), b.source.machine)]
    if not matching:
        return _nothing(claim, book)
    rule = RULES[claim.statement]
    found = [rule(claim, bench, 1) for bench in matching]
    general = not claim.phase and not any(word.startswith("suite=") for word in claim.words)
    absent = [p for p in PARTS if p not in {b.phase for b in matching}] if general else []
    if all(f.holds for f in found) and not absent:
        because = f"{len(found)} of {count(len(found), 'recorded case')}: {_summary(found)}."
        return Grade(claim, ESTABLISHED, because, records=_sources(found))
    if not all(f.holds for f in found):  # what holds is picked out, and has to hold all the more
        found = [rule(claim, bench, len(matching)) for bench in matching]
    held = [f for f in found if f.holds]
    weaker = [f for f in found if not f.holds and f.weaker]
    because = _because(found, absent)
    missing = (
        *dict.fromkeys(f.missing for f in found if f.holds is None),
        *(f"a record of {phase}" for phase in absent),
    )
    if not held and not weaker:
        return Grade(claim, NOT, because, missing=missing, records=_sources(found))
    instead = (
        f"{STATEMENTS[claim.statement]} in {_cases(held)}: {_summary(held)}"
        if held
        else "; ".join(dict.fromkeys(f"{f.weaker} in {f.record.case}" for f in weaker))
    )
    return Grade(claim, NARROWER, because, instead, missing, _sources(held or weaker))


def _because(found: Sequence[Finding], absent: Sequence[str]) -> str:
    """How far the records of these cases carry the claim."""
    against = [f for f in found if f.holds is False]
    silent = [f for f in found if f.holds is None]
    held = len(found) - len(against) - len(silent)
    words = [f"{held} of {count(len(found), 'recorded case')}."]
    if against:
        opposite = sum(f.contrary for f in against)
        how = f", the opposite in {opposite} of them" if opposite else ""
        words.append(f"Not in {len(against)}{how}: {_summary(against)}.")
    if silent:
        seen = [f for f in silent if f.words]
        words.append(f"Undecided in {len(silent)}{f': {_summary(seen)}' if seen else ''}.")
    if absent:
        words.append(f"Nothing is recorded of {listed(absent)}: a phase speaks for itself.")
    return " ".join(words)


def _nothing(claim: Claim, book: Book) -> Grade:
    """No record is of such a case; records of another phase are named, and do not count."""
    any_phase = replace(claim, phase="")
    other = [b for b in book.bench if any_phase.matches(case_words(b), b.source.machine)]
    phases = listed(dict.fromkeys(b.phase for b in other))
    because = (
        f"What is recorded of these cases is {phases}, which says nothing of {claim.phase}."
        if other and claim.phase
        else "No record is of such a case."
    )
    what = " ".join(filter(None, [claim.phase, *claim.words])) or "attention"
    where = f" on {claim.machine}" if claim.machine else ""
    return Grade(claim, NOT, because, missing=(f"a record of {what}{where}",))


def _sources(found: Sequence[Finding]) -> tuple[Source, ...]:
    return tuple(sorted({s for f in found for s in (f.record.source, *f.record.also)}))


def _summary(found: Sequence[Finding]) -> str:
    """The numbers of a few findings, or the least and the most of many."""
    ordered = sorted(found, key=lambda f: f.value)
    if found[0].worst_says_all:
        return f"at worst {ordered[-1].words}"
    if len(ordered) <= 2:
        return "; ".join(dict.fromkeys(f.words for f in ordered))
    if ordered[0].words == ordered[-1].words:
        return ordered[0].words
    return f"from {ordered[0].words} to {ordered[-1].words}"


def _cases(found: Sequence[Finding]) -> str:
    names = [str(f.record.case) for f in found]
    return "; ".join(names) if len(names) <= 3 else f"{len(names)} cases"


# ---- the whole workload ----


def _workload(claim: Claim, book: Book) -> Grade:
    """No kind of record times or measures a whole workload's outputs, so at most it is narrower."""
    stated = [name for name in CONDITIONS if name in claim.stated]
    missing = [words for name, words in CONDITIONS.items() if name not in stated]
    missing += [
        f"{words}; stated, but no record holds it" if name in claim.stated else words
        for name, words in MEASURED.items()
    ]
    alone = (
        None if claim.statement == "fits" else _attention(replace(claim, scope="attention"), book)
    )
    because = {
        "fits": "What fits shows in a complete peak, and no record holds one.",
        "faster": "A timing of attention alone does not time the whole workload.",
    }.get(claim.statement, "What is recorded is attention alone, not the whole workload.")
    if claim.statement == "fits" and (CALCULATED in claim.stated or not claim.stated):
        because += (
            " The size of a square is one intermediate's: it leaves weights, key-value cache and "
            "all else that is live at the peak uncounted."
        )
    if stated:
        because += f" Stated: {listed(stated)}; what is stated is not yet measured."
    if alone is not None and alone.verdict != NOT:
        instead = f"attention alone: {alone.instead or alone.because}"
        return Grade(claim, NARROWER, because, instead, tuple(missing), alone.records)
    known = _intermediate(claim, book) if claim.statement == "fits" else Grade(claim, NOT, "")
    return Grade(claim, NOT, because, known.instead, tuple(missing), known.records)


def _intermediate(claim: Claim, book: Book) -> Grade:
    """What is known of the intermediate alone, where what fits is not: measured, or calculated."""
    alone = _attention(Claim("smaller", phase=claim.phase, words=claim.words, who=claim.who,
                             than=claim.than, machine=claim.machine), book)  # fmt: skip
    if alone.verdict != NOT:
        return replace(alone, instead=f"attention alone: {alone.instead or alone.because}")
    known = (
        "a decoding step has 1 x N scores, and no square at all"
        if claim.phase == "decode"
        else "one N x N array of b bytes an element takes N^2 b bytes, so twice the context makes "
        "it four times as large: a calculated size, of one intermediate"
    )
    return replace(alone, instead=known, records=())
