"""Masks in Gluon's kernels: the functions of mask_text.py, compiled by gluon.jit.

keep takes i as (rows, 1) and j as (1, keys), both of one layout: gl.arange in slices of that
layout, expanded. span and core take scalars.
"""

from __future__ import annotations

from functools import lru_cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...mask_text import MaskCode, MaskForm, compiled, text

__all__ = ["MaskCode", "code"]

WORDS = {"jit": gluon.jit, "tl": gl, "__name__": __name__}


@lru_cache(maxsize=1024)
def code(form: MaskForm) -> MaskCode:
    """The functions of a form.

    Raises TypeError for a kind whose functions branch on what only the kernel knows.
    """
    return compiled(text(form), WORDS)
