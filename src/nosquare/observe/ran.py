"""What ran of somebody else's attention: the operators of forward, the nodes of backward."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..measure import BOOKKEEPING, Session, Sight, confirmed, measuring, together
from ..receipt import BACKWARD, LOGS, Receipt, note

# torch's operators for attention, by what its documentation calls them
ENGINES = {
    "_scaled_dot_product_flash_attention_for_cpu": "flash attention for CPUs",
    "_scaled_dot_product_flash_attention": "flash attention",
    "_scaled_dot_product_efficient_attention": "memory-efficient attention",
    "_scaled_dot_product_cudnn_attention": "cuDNN attention",
    "_scaled_dot_product_fused_attention_overrideable": "fused attention of the device",
    "_scaled_dot_product_attention_math_for_mps": "math path for MPS",
    "_flash_attention_forward": "flash attention",
    "_efficient_attention_forward": "memory-efficient attention",
    "_cudnn_attention_forward": "cuDNN attention",
    "_native_multi_head_attention": "fast path of nn.MultiheadAttention",
    "_transformer_encoder_layer_fwd": "fast path of nn.TransformerEncoderLayer",
}
MATH, UNSEEN = "math path", "not seen by torch's dispatcher"
# autograd's nodes for them, by the operator that each calls (torch's derivatives.yaml)
NODES = {
    "ScaledDotProductFlashAttentionForCpu": "_scaled_dot_product_flash_attention_for_cpu_backward",
    "ScaledDotProductFlashAttention": "_scaled_dot_product_flash_attention_backward",
    "ScaledDotProductEfficientAttention": "_scaled_dot_product_efficient_attention_backward",
    "ScaledDotProductCudnnAttention": "_scaled_dot_product_cudnn_attention_backward",
    "ScaledDotProductFusedAttentionOverrideable": (
        "_scaled_dot_product_fused_attention_overrideable_backward"
    ),
    "FlashAttention": "_flash_attention_backward",
    "EfficientAttention": "_efficient_attention_backward",
    "CudnnAttention": "_cudnn_attention_backward",
}
_SDPA: Any = torch.ops.aten.scaled_dot_product_attention.default
MOST_NODES = 64  # of one call; the math path has about ten


class Dispatched(TorchDispatchMode):
    """Notes the operators that the dispatcher comes to, and leaves them alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[str, None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing here is compiled, so nothing is wrapped
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; note its name once it has run."""
        if func is _SDPA:  # in inference mode it comes whole: into its parts, where it chooses
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in BOOKKEEPING:
            self.names[name] = None
        return out

    def ran(self) -> tuple[str, ...]:
        """The fused operator alone where there was one, else all that moved numbers."""
        return tuple(n for n in self.names if n in ENGINES) or tuple(self.names)


def engine(kernels: Sequence[str]) -> str:
    """What torch's documentation calls the way that these operators are."""
    found = [ENGINES.get(name.removesuffix("_backward")) for name in kernels]
    return next((words for words in found if words), MATH if found else UNSEEN)


# ---- backward ----

HANDLES: list[Any] = []  # of all hooks, so that none is left when the last log closes


@dataclass
class _Pass:
    """One backward pass through the nodes of one call."""

    names: list[str] = field(default_factory=list)
    sights: list[Sight] = field(default_factory=list)
    sessions: dict[int, Session] = field(default_factory=dict)  # by thread


class Backward:
    """Hooks on the nodes of one observed call.

    They hold no node, and no tensor but the mask's arrays: a graph is freed as soon as nobody
    holds it.
    """

    def __init__(self, forward: Receipt, arrays: tuple[Tensor, ...], more: str) -> None:
        self.forward, self.arrays, self.more, self.count = forward, arrays, more, 0
        self.passes: dict[int, _Pass] = {}

    def hook(self, nodes: list[Any]) -> None:
        """Listen to these nodes until the last log closes."""
        self.count = len(nodes)
        for node in nodes:
            name = node.name().rstrip("0123456789").removesuffix("Backward")
            HANDLES.append(node.register_prehook(self._before))
            HANDLES.append(node.register_hook(functools.partial(self._after, name)))

    def _before(self, grads: Any) -> None:
        if LOGS and measuring():
            session = Session(self.forward.problem.device, by_hook=True)
            self._pass().sessions[threading.get_ident()] = session
            session.begin()

    def _after(self, name: str, grads_in: Any, grads_out: Any) -> None:
        if not LOGS:
            return
        found = self._pass()
        session = found.sessions.pop(threading.get_ident(), None)
        if session is not None:
            found.sights.append(session.end())
        found.names.append(name)
        if len(found.names) == self.count:
            self._note(torch._C._current_graph_task_id())

    def _pass(self) -> _Pass:
        """Of the backward pass that is running; noted at its end where not every node runs."""
        number = torch._C._current_graph_task_id()
        if number not in self.passes:
            self.passes[number] = _Pass()
            end = functools.partial(self._note, number)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        return self.passes[number]

    def _note(self, number: int) -> None:
        found = self.passes.pop(number, None)
        if found is None or not found.names:
            return
        fused = tuple(NODES[name] for name in found.names if name in NODES)
        torchs = self.forward.caller == "torch.sdpa"
        receipt = replace(
            self.forward,
            op=BACKWARD,
            backend=engine(fused or found.names) if torchs else self.forward.backend,
            kernels=fused or tuple(dict.fromkeys(f"{n}Backward" for n in found.names if _works(n))),
        )
        if found.sights:
            receipt = confirmed(receipt, together(found.sights), self.arrays, self.more)
        note(receipt)


def _works(node: str) -> bool:
    """Whether a node is of an operator that moves numbers."""
    return node.lower() not in _VIEWS


_VIEWS = frozenset(name.replace("_", "") for name in BOOKKEEPING)


def nodes_between(out: Tensor, inputs: Iterable[Tensor]) -> list[Any]:
    """autograd's nodes from `out` back to `inputs`, those of the inputs left out."""
    ends = {t.grad_fn for t in inputs if t.grad_fn is not None}
    found: dict[Any, None] = {}
    ahead = [out.grad_fn]
    while ahead and len(found) < MOST_NODES:
        node = ahead.pop(0)
        if node is None or node in found or node in ends or node.name().endswith("AccumulateGrad"):
            continue
        found[node] = None
        ahead += [edge[0] for edge in node.next_functions]
    return list(found)
