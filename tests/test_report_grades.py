"""Grades of claims, after the rules of the three texts. The records here are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nosquare.report.claims import CONDITIONS, MEASURED, Claim, read_file
from nosquare.report.evidence import Book
from nosquare.report.grade import ESTABLISHED, NARROWER, NOT, Grade, grade, standard
from report_helpers import (
    CPU,
    DECODE,
    GPU,
    TRAINING,
    bench,
    book,
    contestant,
    duel,
    everything,
    traffic,
)

CAUSAL = "forward bfloat16 B1 Hq2 Hk2 M4096 N4096 D64 causal(end)"


def verdict(line: str, folder: Path, *records: dict[str, object]) -> Grade:
    return grade(Claim.parse(line), book(folder, *records))


# ---- faster ----


def test_faster_outside_the_noise(tmp_path: Path) -> None:
    found = verdict("faster: training than torch", tmp_path, duel(ratio=2.0))
    assert found.verdict == ESTABLISHED
    assert found.because == "1 of 1 recorded case: 2.00x (2.00 to 2.00)."
    assert [s.place for s in found.records] == ["made.jsonl:1"]
    assert not found.missing


def test_within_the_noise_is_not_faster(tmp_path: Path) -> None:
    """Five rounds of eight won, the median above 1: an interval from 0.9 to 1.5 decides nothing."""
    ratios = [0.9, 0.95, 0.99, 1.1, 1.2, 1.3, 1.4, 1.5]
    entries = [
        contestant("torch", [1000 * r for r in ratios]),
        contestant("nosquare", [1000.0] * 8),
    ]
    found = verdict("faster: training than torch", tmp_path, bench(TRAINING, entries))
    assert found.verdict == NOT
    assert found.because == "0 of 1 recorded case. Not in 1: 1.15x (0.90 to 1.50)."


def test_the_opposite_is_said(tmp_path: Path) -> None:
    found = verdict("faster: training than torch", tmp_path, duel(ratio=0.5))
    assert found.verdict == NOT
    assert "Not in 1, the opposite in 1 of them: 0.50x" in found.because


def test_too_few_rounds(tmp_path: Path) -> None:
    found = verdict("faster: training than torch", tmp_path, duel(ratio=9.0, rounds=5))
    assert found.verdict == NOT
    assert found.missing == ("6 interleaved rounds, the least for a 95% interval",)
    assert verdict("faster: training", tmp_path, duel(ratio=9.0, rounds=6)).verdict == ESTABLISHED


def test_a_larger_factor_is_narrowed(tmp_path: Path) -> None:
    found = verdict("faster: training by 3 than torch", tmp_path, duel(ratio=2.0))
    assert found.verdict == NARROWER
    assert found.instead == f"faster by 2.00x at least in {TRAINING}"
    assert verdict("faster: training by 2", tmp_path, duel(ratio=2.0)).verdict == ESTABLISHED


def test_some_cases_only(tmp_path: Path) -> None:
    slow = duel(f"{TRAINING} dropout=0.1", ratio=0.9)
    found = verdict("faster: training than torch", tmp_path, duel(ratio=2.0), slow)
    assert found.verdict == NARROWER
    assert found.because.startswith("1 of 2 recorded cases. Not in 1, the opposite in 1")
    assert found.instead == f"is faster in {TRAINING}: 2.00x (2.00 to 2.00)"
    assert [s.line for s in found.records] == [1]
    only = verdict("faster: training dropout=0.1 than torch", tmp_path, duel(ratio=2.0), slow)
    assert only.verdict == NOT


def test_picking_among_cases_proves_nothing(tmp_path: Path) -> None:
    """Seven rounds above 1 convince of one case, and not of one that was picked out of ten."""
    won = duel(ratio=1.1, rounds=7)
    lost = [duel(f"{TRAINING} softcap={k}.0", ratio=0.9, rounds=7) for k in range(1, 10)]
    assert verdict("faster: training than torch", tmp_path, won).verdict == ESTABLISHED
    found = verdict("faster: training than torch", tmp_path, won, *lost)
    assert found.verdict == NOT
    assert found.missing == ("9 interleaved rounds, the least for a 99.5% interval",)


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ({"checks": []}, "a checked answer of torch"),
        ({"checks": [{"what": "o", "error": 2.0, "bound": 1.0, "how": "h"}]}, "a checked answer"),
        ({"refused": "it stopped: no memory"}, "was not timed: it stopped: no memory"),
        ({"samples_us": [1.0] * 7}, "rounds in which both were timed in turn"),
        ({"name": "torch:math"}, "torch among the contestants"),
    ],
)
def test_both_must_be_checked_and_interleaved(
    tmp_path: Path, more: dict[str, object], missing: str
) -> None:
    entries = [contestant("torch", [2000.0] * 8) | more, contestant("nosquare", [1000.0] * 8)]
    found = verdict("faster: training than torch", tmp_path, bench(TRAINING, entries))
    assert found.verdict == NOT
    assert missing in found.missing[0]


def test_machines_are_never_mixed(tmp_path: Path) -> None:
    """A fast card's nosquare beside a slow processor's torch is no ratio."""
    theirs = bench(TRAINING, [contestant("torch", [9000.0] * 8)])
    mine = bench(TRAINING, [contestant("nosquare", [10.0] * 8)], machine=GPU, device="cuda")
    found = verdict("faster: training than torch", tmp_path, theirs, mine)
    assert found.verdict == NOT
    assert set(found.missing) == {"torch among the contestants", "nosquare among the contestants"}


def test_one_machine_of_two(tmp_path: Path) -> None:
    other = duel(ratio=0.5, machine=CPU | {"features": ["avx2", "avx512"]})
    both = [duel(ratio=2.0), other]
    assert verdict("faster: training than torch", tmp_path, *both).verdict == NARROWER
    assert (
        verdict("faster: training than torch on '(avx2)'", tmp_path, *both).verdict == ESTABLISHED
    )
    assert verdict("faster: training than torch on avx512", tmp_path, *both).verdict == NOT


def test_best_of_the_others(tmp_path: Path) -> None:
    times = {"nosquare": 10.0, "torch": 30.0, "fa3": 9.0, "torch:math": 99.0}
    entries = [contestant(name, [t] * 8) for name, t in times.items()]
    record = bench(TRAINING, entries)
    assert verdict("faster: training than torch", tmp_path, record).verdict == ESTABLISHED
    found = verdict("faster: training than best", tmp_path, record)
    assert found.verdict == NOT
    assert "0.90x" in found.because
    entries[2] |= {"checks": []}  # whoever is wrong is not the best
    found = verdict("faster: training than best", tmp_path, bench(TRAINING, entries))
    assert found.because == "1 of 1 recorded case: 3.00x (3.00 to 3.00)."


# ---- phases and scope ----


def test_forward_says_nothing_of_training(tmp_path: Path) -> None:
    record = duel(CAUSAL)
    assert verdict("faster: prefill than torch", tmp_path, record).verdict == ESTABLISHED
    found = verdict("faster: training bfloat16 than torch", tmp_path, record)
    assert found.verdict == NOT
    assert found.because == (
        "What is recorded of these cases is prefill, which says nothing of training."
    )
    assert found.missing == ("a record of training bfloat16",)


def test_a_claim_without_a_phase_is_about_all(tmp_path: Path) -> None:
    found = verdict("faster: than torch", tmp_path, duel(CAUSAL), duel(DECODE))
    assert found.verdict == NARROWER
    assert found.missing == ("a record of training",)
    assert found.instead.startswith("is faster in ")
    every = [duel(CAUSAL), duel(DECODE), duel()]
    assert verdict("faster: than torch", tmp_path, *every).verdict == ESTABLISHED


def test_no_record(tmp_path: Path) -> None:
    found = verdict("faster: training float64 than torch on H200", tmp_path, duel())
    assert (found.verdict, found.because) == (NOT, "No record is of such a case.")
    assert found.missing == ("a record of training float64 on H200",)


@pytest.mark.parametrize("line", ["faster: workload training than torch",
                                  "smaller: workload training than torch",
                                  "exact: workload training"])  # fmt: skip
def test_attention_alone_never_supports_the_workload(tmp_path: Path, line: str) -> None:
    found = verdict(line, tmp_path, duel())
    assert found.verdict == NARROWER
    assert found.instead.startswith("attention alone: ")
    assert found.missing == (*CONDITIONS.values(), *MEASURED.values())
    assert [s.line for s in found.records] == [1]
    worse = verdict(
        line, tmp_path, duel(f"{TRAINING} softcap=1.0", ratio=0.5) | {"contestants": []}
    )
    assert worse.verdict == NOT


def test_proposal_a(tmp_path: Path) -> None:
    """It cites the two-byte square, and says that twice the context fits in the same memory."""
    path = tmp_path / "claims.txt"
    path.write_text(
        "fits: workload prefill by 2 than torch\n"
        "  calculated: one square is 512 MiB at 16,384 tokens, and 2 GiB at 32,768\n"
    )
    (claim,) = read_file(path)
    found = grade(claim, book(tmp_path, duel(DECODE)))
    assert found.verdict == NOT
    assert "one intermediate's" in found.because
    assert "four times as large: a calculated size, of one intermediate" in found.instead
    assert MEASURED["peak"] in found.missing
    assert found.records == ()
    # with a measured peak of attention, that narrower thing is kept, and no more
    case = CAUSAL.replace("M4096 N4096", "M16384 N16384")
    found = grade(claim, book(tmp_path, duel(case)))
    assert found.verdict == NOT
    assert found.instead == (
        "attention alone: 1 of 1 recorded case: 16.0x (peak 64 MiB, 1 GiB for torch)."
    )
    assert [s.line for s in found.records] == [1]


def test_proposal_b(tmp_path: Path) -> None:
    """It says what it ran on and offers a report: the right kind of evidence, not yet there."""
    path = tmp_path / "claims.txt"
    path.write_text(
        "fits: workload prefill by 2 than torch\n"
        "  model: m, revision 3\n  hardware: one H200\n  runtime: r 1.2\n"
        "  backend: b, as a profiler saw it\n  concurrency: 8\n  peak: in a report on offer\n"
    )
    (claim,) = read_file(path)
    found = grade(claim, book(tmp_path, duel(DECODE)))
    assert found.verdict == NOT
    assert "Stated: model, hardware, runtime, backend and concurrency;" in found.because
    assert "one intermediate's" not in found.because
    assert found.missing == (
        "batch size and head dimensions",
        "the precision",
        "mask and dropout conditions",
        "prompt and output lengths",
        "whether timing covers attention alone or the complete workload",
        "a record of the complete peak, with metric and unit; stated, but no record holds it",
        "a record of the elapsed time",
        "a record that outputs are acceptable under matching conditions",
    )


def test_a_decoding_step_has_no_square(tmp_path: Path) -> None:
    claim = Claim.parse("fits: workload decode by 2 than torch")
    entries = [contestant("nosquare", [1.0] * 8), contestant("torch", [2.0] * 8)]
    found = grade(claim, book(tmp_path, bench(DECODE, entries)))
    assert found.instead == "a decoding step has 1 x N scores, and no square at all"
    found = verdict("smaller: decode than square", tmp_path, duel(DECODE))
    assert found.verdict == NOT
    assert found.missing == ("a case with a square: M x N is none here",)


# ---- the others ----


def test_smaller(tmp_path: Path) -> None:
    found = verdict("smaller: training by 16 than torch", tmp_path, duel())
    assert found.verdict == ESTABLISHED
    assert found.because == "1 of 1 recorded case: 16.0x (peak 64 MiB, 1 GiB for torch)."
    assert verdict("smaller: training by 17 than torch", tmp_path, duel()).verdict == NARROWER
    entries = [contestant(n, [1.0] * 8) for n in ("nosquare", "torch")]
    found = verdict("smaller: training than torch", tmp_path, bench(TRAINING, entries))
    assert found.missing == ("a measured peak of nosquare",)


def test_causal_does_not_halve_a_stored_square(tmp_path: Path) -> None:
    """2 heads of 4,096^2 in two bytes are 64 MiB: a peak of 48 is below it, one of 64 is not."""
    for peak, word in ((48 << 20, ESTABLISHED), (64 << 20, NOT)):
        entries = [contestant("nosquare", [1.0] * 8, peak_bytes=peak)]
        assert (
            verdict("smaller: prefill than square", tmp_path, bench(CAUSAL, entries)).verdict
            == word
        )


def test_modelled_traffic_is_no_measurement(tmp_path: Path) -> None:
    def entries(mine: object, theirs: object) -> list[dict[str, object]]:
        return [contestant("nosquare", traffic=mine), contestant("torch", traffic=theirs)]

    found = verdict("moves less: prefill", tmp_path, bench(CAUSAL, entries(traffic(1, 1), None)))
    assert found.verdict == NOT
    assert found.missing == ("measured traffic of torch: a modelled figure is none",)
    only_model = traffic(0, 0, 4 << 20) | {"dram_read_bytes": None, "dram_write_bytes": None}
    found = verdict(
        "moves less: prefill", tmp_path, bench(CAUSAL, entries(only_model, traffic(1, 1)))
    )
    assert found.missing == ("measured traffic of nosquare: a modelled figure is none",)
    counted = entries(traffic(1 << 20, 1 << 20), traffic(4 << 20, 2 << 20))
    found = verdict("moves less: prefill by 3", tmp_path, bench(CAUSAL, counted))
    assert found.because == "1 of 1 recorded case: 3.00x (2 MiB, 6 MiB for torch)."


def test_traffic_takes_over_the_checks_of_the_same_case(tmp_path: Path) -> None:
    moved = [contestant("nosquare", outputs=(), traffic=traffic(1, 1)),
             contestant("torch", outputs=(), traffic=traffic(4, 2))]  # fmt: skip
    alone = bench(CAUSAL, moved, suite="traffic")
    assert verdict("moves less: prefill suite=traffic", tmp_path, alone).missing == (
        "a checked answer of nosquare",
    )
    both = (alone, duel(CAUSAL))
    found = verdict("moves less: prefill suite=traffic", tmp_path, *both)
    assert found.verdict == ESTABLISHED
    assert [s.line for s in found.records] == [1, 2]
    elsewhere = (alone, duel(CAUSAL, machine=GPU))
    assert verdict("moves less: suite=traffic", tmp_path, *elsewhere).verdict == NOT


def test_exact_needs_a_comparison_and_a_tolerance(tmp_path: Path) -> None:
    assert verdict("exact: training", tmp_path, duel()).because == (
        "1 of 1 recorded case: at worst o off by 1.0e-07 of 1.0e-06 allowed."
    )
    assert verdict("exact: training within 1e-7", tmp_path, duel()).verdict == ESTABLISHED
    found = verdict("exact: training within 0", tmp_path, duel())  # bit by bit
    assert (found.verdict, found.instead) == (
        NARROWER, f"within 1.0e-07, not within 0 in {TRAINING}")  # fmt: skip
    bare = bench(TRAINING, [contestant("nosquare", outputs=())])
    found = verdict("exact: training", tmp_path, bare)
    assert found.missing == ("an answer of nosquare compared with a reference",)
    forward_only = bench(TRAINING, [contestant("nosquare", outputs=("o",))])
    found = verdict("exact: training", tmp_path, forward_only)
    assert found.missing == ("gradients compared with a reference",)
    wrong = contestant("nosquare") | {
        "checks": [{"what": w, "error": 2e-6, "bound": 1e-6, "how": "h"} for w in
                   ("o", "dq", "dk", "dv")]}  # fmt: skip
    assert verdict("exact: training", tmp_path, bench(TRAINING, [wrong])).verdict == NOT


def test_fits_counts_the_inputs(tmp_path: Path) -> None:
    """q, k, v and do of 8 heads x 4,096 x 64 in float32 are 8 MiB each, beside a peak of 64."""
    assert verdict("fits: training in 96 MiB", tmp_path, duel()).verdict == ESTABLISHED
    found = verdict("fits: training in 95 MiB", tmp_path, duel())
    assert found.verdict == NOT
    assert found.because.endswith("Not in 1: 96 MiB: peak 64 MiB beyond 32 MiB of inputs.")


def test_a_label_does_not_prove_what_ran(tmp_path: Path) -> None:
    entry = contestant("torch", [1.0] * 8, ran="flash_attention")
    found = verdict("ran: decode of torch as flash", tmp_path, bench(DECODE, [entry]))
    assert found.verdict == NOT
    assert found.missing == (
        "kernel names from a profiler: a label (flash_attention) does not prove what ran",
    )
    seen = bench(DECODE, [entry | {"traffic": traffic(1, 1)}])
    assert verdict("ran: decode of torch as flash", tmp_path, seen).verdict == NOT
    assert verdict("ran: decode of torch as fwd_kernel", tmp_path, seen).verdict == ESTABLISHED


def test_standard_claims(tmp_path: Path) -> None:
    made = book(tmp_path, *everything())
    claims = standard(made)
    assert all(Claim.parse(str(c)) == c for c in claims)
    assert {c.statement for c in claims} == {"faster", "exact", "smaller", "moves less", "fits"}
    assert [str(c) for c in claims[-2:]] == [
        "faster: workload than torch",
        "fits: workload by 2 than torch",
    ]
    assert any(c.than == "best" for c in claims)
    for claim in claims:
        found = grade(claim, made)
        assert found.verdict == NOT or found.records
        assert found.verdict != NOT or found.missing or "Not in" in found.because


def test_every_established_claim_names_records_of_its_machine() -> None:
    real = Book.read(Path(__file__).resolve().parents[1] / "docs" / "records", ["cpu"])
    for claim in standard(real):
        for source in grade(claim, real).records:
            assert claim.machine in source.machine
    general = replace(Claim.parse("faster: than torch"), machine="no such machine")
    assert grade(general, real).verdict == NOT
