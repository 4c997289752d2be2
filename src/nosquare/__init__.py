"""nosquare: exact softmax attention without the square."""

from .adapters.sdpa import sdpa
from .api import attention, attention_state, attention_varlen, explain, problem
from .bound import visible
from .dropout import Dropout, dropout_keep
from .errors import ArgumentError, NosquareError, UnsupportedError
from .estimate import cost
from .mask import (
    BlockSparse,
    Causal,
    Dense,
    Documents,
    Full,
    Lengths,
    Mask,
    Prefix,
    Window,
)
from .receipt import Receipt, receipts
from .spelling import parse
from .state import State, merge
from .weights import weights

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BlockSparse",
    "Causal",
    "Dense",
    "Documents",
    "Dropout",
    "Full",
    "Lengths",
    "Mask",
    "NosquareError",
    "Prefix",
    "Receipt",
    "State",
    "UnsupportedError",
    "Window",
    "attention",
    "attention_state",
    "attention_varlen",
    "cost",
    "dropout_keep",
    "explain",
    "merge",
    "parse",
    "problem",
    "receipts",
    "sdpa",
    "visible",
    "weights",
]
