"""The conformance kit on an NVIDIA GPU: nosquare passes, and a lost device costs one check."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nosquare.verify import verify

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("style", ["sdpa", "flash_attn"])
def test_nosquare_keeps_its_contract_there(style: str) -> None:
    result = verify("nosquare", style, device="cuda")
    assert result.ok, result
    assert not [row for row in result.rows if row.word == "refused"]
    # batch_invariant=True is an option of ns.attention that neither signature has
    assert {r.check for r in result.rows if r.word == "convention"} <= {"batch-invariance"}
    assert result.of("big-offsets").verdict == result.of("long-square").verdict == "pass"


LOSES_THE_DEVICE = """
import torch
import nosquare as ns

def attend(q, k, v, is_causal=False, scale=None):
    if is_causal:
        torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")]  # a device-side assertion
    return ns.sdpa(q, k, v, scale=scale)
"""


def test_a_lost_device_costs_one_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loses.py").write_text(LOSES_THE_DEVICE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    only = ["odd-sizes", "causal-square", "key-tails"]
    result = verify("loses:attend", device="cuda", dtypes=["float32"], only=only)
    assert [row.word for row in result.rows] == ["pass", "fail", "pass"], result.rows
    assert "CUDA error" in result.of("causal-square").words
