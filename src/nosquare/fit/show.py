"""The ledger as a table of 80 columns, and as plain data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .heads import seen
from .ledger import (
    NO_LIMIT,
    OPTIMIZER,
    POPULATIONS,
    RESERVE,
    WEIGHTS,
    Ledger,
    Line,
    largest,
    ledger,
)
from .request import DECODE, EAGER, GIB, NOSQUARE, PREFILL, TRAINING, Request
from .tape import ACTIVATIONS, ATTENTION, CACHE, GRADIENTS, LOGITS, SAVED

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1  # version of the JSON; a change of meaning is a new one
MIB, KIB = 2**20, 2**10
NAMES = {
    WEIGHTS: "weights",
    CACHE: "KV cache",
    ACTIVATIONS: "activations at the peak",
    LOGITS: "logits",
    ATTENTION: "inside attention",
    SAVED: "saved for backward",
    GRADIENTS: "gradients",
    OPTIMIZER: "optimizer states",
    RESERVE: "reserve, an assumption",
}
NOT_INCLUDED = (
    "fragmentation, and memory that an allocator keeps without using it",
    "buffers of collective communication, CUDA graphs, compiled code, a second model that drafts",
    "scales and zero points of quantised weights or caches",
    "vision and audio towers, adapters (LoRA), prompts that sequences share",
    "what a kernel takes inside one operator of torch, other than nosquare's tiles",
)


@dataclass(frozen=True)
class Report:
    """A ledger, and what follows from it. other: the same with the other attention."""

    ledger: Ledger
    other: Ledger
    context: int
    concurrency: int
    other_context: int
    other_concurrency: int

    @staticmethod
    def of(q: Request) -> Report:
        """Ask all questions of one request."""
        other = replace(q, attention=EAGER if q.attention == NOSQUARE else NOSQUARE)
        found = [largest(x, word) for x in (q, other) for word in ("context", "concurrency")]
        return Report(ledger(q), ledger(other), *found)

    def sides(self) -> dict[str, tuple[Ledger, int, int]]:
        """By attention: its ledger, the largest context, the largest concurrency."""
        mine = (self.ledger, self.context, self.concurrency)
        theirs = (self.other, self.other_context, self.other_concurrency)
        return {self.ledger.request.attention: mine, self.other.request.attention: theirs}

    def as_json(self) -> dict[str, Any]:
        """Plain data; bytes are numbers, and every number of the table is there."""
        q, account = self.ledger.request, self.ledger
        asked = {name: value for name, value in vars(q).items() if name not in ("model", "device")}
        return {
            "schema": SCHEMA,
            "kind": "fit",
            "model": {
                "family": q.model.family,
                "layers": len(q.model.layers),
                "parameters": dict(q.model.parameters()),
            },
            "request": asked,
            "device": {"name": q.device.name, "memory_bytes": q.device.memory_bytes},
            "lines": [vars(line) for line in account.lines],
            "alive_at_the_peak": {name: array.bytes for name, array in account.arrays.items()},
            "most_of_each_elsewhere": dict(account.elsewhere),
            "total_bytes": account.total_bytes,
            "headroom_bytes": account.headroom_bytes,
            "fits": account.fits,
            "largest": {
                name: {"total_bytes": side.total_bytes, "context": context,
                       "concurrency": concurrency}
                for name, (side, context, concurrency) in self.sides().items()
            },
            "square_bytes": square_bytes(q),
            "boundary": boundary(q),
            "warnings": warnings(q),
            "notes": notes(q),
            "not_included": list(NOT_INCLUDED),
        }  # fmt: skip


def show(report: Report, console: Console) -> None:
    """Print everything, in words of at most 80 columns."""
    q = report.ledger.request
    for line in headline(q):
        console.print(line)
    for line in warnings(q):
        console.print(f"[yellow]{line}[/yellow]")
    console.print()
    _table(report.ledger, console)
    _verdict(report, console)
    console.print("\n[bold]What the square has to do with it[/bold]")
    for line in the_square(report):
        console.print(line)
    console.print("\n[bold]What these numbers are[/bold]")
    for line in (*boundary(q), *notes(q)):
        console.print(line)
    console.print("Not included: " + "; ".join(NOT_INCLUDED) + ".")


def headline(q: Request) -> list[str]:
    """What was asked, in words."""
    m = q.model
    count = sum(m.parameters().values())
    sequences = "1 sequence" if q.concurrency == 1 else f"{q.concurrency:,} sequences"
    if q.phase == TRAINING:
        what = f"training on {sequences} of {q.context:,} tokens"
    elif q.phase == PREFILL:
        what = f"prefill of {sequences} of {q.context:,} tokens"
        what += f", {q.chunk:,} at a time" if 0 < q.chunk < q.context else ""
    else:
        what = f"decoding one token each for {sequences} of {q.context:,} tokens"
    cards = q.device.name if q.gpus == 1 else f"{q.gpus} x {q.device.name}, each holding this"
    return [
        f"[bold]{m.family}[/bold], {count:,} parameters in {len(m.layers)} layers, on {cards}",
        f"{what}, {q.dtype}, {q.attention} attention",
    ]


def _table(account: Ledger, console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=24)
    table.add_column(justify="right", min_width=11)
    table.add_column(style="dim", overflow="fold")
    for population in POPULATIONS:
        lines = [line for line in account.lines if line.population == population]
        n_bytes = sum(line.bytes for line in lines)
        shown = (LOGITS, ATTENTION) + (GRADIENTS,) * (account.request.phase == TRAINING)
        if not lines and population not in shown:
            continue
        if lines:
            table.add_row(NAMES[population], size(n_bytes), explain(account, population, lines))
        else:
            elsewhere = account.elsewhere.get(population, 0)
            words = f"{size(elsewhere)} at another moment" if elsewhere else "none"
            table.add_row(NAMES[population], "-", words)
        if len(lines) > 1:
            for line in lines:
                table.add_row(f"  {line.name}", size(line.bytes), line.words)
    table.add_row("[bold]total[/bold]", f"[bold]{size(account.total_bytes)}[/bold]", "at once")
    console.print(table)


def explain(account: Ledger, population: str, lines: Sequence[Line]) -> str:
    """How one population comes about, in a few words."""
    q = account.request
    if len(lines) == 1 and lines[0].words:
        return lines[0].words
    if population == RESERVE:
        where = "CUDA context, kernels, cuBLAS" if q.device.kind != "cpu" else "Python and torch"
        return f"{where}: change it with --reserve"
    if population == CACHE:
        return f"pages of {q.page} tokens" if q.page else "transformers' DynamicCache"
    if population in (ACTIVATIONS, LOGITS, ATTENTION):
        found = [(a.bytes, name) for name, a in account.arrays.items() if a.role == population]
        names = [name for n_bytes, name in sorted(found, reverse=True)[:3] if n_bytes]
        return ", ".join(names) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return ""


def _verdict(report: Report, console: Console) -> None:
    q, account = report.ledger.request, report.ledger
    memory = f"{q.device.name} ({size(q.device.memory_bytes)})"
    if account.fits:
        console.print(f"\n[green]fits[/green] on {memory}: {size(account.headroom_bytes)} are left")
    else:
        lacking = size(-account.headroom_bytes)
        console.print(f"\n[red]does not fit[/red] on {memory}: {lacking} too much")
    console.print(f"largest context at concurrency {q.concurrency:,}: {counted(report.context)}")
    console.print(f"largest concurrency at context {q.context:,}: {counted(report.concurrency)}")


def the_square(report: Report) -> list[str]:
    """By how much the largest context really changes when the square is removed."""
    q, sides = report.ledger.request, report.sides()
    ours, eager = sides[NOSQUARE], sides[EAGER]
    rows = "1 query" if q.new_tokens == 1 else f"{q.new_tokens:,} queries"
    most = max(seen(q.run(), layer.attention) for layer in q.model.layers)
    lines = [
        f"The scores of one layer, {rows} by {most:,} keys for every head, are "
        f"{size(square_bytes(q))} in {q.dtype}. Eager attention holds them several times over, one "
        f"layer at a time: {size(eager[0].elsewhere.get(ATTENTION, 0))} inside attention at its "
        f"most, nosquare {size(ours[0].elsewhere.get(ATTENTION, 0))}."
        + (_decode_words(q) if q.phase == DECODE else _saved_words(q, eager[0], ours[0])),
        f"Total at the peak: eager {size(eager[0].total_bytes)}, nosquare "
        f"{size(ours[0].total_bytes)}.",
        f"Largest context at concurrency {q.concurrency:,}: {_contexts(eager[1], ours[1])}. What "
        "remains does not go with the square: weights are there without any context, and a cache "
        "grows with it.",
    ]
    return lines


def _decode_words(q: Request) -> str:
    grouped = any(layer.attention.Hq > layer.attention.Hk for layer in q.model.layers)
    words = " One query by N keys is no square"
    return words + (
        "; most of what eager adds here is keys and values repeated for every query head."
        if grouped
        else "."
    )


def _saved_words(q: Request, eager: Ledger, ours: Ledger) -> str:
    if q.phase != TRAINING:
        return ""
    more = eager.of(SAVED) - ours.of(SAVED)
    return f" For backward eager keeps {size(more)} more, the squares of all layers."


def _contexts(eager: int, ours: int) -> str:
    if NO_LIMIT in (eager, ours) or not eager:
        return f"eager {counted(eager)}; nosquare {counted(ours)}"
    return f"eager {eager:,}, nosquare {ours:,} tokens, {ours / eager:.2f} times as many"


def square_bytes(q: Request) -> int:
    """Scores of one layer in the dtype of the activations, the widest layer's."""
    r = q.run()
    squares = (r.B * x.attention.Hq * r.M * seen(r, x.attention) for x in r.model.layers)
    return max(squares) * r.d


