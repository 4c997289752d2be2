"""A case is one line: phase, dtype, sizes, mask, features.

    forward float32 B1 Hq8 Hk8 M4096 N4096 D64 causal(start)
    decode bfloat16 B1 Hq32 Hk8 M1 N65536 D128 full()
    forward+backward float32 B1 Hq8 Hk8 M4096 N4096 D64 E128 full() bias=Hq,1,N dropout=0.1

E is left out where it equals D. The mask is spelled as str(mask) spells it; its arrays t0, t1, ...
are made from the seed (see Data.of). Features:

    dropout=p  softcap=x  bias=axes (B or none, Hq or 1, M or 1, N or 1)  alibi  sinks
    grad       forward alone, of inputs that require gradients
    packed     B sequences side by side, M = N tokens in all; lengths.py says how long they are
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..bound import Bound
from ..errors import ArgumentError, NosquareError, UnsupportedError
from ..estimate import contiguous
from ..mask import Mask
from ..pairs import pairs
from ..problem import Problem
from ..spelling import parse
from .lengths import offsets

PHASES = ("forward", "backward", "forward+backward", "decode")
DTYPES = {str(t).removeprefix("torch."): t for t in
          (torch.float64, torch.float32, torch.bfloat16, torch.float16)}  # fmt: skip
FLOP_CONVENTION = (
    "2*pairs*(D+E) forward, 2*pairs*(3D+2E) backward, pairs = visible (batch, head, query, key)"
)
EXAMPLE = "forward float32 B1 Hq8 Hk8 M1024 N1024 D64 causal(start)"
FLAGS = ("alibi", "sinks", "grad", "packed")
_SIZES = ("B", "Hq", "Hk", "M", "N", "D", "E")
_SIZE = re.compile(r"(B|Hq|Hk|M|N|D|E)(\d+)")
_ARRAYS = re.compile(r"(lengths|documents|dense|blocksparse)\([^()]*?(?:block=(\d+))?\)")
_DOCUMENTS = 4  # how many a made mask has
# Numbers of a case with more than this many are drawn on the device it runs on: a CPU draws 2^24
# in about 0.2 s, and a long prefill has 2^28.
DRAWN_ON_CPU = 1 << 24


@dataclass(frozen=True)
class Case:
    """One question put to all contestants; str(case) is its line, and Case.parse reads it back.

    bias  names of its axes joined by commas, as "Hq,1,N"; "" for none
    grad  forward alone is timed, but the inputs require gradients
    packed  B sequences side by side, of M = N tokens together; the mask acts on each
    """

    phase: str
    dtype: torch.dtype
    B: int
    Hq: int
    Hk: int
    M: int
    N: int
    D: int
    E: int
    mask: str = "full()"
    dropout: float = 0.0
    softcap: float | None = None
    bias: str = ""
    alibi: bool = False
    sinks: bool = False
    grad: bool = False
    packed: bool = False

    def __str__(self) -> str:
        sizes = [
            f"{name}{getattr(self, name)}" for name in _SIZES if name != "E" or self.E != self.D
        ]
        words = [self.phase, str(self.dtype).removeprefix("torch."), *sizes, self.mask]
        words += [f"dropout={self.dropout}"] if self.dropout else []
        words += [f"softcap={self.softcap}"] if self.softcap is not None else []
        words += [f"bias={self.bias}"] if self.bias else []
        words += [name for name in FLAGS if getattr(self, name)]
        return " ".join(words)

    @staticmethod
    def parse(line: str) -> Case:
        """Read a line. Raises ArgumentError when it is not a case, or no mask of that size."""
        try:
            case = _read(line.split())
            tiny = replace(case, B=1, M=min(case.M, 8), N=min(case.N, 8))
            mask = parse(case.mask, mask_arrays(tiny, torch.Generator()))
            Bound(mask, (1,), case.Hq, tiny.M, tiny.N)  # raises where an array does not fit
        except (ValueError, KeyError, IndexError, TypeError, ZeroDivisionError) as error:
            why = error.sentence if isinstance(error, NosquareError) else str(error)
            raise ArgumentError(
                "This line is not a benchmark case.",
                {"line": repr(line), "because": why, "phases": ", ".join(PHASES),
                 "dtypes": ", ".join(DTYPES)},
                f'"{EXAMPLE}".',
            ) from None  # fmt: skip
        return case

    @property
    def G(self) -> int:
        """Query heads that share a key head."""
        return self.Hq // self.Hk

    @property
    def wants_grads(self) -> bool:
        """Whether gradients are computed, and so compared."""
        return "backward" in self.phase

    def flops(self, pairs: int) -> int:
        """Floating-point operations by FLOP_CONVENTION, for this many visible pairs."""
        forward, backward = 2 * pairs * (self.D + self.E), 2 * pairs * (3 * self.D + 2 * self.E)
        return {"backward": backward, "forward+backward": forward + backward}.get(
            self.phase, forward
        )

    @property
    def numel(self) -> int:
        """Elements of q, k, v and do together."""
        entries = 1 if self.packed else self.B
        return entries * (self.Hq * self.M + self.Hk * self.N) * (self.D + self.E)

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        """Of the bias: (Hq | 1, M | 1, N | 1), or one for each entry; None where there is none."""
        sizes = {"B": self.B, "Hq": self.Hq, "M": self.M, "N": self.N, "1": 1}
        return tuple(sizes[axis] for axis in self.bias.split(",")) if self.bias else None

    def problem(self, learns: bool | None = None) -> Problem:
        """What is asked, without any array: those of its mask count as hiding nothing.

        learns  whether gradients are wanted; None: as the case says
        """
        learns = self.wants_grads or self.grad if learns is None else learns
        return contiguous(
            {name: int(getattr(self, name)) for name in _SIZES},
            self.dtype,
            self.mask,
            softcap=self.softcap,
            bias=self.bias_shape,
            sinks=(self.Hq,) if self.sinks else None,
            alibi=(self.Hq,) if self.alibi else None,
            p=self.dropout,
            packed=self.packed,
            grads="qkv" + "b" * bool(self.bias) + "s" * self.sinks if learns else "",
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of k and v together: what a decoding step must read."""
        return self.B * self.Hk * self.N * (self.D + self.E) * self.dtype.itemsize


