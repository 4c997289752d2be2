"""`nosquare bench train`: a small GPT trained with nosquare's attention and with torch's.

All see the same batches. Contestants begin with the same weights, from two seeds each: what
separates their losses at an equal seed is held against what separates seeds. They take turns, some
steps each, so that they find the card alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch

from .. import records
from ..errors import ArgumentError
from ..receipt import receipts
from ..records import HEAD, NUMBER, WHOLE, WORDS, Maybe
from . import gpt
from .cuda import need_cuda
from .gpt import GPT, Size
from .screen import progress
from .words import NONE

if TYPE_CHECKING:
    from rich.console import Console

VERSION = 2  # in version 1 another seed had other batches, too
RUN = {
    "name": WORDS,
    "seed": WHOLE,
    "ran": [WORDS],
    "losses": [NUMBER],  # nats a byte, of each step
    "validation": NUMBER,
    "steps_ms": [NUMBER],  # but for the first
    "median_ms": NUMBER,
    "step_bytes": Maybe(WHOLE),  # at the peak of a step, above weights and what the optimizer keeps
}
SCHEMA: dict[str, Any] = HEAD | {
    "device": WORDS,
    "text": WORDS,
    "precision": WORDS,
    "parameters": WHOLE,
    **dict.fromkeys(("layers", "width", "head", "tokens", "batch", "steps"), WHOLE),
    "runs": [RUN],
}
NAMES = ("nosquare", "torch")
SEEDS = (0, 1)
BLOCK = 10  # steps before the other's turn
TAIL = 20  # steps that the last loss is a mean of
CHECKED = 4  # batches of text held out
RATE, WARM_UP = 6e-4, 20
PRECISION = {"cuda": "weights float32, products bfloat16 (autocast)", "cpu": "all in float32"}


class Run:
    """One contestant from one seed."""

    def __init__(self, name: str, seed: int, size: Size, steps: int, device: torch.device) -> None:
        self.name, self.seed, self.device = name, seed, device
        torch.manual_seed(seed)
        self.model = GPT(size, gpt.attend_by(name)).to(device)
        self.batches = gpt.batches(size, 0, steps)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=fused
        )
        self.losses: list[torch.Tensor] = []
        self.steps_ms: list[float] = []
        self.ran: list[str] = []
        self.step_bytes: int | None = None

    def step(self) -> None:
        """The next one."""
        number = len(self.losses)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (number + 1) / WARM_UP)
        tokens = self.batches[number].to(self.device, non_blocking=True)
        with self._precision():
            loss = self.model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def _precision(self) -> torch.autocast:
        on = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on)

    def first(self) -> None:
        """The first step: it compiles, and its receipts say what runs."""
        with receipts() as log:
            self.step()
        self.ran = list(dict.fromkeys(f"{r.op}: {r.backend}" for r in log))

    def block(self, steps: int) -> None:
        """So many more, timed one by one."""
        if self.device.type != "cuda":
            for _ in range(steps):
                begun = time.perf_counter()
                self.step()
                self.steps_ms.append((time.perf_counter() - begun) * 1e3)
            return
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize(self.device)
        self.steps_ms += [a.elapsed_time(b) for a, b in pairwise(events)]
        self.step_bytes = torch.cuda.max_memory_allocated(self.device) - before

    def validation(self, size: Size) -> float:
        """The loss on text that it has not seen, the same for all."""
        with torch.no_grad(), self._precision():
            held = gpt.batches(size, 0, CHECKED, held_out=True)
            return fmean(float(self.model(tokens.to(self.device))) for tokens in held)

    def record(self, size: Size) -> dict[str, Any]:
        """As SCHEMA has it."""
        return {
            "name": self.name,
            "seed": self.seed,
            "ran": self.ran,
            "losses": [round(float(x), 5) for x in self.losses],
            "validation": round(self.validation(size), 5),
            "steps_ms": [round(t, 3) for t in self.steps_ms],
            "median_ms": round(median(self.steps_ms), 3),
            "step_bytes": self.step_bytes,
        }


def bench_train(
    device: str = "",
    heads: str = "64,128",
    steps: int = 300,
    quick: bool = False,
    keep: bool = True,
    name: str = "train",
) -> int:
    """Train, print step times, memory and losses side by side, keep the curves.

    device  "cpu" or "cuda"; "": the card where torch sees one
    heads   widths of a head, joined by commas: one model each
    steps   of each model, contestant and seed
    quick   a tiny model, some seconds
    keep    append the records to docs/records/<name>.jsonl

    Returns 0 when contestants differ, at an equal seed, by less than twice what seeds do, else 1.
    Two seeds say little of what chance does, so that is no close test. Raises
    ArgumentError for a device, width or number that is none; UnsupportedError without a card.
    """
    widths = [word.strip() for word in heads.split(",")]
    if device not in ("", "cpu", "cuda") or not all(w.isdecimal() for w in widths) or steps < 2:
        raise ArgumentError(
            "Training needs a device, widths of heads and at least two steps.",
            {"device": repr(device), "heads": repr(heads), "steps": steps},
            "--device cuda --heads 64,128 --steps 300.",
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        need_cuda()
    small = quick or device == "cpu"
    shape = (2, 128, 128, 4) if small else (8, 1024, 4096, 4)
    layers, width, tokens, batch = shape
    sizes = [Size(layers, width, int(w), tokens, batch) for w in widths]
    from rich.console import Console

    console = Console(highlight=False)
    where = torch.device("cpu" if device == "cpu" else f"cuda:{torch.cuda.current_device()}")
    around = records.surroundings(where)
    alike, path = True, None
    with progress(console, len(sizes) * len(SEEDS)) as (_, step):
        for size in sizes:
            record = _train(size, steps, where, around, step)
            if keep:
                path = records.append(records.folder(), name, [record], SCHEMA)
            show(console, record)
            own, others = gaps(record["runs"])
            alike = alike and own < 2 * others
    if path is not None:
        console.print(f"\nRecords: docs/records/{path.name}")
    if not alike:
        console.print("[red]FAILED[/red] contestants differ by more than twice what seeds do")
    return 0 if alike else 1


def _train(
    size: Size, steps: int, device: torch.device, around: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    done, parameters = [], 0
    for seed in SEEDS:
        say(f"{size}, seed {seed}")
        runs = [Run(name, seed, size, steps, device) for name in NAMES]
        parameters = sum(p.numel() for p in runs[0].model.parameters())
        for run in runs:
            run.first()
        for begin in range(1, steps, BLOCK):
            for run in runs:
                run.block(min(BLOCK, steps - begin))
        done += [run.record(size) for run in runs]
        del runs
    return {
        **records.begin("train", VERSION, around),
        "device": device.type,
        "text": "the source of Python's standard library, byte by byte",
        "precision": PRECISION[device.type],
        "parameters": parameters,
        **{n: getattr(size, n) for n in ("layers", "width", "head", "tokens", "batch")},
        "steps": steps,
        "runs": done,
    }


# ---- what it comes to ----


def gaps(runs: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean distance of two losses of the last third of the steps: of contestants from an equal
    seed, and of seeds of an equal contestant."""
    tails = {(r["name"], r["seed"]): r["losses"][-max(1, len(r["losses"]) // 3) :] for r in runs}

    def apart(a: tuple[str, int], b: tuple[str, int]) -> float:
        return fmean(abs(x - y) for x, y in zip(tails[a], tails[b], strict=True))

    own = fmean(apart((NAMES[0], seed), (NAMES[1], seed)) for seed in SEEDS)
    return own, fmean(apart((name, SEEDS[0]), (name, SEEDS[1])) for name in NAMES)


HEADS = ("heads of", "attention", "ran", "a step, ms", "peak of a step, GiB", "last loss",
         "loss on other text")  # fmt: skip


def rows(record: Mapping[str, Any]) -> list[list[str]]:
    """A row for each contestant, cells as in HEADS; losses of the seeds joined by "/"."""
    found = []
    for name in NAMES:
        mine = [run for run in record["runs"] if run["name"] == name]
        size = mine[-1]["step_bytes"]
        found.append([
            str(record["head"]), name, "; ".join(mine[0]["ran"]),
            f"{median(t for run in mine for t in run['steps_ms']):.2f}",
            NONE if size is None else f"{size / 2**30:.2f}",
            " / ".join(f"{fmean(run['losses'][-TAIL:]):.4f}" for run in mine),
            " / ".join(f"{run['validation']:.4f}" for run in mine),
        ])  # fmt: skip
    return found


def sentence(record: Mapping[str, Any]) -> str:
    """What separates the losses; of text that all see, which in version 1 is the other alone."""
    own, others = gaps(record["runs"])
    losses = {(run["name"], run["seed"]): run["validation"] for run in record["runs"]}
    apart = [abs(losses[NAMES[0], seed] - losses[NAMES[1], seed]) for seed in SEEDS]
    seeds = [abs(losses[name, SEEDS[0]] - losses[name, SEEDS[1]]) for name in NAMES]
    words = (
        f"Heads of {record['head']}: on other text the two differ by {_joined(apart)} from an "
        f"equal seed, and seeds by {_joined(seeds)}"
    )
    if record["schema"] == 1:
        return f"{words}."
    return f"{words}; in the last third of the steps by {own:.4f} and {others:.4f}."


def _joined(gaps: Sequence[float]) -> str:
    return " and ".join(f"{gap:.3f}" for gap in gaps)


def said(record: Mapping[str, Any]) -> str:
    """What was trained."""
    size = Size(*(record[n] for n in ("layers", "width", "head", "tokens", "batch")))
    return (
        f"{record['parameters'] / 1e6:.1f} million parameters, {size.layers} layers, "
        f"{size.batch} x {size.tokens} tokens a step, {record['steps']} steps from each of "
        f"{len(SEEDS)} seeds; {record['text']}; {record['precision']}"
    )


def show(console: Console, record: Mapping[str, Any]) -> None:
    """Print the table of one model."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in HEADS:
        table.add_column(name, overflow="fold")
    for row in rows(record):
        table.add_row(*row)
    console.print(f"\n{said(record)}", markup=False)
    console.print(table)
    console.print(sentence(record))
