"""Claims: their lines, their files, and the noise that a ratio has to leave."""

from __future__ import annotations

from fractions import Fraction
from math import comb
from pathlib import Path

import pytest

import nosquare as ns
from nosquare.report.claims import Claim, read_file, size
from nosquare.report.grade import Grade, grade
from nosquare.report.noise import least_rounds, order_rank, paired
from report_helpers import (
    bench,
    book,
)

CAUSAL = "forward bfloat16 B1 Hq2 Hk2 M4096 N4096 D64 causal(end)"


def verdict(line: str, folder: Path, *records: dict[str, object]) -> Grade:
    return grade(Claim.parse(line), book(folder, *records))


# ---- the noise ----


@pytest.mark.parametrize("n", [*range(1, 41), 200])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.998])
def test_interval_covers_as_it_says_and_no_narrower_one_does(n: int, confidence: float) -> None:
    """Against exact binomial sums: P(k-th smallest <= median <= k-th largest)."""

    def coverage(k: int) -> Fraction:
        return 1 - 2 * Fraction(sum(comb(n, j) for j in range(k)), 2**n)

    k = order_rank(n, confidence)
    assert k == 0 or coverage(k) >= confidence
    assert coverage(k + 1) < confidence
    assert (k == 0) == (n < least_rounds(confidence))


def test_ratio_is_paired_round_by_round() -> None:
    """A drift that both meet leaves the ratio alone, where medians alone would be noisy."""
    drift = [1.0, 5.0, 2.0, 9.0, 3.0, 7.0, 4.0, 8.0]
    ratio = paired([2 * t for t in drift], drift)
    assert ratio is not None
    assert (ratio.low, ratio.middle, ratio.high, ratio.rounds) == (2.0, 2.0, 2.0, 8)
    theirs = [float(t) for t in range(10, 18)]
    found = paired(theirs, [10.0] * 8)
    assert found is not None  # eight rounds: smallest and largest, 1 - 2 / 2^8 = 99.2%
    assert (found.low, found.middle, found.high) == (1.0, 1.35, 1.7)
    assert str(found) == "1.35x (1.00 to 1.70)"
    assert str(paired([2.0] * 5, [1.0] * 5)) == "2.00x (5 rounds)"
    nine = paired([float(t) for t in (18, 10, 17, 11, 16, 12, 15, 13, 14)], [10.0] * 9)
    assert nine is not None  # of nine, second smallest and second largest: 96.1%
    assert (nine.low, nine.middle, nine.high) == (1.1, 1.4, 1.7)
    assert paired([1.0, 2.0], [1.0]) is None
    assert paired([], []) is None


# ---- lines ----


@pytest.mark.parametrize(
    "line",
    [
        "faster: training float32 causal(start) by 1.2 than torch",
        "faster: decode bfloat16 of torch:flash than best on 'NVIDIA H200'",
        "smaller: training N4096 than square",
        "moves less: prefill D128 than fa3",
        "exact: backward bfloat16 within 0.02",
        "fits: prefill float32 M4096 in 2 GiB",
        "fits: workload decode by 2 than torch",
        "ran: decode of torch as flash",
        "faster: suite=c dropout=0.1 bias=Hq,1,N alibi causal(end)&window(before=5,after=0) than x",
    ],
)
def test_line_round_trip(line: str) -> None:
    claim = Claim.parse(line)
    assert str(claim) == line
    assert Claim.parse(str(claim)) == claim


@pytest.mark.parametrize(
    ("line", "because"),
    [
        ("", "begins with ''"),
        ("better: than torch", "begins with 'better'"),
        ("faster than torch", "not with `STATEMENT:`"),
        ("faster: sideways", "'sideways' is no word of a claim"),
        ("faster: by fast", "could not convert"),
        ("faster: by -1", "above 0"),
        ("faster: by", "nothing follows 'by'"),
        ("faster: within 1", "'within' does not go with 'faster'"),
        ("faster: than square", "has a size, and no time"),
        ("fits: prefill", "how much memory"),
        ("fits: in 4", "a size is a number and one of"),
        ("exact: in 4 GiB", "'in' does not go with 'exact'"),
        ("exact: than torch", "'than' does not go with 'exact'"),
    ],
)
def test_bad_line(line: str, because: str) -> None:
    with pytest.raises(ns.ArgumentError) as caught:
        Claim.parse(line)
    assert caught.value.sentence == "This line is not a claim."
    assert because in str(caught.value.values["because"])
    assert str(caught.value).splitlines()[-1].startswith('  Try: "faster: training')


def test_file_of_claims(tmp_path: Path) -> None:
    path = tmp_path / "claims.txt"
    path.write_text(
        "# what we say\nfaster: training than torch  # of the new kernel\n\n"
        "fits: workload decode by 2\n  model: m, revision 3\n  hardware: one H200\n"
    )
    first, second = read_file(path)
    assert str(first) == "faster: training than torch"
    assert second.stated == {"model": "m, revision 3", "hardware": "one H200"}
    for text, words in (
        ("faster: training\nfaster: sideways\n", ["This line is not a claim", "at line     2"]),
        ("  model: m\n", ["An indented line says", "line  1"]),
        ("faster: training\n  colour: red\n", ["cannot state this", "line   2", "'colour'"]),
    ):
        path.write_text(text)
        with pytest.raises(ns.ArgumentError) as caught:
            read_file(path)
        for word in words:
            assert word in str(caught.value), str(caught.value)
    with pytest.raises(ns.ArgumentError, match="cannot be read"):
        read_file(tmp_path / "none.txt")


def test_sizes_of_the_texts(tmp_path: Path) -> None:
    """A two-byte square is 512 MiB at N = 16,384 and 2 GiB at 32,768, under a causal mask too."""
    for n, words in ((16384, "512 MiB"), (32768, "2 GiB")):
        for mask in ("full()", "causal(start)"):
            case = f"forward bfloat16 B1 Hq1 Hk1 M{n} N{n} D64 {mask}"
            (one,) = book(tmp_path, bench(case, [])).bench
            assert size(one.square_bytes) == words