def _read(words: list[str]) -> Case:
    phase, name, *rest = [*words[:2], "", ""][:2] + words[2:]
    if phase not in PHASES:
        raise ValueError(f"{phase!r} is not a phase")
    if name not in DTYPES:
        raise ValueError(f"{name!r} is not a dtype")
    sizes: dict[str, int] = {}
    while rest and (found := _SIZE.fullmatch(rest[0])):
        sizes[found[1]] = int(found[2])
        rest = rest[1:]
    if missing := [name for name in _SIZES[:-1] if not sizes.get(name)]:
        raise ValueError(f"no {missing[0]}, or it is 0")
    if not rest:
        raise ValueError("it names no mask")
    if sizes["Hq"] % sizes["Hk"] or (phase == "decode" and sizes["M"] != 1):
        raise ValueError("Hq is a multiple of Hk, and decoding has M1")
    more: dict[str, Any] = {"E": sizes["D"], "mask": rest[0], **sizes}
    for word in rest[1:]:
        feature, _, value = word.partition("=")
        if feature in FLAGS and not value:
            more[feature] = True
        elif feature in ("dropout", "softcap"):
            more[feature] = float(value)
        elif feature == "bias" and re.fullmatch("(B,)?(Hq|1),(M|1),(N|1)", value):
            more[feature] = value
        else:
            raise ValueError(f"{word!r} is not a feature")
    if more.get("grad") and phase != "forward":
        raise ValueError("grad belongs to the phase forward")
    if more.get("packed"):
        if phase == "decode" or sizes["M"] != sizes["N"]:
            raise ValueError("packed sequences have M = N tokens, and are not for decoding")
        if more.get("bias") or more.get("dropout") or _arrays(more["mask"]):
            raise ValueError("packed goes with no bias, no dropout and no mask of arrays")
    return Case(phase, DTYPES[name], **more)


