"""What the compiler and the plans must know of a card: a torch device here, or a name offline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

KIB = 1024
_SHARED = {
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    110: 227,
    120: 99,
    121: 99,
}


@dataclass(frozen=True)
class Card:
    """A card.

    backend       Triton's: "cuda" or "hip"
    arch          90 for sm_90, "gfx942" for an AMD card
    warp          threads of a warp
    shared_bytes  fast memory that one block may have
    units         streaming multiprocessors (compute units)
    """

    backend: str
    arch: int | str
    warp: int
    shared_bytes: int
    units: int

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    @property
    def wgmma(self) -> bool:
        """Whether the matrix units read their operands from shared memory: Hopper and later."""
        return self.backend == "cuda" and int(self.arch) in (90, 100, 103, 110)


# For compiling without a card; units: H200, A100, B200, MI300X.
NAMED = {
    "sm_80": Card("cuda", 80, 32, 163 * KIB, 108),
    "sm_90": Card("cuda", 90, 32, 227 * KIB, 132),
    "sm_100": Card("cuda", 100, 32, 227 * KIB, 148),
    "gfx942": Card("hip", "gfx942", 64, 64 * KIB, 304),
}


@cache
def card_of(device: torch.device) -> Card:
    """The card that a torch device is. A CPU stands for the smallest: Triton's interpreter."""
    if device.type != "cuda":
        return Card("cuda", 80, 32, 99 * KIB, 4)
    p: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Card("hip", p.gcnArchName.partition(":")[0], 64, 64 * KIB, p.multi_processor_count)
    arch = p.major * 10 + p.minor
    shared = getattr(p, "shared_memory_per_block_optin", 0) or _SHARED.get(arch, 99) * KIB
    return Card("cuda", arch, 32, shared, p.multi_processor_count)
