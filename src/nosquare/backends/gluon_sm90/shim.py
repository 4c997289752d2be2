"""What Gluon lacks or names otherwise from release to release of Triton: the only file that knows.

Named barriers are PTX. Gluon's own arrival at a barrier in memory stops all threads of a warp group
first; an arrival at a named barrier stops nobody, and waiting there costs no look at memory.
"""

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# renamed in 3.7 and in 3.9
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@builtin
def add_tile(desc: Any, at: Any, tile: Any, _semantic: Any = None) -> None:
    """Add a tile in shared memory to an array, as a store by TMA that adds: see tma.store_wait."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, at, tile.handle)


@gluon.constexpr_function
def _bar(op, threads):
    # an operation on an element has to give one back
    return f"bar.{op} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def _named(OP: gl.constexpr, number, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(
        _bar(OP, THREADS), "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bar_sync(number, THREADS: gl.constexpr):
    """Wait at a named barrier until THREADS threads have arrived or wait."""
    _named("sync", number, THREADS)


@gluon.jit
def bar_arrive(number, THREADS: gl.constexpr):
    """Arrive at a named barrier, and go on."""
    _named("arrive", number, THREADS)


@gluon.constexpr_function
def _bar_with(threads):
    return f"bar.arrive $1, {threads}; mov.u32 $0, $2;"


@gluon.jit
def arrived_with(number, value, THREADS: gl.constexpr):
    """The same number of 32 bits, after arriving at a named barrier. It was read before that."""
    return gl.inline_asm_elementwise(
        _bar_with(THREADS), "=r,r,r", [gl.to_tensor(number), value],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _added_up(but):
    return f"cp.async.bulk.wait_group {but}; fence.proxy.async.global; mov.u32 $0, 0;"


@gluon.jit
def added_up(BUT: gl.constexpr):
    """A warp waits until what it has added by TMA, but so many of the last, is in memory, for all
    who look there."""
    gl.inline_asm_elementwise(
        _added_up(BUT), "=r,r",
        [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_turn(turn, value):
    """A warp waits until *turn has come to a value."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .s32 x; WAIT: ld.acquire.gpu.global.s32 x, [$1]; "
        "setp.lt.s32 p, x, $2; @p bra WAIT; fence.proxy.async.global; "
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0; }",
        "=r,l,r", [turn.to(gl.int64), gl.to_tensor(value)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def give_turn(turn, value):
    """A warp sets *turn, after all that it has done."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 x; bar.warp.sync 0xffffffff; mov.u32 x, %laneid; "
        "setp.eq.u32 p, x, 0; @p st.release.gpu.global.s32 [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [turn.to(gl.int64), gl.to_tensor(value)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def claimed(counter):
    """What a counter holds, which a warp of its own has then moved on by 1."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        "@p atom.global.add.u32 $0, [$1], 1; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }",
        "=r,l", [counter.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _scaling(n):
    """PTX: n numbers of a thread times two factors, those of rows r and r + 8, unless all factors
    of the warp are 1. In the layout of products two numbers of r come before two of r + 8."""
    factors = (2 * n, 2 * n + 2)
    scaled = "".join(f"mul.f32 ${i}, ${i}, ${factors[i % 4 // 2]}; " for i in range(n))
    return (
        "{ .reg .pred p; "
        f"setp.eq.f32 p, ${factors[0]}, 0f3F800000; "
        f"setp.eq.and.f32 p, ${factors[1]}, 0f3F800000, p; "
        "vote.sync.all.pred p, p, 0xffffffff; @p bra.uni SKIP; " + scaled + "SKIP: }"
    )


@gluon.constexpr_function
def _scaling_operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def scaled_rows(u, alpha, NUMBERS: gl.constexpr):
    """u * alpha[:, None], which costs a warp nothing but a look where all its alphas are exactly 1.

    NUMBERS  of u that a thread holds. A branch that Gluon writes would end every product under way.
    """
    return gl.inline_asm_elementwise(
        _scaling(NUMBERS), _scaling_operands(NUMBERS), [u, alpha[:, None] + gl.zeros_like(u)],
        dtype=gl.float32, is_pure=False, pack=NUMBERS,
    )  # fmt: skip


@gluon.jit
def one_by_one(x):
    """The same int32 numbers. LLVM makes vectors of what is compared with them otherwise, packs the
    conditions of a tile into bits and unpacks them again: four instructions a number, not two."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unknown(number):
    """The same number, of which the compiler knows nothing: what is worked out from it is worked
    out here, and not before a loop, where it would take registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )
