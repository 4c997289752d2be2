"""Every ill-formed packed call, mask and dropout, and every call that nobody can serve: the
whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nosquare as ns
import refusals
from helpers import load_forward_mode, rnd

load_forward_mode()

Q, K, V = rnd(2, 4, 5, 8), rnd(2, 2, 7, 8), rnd(2, 2, 7, 8)
PQ, PK, CU = rnd(9, 4, 8), rnd(9, 2, 8), torch.tensor([0, 4, 9])


def second_of_packed() -> Any:
    q = PQ.clone().requires_grad_()
    o = ns.attention_varlen(q, PK, PK, CU, CU)
    (g,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    return torch.autograd.grad(g.sum(), q)


LISTING = """
>>> ns.attention(Q, K, V, dropout=0.1)
ArgumentError: dropout is not an ns.Dropout.
  dropout  0.1
  Try: ns.Dropout(p=0.1, seed=7): the seed is what replays it.

>>> ns.Dropout(1.0, seed=7)
ArgumentError: Dropout needs a probability p with 0 <= p < 1.
  p  1.0
  Try: p=0.1, or no dropout at all; p = 1 would drop every weight.

>>> ns.Dropout(-0.5, seed=7)
ArgumentError: Dropout needs a probability p with 0 <= p < 1.
  p  -0.5
  Try: p=0.1, or no dropout at all; p = 1 would drop every weight.

>>> ns.Dropout(0.1, seed=1.5)
ArgumentError: The dropout seed is not an integer of 64 bits.
  seed  1.5
  Try: seed=7, or a 0-d int64 tensor such as torch.tensor(7).

>>> ns.Dropout(0.1, seed=1 << 63)
ArgumentError: The dropout seed is not an integer of 64 bits.
  seed  9223372036854775808
  Try: seed=7, or a 0-d int64 tensor such as torch.tensor(7).

>>> ns.Dropout(0.1, 7, (0, 0, 0))
ArgumentError: Dropout offsets are four integers, one each for b, h, i and j.
  offsets  (0, 0, 0)
  Try: offsets=(0, 0, 4096, 0) for a shard whose first query is number 4096.

>>> ns.attention(Q, K, V, backend="cuda")
ArgumentError: There is no backend of that name.
  backend   'cuda'
  backends  gluon_sm90, llvm_cpu, triton_any, torch_fused, torch_any
  Try: backend=None lets nosquare choose; `nosquare doctor` says what runs here.

>>> ns.attention(Q, K, V, alibi=rnd(4), backend="torch_fused")
UnsupportedError: torch_fused cannot run this problem.
  problem      forward: B=2 Hq=4 Hk=2 M=5 N=7 D=8 E=8 float32 cpu mask full() alibi=(4,)
  torch_fused  it has no alibi
  Try: backend=None, so that another backend may take it.

>>> ns.attention_varlen(PQ, PK, PK, CU, None)
ArgumentError: A packed call needs cu_q and cu_k.
  Try: give both.

>>> ns.attention_varlen(PQ, PK, PK, torch.tensor([0, 9, 4]), CU)
ArgumentError: cu_q must rise from 0 to at most the number of tokens.
  cu_q    [0, 9, 4]
  tokens  9
  Try: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).

>>> ns.attention_varlen(PQ, PK, PK, CU, torch.tensor([0, 4, 10]))
ArgumentError: cu_k must rise from 0 to at most the number of tokens.
  cu_k    [0, 4, 10]
  tokens  9
  Try: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).

>>> ns.attention_varlen(PQ, PK, PK, torch.tensor([2, 4, 9]), CU)
ArgumentError: cu_q must rise from 0 to at most the number of tokens.
  cu_q    [2, 4, 9]
  tokens  9
  Try: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).

>>> ns.attention_varlen(PQ, PK, PK, torch.tensor([*range(9), 7, 6, 5, 4]), torch.zeros(13).int())
ArgumentError: cu_q must rise from 0 to at most the number of tokens.
  cu_q    [0, 1, 2, 3, 4, 5, ..., 8, 7, 6, 5, 4]
  tokens  9
  Try: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).

>>> ns.attention_varlen(PQ, PK, PK, CU, CU.float())
ArgumentError: cu_k must be a 1-d int32 or int64 tensor of B + 1 offsets.
  cu_k  (3,) torch.float32
  Try: torch.tensor([0, 5, 9], dtype=torch.int32) for two sequences of 5 and 4 tokens.

>>> ns.attention_varlen(PQ, PK, PK, CU, torch.tensor([0, 9]))
ArgumentError: cu_q and cu_k disagree on the number of sequences.
  cu_q  2 sequences
  cu_k  1 sequences
  Try: one entry more than sequences in both.

>>> ns.attention_varlen(PQ[None], PK[None], PK[None], CU, CU)
ArgumentError: Packed q, k and v have three axes: (total, heads, width).
  q  (1, 9, 4, 8)
  k  (1, 9, 2, 8)
  v  (1, 9, 2, 8)
  Try: x.flatten(0, 1) for a padded (batch, length, heads, width) array.

