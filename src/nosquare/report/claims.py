"""Claims: one line each, and a file of them.

    STATEMENT: [workload] [PHASE] [words of a case ...] [of WHO] [than WHO] [by FACTOR]
               [in MEMORY] [within ERROR] [as KERNEL] [on MACHINE]

    faster: training float32 dropout=0.1 by 1.5 than torch
    smaller: training N4096 than square
    exact: backward bfloat16 within 0.02
    fits: prefill float32 M4096 in 2 GiB
    fits: workload decode by 2 than torch

STATEMENT  fits, smaller, moves less, faster, exact, ran
PHASE      prefill, decode, training, forward, backward; none: all of prefill, decode and training
words      what a recorded case must have: its phase, dtype, sizes, mask, features, or suite=c
workload   the whole model at work, not attention alone
than       a contestant, torch where left out; `best`: of the others, whoever is best in each case;
           `square`: one stored score array, calculated
on         part of the machine's name; none: every machine that has records

In a file, # begins a comment, and an indented line `name: text` says what a proposal states or
offers. Stated is not measured: only records are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..bench.cases import DTYPES, PHASES
from ..errors import ArgumentError

STATEMENTS = {
    "fits": "fits",
    "smaller": "takes less memory",
    "moves less": "moves fewer bytes",
    "faster": "is faster",
    "exact": "is exact",
    "ran": "ran",
}
PARTS = ("training", "prefill", "decode")  # a claim that names no phase is about all of these
EXAMPLE = "faster: training float32 causal(start) by 1.2 than torch"
SQUARE, BEST = "square", "best"
# What a claim about a whole workload has to keep visible; a proposal can state these.
CONDITIONS = {
    "model": "the model and its revision",
    "hardware": "the hardware",
    "runtime": "the runtime and its version",
    "backend": "the attention backend that was executed",
    "shape": "batch size and head dimensions",
    "precision": "the precision",
    "mask": "mask and dropout conditions",
    "lengths": "prompt and output lengths",
    "concurrency": "concurrent requests",
    "timing": "whether timing covers attention alone or the complete workload",
}
# What has to be measured, by a record of the whole workload.
MEASURED = {
    "peak": "a record of the complete peak, with metric and unit",
    "time": "a record of the elapsed time",
    "outputs": "a record that outputs are acceptable under matching conditions",
}
CALCULATED = "calculated"  # a proposal may also cite a calculated size

_VALUED = ("of", "than", "by", "in", "within", "as", "on")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_WORD = re.compile(
    r"(B|Hq|Hk|M|N|D|E)\d+|(dropout|softcap)=[\d.]+|bias=[\w,]+|alibi|sinks|grad|suite=\w+"
    r"|[a-z]+\(.*\)"
)


@dataclass(frozen=True)
class Claim:
    """One claim; str(claim) is its line, and Claim.parse reads it back.

    words   that a case must have; "suite=c" its suite
    factor  at least how much; 1: at all
    limit   bytes of `fits`, the tolerance of `exact`; None: not said
    kernel  of `ran`
    stated  name -> text: what the one who claims it states or offers
    """

    statement: str
    scope: str = "attention"
    phase: str = ""
    words: tuple[str, ...] = ()
    who: str = "nosquare"
    than: str = "torch"
    factor: float = 1.0
    limit: float | None = None
    kernel: str = ""
    machine: str = ""
    stated: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        words = [f"{self.statement}:"]
        words += ["workload"] if self.scope == "workload" else []
        words += [self.phase] if self.phase else []
        words += self.words
        words += ["of", self.who] if self.who != "nosquare" else []
        words += ["by", f"{self.factor:g}"] if self.factor != 1 else []
        compared = self.statement in _COMPARED or (self.statement == "fits" and self.factor != 1)
        words += ["than", self.than] if compared else []
        if self.limit is not None:
            said = ["in", size(self.limit)] if self.statement == "fits" else []
            words += said or ["within", f"{self.limit:g}"]
        words += ["as", self.kernel] if self.kernel else []
        words += ["on", shlex.quote(self.machine)] if self.machine else []
        return " ".join(words)

    @property
    def sentence(self) -> str:
        """The claim in words."""
        return f"{self.what}: {self.about}"

    @property
    def about(self) -> str:
        """Its scope, phase and cases, in words."""
        where = "the whole workload" if self.scope == "workload" else "attention alone"
        return ", ".join([where, " ".join([self.phase or "every phase", *self.words])])

    @property
    def what(self) -> str:
        """What it says, of whom, in words."""
        than = _name(self.than)
        what = {
            "faster": f"is faster than {than}"
            if self.factor == 1
            else f"is at least {self.factor:g} times as fast as {than}",
            "smaller": f"takes {_than(self, 'memory', 'less')}",
            "moves less": f"moves {_than(self, 'bytes', 'fewer')}",
            "exact": "is exact"
            + (f" within {self.limit:g}" if self.limit is not None else " within rounding"),
            "ran": f"ran {self.kernel}" if self.kernel else "ran as its label says",
            "fits": "fits" + (f" in {size(self.limit)}" if self.limit is not None else ""),
        }[self.statement]
        if self.statement == "fits" and self.factor != 1:
            what = f"makes {self.factor:g} times the context fit, in the memory that {than} takes"
        return f"{self.who} {what}"

    def matches(self, case_words: frozenset[str], machine: str) -> bool:
        """Whether a record with these words, on this machine, is one that the claim is about."""
        phases = {"prefill": {"forward"}, "training": {"forward+backward"}}
        wanted = phases.get(self.phase, {self.phase} if self.phase else set())
        return (
            (not wanted or bool(wanted & case_words))
            and set(self.words) <= case_words
            and self.machine.lower() in machine.lower()
        )

    @staticmethod
    def parse(line: str) -> Claim:
        """Read a line. Raises ArgumentError where it is no claim."""
        try:
            return _parse(line)
        except (ValueError, IndexError) as error:
            raise ArgumentError(
                "This line is not a claim.",
                {
                    "line": repr(line.strip()),
                    "because": str(error),
                    "statements": ", ".join(STATEMENTS),
                    "phases": ", ".join([*PARTS, "forward", "backward"]),
                },
                f'"{EXAMPLE}".',
            ) from None


_COMPARED = ("faster", "smaller", "moves less")


def _name(than: str) -> str:
    return {SQUARE: "one stored square", BEST: "the best of the others"}.get(than, than)


def _than(claim: Claim, what: str, few: str) -> str:
    """As in "takes less memory than torch", or "takes at most 1/2 of the memory of torch"."""
    than = _name(claim.than)
    if claim.factor == 1:
        return f"{few} {what} than {than}"
    return f"at most 1/{claim.factor:g} of the {what} of {than}"


def size(amount: float) -> str:
    """Bytes in words: "512 MiB", "1.5 GiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        if amount >= _UNITS[unit]:
            number = amount / _UNITS[unit]
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"
    return f"{amount:.0f} bytes"


