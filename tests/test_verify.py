"""The conformance kit: right controls, the truth, how a function is asked, crashes.

That each check can fail is shown in test_verify_controls.py.
"""

from __future__ import annotations

import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nosquare as ns
from nosquare import oracle
from nosquare.verify import (
    GROUPS,
    Finding,
    Verdicts,
    checks,
    isolated,
    verify,
)
from nosquare.verify.subject import Ask, Inapplicable, Refusal, Subject
from nosquare.verify.target import subject_of
from nosquare.verify.truth import Options, dense, room

ANSWERED = [name for name, c in checks().items() if c.group != "compile"]


# ---- right controls ----


@cache
def found(style: str, dtype: str, *only: str) -> Verdicts:
    return verify("nosquare", style, dtypes=[dtype], only=only or None, isolate=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("style", ["sdpa", "flash_attn"])
def test_nosquare_keeps_its_contract(style: str, dtype: str) -> None:
    result = found(style, dtype)
    assert result.ok, result
    other = {r.check: r.finding for r in result.rows if r.word not in ("pass", "not applicable")}
    # with several threads; batch_invariant=True is an option that neither signature has
    assert set(other) <= {"batch-invariance"}, other
    assert [row.check for row in result.rows] == ANSWERED
    absent = {row.check for row in result.rows if row.word == "not applicable"}
    absent -= {"float32-is-ieee", "error-of-the-formula"}
    card = {"long-square", "big-offsets"}
    windows = {"window-edges", "window-and-causal", "empty-rows-causal", "softcap"}
    normaliser = {"lse-value", "lse-empty-rows", "lse-under-dropout"}
    masks = {"mask-polarity", "mask-and-causal", "mask-shapes", "mask-of-one-axis", "batch-axes",
             "empty-rows-bool", "empty-rows-inf", "all-rows-empty", "rows-of-finfo-min",
             "block-of-finfo-min", "bias", "bias-gradient", "gradients-masked"}  # fmt: skip
    assert absent == card | (windows | normaliser if style == "sdpa" else masks)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("style", ["sdpa", "flash_attn"])
def test_the_other_dtypes_too(style: str, dtype: str) -> None:
    light = [g for g in GROUPS if g not in ("compile", "dropout", "extent", "repeat")]
    result = found(style, dtype, *light)
    assert {row.word for row in result.rows} == {"pass", "not applicable"}, result.rows


def test_a_compiled_call_is_asked_only_on_request() -> None:
    assert "compiled-lengths" not in ANSWERED
    result = verify(ns.sdpa, "sdpa", dtypes=["float32"], only=["compile"])
    assert [(row.check, row.word) for row in result.rows] == [("compiled-lengths", "pass")]


def test_generators_and_switches_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    verify(ns.sdpa, "sdpa", dtypes=["float32"], only=["dropout", "repeat", "precision"])
    assert torch.equal(torch.rand(2), want)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.fp32_precision == "none"


# ---- the truth ----


def test_the_truth_by_hand() -> None:
    """The seeds' example: scores 0, 0, ln 2, ln 2, values 0, 0, 10, 10: o = 20/3, lse = ln 6."""
    q, k = torch.ones(1, 1, 1), torch.tensor([0.0, 0.0, 2.0, 2.0]).clamp(min=1).log()[None, :, None]
    v = torch.tensor([0.0, 0.0, 10.0, 10.0])[None, :, None]
    found = dense(q.double(), k.double(), v.double())
    assert float(found.o) == pytest.approx(20 / 3, rel=1e-7)  # ln 2 was rounded to float32
    assert float(found.lse) == pytest.approx(torch.tensor(6.0).log().item(), rel=1e-6)
    half = dense(q, k, v, Options(keep=torch.tensor([True, False, True, False])))
    assert float(half.o) == pytest.approx(20 / 3, rel=1e-6)
    nothing = dense(q, k, v, Options(keep=torch.zeros(4, dtype=torch.bool)))
    assert float(nothing.o) == 0.0
    assert float(nothing.lse) == -torch.inf


def test_the_truth_is_that_of_the_oracle() -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, n, 8, generator=g).double() for h, n in ((4, 5), (2, 7), (2, 7)))
    want = oracle.attention(q, k, v, ns.Causal())
    got = dense(q, k, v, Options(torch.ones(5, 7, dtype=torch.bool).tril(2)))
    torch.testing.assert_close(got.o, want.o, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-14, atol=1e-14)


def test_room_is_what_its_docstring_says() -> None:
    assert room(torch.float32, 1e-3, 16, 2.0, 5.0) == pytest.approx(
        3e-3 + (4 * 2**-20 + (4 + 8) * 2**-24) * 5
    )
    assert room(torch.bfloat16, 0.0, 16, 0.0, 1.0) == pytest.approx(4 * 2**-8 + 4 * 2**-24)
    assert room(torch.float64, 2.0**-20, 0, 0.0, 1.0) == pytest.approx(3 * 2**-49 + 4 * 2**-53)
    assert room(torch.float16, torch.inf, 0, 0.0, 1.0) == pytest.approx(4 * 2**-11)


