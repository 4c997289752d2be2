"""Who serves on a Hopper card: gluon_sm90 what it can run, but for few rows with many keys. Without
a card, which choose() need not have."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nosquare as ns
from helpers import Case, case, check
from nosquare.backends import BACKWARD, FORWARD, choose, discover, gluon_sm90
from nosquare.bench import cases
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem

pytest.importorskip("triton", reason="gluon_sm90 is written in Triton's Gluon")

CARD = torch.device("cuda", 0)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
units_of = gluon_sm90._units


def problem(line: str, phase: str = FORWARD, **more: Any) -> Problem:
    """Of a case, on a card that need not be here."""
    return replace(cases.Case.parse(f"{phase} {line}").problem(), device=CARD, **more)


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that believes to have an H200, and a torch built for it."""
    if request.node.get_closest_marker("gpu"):
        return
    from nosquare.backends.triton_any import cards

    monkeypatch.setattr(gluon_sm90, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(gluon_sm90, "_units", lambda device: 132)
    monkeypatch.setattr(cards, "card_of", lambda device: cards.NAMED["sm_90"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


def yields(line: str, **more: Any) -> list[str]:
    p = problem(line, **more)
    assert gluon_sm90.refusals(p, FORWARD) == []
    return gluon_sm90.yields(p, FORWARD)


# ---- who serves ----

GLUON, TRITON, FUSED, PLAIN = "gluon_sm90", "triton_any", "torch_fused", "torch_any"
LONG = "B1 Hq16 Hk16 M4096 N4096"
WHO = {
    f"bfloat16 {LONG} D128 causal(end)": GLUON,
    f"float16 {LONG} D64 full()": GLUON,
    f"bfloat16 {LONG} D256 causal(start)": GLUON,
    "bfloat16 B1 Hq32 Hk8 M2048 N4096 D128 causal(end)": GLUON,
    f"bfloat16 {LONG} D96 causal(end) sinks softcap=30.0": GLUON,
    f"bfloat16 {LONG} D128 causal(end)&window(before=1023,after=0)": GLUON,
    "bfloat16 B4 Hq16 Hk16 M4096 N4096 D128 lengths(t0)": GLUON,
    "bfloat16 B1 Hq1 Hk1 M16 N16 D64 full()": GLUON,
    "bfloat16 B16 Hq32 Hk8 M1 N8192 D128 full()": GLUON,  # 128 tiles of rows
    f"float32 {LONG} D128 causal(end)": TRITON,
    f"float32 {LONG} D256 causal(end)": FUSED,
    f"float64 {LONG} D64 causal(end)": PLAIN,
    f"bfloat16 {LONG} D128 full() dropout=0.1": TRITON,
    f"bfloat16 {LONG} D128 full() bias=Hq,M,N": TRITON,
    f"bfloat16 {LONG} D128 causal(end) alibi": TRITON,
    f"bfloat16 {LONG} D128 causal(end)&documents(t0,t1)": TRITON,
    f"bfloat16 {LONG} D320 causal(end)": TRITON,
    "bfloat16 B1 Hq32 Hk8 M1 N65536 D128 full()": FUSED,  # cuDNN has it, and is faster
    "bfloat16 B1 Hq32 Hk8 M1 N65536 D128 lengths(t0)": TRITON,
    "bfloat16 B1 Hq32 Hk8 M16 N65536 D128 causal(end)": TRITON,
    "bfloat16 B1 Hq32 Hk8 M1 N65536 D128 full() sinks": TRITON,
}


@pytest.mark.parametrize("line", WHO)
def test_who_serves_forward(line: str) -> None:
    found = choose(problem(line), FORWARD)
    assert found.name == WHO[line], found.refusals
    asked = [*discover()]
    assert [*found.refusals] == asked[: asked.index(found.name)]
    assert all(found.refusals.values())


# causal: M and N, and who serves forward and backward
TRAINED = {
    (256, 256): (GLUON, FUSED),  # whole tiles, for cuDNN's backward
    (300, 300): (GLUON, TRITON),
    (300, 701): (GLUON, TRITON),
    (1, 4096): (FUSED, TRITON),
}


@pytest.mark.parametrize(("m", "n"), TRAINED)
@pytest.mark.parametrize("d", [64, 128])
def test_who_serves_backward(d: int, m: int, n: int) -> None:
    line = f"bfloat16 B2 Hq4 Hk2 M{m} N{n} D{d} causal(end)"
    forward = choose(problem(line), FORWARD)
    backward = choose(problem(line, BACKWARD), BACKWARD)
    assert (forward.name, backward.name) == TRAINED[m, n]
    assert backward.refusals[GLUON]


# and who serves backward
BACK = {
    f"bfloat16 {LONG} D128 causal(end)": GLUON,
    f"float16 {LONG} D64 full()": GLUON,
    f"bfloat16 {LONG} D96 causal(end) sinks softcap=30.0": GLUON,
    f"bfloat16 {LONG} D128 causal(end)&window(before=1023,after=0)": GLUON,
    "bfloat16 B4 Hq16 Hk4 M4096 N4096 D128 lengths(t0)": GLUON,
    "bfloat16 B1 Hq1 Hk1 M64 N8576 D128 full()": GLUON,  # 67 tiles of keys
    "bfloat16 B1 Hq1 Hk1 M64 N8448 D128 full()": TRITON,  # 66: half of the card
    "bfloat16 B1 Hq16 Hk16 M63 N4096 D128 full()": TRITON,  # less than a tile of queries
    f"bfloat16 {LONG} D80 causal(end) softcap=9.0": TRITON,  # tiles are 128 wide
    f"bfloat16 {LONG} D256 causal(end) softcap=9.0": TRITON,
    f"float32 {LONG} D128 causal(end)": TRITON,
}


@pytest.mark.parametrize("line", BACK)
def test_who_serves_backward_of_what(line: str) -> None:
    found = choose(problem(line, BACKWARD), BACKWARD)
    assert found.name == BACK[line], found.refusals


@pytest.mark.parametrize(
    "more",
    [{"packed": True}, {"mask": "window(before=99,after=0)&lengths(t0)"}],
    ids=str,
)
def test_what_its_backward_does_not_take(more: dict[str, Any]) -> None:
    p = problem(f"bfloat16 {LONG} D128 causal(end)", BACKWARD, **more)
    assert gluon_sm90.refusals(p, BACKWARD)
    assert choose(p, BACKWARD).name == TRITON


def test_a_deterministic_backward_wants_rows_that_see_ever_later_keys() -> None:
    for mask in ("full()", "causal(end)|prefix(n=200)", "window(before=99,after=0)"):
        p = problem(f"bfloat16 {LONG} D128 {mask}", BACKWARD, deterministic=True)
        assert choose(p, BACKWARD).name == "gluon_sm90"
    back = "window(before=10,after=0,align=start)|causal(end)"  # earlier rows see later keys alone
    p = problem("bfloat16 B1 Hq16 Hk16 M8192 N4096 D128 " + back, BACKWARD, deterministic=True)
    assert "no order of turns" in gluon_sm90.refusals(p, BACKWARD)[0]
    assert not gluon_sm90.refusals(replace(p, deterministic=False), BACKWARD)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="its kernels are for Hopper cards (sm_90)")
@pytest.mark.parametrize(("m", "n"), TRAINED)
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_from_what_another_backend_saved(d: int, m: int, n: int) -> None:
    """Backward of torch's or of triton_any takes the o and the lse of gluon_sm90's forward: heads
    before tokens in memory, and tokens before heads."""
    c = case((2,), 4, 2, m, n, d, dtype=torch.bfloat16, mask=ns.Causal())
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (c.q, c.k, c.v))
    for one in (c, Case(q, k, v, c.options)):
        with ns.receipts() as log:
            check(one, device="cuda", through_lse=False)
        assert tuple(r.backend for r in log) == TRAINED[m, n]


def test_another_card_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 0), (10, 0), (0, 0)):  # the last: AMD's
        monkeypatch.setattr(gluon_sm90, "_capability", lambda device, it=capability: it)
        found = choose(problem(f"bfloat16 {LONG} D128 causal(end) softcap=9.0"), FORWARD)
        assert found.name == TRITON
        (why,) = found.refusals[GLUON]
        assert "this is another" in why


