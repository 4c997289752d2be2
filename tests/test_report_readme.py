"""The tables of README and docs: made from records, and no number without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import house
import nosquare as ns
from nosquare.cli import app
from nosquare.report.readme import BLOCK, Wanted, faults, filled, unrecorded
from report_helpers import CPU, TRAINING, bench, contestant, duel, verified, write

README = house.ROOT / "README.md"
DOCUMENTS = [README, *sorted((house.ROOT / "docs").glob("*.md"))]
RECORDS = house.ROOT / "docs" / "records"


# ---- this repository ----


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_tables_are_what_the_records_give(path: Path) -> None:
    assert faults(path.name, path.read_text("utf-8"), RECORDS) == []


def test_no_number_of_readme_is_without_a_record() -> None:
    assert unrecorded("README.md", README.read_text("utf-8")) == []


def test_readme_has_tables_of_records() -> None:
    assert BLOCK.search(README.read_text("utf-8")), (
        "README has no table of records: write <!-- records: cpu suites --> and "
        "<!-- /records -->, then run nosquare report --readme"
    )


# ---- the tables ----


def block(marker: str, body: str = "") -> str:
    return f"# t\n\n<!-- records: {marker} -->\n{body}<!-- /records -->\nend\n"


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows below the head."""
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_suites_by_hand(tmp_path: Path) -> None:
    """Ratios 2, 8 and 4: the geometric mean is 4. Another machine's record does not enter."""
    other = duel(f"{TRAINING} softcap=9.0", ratio=100.0, machine=CPU | {"cpu": "Other"},
                 utc="2026-11-01T00:00:00Z")  # fmt: skip
    late = {"utc": "2026-12-03T00:00:00Z"}
    write(tmp_path, [other, duel(ratio=2.0, **late), duel(f"{TRAINING} softcap=1.0", ratio=8.0),
                     duel(f"{TRAINING} softcap=2.0", ratio=4.0)])  # fmt: skip
    made = filled(block("made suites", "old\n"), tmp_path)
    assert rows(made) == [["where torch falls to its dense path", "3", "4.00x", "2.00x to 8.00x"]]
    assert "made.jsonl:2-4 (2026-12-01 to 2026-12-03; Made Up 9000 (avx2), 2 threads" in made
    assert "old" not in made
    assert made.endswith("<!-- /records -->\nend\n")
    assert rows(filled(block("made suites on Other"), tmp_path))[0][2] == "100x"


def test_the_newest_machine_of_those_that_have_the_suite(tmp_path: Path) -> None:
    """A later record of another suite, on another machine, does not make the table empty."""
    late = duel(suite="tiny", machine=CPU | {"cpu": "Other"}, utc="2026-12-09T00:00:00Z")
    write(tmp_path, [duel(ratio=2.0), late])
    assert rows(filled(block("made cases c"), tmp_path))[0][3] == "2.00x (2.00 to 2.00)"


def test_cases_by_hand(tmp_path: Path) -> None:
    few = duel(f"{TRAINING} dropout=0.1", ratio=3.0, rounds=3)
    write(tmp_path, [duel(ratio=2.0), few, duel(ratio=9.0, suite="d")])
    first, second = rows(filled(block("made cases c"), tmp_path))
    assert first == ["`as it is`", "2.29 ms", "1.15 ms", "2.00x (2.00 to 2.00)", "1 GiB", "64 MiB"]
    assert second[0] == "`dropout=0.1`"
    assert second[3] == "3.00x (3 rounds)"


def test_cases_on_one_thread_and_on_two(tmp_path: Path) -> None:
    write(tmp_path, [duel(ratio=2.0), duel(ratio=3.0, machine=CPU | {"threads": 1})])
    found = {row[0]: row[3] for row in rows(filled(block("made cases c"), tmp_path))}
    assert found == {"`as it is`, threads: 2": "2.00x (2.00 to 2.00)",
                     "`as it is`, threads: 1": "3.00x (3.00 to 3.00)"}  # fmt: skip


def test_against_others(tmp_path: Path) -> None:
    entries = [contestant("nosquare", [10.0] * 8), contestant("torch", [40.0] * 8),
               contestant("fa3", [5.0] * 8)]  # fmt: skip
    write(tmp_path, [bench(TRAINING, entries)])
    for who, ratio in (("", "4.00x"), (" against fa3", "0.50x"), (" against best", "0.50x"),
                       (" against nobody", "-")):  # fmt: skip
        assert rows(filled(block(f"made suites{who}"), tmp_path))[0][2] == ratio


