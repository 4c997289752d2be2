"""What is asked of the ledger, checked once."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ..device import Device, describe, known
from ..errors import ArgumentError, UnsupportedError
from .model import Model
from .pieces import Run

GIB = 2**30
PREFILL, DECODE, TRAINING = "prefill", "decode", "training"
PHASES = (PREFILL, DECODE, TRAINING)
NOSQUARE, EAGER = "nosquare", "eager"
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8": 8, "int8": 8, "int4": 4}
COMPUTED = ("float32", "bfloat16", "float16")  # what activations can be
PAGE, TRANSFORMERS = 16, 0  # tokens in a page; no pages: transformers' own cache

# What the process takes besides its arrays: an assumption that the user can change. On a card: the
# CUDA context with its kernels, and the workspace of cuBLAS: 767 and 64 MiB on an H200 with torch
# 2.11, as tests/test_gpu_fit.py prints them; the rest is for kernels that it did not load. On a
# CPU: torch 2.13, transformers 5.23 and nosquare, imported, were 404 MiB resident, and 510 once
# llvm_cpu had compiled six kernels.
RESERVE_BYTES = {"cuda": GIB, "cpu": 5 * GIB // 8}

_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One question: does this model, used so, fit this device?

    context      tokens of each sequence, the new ones included
    concurrency  sequences at once
    chunk        tokens of each that a prefill reads at once; 0: all
    page         tokens in a page of the cache; 0: transformers' DynamicCache
    dtype        of activations and logits; kv_dtype of the cache; weights_dtype of the weights
    optimizer    "adam" or "none"
    """

    model: Model
    device: Device
    context: int
    concurrency: int = 1
    phase: str = DECODE
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    weights_dtype: str = "bfloat16"
    attention: str = NOSQUARE
    page: int = PAGE
    chunk: int = 0
    gpus: int = 1
    optimizer: str = "adam"
    reserve_bytes: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens of each sequence that one forward computes."""
        if self.phase == DECODE:
            return 1
        if self.phase == PREFILL and self.chunk:
            return min(self.chunk, self.context)
        return self.context

    def run(self) -> Run:
        """The forward to account for: at the full context."""
        return Run(
            model=self.model.divided(self.gpus),
            B=self.concurrency,
            M=self.new_tokens,
            past=self.context - self.new_tokens,
            d=BITS[self.dtype] // 8,
            eager=self.attention == EAGER,
            page=self.page,
            training=self.phase == TRAINING,
            cuda=self.device.kind != "cpu",
        )

    def check(self) -> Request:
        """The request itself. Raises ArgumentError or UnsupportedError naming what is at fault."""
        _choice("phase", self.phase, PHASES)
        _choice("attention", self.attention, (NOSQUARE, EAGER))
        _choice("optimizer", self.optimizer, ("adam", "none"))
        _choice("dtype", self.dtype, COMPUTED)
        _choice("kv-dtype", self.kv_dtype, ("float32", "bfloat16", "float16", "float8", "int8"))
        _choice("weights-dtype", self.weights_dtype, tuple(BITS))
        for name, least in (("context", 1), ("concurrency", 1), ("gpus", 1), ("page", 0),
                            ("chunk", 0), ("reserve_bytes", 0)):  # fmt: skip
            _at_least(name, getattr(self, name), least)
        if self.phase == DECODE and not self.model.causal:
            raise UnsupportedError(
                "An encoder writes no tokens, so it has no decode phase.",
                {"model_type": self.model.family},
                "--phase prefill, or --phase training.",
            )
        if self.phase == TRAINING and BITS[self.weights_dtype] < 16:
            raise UnsupportedError(
                "Weights of 8 or 4 bits are not trained.",
                {"weights-dtype": self.weights_dtype, "phase": self.phase},
                "--weights-dtype bfloat16, or another phase.",
            )
        if self.page == TRANSFORMERS and self.kv_dtype != self.dtype and self.phase != TRAINING:
            raise UnsupportedError(
                "transformers' own cache keeps keys and values as they were computed.",
                {"page": self.page, "dtype": self.dtype, "kv-dtype": self.kv_dtype},
                "--page 16, or the same dtype for both.",
            )
        self.model.divided(self.gpus)
        return self


def device_of(word: str | None) -> Device:
    """A card by its short name, "cpu" or "cuda" of this machine, or a plain amount as "80GiB".

    None: the card that is here, else the processor. Raises ArgumentError for anything else.
    """
    if word is None:
        return describe("cuda") if torch.cuda.is_available() else known("cpu")
    amount = re.fullmatch(r"([\d.]+)\s*([a-z]+)", word.strip().lower())
    if amount and amount[2] in _UNITS and amount[1].count(".") <= 1 and amount[1] != ".":
        n_bytes = int(float(amount[1]) * _UNITS[amount[2]])
        if n_bytes > 0:
            return Device("cuda", f"a card of {word.strip()}", 0, n_bytes)
    if re.fullmatch(r"cuda(:\d+)?", word):
        count = torch.cuda.device_count()
        if int(word.partition(":")[2] or 0) < count:
            return describe(word)
        raise ArgumentError(
            "There is no such card in this machine.",
            {"device": repr(word), "cards": count},
            "--device h200 for a card that is elsewhere, or an amount: --device 80GiB.",
        )
    try:
        return known(word)
    except ArgumentError as error:
        raise ArgumentError(
            error.sentence,
            {**error.values, "or": "an amount of memory, as 80GiB or 80GB"},
            "--device h200, or --device 80GiB.",
        ) from None


def _choice(name: str, value: str, known_words: tuple[str, ...]) -> None:
    if value not in known_words:
        raise ArgumentError(
            f"There is no such {name}.",
            {name: repr(value), "known": ", ".join(known_words)},
            f"--{name} {known_words[0]}.",
        )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        option = name.removesuffix("_bytes")
        raise ArgumentError(
            f"--{option} is at least {least}.",
            {option: value if option == name else f"{value / GIB:g} GiB"},
            f"--{option} {max(least, 1)}.",
        )
