"""Records: the schema language, reading old lines, and what is told about a machine."""

from __future__ import annotations

import getpass
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import house
import nosquare as ns
from nosquare import records
from nosquare.bench import record
from nosquare.records import HEAD, NUMBER, TRUTH, WHOLE, WORDS, Maybe, faults

CARD = torch.device("cuda", 0)
OLD = house.ROOT / "tests" / "records_of_version_1.jsonl"


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (1, WHOLE),
        (1, NUMBER),
        (1.5, NUMBER),
        ("x", WORDS),
        (True, TRUTH),
        ([], [WHOLE]),
        ([1, 2], [WHOLE]),
        ({"a": 1, "b": []}, {"a": WHOLE, "b": [WORDS]}),
        (None, Maybe(WHOLE)),
        (3, Maybe(WHOLE)),
        ({"a": None}, Maybe({"a": Maybe(WORDS)})),
    ],
)
def test_what_fits(value: Any, schema: Any) -> None:
    assert faults(value, schema) == []


@pytest.mark.parametrize(
    ("value", "schema", "fault"),
    [
        (True, WHOLE, "record is bool True"),
        (1.0, WHOLE, "record is float 1.0"),
        (math.nan, NUMBER, "record is float nan"),
        (math.inf, NUMBER, "record is float inf"),
        (None, WORDS, "record is NoneType None"),
        ("x", [WORDS], "record is no list"),
        ([1, "x"], [WHOLE], "record[1] is str 'x'"),
        ([], {"a": WHOLE}, "record is no object"),
        ({}, {"a": WHOLE}, "record.a is missing"),
        ({"a": 1, "b": 2}, {"a": WHOLE}, "record.b is unknown"),
        ("x", Maybe(WHOLE), "record is str 'x'"),
        ({"a": {"b": [None]}}, {"a": Maybe({"b": [WHOLE]})}, "record.a.b[0] is NoneType None"),
    ],
)
def test_what_does_not(value: Any, schema: Any, fault: str) -> None:
    assert faults(value, schema) == [fault]


def head(**more: Any) -> dict[str, Any]:
    return {**records.begin("fit", 1, records.surroundings()), **more}


def test_round_trip(tmp_path: Path) -> None:
    schema = HEAD | {"n": WHOLE}
    first, second = head(n=1), head(n=2)
    path = records.append(tmp_path / "new", "try", [first], schema)
    assert records.append(tmp_path / "new", "try", [second], schema) == path
    assert path.name == "try.jsonl"
    assert records.read(path) == [first, second]
    assert records.read(str(path)) == [first, second]


def test_a_bad_record_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ns.ArgumentError) as error:
        records.append(tmp_path, "try", [head(n=1), head(n="1")], HEAD | {"n": WHOLE})
    assert str(error.value) == (
        "This record does not keep the schema.\n  kind    fit\n  faults  record.n is str '1'\n"
        "  Try: the SCHEMA of its kind says what belongs into it."
    )
    assert not list(tmp_path.iterdir())


def test_lines_of_version_1_are_completed() -> None:
    """A line of each suite of the first benchmark is a benchmark's record now."""
    old = records.read(OLD)
    assert [line["schema"] for line in old] == [1] * 5
    for line in old:
        assert faults(line, record.SCHEMA) == []
        assert (line["kind"], line["device"], line["machine"]["gpu"]) == ("bench", "cpu", None)


def test_completing_adds_and_changes_nothing_else(tmp_path: Path) -> None:
    raw = json.loads(OLD.read_text().splitlines()[0])
    (tmp_path / "one.jsonl").write_text(json.dumps(raw) + "\n\n")
    (line,) = records.read(tmp_path / "one.jsonl")

    def kept(was: Any, now: Any) -> bool:
        if isinstance(was, dict):
            return all(kept(value, now[name]) for name, value in was.items())
        if isinstance(was, list):
            return len(was) == len(now) and all(map(kept, was, now))
        return bool(was == now)

    assert kept(raw, line)
    assert not kept(raw, line | {"pairs": 0})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": 1, "ut', "no JSON"),
        ("[1]", "no object with the fields schema, utc, machine, software"),
        ('{"schema": 1}', "no object with the fields"),
    ],
)
def test_a_line_that_is_no_record(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(head()) + "\n" + text + "\n")
    with pytest.raises(ns.ArgumentError, match="A line of this file is no record") as error:
        records.read(path)
    assert error.value.values["line"] == 2
    assert words in str(error.value.values["because"])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ns.ArgumentError, match="These records cannot be read") as error:
        records.read(tmp_path / "none.jsonl")
    assert error.value.values["because"] == "No such file or directory"
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ns.ArgumentError, match="it is not text"):
        records.read(tmp_path / "binary.jsonl")


def test_surroundings_tell_no_place() -> None:
    around = records.surroundings()
    assert faults(around, {"machine": records.MACHINE, "software": records.SOFTWARE}) == []
    assert around["machine"]["gpu"] is None
    text = json.dumps(around)
    assert not house.machine_names("record", text)
    words = {x.strip('"{}[]') for x in text.replace(",", " ").replace(":", " ").split()}
    assert not words & {platform.node(), getpass.getuser()}
    assert str(Path.home()) not in text


def test_folder_is_the_trees_or_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert records.folder() == house.ROOT / "docs" / "records"
    monkeypatch.setattr(records, "_root", lambda: tmp_path)
    assert records.folder() == Path("docs/records")


def test_what_is_not_finite() -> None:
    assert records.finite(math.nan) == records.finite(-math.inf) == 1.7e308
    assert records.finite(2.5) == 2.5
    assert records.finite("nan") == "nan"


def test_a_cards_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nvidia-smi says, and None for each word it does not know."""

    def says(program: str) -> None:
        command = [sys.executable, "-c", program]
        monkeypatch.setattr(records, "smi_command", lambda device, fields: command)

    fields = ("driver_version", "power.limit", "clocks.max.sm")
    says("print('580.159.04, 700.00, [N/A]')")
    assert records.nvidia_smi(CARD, fields) == ("580.159.04", "700.00", "[N/A]")
    fake = ns.device.Device("cuda", "H9", 3, 5, ("sm_90",))
    monkeypatch.setattr(records, "describe", lambda device: fake)
    card = records._gpu(CARD)
    assert faults(card, records.GPU) == []
    assert (card["driver"], card["power_limit_w"], card["max_sm_clock_mhz"]) == (
        "580.159.04",
        700.0,
        None,
    )
    for program in ("print('one, two')", "raise SystemExit(9)"):
        says(program)
        assert records.nvidia_smi(CARD, fields) is None
    monkeypatch.setattr(records, "smi_command", lambda device, fields: None)
    assert records._gpu(CARD)["driver"] is None


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert records.smi_command(CARD, ("power.draw",)) is None
