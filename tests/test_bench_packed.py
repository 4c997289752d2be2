"""Packed sequences as benchmark cases: their grammar, lengths and pairs, who answers, the check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nosquare as ns
from nosquare.bench import check as checking
from nosquare.bench import model, peers
from nosquare.bench.cases import Case, Data, visible_pairs
from nosquare.bench.check import check, truths
from nosquare.bench.contestants import NOSQUARE, Contestant, answer, prepare
from nosquare.bench.hopper import LINES
from nosquare.bench.lengths import offsets
from nosquare.bench.peers import contestants, named
from nosquare.bench.timing import Entry, Rounds, measure
from nosquare.inputs import Inputs, Spec
from nosquare.problem import Problem
from test_bench_peers import install, refusal

FEW = Rounds(least=1, most=1, seconds=0.0)
SMALL = "float32 B5 Hq4 Hk2 M97 N97 D8"
ALIKE = "float32 B5 Hq2 Hk2 M97 N97 D8"  # torch's nested tensors have as many heads of k as of q
MORE = "causal(end)&window(before=5,after=0) softcap=3.0 alibi sinks packed"


def data_of(line: str, seed: int = 0) -> Data:
    return Data.of(Case.parse(line), seed=seed)


def asked(line: str, names: str) -> dict[str, Entry]:
    result = measure(Case.parse(line), named(names), FEW)
    return {entry.contestant: entry for entry in result.entries}


# ---- the grammar, the lengths, the pairs ----


@pytest.mark.parametrize(
    "line",
    [f"forward {SMALL} causal(end) packed", f"backward {SMALL} E5 {MORE}",
     f"forward {SMALL} full() grad packed", *LINES[-1].cases],
)  # fmt: skip
def test_line_round_trip(line: str) -> None:
    case = Case.parse(line)
    assert case.packed
    assert str(case) == line
    assert case.problem().packed


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("forward float32 B2 Hq1 Hk1 M8 N9 D8 full() packed", "have M = N tokens"),
        ("decode float32 B1 Hq1 Hk1 M1 N1 D8 full() packed", "not for decoding"),
        (f"forward {SMALL} full() packed=3", "'packed=3' is not a feature"),
        (f"forward {SMALL} full() bias=1,1,N packed", "no bias"),
        (f"forward {SMALL} full() dropout=0.1 packed", "no dropout"),
        (f"forward {SMALL} lengths(t0) packed", "no mask of arrays"),
    ],
)
def test_what_does_not_go_with_it(line: str, why: str) -> None:
    with pytest.raises(ns.ArgumentError, match=why):
        Case.parse(line)


def test_lengths_are_a_mix_that_sums_and_repeats() -> None:
    for seed in range(4):
        sizes = offsets(24, 16384, seed).diff()
        assert int(sizes.sum()) == 16384
        assert 16 <= int(sizes.min()) < 100
        assert 1500 < int(sizes.max()) < 8192
        assert 100 < int(sizes.median()) < 600
        assert torch.equal(offsets(24, 16384, seed).diff(), sizes)
    assert not torch.equal(offsets(24, 16384, 0), offsets(24, 16384, 1))
    data = data_of(f"forward {SMALL} full() packed", seed=3)
    assert data.cu is not None
    assert (data.cu.dtype, data.cu.tolist()) == (torch.int32, offsets(5, 97, 3).tolist())
    assert sum(data.lengths) == 97


@pytest.mark.parametrize(
    ("count", "tokens", "least"), [(5, 10, 2), (5, 9, 1), (5, 5, 1), (5, 3, 0), (1, 7, 7)]
)
def test_few_tokens_are_shared_out(count: int, tokens: int, least: int) -> None:
    sizes = offsets(count, tokens, 0).diff().tolist()
    assert (len(sizes), sum(sizes), min(sizes)) == (count, tokens, least)


@pytest.mark.parametrize("mask", ["full()", "causal(end)", "window(before=5,after=2)"])
def test_pairs_are_those_of_each_sequence(mask: str) -> None:
    data = data_of(f"forward {SMALL} {mask} packed")
    want = sum(int(ns.visible(data.mask, n, n).sum()) for n in data.lengths)
    assert visible_pairs(data) == data.case.Hq * want
    assert visible_pairs(data_of(f"forward {SMALL} {mask}")) > visible_pairs(data)


def test_arrays_lie_by_tokens() -> None:
    data = data_of(f"backward {SMALL} E5 full() packed")
    shapes = [tuple(t.shape) for t in (data.q, data.k, data.v, data.do)]
    assert shapes == [(97, 4, 8), (97, 2, 8), (97, 2, 5), (97, 4, 5)]
    assert data.case.numel == sum(t.numel() for t in (data.q, data.k, data.v, data.do))
    x = Inputs(data.q, data.k, data.v, cu_q=data.cu, cu_k=data.cu)
    assert data.case.problem().strides == Problem.of(x, Spec()).strides
    part = data.part(2, 1)
    start, stop = offsets(5, 97, 0)[2:4].tolist()
    assert not part.case.packed
    assert torch.equal(part.q[0], data.q[start:stop, 2:].transpose(0, 1))
    assert torch.equal(part.v[0, 0], data.v[start:stop, 1])
    assert model.cost(data).forward.compulsory_bytes > 0


# ---- who answers ----


@pytest.mark.parametrize("line", [f"forward {SMALL} causal(end) packed", f"backward {SMALL} {MORE}",
                                  f"forward+backward {SMALL} E5 full() packed"])  # fmt: skip
def test_nosquare_is_right(line: str) -> None:
    said = asked(line, "nosquare,nosquare:torch_any,nosquare:torch_any@16x32")
    assert not any(entry.refused for entry in said.values())
    assert all(entry.samples_us and entry.errors for entry in said.values())
    assert {r.op for r in said["nosquare:torch_any@16x32"].receipts} <= {"forward", "backward"}


@pytest.mark.parametrize("phase", ["forward", "backward", "forward+backward"])
def test_torch_answers_with_nested_tensors(phase: str) -> None:
    said = asked(f"{phase} {ALIKE} full() packed", "torch,torch:math,torch:cudnn")
    assert not said["torch"].refused
    assert not said["torch:math"].refused
    assert said["torch"].ran == "nested tensors, torch.jagged"
    assert said["torch:cudnn"].refused


def test_who_cannot_says_so() -> None:
    known = contestants()
    assert refusal(known["torch"], f"forward {ALIKE} {MORE}") == (
        "torch's attention of nested tensors has no softcap, alibi, sinks, "
        "mask causal(end)&window(before=5,after=0)."
    )
    assert refusal(known["flex"], f"forward {ALIKE} full() packed") == (
        "FlexAttention is not asked to take packed sequences."
    )
    # on a CPU torch has no kernel that is causal over nested tensors, and says nothing else
    assert refusal(known["torch:flash"], f"forward {ALIKE} causal(end) packed") == (
        "torch has no such kernel here."
    )


STAND_IN = """
import torch

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *,
                           causal=False, window_size=(-1, -1), softcap=0.0, **more):
    assert type(max_seqlen_q) is int and max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == max_seqlen_q and cu_seqlens_k.dtype == torch.int32
    dtype, g, o = q.dtype, q.shape[1] // k.shape[1], []
    for a, b in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist()):
        x, y, z = (t[a:b].transpose(0, 1).float() for t in (q, k, v))
        s = x @ y.repeat_interleave(g, 0).mT * q.shape[-1] ** -0.5
        s = s.masked_fill(torch.ones(b - a, b - a).triu(1).bool() & causal, -torch.inf)
        o.append((torch.softmax(s, -1) @ z.repeat_interleave(g, 0)).transpose(0, 1))
    o = torch.cat(o).to(dtype)
    return RETURNED
