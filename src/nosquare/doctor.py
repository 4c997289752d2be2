"""`nosquare doctor`: what this machine has, what runs on it, and what does not and why."""

from __future__ import annotations

import platform

import torch

from .api import explain
from .backends import discover
from .device import describe
from .explain import Explanation
from .mask import Causal, Lengths, Window

GIB = 2**30


def doctor() -> None:
    """Print facts of the processors, then who would run each of a few typical problems."""
    print(f"nosquare on torch {torch.__version__}, Python {platform.python_version()}")
    for device in _devices():
        facts = describe(device)
        unit = "threads" if facts.kind == "cpu" else "multiprocessors"
        features = ", ".join(facts.features) or "no vector extension that is known here"
        memory = f"{facts.memory_bytes / GIB:.0f} GiB" if facts.memory_bytes else "memory unknown"
        print(f"\n{device}: {facts.name}, {facts.units} {unit}, {memory}, {features}")
        _problems(device)
    print(f"\nBackends, in the order in which they are asked: {', '.join(discover())}")
    for name, backend in discover().items():
        for line in getattr(backend, "remarks", list)():
            print(f"  {name}: {line}")
    print("ns.explain(q, k, v, ...) answers the same for any call of yours.")


def _devices() -> list[str]:
    cards = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    others = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *cards, *others]


def _problems(device: str) -> None:
    """Typical problems, 8 query heads on 2 key heads. Made small: their form decides, and on a CPU
    whether there is enough to do for a kernel of ours."""
    half = torch.bfloat16 if device != "mps" else torch.float16
    n, cached = 256, 4096
    lines: list[tuple[str, str, Explanation]] = []

    def who(title: str, m: int = n, dtype: torch.dtype = torch.float32, **options: object) -> None:
        q = torch.zeros(1, 8, m, 64, dtype=dtype, device=device)
        k = torch.zeros(1, 2, cached if m == 1 else n, 64, dtype=dtype, device=device)
        q.requires_grad_("training" in title)
        answer = explain(q, k, k, **options)  # type: ignore[arg-type]
        lines.extend((title, phase, answer) for phase in answer.chosen)

    who("training, causal, float32", mask=Causal())
    who(f"training, causal, {str(half).removeprefix('torch.')}", dtype=half, mask=Causal())
    who("decoding one token", m=1, mask=Causal())
    who("prefill in chunks, causal", m=n // 2, mask=Causal())
    who("sliding window", mask=Causal() & Window(before=63, after=0))
    who("padded batch", mask=Lengths(torch.tensor([n // 2], device=device)))
    said = [
        {name: why for (where, name), why in answer.reasons.items() if where == phase and why}
        for _, phase, answer in lines
    ]
    never = {name: why for name, why in said[0].items() if all(s.get(name) == why for s in said)}
    for (title, phase, answer), reasons in zip(lines, said, strict=True):
        print(f"  {title:<38} {phase:<9} {answer.chosen[phase] or 'nobody'}")
        for name, why in reasons.items():
            if name not in never:
                print(f"  {'':<48} not {name}: {'; '.join(why)}")
    for name, why in never.items():
        print(f"  none of them by {name}: {'; '.join(why)}")
