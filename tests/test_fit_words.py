"""What `nosquare fit` says: the table, the JSON, the command, and its refusals."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from expecttest import assert_expected_inline
from typer.testing import CliRunner

import nosquare as ns
from nosquare import fit
from nosquare.cli import app
from nosquare.fit.request import GIB
from nosquare.fit.show import Report, show, size
from test_fit_config import BERT, LLAMA, PUBLISHED
from test_fit_ledger import TINY


@pytest.fixture
def path(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def test_the_table(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit.fit(path, "h200", context=16384, concurrency=8, phase="decode")
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert max(map(len, printed.splitlines())) <= 80
    assert_expected_inline(
        printed,
        """\
llama, 8,030,261,248 parameters in 32 layers, on NVIDIA H200
decoding one token each for 8 sequences of 16,384 tokens, bfloat16, nosquare
attention
Warning: the config says max_position_embeddings 8,192; at 16,384 tokens the
model may not work, whether or not it fits.

weights                      14.96 GiB
  embeddings              1,002.00 MiB  525,336,576 in bfloat16
  attention                   2.50 GiB  1,342,177,280 in bfloat16
  feed-forward               10.50 GiB  5,637,144,576 in bfloat16
  norms                     520.00 KiB  266,240 in bfloat16
  head                    1,002.00 MiB  525,336,576 in bfloat16
KV cache                     16.00 GiB  32 layers x 8 x 16,384 tokens in
                                        bfloat16
activations at the peak      64.06 KiB  last hidden, token ids
logits                        1.96 MiB  logits
inside attention                     -  1.00 KiB at another moment
reserve, an assumption        1.00 GiB  CUDA context, kernels, cuBLAS: change it
                                        with --reserve
total                        31.96 GiB  at once

fits on NVIDIA H200 (140.40 GiB): 108.44 GiB are left
largest context at concurrency 8: 127,424
largest concurrency at context 16,384: 62

What the square has to do with it
The scores of one layer, 1 query by 16,384 keys for every head, are 8.00 MiB in
bfloat16. Eager attention holds them several times over, one layer at a time:
2.04 GiB inside attention at its most, nosquare 1.00 KiB. One query by N keys is
no square; most of what eager adds here is keys and values repeated for every
query head.
Total at the peak: eager 34.00 GiB, nosquare 31.96 GiB.
Largest context at concurrency 8: eager 113,024, nosquare 127,424 tokens, 1.13
times as many. What remains does not go with the square: weights are there
without any context, and a cache grows with it.

What these numbers are
Modelled: the modules of transformers 5, one forward at the full context, run by
Python without torch.compile, nosquare.adapters.transformers.register(), a cache
in pages of 16 tokens, whole pages counted, written in place. Arrays are counted
while Python or autograd refers to them.
Logits: of the last token of each sequence (logits_to_keep=1).
Not included: fragmentation, and memory that an allocator keeps without using
it; buffers of collective communication, CUDA graphs, compiled code, a second
model that drafts; scales and zero points of quantised weights or caches; vision
and audio towers, adapters (LoRA), prompts that sequences share; what a kernel
takes inside one operator of torch, other than nosquare's tiles.""",
    )


def test_json_says_what_the_table_says(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit.fit(path, "80GiB", as_json=True, reserve=2, context=16384, phase="prefill", concurrency=2)
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["kind"]) == (1, "fit")
    assert told["total_bytes"] == sum(line["bytes"] for line in told["lines"])
    assert told["headroom_bytes"] == 80 * GIB - told["total_bytes"]
    assert told["lines"][-1]["bytes"] == 2 * GIB
    assert told["largest"]["nosquare"]["context"] > told["largest"]["eager"]["context"] > 0
    assert sum(told["model"]["parameters"].values()) == 8_030_261_248
    assert "max_position_embeddings 8,192" in told["warnings"][0]


def test_the_command(path: str) -> None:
    line = ["fit", path, "--context", "4096", "--device", "80GB", "--phase", "training", "--json"]
    ran = CliRunner().invoke(app, line)
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.output)["request"]["phase"] == "training"
    ran = CliRunner().invoke(app, ["fit", "-", "--device", "cpu"], input=json.dumps(TINY))
    assert "Python and torch" in ran.output, ran.output


