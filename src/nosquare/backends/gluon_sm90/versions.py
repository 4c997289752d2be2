"""Which releases of Triton the kernels are known to compile under; without Triton."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

KNOWN = ("3.6", "3.7", "3.8", "3.9")  # Gluon is experimental: the next may be another language


@cache
def unsupported() -> str:
    """Why the Triton that is installed does not do; "" where it does."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return 'triton is not installed: pip install "nosquare[triton]"'
    if ".".join(found.split(".")[:2]) in KNOWN:
        return ""
    return f"triton is {found}, and these kernels are known to compile under {', '.join(KNOWN)}"
