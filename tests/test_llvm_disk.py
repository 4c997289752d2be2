"""Machine code on disk: found again, and never trusted where somebody else could have written."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nosquare import doctor
from nosquare.backends.llvm_cpu import compiled, disk
from nosquare.backends.llvm_cpu.compiled import Code
from nosquare.backends.llvm_cpu.ir import Module
from nosquare.backends.llvm_cpu.ready import why_not
from nosquare.backends.llvm_cpu.target import host

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(os.name != "posix", reason="files have no owner here"),
]
KEY, CODE = disk.key_of("a module"), bytes(range(256)) * 8
ALIVE: list[Code] = []


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for each test."""
    place = tmp_path / "kept"
    monkeypatch.setenv(disk.SWITCH, str(place))
    return place


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were compiled, not loaded."""
    texts: list[str] = []
    optimised = compiled._optimised

    def counted(text: str, machine: object) -> object:
        texts.append(text)
        return optimised(text, machine)

    monkeypatch.setattr(compiled, "_optimised", counted)
    return texts


def answering(number: int) -> str:
    """A module whose function `answer` stores a number."""
    module = Module()
    f = module.function("answer", at="i64*")
    f.store(f.parameters[0], f.value(number, "i64"))
    return str(module)


def answer(text: str) -> int:
    """Compile or load, and run."""
    found, code = ctypes.c_int64(0), Code(text, host())
    ALIVE.append(code)  # as in compiled.py: to give it back would take locks of llvmlite's own
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address("answer"))(ctypes.addressof(found))
    return found.value


def test_the_next_process_need_not_compile(made: list[str], folder: Path) -> None:
    assert [answer(answering(42)) for _ in range(3)] == [42, 42, 42]
    assert len(made) == 1
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_every_folder_it_makes_is_private(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where new files are the group's by default: others could replace a folder below."""
    monkeypatch.setenv(disk.SWITCH, str(tmp_path / "a" / "b" / "c"))
    before = os.umask(0o002)
    try:
        assert [answer(answering(7)) for _ in range(2)] == [7, 7]
    finally:
        os.umask(before)
    assert len(made) == 1
    for path in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        assert path.stat().st_mode & 0o777 == 0o700


def test_other_words_have_another_key(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [answer(answering(n)) for n in (1, 2)] == [1, 2]
    assert len(made) == 2
    monkeypatch.setattr("llvmlite.__version__", "0.0.0")
    assert answer(answering(1)) == 1
    monkeypatch.setattr(compiled, "SPEED", 1)
    assert answer(answering(1)) == 1
    assert len(made) == 4
    assert disk.key_of("ab", "c") != disk.key_of("a", "bc")


def test_it_can_be_switched_off(
    made: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in ("off", "OFF", "0"):
        monkeypatch.setenv(disk.SWITCH, word)
        assert answer(answering(3)) == 3
        assert f"{disk.SWITCH}={word}" in disk.state()
    assert len(made) == 3
    assert not folder.exists()


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(disk.SWITCH)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert str(tmp_path / "x" / "nosquare" / "code") in disk.state()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert str(tmp_path / "home" / ".cache" / "nosquare" / "code") in disk.state()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def _rename(path: Path) -> None:
    disk.store(disk.key_of("another"), b"other code")
    os.replace(path.parent / disk.key_of("another"), path)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _link(path: Path) -> None:
    os.replace(path, path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def _open_to_all(path: Path) -> None:
    path.chmod(0o666)


def _open_to_group(path: Path) -> None:
    path.chmod(0o620)


def _open_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def _open_folder_above(path: Path) -> None:
    path.parent.parent.chmod(0o777)


def _anothers(path: Path) -> None:
    os.chown(path, 12345, -1)


def _anothers_folder(path: Path) -> None:
    os.chown(path.parent, 12345, -1)


DAMAGE = [_cut, _flip, _rename, _empty, _fifo, _link]
EXPOSED = [_open_to_all, _open_to_group, _open_folder, _open_folder_above]
FOREIGN = [_anothers, _anothers_folder]
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)


@pytest.mark.parametrize(
    "spoil",
    [*DAMAGE, *EXPOSED, *(pytest.param(f, marks=as_root) for f in FOREIGN)],
    ids=lambda f: f.__name__,
)
def test_what_cannot_be_trusted_is_made_again(spoil: object, made: list[str], folder: Path) -> None:
    assert answer(answering(5)) == 5
    (file,) = folder.iterdir()
    assert callable(spoil)
    spoil(file)
    assert disk.load(file.name) is None
    assert answer(answering(5)) == 5
    assert len(made) == 2
    if spoil in DAMAGE:  # and what was damaged is mended
        assert answer(answering(5)) == 5
        assert len(made) == 2


def test_it_says_whose_folder_it_refuses(folder: Path) -> None:
    disk.store(KEY, CODE)
    folder.chmod(0o770)
    assert disk.state() == (
        f"compiled kernels are not kept on disk (others may write to {folder}); "
        "every process makes its own"
    )
    folder.chmod(0o700)
    assert disk.state() == f"compiled kernels are kept in {folder}"


def test_the_doctor_says_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.doctor()
    assert f"llvm_cpu: compiled kernels are kept in {folder}" in capsys.readouterr().out


def test_where_nothing_can_be_written(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(disk.SWITCH, str(tmp_path / "file" / "below"))
    assert [answer(answering(6)) for _ in range(2)] == [6, 6]
    assert len(made) == 2
    assert "are not kept on disk (Not a directory" in disk.state()


def test_a_write_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        disk.store(KEY, CODE)
    assert list(folder.iterdir()) == []
    assert disk.load(KEY) is None


def test_only_so_many_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FILES_KEPT", 10)
    keys = [disk.key_of(str(n)) for n in range(11)]
    for n, key in enumerate(keys):
        disk.store(key, CODE)
        os.utime(folder / key, (n, n)) if n < 10 else None
    assert {file.name for file in folder.iterdir()} == set(keys[5:])


def test_many_writers_and_readers_at_once(folder: Path) -> None:
    """Each reads all of what one of them has written, or nothing."""
    wrong: list[object] = []
    texts = [bytes([n]) * 5000 for n in range(4)]

    def work(n: int) -> None:
        for _ in range(50):
            disk.store(KEY, texts[n])
            if disk.load(KEY) not in texts:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [file.name for file in folder.iterdir()] == [KEY]


FORK = """
import os, sys, threading
sys.path.insert(0, {here!r})
from test_llvm_disk import answer, answering
from nosquare.backends.llvm_cpu import compiled

inside, optimised, home = threading.Event(), compiled._optimised, os.getpid()

def slow(text, machine):  # the fork comes while another thread is in the middle of a module
    found = optimised(text, machine)
    if os.getpid() == home:
        inside.set()
        threading.Event().wait(0.5)
    return found

compiled._optimised = slow
other = threading.Thread(target=lambda: answer(answering(1)))
other.start()
inside.wait()
child = os.fork()
if child == 0:
    os._exit(0 if answer(answering(2)) == 2 else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
other.join()
sys.exit(code or answer(answering(3)) != 3)
"""


def test_a_fork_while_another_thread_compiles() -> None:
    code = FORK.format(here=__file__.rpartition("/")[0])
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60, check=False)
    assert run.returncode == 0