"""


@pytest.mark.parametrize(
    ("name", "module", "returned"),
    [("fa3", "fa3_fwd_interface", "o"), ("fa3", "flash_attn_interface", "o, None"),
     ("flash_attn", "flash_attn", "o")],
)  # fmt: skip
@pytest.mark.parametrize("mask", ["causal(end)", "full()"])
def test_flash_attention_by_a_stand_in(
    name: str, module: str, returned: str, mask: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Offsets, lengths and keywords are those of the interface; the numbers are compared."""
    monkeypatch.setattr("test_bench_peers.STAND_IN", STAND_IN)
    install({module: returned}, tmp_path, monkeypatch)
    words = {"causal": mask != "full()", "window_size": (-1, -1)}
    monkeypatch.setattr(peers, "_flash_words", lambda *asked: dict(words))
    phase = "forward" if module == "fa3_fwd_interface" else "forward+backward"
    entry = asked(f"{phase} bfloat16 B5 Hq4 Hk2 M97 N97 D8 {mask} packed", name)[name]
    assert not entry.refused
    assert entry.ran.endswith("flash_attn_varlen_func")


# ---- the check ----


def spoiled(how: Any) -> Contestant:
    """nosquare with an answer that `how` changes."""
    return Contestant("spoiled", lambda data: lambda: how(NOSQUARE.attend(data)(), data))


def off_in_the_shortest(o: torch.Tensor, data: Data) -> torch.Tensor:
    b = min(range(5), key=data.lengths.__getitem__)
    wrong = torch.zeros_like(o)
    wrong[sum(data.lengths[:b]) + 1] = 1e-3
    return o + wrong


def over_all_tokens(o: torch.Tensor, data: Data) -> torch.Tensor:
    """As if they were one sequence."""
    q, k, v = (t.transpose(0, 1) for t in (data.q, data.k, data.v))
    return ns.attention(q, k, v, mask=data.mask).transpose(0, 1)


@pytest.mark.parametrize("how", [off_in_the_shortest, over_all_tokens])
@pytest.mark.parametrize("mask", ["causal(end)", "full()"])
def test_a_wrong_answer_is_not_timed(how: Any, mask: str) -> None:
    case = Case.parse(f"forward {SMALL} {mask} packed")
    entry = measure(case, [spoiled(how)], FEW).of("spoiled")
    assert entry.refused.startswith("wrong: o error")
    assert not entry.samples_us


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_a_wrong_gradient_is_caught_in_each_sequence(name: str) -> None:
    data = data_of(f"backward {SMALL} causal(end) packed")
    found, known = answer(NOSQUARE, data), truths(data)
    assert all(c.ok for c in check(NOSQUARE, data, found.out, known))
    for truth in known:
        wrong = found.out[name].clone()
        head = truth.key_head * (2 if name == "dq" else 1)
        data.entry(wrong, truth.entry, slice(head, head + 1))[0, 0, 1] += 1e-2
        bad = [c for c in check(NOSQUARE, data, {**found.out, name: wrong}, known) if not c.ok]
        assert [c.what for c in bad] == [name]


def test_each_sequence_is_looked_at_and_the_bound_is_its_own() -> None:
    data = data_of(f"forward {SMALL} full() packed")
    known = truths(data)
    assert sorted(truth.entry for truth in known) == [0, 1, 2, 3, 4]
    assert {truth.key_head for truth in known} == {0, 1}
    assert {truth.entry: truth.case.N for truth in known} == dict(enumerate(data.lengths))
    out = prepare(NOSQUARE, data).outputs()
    (found,) = check(NOSQUARE, data, out, known)
    assert found.how.startswith("float64 oracle: 5 of 5 sequences, a key head of each; 9")
    dense = [checking.truths(data.part(truth.entry, truth.key_head)) for truth in known]
    assert all(torch.equal(one.right["o"], truth.right["o"])
               for (one,), truth in zip(dense, known, strict=True))  # fmt: skip


def test_gradients_of_many_long_sequences_are_looked_at_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = data_of(f"backward {SMALL} full() packed")
    sizes = sorted(data.lengths)
    for worth, count in ((1, 1), (sizes[-1] ** 2 + sizes[0] ** 2, 2)):
        monkeypatch.setattr(checking, "GRADIENT_ELEMENTS", (worth * data.case.G, 0))
        found = [truth.case.N for truth in truths(data)]
        assert found == [sizes[-1], sizes[0]][:count]


def test_a_sum_over_sequences_is_checked() -> None:
    data = data_of(f"backward {SMALL} {MORE}")
    found, known = answer(NOSQUARE, data), truths(data)
    wrong = {**found.out, "dsinks": found.out["dsinks"] + 1e-2}
    assert [c.what for c in check(NOSQUARE, data, wrong, known) if not c.ok] == ["dsinks"]


def test_sequences_without_tokens_are_left_out() -> None:
    data = Data.of(replace(Case.parse(f"backward {ALIKE} full() packed"), M=3, N=3))
    assert min(data.lengths) == 0
    assert len(truths(data)) == sum(n > 0 for n in data.lengths)
