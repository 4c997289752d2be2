"""FlexAttention that torch.compile has compiled, seen where inductor launches its Triton kernel.

A compiled function never calls flex_attention again: dynamo has put its own code in place. What is
left in Python is the launch, a method of torch's CachingAutotuner, whose kernels tell by the names
of their parameters what they are.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..measure import confirmed, watched
from ..receipt import BACKWARD, FORWARD, LOGS, Receipt, note, versions
from .asked import DENSE, problem_of

_HOME = "torch._inductor.runtime.triton_heuristics"
_FORWARD = frozenset(("arg_Q", "arg_K", "arg_V", "arg_KV_NUM_BLKS"))  # templates/flex_*.py.jinja
_BACKWARD = "arg_DO"


def launcher() -> Any:
    """The class whose method run launches; None where no compiled FlexAttention can be."""
    if "torch.nn.attention.flex_attention" not in sys.modules or not torch.cuda.is_available():
        return None
    try:
        return importlib.import_module(_HOME).CachingAutotuner
    except (ImportError, AttributeError):
        return None


def observer(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with a receipt for each launch of a kernel of FlexAttention."""

    @functools.wraps(run)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = getattr(self.fn, "arg_names", ())
        if not LOGS or kwargs.get("benchmark_run") or not _FORWARD.issubset(names):
            return run(self, *args, **kwargs)
        q, k, v = (args[names.index(f"arg_{letter}")] for letter in "QKV")
        op, grads = (BACKWARD, "qkv") if _BACKWARD in names else (FORWARD, "")
        problem = problem_of(q, k, v, {"mask": DENSE, "grads": grads})
        out, sight = watched(lambda: run(self, *args, **kwargs), problem.device)
        kernels = (self.fn.__name__,)
        receipt = Receipt(
            op,
            problem,
            "flex_attention, compiled",
            "a Triton kernel of inductor",
            kernels,
            None,
            version=versions(kernels, ours=False),
            caller="flex_attention",
        )
        note(receipt if sight is None else confirmed(receipt, sight))
        return out

    return observed
