"""ns.cost: the account of a problem where it would run, with the plan and the workspace of the
backend that would run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .backends import BACKWARD, FORWARD, Choice, choose
from .cost import Cost
from .device import Device, by_card_name, describe, known
from .errors import ArgumentError, UnsupportedError
from .problem import Problem
from .traffic import ATOMIC, SEPARATE, Tiling

Where = Device | torch.device | str


def cost(
    problem: Problem,
    device: Where | None = None,
    arrays: Sequence[Tensor] = (),
    *,
    phase: str | None = None,
    tiles: tuple[int, int] | None = None,
) -> Cost:
    """What a problem costs: pairs, flops, bytes that must move, bytes a plan moves, the ledger.

    problem  as ns.problem(q, k, v, ...) makes it; its arrays may be on the meta device
    device   None: the problem's own (for meta arrays, this CPU). "h200" and others by their short
             names, whether or not they are here; a torch device of this machine; or a Device, such
             as device.measured("cpu"): a CPU's rates are not known without a measurement
    arrays   of the mask (mask.tensors); without them an upper bound is counted
    phase    "training", "prefill" or "decode"; None: read off the problem
    tiles    (rows, keys) of a schedule to account for; None: the plan of the backend that would run
             it here where it tells its tiles, else the largest usual tiles that fit the device

    Nothing is computed or measured. Raises ArgumentError for a device or a phase that is not known.
    """
    facts, here = _find(device, problem)
    asked = None if tiles is None else _asked(problem, tiles)
    if here is None:
        note = (
            f"There is no {facts.name} in this machine, so no backend was asked: traffic and "
            "workspace are those of a fused kernel with the tiles that are named."
        )
        return Cost.of(problem, facts, phase, arrays, tiling=asked, notes=(note,))
    p = replace(problem, device=here)
    passes = [_Pass(p, FORWARD)]
    if phase == "training" or (phase is None and p.grads):
        p = p if p.grads else replace(p, grads="qkv")
        passes = [_Pass(p, FORWARD), _Pass(p, BACKWARD)]
    return Cost.of(
        *(p, facts, phase, arrays),
        tiling=asked or passes[0].tiling,
        backward_tiling=asked or passes[-1].tiling,
        workspace=(passes[0].workspace_bytes, passes[-1].workspace_bytes),
        notes=tuple(note for one in passes for note in one.notes),
    )


def contiguous(
    sizes: Mapping[str, int], dtype: torch.dtype, mask: str = "full()", **more: Any
) -> Problem:
    """The problem of contiguous arrays of these sizes, made without any array.

    sizes  B, Hq, Hk, M, N, D and E;  mask  its spelling;  more  other fields of Problem
    """
    s, fields = sizes, dict[str, Any](more)
    shapes = ((s["Hq"], s["M"], s["D"]), (s["Hk"], s["N"], s["D"]), (s["Hk"], s["N"], s["E"]))
    if fields.get("packed"):  # a token's heads side by side
        fields["strides"] = tuple((h * d, d, 1) for h, _, d in shapes)
    else:
        fields["strides"] = tuple((h * m * d, m * d, d, 1) for h, m, d in shapes)
    fields |= {name: s[name] for name in ("Hq", "Hk", "M", "N", "D", "E")}
    device, scale = torch.device("meta"), s["D"] ** -0.5
    return Problem((s["B"],), dtype=dtype, device=device, scale=scale, mask=mask, **fields)


def workspace_bytes(problem: Problem, device: torch.device, phase: str) -> int | None:
    """What the backend takes, beside inputs and outputs, that would run a phase of the problem on a
    device of this machine; None where it does not tell. Raises UnsupportedError where none can."""
    p = replace(problem, device=device)
    found: int | None = _told(choose(p, phase), "workspace_bytes", p, phase)
    return found


def present(device: torch.device | str) -> Device:
    """The facts of a torch device of this machine. Raises ArgumentError when it is not here."""
    try:
        return describe(device)
    except (RuntimeError, AssertionError) as error:  # as torch says it
        raise ArgumentError(
            "torch does not see this device.",
            {"device": device, "torch says": str(error).partition("\n")[0]},
            'device="cpu", or a card by its short name, as "h200": it need not be here.',
        ) from None


class _Pass:
    """Who would run forward or backward here: its schedule, its workspace, and why it is that one.

    tiling, workspace_bytes  None where it does not tell
    """

    def __init__(self, p: Problem, which: str) -> None:
        self.tiling: Tiling | None = None
        self.workspace_bytes: int | None = None
        try:
            choice = choose(p, which)
        except UnsupportedError as error:
            self.notes = [f"Here nobody can run {which}: {error.sentence}"]
            return
        self.tiling = _told(choice, "tiling", p, which)
        self.workspace_bytes = _told(choice, "workspace_bytes", p, which)
        self.notes = [f"Here {which} runs on {choice.name}: {choice.plan}."]
        self.notes += [f"  not {name}: {'; '.join(why)}" for name, why in choice.refusals.items()]
        if self.tiling is None:
            self.notes.append(
                f"  {choice.name} does not tell its tiles: the largest usual ones are assumed."
            )


def _told(choice: Choice, name: str, p: Problem, which: str) -> Any:
    tell = getattr(choice.backend, name, None)
    return None if tell is None else tell(p, choice.plan, which)


def _asked(p: Problem, tiles: tuple[int, int]) -> Tiling:
    backward = SEPARATE if p.deterministic else ATOMIC
    return Tiling(*tiles, backward=backward, source="as asked for")


def _find(device: Where | None, p: Problem) -> tuple[Device, torch.device | None]:
    """The facts of a device, and the torch device of this machine that it is; None for none."""
    if device is None:
        device = torch.device("cpu") if p.device.type == "meta" else p.device
    if isinstance(device, str):
        word = device.partition(":")[0]
        device = torch.device(device) if word in ("cpu", "cuda", "mps") else known(device)
    if isinstance(device, torch.device):
        return present(device), device
    if device.kind != "cuda":
        return device, torch.device(device.kind)
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        if device.name in (name, getattr(by_card_name(name), "name", None)):
            return device, torch.device("cuda", index)
    return device, None
