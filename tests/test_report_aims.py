"""README's tables of what kernels are held to: from records, one for each processor and card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import nosquare as ns
from nosquare.bench import held as boards
from nosquare.bench import hopper, portable
from nosquare.bench.aims import HEADS, SUITES
from nosquare.report.readme import Wanted, faults, filled
from nosquare.report.run import report
from report_helpers import CPU, GPU, SOFTWARE, bench, contestant, write

MARKER = "<!-- records: made aims -->\n<!-- /records -->\n"
FORWARD = "forward float32 B1 Hq8 Hk8 M{n} N{n} D64 causal(start)"
DECODE = "decode bfloat16 B1 Hq1 Hk1 M1 N65536 D128 full()"
DROPPED = "forward+backward float32 B1 Hq2 Hk2 M4096 N4096 D64 E128 full() dropout=0.1"
INTEL = CPU | {"cpu": "Blue", "features": ["avx512", "amx_bf16"]}


def errors(*rms: float) -> list[dict[str, Any]]:
    return [
        {"what": what, "most": 9.0, "truth_most": 9.0, "rms": one, "truth_rms": 1.0}
        for what, one in zip(("o", "dq"), rms, strict=False)
    ]


def duel(suite: str, case: str, ratio: float, threads: int = 1, *, machine: Mapping[str, Any] = CPU,
         mine: Sequence[float] = (1e-7,), theirs: Sequence[float] = (2e-7,), ran: str = "llvm_cpu",
         **more: Any) -> dict[str, Any]:  # fmt: skip
    """torch takes 1 ms, nosquare 1 ms over the ratio."""
    entries = [
        contestant("torch", [1000.0] * 7, errors=errors(*theirs)),
        contestant("nosquare", [1000.0 / ratio] * 7, errors=errors(*mine), ran=ran),
    ]
    machine = {**machine, "threads": threads}
    return bench(case, entries, suite=suite, machine=machine, **more)


def refused(suite: str, case: str, threads: int) -> dict[str, Any]:
    entries = [
        contestant("torch", [1000.0] * 7),
        contestant("nosquare", refused="wrong: o", ran=""),
    ]
    return bench(case, entries, suite=suite, machine={**CPU, "threads": threads})


def roof(gemm: float, read: float | None = None) -> dict[str, Any]:
    return {"ceiling": {"gemm_flops_per_s": gemm, "read_bytes_per_s": read, "how": "made up"}}


def tables(text: str) -> list[list[list[str]]]:
    """Cells of each table of a text, heads and all, rules left out."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|--"):
            continue
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif found[-1]:
            found.append([])
    return [one for one in found if one]


def test_table_by_hand(tmp_path: Path) -> None:
    """Ratios 1 and 4 on one thread, 2.5 and none on two: means 2.00 and 2.50, aim 1.3, and two
    of four miss it. 2 * 8 * 512^2 * 128 flops in 1 ms are 537 GF/s, half of this ceiling."""
    first, second = FORWARD.format(n=512), FORWARD.format(n=1024)
    write(tmp_path, [
        duel("forward_fp32", first, 1.0, 1, **roof(2 * 536.870912e9)),
        duel("forward_fp32", second, 4.0, 1, mine=(3e-7,)),
        duel("forward_fp32", first, 2.5, 2, ran="torch_fused"),
        refused("forward_fp32", second, 2),
        duel("decode_one", DECODE, 2.0, 2, **roof(1.0, 2 * 67.108864e9)),
        duel("dense", DROPPED, 5.0, 1),
        duel("c", first, 100.0, 1),
    ])  # fmt: skip
    text = filled(MARKER, tmp_path)
    (table,) = tables(text)
    assert table == [
        list(HEADS),
        ["fp32 forward, N 512 to 4096", "-", "2.00 / 2.50 (1.3; 2 of 4 miss)", "-", "-", "50%",
         "1.50", "llvm_cpu, torch_fused"],
        ["decode, one head, fp32 and bf16, N 65536", "-", "-", "- / 2.00 (1.3)", "-", "50%",
         "0.50", "llvm_cpu"],
        ["dropout 0.1, or E != D: forward + backward, 2 heads, fp32 and bf16, N 4096",
         "5.00 / - (4.0)", "-", "-", "-", "-", "-", "llvm_cpu"],
    ]  # fmt: skip
    assert "Made Up 9000 (avx2), with 1 / 2 threads, torch 2.13.0, 2026-12-01" in text
    assert "(docs/records/made.jsonl:1-6):" in text


