"""LLVM IR text to machine code, once a key and process; on disk it outlives the process.

The engine that owns the code lives as long as the process: addresses handed out stay good.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any

from . import disk
from .ir import Module
from .target import Target

# LLVM's pipeline of this level, then its code generator of that. Loops are unrolled and vectors are
# chosen by the generator of the text: LLVM would spill what it unrolls on top of that.
SPEED, CODEGEN, ITS_OWN = 2, 3, ("loop_unrolling", "loop_vectorization", "slp_vectorization")

_CODE: dict[Hashable, Code] = {}
_LOCK = threading.RLock()  # LLVM's contexts are not for two threads at once
if hasattr(os, "register_at_fork"):  # nor for the child of a fork, in the middle of a module
    os.register_at_fork(
        before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
    )


class Code:
    """Machine code of one module."""

    def __init__(self, text: str, target: Target) -> None:
        self.text, self.target = text, target
        with _LOCK:
            self._engine = _engine(text, target)
        self._addresses: dict[str, int] = {}

    def address(self, name: str) -> int:
        """Where a function starts."""
        if name not in self._addresses:
            with _LOCK:
                self._addresses[name] = int(self._engine.get_function_address(name))
        return self._addresses[name]

    def assembly(self) -> str:
        """What the processor is told, for readers and tests: spills are marked "Spill"."""
        return assembly(self.text, self.target)


def compiled(key: Hashable, target: Target, write: Callable[[], Module]) -> Code:
    """The code under `key`; written by write() and compiled at the first call."""
    full = (key, target)
    code = _CODE.get(full)
    if code is None:
        with _LOCK:
            code = _CODE.get(full)
            if code is None:
                code = _CODE[full] = Code(str(write()), target)
    return code


def assembly(text: str, target: Target) -> str:
    """LLVM's words for the machine code of a module."""
    with _LOCK:
        machine = _machine(target)
        machine.set_asm_verbosity(True)
        return str(machine.emit_assembly(_optimised(text, machine)))


def _engine(text: str, target: Target) -> Any:
    import llvmlite
    import llvmlite.binding as llvm

    made_by = llvmlite.__version__, *map(str, llvm.llvm_version_info), llvm.get_default_triple()
    recipe = f"{SPEED} {CODEGEN} {ITS_OWN}"
    key = disk.key_of(*made_by, recipe, target.cpu, target.features, text)
    machine, code = _machine(target), disk.load(key)
    if code is None:
        code = machine.emit_object(_optimised(text, machine))
        disk.store(key, code)
    empty = llvm.parse_assembly("")
    empty.triple = llvm.get_default_triple()
    engine = llvm.create_mcjit_compiler(empty, machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _machine(target: Target) -> Any:
    import llvmlite.binding as llvm

    if target.triple:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    else:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    kind = llvm.Target.from_triple(target.triple or llvm.get_default_triple())
    return kind.create_target_machine(cpu=target.cpu, features=target.features, opt=CODEGEN)


def _optimised(text: str, machine: Any) -> Any:
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=SPEED)
    for name in ITS_OWN:
        setattr(options, name, False)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module