def read_file(path: Path) -> list[Claim]:
    """The claims of a file. Raises ArgumentError naming the line at fault."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ArgumentError(
            "This file of claims cannot be read.",
            {"file": path, "because": why},
            f'a text file with a claim a line, as "{EXAMPLE}".',
        ) from None
    return list(_claims(text, path.name))


def _claims(text: str, name: str) -> Iterator[Claim]:
    current: Claim | None = None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].rstrip()
        if not words:
            continue
        if words[0].isspace():
            key, colon, value = words.partition(":")
            if current is None or not colon or not value.strip():
                raise ArgumentError(
                    "An indented line says what the claim above it states, as `name: text`.",
                    {"file": name, "line": number, "text": repr(words.strip())},
                    '"  hardware: one H200" below a claim.',
                )
            if key.strip() not in (*CONDITIONS, *MEASURED, CALCULATED):
                raise ArgumentError(
                    "A proposal cannot state this: no rule asks for it.",
                    {"file": name, "line": number, "name": repr(key.strip()),
                     "names": ", ".join([*CONDITIONS, *MEASURED, CALCULATED])},
                    '"  hardware: one H200" below a claim.',
                )  # fmt: skip
            stated = {**current.stated, key.strip(): value.strip()}
            current = replace(current, stated=stated)
            continue
        if current is not None:
            yield current
        try:
            current = Claim.parse(words)
        except ArgumentError as error:
            values = {"file": name, "at line": number, **error.values}
            raise ArgumentError(error.sentence, values, error.attempt) from None
    if current is not None:
        yield current


def _parse(line: str) -> Claim:
    statement, colon, rest = line.strip().partition(":")
    if not colon or statement not in STATEMENTS:
        raise ValueError(f"it begins with {statement.split(' ')[0]!r}, not with `STATEMENT:`")
    words, given, pattern = shlex.split(rest), dict[str, Any](), list[str]()
    while words:
        word = words.pop(0)
        if word in _VALUED:
            if not words:
                raise ValueError(f"nothing follows {word!r}")
            given[word] = words.pop(0)
            if word == "in" and words and words[0] in _UNITS:
                given[word] += f" {words.pop(0)}"
        elif word in ("workload", "attention"):
            given["scope"] = word
        elif word in (*PARTS, *PHASES):
            given["phase"] = word
        elif word in DTYPES or _WORD.fullmatch(word):
            pattern.append(word)
        else:
            raise ValueError(f"{word!r} is no word of a claim")
    return _made(statement, given, tuple(pattern))


def _made(statement: str, given: Mapping[str, Any], pattern: tuple[str, ...]) -> Claim:
    for word, owners in (("in", ("fits",)), ("within", ("exact",)), ("as", ("ran",)),
                         ("than", ("fits", *_COMPARED)), ("by", ("fits", *_COMPARED))):  # fmt: skip
        if word in given and statement not in owners:
            raise ValueError(f"{word!r} does not go with {statement!r}")
    scope, factor = given.get("scope", "attention"), float(given.get("by", 1))
    limit = _bytes(given["in"]) if "in" in given else None
    if "within" in given:
        limit = float(given["within"])
    if not factor > 0 or (limit is not None and not limit >= 0):
        raise ValueError("a factor is above 0, and a limit not below it")
    if given.get("than") == SQUARE and statement == "faster":
        raise ValueError("a calculated square has a size, and no time")
    if statement == "fits" and scope == "attention" and limit is None:
        raise ValueError("it does not say in how much memory, as `in 2 GiB`")
    return Claim(
        statement, scope, given.get("phase", ""), pattern, given.get("of", "nosquare"),
        given.get("than", "torch"), factor, limit, given.get("as", ""), given.get("on", ""),
    )  # fmt: skip


def _bytes(words: str) -> float:
    number, _, unit = words.partition(" ")
    if unit not in _UNITS:
        raise ValueError(f"a size is a number and one of {', '.join(_UNITS)}")
    return float(number) * _UNITS[unit]
