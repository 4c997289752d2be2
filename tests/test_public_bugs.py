"""Public bug reports about attention, each as a check of ours. The issue is named in each
docstring.

A report is a symptom that somebody met in practice; the property that rules it out is what is
tested. Calls go through ns.sdpa where the report is about torch's function, else through our
own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nosquare as ns
from helpers import INF, NAN, Case, Exact, bounds, check, close, rnd, unit
from nosquare import oracle
from nosquare.api import varlen_state
from nosquare.dropout import realised_rate

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def agrees(call: Call, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """o and the gradients of q, k, v of `call` are those of the oracle with `options`."""
    c = Case(q, k, v, options)

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> ns.State:
        return ns.State(call(q, k, v), ns.attention_state(q, k, v, **options).lse.detach())

    check(c, attend, through_lse=False)


def three(m: int, n: int, d: int = 16, hq: int = 2, hk: int = 2, b: int = 2) -> list[Tensor]:
    return [rnd(b, hq, m, d, seed=1), rnd(b, hk, n, d, seed=2), rnd(b, hk, n, d, seed=3)]


def test_a_row_that_may_see_nothing() -> None:
    """pytorch/pytorch#103749: a row of a bool mask without any True gives 0 and no NaN gradient."""
    keep = torch.ones(6, 10, dtype=torch.bool).tril(6)
    keep[2], keep[5] = False, False
    x = three(6, 10)
    agrees(lambda *t: ns.sdpa(*t, attn_mask=keep), *x, mask=ns.Dense(keep))
    assert not ns.sdpa(*x, attn_mask=keep)[:, :, [2, 5]].any()


def test_keys_at_the_most_negative_number() -> None:
    """pytorch/pytorch#109517: a first block of finfo.min does not count; rows of nothing else
    average."""
    low = torch.finfo(torch.float32).min
    q, k, v = three(9, 200, 64)
    bias = torch.zeros(9, 200)
    bias[:, :128] = low
    bias[8] = low
    got = ns.sdpa(q, k, v, attn_mask=bias)
    live = Exact.of(Case(q[:, :, :8], k[:, :, 128:], v[:, :, 128:]))
    close("o", got[:, :, :8], live.o, bounds(live, *live.case.cotangents())["o"])
    mean = v.double().mean(2)
    close("mean", got[:, :, 8], mean, 2 * 200 * unit(torch.float32) * v.double().abs().mean(2))


@pytest.mark.parametrize(("m", "n"), [(2, 5), (5, 2), (1, 7), (70, 130), (130, 70)])
def test_two_alignments_of_a_causal_mask(m: int, n: int) -> None:
    """pytorch/pytorch#108108 and Dao-AILab/flash-attention#282: with M != N, torch's is_causal
    counts from the upper left, flash_attn's causal from the lower right, where early rows may
    see nothing."""
    x = three(m, n)
    agrees(
        lambda *t: ns.sdpa(*t, is_causal=True), *x, mask=ns.Dense(torch.ones(m, n).tril().bool())
    )
    corner = ns.Dense(torch.ones(m, n).tril(n - m).bool())
    agrees(lambda *t: ns.attention(*t, mask=ns.Causal()), *x, mask=corner)
    if m > n:
        assert not ns.attention(*x, mask=ns.Causal())[:, :, : m - n].any()


def test_one_operand_in_another_layout() -> None:
    """ROCm/pytorch#3230: v alone seen through a transpose; a strided last axis; a start off by
    three elements; every second or third row, backwards."""
    q, k, v = three(62, 62, 32)
    turned = v.transpose(1, 2).contiguous().transpose(1, 2)
    want = ns.sdpa(q, k, v)
    for other in (
        (q, k, turned),
        (q.mT.contiguous().mT, k, v),
        (q, torch.cat([q.new_full((3,), NAN), k.flatten()])[3:].view(k.shape), v),
    ):
        size = bounds(Exact.of(Case(q, k, v)), *Case(q, k, v).cotangents())["o"]
        close("o", ns.sdpa(*other), want.double(), 2 * size)
    step = (q.flip(2)[:, :, ::2], k[:, :, ::3], v[:, :, ::3])
    agrees(ns.sdpa, *step)


