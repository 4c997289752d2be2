"""What a problem costs, before it runs: arithmetic, bytes that move, tensors that coexist.

Three separate questions, kept apart. Arithmetic follows the visible pairs; bytes that must move,
the inputs and outputs; bytes that a schedule moves, its tiles (traffic.py: a model). The ledger
says which tensors are there at once at the peak of a pass, and what an implementation that
materialises scores and probabilities would add: whole squares, which a causal mask does not shrink.

Phases: "training" has a backward; "prefill" and "decode" have none, and a decoding step has few
queries against many keys. None of these numbers is a measurement or a forecast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from .. import traffic
from ..device import Device
from ..errors import ArgumentError
from ..pairs import Pairs, pairs, reached
from ..problem import Problem
from ..traffic import ATOMIC, KEYS_OUTSIDE, QUERIES_OUTSIDE, Tiling, Traffic, default_tiling
from .account import account

PHASES = ("training", "prefill", "decode")
FEW_QUERIES = 16  # with no more than these, and more keys, a problem is a decoding step
ROLES = ("input", "output", "saved", "workspace", "materialised")


@dataclass(frozen=True)
class Entry:
    """One tensor of the ledger: its name, bytes, and role, one of ROLES."""

    name: str
    bytes: int
    role: str


@dataclass(frozen=True)
class Ledger:
    """The tensors that coexist at the peak of a pass.

    input         what the call is given (backward: o, lse and do too)
    output        what it hands out
    saved         what forward keeps for backward: lse
    workspace     what it takes beside these, and gives back
    materialised  not there: what an implementation would add that keeps scores and probabilities
    """

    entries: tuple[Entry, ...]

    def total(self, *roles: str) -> int:
        """Bytes of all entries of these roles."""
        return sum(e.bytes for e in self.entries if e.role in roles)

    @property
    def auxiliary_bytes(self) -> int:
        """Beyond inputs and outputs: what is saved, and workspace."""
        return self.total("saved", "workspace")

    @property
    def with_inputs_and_outputs_bytes(self) -> int:
        """All that coexists."""
        return self.total("input", "output", "saved", "workspace")

    @property
    def materialised_bytes(self) -> int:
        """What is not there. In-place reuse can lower it, but one square remains."""
        return self.total("materialised")


@dataclass(frozen=True)
class PassCost:
    """Forward or backward.

    flops             2 pairs (D + E), and 2 pairs (3 D + 2 E) for backward
    compulsory_bytes  each input that is used read once, each output written once
    traffic           what the schedule moves, by the model; None where no tiles are known
    floor_bytes       lower bound of what enters the fast memories, one level (traffic.py); None
                      where they are not known, or too small for a bound with a constant
    floor_hbm_bytes   the same with all caches together as the fast memory
    paper_bytes       accesses that the loops of the FlashAttention paper make, one level
    roofline_us       the longer of flops at the peak rate and compulsory bytes at full bandwidth: a
                      floor, not a forecast; None where a rate is not known
    bound_by          "compute", "memory" or "unknown"
    """

    flops: int
    compulsory_bytes: int
    traffic: Traffic | None
    floor_bytes: int | None
    floor_hbm_bytes: int | None
    paper_bytes: int | None
    roofline_us: float | None
    bound_by: str
    ledger: Ledger


@dataclass(frozen=True)
class Cost:
    """The account of one problem on one device; print it, or take as_json().

    backward  None but in training
    notes     what was assumed, and who would run it, in words
    """

    problem: Problem
    device: Device
    phase: str
    pairs: Pairs
    forward: PassCost
    backward: PassCost | None
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(
        problem: Problem,
        device: Device,
        phase: str | None = None,
        arrays: Sequence[Tensor] = (),
        *,
        tiling: Tiling | None = None,
        backward_tiling: Tiling | None = None,
        workspace: tuple[int | None, int | None] | None = None,
        notes: tuple[str, ...] = (),
    ) -> Cost:
        """The account.

        phase      None: training where a gradient is wanted, decode where at most 16 queries meet
                   more keys, else prefill
        arrays     of the mask, as the call had them (see pairs.pairs)
        tiling     None: the default tiles of the device
        backward_tiling  None: that tiling; where there is none, the default tiles for backward
        workspace  bytes of (forward, backward); None: those of a kernel with these tiles, a None
                   inside: not known

        Raises ArgumentError for a phase that does not go with the problem.
        """
        phase = _phase(problem, phase)
        p = problem if problem.grads or phase != "training" else replace(problem, grads="qkv")
        backward_tiling = backward_tiling or tiling or default_tiling(p, device, backward=True)
        tiling = tiling or default_tiling(p, device, phase == "decode")
        if workspace is None:
            workspace = kernel_workspace(p, tiling)[0], kernel_workspace(p, backward_tiling)[1]
        basis = _Basis(p, device, phase, pairs(p, arrays), tiling, tuple(arrays))
        forward = _pass_cost(basis, False, workspace[0])
        basis = basis._replace(tiling=backward_tiling)
        backward = _pass_cost(basis, True, workspace[1]) if phase == "training" else None
        if None in workspace[: 1 + (backward is not None)]:
            notes = (*notes, "The workspace is not known before the run, and not in the ledger.")
        return Cost(p, device, phase, basis.pairs, forward, backward, (*notes, *_notes(basis)))

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and words."""
        device = asdict(self.device) | {"peak_flops": dict(self.device.peak_flops)}
        return {
            "problem": self.problem.describe(),
            "device": device,
            "phase": self.phase,
            "pairs": asdict(self.pairs),
            "forward": _plain(self.forward),
            "backward": None if self.backward is None else _plain(self.backward),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return account(self)


class _Basis(NamedTuple):
    """What forward and backward share."""

    problem: Problem
    device: Device
    phase: str
    pairs: Pairs
    tiling: Tiling | None
    arrays: tuple[Tensor, ...]


def _phase(p: Problem, phase: str | None) -> str:
    if phase is None:
        few = p.M <= FEW_QUERIES and p.M < p.N
        return "training" if p.grads else "decode" if few else "prefill"
    if phase not in PHASES:
        raise ArgumentError(
            "There is no such phase.",
            {"phase": repr(phase), "phases": ", ".join(PHASES)},
            "phase=None: it is read off the problem.",
        )
    return phase


def kernel_workspace(p: Problem, tiling: Tiling | None) -> tuple[int | None, int | None]:
    """Bytes that a kernel of these tiles takes beside inputs and outputs, (forward, backward): the
    partial results of splits; delta, and sums in float32 where they are made in memory."""
    if tiling is None:
        return None, None
    entries = 1 if p.packed else p.B
    rows, keys, wide = entries * p.Hq * p.M, entries * p.Hk * p.N, p.lse_dtype.itemsize
    forward = rows * tiling.splits * wide * (p.E + 2) if tiling.splits > 1 else 0
    backward = rows * wide
    if tiling.backward in (ATOMIC, KEYS_OUTSIDE) and "q" in p.grads:
        backward += rows * wide * p.D
    if tiling.backward == QUERIES_OUTSIDE:
        backward += keys * wide * (p.D + p.E)
    return forward, backward


def _notes(basis: _Basis) -> list[str]:
    p, notes = basis.problem, []
    if not basis.pairs.exact and p.packed:
        notes.append(
            "The lengths of the packed sequences are not given: pairs, flops and squares are those "
            "of one sequence that owns all tokens, an upper bound."
        )
    elif not basis.pairs.exact:
        notes.append(
            "The mask's arrays are not given, or hold too many pairs to be looked at: they count "
            "as if they hid nothing, an upper bound."
        )
    if p.bias is not None:
        notes.append("The bias counts in the dtype of q.")
    tiling, room = basis.tiling, max(basis.device.fast_bytes, traffic.REGISTER_BYTES)
    if tiling is not None and tiling.rows * tiling.tile_n * p.lse_dtype.itemsize > room:
        notes.append(
            f"A score tile of {tiling} is larger than fast memory: what passes over it again and "
            "again moves is not counted."
        )
    return notes


def _pass_cost(basis: _Basis, backward: bool, workspace_bytes: int | None) -> PassCost:
    p, device, tiling = basis.problem, basis.device, basis.tiling
    count = basis.pairs.count
    flops = 2 * count * ((3 * p.D + 2 * p.E) if backward else (p.D + p.E))
    must_bytes = _compulsory_bytes(basis, backward)
    rate, b = device.peak_flops.get(_word(p), 0.0), p.dtype.itemsize
    roofline_us, bound_by = None, "unknown"
    if rate and device.bandwidth:
        times = {"compute": flops / rate * 1e6, "memory": must_bytes / device.bandwidth * 1e6}
        bound_by = max(times, key=times.__getitem__)
        roofline_us = times[bound_by]
    moves = None
    if tiling is not None:
        schedule = traffic.backward if backward else traffic.forward
        moves = schedule(p, device, tiling, basis.arrays)
    shared, unit, every = traffic.fast_elements(p, device)
    paper = traffic.paper_elements(p, shared)
    floors = [
        traffic.floor_elements(p, count, size, units)
        for size, units in ((unit, device.units), (every, 1))
    ]
    return PassCost(
        flops=flops,
        compulsory_bytes=must_bytes,
        traffic=moves,
        floor_bytes=None if floors[0] is None else floors[0] * b,
        floor_hbm_bytes=None if floors[1] is None else floors[1] * b,
        paper_bytes=None if paper is None else paper[backward] * b,
        roofline_us=roofline_us,
        bound_by=bound_by,
        ledger=_ledger(basis, backward, workspace_bytes),
    )


def _word(p: Problem) -> str:
    return str(p.dtype).removeprefix("torch.")


def _sizes(basis: _Basis) -> dict[str, int]:
    """Bytes of each array of the problem by its name; "sinks" and "alibi" in float32."""
    p, entries = basis.problem, 1 if basis.problem.packed else basis.problem.B
    b, rows, keys = p.dtype.itemsize, entries * p.Hq * p.M, entries * p.Hk * p.N
    wide = p.lse_dtype.itemsize
    shapes = (("bias", p.bias, b), ("sinks", p.sinks, wide), ("alibi", p.alibi, wide))
    extras = {name: math.prod(shape) * size for name, shape, size in shapes if shape is not None}
    if basis.arrays:
        extras["arrays of the mask"] = sum(t.numel() * t.element_size() for t in basis.arrays)
    main = {"q": rows * p.D * b, "k": keys * p.D * b, "v": keys * p.E * b}
    return main | extras | {"o": rows * p.E * b, "lse": rows * wide}


def _compulsory_bytes(basis: _Basis, backward: bool) -> int:
    """Each input that is used read once (of q, k and v what sees or is seen), each output written
    once."""
    p, size = basis.problem, _sizes(basis)
    b, wide = p.dtype.itemsize, p.lse_dtype.itemsize
    rows, keys = reached(p, basis.arrays)
    read = rows * p.D * b + keys // max(p.G, 1) * (p.D + p.E) * b
    read += sum(n for name, n in size.items() if name not in ("q", "k", "v", "o", "lse"))
    if not backward:
        return read + size["o"] + (size["lse"] if basis.phase == "training" else 0)
    read += rows * (2 * p.E * b + wide)  # o, do, lse
    return read + sum(size[name] for _, name in _gradients(p))


def _gradients(p: Problem) -> list[tuple[str, str]]:
    """(letter, name) of the inputs whose gradients are wanted."""
    names = {"q": "q", "k": "k", "v": "v", "b": "bias", "s": "sinks"}
    return [(letter, names[letter]) for letter in p.grads]


def _ledger(basis: _Basis, backward: bool, workspace_bytes: int | None) -> Ledger:
    p, size = basis.problem, _sizes(basis)
    o_bytes, lse_bytes = size.pop("o"), size.pop("lse")
    cache = ("k", "v") if basis.phase == "decode" else ()
    entries = [
        Entry(f"{name} (cache)" if name in cache else name, n, "input") for name, n in size.items()
    ]
    if backward:
        entries += [Entry("o", o_bytes, "input"), Entry("do", o_bytes, "input")]
        entries += [Entry(f"d{name}", size[name], "output") for _, name in _gradients(p)]
    else:
        entries.append(Entry("o", o_bytes, "output"))
    entries.append(Entry("lse", lse_bytes, "saved"))
    if workspace_bytes is not None:
        entries.append(Entry("workspace", workspace_bytes, "workspace"))
    scores = (1 if p.packed else p.B) * p.Hq * p.M * p.N
    squares = ["probabilities", "dP", "dS"] if backward else ["scores", "probabilities"]
    entries += [Entry(name, scores * p.dtype.itemsize, "materialised") for name in squares]
    if p.p:
        entries.append(Entry("dropout mask", scores, "materialised"))  # a byte for each pair
    return Ledger(tuple(entries))


def _plain(cost: PassCost) -> dict[str, Any]:
    ledger = cost.ledger
    return asdict(cost) | {
        "ledger": {
            "entries": [asdict(e) for e in ledger.entries],
            "auxiliary_bytes": ledger.auxiliary_bytes,
            "with_inputs_and_outputs_bytes": ledger.with_inputs_and_outputs_bytes,
            "materialised_bytes": ledger.materialised_bytes,
        }
    }
