"""`nosquare bench train`: both begin alike and see the same text, losses fall, curves are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nosquare import records
from nosquare.bench import gpt, train
from nosquare.errors import ArgumentError
from nosquare.report.readme import filled

SIZE = gpt.Size(1, 32, 16, 48, 2)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of a run, smaller than any that the command makes."""
    folder = tmp_path_factory.mktemp("records")
    around = records.surroundings("cpu")
    for head in (16, 8):
        size = gpt.Size(1, 32, head, 48, 2)
        record = train._train(size, 24, torch.device("cpu"), around, lambda words: None)
        records.append(folder, "train", [record], train.SCHEMA)
    return folder


def test_contestants_begin_alike_and_see_the_same_text() -> None:
    runs = [train.Run(name, 3, SIZE, 4, torch.device("cpu")) for name in train.NAMES]
    weights = [list(run.model.state_dict().values()) for run in runs]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*(run.batches for run in runs), strict=True))
    other = train.Run("torch", 4, SIZE, 4, torch.device("cpu"))
    assert torch.equal(other.batches[0], runs[0].batches[0])
    assert not torch.equal(other.model.embed.weight, runs[0].model.embed.weight)
    held = gpt.batches(SIZE, 0, 1, held_out=True)[0]
    assert held.shape == (2, 49)
    assert bytes(gpt.text()[:16].tolist()).isascii()


def test_losses_fall_alike_and_are_kept(kept: Path) -> None:
    for record in records.read(kept / "train.jsonl"):
        assert [(r["name"], r["seed"]) for r in record["runs"]] == [
            ("nosquare", 0), ("torch", 0), ("nosquare", 1), ("torch", 1),
        ]  # fmt: skip
        for run in record["runs"]:
            assert len(run["losses"]) == len(run["steps_ms"]) + 1 == 24
            assert run["losses"][0] == pytest.approx(5.55, abs=0.2)  # of 256 bytes, all alike
            assert run["losses"][-1] < 5.4
            assert 2 < run["validation"] < 5.4
            assert run["step_bytes"] is None
            assert run["ran"]
        own, seeds = train.gaps(record["runs"])
        assert own < 1e-3 < seeds  # weights of their own


def test_equal_seeds_repeat() -> None:
    losses = []
    for _ in range(2):
        run = train.Run("nosquare", 1, SIZE, 6, torch.device("cpu"))
        run.block(6)
        losses.append([float(x) for x in run.losses])
    assert losses[0] == losses[1]


def test_gaps_are_of_the_last_third() -> None:
    def run(name: str, seed: int, *losses: float) -> dict[str, Any]:
        return {"name": name, "seed": seed, "losses": losses}

    runs = [
        run("nosquare", 0, 9, 9, 2.0), run("torch", 0, 5, 5, 2.5),
        run("nosquare", 1, 9, 9, 4.0), run("torch", 1, 5, 5, 4.1),
    ]  # fmt: skip
    own, seeds = train.gaps(runs)
    assert own == pytest.approx(0.3)
    assert seeds == pytest.approx(1.8)


def test_the_table_of_the_readme(kept: Path, tmp_path: Path) -> None:
    text = "<!-- records: train train -->\n<!-- /records -->\n"
    made = filled(text, kept)
    assert "| 8 | nosquare |" in made
    assert made.index("| 8 | torch |") < made.index("| 16 | nosquare |")
    assert "From docs/records/train.jsonl:2, 1 (" in made
    assert "Heads of 16: on other text the two differ by 0.000 and 0.000 from an equal" in made
    assert "Not measured yet" in filled(text, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"heads": "48"}, "do not fill the model"),
        ({"heads": "64,x"}, "widths of heads"),
        ({"steps": 1}, "at least two steps"),
        ({"device": "tpu"}, "needs a device"),
    ],
)
def test_what_cannot_be_trained(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as error:
        train.bench_train(**{"device": "cpu", "quick": True, "keep": False, **words})
    assert "Try:" in str(error.value)


def test_no_such_contestant() -> None:
    with pytest.raises(ArgumentError, match="no such contestant"):
        gpt.attend_by("jax")


def test_the_command_says_what_came_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "gaps", lambda runs: (0.2, 0.1))
    assert train.bench_train("cpu", "64", 3, quick=True, keep=False) == 1
    out = capsys.readouterr().out
    assert "Heads of 64" in out
    assert "FAILED" in out