def packed(lengths_q: list[int], lengths_k: list[int], tail: int = 0) -> tuple[Any, ...]:
    cu = [torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k)]
    q = rnd(sum(lengths_q) + tail, 2, 16, seed=1)
    k, v = (rnd(sum(lengths_k) + tail, 2, 16, seed=s) for s in (2, 3))
    return (*(t.requires_grad_() for t in (q, k, v)), *cu)


def each_alone(x: tuple[Any, ...], do: Tensor) -> None:
    """o and gradients of a packed call, sequence by sequence."""
    q, k, v, cq, ck = x
    got = varlen_state(*x)
    grads = torch.autograd.grad(got.o, (q, k, v), do)
    for b in range(len(cq) - 1):
        rows, cols = slice(cq[b], cq[b + 1]), slice(ck[b], ck[b + 1])
        own = [t.detach()[at].transpose(0, 1) for t, at in ((q, rows), (k, cols), (v, cols))]
        c = Case(*own)
        exact = [t.double().requires_grad_() for t in own]
        o = oracle.attention(*exact).o
        want = torch.autograd.grad(o, exact, do[rows].transpose(0, 1).double())
        mine = do[rows].transpose(0, 1)
        allowed = bounds(Exact.of(c), mine, torch.zeros(mine.shape[:-1]))
        close("o", got.o[rows].transpose(0, 1), o, allowed["o"])
        for name, g, w, at in zip("qkv", grads, want, (rows, cols, cols), strict=True):
            close(name, g[at].transpose(0, 1), w, allowed[name])
        if rows.stop == rows.start:  # keys without a query: exactly nothing
            assert not grads[1][cols].any()
            assert not grads[2][cols].any()


def test_sequences_without_queries_or_without_keys() -> None:
    """Dao-AILab/flash-attention#1713: a packed sequence of no queries leaves dk = dv = 0 for
    its keys, and its neighbours alone; queries without keys give 0."""
    x = packed([5, 0, 4, 3], [4, 3, 0, 6])
    each_alone(x, rnd(12, 2, 16, seed=4))
    assert not ns.attention_varlen(*x)[5:9].any()


def test_tokens_behind_the_last_sequence() -> None:
    """pytorch/pytorch#176793: tokens that pad a pack get output 0 and gradient 0, not memory as
    it was."""
    x = packed([14, 18, 12], [14, 18, 12], tail=6)
    each_alone(x, rnd(50, 2, 16, seed=4))
    o = ns.attention_varlen(*x)
    assert not o[44:].any()
    for g in torch.autograd.grad(o[:44].sum(), x[:3]):
        assert g.isfinite().all()
        assert not g[44:].any()


def test_products_beyond_the_range_of_half() -> None:
    """pytorch/pytorch#60939: float16 with q.k = 102,400 before the scale; float32 with scores
    in the ten thousands."""
    q, k = torch.full((1, 1, 4, 64), 40.0), torch.full((1, 1, 70, 64), 40.0)
    k[..., 1::2, :] = -40
    k[..., 5, 0] = 40.5
    v = rnd(1, 1, 70, 64, seed=3)
    agrees(ns.sdpa, *(t.half() for t in (q, k, v)))
    q, k, v = three(65, 129, 32)
    agrees(ns.sdpa, q * 300, k * 30, v)


