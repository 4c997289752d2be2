"""What a check says: one of five verdicts, in words and with figures; and a run's worth of them.

pass            the contract is kept
fail            it is not: the words name the smallest input that shows it, error and bound
convention      the result is another documented convention, which the words name
refused         the call raised a clear error: its text
not applicable  the signature cannot express the question, or this machine cannot ask it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..records import finite

PASS, FAIL, CONVENTION, REFUSED, NOT_APPLICABLE = VERDICTS = (
    "pass", "fail", "convention", "refused", "not applicable",
)  # fmt: skip
# Of several answers to one question, the one that a reader must know about.
_GRAVITY = {word: n for n, word in enumerate([NOT_APPLICABLE, PASS, REFUSED, CONVENTION, FAIL])}


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. error, bound: largest absolute differences, where it has them."""

    verdict: str
    words: str = ""
    error: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Verdict:
    """A finding, and about which check in which dtype it is."""

    check: str
    group: str
    dtype: str
    finding: Finding

    @property
    def word(self) -> str:
        """One of VERDICTS."""
        return self.finding.verdict


@dataclass
class Verdicts:
    """All that one run found out about one function.

    dtypes  their words, "float32"; the order of rows is that of the checks, dtype by dtype
    """

    target: str
    style: str
    device: str
    dtypes: tuple[str, ...]
    rows: list[Verdict] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing failed and something passed; conventions and refusals are no failures."""
        return not self.failed and any(row.word == PASS for row in self.rows)

    @property
    def failed(self) -> list[Verdict]:
        """The verdicts that say fail."""
        return [row for row in self.rows if row.word == FAIL]

    def of(self, check: str, dtype: str | None = None) -> Finding:
        """The finding of a check; of several dtypes the gravest. KeyError where it did not run."""
        found = [r.finding for r in self.rows if r.check == check and dtype in (None, r.dtype)]
        if not found:
            raise KeyError(check)
        return gravest(found)

    def counts(self) -> dict[str, int]:
        """How many verdicts of each word, in the order of VERDICTS."""
        seen = Counter(row.word for row in self.rows)
        return {word: seen[word] for word in VERDICTS}

    def as_json(self) -> dict[str, Any]:
        """Plain dicts and lists, without NaN; see record.SCHEMA."""
        rows = [
            {"check": r.check, "group": r.group, "dtype": r.dtype}
            | {name: finite(value) for name, value in asdict(r.finding).items()}
            for r in self.rows
        ]
        return {
            "target": self.target,
            "style": self.style,
            "device": self.device,
            "dtypes": list(self.dtypes),
            "counts": self.counts(),
            "checks": rows,
        }

    def __str__(self) -> str:
        """A summary line, then one line for each failure: what pytest shows."""
        lines = [f"{self.target} on {self.device}: {summary(self.counts())}"]
        lines += [f"  {r.check} ({r.dtype}): {r.finding.words}" for r in self.failed]
        return "\n".join(lines)


def gravest(findings: Iterable[Finding]) -> Finding:
    """Of some findings, the one that a reader must know about; the first of equals."""
    return max(findings, key=lambda found: _GRAVITY[found.verdict])


def summary(counts: dict[str, int]) -> str:
    """ "41 pass, 2 fail, 1 convention": without what there is none of, but always pass and fail."""
    words: Sequence[str] = (PASS, FAIL)
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n or word in words)