# ---- few rows, many keys ----


def test_the_order_and_the_reason() -> None:
    assert [*discover()] == [GLUON, "llvm_cpu", TRITON, FUSED, PLAIN]
    line = "bfloat16 B1 Hq32 Hk8 M1 N65536 D128 lengths(t0)"
    assert yields(line) == [
        "so few queries would keep 8 of 132 multiprocessors busy: a kernel that shares out the "
        "keys of a query keeps more of them busy"
    ]
    assert choose(problem(line), FORWARD, GLUON).name == GLUON  # by name it runs


@pytest.mark.parametrize(("heads", "left"), [(66, True), (67, False)])
def test_half_of_the_card(heads: int, left: bool) -> None:
    """One tile of rows a head, or two of half as many heads."""
    line = f"bfloat16 B1 Hq{heads} Hk{heads} M128 N8192 D128 full()"
    assert bool(yields(line)) == left
    assert bool(yields(line.replace("M128", "M129"))) is False
    half = f"B1 Hq{heads // 2} Hk{heads // 2} M129"
    assert yields(line.replace(f"B1 Hq{heads} Hk{heads} M128", half))
    assert bool(yields(line.replace("B1 ", f"B{heads} ").replace(f"Hq{heads} Hk{heads}", "Hq1 Hk1"))
                ) == left  # fmt: skip


