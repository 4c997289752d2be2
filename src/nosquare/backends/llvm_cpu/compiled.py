"""LLVM IR text to machine code, once a key and process.

The engine that owns the code lives as long as the process: addresses handed out stay good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from .ir import Module
from .target import Target

_CODE: dict[Hashable, Code] = {}
_LOCK = threading.RLock()  # LLVM's contexts are not for two threads at once


class Code:
    """Machine code of one module."""

    def __init__(self, text: str, target: Target) -> None:
        self.text, self.target = text, target
        self._engine, self._assembly = _build(text, target)
        self._addresses: dict[str, int] = {}

    def address(self, name: str) -> int:
        """Where a function starts."""
        if name not in self._addresses:
            self._addresses[name] = int(self._engine.get_function_address(name))
        return self._addresses[name]

    def assembly(self) -> str:
        """What the processor is told, for readers and tests: spills are marked "Spill"."""
        return self._assembly()


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


def _build(text: str, target: Target) -> tuple[Any, Callable[[], str]]:
    import llvmlite.binding as llvm

    with _LOCK:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=target.cpu, features=target.features, opt=3
        )
        module = llvm.parse_assembly(text)
        module.triple = llvm.get_default_triple()
        module.data_layout = str(machine.target_data)
        module.verify()
        # loops are unrolled and vectors are chosen by the generator: LLVM would spill what it
        # unrolls on top of that
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
        passes = llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(module, passes)
        machine.set_asm_verbosity(True)
        assembly = machine.emit_assembly
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.finalize_object()
    return engine, lambda: str(assembly(module))