def test_verify_table(tmp_path: Path) -> None:
    write(tmp_path, [verified("torch:default", {"a": "pass", "b": "fail", "c": "refused"})])
    made = filled(block("made verify"), tmp_path)
    assert rows(made) == [["`torch:default`", "cpu", "1", "1", "0", "1"]]
    assert "From docs/records/made.jsonl:1 (2026-12-01; Made Up 9000 (avx2), 2 threads" in made


# ---- the check ----


def test_a_changed_number_is_found(tmp_path: Path) -> None:
    write(tmp_path, [duel()])
    right = filled(block("made suites"), tmp_path)
    assert faults("R.md", right, tmp_path) == []
    (fault,) = faults("R.md", right.replace("2.00x |", "2.50x |", 1), tmp_path)
    assert fault.startswith("R.md, table `made suites`, line 6: it says\n    | where torch")
    assert "2.50x" in fault.splitlines()[1]
    assert "2.00x" in fault.splitlines()[3]
    write(tmp_path, [duel(ratio=2.2)])  # the records moved on, the table did not
    assert faults("R.md", right, tmp_path)
    assert faults("R.md", block("made suites"), tmp_path)[0].count("(nothing)") == 1


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("up to 3.5x faster", "3.5x"),
        ("takes 20 us a call", "20 us"),
        ("in 1,024 MiB of memory", "1,024 MiB"),
        ("at 612 TF/s", "612 TF/s"),
        ("at 612 TFLOP/s", "612 TFLOP/s"),
        ("an N x N array, 4096 tokens, 2^-17, 3.10 to 3.13", None),
        ("`2 ms` is code", None),
        ("```\n2 ms\n```", None),
        ("<!-- records: a suites -->\n2 ms\n<!-- /records -->", None),
    ],
)
def test_numbers_outside_the_tables(line: str, found: str | None) -> None:
    wrong = unrecorded("R.md", f"first\n{line}\n")
    assert wrong == ([] if found is None else [f"R.md:2 says {found!r}, which no record gives"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (block("made tables"), "This marker names no table of records."),
        (block("made cases"), "This marker names no table of records."),
        (block("made suites of c"), "This marker names no table of records."),
        (block("made aims against best"), "This marker names no table of records."),
        (block("gone suites"), "There are no records of this name."),
        (block("made cases q"), "No record is what this marker asks for."),
        (block("made suites on Nowhere"), "No record is what this marker asks for."),
        (block("made verify"), "No record of this file is of kind verify."),
        ("<!-- records: made suites -->\n", "A marker of records is open without an end"),
        ("<!-- /records -->\n", "A marker of records is open without an end"),
    ],
)
def test_bad_marker(tmp_path: Path, text: str, sentence: str) -> None:
    write(tmp_path, [duel()])
    with pytest.raises(ns.ArgumentError) as caught:
        filled(text, tmp_path)
    assert caught.value.sentence.startswith(sentence)
    assert "\n  Try: " in str(caught.value)


def test_marker_grammar() -> None:
    assert Wanted.parse("cuda cases prefill,decode against best on NVIDIA H200") == Wanted(
        "cuda", "cases", ("prefill", "decode"), "best", "NVIDIA H200"
    )


def test_command_makes_and_checks(tmp_path: Path) -> None:
    records = tmp_path / "docs" / "records"
    records.mkdir(parents=True)
    write(records, [duel()])
    readme, log = tmp_path / "README.md", tmp_path / "docs" / "log.md"
    readme.write_text(block("made suites"))
    log.write_text("in 3 ms, dated prose\n")

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["report", "--readme", "--records", str(records), *words])
        return result.exit_code, result.output

    code, text = run("--check")
    assert code == 1
    assert text.startswith("README.md: 1 table, 1 difference\n  README.md, table `made suites`")
    assert text.endswith("Try: nosquare report --readme, which makes the tables anew.\n")
    assert run() == (0, "README.md: 1 table, made anew\n")
    assert "2.00x" in readme.read_text()
    assert run("--check") == (0, "README.md: 1 table, as the records give\n")
    assert run() == (0, "README.md: 1 table, as it was\n")
    readme.write_text(readme.read_text() + "\nand 9x faster\n")
    code, text = run("--check")
    assert code == 1
    assert "README.md:" in text
    assert re.search(r"says '9x', which no record gives", text)
    readme.unlink()
    log.unlink()
    result = CliRunner().invoke(app, ["report", "--readme", "--records", str(records)])
    assert isinstance(result.exception, ns.ArgumentError)
    assert result.exception.sentence == "There is no README.md above these records."
