"""Masks from their spelling: the inverse of str(mask).

Operators, records, test names and error messages carry a mask as text; its arrays travel beside it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from .errors import ArgumentError
from .mask import KINDS, Mask


def parse(text: str, tensors: Sequence[Tensor] = ()) -> Mask:
    """Read a mask back from its spelling, the inverse of str().

    text     as str(mask) writes it, for example "causal(end)&window(before=1023,after=0)"
    tensors  the arrays that t0, t1, ... stand for: mask.tensors

    Raises ArgumentError when the text is not a mask.
    """
    try:
        return _read(_tree(text), tensors)
    except (SyntaxError, LookupError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            "This does not spell a mask.",
            {"text": repr(text), "kinds": ", ".join(KINDS), "arrays": len(tensors)},
            '"causal(end)&window(before=1023,after=0)"; arrays are t0, t1, ...',
        ) from None


@lru_cache(maxsize=256)
def _tree(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _read(node: ast.expr, tensors: Sequence[Tensor]) -> Mask:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        left, right = _read(node.left, tensors), _read(node.right, tensors)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError(node)

    def value(arg: ast.expr) -> Any:
        if isinstance(arg, ast.Name):
            return tensors[int(arg.id[1:])] if arg.id[1:].isdigit() else arg.id
        return ast.literal_eval(arg)

    args = [value(arg) for arg in node.args]
    named = {
        str(word.arg): value(word.value) for word in node.keywords
    }  # ** is "None", and refused
    return KINDS[node.func.id](*args, **named)