@dataclass(frozen=True)
class Data:
    """The arrays of a case.

    q (B, Hq, M, D)  k (B, Hk, N, D)  v (B, Hk, N, E)  do (B, Hq, M, E); packed, (M, Hq, D) and
    so on
    bias   axes as the case names them, in the case's dtype; None where absent
    alibi, sinks  (Hq,) float32; None where absent
    first  (b, h): which entry and query head of the whole case this begins at
    cu     where packed sequences begin and end, int32 (B + 1,); None where they are not packed
    """

    case: Case
    mask: Mask
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    bias: Tensor | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    seed: int = 0
    first: tuple[int, int] = (0, 0)
    cu: Tensor | None = None

    @staticmethod
    def of(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Data:
        """Standard normal numbers from the seed, drawn in float32 and rounded once.

        They are drawn on the CPU, and so the same on every device, up to DRAWN_ON_CPU of them;
        beyond, on the device itself.

        Lengths are between N/4 and N; documents are four of equal length; dense pairs are visible
        with probability 1/2, tiles of a block-sparse layout too (its diagonal always). ALiBi slopes
        are 2^-1, 2^-2, ...; biases and sinks are normal.
        """
        c, device = case, torch.device(device)
        random = torch.Generator(device if c.numel > DRAWN_ON_CPU else "cpu").manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = c.dtype) -> Tensor:
            drawn = torch.randn(shape, generator=random, device=random.device)
            return drawn.to(dtype).to(device)

        def rows(heads: int, tokens: int, width: int) -> Tensor:
            packed = (tokens, heads, width)
            return normal(*(packed if c.packed else (c.B, heads, tokens, width)))

        mask = parse(c.mask, [t.to(device) for t in mask_arrays(c, random)])
        bias = None if c.bias_shape is None else normal(*c.bias_shape)
        q, k, v = rows(c.Hq, c.M, c.D), rows(c.Hk, c.N, c.D), rows(c.Hk, c.N, c.E)
        do = rows(c.Hq, c.M, c.E)
        cu = offsets(c.B, c.M, seed).to(device) if c.packed else None
        alibi = 0.5 ** torch.arange(1.0, c.Hq + 1, device=device) if c.alibi else None
        sinks = normal(c.Hq, dtype=torch.float32) if c.sinks else None
        data = Data(c, mask, q, k, v, do, bias, alibi, sinks, seed, cu=cu)
        if c.wants_grads or c.grad:
            for t in data.leaves.values():
                t.requires_grad_()
        return data

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.q.device

    @property
    def drawn(self) -> str:
        """Where the numbers were drawn, in words: see `of`."""
        small = self.case.numel <= DRAWN_ON_CPU
        return f"drawn on the {'CPU' if small or self.device.type == 'cpu' else 'device'}"

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The arrays that have gradients, by name."""
        found = {"q": self.q, "k": self.k, "v": self.v, "bias": self.bias, "sinks": self.sinks}
        return {name: t for name, t in found.items() if t is not None}

    @property
    def lengths(self) -> list[int]:
        """Of the packed sequences, on the host; [] where they are not packed."""
        return [] if self.cu is None else self.cu.diff().tolist()

    def entry(self, t: Tensor, b: int, heads: slice) -> Tensor:
        """A batch entry, or packed sequence, of what lies as q, k, v, o or do: (1, heads, tokens,
        width)."""
        if self.cu is None:
            return t[b : b + 1, heads]
        start, stop = self.cu[b : b + 2].tolist()
        return t[start:stop, heads].transpose(0, 1)[None]

    def part(self, b: int, key_head: int) -> Data:
        """One batch entry, or packed sequence, and the group of one key head, as a case of its own
        that is not packed."""
        c, h = self.case, slice(key_head * self.case.G, (key_head + 1) * self.case.G)
        small = replace(c, B=1, Hk=1, Hq=c.G)
        arrays = [
            array[b : b + 1] if kind in ("lengths", "q_ids", "k_ids") else array
            for (kind, _), array in zip(_arrays(c.mask), self.mask.tensors, strict=True)
        ]
        bias = self.bias if self.bias is None or self.bias.ndim == 3 else self.bias[b : b + 1]
        heads = {name: cut_heads(t, h, c) for name, t in
                 (("bias", bias), ("alibi", self.alibi), ("sinks", self.sinks))}  # fmt: skip
        one = slice(key_head, key_head + 1)
        q, do = (self.entry(t, b, h) for t in (self.q, self.do))
        k, v = (self.entry(t, b, one) for t in (self.k, self.v))
        small = replace(small, M=q.shape[2], N=k.shape[2], packed=False)
        first = (self.first[0] + b, self.first[1] + h.start)
        return Data(small, parse(c.mask, arrays), q, k, v, do, **heads, seed=self.seed, first=first)


def cut_heads(t: Tensor | None, h: slice, case: Case) -> Tensor | None:
    """The heads h of a bias ([B,] Hq | 1, M | 1, N | 1), of slopes or of sinks (Hq,)."""
    if t is None:
        return None
    axis = max(t.ndim - 3, 0)
    return t if t.shape[axis] != case.Hq else t[(slice(None),) * axis + (h,)]


def _arrays(spelling: str) -> list[tuple[str, int]]:
    """(kind, block) of each array of a mask, in order; of documents, "q_ids" and "k_ids"."""
    found: list[tuple[str, int]] = []
    for kind, block in _ARRAYS.findall(spelling):
        names = ("q_ids", "k_ids") if kind == "documents" else (kind,)
        found += [(name, int(block or 1)) for name in names]
    return found


def mask_arrays(case: Case, random: torch.Generator) -> list[Tensor]:
    """Arrays for the mask's t0, t1, ...: lengths (B,), ids (B, M), (B, N), dense (M, N), layout.

    They lie where the generator does.
    """
    c, made, device = case, [], random.device
    for kind, block in _arrays(c.mask):
        if kind == "lengths":
            low = max(c.N // 4, 1)
            made.append(torch.randint(low, c.N + 1, (c.B,), generator=random, device=device))
        elif kind in ("q_ids", "k_ids"):
            length = c.M if kind == "q_ids" else c.N
            ids = torch.arange(length, device=device) * _DOCUMENTS // length
            made.append(ids.expand(c.B, length).contiguous())
        elif kind == "dense":
            made.append(torch.rand(c.M, c.N, generator=random, device=device) < 0.5)
        else:
            rows, columns = -(-c.M // block), -(-c.N // block)
            layout = torch.rand(rows, columns, generator=random, device=device) < 0.5
            made.append(layout | torch.eye(rows, columns, dtype=torch.bool, device=device))
    return made


def visible_pairs(data: Data) -> int:
    """How many (batch, head, query, key) are visible.

    Raises UnsupportedError where a mask over pairs is too large to be looked at.
    """
    cu = None if data.cu is None else (data.cu, data.cu)
    found = pairs(data.case.problem(), data.mask.tensors, cu)
    if not found.exact:
        raise UnsupportedError(
            "The visible pairs of this mask are too many to be counted.",
            {"case": data.case, "pairs, at most": f"{found.count:,}"},
            "a smaller M and N.",
        )
    return found.count