>>> ns.attention_varlen(PQ[:, :3], PK, PK, CU, CU)
ArgumentError: The query heads must be a whole multiple of the key heads.
  q  M=9 Hq=3 D=8  float32 cpu
  k  N=9 Hk=2 D=8  float32 cpu
  v  N=9 Hk=2 E=8  float32 cpu
  Try: query head h reads key head h // G with G = Hq / Hk; check the axis order (total, head, \
width).

>>> ns.attention_varlen(PQ, PK, PK, CU, CU, bias=rnd(9, 9))
ArgumentError: A packed call takes no bias: its rows and keys have no common axes.
  bias  (9, 9)
  Try: attention on a padded batch with ns.Lengths, or alibi=.

>>> ns.attention_varlen(PQ, PK, PK, CU, CU, mask=ns.Dense(torch.ones(9, 9).bool()) & ns.Causal())
ArgumentError: A packed call has no common query and key axes for this mask.
  mask                  dense(t0)&causal(end)
  not for packed calls  dense
  Try: Causal, Window, Prefix and Lengths, which work on each sequence by itself.

>>> ns.attention_varlen(PQ, PK, PK, CU, CU, mask=ns.Lengths(torch.tensor([1, 2, 3])))
ArgumentError: Lengths in a packed call has one number a sequence.
  n_keys     (3,)
  sequences  2
  Try: leave it out: cu_k already says how long each sequence is.

>>> ns.attention_varlen(PQ, PK, PK, CU, CU, sinks=rnd(2, 4))
ArgumentError: sinks does not broadcast to the problem.
  sinks   (2, 4)
  needed  (4,)
  batch   (2,)
  Hq      4
  M       9
  N       9
  Try: axes of sinks are the last ones of (batch, Hq, M, N); size 1 broadcasts.

>>> ns.Causal("middle")
ArgumentError: A mask is aligned to the end or to the start.
  align  'middle'
  Try: align="end" (query i stands at i + N - M) or align="start" (it stands at i).

>>> ns.Window(-1, 3)
ArgumentError: A window's sides are counts of keys, so they cannot be negative.
  before  -1
  after   3
  Try: None for a side without bound, 0 for a side without keys.

>>> ns.Window(1.5, 3)
ArgumentError: A count of keys is an integer.
  before  1.5
  Try: int(...).

>>> ns.Prefix(-2)
ArgumentError: A prefix is a count of keys, so it cannot be negative.
  n  -2
  Try: Prefix(0) for none.

>>> ns.Lengths([3, 4])
ArgumentError: `n_keys` must hold integers.
  n_keys  [3, 4]
  Try: torch.tensor([5, 3]).

>>> ns.Documents(torch.zeros(5), torch.zeros(7))
ArgumentError: `q_ids` must hold integers.
  q_ids  (5,) torch.float32
  Try: torch.tensor([5, 3]).

>>> ns.Dense(torch.zeros(5, 7))
ArgumentError: `visible` must be a bool tensor, True where the key is visible.
  visible  (5, 7) torch.float32
  Try: visible=(visible != 0), or pass numbers as bias=.

>>> ns.BlockSparse(torch.ones(2, 2).bool(), 0)
ArgumentError: A block-sparse layout needs tiles of at least one key.
  block  0
  Try: block=128.

>>> ns.Causal() & torch.ones(2).bool()
ArgumentError: Only masks compose with &.
  left   causal(end)
  right  tensor([True, True])
  Try: ns.Dense(tensor) for a bool tensor.

>>> ns.parse("casual(end)")
ArgumentError: This does not spell a mask.
  text    'casual(end)'
  kinds   full, causal, window, prefix, lengths, documents, dense, blocksparse
  arrays  0
  Try: "causal(end)&window(before=1023,after=0)"; arrays are t0, t1, ...

>>> torch.vmap(lambda q: ns.attention_varlen(q, PK, PK, CU, CU))(PQ[None])
UnsupportedError: vmap over packed calls or over dropout seeds is not possible.
  packed  True
  seed    one
  Try: a loop, or a batch axis: attention takes any number of them.

>>> torch.vmap(lambda q: ns.attention(q, K[0], V[0], dropout=ns.Dropout(0.1, 1)))(Q)
UnsupportedError: Under vmap every entry draws its own dropout mask.
  randomness  error
  Try: torch.vmap(..., randomness="different").

>>> second_of_packed()
UnsupportedError: Packed attention has first derivatives in reverse mode only.
  problem  2 packed sequences Hq=4 Hk=2 M=9 N=9 D=8 E=8 float32 cpu mask full()
  Try: a padded batch with mask=ns.Lengths(n), which has derivatives of any order.

>>> torch.func.jvp(lambda q: ns.attention(q, K, V, backend="torch_fused"), (Q,), (Q,))
UnsupportedError: torch_fused has no forward derivative.
  problem      B=2 Hq=4 Hk=2 M=5 N=7 D=8 E=8 float32 cpu mask full()
  torch_fused  first derivatives in reverse mode only
  Try: backend="torch_any", or backend=None.
"""


@pytest.mark.parametrize(("call", "expected"), refusals.listed(LISTING))
def test_refused(call: str, expected: str) -> None:
    refusals.raises(call, expected, globals())
