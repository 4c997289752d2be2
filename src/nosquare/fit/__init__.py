"""`nosquare fit`: will a model fit, used so, and what does the square have to do with it?

    nosquare fit config.json --context 131072 --concurrency 8 --device h200 --phase decode

Reads a Hugging Face config.json (never the network) and adds up what coexists at the peak: weights,
KV cache, activations, logits, what attention takes, a reserve; in training also what is saved for
backward, gradients and the optimizer's states. The runtime that is modelled is transformers 5 run
by Python, with nosquare's attention adapter or eager attention, and its DynamicCache (--page 0) or
pages. The arrays are followed through the modules' own code (forward.py), so they can be checked
one by one, and are, for every family, in tests/test_fit_forward.py.

    fields.py    a config.json and words for its faults      families.py  config -> Model
    model.py     sizes, parameters, division over GPUs        tape.py      what is alive at once
    pieces.py, heads.py, forward.py, training.py              the programs
    request.py   the question    ledger.py  the sum    show.py  the table and the JSON
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError
from .families import model_of
from .fields import read
from .ledger import Ledger, Line, largest, ledger
from .request import GIB, RESERVE_BYTES, Request, device_of
from .show import Report, dump, show

__all__ = ["Ledger", "Line", "Report", "Request", "ask", "fit", "largest", "ledger"]


def ask(config: Mapping[str, Any], device: str | None, **options: Any) -> Request:
    """A checked request from the contents of a config.json.

    options  fields of Request; dtypes that are None are the config's own, else bfloat16;
             reserve_bytes None is the assumption for the device

    Raises ArgumentError and UnsupportedError as fields.py, families.py and request.py say.
    """
    model, where = model_of(config), device_of(device)
    known = {key: value for key, value in options.items() if value is not None}
    own = model.dtype if model.dtype in ("float32", "bfloat16", "float16") else "bfloat16"
    dtype = known.setdefault("dtype", own)
    for name in ("kv_dtype", "weights_dtype"):
        known.setdefault(name, dtype)
    known.setdefault("context", model.limit)
    known.setdefault("reserve_bytes", RESERVE_BYTES.get(where.kind, 0))
    return Request(model=model, device=where, **known).check()


def fit(
    path: str, device: str | None = None, as_json: bool = False, reserve: float | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Print the ledger of a config.json, a folder that holds one, or "-" for standard input.

    reserve  GiB; None: the assumption for the device. options: see ask()
    """
    if reserve is not None:
        if not math.isfinite(reserve):
            raise ArgumentError(
                "--reserve is a number of GiB.", {"reserve": reserve}, "--reserve 1."
            )
        options["reserve_bytes"] = round(reserve * GIB)
    request = ask(read(path), device, **options)
    report = Report.of(request)
    if as_json:
        sys.stdout.write(dump(report) + "\n")
        return
    from rich.console import Console

    show(report, Console(highlight=False, soft_wrap=False))
