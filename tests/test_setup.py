"""scripts/setup_venv.py: what state .venv is in, and which torch is refused. Installs nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "scripts" / "setup_venv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_venv = load()


def report(*packages: str) -> dict[str, object]:
    pairs = (p.split("==") for p in packages)
    return {"install": [{"metadata": {"name": n, "version": v}} for n, v in pairs]}


@pytest.mark.parametrize(
    "packages",
    [
        ["torch==2.13.0", "nvidia-cublas==13.1.1"],
        ["torch==2.13.0", "cuda-bindings==13.5.0"],
        ["torch==2.13.0", "triton==3.7.1"],
        ["torch==2.13.0", "pytorch-triton-rocm==3.4.0"],
        ["torch==2.13.0+cu130"],
        ["torch==2.13.0+rocm7.0"],
    ],
)
def test_gpu_build_is_refused(packages: list[str]) -> None:
    with pytest.raises(setup_venv.Stop) as stop:
        setup_venv.refuse_gpu_build(report("sympy==1.14.0", *packages), "2.13.0")
    for way_on in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "NOSQUARE_CUDA=1", packages[-1][:4]):
        assert way_on in str(stop.value)


@pytest.mark.parametrize("torch_version", ["2.13.0", "2.13.0+cpu"])
def test_cpu_build_passes(torch_version: str) -> None:
    found = report(f"torch=={torch_version}", "sympy==1.14.0", "tritonclient==2.0")
    setup_venv.refuse_gpu_build(found, "2.13.0")


def test_pin() -> None:
    text = "# torch==1.0\ntorch==2.13.0  # why\nnumpy==2.4.6; python_version >= '3.11'\n"
    assert setup_venv.pin(text, "torch") == "2.13.0"
    with pytest.raises(setup_venv.Stop, match="does not pin jax"):
        setup_venv.pin(text, "jax")
    setup_venv.pin((ROOT / "constraints.txt").read_text(), "torch")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a finished .venv."""
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text(name)
    venv = tmp_path / ".venv"
    for name in ("torch", "torch-2.13.0.dist-info", "rich"):
        (venv / "lib" / "python3.11" / "site-packages" / name).mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(sys.executable)
    names = setup_venv.installed_names(venv)
    assert names == ["rich", "torch"]
    lines = [sys.executable, str(tmp_path), setup_venv.digest(tmp_path), *names]
    (venv / ".ready").write_text("\n".join(lines) + "\n")
    return tmp_path


def state(root: Path, base: str = sys.executable) -> tuple[str, str]:
    found: tuple[str, str] = setup_venv.verdict(root / ".venv", root, base)
    return found


def test_finished_is_ready(checkout: Path) -> None:
    assert state(checkout) == ("ready", "")


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_files_mean_update(checkout: Path, name: str) -> None:
    (checkout / name).write_text("other")
    assert state(checkout)[0] == "update"


def test_unfinished_is_made_anew(checkout: Path) -> None:
    (checkout / ".venv" / ".updating").touch()
    assert state(checkout) == ("make", "the last setup did not finish")
    (checkout / ".venv" / ".updating").unlink()
    (checkout / ".venv" / ".ready").unlink()
    assert state(checkout) == ("make", "the last setup did not finish")


def test_damaged_is_made_anew(checkout: Path) -> None:
    (checkout / ".venv" / "lib" / "python3.11" / "site-packages" / "torch").rmdir()
    assert state(checkout) == ("make", "torch is missing from it")


def test_other_interpreter_or_none_is_made_anew(checkout: Path) -> None:
    assert state(checkout, "/usr/bin/another-python")[0] == "make"
    (checkout / ".venv" / "bin" / "python").unlink()
    assert state(checkout)[0] == "make"


def test_moved_is_made_anew(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    moved = checkout.rename(tmp_path_factory.mktemp("new") / "checkout")
    assert state(moved) == ("make", f"it was made in {checkout}")


def test_missing_venv_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup_venv, "find_spec", lambda name: None)
    with pytest.raises(setup_venv.Stop, match="has no venv module"):
        setup_venv.create(tmp_path / ".venv")
