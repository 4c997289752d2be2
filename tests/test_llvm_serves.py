"""llvm_cpu among the backends: what it serves, what it leaves to others, and who serves where no
code can be generated."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import nosquare as ns
from helpers import case, forget, rnd
from nosquare.backends import BACKWARD, BACKWARD_LSE, FORWARD, choose, discover, objections
from nosquare.doctor import doctor
from nosquare.errors import UnsupportedError
from nosquare.estimate import contiguous, cost

pytest.importorskip("llvmlite", reason="llvm_cpu generates code with llvmlite")
from nosquare.backends.llvm_cpu import ready, target
from nosquare.backends.llvm_cpu.ready import why_not

needs_code = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SIZES = {"B": 1, "Hq": 8, "Hk": 2, "M": 512, "N": 512, "D": 64, "E": 64}


# ---- first, and where it is not ----


@needs_code
def test_it_is_asked_first_of_those_for_a_cpu_and_serves_both_passes() -> None:
    assert [*discover()][:2] == ["gluon_sm90", "llvm_cpu"]
    others = {"gluon_sm90": ("it has kernels for GPUs, and the tensors are on cpu",)}
    c = case(softcap=2.0, mask=ns.Window(9, 3), dtype=torch.bfloat16)
    with ns.receipts() as log:
        leaves = [t.requires_grad_() for t in (c.q, c.k, c.v)]
        ns.attention(*leaves, **c.options).sum().backward()
    assert [(r.op, r.backend) for r in log] == [(p, "llvm_cpu") for p in ("forward", "backward")]
    assert [r.refusals for r in log] == [others] * 2


@needs_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_it_leaves_is_served_by_torchs_own_kernel(dtype: torch.dtype) -> None:
    """It never steps back for torch_any, which is slower at any size."""
    left = 0
    forms = ({}, {"softcap": 1.0}, {"batch_invariant": True}, {"scale": -0.5}, {"p": 0.1})
    masks = "full()", "causal(end)", "causal(start)"
    for m, n, mask, more in product((1, 2, 16), (1, 16, 17, 4096), masks, forms):
        p = contiguous(SIZES | {"M": m, "N": n}, dtype, mask, grads="qkv")
        p = replace(p, device=torch.device("cpu"), **more)
        for phase in (FORWARD, BACKWARD, BACKWARD_LSE):
            backend = discover()["llvm_cpu"]
            if objections(backend, p, phase) and not backend.refusals(p, phase):
                left += 1
                assert choose(p, phase).name == "torch_fused", p.describe()
    assert left >= 4  # small plain problems


# ---- where no code can be generated ----


def missing(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "llvmlite.binding", None)


def broken(patch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise OSError("Could not find/load shared object file\nand more")

    patch.setattr(ready, "host", load)


def unknown(patch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding as llvm

    patch.setattr(llvm, "get_host_cpu_features", lambda: {"sse2": True})
    patch.setattr(llvm, "get_host_cpu_name", lambda: "abacus")


def forbidden(patch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(mprotect=lambda *_: -1)
    patch.setattr(
        ready, "ctypes", SimpleNamespace(**vars(ready.ctypes) | {"CDLL": lambda _: library})
    )


def too_old(patch: pytest.MonkeyPatch) -> None:
    def parse(*_: Any) -> None:
        raise RuntimeError("LLVM IR parsing error\n<string>:6:19: error: expected type")

    patch.setattr(ready, "compiled", parse)
    patch.setattr("llvmlite.__version__", "0.44.0")


def wrong(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ready, "_probe", lambda _: False)


TROUBLES: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    missing: 'llvmlite, which generates its kernels, is not installed: pip install "nosquare[cpu]"',
    broken: "llvmlite, which generates its kernels, does not work here: "
    "OSError: Could not find/load shared object file",
    unknown: "This processor has no vector instructions that llvm_cpu generates code for. "
    "It calls itself abacus.",
    forbidden: "this system lets no process run code that it has generated (W^X)",
    too_old: "llvmlite 0.44.0 does not compile its kernels: RuntimeError: LLVM IR parsing error; "
    'pip install "nosquare[cpu]"',
    wrong: "its code computes wrong numbers on this processor",
}


@pytest.fixture(params=TROUBLES, ids=lambda f: f.__name__)
def reason(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Something is the matter; how the user is told."""
    forget(monkeypatch)
    caches = why_not, target.host
    for one in caches:
        one.cache_clear()
    request.param(monkeypatch)
    yield TROUBLES[request.param]
    monkeypatch.undo()
    for one in caches:
        one.cache_clear()


def test_the_next_backend_serves_and_says_why(reason: str) -> None:
    c = case(softcap=2.0)
    leaves = [t.requires_grad_() for t in (c.q, c.k, c.v)]
    with ns.receipts() as log:
        ns.attention(*leaves, **c.options).sum().backward()
    assert [r.backend for r in log] == ["torch_any"] * 2
    assert [r.refusals["llvm_cpu"] for r in log] == [(reason,)] * 2
    why = ns.explain(*leaves, **c.options)
    assert f"forward   cannot llvm_cpu     {reason}\n" in str(why)
    assert ns.explain(c.q, c.k, c.v).chosen == {"forward": "torch_fused", "backward": "torch_fused"}


