"""Who answers: torch's kernels one by one, FlexAttention, FlashAttention, tiles of a given size.

What runs on a card alone is tried here with stand-ins that compute the same on the CPU.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nosquare as ns
from nosquare.bench import flex, peers
from nosquare.bench.cases import Case, Data
from nosquare.bench.check import check, errors, truths
from nosquare.bench.contestants import Contestant, answer, prepare
from nosquare.bench.peers import contestants, flash_mask, named
from nosquare.bench.tiled import by_name, tiled
from nosquare.bench.timing import Entry, Rounds, measure

FEW = Rounds(least=1, most=1, seconds=0.0)
SMALL = "float32 B2 Hq4 Hk2 M33 N47 D8"
MASKS = [
    "full()",
    "causal(start)",
    "causal(end)|prefix(n=7)",
    "window(before=5,after=2)",
    "causal(end)&lengths(t0)",
    "causal(start)&documents(t0,t1)",
    "dense(t0)&lengths(t1)",
    "blocksparse(t0,block=16)|documents(t1,t2)",
]


def asked(line: str, names: str) -> dict[str, Entry]:
    """What each said about a case."""
    result = measure(Case.parse(line), named(names), FEW)
    return {entry.contestant: entry for entry in result.entries}


def refusal(contestant: Contestant, line: str) -> str:
    with pytest.raises(ns.UnsupportedError) as error:
        answer(contestant, Data.of(Case.parse(line)))
    return error.value.sentence


# ---- who there is ----


def test_everybody_is_listed_once() -> None:
    names = list(contestants())
    assert names[0] == "nosquare"
    assert {"torch", "torch:math", "torch:flash", "torch:efficient", "torch:cudnn", "flex", "fa3",
            "flash_attn", "nosquare:torch_any"} <= set(names)  # fmt: skip
    assert [one.name for one in named("all")] == names
    assert [one.name for one in named("torch, nosquare,torch")] == ["torch", "nosquare"]


def test_an_unknown_contestant() -> None:
    with pytest.raises(ns.ArgumentError) as error:
        named("torch:flesh,nosquare,fa9")
    lines = str(error.value).splitlines()
    assert lines[0] == "There is no such contestant."
    assert lines[1] == "  peers  'torch:flesh', 'fa9'"
    assert lines[2].startswith("  known  nosquare, nosquare:")
    assert lines[3] == "  Try: --peers nosquare,torch:flash, or --peers all."


# ---- torch and nosquare, one kernel at a time ----


def test_each_of_torchs_kernels_is_itself() -> None:
    said = asked(f"forward {SMALL} causal(start)", "torch,torch:math,torch:flash,torch:cudnn")
    assert (said["torch:math"].ran, said["torch:flash"].ran) == ("math", "flash_attention")
    assert said["torch"].samples_us
    assert said["torch:math"].samples_us
    assert said["torch:flash"].samples_us
    assert said["torch:cudnn"].refused == "torch has no such kernel here."


def test_torch_says_why_a_kernel_does_not_take_a_case() -> None:
    words = refusal(contestants()["torch:flash"], f"forward {SMALL} full() dropout=0.1")
    assert words == "torch refuses: Both fused kernels do not support non-zero dropout."


def test_a_backend_that_is_named_says_why_not() -> None:
    line = f"forward {SMALL} full() softcap=2.0"
    entry = asked(line, "nosquare:torch_fused")["nosquare:torch_fused"]
    assert entry.refused == "torch_fused cannot run this problem. it has no softcap"
    assert asked(line, "nosquare:torch_any")["nosquare:torch_any"].ran == "torch_any"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("out of luck\nand of memory", "it stopped: out of luck"),
        (
            "mha_bwd, /a/b.cpp:7, This flash attention build does not support backward.",
            "its build has no backward.",
        ),
    ],
)
def test_what_stops_is_told_in_one_line(error: str, words: str) -> None:
    def attend(data: Data) -> Any:
        def call() -> torch.Tensor:
            raise RuntimeError(error)

        return call

    assert refusal(Contestant("x", attend), f"forward {SMALL} full()") == words


def test_a_context_is_entered_for_forward_and_not_for_each_call() -> None:
    entered: list[int] = []

    class Within:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *error: object) -> None:
            entered.append(-1)

    def attend(data: Data) -> Any:
        def call() -> torch.Tensor:
            assert sum(entered) == 1
            return ns.attention(data.q, data.k, data.v)

        return call

    inside = Contestant("inside", attend, within=Within)
    for phase in ("forward", "backward", "forward+backward"):
        entered.clear()
        case = Case.parse(f"{phase} {SMALL} full()")
        assert not measure(case, [inside], FEW).of("inside").refused
        assert sum(entered) == 0
        assert entered


# ---- FlexAttention ----


@pytest.mark.parametrize("mask", MASKS)
def test_flexs_mask_is_the_mask(mask: str) -> None:
    data = Data.of(Case.parse(f"forward {SMALL} {mask}"))
    c = data.case
    bound = ns.bound.Bound(data.mask, (c.B,), c.Hq, c.M, c.N)
    sizes = (c.B, c.Hq, c.M, c.N)
    index = torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij")
    seen = flex.mask_mod(bound)(*index)
    assert torch.equal(seen.expand(sizes), ns.visible(data.mask, c.M, c.N, c.Hq, (c.B,)))


def test_flexs_score_is_the_score() -> None:
    line = f"forward {SMALL} full() softcap=2.0 bias=Hq,1,N alibi"
    data = Data.of(Case.parse(line))
    c = data.case
    index = torch.meshgrid(*(torch.arange(n) for n in (c.B, c.Hq, c.M, c.N)), indexing="ij")
    s = data.q @ data.k.repeat_interleave(c.G, 1).mT * c.D**-0.5
    o = torch.softmax(flex.score_mod(data)(s, *index), -1) @ data.v.repeat_interleave(c.G, 1)
    known = truths(data, every_row=True)
    assert all(x.ok for x in check(contestants()["flex"], data, {"o": o}, known))


def test_what_flex_has_not() -> None:
    flexed = contestants()["flex"]
    assert refusal(flexed, f"forward {SMALL} full() dropout=0.1 sinks") == (
        "FlexAttention has no dropout and no sinks."
    )
    for line in (f"backward {SMALL} full()", f"forward {SMALL} full() grad"):
        assert refusal(flexed, line) == "FlexAttention has no backward on a CPU."


@pytest.mark.slow
def test_flex_runs() -> None:
    line = f"forward {SMALL} causal(end)&lengths(t0) softcap=3.0 alibi"
    entry = asked(line, "flex")["flex"]
    assert not entry.refused
    assert entry.ran == "flex_attention, compiled"


# ---- FlashAttention ----


@pytest.mark.parametrize(
    ("mask", "known"),
    [
        ("full()", (False, (-1, -1))),
        ("causal(end)", (True, (-1, 0))),
        ("causal(start)", None),
        ("window(before=5,after=2)", (False, (5, 2))),
        ("window(before=None,after=2)", (False, (-1, 2))),
        ("causal(end)&window(before=5,after=2)", (True, (5, 0))),
        ("window(before=5,after=2)&window(before=3,after=9)", (False, (3, 2))),
        ("window(before=5,after=2,align=start)", None),
        ("causal(end)|prefix(n=3)", None),
        ("causal(end)&lengths(t0)", None),
        ("dense(t0)", None),
    ],
)
def test_masks_that_flash_attention_can_say(mask: str, known: Any) -> None:
    data = Data.of(Case.parse(f"forward {SMALL} {mask}"))
    assert flash_mask(data.case, data) == known


def test_aligned_to_the_start_is_to_the_end_of_a_square() -> None:
    data = Data.of(Case.parse("forward float32 B1 Hq1 Hk1 M9 N9 D8 causal(start)"))
    assert flash_mask(data.case, data) == (True, (-1, 0))


STAND_IN = """
import torch

