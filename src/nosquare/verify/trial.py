"""What a check has at hand: numbers, the subject, and comparisons that end in a finding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .subject import PLAIN, Ask, Inapplicable, Refusal, Subject, gradients
from .truth import Gap, Options, Triple, gap_of_o, gaps_of_gradients
from .verdict import FAIL, PASS, REFUSED, Finding


@dataclass(frozen=True)
class Case:
    """One call of a list: its name in a report, q, k, v, the options, and what else is special.

    clean  q, k, v for the truth, where x holds numbers that must not matter
    grads  compare gradients too
    """

    label: str
    x: Triple
    ask: Ask = PLAIN
    clean: Triple | None = None
    grads: bool = False
    do: Tensor | None = None


def leaves(x: Triple) -> Triple:
    """The same q, k, v, each of which requires a gradient."""
    q, k, v = (t.detach().requires_grad_() for t in x)
    return q, k, v


@dataclass(frozen=True)
class Trial:
    """A subject, in one dtype, on one device."""

    subject: Subject
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    # ---- numbers ----

    def rnd(self, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
        """Normal numbers that depend on the seed alone, drawn on the CPU in float32."""
        g = torch.Generator().manual_seed(seed)
        drawn = torch.randn(shape, generator=g, dtype=torch.float32) * scale
        return drawn.to(device=self.device, dtype=self.dtype)

    def qkv(self, m: int, n: int, d: int = 16, e: int | None = None, *, b: int = 1,
            heads: tuple[int, int] = (2, 2), seed: int = 1) -> Triple:  # fmt: skip
        """q (b, Hq, m, d), k (b, Hk, n, d), v (b, Hk, n, e); heads: (Hq, Hk)."""
        hq, hk = heads
        q, k = self.rnd(b, hq, m, d, seed=seed), self.rnd(b, hk, n, d, seed=seed + 1)
        return q, k, self.rnd(b, hk, n, d if e is None else e, seed=seed + 2)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros of the trial's dtype and device."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def mask(self, *shape: int, value: bool = True) -> Tensor:
        """A bool tensor on the device."""
        return torch.full(shape, value, dtype=torch.bool, device=self.device)

    # ---- calls ----

    def attend(self, x: Triple, ask: Ask = PLAIN) -> Tensor:
        """o of the subject. Memory that it may get is filled with NaN first, so that a row which
        nobody writes shows."""
        q, _, v = x
        stain = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype, device=q.device)
        del stain
        return self.subject.attend(*x, ask)

    def options(self, x: Triple, ask: Ask) -> Options:
        """The Ask, spelt out for the truth."""
        m, n = x[0].shape[-2], x[1].shape[-2]
        keep = self.subject.visible(ask, m, n, self.device)
        return Options(keep, None if ask.bias is None else ask.bias.detach(), ask.scale)

    def gaps(self, case: Case) -> list[Gap]:
        """How far the answers to one case are from the truth."""
        truth = case.x if case.clean is None else case.clean
        options = self.options(truth, case.ask)
        if not case.grads:
            return [gap_of_o(self.attend(case.x, case.ask), truth, options, self.dtype)]
        q, k, v = (t.detach().clone(memory_format=torch.preserve_format).requires_grad_()
                   for t in case.x)  # fmt: skip
        o = self.attend((q, k, v), case.ask)
        do = self.rnd(*o.shape, seed=99) if case.do is None else case.do
        found = gradients(o, (q, k, v), do)
        first = gap_of_o(o, truth, options, self.dtype)
        return [first, *gaps_of_gradients(found, truth, do, options, self.dtype)]

    # ---- findings ----

    def agree(self, cases: Iterable[Case]) -> Finding:
        """All cases against the truth, in their order, the smallest first: pass with the answer
        that is nearest to its bound, or fail with the first that is outside.

        A case that is refused is noted and the others go on; one that cannot be asked likewise.
        """
        done: list[Gap] = []
        answered = 0
        refused: list[str] = []
        absent: list[str] = []
        for case in cases:
            try:
                gaps = self.gaps(case)
            except Refusal as refusal:
                refused.append(f"{case.label}: {refusal}")
                continue
            except Inapplicable as why:
                absent.append(str(why))
                continue
            for gap in gaps:
                if not gap.ok:
                    return off_by(gap, case.label)
            done += gaps
            answered += 1
        if refused:
            count = len(refused)
            words = f"{count} of {count + answered}, " if answered else ""
            return Finding(REFUSED, words + refused[0])
        if not done:
            raise Inapplicable(absent[0])
        return within(done)


def within(gaps: Iterable[Gap]) -> Finding:
    """A pass: says the one of these gaps that is nearest to its bound."""
    worst = max(gaps, key=lambda gap: gap.nearness)
    words = f"{worst.name}: error {worst.error:.1e}, bound {worst.bound:.1e}"
    return Finding(PASS, words if worst.error else "exact", worst.error, worst.bound)


def off_by(gap: Gap, where: str) -> Finding:
    """A fail: where, and by how much."""
    return Finding(FAIL, f"{where}: {gap}", gap.error, gap.bound)


def judged(gap: Gap, where: str) -> Finding:
    """within or off_by, as the gap says."""
    return within([gap]) if gap.ok else off_by(gap, where)
