"""Masks in Triton's kernels: the functions of mask_text.py, compiled by triton.jit."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from ...mask_text import MaskCode, MaskForm, compiled, text

__all__ = ["MaskCode", "code"]

WORDS = {"jit": triton.jit, "tl": tl, "__name__": __name__}


@lru_cache(maxsize=1024)
def code(form: MaskForm) -> MaskCode:
    """The functions of a form.

    Raises TypeError for a kind whose functions branch on what only the kernel knows.
    """
    return compiled(text(form), WORDS)
