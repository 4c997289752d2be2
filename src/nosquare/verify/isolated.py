"""The other side of worker.py: starts it, listens, and starts it again behind a check that it
did not survive."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

import torch

from ..errors import ArgumentError, UnsupportedError
from .verdict import FAIL, Finding

LIMIT_S = 180  # of one check; the first one includes the start of a GPU
WORKER = ("-m", "nosquare.verify.worker")


def findings(
    target: Any,
    style: str,
    device: str,
    jobs: Sequence[tuple[str, str]],
    step: Callable[[int], None],
) -> list[Finding]:
    """The finding of each job (check, dtype), each asked once. step(n) is called before job n.

    Raises ArgumentError when the target is no name, UnsupportedError when no process starts.
    """
    if not isinstance(target, str):
        raise ArgumentError(
            "Another process can only find a function by its name.",
            {"function": getattr(target, "__qualname__", type(target).__name__)},
            "isolate=False, or the name: verify('package.module:function', isolate=True).",
        )
    found: list[Finding] = []
    while len(found) < len(jobs):
        first = len(found)
        worker = _Worker(
            {"target": target, "style": style, "device": device, "threads": torch.get_num_threads(),
             "jobs": jobs[first:]}
        )  # fmt: skip
        with worker:
            for message in worker.messages():
                if "begin" in message:
                    step(first + message["begin"])
                else:
                    found.append(Finding(**message["finding"]))
            if not worker.late and worker.process.wait() == -signal.SIGINT:
                raise KeyboardInterrupt  # Ctrl-C reaches it too
            if worker.begun == 0:
                raise UnsupportedError(
                    "The process for the checks did not start.",
                    {"target": target, "it said": worker.last_words() or "nothing"},
                    "isolate=False, to see the whole error.",
                )
            if worker.begun > len(found) - first:
                found.append(Finding(FAIL, worker.fate()))
    return found


class _Worker:
    """One process. begun: how many jobs it has begun."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.begun, self.late = 0, False
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        path = os.pathsep.join(dict.fromkeys(p for p in sys.path if p))
        # cuBLAS repeats its sums only where this is set before it starts
        env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "PYTHONPATH": path}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        pipes["stderr"] = self.errors
        self.process = subprocess.Popen([sys.executable, *WORKER], env=env, **pipes)
        self.lines: queue.Queue[bytes] = queue.Queue()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job).encode())
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it is dead already: messages() finds nothing
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(b"")

    def messages(self) -> Any:
        """What it says, until it ends or says nothing for LIMIT_S."""
        while True:
            try:
                line = self.lines.get(timeout=LIMIT_S)
            except queue.Empty:
                self.late = True
                return
            if not line.endswith(b"\n"):
                return
            message = json.loads(line)
            self.begun += "begin" in message
            yield message

    def fate(self) -> str:
        """Why the last job has no answer, in words."""
        if self.late:
            return f"no answer within {LIMIT_S} s"
        code = self.process.wait()
        how = (
            f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        said = self.last_words()
        return f"the process {how}" + (f": {said}" if said else "")

    def last_words(self) -> str:
        """The last line of its stderr."""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.late or kind is not None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        for pipe in (self.process.stdout, self.errors):
            if pipe is not None:
                pipe.close()
