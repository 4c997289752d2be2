"""The demo's own parts: refusals, checks, the converted weights' row order, memory measurement.

The models themselves run in `nosquare demo --quick` and in tests/test_transformers.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nosquare import errors
from nosquare.demo import models, picture, run, worker


def test_missing_packages_are_named() -> None:
    with pytest.raises(errors.UnsupportedError, match=r"no-such-package[^$]*Try: pip install"):
        models.require(["json", "no_such_package"])


def test_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "require", lambda _: None)
    with pytest.raises(errors.ArgumentError, match=r"64 to 8192 tokens[^$]*Try: --context 4096"):
        run.demo(context=9000, out=tmp_path)


def test_failing_process_is_reported() -> None:
    job = {"job": "call", "attention": "nobody's", "contexts": [64]}
    with pytest.raises(
        errors.NosquareError, match=r"did not finish[^$]*KeyError[^$]*Try: a smaller"
    ):
        run._work(job, lambda *_: None)


def test_checks_can_fail() -> None:
    good = {"eager": 1e-5, "sdpa": 2e-5, "nosquare": 8e-5}
    assert run._accurate(good, "error")[0]
    assert not run._accurate({**good, "nosquare": 8.1e-5}, "error")[0]
    assert not run._accurate({**good, "nosquare": float("nan")}, "error")[0]
    results = {"eager": {"tokens": [1, 2]}, "nosquare": {"tokens": [1, 2]}}
    assert run._same_tokens(results, "eager", 2)[0]
    results["nosquare"]["tokens"] = [1, 3]
    assert not run._same_tokens(results, "eager", 2)[0]


def test_largest_gap_keeps_nan() -> None:
    nan = float("nan")
    assert run._largest_gap([1.0, 2.0], [1.5, 2.25]) == 0.5
    for bad in ([nan, 1.0], [1.0, nan]):
        assert run._largest_gap(bad, [1.0, 1.0]) != run._largest_gap(bad, [1.0, 1.0])


def test_rotary_rows() -> None:
    """Rows (a0 b0 a1 b1 ...) of a head, where (a, b) turn together, become a0 a1 ... b0 b1 ..."""
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    assert models._plain_rotary(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_attention64() -> None:
    """Blocks of rows give what torch's own float64 attention gives."""
    q = torch.randn(2, 6, 150, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 150, 8, dtype=torch.float64) for _ in range(2))
    keep = torch.arange(150)[None, :] < torch.tensor([[150], [70]])
    module = torch.nn.Module()
    for causal in (False, True):
        module.is_causal = causal  # type: ignore[assignment]
        seen = keep[:, None, None, :].expand(2, 1, 150, 150)
        seen = seen.tril() if causal else seen
        got, _ = worker.attention64(module, q, k, v, keep)
        want = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, enable_gqa=True
        )
        # both in float64: rounding alone, some tens of units in the last place
        assert (got.transpose(1, 2) - want).abs().max() < 1e-14


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's mark can be set back on Linux")
def test_peak_sees_what_was_freed() -> None:
    code = """
import json, torch
from nosquare.demo.worker import Peak
torch.ones(2**25); peak = Peak(); peak.start()
small = peak.bytes(); x = torch.ones(2**24); del x
print(json.dumps([small, peak.bytes(), peak.how]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    small, large, how = json.loads(done.stdout)
    if "set back" in how:
        assert small < 2**23, "the 128 MiB from before start() are not counted"
    assert large >= 0.99 * 2**26, "the 64 MiB that were freed again are counted"


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    console: Any = pytest.importorskip("rich.console").Console(width=90, record=True)
    curves = {name: {512: 2**20 * (i + 1), 1024: 2**22} for i, name in enumerate(run.CURVES)}
    whole = {"eager": 2**28, "sdpa": 2**27, "nosquare": 2**26}
    picture.draw(tmp_path / "memory.png", curves, whole, 1024, "note")
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    picture.bars(console, curves, [512, 1024])
    text = console.export_text()
    assert "1,024" in text
    assert "4.0" in text
    assert "nosquare" in text
