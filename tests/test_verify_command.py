"""`nosquare verify` as people meet it: bad input, tables, records, the command."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import nosquare as ns
from nosquare import records
from nosquare.cli import app
from nosquare.verify import VERDICTS, Finding, Verdict, Verdicts, checks, command, show, verify
from refusals import listed, raises

# ---- bad input ----


@pytest.fixture
def hazards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name in the current folder, with what is no attention."""
    source = """
number = 5
def takes_two(q, k): ...
def nameless(a, b, c): ...
def like_sdpa(q, k, v, is_causal=False): ...
"""
    (tmp_path / "hazards.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "hazards", raising=False)


ERRORS = """
>>> verify("torch:fast")
ArgumentError: The module has nothing of that name.
  target   torch:fast
  missing  fast
  Try: torch:flash.

>>> verify("hazards:attend")
ArgumentError: The module has nothing of that name.
  target   hazards:attend
  missing  attend
  Try: hazards:like_sdpa, or hazards:nameless, or hazards:takes_two.

>>> verify("no_such_module:f")
ArgumentError: The module of the target cannot be imported.
  module   no_such_module
  because  ModuleNotFoundError: No module named 'no_such_module'
  Try: python -c 'import no_such_module' here; the current folder is searched first.

>>> verify("sdpa")
ArgumentError: A target is one of ours by name, or a function as package.module:function.
  target  'sdpa'
  ours    torch:default, torch:math, torch:flash, torch:efficient, torch:cudnn, nosquare, nosquare:<backend>, fa3
  Try: nosquare verify torch:math, or nosquare verify mypackage.attention:attend.

>>> verify("hazards:number")
ArgumentError: The target is not a function.
  target  hazards:number
  is      int
  Try: the name of a callable that takes q, k, v.

>>> verify("hazards:takes_two")
ArgumentError: The target does not take q, k and v.
  target      hazards:takes_two
  parameters  k, q
  Try: a function with the signature of SDPA or of flash_attn_func.

>>> verify("hazards:nameless")
ArgumentError: It cannot be told whether the target has SDPA's signature or flash_attn's.
  target      hazards:nameless
  parameters  a, b, c
  Try: --style sdpa or --style flash_attn.

>>> verify("torch:math", "flash")
ArgumentError: There is no such style of signature.
  style   'flash'
  styles  sdpa, flash_attn
  Try: --style sdpa for (q, k, v, attn_mask, ...), --style flash_attn for (q, k, v, causal, ...) with tokens before heads.

>>> verify("torch:math", "flash_attn")
ArgumentError: The target has the signature of another style.
  target     torch:math
  its style  sdpa
  style      flash_attn
  Try: --style sdpa, or no --style.

>>> verify("hazards:like_sdpa", "flash_attn")
ArgumentError: The target has the signature of another style.
  target     hazards:like_sdpa
  its style  sdpa
  style      flash_attn
  Try: --style sdpa, or no --style.

>>> verify("nosquare:fastest")
ArgumentError: There is no backend of that name.
  backend   'fastest'
  backends  gluon_sm90, llvm_cpu, triton_any, torch_fused, torch_any
  Try: backend=None lets nosquare choose; `nosquare doctor` says what runs here.

>>> verify("fa3")
UnsupportedError: flash_attn 3's forward is not installed here.
  module   fa3_fwd_interface
  because  No module named 'fa3_fwd_interface'
  Try: package.module:flash_attn_func of another build, with --style flash_attn.

>>> verify("torch:math", device="tpu")
ArgumentError: The checks cannot run on this device.
  device  'tpu'
  here    cpu, no CUDA device that torch sees
  Try: --device cpu.

>>> verify("torch:math", device="cuda")
ArgumentError: The checks cannot run on this device.
  device  'cuda'
  here    cpu, no CUDA device that torch sees
  Try: --device cpu.

>>> verify("torch:math", dtypes=["float8"])
ArgumentError: Attention has no such dtype.
  dtype   'float8'
  dtypes  float64, float32, bfloat16, float16
  Try: --dtype float32,bfloat16.

>>> verify("torch:math", only=["tail", "rows"])
ArgumentError: There is no such group of checks, and no such check.
  given   'tail'
  groups  shapes, alignment, rows, padding, heads, score, lse, gradients, dropout, repeat, precision, tails, extent, derivatives, compile
  Try: one of the groups, or a check that `nosquare verify --list` names.

>>> verify(ns.sdpa, "sdpa", isolate=True)
ArgumentError: Another process can only find a function by its name.
  function  sdpa
  Try: isolate=False, or the name: verify('package.module:function', isolate=True).

>>> command.verify_command([])
ArgumentError: There is nothing to verify.
  Try: nosquare verify torch:default, or nosquare verify --list for the checks.

>>> command.verify_command(["nosquare"], jobs=0)
ArgumentError: At least one target is examined at a time.
  jobs  0
  Try: --jobs 1.
"""  # noqa: E501


@pytest.mark.parametrize(("call", "expected"), listed(ERRORS))
@pytest.mark.usefixtures("hazards")
def test_bad_input(call: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    raises(call, expected, {"verify": verify, "ns": ns, "command": command})


# ---- what people see ----

NO_DROPOUT = Finding("refused", "no dropout at all in this kernel, sorry")
ROWS = [
    ("odd-sizes", "shapes", "float32", Finding("pass", "o: error 1, bound 4", 1.0, 4.0)),
    ("odd-sizes", "shapes", "bfloat16", Finding("pass", "o: error 3, bound 4", 3.0, 4.0)),
    ("causal-rectangle", "alignment", "float32", Finding("convention", "bottom right")),
    ("causal-rectangle", "alignment", "bfloat16", Finding("convention", "bottom right")),
    ("window-edges", "alignment", "float32", Finding("not applicable", "it has no window")),
    ("window-edges", "alignment", "bfloat16", Finding("not applicable", "it has no window")),
    ("dropout-rate", "dropout", "float32", NO_DROPOUT),
    ("dropout-rate", "dropout", "bfloat16", NO_DROPOUT),
    ("dropout-scale", "dropout", "float32", NO_DROPOUT),
    ("dropout-scale", "dropout", "bfloat16", NO_DROPOUT),
    ("float32-is-ieee", "precision", "float32", Finding("fail", "M=128: o is off", 1.0, 0.5)),
    ("float32-is-ieee", "precision", "bfloat16", Finding("not applicable", "about float32")),
    ("key-tails", "tails", "float32", Finding("pass", "exact", 0.0, 1.0)),
    ("key-tails", "tails", "bfloat16", Finding("fail", "M=5 N=17: o holds NaN", torch.nan, 0.1)),
]  # fmt: skip


def example(name: str = "a.b:f", rows: Any = ROWS) -> Verdicts:
    return Verdicts(name, "sdpa", "cpu", ("float32", "bfloat16"), [Verdict(*row) for row in rows])


def printed(function: Any, *x: Any) -> str:
    console = Console(width=80, highlight=False)
    with console.capture() as text:
        function(console, *x)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


TABLE = """
a.b:f  sdpa signature, cpu, float32 and bfloat16

shapes and strides
  odd-sizes               pass        error at most 0.75 of its bound

alignment of causal masks and windows
  causal-rectangle        convention  bottom right
  window-edges            -           it has no window

dropout
  dropout-rate            refused     no dropout at all in this kernel, sorry
  dropout-scale           refused     no dropout at all in this kernel, sorry

precision
  float32-is-ieee         fail        float32: M=128: o is off

sizes around those of tiles
  key-tails               pass        float32: exact
                          fail        bfloat16: M=5 N=17: o holds NaN

a.b:f: 3 pass, 2 fail, 2 convention, 4 refused, 3 not applicable"""


def test_the_table() -> None:
    assert printed(show.show, example()) == TABLE
    long = [(*row[:3], Finding("refused", row[3].words * 2)) for row in ROWS[6:10]]
    text = printed(show.show, example("f", [*ROWS[:6], *long]))
    assert "  dropout-scale           refused     as above" in text


def test_a_dtype_that_is_not_answered_takes_one_line() -> None:
    rows = [(c, g, "float32", Finding("pass")) for c, g in (("bias", "score"), ("scale", "score"))]
    rows += [(c, g, "bfloat16", Finding("refused", "16 bits")) for c, g, *_ in rows]
    text = printed(show.show, example("f", rows))
    assert "bfloat16: not answered at all. 16 bits" in text
    assert text.count("refused") == 1  # in the summary


def test_targets_side_by_side() -> None:
    other = [("odd-sizes", "shapes", "float32", Finding("pass"))]
    text = printed(show.matrix, [example(), example("c.d:g", other)])
    assert text.splitlines()[2:5] == [
        "                 a.b:    c.d:",
        "                 f       g",
        "odd-sizes        pass    pass",
    ]
    assert "key-tails        FAIL    -" in text


def test_a_dtype_that_is_not_answered_at_all_hides_no_other() -> None:
    rows = [Verdict(name, "layout", dtype, Finding(word, words))
            for name in ("odd-sizes", "expanded-views")
            for dtype, word, words in (("float32", "refused", "no float32"),
                                       ("bfloat16", "pass", "exact"))]  # fmt: skip
    half = Verdicts("a:b", "sdpa", "cpu", ("float32", "bfloat16"), rows)
    lines = show.markdown([half]).splitlines()
    assert lines[0] == "| check | `a:b` (bfloat16) |"
    assert lines[2:4] == ["| odd-sizes | pass |", "| expanded-views | pass |"]
    assert "- float32: not answered at all. no float32" in lines


def test_markdown() -> None:
    lines = show.markdown([example()]).splitlines()
    assert lines[:4] == [
        "| check | `a.b:f` |",
        "| --- | --- |",
        "| odd-sizes | pass |",
        "| causal-rectangle | conv. |",
    ]
    assert "- key-tails: fail. bfloat16: M=5 N=17: o holds NaN" in lines
    assert "- causal-rectangle: convention. bottom right" in lines
    words = NO_DROPOUT.words
    assert f"- dropout-rate, dropout-scale: refused. {words}" in lines


def test_verdicts_answer() -> None:
    result = example()
    assert not result.ok
    assert result.of("key-tails") == result.of("key-tails", "bfloat16")
    assert result.of("key-tails", "float32").verdict == "pass"
    with pytest.raises(KeyError):
        result.of("bias")
    assert str(result) == (
        "a.b:f on cpu: 3 pass, 2 fail, 2 convention, 4 refused, 3 not applicable\n"
        "  float32-is-ieee (float32): M=128: o is off\n"
        "  key-tails (bfloat16): M=5 N=17: o holds NaN"
    )


def test_records_keep_their_schema(tmp_path: Path) -> None:
    line = records.begin("verify", command.VERSION, records.surroundings()) | example().as_json()
    path = records.append(tmp_path, "verify", [line], command.SCHEMA)
    back = records.read(path)[0]
    assert back["counts"] == dict(zip(VERDICTS, (3, 2, 2, 4, 3), strict=True))
    assert back["checks"][-1] == {
        "check": "key-tails", "group": "tails", "dtype": "bfloat16", "verdict": "fail",
        "words": "M=5 N=17: o holds NaN", "error": 1.7e308, "bound": 0.1,
    }  # fmt: skip


# ---- the command ----


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The command line, with its checks in this process and its records in a folder of the test."""
    monkeypatch.setattr(command, "verify", partial(verify, isolate=False))
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    return lambda *words: CliRunner().invoke(app, ["verify", *words], env={"COLUMNS": "80"})


def test_the_command(run: Any, tmp_path: Path) -> None:
    few = ("--dtype", "float32", "--only", "causal-square,nan-padding")
    good = run("nosquare", *few)
    assert good.exit_code == 0
    assert "nosquare: 2 pass, 0 fail" in good.stdout
    bad = run("torch:math", *few)
    assert bad.exit_code == 1  # torch lets NaN of masked keys through
    assert "nan-padding             fail" in bad.stdout
    assert [r["target"] for r in records.read(tmp_path / "verify.jsonl")] == [
        "nosquare",
        "torch:math",
    ]


def test_the_command_as_json_and_markdown(run: Any, tmp_path: Path) -> None:
    few = ("nosquare", "torch:math", "--only", "causal-square", "--no-record", "--jobs", "2")
    told = run(*few, "--json")
    assert [r["target"] for r in json.loads(told.stdout)] == ["nosquare", "torch:math"]
    assert run(*few, "--markdown").stdout.startswith("| check | `nosquare` | `torch:math` |")
    assert "side by side" in run(*few).stdout
    assert not list(tmp_path.iterdir())


def test_the_list_names_every_check(run: Any) -> None:
    told = run("--list")
    assert told.exit_code == 0
    assert all(f"  {name}" in told.stdout for name in checks())


def test_every_check_has_a_sentence_and_its_reports_a_place() -> None:
    for check in checks().values():
        assert check.says.endswith("."), check.name
        for guard in filter(None, check.guards.split(", ")):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+| \(.+\))", guard), guard
