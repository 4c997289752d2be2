"""The command line: nosquare demo | doctor | plan | fit | bench | verify | report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .errors import NosquareError

app = typer.Typer(
    help="Exact softmax attention without the square.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = typer.Typer(help="Measure, with every result checked first.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@app.command()
def demo(
    context: Annotated[int, typer.Option(help="Tokens of real text the model reads.")] = 4096,
    tokens: Annotated[int, typer.Option(help="Tokens it then writes.")] = 64,
    long: Annotated[bool, typer.Option("--long", help="Read 8,192 tokens.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Read 768 tokens, write 16.")] = False,
    encoder: Annotated[
        bool, typer.Option("--encoder", help="Embed a padded batch with MiniLM instead.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path(
        "nosquare-demo"
    ),
) -> None:
    """Run a real model with eager, torch's sdpa and nosquare; compare, measure, draw."""
    from .demo.run import demo as run

    raise typer.Exit(run(context, tokens, long, quick, encoder, out))


@app.command()
def doctor() -> None:
    """Say what this machine has, which backends can run, and why each other cannot."""
    from .doctor import doctor as run

    run()


@app.command()
def plan(
    case: Annotated[
        str,
        typer.Argument(help='"forward bfloat16 B1 Hq32 Hk8 M131072 N131072 D128 causal(end)"'),
    ],
    device: Annotated[
        str | None, typer.Option(help="h200, h100, a100, ..., cpu, cuda; what is here.")
    ] = None,
    phase: Annotated[str | None, typer.Option(help="training, prefill or decode.")] = None,
    tiles: Annotated[str | None, typer.Option(help="Rows by keys of a tile: 128x128.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Rates measured here.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a problem will cost: arithmetic, bytes that move, tensors that coexist."""
    from .plan import plan as run

    run(case, device, phase, tiles, as_json, measure)


@app.command()
def fit(
    config: Annotated[str, typer.Argument(help="config.json, its folder, or - for stdin.")],
    context: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; the config's longest.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    device: Annotated[
        str | None, typer.Option(help="h200, h100, ..., cpu, cuda, or 80GiB; what is here.")
    ] = None,
    phase: Annotated[str, typer.Option(help="prefill, decode or training.")] = "decode",
    dtype: Annotated[
        str | None, typer.Option(help="Of activations; the config's own, else bfloat16.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Of the cache; float8 and int8 too.")] = None,
    weights_dtype: Annotated[
        str | None, typer.Option(help="Of the weights; float8, int8 and int4 too.")
    ] = None,
    page: Annotated[
        int, typer.Option(help="Tokens in a page of the cache; 0: transformers' own cache.")
    ] = 16,
    gpus: Annotated[int, typer.Option(help="GPUs, tensor parallel.")] = 1,
    attention: Annotated[str, typer.Option(help="nosquare or eager.")] = "nosquare",
    chunk: Annotated[int, typer.Option(help="Tokens a prefill reads at once; 0: all.")] = 0,
    optimizer: Annotated[str, typer.Option(help="adam or none, for training.")] = "adam",
    reserve: Annotated[
        float | None, typer.Option(help="GiB taken before the first tensor.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether a whole model fits, by what, and what the square has to do with it."""
    from .fit import fit as run

    run(
        config, device, as_json, reserve, context=context, concurrency=concurrency, phase=phase,
        dtype=dtype, kv_dtype=kv_dtype, weights_dtype=weights_dtype, page=page, gpus=gpus,
        attention=attention, chunk=chunk, optimizer=optimizer,
    )  # fmt: skip


@bench_app.command("cpu")
def bench_cpu(
    threads: Annotated[
        list[str] | None, typer.Option(help="Threads of torch, as 1,2.", show_default="1,2")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, about a minute.")] = False,
    record: Annotated[bool, typer.Option(help="Append the samples to docs/records.")] = True,
    case: Annotated[str | None, typer.Option(help="One case, as bench/cases.py spells it.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help='Cases with these words: decode, "D128 causal".')
    ] = None,
    peaks: Annotated[
        bool, typer.Option("--peaks", help="Also the peak of memory, where torch makes the square.")
    ] = False,
) -> None:
    """Compare nosquare with torch's own attention on this CPU."""
    from .bench.cpu import bench_cpu as run

    raise typer.Exit(run(threads or (), quick, record, case, only or (), peaks))


@bench_app.command("cuda")
def bench_cuda(
    suite: Annotated[
        str,
        typer.Option(
            help="Suites by commas: prefill, training, decode, dropout, bias, fp32, gqa, window, "
            "varlen; all of these. Or what backends are held to: portable (triton_any), hopper "
            "(gluon_sm90)."
        ),
    ] = "",
    case: Annotated[str | None, typer.Option(help="One case, as bench/cases.py spells it.")] = None,
    peers: Annotated[
        str,
        typer.Option(
            help="Contestants by commas, or all: nosquare, nosquare:<backend>, torch, torch:math, "
            "torch:flash, torch:efficient, torch:cudnn, flex, fa3, flash_attn; those of the suite."
        ),
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, about a minute.")] = False,
    warm: Annotated[
        bool, typer.Option("--warm", help="Leave inputs in the L2 cache between samples.")
    ] = False,
    record: Annotated[bool, typer.Option(help="Append the samples to docs/records.")] = True,
    name: Annotated[
        str, typer.Option(help="The file of records: docs/records/NAME.jsonl.")
    ] = "cuda",
) -> None:
    """Compare nosquare with everybody else on this card."""
    from .bench.cuda import bench_cuda as run

    raise typer.Exit(run(suite, case, peers, quick, record, warm, name))


@bench_app.command("traffic")
def bench_traffic(
    case: Annotated[str, typer.Argument(help="A case, as bench/cases.py spells it.")],
    device: Annotated[str, typer.Option(help="cuda or cpu; a card where there is one.")] = "",
    peers: Annotated[str, typer.Option(help="Contestants by commas, or all.")] = "nosquare",
    record: Annotated[bool, typer.Option(help="Append the bytes to docs/records.")] = True,
) -> None:
    """Measure the bytes that one call moves (by ncu), beside the model's."""
    from .bench.traffic import bench_traffic as run

    raise typer.Exit(run(case, device, peers, record))


@bench_app.command("experiment")
def bench_experiment(
    device: Annotated[str, typer.Option(help="cpu or cuda; a card where there is one.")] = "",
    dtype: Annotated[str, typer.Option(help="Dtype of q, k and v.")] = "float32",
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, some seconds.")] = False,
    record: Annotated[bool, typer.Option(help="Append the rows to docs/records.")] = True,
) -> None:
    """Vary tile size and N, nothing else: error, memory, traffic and time, each by itself."""
    from .bench.experiment import bench_experiment as run

    raise typer.Exit(run(device, quick, dtype, record))


@bench_app.command("train")
def bench_train(
    device: Annotated[str, typer.Option(help="cpu or cuda; a card where there is one.")] = "",
    heads: Annotated[
        str, typer.Option(help="Widths of a head by commas: a model each.")
    ] = "64,128",
    steps: Annotated[int, typer.Option(help="Of each model, contestant and seed.")] = 300,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, some seconds.")] = False,
    record: Annotated[bool, typer.Option(help="Append the curves to docs/records.")] = True,
) -> None:
    """Train a small GPT with this attention and with torch's, from the same seeds."""
    from .bench.train import bench_train as run

    raise typer.Exit(run(device, heads, steps, quick, record))


@bench_app.command("tune")
def bench_tune(
    cases: Annotated[
        list[str] | None,
        typer.Argument(help="Cases, as bench/cases.py spells them; a grid.", metavar="CASE..."),
    ] = None,
    backend: Annotated[str, typer.Option(help="Whose plans.")] = "triton_any",
    quick: Annotated[bool, typer.Option("--quick", help="Few cases, plans and rounds.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Append the samples to this file.", show_default="docs/records"),
    ] = None,
    no_record: Annotated[bool, typer.Option("--no-record", help="Keep no samples.")] = False,
) -> None:
    """Time the plans that a backend thinks worth it beside the one that it takes today."""
    from .bench.tune import bench_tune as run

    raise typer.Exit(run(cases or (), backend, quick, record, not no_record))


@app.command()
def verify(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help="torch:default|math|flash|efficient|cudnn, nosquare, nosquare:<backend>, fa3, or "
            "package.module:function.",
            metavar="TARGET...",
        ),
    ] = None,
    style: Annotated[
        str | None, typer.Option(help="sdpa or flash_attn; as the target's parameters say.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Dtypes, by commas.")] = "float32,bfloat16",
    only: Annotated[str | None, typer.Option(help="Groups or checks, by commas; all.")] = None,
    jobs: Annotated[int, typer.Option(help="Targets examined at once.")] = 1,
    list_: Annotated[bool, typer.Option("--list", help="Say what the checks are.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    record: Annotated[bool, typer.Option(help="Append the verdicts to docs/records.")] = True,
) -> None:
    """Put any attention function through the contract: pass, fail, or its own convention."""
    from .verify import command

    if list_:
        raise typer.Exit(command.list_command())
    groups = None if only is None else only.split(",")
    output = command.Output(json, markdown, record)
    raise typer.Exit(
        command.verify_command(targets or [], style, device, dtype.split(","), groups, jobs, output)
    )


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    records: Annotated[
        Path | None, typer.Option(help="Folder of records.", show_default="docs/records")
    ] = None,
    name: Annotated[str, typer.Option(help="Files of records, joined by commas; all.")] = "",
    claim: Annotated[
        list[str] | None, typer.Option(help='Grade it: "faster: training float32 by 1.2".')
    ] = None,
    claims: Annotated[Path | None, typer.Option(help="Grade the claims of a file.")] = None,
    readme: Annotated[
        bool, typer.Option("--readme", help="Make the tables of README and docs anew instead.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="With --readme: only say what differs, exit 1.")
    ] = False,
) -> None:
    """Put the records on one page, and grade what may be claimed from them."""
    from .report import run

    if readme or check:
        raise typer.Exit(run.readme(check, records))
    raise typer.Exit(run.report(out, records, name, claim or (), claims))


def main() -> None:
    """Entry point of the `nosquare` command: errors of the house are printed, not traced."""
    try:
        app()
    except NosquareError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