def test_each_processor_has_its_table_of_its_newest_records(tmp_path: Path) -> None:
    case, old = FORWARD.format(n=512), {"utc": "2026-11-01T00:00:00Z"}
    new = {"software": SOFTWARE | {"torch": "2.14.0"}, "utc": "2026-12-05T00:00:00Z"}
    write(tmp_path, [
        duel("forward_fp32", case, 3.0, machine=INTEL, **old),
        duel("forward_fp32", case, 2.0, machine=INTEL),
        duel("forward_fp32", FORWARD.format(n=1024), 2.0, machine=INTEL, **old),
        duel("forward_fp32", case, 9.0),
        duel("forward_fp32", case, 5.0, **new),
    ])  # fmt: skip
    text = filled(MARKER, tmp_path)
    blue, made_up = tables(text)
    assert blue[1][2] == "2.00 (1.3)"
    assert made_up[1][2] == "5.00 (1.3)"
    assert ("Blue (avx512, amx_bf16), with 1 thread, torch 2.13.0, 2026-11-01 to 2026-12-01 "
            "(docs/records/made.jsonl:2-3):") in text  # fmt: skip
    assert "torch 2.14.0, 2026-12-05 (docs/records/made.jsonl:5):" in text
    assert len(tables(filled(MARKER.replace("aims", "aims on Blue"), tmp_path))) == 1


def test_a_changed_record_changes_the_table(tmp_path: Path) -> None:
    case = FORWARD.format(n=512)
    write(tmp_path, [duel("forward_fp32", case, 2.0)])
    right = filled(MARKER, tmp_path)
    assert faults("R.md", right, tmp_path) == []
    assert filled(right, tmp_path) == right
    write(tmp_path, [duel("forward_fp32", case, 1.9)])
    (fault,) = faults("R.md", right, tmp_path)
    assert "2.00 (1.3)" in fault.splitlines()[1]
    assert "1.90 (1.3)" in fault.splitlines()[3]


def test_no_record_of_a_line(tmp_path: Path) -> None:
    write(tmp_path, [duel("c", FORWARD.format(n=512), 2.0)])
    with pytest.raises(ns.ArgumentError) as caught:
        filled(MARKER, tmp_path)
    assert caught.value.sentence == "No record is what this marker asks for."
    known = [*(s.name for s in SUITES), *boards.BY_NAME]
    assert caught.value.values["suites"] == ", ".join(known)
    assert Wanted.parse("cpu aims on Blue") == Wanted("cpu", "aims", (), "torch", "Blue")


# ---- cards ----

SQUARE = "forward bfloat16 B{b} Hq32 Hk32 M{n} N{n} D64 {mask}"
BIASED = "forward+backward bfloat16 B8 Hq16 Hk16 M2048 N2048 D128 full() bias=B,Hq,M,N"


def held(suite: str, case: str, ratio: float | None, against: str = "torch:flash",
         mine: Sequence[float] = (1e-3,), **more: Any) -> dict[str, Any]:  # fmt: skip
    """The peer takes 1 ms, cuDNN half of it, triton_any 1 ms over the ratio."""
    own = (
        contestant("nosquare:triton_any", refused="wrong: o")
        if ratio is None
        else contestant("nosquare:triton_any", [1000.0 / ratio] * 7, errors=errors(*mine))
    )
    peers = [contestant(against, [1000.0] * 7, errors=errors(2e-3))]
    peers += [contestant("torch:cudnn", [500.0] * 7)] * (against == "torch:flash")
    return bench(case, [own, *peers], suite=suite, machine=GPU, device="cuda", **more)


