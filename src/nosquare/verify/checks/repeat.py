"""The same call again: the same bits, forward always, backward where determinism is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..registry import check
from ..subject import Ask, gradients
from ..trial import Case, Trial, leaves
from ..truth import off
from ..verdict import CONVENTION, FAIL, PASS, Finding

TIMES = 4


@check("forward-repeats", "repeat", "Forward repeats bit by bit.", "Dao-AILab/flash-attention#414")
def forward(t: Trial) -> Finding:
    for causal in (False, True):
        for m, n in ((1, 1000), (300, 300)):
            x = t.qkv(m, n, 64, b=2, heads=(4, 4))
            runs = [t.attend(x, Ask(causal=causal)) for _ in range(TIMES)]
            worst = max(off(run, runs[0]) for run in runs[1:])
            if worst != 0.0:
                where = f"M={m} N={n}{' causal' * causal}"
                return Finding(FAIL, f"{where}: runs differ by {worst:.1e}", worst, 0.0)
    return Finding(PASS, f"{TIMES} runs")


@contextmanager
def _deterministic() -> Iterator[None]:
    """torch's deterministic mode, inside; fresh memory is left as it is."""
    was = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warns)


@check("backward-repeats", "repeat",
       "Backward repeats bit by bit in torch's deterministic mode, or with deterministic=True.",
       "Dao-AILab/flash-attention#349, Dao-AILab/flash-attention#2244")  # fmt: skip
def backward(t: Trial) -> Finding:
    asked = "deterministic" in (t.subject.parameters or ())
    ask = Ask(causal=True, words=(("deterministic", True),) if asked else ())
    with _deterministic():
        runs = []
        for _ in range(TIMES):
            x = leaves(t.qkv(300, 300, 64, b=2, heads=(4, 2)))
            o = t.attend(x, ask)
            runs.append(gradients(o, x, t.rnd(*o.shape, seed=9)))
    for name, first, *others in zip(("dq", "dk", "dv"), *runs, strict=True):
        worst = max(off(other, first) for other in others)
        if worst != 0.0:
            words = f"M=N=300 causal Hq=4 Hk=2: runs of {name} differ by {worst:.1e}"
            return Finding(FAIL, words, worst, 0.0)
    return Finding(PASS, f"{TIMES} runs")


@check("batch-invariance", "repeat", "A row's bits do not depend on what else is in the batch.",
       "Dao-AILab/flash-attention#1897, flashinfer-ai/flashinfer#1675")  # fmt: skip
def batch_invariance(t: Trial) -> Finding:
    for m, n in ((1, 1000), (100, 333)):
        q, k, v = t.qkv(m, n, 64, b=5, heads=(4, 4))
        whole = t.attend((q, k, v))
        alone = torch.cat([t.attend((q[b : b + 1], k[b : b + 1], v[b : b + 1])) for b in range(5)])
        if not torch.equal(whole, alone):
            right = t.agree([Case(f"B=5 M={m} N={n}", (q, k, v))])
            words = f"bits depend on the batch, B=5 M={m} N={n}: by {off(whole, alone):.1e}"
            return right if right.verdict == FAIL else Finding(CONVENTION, words)
    return Finding(PASS)