def flash_attn_func(q, k, v, dropout_p=0.0, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, num_splits=1):
    m, n, g = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    dtype, (q, k, v) = q.dtype, (t.transpose(1, 2).float() for t in (q, k, v))
    s = q @ k.repeat_interleave(g, 1).mT * q.shape[-1] ** -0.5
    place, key = torch.arange(m)[:, None] + n - m, torch.arange(n)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * (place - key).abs()
    before, after = window_size[0], 0 if causal else window_size[1]
    seen = torch.ones(m, n, dtype=torch.bool)
    seen &= True if before < 0 else key >= place - before
    seen &= True if after < 0 else key <= place + after
    p = torch.softmax(s.masked_fill(~seen, -torch.inf), -1)
    o = (torch.nn.functional.dropout(p, dropout_p) @ v.repeat_interleave(g, 1)).to(dtype)
    return RETURNED
"""


def install(modules: dict[str, str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Stand-ins by the name of their module, and what their function returns; none but these."""
    for name in ("fa3_fwd_interface", "flash_attn_interface", "flash_attn"):
        patch.setitem(sys.modules, name, ModuleType(name))  # so that it is put back, or taken out
        patch.delitem(sys.modules, name)
    for name, returned in modules.items():
        (folder / f"{name}.py").write_text(STAND_IN.replace("RETURNED", returned))
    patch.syspath_prepend(folder)
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("contestant", "module", "returned", "features"),
    [
        ("fa3", "fa3_fwd_interface", "o.transpose(1, 2), None", "softcap=2.0"),
        ("fa3", "flash_attn_interface", "o.transpose(1, 2)", ""),
        ("flash_attn", "flash_attn", "o.transpose(1, 2)", "alibi"),
        ("flash_attn", "flash_attn", "o.transpose(1, 2)", "dropout=0.1"),
    ],
)
def test_flash_attention_by_a_stand_in(
    contestant: str, module: str, returned: str, features: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Layout, masks and keywords are those of the interface; the numbers are compared."""
    install({module: returned}, tmp_path, monkeypatch)
    one = contestants()[contestant]
    phase = "forward" if module == "fa3_fwd_interface" else "forward+backward"
    mask = "causal(end)&window(before=20,after=3)"
    case = Case.parse(f"{phase} bfloat16 B2 Hq4 Hk2 M33 N47 D8 {mask} {features}".strip())
    # the device is asked before the call and never after
    real, plain = Data.device, peers._flash_words

    def on_a_card(name: str, data: Data, absent: Any) -> dict[str, Any]:
        monkeypatch.setattr(Data, "device", property(lambda self: torch.device("cuda")))
        try:
            return plain(name, data, absent)
        finally:
            monkeypatch.setattr(Data, "device", real)

    monkeypatch.setattr(peers, "_flash_words", on_a_card)
    entry = measure(case, [one], FEW).of(contestant)
    assert not entry.refused
    assert "flash_attn_func" in entry.ran


@pytest.mark.parametrize(
    ("contestant", "line", "words"),
    [
        ("fa3", f"forward {SMALL} full()", "FlashAttention-3 runs on CUDA devices only."),
        ("flash_attn", f"forward {SMALL} full()", "flash_attn runs on CUDA devices only."),
    ],
)
def test_flash_attention_needs_a_card(
    contestant: str, line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install({"fa3_fwd_interface": "o", "flash_attn": "o"}, tmp_path, monkeypatch)
    assert refusal(contestants()[contestant], line) == words


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("A", f"forward {SMALL} full()", "A takes bfloat16 and float16 only."),
        ("A", "forward float16 B1 Hq1 Hk1 M3 N5 D8 causal(start)", "A has no mask causal(start)."),
        ("A", "forward float16 B1 Hq1 Hk1 M3 N5 D8 lengths(t0) sinks",
         "A has no sinks and no mask lengths(t0)."),
    ],
)  # fmt: skip
def test_what_flash_attention_has_not(
    name: str, line: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Data.of(Case.parse(line))
    monkeypatch.setattr(Data, "device", property(lambda self: torch.device("cuda")))
    with pytest.raises(ns.UnsupportedError) as error:
        peers._flash_words(name, data, {"sinks": data.case.sinks})
    assert error.value.sentence == words


def test_flash_attention_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    known = contestants()
    assert refusal(known["flash_attn"], f"forward {SMALL} full()") == "flash_attn is not installed."
    assert refusal(known["fa3"], f"forward {SMALL} full()") == (
        "FlashAttention-3 is not installed (flash_attn_interface or fa3_fwd_interface)."
    )


# ---- tiles of a given size ----


@pytest.mark.parametrize("name", ["nosquare:torch_any@0x4", "nosquare:torch_any@4", "torch@4x4"])
def test_names_that_are_no_tiles(name: str) -> None:
    assert by_name(name) is None
    with pytest.raises(ns.ArgumentError, match="There is no such contestant"):
        named(name)


@pytest.mark.parametrize("tiles", [(7, 16), (64, 3), (16, 16)])
@pytest.mark.parametrize("words", ["causal(end) dropout=0.1 bias=Hq,1,N sinks", "lengths(t0)"])
def test_tiles_are_those_asked_for_and_the_numbers_right(
    tiles: tuple[int, int], words: str
) -> None:
    data = Data.of(Case.parse(f"forward+backward {SMALL} {words}"))
    (one,) = named(f"nosquare:torch_any@{tiles[0]}x{tiles[1]}")
    found = answer(one, data)
    assert all(c.ok for c in check(one, data, found.out, truths(data)))
    assert [r.op for r in found.receipts] == ["forward", "backward"]
    for receipt in found.receipts:
        assert receipt.plan.startswith(f"tiles {tiles[0]} x {tiles[1]}, 2 batch entries x 2 key")


def test_small_tiles_take_less_workspace() -> None:
    data = Data.of(Case.parse("forward float32 B1 Hq2 Hk2 M64 N64 D8 full()"))
    used = [answer(tiled(n, n), data).receipts[0].workspace_bytes for n in (8, 16, 64)]
    assert used == [2 * n * n * 4 for n in (8, 16, 64)]


# ---- errors, beside checks ----


def test_errors_are_the_largest_and_the_rms() -> None:
    data = Data.of(Case.parse("forward float64 B1 Hq2 Hk1 M5 N4 D3 full()"))
    known = truths(data, every_row=True)
    o = prepare(contestants()["nosquare"], data).outputs()["o"]
    off = torch.zeros_like(o)
    off[0, 0, 0, 0], off[0, 1, 4, 2] = 3.0, -4.0
    (found,) = errors(data, {"o": o + off}, known)
    assert found.what == "o"
    assert found.most == pytest.approx(4.0)
    assert found.rms == pytest.approx((25 / 30) ** 0.5)
    assert found.truth_most == pytest.approx(float(o.abs().max()))
    assert found.truth_rms == pytest.approx(float(o.square().mean().sqrt()))
