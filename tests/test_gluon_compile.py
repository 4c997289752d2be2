"""gluon_sm90's kernels, compiled for a card that is not here: they fit, they hardly spill, and they
multiply by the instructions that their plans stand for, no more and no fewer.

Every form of the kernel with the plan of every width. `make gluon-versions` runs this file under
each release of Triton that the backend takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="gluon_sm90 is written in Triton's Gluon")
from gluon_compiled import key_of, products_of, taken
from nosquare.backends.gluon_sm90.attend_plan import PLANS

SHARED_BYTES = 232_448  # of a block on Hopper: 227 KiB
# Bytes that a thread stores for want of registers. Up to 16 numbers of 160 to 240 are those that a
# tile of rows needs at its ends: its place, and where o and lse go.
SPILLS = 64
# Forms that store more. With D = 64 three warp groups share the registers of two, so a thread has
# 160: scores, weights and o take 128, and each loop for hidden keys wants bounds beside them. With
# D = 256 scores, weights and o take 176 of 240, and packed sequences have places of their own to
# remember. The bounds are what was seen under Triton 3.6 to 3.8, and about a third more. The ptxas
# of 3.9 exceeds some of them, with 284 bytes at most: `make gluon-versions` says so.
MORE = {
    ("cut tiles", 64): 166,
    ("cut tiles, causal", 64): 100,
    ("window", 64): 208,
    ("few rows, cut tiles", 64): 96,
    ("packed, causal", 256): 128,
}

FORMS = {
    "full": "bfloat16 B2 Hq4 Hk4 M4096 N4096 {d} full()",
    "full, few keys": "bfloat16 B2 Hq4 Hk4 M512 N512 {d} full()",
    "causal": "bfloat16 B2 Hq4 Hk4 M4096 N4096 {d} causal(end)",
    "causal, few keys": "bfloat16 B2 Hq4 Hk4 M512 N512 {d} causal(end)",
    "cut tiles": "bfloat16 B2 Hq4 Hk4 M3000 N4001 {d} full()",
    "cut tiles, causal": "bfloat16 B2 Hq4 Hk4 M3000 N4001 {d} causal(end)",
    "window": "bfloat16 B2 Hq4 Hk4 M4000 N4000 {d} window(before=300,after=77)",
    "window, whole tiles": "bfloat16 B2 Hq4 Hk4 M4096 N4096 {d} window(before=1023,after=0)",
    "prefix": "bfloat16 B2 Hq4 Hk4 M3000 N3000 {d} causal(end)|prefix(n=200)",
    "softcap, sinks": "bfloat16 B2 Hq4 Hk4 M4096 N4096 {d} causal(end) softcap=20.0 sinks",
    "lengths": "bfloat16 B2 Hq4 Hk4 M3000 N3000 {d} lengths(t0)&causal(end)",
    "few rows": "bfloat16 B2 Hq8 Hk2 M1 N4096 {d} full()",
    "few rows, cut tiles": "bfloat16 B2 Hq8 Hk2 M1 N4001 {d} full()",
    "packed": "bfloat16 B2 Hq4 Hk4 M4000 N4000 {d} full()",
    "packed, causal": "bfloat16 B2 Hq4 Hk4 M4000 N4000 {d} causal(end)",
    "float16": "float16 B2 Hq4 Hk4 M4096 N4096 {d} causal(end)",
}


def line(form: str, d: int, e: int) -> str:
    return "forward " + FORMS[form].format(d=f"D{d}" if d == e else f"D{d} E{e}")


# q and k wider than v: the same code, so that what differs most is enough
WIDER = ["causal", "cut tiles, causal", "window", "packed, causal"]
ASKED = [(d, e, form) for d, e in PLANS for form in (FORMS if d == e else WIDER)]


@pytest.mark.parametrize(("d", "e", "form"), ASKED)
def test_what_a_kernel_takes(
    d: int, e: int, form: str, record_property: Callable[[str, object], None]
) -> None:
    key = key_of(line(form, d, e), packed=form.startswith("packed"))
    found = taken(key)
    record_property("spills", found.spills)
    record_property("products", found.products.total())
    assert not found.messages, "ptxas makes products wait"
    assert found.products == products_of(key)
    assert found.spills <= (MORE.get((form, d), SPILLS) if d == e else SPILLS)
    assert found.shared_bytes <= SHARED_BYTES


def test_heads_that_share_keys_and_padded_widths_need_no_kernel_of_their_own() -> None:
    key = key_of(line("causal", 128, 128))
    assert key_of(line("causal", 128, 128).replace("Hk4", "Hk2")) == key
    for d in (72, 80, 96, 120):
        assert key_of(line("causal", d, d)) == key


def test_lengths_make_no_new_kernel() -> None:
    for form, others in {
        "cut tiles": ("M3001", "N4003"),
        "cut tiles, causal": ("M1000", "N4003"),
        "window": ("M5000", "N5000", "before=301", "after=78"),
        "prefix": ("M5000", "N5000", "n=201"),
        "lengths": ("M5000", "N5000"),
    }.items():
        one = other = line(form, 128, 128)
        for word in others:
            other = re.sub(rf"\b{re.match('[a-zA-Z]+=?', word)[0]}\d+", word, other)
        assert other != one
        assert key_of(other) == key_of(one)


def test_too_few_registers_would_be_seen() -> None:
    found = taken(key_of(line("causal", 128, 128), registers=128))
    assert found.spills > SPILLS
    assert found.messages
    assert found.products == products_of(key_of(line("causal", 128, 128)))
