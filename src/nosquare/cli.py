"""The command line: nosquare demo | doctor | bench."""

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


@bench_app.command("cpu")
def bench_cpu(
    threads: Annotated[int | None, typer.Option(help="Threads of torch; as it is set.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, under a minute.")] = False,
    record: Annotated[bool, typer.Option(help="Append the samples to docs/records.")] = True,
    case: Annotated[str | None, typer.Option(help="One case, as bench/cases.py spells it.")] = None,
    parts: Annotated[str, typer.Option(help="Letters of the suites wanted.")] = "abcde",
) -> None:
    """Compare nosquare with torch's own attention on this CPU."""
    from .bench.cpu import bench_cpu as run

    raise typer.Exit(run(threads, quick, record, case, parts))


def main() -> None:
    """Entry point of the `nosquare` command: errors of the house are printed, not traced."""
    try:
        app()
    except NosquareError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
