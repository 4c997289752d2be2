"""torch_any: tiles in plain torch operations. Every feature, any device that torch reaches.

The fallback of the house, and the twin that the fast kernels are compared with. It alone has
derivatives beyond the first (see higher.py).
"""

from __future__ import annotations

from torch import Tensor

from ... import oracle
from ...axes import lay_out_bias
from ...errors import UnsupportedError
from ...inputs import Inputs
from ...problem import Problem
from .higher import ROWS, WHOLE, Blocks, block_rows
from .said import tiling, workspace_bytes
from .tiles import backward, forward
from .tiling import plan

RANK = 900
__all__ = [
    "RANK",
    "backward",
    "forward",
    "plan",
    "program",
    "refusals",
    "refuse_packed",
    "tiling",
    "workspace_bytes",
]


def refusals(problem: Problem, phase: str) -> list[str]:
    """Nothing: this backend runs every problem."""
    return []


def refuse_packed(problem: Problem) -> None:
    """Raise UnsupportedError for packed problems: they have no derivatives beyond the first."""
    if problem.packed:
        raise UnsupportedError(
            "Packed attention has first derivatives in reverse mode only.",
            {"problem": problem.describe()},
            "a padded batch with mask=ns.Lengths(n), which has derivatives of any order.",
        )


def program(problem: Problem, x: Inputs) -> Blocks:
    """Forward as a sum over blocks of rows, whose derivatives of any order are the higher ones.

    It takes q, k, v and, where the problem has them, bias and sinks, with one batch axis: (B, H,
    ., .) as in oracle.rows; it gives o (B, Hq, M, E) and lse (B, Hq, M).

    Raises UnsupportedError for packed problems.
    """
    refuse_packed(problem)
    fixed = oracle.Fixed.of(problem, x)
    takes = [ROWS, WHOLE, WHOLE]
    if x.bias is not None:
        takes.append(ROWS if lay_out_bias(x.bias, problem.batch).shape[2] > 1 else WHOLE)
    if x.sinks is not None:
        takes.append(WHOLE)

    def fn(index: slice, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        more = list(rest)
        bias = more.pop(0) if x.bias is not None else None
        sinks = more.pop(0) if x.sinks is not None else None
        wide = problem.lse_dtype  # products and state are float32 here too
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        bias, sinks = (t if t is None else t.to(wide) for t in (bias, sinks))
        o, lse = oracle.rows(fixed, index, q, k, v, bias, sinks)
        return o.to(problem.dtype), lse

    step = block_rows(problem.B * problem.Hq, problem.N)
    return Blocks(fn, takes, [ROWS, ROWS], problem.M, step)
