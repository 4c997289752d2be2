"""What this processor offers a generator of code: the widest vectors, and LLVM's words for it."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cache

from ...errors import UnsupportedError


@dataclass(frozen=True)
class Target:
    """A processor as LLVM is told of it.

    isa       "avx512", "avx2" or "neon"
    lanes     float32 in one vector register
    vectors   how many vector registers there are
    cpu, features  LLVM's words
    tiles     "amx", "" where there are none, "emulated" in tests (tiles.py)
    triple    of another machine, to read what it would run; "" for this one
    """

    isa: str
    lanes: int
    vectors: int
    cpu: str
    features: str
    tiles: str = ""
    triple: str = ""

    @property
    def pairs(self) -> bool:
        """Whether bfloat16 is multiplied in pairs, by AVX512-BF16 or AMX. Not where AMX is there
        but not allowed: such cores do pairs at less than the rate of float32 (docs/log.md)."""
        able = self.isa == "avx512" and "+avx512bf16" in self.features
        return able and (self.tiles != "" or "+amx-bf16" not in self.features)


# lanes and vectors of each, the features it needs, and what LLVM must be told beyond the host's
# own features: to use whole registers, or not to use what this isa has not
_ISAS = {
    "avx512": (16, 32, ("avx512f", "avx512bw", "avx512dq", "avx512vl"), "-prefer-256-bit"),
    "avx2": (8, 16, ("avx2", "fma", "f16c"), "-avx512f,-avx10.1"),
    "neon": (4, 32, ("neon",), ""),
}


@cache
def host(isa: str | None = None) -> Target:
    """This machine; `isa` asks for one of those it has instead of its widest.

    Raises UnsupportedError where llvmlite is missing or the processor has no isa served here.
    """
    try:
        import llvmlite.binding as llvm
    except ImportError:
        raise UnsupportedError(
            "The kernels of llvm_cpu are generated with llvmlite, which is not installed.",
            {"llvmlite": "missing"},
            "pip install nosquare[cpu].",
        ) from None
    found = llvm.get_host_cpu_features()
    usable = [name for name, (_, _, needs, _) in _ISAS.items() if all(map(found.get, needs))]
    if not usable or isa not in (None, *usable):
        raise UnsupportedError(
            "This processor has no vector instructions that llvm_cpu generates code for.",
            {"processor": llvm.get_host_cpu_name(), "asked": isa, "served here": usable},
            "backend=None, so that another backend may take it.",
        )
    name = isa or usable[0]
    lanes, vectors, _, more = _ISAS[name]
    features = ",".join(word for word in (found.flatten(), more) if word)
    tiles = "amx" if name == "avx512" and found.get("amx-bf16") and _amx_allowed() else ""
    return Target(name, lanes, vectors, llvm.get_host_cpu_name(), features, tiles)


@cache
def _amx_allowed() -> bool:
    """Whether the operating system lets this process use AMX: Linux wants to be asked."""
    if not sys.platform.startswith("linux"):
        return False
    ask, permission, tile_data = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    return bool(ctypes.CDLL(None).syscall(ask, permission, tile_data) == 0)
