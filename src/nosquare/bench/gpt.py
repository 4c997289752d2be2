"""A small GPT, and text that every machine has, for `nosquare bench train`."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..api import attention
from ..errors import ArgumentError, UnsupportedError
from ..mask import Causal

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SYMBOLS = 256  # bytes
TEXT_BYTES = 16 << 20
HELD_OUT = 0.1  # of the text, its end


@dataclass(frozen=True)
class Size:
    """Of a model and of a step.

    head      width of a head; tokens of a sequence; batch: sequences of a step
    """

    layers: int
    width: int
    head: int
    tokens: int
    batch: int

    def __post_init__(self) -> None:
        if self.head < 2 or self.head % 2 or self.width % self.head:
            raise ArgumentError(
                "Heads of this width do not fill the model.",
                {"width of a head": self.head, "width of the model": self.width},
                f"an even width that divides {self.width}: --heads 64,128.",
            )

    def __str__(self) -> str:
        return (f"{self.layers} layers, width {self.width}, heads of {self.head}, "
                f"{self.batch} x {self.tokens} tokens a step")  # fmt: skip


def attend_by(name: str) -> Attend:
    """Causal attention of q, k, v (B, H, T, D) by "torch", "nosquare" or "nosquare:<backend>"."""
    who, _, backend = name.partition(":")
    if name == "torch":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if who == "nosquare":
        return lambda q, k, v: attention(q, k, v, mask=Causal(), backend=backend or None)
    raise ArgumentError(
        "There is no such contestant in training.",
        {"name": repr(name)},
        "torch, nosquare, or nosquare:<backend>.",
    )


class _Layer(nn.Module):
    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.head, self.attend = size.head, attend
        self.before, self.between = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        b, t, width = x.shape
        # (B, H, T, D), a view: the tokens of a head lie 3 * width apart
        parts = self.qkv(self.before(x)).view(b, t, 3, width // self.head, self.head)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        o = self.attend(_turned(q, turn), _turned(k, turn), v)
        x = x + self.out(o.transpose(1, 2).reshape(b, t, width))
        more: Tensor = self.down(F.gelu(self.up(self.between(x))))
        return x + more


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions, in the dtype of x."""
    cos, sin = turn
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class GPT(nn.Module):
    """Decoder layers over bytes, with rotary positions. The weights follow from torch's seed."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(SYMBOLS, size.width)
        self.layers = nn.ModuleList(_Layer(size, attend) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss (nats a byte) of the next byte, tokens (B, T + 1)."""
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(given)
        place = torch.arange(given.shape[1], device=x.device, dtype=torch.float32)
        half = torch.arange(self.size.head // 2, device=x.device, dtype=torch.float32)
        angle = place[:, None] * 10000.0 ** (-2 * half / self.size.head)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(
            x.device.type) else x.dtype  # fmt: skip
        turn = angle.cos().to(dtype), angle.sin().to(dtype)
        for layer in self.layers:
            x = layer(x, turn)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


@cache
def text() -> Tensor:
    """The source of Python's standard library, uint8, in the order of its names.

    Raises UnsupportedError where there is none.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found, size = [], 0
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        inside = path.relative_to(root).parts
        if "site-packages" in inside or "dist-packages" in inside or size >= TEXT_BYTES:
            continue
        found.append(path.read_bytes())
        size += len(found[-1])
    if not found:
        raise UnsupportedError(
            "There is no text to train on: this Python has no source of its standard library.",
            {"folder": root},
            "a Python whose standard library is not packed into one file.",
        )
    return torch.frombuffer(bytearray(b"".join(found)[:TEXT_BYTES]), dtype=torch.uint8)


def batches(size: Size, seed: int, count: int, held_out: bool = False) -> list[Tensor]:
    """So many batches (B, T + 1) int64, on the CPU, of places that follow from the seed."""
    whole = text()
    cut = int(len(whole) * (1 - HELD_OUT))
    part = whole[cut:] if held_out else whole[:cut]
    g = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(part) - size.tokens - 1, (count, size.batch), generator=g)
    return [torch.stack([part[s : s + size.tokens + 1] for s in row]).long()
            for row in starts.tolist()]  # fmt: skip