@pytest.mark.parametrize("phase", ["prefill", "decode", "training"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_has_a_readable_report(
    name: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    config = {**PUBLISHED[name][0]}
    if config["model_type"] == "bert" and phase == "decode":
        return
    config["num_hidden_layers"] = 3
    printed = io.StringIO()
    q = fit.ask(config, "8TB", context=4096, concurrency=2, phase=phase, page=0)
    show(Report.of(q), Console(file=printed, width=80, highlight=False))
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("fits" in line for line in lines)


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 * 2**20, 3 * 2**30, 5000 * 2**30)] == [
        "0 B", "1,023 B", "1.00 KiB", "5.00 MiB", "3.00 GiB", "5,000.00 GiB",
    ]  # fmt: skip


# ---- refusals ----


def said(kind: type[Exception] = ns.ArgumentError, config: Any = LLAMA, **options: Any) -> str:
    with pytest.raises(kind) as error:
        fit.ask(config, options.pop("device", "h200"), **options)
    return str(error.value)


def test_words_that_are_not_known() -> None:
    assert_expected_inline(
        said(phase="serve"),
        """\
There is no such phase.
  phase  'serve'
  known  prefill, decode, training
  Try: --phase prefill.""",
    )
    assert "float8" in said(kv_dtype="fp8")
    assert "'int4'" in said(dtype="int4")
    assert "int4" in said(weights_dtype="nf4")
    assert "eager" in said(attention="flash")
    assert "adam" in said(optimizer="sgd")


def test_a_device_that_is_not_known() -> None:
    told = said(device="h300")
    assert "h200" in told
    assert "or      an amount of memory, as 80GiB or 80GB" in told
    assert "Try: --device h200, or --device 80GiB." in told
    for odd in ("80", "GiB", "0GiB", ".GiB", "1.2.3GB"):
        assert "an amount of memory" in said(device=odd)
    assert "no such card" in said(device="cuda:99")


def test_amounts() -> None:
    for word, n_bytes in (("80GiB", 80 * GIB), ("80 GB", 80 * 10**9), ("0.5gib", GIB // 2)):
        assert fit.ask(LLAMA, word).device.memory_bytes == n_bytes


def test_counts_that_are_none() -> None:
    assert_expected_inline(
        said(concurrency=0),
        """\
--concurrency is at least 1.
  concurrency  0
  Try: --concurrency 1.""",
    )
    assert "--context is at least 1" in said(context=0)
    assert "--gpus is at least 1" in said(gpus=0)
    assert "--page is at least 0" in said(page=-1)
    assert "--chunk is at least 0" in said(chunk=-1)
    assert "reserve  -0.5 GiB" in said(reserve_bytes=-GIB // 2)


def test_a_reserve_that_is_no_number(path: str) -> None:
    with pytest.raises(ns.ArgumentError, match="--reserve is a number of GiB"):
        fit.fit(path, "h200", reserve=float("nan"))


def test_gpus_that_do_not_divide_the_model() -> None:
    assert_expected_inline(
        said(gpus=3),
        """\
The model does not divide evenly over so many GPUs.
  gpus                 3
  query heads          32
  key heads            8
  feed-forward widths  14336
  Try: a number that divides the heads and the widths, such as --gpus 2.""",
    )


def test_what_nobody_does() -> None:
    assert_expected_inline(
        said(ns.UnsupportedError, BERT, phase="decode"),
        """\
An encoder writes no tokens, so it has no decode phase.
  model_type  bert
  Try: --phase prefill, or --phase training.""",
    )
    assert_expected_inline(
        said(ns.UnsupportedError, phase="training", weights_dtype="int8"),
        """\
Weights of 8 or 4 bits are not trained.
  weights-dtype  int8
  phase          training
  Try: --weights-dtype bfloat16, or another phase.""",
    )
    assert_expected_inline(
        said(ns.UnsupportedError, page=0, kv_dtype="int8"),
        """\
transformers' own cache keeps keys and values as they were computed.
  page      0
  dtype     bfloat16
  kv-dtype  int8
  Try: --page 16, or the same dtype for both.""",
    )
