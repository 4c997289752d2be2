"""Long, many and far apart: what overflows an index, a grid or the memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..registry import check
from ..subject import Ask, Inapplicable
from ..trial import Case, Trial, judged
from ..truth import Options, gap_of_o
from ..verdict import CONVENTION, PASS, Finding

LONG = 100_003
SQUARE = 65_555  # its square has more elements than 32 bits can tell apart
GRID = 65_535  # blocks in y and z that CUDA launches at most
INDEX = 1 << 31  # elements that 32 bits can tell apart
SAMPLED_ROWS = 64


@check("long-keys", "extent", "N = 100,003 keys under few queries; the last of them count.",
       "pytorch/pytorch#162588")  # fmt: skip
def long_keys(t: Trial) -> Finding:
    q, k, v = t.qkv(16, LONG, 32)
    v[:, :, -3:] += 1000
    return t.agree([Case(f"M=16 N={LONG}", (q, k, v))])


@check("long-square", "extent", "M = N = 65,555, causal, on sampled rows.",
       "pytorch/pytorch#149261")  # fmt: skip
def long_square(t: Trial) -> Finding:
    if not _has_room(t, 8 * SQUARE * 64):
        raise Inapplicable("it takes minutes on a CPU")
    q, k, v = t.qkv(SQUARE, SQUARE, 64, heads=(1, 1))
    o = t.attend((q, k, v), Ask(causal=True))
    rows = torch.linspace(0, SQUARE - 1, SAMPLED_ROWS, device=t.device).long()
    keep = torch.arange(SQUARE, device=t.device) <= rows[:, None]
    gap = gap_of_o(o[:, :, rows], (q[:, :, rows], k, v), Options(keep), t.dtype)
    return judged(gap, f"M=N={SQUARE} causal")


@check("many-heads", "extent", "Batch times heads beyond 65,535 blocks of a grid.",
       "pytorch/pytorch#142228, flashinfer-ai/flashinfer#3125")  # fmt: skip
def many_heads(t: Trial) -> Finding:
    return t.agree(
        Case(f"B={b} H={h} M=3 N=5 D=8", t.qkv(3, 5, 8, b=b, heads=(h, h)))
        for b, h in ((GRID + 17, 1), (1, GRID + 17))
    )


def _has_room(t: Trial, needed_bytes: int) -> bool:
    """Whether the card has that much free; a CPU never does: it would take minutes."""
    return t.device.type == "cuda" and torch.cuda.mem_get_info(t.device)[0] > needed_bytes


def _far_apart(t: Trial, count: int, d: int, stride: int) -> Tensor:
    """(1, 1, count, d) whose rows lie `stride` elements apart; only these rows are ever written."""
    room = torch.empty((count - 1) * stride + d, dtype=t.dtype, device=t.device)
    return room.as_strided((1, 1, count, d), (room.numel(), room.numel(), stride, 1))


@check("big-offsets", "extent", "Offsets of more than 2^31 elements are 64-bit.",
       "Dao-AILab/flash-attention#2611, vllm-project/vllm#50427")  # fmt: skip
def big_offsets(t: Trial) -> Finding:
    n, d = 70, 64
    stride = (INDEX // (n - 2) + 8) & ~7  # the last row begins beyond 2^31
    needed_bytes = n * stride * t.dtype.itemsize
    if not _has_room(t, 2 * needed_bytes):
        gib = 2 * needed_bytes / 2**30
        raise Inapplicable(f"it needs a card with {gib:.0f} GiB of free memory")
    clean = t.qkv(n, n, d, heads=(1, 1))
    for place, name in enumerate("qkv"):
        x = list(clean)
        x[place] = _far_apart(t, n, d, stride).copy_(clean[place])
        found = t.agree([Case(f"rows of {name} {stride:,} elements apart, M=N={n}",
                              (x[0], x[1], x[2]), clean=clean)])  # fmt: skip
        if found.verdict != PASS:
            return found
    return found


class _Largest(TorchDispatchMode):
    """Remembers the elements of the largest tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        sizes = [x.untyped_storage().nbytes() // x.itemsize for x in tensors]
        self.elements = max(self.elements, *sizes, 0)
        return out


@check("no-square", "extent", "Nothing of size M x N is made.",
       "pytorch/pytorch#144960, huggingface/transformers#46960")  # fmt: skip
def no_square(t: Trial) -> Finding:
    card = t.device.type == "cuda"
    n = 16384 if card else 4096
    x = t.qkv(n, n, 16, heads=(1, 1))
    if card:
        torch.cuda.synchronize(t.device)
        torch.cuda.reset_peak_memory_stats(t.device)
        before = torch.cuda.memory_allocated(t.device)
        t.attend(x, Ask(causal=True))
        elements = (torch.cuda.max_memory_allocated(t.device) - before) // t.dtype.itemsize
        how = "peak of memory"
    else:
        with _Largest() as seen:
            t.attend(x, Ask(causal=True))
        elements, how = seen.elements, "largest tensor of a torch operator"
    words = f"{how}: {elements / n / n:.2f} of M x N elements, M=N={n}"
    # a dense evaluation holds one square at least; tiles of fixed size are far below half of one
    return Finding(PASS if elements < n * n / 2 else CONVENTION, words)