# ---- how a function is asked ----


def full(q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: bool = False) -> Any:
    return ns.sdpa(q, k, v, attn_mask=attn_mask, is_causal=is_causal)


def test_a_clear_error_is_a_refusal_and_a_breakdown_is_not() -> None:
    def refuses(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        if is_causal:
            raise NotImplementedError("no causal\n  mask here")
        return ns.sdpa(q, k, v)

    def breaks(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        if is_causal:
            raise RuntimeError("CUDA error: misaligned address")
        return ns.sdpa(q, k, v)

    def word(function: Any) -> Finding:
        return (
            verify(function, "sdpa", dtypes=["float32"], only=["causal-rectangle"]).rows[0].finding
        )

    assert word(refuses) == Finding("refused", "no causal mask here")
    assert word(breaks) == Finding("fail", "crash: RuntimeError: CUDA error: misaligned address")


def test_what_was_warned_is_part_of_a_refusal() -> None:
    subject = subject_of("torch:flash")
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(Refusal, match=r"No available kernel.*\(.*dropout.*\)"):
        subject.attend(x, x, x, Ask(dropout=0.1))


def test_a_signature_without_the_words_is_not_asked() -> None:
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(Inapplicable, match="its signature has no dropout_p"):
        Subject(full, "sdpa", "full").attend(x, x, x, Ask(dropout=0.1))


def test_who_answers_nothing_is_not_ok() -> None:
    def declines(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
        raise NotImplementedError("only on Tuesdays")

    result = verify(declines, only=["rows", "padding"])
    assert {(row.word, row.finding.words) for row in result.rows} == {
        ("refused", "only on Tuesdays")
    }
    assert not result.ok
    assert not result.failed


def test_no_tensor_is_a_crash() -> None:
    result = verify(
        lambda q, k, v, is_causal=False: None, only=["causal-square"], dtypes=["float32"]
    )
    words = "crash: TypeError: it returned NoneType, no tensor"
    assert result.rows[0].finding == Finding("fail", words)


# ---- a process of its own ----

HAZARDS = """
    import os
    import nosquare as ns

    def dies(q, k, v, attn_mask=None, is_causal=False, scale=None):
        print("this goes to stderr")
        if is_causal:
            os.kill(os.getpid(), 11)
        return ns.sdpa(q, k, v, attn_mask=attn_mask, scale=scale)
"""


@pytest.fixture
def hazards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder."""
    (tmp_path / "hazards.py").write_text(textwrap.dedent(HAZARDS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "hazards", raising=False)
    return "hazards"


def test_a_crash_costs_one_check_and_the_others_say_what_they_say_here(hazards: str) -> None:
    only = ["odd-sizes", "causal-square", "mask-shapes", "rows"]
    apart = verify(f"{hazards}:dies", dtypes=["float32"], only=only)
    here = verify(ns.sdpa, "sdpa", dtypes=["float32"], only=only)
    assert apart.of("causal-square") == Finding(
        "fail", "the process was killed by SIGSEGV: this goes to stderr"
    )
    assert [r for r in apart.rows if r.check != "causal-square"] == [
        r for r in here.rows if r.check != "causal-square"
    ]


# Speaks worker.py's protocol, without torch: what happens to job 1 of those it gets.
STAND_IN = """
import json, os, sys, time
jobs = json.load(sys.stdin)["jobs"]
for n, (check, _) in enumerate(jobs):
    print(json.dumps({"begin": n}), flush=True)
    if check == "scale":
        HAPPENS
    print(json.dumps({"end": n, "finding": {"verdict": "pass", "words": check}}), flush=True)
"""


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        ("time.sleep(60)", "no answer within 1 s"),
        ("os._exit(7)", "the process ended with code 7"),
        ("os.write(2, b'first\\nlast\\n'); os._exit(3)", "the process ended with code 3: last"),
        ("os.kill(os.getpid(), 6)", "the process was killed by SIGABRT"),
    ],
)
def test_what_happened_to_a_process(
    happens: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "LIMIT_S", 1)
    monkeypatch.setattr(isolated, "WORKER", ("-c", STAND_IN.replace("HAPPENS", happens)))
    said: list[int] = []
    jobs = [("bias", "float32"), ("scale", "float32"), ("softcap", "float32")]
    answers = isolated.findings("nosquare", "sdpa", "cpu", jobs, said.append)
    assert answers == [Finding("pass", "bias"), Finding("fail", words), Finding("pass", "softcap")]
    assert said == [0, 1, 2]


def test_a_process_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "WORKER", ("-c", "raise SystemExit('no torch here')"))
    with pytest.raises(ns.UnsupportedError) as caught:
        isolated.findings("nosquare", "sdpa", "cpu", [("bias", "float32")], lambda n: None)
    assert str(caught.value) == (
        "The process for the checks did not start.\n"
        "  target   nosquare\n"
        "  it said  no torch here\n"
        "  Try: isolate=False, to see the whole error."
    )