def test_which_key_head_a_query_head_reads() -> None:
    """onnx/onnx#7274: consecutive query heads share a key head: h // G, not h % Hk; dk and dv
    are sums over the group."""
    x = three(33, 40, hq=6, hk=2)
    agrees(lambda *t: ns.sdpa(*t, enable_gqa=True), *x)
    for h in range(6):
        alone = ns.sdpa(x[0][:, h : h + 1], *(t[:, h // 3 : h // 3 + 1] for t in x[1:]))
        whole = Exact.of(Case(*x))
        allowed = bounds(whole, *whole.case.cotangents())["o"][:, h : h + 1]
        close("o", alone, whole.o[:, h : h + 1], allowed)


def test_dropout_rate_scale_and_replay() -> None:
    """pytorch/pytorch#124464: kept weights are w / (1 - p), dropped ones 0; one seed replays,
    another differs; p = 0 draws nothing; backward uses forward's mask for all three gradients."""
    n, p = 96, 0.3
    q, k, _ = three(n, n, b=1)
    eye = torch.eye(n).expand(1, 2, n, n).contiguous()
    torch.manual_seed(5)
    out = ns.sdpa(q, k, eye, dropout_p=p)
    kept = out != 0
    x = Exact.of(Case(q, k, eye))
    rate = realised_rate(p)
    allowed = bounds(x, *x.case.cotangents())["o"] / (1 - rate)
    close("kept", out, x.p * kept / (1 - rate), allowed)
    sigma = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * sigma
    leaves = [t.clone().requires_grad_() for t in (q, k, eye)]
    do = rnd(1, 2, n, n, seed=6)
    torch.manual_seed(5)
    grads = torch.autograd.grad(ns.sdpa(*leaves, dropout_p=p), leaves, do)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    w = (exact[0] @ exact[1].mT / 4).softmax(-1) * kept / (1 - rate)
    want = torch.autograd.grad(w @ exact[2], exact, do.double())
    # the case for the bounds: v four times as wide as q; weights are larger by 1 / (1 - rate)
    room = bounds(x, do, torch.zeros(1, 2, n))
    for name, g, e in zip("qkv", grads, want, strict=True):
        close("d" + name, g, e, room[name] / (1 - rate) ** 2)
    with torch.no_grad():
        torch.manual_seed(5)
        assert torch.equal(ns.sdpa(q, k, eye, dropout_p=p), out)
        assert not torch.equal(ns.sdpa(q, k, eye, dropout_p=p), out)
    before = torch.random.get_rng_state()
    ns.sdpa(q, k, eye, dropout_p=0.0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_what_is_masked_has_no_influence() -> None:
    """pytorch/pytorch#41508: huge numbers in keys that no query sees reach nothing, and dk = dv
    = 0."""
    q, k, v = three(20, 90)
    lengths = torch.tensor([70, 60])
    hidden = torch.arange(90) >= lengths[:, None]
    clean = [k.masked_fill(hidden[:, None, :, None], 0), v.masked_fill(hidden[:, None, :, None], 0)]
    keep = ~hidden[:, None, None]
    agrees(lambda *t: ns.sdpa(*t, attn_mask=keep), q, *clean, mask=ns.Lengths(lengths))
    want = ns.sdpa(q, *clean, attn_mask=keep)
    leaves = [
        t.requires_grad_()
        for t in (
            q,
            k.masked_fill(hidden[:, None, :, None], 1e18),
            v.masked_fill(hidden[:, None, :, None], -1e30),
        )
    ]
    got = ns.sdpa(*leaves, attn_mask=keep)
    assert torch.equal(got, want)
    _, dk, dv = torch.autograd.grad(got.sum(), leaves)
    for b, n in enumerate((70, 60)):
        assert not dk[b, :, n:].any()
        assert not dv[b, :, n:].any()


@pytest.mark.parametrize(("d", "e"), [(1, 1), (3, 5), (59, 59), (111, 40), (257, 257)])
def test_widths_that_are_no_multiple_of_eight(d: int, e: int) -> None:
    """Dao-AILab/flash-attention#1347: the scale is 1 / sqrt of the width given, not of a padded
    one."""
    agrees(ns.sdpa, rnd(1, 2, 37, d), rnd(1, 2, 53, d, seed=1), rnd(1, 2, 53, e, seed=2))


SHAPES = [(1, 11), (7, 11), (7, 1), (2, 1, 1, 11), (1, 3, 7, 11), (2, 3, 7, 11), (3, 1, 11)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    """pytorch/pytorch#120810: a mask of any shape that broadcasts, bool or -inf, as given or
    expanded."""
    x = three(7, 11, hq=3, hk=3)
    keep = rnd(*shape, seed=9) > -0.3
    options = {"mask": ns.Dense(keep.expand(2, 3, 7, 11))}
    agrees(lambda *t: ns.sdpa(*t, attn_mask=keep), *x, **options)
    agrees(lambda *t: ns.sdpa(*t, attn_mask=keep.expand(2, 3, 7, 11)), *x, **options)
    bias = torch.zeros(shape).masked_fill(~keep, -INF)
    agrees(lambda *t: ns.sdpa(*t, attn_mask=bias), *x, **options)


def test_masks_broadcast_over_two_batch_axes() -> None:
    """pytorch/pytorch#120810 again, with five axes."""
    x = [rnd(3, 2, 2, 7, 16), rnd(3, 2, 2, 11, 16, seed=1), rnd(3, 2, 2, 11, 32, seed=2)]
    keep = torch.arange(11) % 4 != 3
    agrees(lambda *t: ns.sdpa(*t, attn_mask=keep[None, None]), *x, mask=ns.Dense(keep[None]))


@pytest.mark.parametrize(
    ("m", "n", "before", "after"),
    [
        (130, 130, 129, 0),
        (130, 130, None, 0),
        (130, 130, 0, 0),
        (70, 200, 5, 3),
        (200, 70, 5, 3),
        (129, 129, 63, 0),
        (129, 129, 32, 64),
    ],
)
def test_both_ends_of_a_window_belong_to_it(m: int, n: int, before: int | None, after: int) -> None:
    """Dao-AILab/flash-attention#1133: [position - before, position + after] with both ends,
    across tile borders and with M != N; rows whose window lies outside the keys give 0."""
    i, j = torch.arange(m)[:, None] + n - m, torch.arange(n)
    keep = (j >= i - (m + n if before is None else before)) & (j <= i + after)
    x = three(m, n)
    agrees(lambda *t: ns.attention(*t, mask=ns.Window(before, after)), *x, mask=ns.Dense(keep))
    assert not ns.attention(*x, mask=ns.Window(before, after))[:, :, ~keep.any(1)].any()


@pytest.mark.parametrize("append", [False, True])
def test_lengths_at_the_borders_of_pages(append: bool) -> None:
    """pegainfer-project/pegainfer#291: a cache in pages, lengths at a page border and beside
    it, tables whose unused entries point at pages of NaN. (Pages are gathered here.)"""
    size, lengths = 16, [16, 15, 17, 32, 1, 47]
    table = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:24].view(6, 4)
    pages = torch.full((2, 40, size, 2, 32), NAN)
    stored = rnd(2, 6, 4 * size, 2, 32, seed=2)
    total = torch.tensor(lengths) + int(append)
    for b in range(6):
        for j in range(int(total[b])):  # a key that is appended is one more that is written
            pages[:, table[b, j // size], j % size] = stored[:, b, j]
    k, v = (p[table].flatten(1, 2).transpose(1, 2) for p in pages)
    q = rnd(6, 4, 1, 32, seed=3)
    got = ns.attention(q, k, v, mask=ns.Lengths(total), check_finite=True)
    for b, n in enumerate(total.tolist()):
        own = Case(q[b], *(stored[s, b, :n].transpose(0, 1) for s in (0, 1)))
        x = Exact.of(own)
        close(f"length {n}", got[b], x.o, bounds(x, *own.cotangents())["o"])


def test_one_compiled_function_for_many_lengths() -> None:
    """pytorch/pytorch#144021: the scale stays 1 / sqrt(D) and the causal mask right as lengths
    change."""
    torch._dynamo.reset()
    f = torch.compile(lambda *t: ns.sdpa(*t, is_causal=True), dynamic=True, backend="aot_eager")
    for n in (17, 64, 65, 130):
        agrees(f, *three(n, n, 24), mask=ns.Dense(torch.ones(n, n).tril().bool()))


@pytest.mark.gpu
def test_side_streams_and_captured_graphs() -> None:
    """thu-ml/SageAttention#371: work is ordered with the stream it is called on, and a captured
    graph computes on what its inputs hold when it is replayed."""
    x = [t.bfloat16().cuda() for t in three(128, 128, 64, hq=4, hk=4)]
    mask = ns.Dense(torch.ones(128, 128).tril().bool())

    def right(o: Tensor, *inputs: Tensor) -> None:
        e = Exact.of(Case(*(t.cpu() for t in inputs), {"mask": mask}))
        close("o", o, e.o, bounds(e, *e.case.cotangents())["o"])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = x[0] * 2
        for _ in range(3):
            o = ns.sdpa(late, *x[1:], is_causal=True)
    torch.cuda.current_stream().wait_stream(side)
    right(o, late, *x[1:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ns.sdpa(*x, is_causal=True)
    for seed in (7, 8):
        x[0].copy_(rnd(2, 4, 128, 64, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        right(out, *x)
