"""Attention that is called elsewhere, seen by an open log: torch's SDPA, FlexAttention, flash_attn.

While a log is open, each function below is replaced by an observer that calls it, in its home and
in every module that holds it under a name. (A TorchFunctionMode would replace nothing, but it
changes what it looks at: nn.MultiheadAttention leaves its fast path when one is active, and every
operation of torch on the thread pays for it.) All threads are observed; a flash_attn package is
where it was imported before the log opened, and a function where a module holds it, not a closure.

What is told is what ran, not what was asked for:
    forward    a TorchDispatchMode, there for the one call, notes the operators that the dispatcher
               came to. FlexAttention allows none; of its forward the profiler alone can tell
    backward   hooks on autograd's nodes between output and inputs, which fire when a node has run

Inside code that torch.compile has compiled nothing is seen, but for the kernels that compiled
FlexAttention launches on a GPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ..measure import confirmed, settle, watched
from ..receipt import FORWARD, LOGS, Receipt, note, torch_version, versions
from . import asked, compiled
from .asked import Asked
from .ran import HANDLES, Backward, Dispatched, engine, nodes_between

_FLASH_PACKAGES = ("flash_attn", "flash_attn.cute", "flash_attn_interface", "fa3_fwd_interface")
_FLASH_NAMES = ("_func", "_with_kvcache")


class Target(NamedTuple):
    """A function that is observed.

    home, name  where it lives
    read        (name, arguments by name) -> Asked
    backend     "" where the operators that ran say it
    dispatched  whether a dispatch mode may look on
    """

    home: str
    name: str
    caller: str
    read: Callable[[str, Mapping[str, Any]], Asked]
    backend: str = ""
    dispatched: bool = True


_FLEX = "torch.nn.attention.flex_attention"
_SLOW = "flex_attention, not compiled"
_TORCHS = [
    Target("torch.nn.functional", "scaled_dot_product_attention", "torch.sdpa", asked.sdpa),
    Target("torch", "_native_multi_head_attention", "torch.sdpa", asked.fast_path),
    Target("torch", "_transformer_encoder_layer_fwd", "torch.sdpa", asked.fast_path),
    Target(_FLEX, "flex_attention", "flex_attention", asked.flex, _SLOW, False),
]


def targets() -> Iterator[tuple[Target, Any]]:
    """Every function that is observed and loaded, and the function itself."""
    for target in _TORCHS:
        function = getattr(sys.modules.get(target.home), target.name, None)
        # what somebody has put in its place is theirs, and no call of torch's attention
        if inspect.isbuiltin(function) or getattr(function, "__module__", "") == target.home:
            yield target, function
    for home in _FLASH_PACKAGES:
        module = sys.modules.get(home)
        for name, function in [] if module is None else list(vars(module).items()):
            if name.startswith("flash_attn") and name.endswith(_FLASH_NAMES):
                yield Target(home, name, "flash_attn", asked.flash, home), function


def _parameters(target: Target, function: Any) -> list[str]:
    """Names of its parameters, in order."""
    operator = getattr(torch.ops.aten, target.name, None)
    if operator is not None:  # written in C++: it has no signature, but the operator a schema
        return [argument.name for argument in operator.default._schema.arguments]
    return list(inspect.signature(function).parameters)


# ---- one observed call ----

_here = threading.local()  # .busy: the thread is inside an observed call


def _observer(target: Target, original: Any) -> Any:
    """What stands in for `original`: the same function, with receipts while a log is open."""
    words = _parameters(target, original)

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not LOGS or getattr(_here, "busy", False):
            return original(*args, **kwargs)
        given = dict(zip(words, args, strict=False)) | kwargs
        if _unreal(given.values()):
            return original(*args, **kwargs)
        try:
            wish = target.read(target.name, given)
        except Exception as error:  # its own checks will say it better
            out = original(*args, **kwargs)
            warnings.warn(f"no receipt of this {target.name}: {error}", stacklevel=2)
            return out
        call = functools.partial(original, *args, **kwargs)
        if asked.is_causal_bias(given.get("attn_mask")):  # it asks for the name, not the function
            bias = (given["attn_mask"],)
            call = functools.partial(handle_torch_function, observed, bias, *args, **kwargs)
        return _observe(target, wish, call)

    # to torch.compile the observer is the function itself
    observed._torchdynamo_orig_callable = original  # type: ignore[attr-defined]
    observed._torchdynamo_wrapper_id = id(observed)  # type: ignore[attr-defined]
    return observed


def _observe(target: Target, wish: Asked, call: Callable[[], Any]) -> Any:
    mode = Dispatched() if target.dispatched else None

    def run() -> Any:
        with mode or nullcontext():
            return call()

    _here.busy = True
    try:
        out, sight = watched(run, wish.problem.device)
    finally:
        _here.busy = False
    kernels = mode.ran() if mode else ()
    receipt = Receipt(
        *(FORWARD, wish.problem, target.backend or engine(kernels), wish.plan, kernels, None),
        version=_version(target, kernels),
        caller=target.caller,
    )
    note(receipt if sight is None else confirmed(receipt, sight, wish.arrays, wish.more))
    first = out if isinstance(out, Tensor) else out[0]
    if first.grad_fn is not None and not torch._C._are_functorch_transforms_active():
        nodes = nodes_between(first, wish.inputs)
        Backward(receipt, wish.arrays, wish.more).hook(nodes)
    return out


def _unreal(values: Any) -> bool:
    """Whether the call computes nothing: a tracer's tensors, or tensors without data."""
    first = next(iter(values), None)
    return (
        not isinstance(first, Tensor)
        or isinstance(first, torch._subclasses.FakeTensor)
        or first.is_meta
    )


def _version(target: Target, kernels: tuple[str, ...]) -> str:
    if target.caller != "flash_attn":
        return versions(kernels, ours=False)
    package = target.home.partition(".")[0]
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = str(getattr(sys.modules.get(package), "__version__", "of unknown version"))
    return f"{package} {found}, {torch_version()}"


# ---- putting observers in place ----


class _Watcher:
    """Observers stand in for the functions while a log is open."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, Any]] = {}  # id of a function -> it, and its observer
        self.places: list[tuple[dict[str, Any], str, Any, Any]] = []
        self.launched: tuple[Any, Any, Any] | None = None  # a class, its method run, our observer

    def start(self) -> None:
        """Put observers in place, wherever a module holds one of the functions."""
        for target, function in targets():
            if id(function) not in self.made:
                self.made[id(function)] = function, _observer(target, function)
        homes = {target.home for target in _TORCHS}
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.") and name not in homes:
                continue
            names = getattr(module, "__dict__", {})
            if not isinstance(names, dict):
                continue
            for word, value in list(names.items()):
                if id(value) in self.made:
                    observer = self.made[id(value)][1]
                    names[word] = observer
                    self.places.append((names, word, value, observer))
        if (launcher := compiled.launcher()) is not None:
            self.launched = launcher, launcher.run, compiled.observer(launcher.run)
            launcher.run = self.launched[2]

    def stop(self) -> None:
        """Put everything back, and remove the hooks."""
        for names, word, function, observer in self.places:
            if names.get(word) is observer:  # what somebody else put there meanwhile stays
                names[word] = function
        self.places.clear()
        if self.launched is not None:
            launcher, run, observer = self.launched
            if launcher.run is observer:
                launcher.run = run
            self.launched = None
        for handle in HANDLES:
            handle.remove()
        HANDLES.clear()
        settle()


WATCHER = _Watcher()
