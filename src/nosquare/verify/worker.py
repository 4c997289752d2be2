"""The process in which isolated checks run: python -m nosquare.verify.worker.

One JSON object comes on stdin: target, style, device, threads, jobs [[check, dtype], ...]. Lines
of JSON go out: {"begin": n} before job n, {"end": n, "finding": {...}} after it. What the function
under test prints goes to stderr. When the device is lost, the process ends with code 3.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

LOST = 3


def main() -> int:
    """Run the jobs. Returns the exit code."""
    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    job = json.load(sys.stdin)

    import torch

    from .registry import checks
    from .run import Asker, is_alive
    from .target import device_of, subject_of

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    torch.set_num_threads(job["threads"])
    subject, device = subject_of(job["target"], job["style"]), device_of(job["device"])
    ask = Asker(subject, device)
    for number, (name, word) in enumerate(job["jobs"]):
        say({"begin": number})
        say({"end": number, "finding": asdict(ask(checks()[name], word))})
        if not is_alive(device):
            out.close()
            os._exit(LOST)  # what a lost device does at a regular exit is not known
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
