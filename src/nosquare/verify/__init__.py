"""The conformance kit: does a function with SDPA's or flash_attn's signature keep the contract?

nosquare verify torch:flash                        on the command line
nosquare.verify.verify(my_attention, style="sdpa")   in anybody's test-suite; see its docstring
"""

from .registry import GROUPS, Check, checks
from .run import verify
from .verdict import VERDICTS, Finding, Verdict, Verdicts

__all__ = ["GROUPS", "VERDICTS", "Check", "Finding", "Verdict", "Verdicts", "checks", "verify"]