def test_a_group_that_shares_a_tile_is_one_head() -> None:
    """16 heads of a group of 4 are 4 tiles of up to 32 rows each, and 16 of more rows."""
    assert yields("bfloat16 B16 Hq16 Hk4 M32 N8192 D128 full()")
    assert not yields("bfloat16 B17 Hq16 Hk4 M32 N8192 D128 full()")
    assert yields("bfloat16 B4 Hq16 Hk4 M33 N8192 D128 full()")
    assert not yields("bfloat16 B5 Hq16 Hk4 M33 N8192 D128 full()")


@pytest.mark.parametrize(("d", "tile"), [(64, 128), (128, 128), (256, 64)])
def test_many_keys_are_those_that_are_seen(d: int, tile: int) -> None:
    few, many = 15 * tile, 15 * tile + 1
    line = f"bfloat16 B1 Hq8 Hk8 M1 N{{}} D{d} {{}}"
    assert not yields(line.format(few, "full()"))
    assert yields(line.format(many, "full()"))
    assert yields(line.format(many, "lengths(t0)"))
    window = "window(before={},after=0)"
    assert not yields(line.format(50 * tile, window.format(14 * tile - 1)))
    assert yields(line.format(50 * tile, window.format(15 * tile)))
    assert not yields(line.format(50 * tile, f"prefix({few})"))


def test_it_is_left_to_a_kernel_that_shares_keys_out() -> None:
    """At the least of what yields, triton_any's plan has them in several parts."""
    from nosquare.backends import triton_any

    for d, n in ((64, 1921), (128, 1921), (256, 961)):
        p = problem(f"bfloat16 B1 Hq66 Hk66 M1 N{n} D{d} causal(end) softcap=5.0")
        assert choose(p, FORWARD).name == TRITON
        assert triton_any.plan(p, FORWARD).splits > 1


def test_packed_sequences_and_batches_that_must_not_matter() -> None:
    """triton_any does not share the keys of packed sequences; and the number of entries must not
    choose the kernel of a row that does not depend on them."""
    q, k = (torch.empty(n, 4, 128, dtype=torch.bfloat16, device="meta") for n in (9, 90_000))
    cu = torch.tensor([0, 4, 9])
    x = Inputs(q, k, k)._replace(cu_q=cu, cu_k=cu)
    spec = Spec("full()", None, None, 0.0, (0, 0, 0, 0), None, False, False)
    p = replace(Problem.of(x, spec, ""), device=CARD)
    assert p.packed
    assert gluon_sm90.refusals(p, FORWARD) == []
    assert gluon_sm90.yields(p, FORWARD) == []
    line = "bfloat16 B{} Hq32 Hk8 M1 N8192 D128 full()"
    assert [bool(yields(line.format(b))) for b in (1, 8, 9)] == [True, True, False]
    invariant = [choose(problem(line.format(b), batch_invariant=True), FORWARD) for b in (1, 9, 99)]
    assert {one.name for one in invariant} == {TRITON}
    assert not yields(line.format(1).replace("Hq32 Hk8", "Hq99 Hk99"), batch_invariant=True)


def test_multiprocessors_are_those_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {CARD: SimpleNamespace(multi_processor_count=78)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", facts.__getitem__)
    assert units_of.__wrapped__(CARD) == 78


def test_explain_has_the_reason() -> None:
    from nosquare.explain import explain_problem

    said = str(explain_problem(problem("bfloat16 B1 Hq32 Hk8 M1 N65536 D128 lengths(t0)")))
    assert "forward   cannot gluon_sm90   so few queries would keep 8 of 132" in said
    assert "forward   runs   triton_any" in said