def test_by_name_it_is_refused(reason: str) -> None:
    c = case(m=3, n=5, d=8)
    with pytest.raises(UnsupportedError) as caught:
        ns.attention(c.q, c.k, c.v, backend="llvm_cpu")
    assert str(caught.value) == (
        "llvm_cpu cannot run this problem.\n"
        "  problem   forward: B=2 Hq=4 Hk=2 M=3 N=5 D=8 E=8 float32 cpu mask full()\n"
        f"  llvm_cpu  {reason}\n"
        "  Try: backend=None, so that another backend may take it."
    )


def test_the_doctor_says_what_is_missing(
    reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    doctor()
    said = capsys.readouterr().out
    assert f"\n  llvm_cpu: {reason}\n" in said
    assert said.count(f"  none of them by llvm_cpu: {reason}\n") == 1  # not under every problem
    assert "not llvm_cpu" not in said


FORBIDDEN = """
import ctypes, sys
import torch
PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1
if ctypes.CDLL(None).prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0):
    sys.exit(77)
import nosquare as ns
q = torch.randn(1, 1, 200, 16)
with ns.receipts() as log:
    ns.attention(q, q, q, softcap=2.0)
print(log[0].backend, *log[0].refusals["llvm_cpu"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux can forbid it for one process")
def test_a_process_that_may_run_no_new_code_lives() -> None:
    """LLVM itself does not notice, and its first kernel is a segmentation fault."""
    ran = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True)
    if ran.returncode == 77:
        pytest.skip("this kernel cannot forbid it")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"torch_any {TROUBLES[forbidden]}\n"


# ---- memory ----


Call = Callable[[], list[Tensor]]


def packed(m: int) -> Call:
    x = [rnd(m, 2, 4, seed=s).requires_grad_() for s in range(3)]
    ends = torch.tensor([0, 4, m])

    def call() -> list[Tensor]:
        o = ns.attention_varlen(*x, ends, ends, backend="llvm_cpu")
        return [o, *torch.autograd.grad(o.sum(), x)]

    return call


def forward(m: int) -> Call:
    c = case(m=m, mask=ns.Causal() | ns.Prefix(2))

    def call() -> list[Tensor]:
        s = ns.attention_state(c.q, c.k, c.v, **c.options, backend="llvm_cpu")
        return [s.o, s.lse]

    return call


def gradient(m: int) -> Call:
    bias, sinks = rnd(4, 1, 53).requires_grad_(), rnd(4).requires_grad_()
    c = case(m=m, mask=ns.Causal() & ns.Window(9, 0), bias=bias, sinks=sinks)
    x = [c.q.requires_grad_(), c.k, c.v, bias, sinks]

    def call() -> list[Tensor]:
        s = ns.attention_state(*x[:3], **c.options, backend="llvm_cpu")
        both = s.o.sum() + s.lse.exp().sum()
        return [s.o, s.lse, *torch.autograd.grad(both, [x[0], bias, sinks])]

    return call


CALLS = {"prefill": (forward, 37), "decode": (forward, 1), "packed": (packed, 9),
         "backward": (gradient, 37)}  # fmt: skip


@needs_code
@pytest.mark.parametrize("name", CALLS)
def test_results_live_no_longer_than_the_user_wants(name: str) -> None:
    """No cycle of references holds them until Python's collector comes by."""
    make, m = CALLS[name]
    call = make(m)
    call()  # compiling leaves cycles of its own, without tensors
    gc.collect()
    gc.disable()
    try:
        found = call()
        storages = [weakref.ref(t.untyped_storage()) for t in found]
        assert all(one() is not None for one in storages)
        del found
        assert not any(one() is not None for one in storages)
    finally:
        gc.enable()


@needs_code
@pytest.mark.parametrize("name", CALLS)
def test_torchs_defaults_change_nothing(name: str) -> None:
    """Workspace is float32 memory of this machine, whatever a new tensor is by default."""
    make, m = CALLS[name]
    call = make(m + 1)  # another size: nothing is remembered of it
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = call()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, call()))


# ---- what it says before it runs ----


@needs_code
def test_it_tells_its_tiles() -> None:
    found = cost(contiguous(SIZES, torch.float32, "causal(end)", grads="qkv"))
    assert found.forward.traffic is not None
    assert found.backward is not None
    assert found.backward.traffic is not None
    tiles = found.forward.traffic.tiling
    assert (tiles.tile_n, tiles.splits, tiles.source) == (64, 1, "llvm_cpu's plan")
    assert f"tiles {tiles.rows} x " in found.notes[0]
    tiles = found.backward.traffic.tiling
    assert f"tiles {tiles.rows // 4} x {tiles.tile_n}, " in " ".join(found.notes)
    assert tiles.backward == "dq summed in memory"
    token = SIZES | {"M": 1, "N": 65536}
    window = "causal(end)&window(before=4095,after=0)"
    for mask, chunks in (("full()", 128), (window, 8), ("dense(t0)", 128)):
        found = cost(contiguous(token, torch.float32, mask))
        assert found.forward.traffic is not None
        tiles = found.forward.traffic.tiling
        assert (tiles.rows, tiles.tile_n, tiles.splits) == (4, 32, chunks)
