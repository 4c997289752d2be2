"""Peak memory of forward and backward, each in a process of its own: it grows as N, not as N
squared."""

from __future__ import annotations

import sys

import pytest

import memory

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="peaks are read from /proc"
)

TRAIN = """
q = torch.randn(1, {hq}, n, {d}, requires_grad=True)
k = torch.randn(1, {hk}, n, {d}, requires_grad=True)
v = torch.randn(1, {hk}, n, {e}, requires_grad=True)
bias = torch.zeros(1, n, requires_grad=True)
ns.attention(q, k, v, {options}).sum().backward()
assert q.grad.isfinite().all()
"""

# sizes are small where every pair is computed; with a window, 32,768 rows are quick
CASES = {
    "window": (dict(mask="ns.Window(256, 0)"), (8192, 16384, 32768)),
    "causal": (dict(mask="ns.Causal()"), (3072, 6144)),
    "lengths": (dict(mask="ns.Lengths(torch.tensor([n // 4]))"), (8192, 16384)),
    "dropout": (
        dict(mask="ns.Window(256, 0)", dropout="ns.Dropout(0.1, 3)"),
        (8192, 16384, 32768),
    ),
    "bias(1,N)": (dict(mask="ns.Window(256, 0)", bias="bias"), (8192, 16384, 32768)),
    "grouped, E != D": (dict(mask="ns.Window(256, 0)", softcap="3.0"), (8192, 16384)),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_grows_as_n(case: str) -> None:
    """Tiles are of one size, the rest is proportional to N: each doubling adds at most 2.3
    times what the one before added (a square would add four times), and the whole stays under
    the bytes that the arrays of size N need."""
    words, sizes = CASES[case]
    options = ", ".join(f"{n}={x}" for n, x in words.items())
    grouped = case.startswith("grouped")
    hq, hk, d, e = (4, 1, 8, 16) if grouped else (1, 1, 16, 16)
    body = TRAIN.format(hq=hq, hk=hk, d=d, e=e, options=options)
    peaks = memory.peaks(body, *sizes)
    tiles = 48 << 20  # score tiles of at most 8 MiB: scores, dp, p, the mask, dropout's bits, ...
    for n, peak in zip(sizes, peaks, strict=True):
        # q, k, v, o, their gradients, do, float32 sums of gradients and temporaries of one of them
        arrays = 4 * n * (4 * hq * d + 4 * hq * e + 6 * hk * (d + e))
        assert peak < tiles + 2 * arrays
        assert peak < 4 * n * n // 2 + tiles  # the square alone would be over
    if len(peaks) == 3:
        assert peaks[2] - peaks[1] < 2.3 * max(peaks[1] - peaks[0], 4 << 20)


def test_the_meter_sees_a_square() -> None:
    body = "q = torch.randn(1, 1, n, 8)\n(q @ q.mT).softmax(-1) @ q"
    (peak,) = memory.peaks(body, 4096)
    assert peak > 2 * 4 * 4096 * 4096 - (1 << 20)


def test_a_layer_with_dropout_fits_in_150_mib() -> None:
    """N = 4,096, 8 heads, D = 64, forward and backward; torch's own path needs 1.5 GiB for it."""
    body = """
x = [torch.randn(1, 8, n, 64, requires_grad=True) for _ in range(3)]
ns.attention(*x, mask=ns.Causal(), dropout=ns.Dropout(0.1, 3)).sum().backward()
"""
    (peak,) = memory.peaks(body, 4096)
    assert peak < 150 << 20
