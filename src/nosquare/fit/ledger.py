"""The ledger: every population of memory at the moment of the peak, and what fits.

total = weights + cache + activations + logits + attention + reserve, and in training what is saved
for backward, gradients and the optimizer's states. All of it coexists at one moment, the peak of
the forward (of the step, in training); what is alive only at other moments is not in the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .forward import forward
from .model import MATRICES, PARTS, Attention, Model
from .pieces import Run
from .request import BITS, TRAINING, Request
from .tape import (
    ACTIVATIONS,
    ATTENTION,
    CACHE,
    GRADIENTS,
    LOGITS,
    SAVED,
    Array,
    Tape,
    cache_role,
)
from .training import training

WEIGHTS, OPTIMIZER, RESERVE = "weights", "optimizer", "reserve"
# populations, in the order of the table
POPULATIONS = (
    WEIGHTS, CACHE, ACTIVATIONS, LOGITS, ATTENTION, SAVED, GRADIENTS, OPTIMIZER, RESERVE,
)  # fmt: skip
NO_LIMIT = 1 << 50  # more tokens or sequences than any memory holds
ADAM_BYTES = 8  # two averages in float32 (Kingma and Ba 2015)
MASTER_BYTES = 4  # a float32 copy of 16-bit weights (Micikevicius et al. 2018)


@dataclass(frozen=True)
class Line:
    """One entry: which population it belongs to, what it is, its bytes, how they come about."""

    population: str
    name: str
    bytes: int
    words: str = ""


@dataclass(frozen=True)
class Ledger:
    """All entries of one request on one GPU.

    arrays     activations and others that are alive at the peak, by name
    elsewhere  most bytes of each role at its own moment, which may be another
    """

    request: Request
    lines: tuple[Line, ...]
    arrays: Mapping[str, Array]
    elsewhere: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return sum(line.bytes for line in self.lines)

    @property
    def headroom_bytes(self) -> int:
        """What the device has left; negative when it does not fit."""
        return self.request.device.memory_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.headroom_bytes >= 0

    def of(self, population: str) -> int:
        """Bytes of one population."""
        return sum(line.bytes for line in self.lines if line.population == population)


def ledger(q: Request) -> Ledger:
    """The ledger of a request that has been checked."""
    r = q.run()
    t = _tape(q, r)
    alive = t.at_peak()
    lines = [*weight_lines(r.model, q.weights_dtype, q.dtype), *_cache_lines(q, r, alive)]
    roles: Counter[str] = Counter()
    for array in alive.values():
        roles[array.role] += array.bytes
    for role in (ACTIVATIONS, LOGITS, ATTENTION, SAVED, GRADIENTS):
        if roles[role]:
            lines.append(Line(role, role, roles[role]))
    if q.phase == TRAINING and q.optimizer == "adam":
        each = ADAM_BYTES + (MASTER_BYTES if BITS[q.weights_dtype] < 32 else 0)
        count = sum(r.model.parameters().values())
        words = "Adam: two averages in float32"
        words += ", and a float32 copy of the weights" if each > ADAM_BYTES else ""
        lines.append(Line(OPTIMIZER, "optimizer", count * each, words))
    lines.append(Line(RESERVE, "reserve", q.reserve_bytes))
    return Ledger(q, tuple(lines), alive, t.peaks)


def _tape(q: Request, r: Run) -> Tape:
    if q.phase == TRAINING:
        return training(r, BITS[q.weights_dtype] // 8)
    if q.page:  # nothing accumulates from layer to layer: one of each kind tells the peak
        layers = r.model.layers
        some = (layers[0], *dict.fromkeys(layers))
        r = replace(r, model=replace(r.model, layers=some))
    return forward(r)


def weight_lines(model: Model, weights_dtype: str, dtype: str) -> list[Line]:
    """Weights by part. 8 and 4 bits are for matrices inside the layers; the rest keeps dtype."""
    lines, parameters = [], model.parameters()
    for part in PARTS:
        count = parameters[part]
        if count:
            small = BITS[weights_dtype] < 16 and part not in MATRICES
            kept = dtype if small else weights_dtype
            n_bytes = -(-count * BITS[kept] // 8)
            lines.append(Line(WEIGHTS, part, n_bytes, f"{count:,} in {kept}"))
    return lines


def _cache_lines(q: Request, r: Run, alive: Mapping[str, Array]) -> list[Line]:
    if q.phase == TRAINING or not r.model.causal:
        return []
    lines = []
    for kind, layers in r.model.kinds().items():
        if q.page:
            tokens = held_tokens(layers[0], q.context, q.page)
            width = sum(a.cached_width for a in layers)
            n_bytes = q.concurrency * tokens * width * BITS[q.kv_dtype] // 8
            words = f"{len(layers)} layers x {q.concurrency} x {tokens:,} tokens in {q.kv_dtype}"
        else:
            n_bytes = sum(x.bytes for x in alive.values() if x.role == cache_role(kind))
            words = f"{len(layers)} layers, as DynamicCache holds them at the peak"
        lines.append(Line(CACHE, kind, n_bytes, words))
    return lines


def held_tokens(a: Attention, context: int, page: int) -> int:
    """Tokens of whole pages that a layer holds for one sequence.

    A window that does not begin on a page touches one more.
    """
    pages = -(-context // page)
    if a.window is not None:
        pages = min(pages, -(-(a.window - 1) // page) + 1)
    return pages * page


def largest(q: Request, field: str) -> int:
    """The largest context or concurrency that fits, all else as asked; 0 when not even 1 does.

    Exact: no ledger of a larger one is smaller, so narrowing down finds it. NO_LIMIT where nothing
    grows, as with the context when all layers have windows and one token is decoded.
    """
    room = q.device.memory_bytes

    def total(n: int) -> int:
        return ledger(replace(q, **{field: n})).total_bytes  # type: ignore[arg-type]

    low, low_bytes = 1, total(1)
    if low_bytes > room:
        return 0
    if total(NO_LIMIT) <= room:
        return NO_LIMIT
    high, high_bytes = low, low_bytes
    while high_bytes <= room:
        low, low_bytes = high, high_bytes
        high *= 8
        high_bytes = total(high)
    halve = False
    while high - low > 1:
        # where a straight line crosses, since most of a ledger is one; every other time the middle
        share = (room - low_bytes) / (high_bytes - low_bytes)
        guess = (low + high) // 2 if halve else low + int((high - low) * share)
        guess = min(max(guess, low + 1), high - 1)
        guess_bytes, halve = total(guess), not halve
        if guess_bytes <= room:
            low, low_bytes = guess, guess_bytes
        else:
            high, high_bytes = guess, guess_bytes
    return low