def test_the_table_of_a_card_by_hand(tmp_path: Path) -> None:
    """Ratios 1 and 4, one that was not timed: mean 2 and one below. 2 * 256 * 32 * 512^2 * 128
    flops of 16,384 tokens in 1 ms are 69 TFLOP/s."""
    case = SQUARE.format(b=32, n=512, mask="full()")
    causal = [SQUARE.format(b=16384 // n, n=n, mask="causal(end)") for n in (512, 16384)]
    write(tmp_path, [
        held("portable_forward", case, 1.0),
        held("portable_forward", causal[0], 4.0, mine=(5e-3,)),
        held("portable_forward", causal[1], None, utc="2026-12-02T00:00:00Z"),
        held("portable_bias", BIASED, 1.5, "torch:efficient"),
        held("prefill", case, 9.0),
    ])  # fmt: skip
    text = filled(MARKER, tmp_path)
    (table,) = tables(text)
    assert table == [
        list(portable.HEADS),
        ["bf16 forward, 16,384 tokens, N 512 to 16384", "torch:flash", "1.00", "4.00", "-", "-",
         "2.00 (1.15; 2 of 3 below)", "1.00", "69 to 275", "2.50"],
        ["bf16 forward + backward, a bias that learns, 16,384 tokens, N 2048", "torch:efficient",
         "-", "-", "1.50", "-", "1.50 (1.2)", "-", "1443", "0.50"],
    ]  # fmt: skip
    assert ("NVIDIA H200, torch 2.13.0, 2026-12-01 to 2026-12-02 "
            "(docs/records/made.jsonl:1-4):") in text  # fmt: skip
    assert text.count(f"Cells: {portable.SAID}.") == 1
    assert "with 1 thread" not in text


def test_a_changed_record_changes_the_table_of_a_card(tmp_path: Path) -> None:
    case = SQUARE.format(b=32, n=512, mask="full()")
    write(tmp_path, [held("portable_forward", case, 2.0), duel("dense", DROPPED, 5.0)])
    right = filled(MARKER, tmp_path)
    assert len(tables(right)) == 2  # a processor's and a card's
    assert faults("R.md", right, tmp_path) == []
    write(tmp_path, [held("portable_forward", case, 1.1), duel("dense", DROPPED, 5.0)])
    (fault,) = faults("R.md", right, tmp_path)
    assert "2.00 (1.15)" in fault.splitlines()[1]
    assert "1.10 (1.15; 1 of 1 below)" in fault.splitlines()[3]


def test_the_page_takes_records_without_nosquare_as_it_chooses(tmp_path: Path) -> None:
    write(tmp_path, [held("portable_bias", BIASED, 1.5, "torch:efficient")])
    assert report(tmp_path / "page.html", tmp_path) == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "a bias that learns" in page
    assert "nosquare:triton_any" in page


GRID = "forward bfloat16 B{b} Hq16 Hk16 M{n} N{n} D128 causal(end)"


def hopper_record(n: int, mine_us: float, suite: str = "hopper_forward") -> dict[str, Any]:
    """FlashAttention-3 takes 1 ms, torch's flash two."""
    entries = [
        contestant("nosquare:gluon_sm90", [mine_us] * 9, errors=errors(1e-3)),
        contestant("fa3", [1000.0] * 9, errors=errors(2e-3)),
        contestant("torch:flash", [2000.0] * 9, errors=errors(9e-3)),
    ]
    case = GRID.format(b=16384 // n, n=n)
    return bench(case, entries, suite=suite, machine=GPU, device="cuda")


def test_the_tables_of_a_hopper_card(tmp_path: Path) -> None:
    """Ratios 2 and 0.5: a mean of 1, below its aim, and a cell too. 32 * 16 * 512^2 * 512 flops of
    16,384 tokens in half a millisecond are 137 TFLOP/s."""
    write(tmp_path, [hopper_record(512, 500.0), hopper_record(2048, 2000.0)])
    text = filled(MARKER, tmp_path)
    grid, further = tables(text)
    assert [row[:4] for row in grid] == [
        ["forward bfloat16", "N 512", "N 1024", "N 2048"],
        ["D=128 causal", "2.00 F", "-", "**0.50 F**"],
        ["all", "2.00", "-", "0.50"],
    ]
    assert grid[2][7] == "**1.00 (1.02; 1 of 2 below 0.97)**"
    assert grid[1][9] == "0.50"
    assert further == [
        list(hopper.MORE_HEADS),
        [hopper.SHORT, "2.00 F", "2.00", "1.15", "137", "0.50"],
    ]
    assert text.count("NVIDIA H200, torch 2.13.0, 2026-12-01 (docs/records/made.jsonl:1-2):") == 1
    assert text.count(f"Cells: {hopper.SAID}.") == 1
    assert faults("R.md", text, tmp_path) == []


def test_aims_that_nobody_has_measured_yet(tmp_path: Path) -> None:
    """A table may stand before its records; once they are there, it has to follow them."""
    text = filled(MARKER, tmp_path)
    assert "\nNot measured yet: no records are called made.\n<!-- /rec" in text
    assert faults("R.md", text, tmp_path) == []
    write(tmp_path, [hopper_record(512, 500.0)])
    assert len(faults("R.md", text, tmp_path)) == 1