def boundary(q: Request) -> list[str]:
    """What is modelled, where it ends, and how far it was checked."""
    cache = (
        f"a cache in pages of {q.page} tokens, whole pages counted, written in place"
        if q.page
        else "its DynamicCache, which copies the keys and then the values of a layer as they grow"
    )
    lines = [
        "Modelled: the modules of transformers 5, one forward at the full context, run by Python "
        "without torch.compile, "
        + (
            "nosquare.adapters.transformers.register()"
            if q.attention == NOSQUARE
            else 'attn_implementation="eager"'
        )
        + (", " + cache if q.phase != TRAINING and q.model.causal else "")
        + ". Arrays are counted while Python or autograd refers to them.",
    ]
    if q.phase == TRAINING:
        lines.append(
            "Training: loss.backward() without gradient checkpointing, a cache or accumulation; "
            "gradients in the weights' dtype; the optimizer's step in place (fused). Saved arrays "
            "are counted one by one; gradients in flight inside a layer are an estimate."
        )
        if q.optimizer == "none":
            lines.append("States of an optimizer are not included (--optimizer none).")
    elif q.model.causal:
        lines.append("Logits: of the last token of each sequence (logits_to_keep=1).")
    if q.page and q.phase != TRAINING and any(x.attention.latent for x in q.model.layers):
        lines.append(
            "Latent attention: at decoding the expansion of the latent is taken to be absorbed "
            "into the queries for nosquare; transformers itself expands it, for one layer at a "
            "time (--page 0), and so does eager attention."
        )
    if not q.page and q.phase == PREFILL and any(x.attention.window for x in q.model.layers):
        lines.append(
            "Right after a prefill DynamicCache still holds the whole context of sliding layers: "
            "it keeps a view."
        )
    return lines


def warnings(q: Request) -> list[str]:
    """What may make the answer worthless."""
    if not q.model.limit or q.context <= q.model.limit:
        return []
    return [
        f"Warning: the config says max_position_embeddings {q.model.limit:,}; at {q.context:,} "
        "tokens the model may not work, whether or not it fits."
    ]


def notes(q: Request) -> list[str]:
    """What the reading of the config left out, and how the model is divided."""
    found = list(q.model.notes)
    if q.gpus > 1:
        found.append(
            f"Tensor parallel over {q.gpus}: heads, feed-forward widths and the vocabulary are "
            "divided; norms, routers, latents and the hidden state are on every GPU."
        )
    return found


def counted(n: int) -> str:
    """A largest count in words."""
    if n == NO_LIMIT:
        return "no limit, nothing that is counted grows with it"
    return f"{n:,}" if n else "not even 1 fits"


def size(n_bytes: int) -> str:
    """Bytes for a reader: GiB from one on, else MiB, KiB (2^30, 2^20, 2^10)."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:,.2f} {name}"
    return f"{n_bytes:,} B"


def dump(report: Report) -> str:
    """The report as JSON."""
    return json.dumps(report.as_json(), indent=2)
