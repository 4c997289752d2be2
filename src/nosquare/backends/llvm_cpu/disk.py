"""Machine code on disk, for the next process: loading it takes a hundredth of making it.

One file a module, in $XDG_CACHE_HOME/nosquare/code (~/.cache/nosquare/code); NOSQUARE_CACHE names
another folder, or says "off". A file is MAGIC, the SHA-256 of its name and of the code, the code.

Code is loaded only where nobody else can have written it: the file and every folder above it belong
to this user or to root, and others may not write to them. What cannot be kept or read is made
again, without a word; `state` has the words.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

SWITCH, OFF = "NOSQUARE_CACHE", ("off", "0", "no", "false")
MAGIC = b"nosquare code 1\n"
FILES_KEPT = 1024  # of some 10 KB each; beyond, the older half goes


def key_of(*words: str) -> str:
    """The name of what follows from these words."""
    digest = hashlib.sha256()
    for word in words:
        digest.update(b"%d:" % len(word) + word.encode())
    return digest.hexdigest()


def load(key: str) -> bytes | None:
    """The code under a key; None where there is none that may be trusted."""
    try:
        data = _read(_folder() / key)
    except OSError:
        return None
    head = _head(key, data[len(MAGIC) + 32 :])
    return data[len(head) :] if data.startswith(head) else None


def store(key: str, code: bytes) -> None:
    """Keep code, if that is possible: whole or not at all, whoever else writes it meanwhile."""
    try:
        folder = _folder()
        handle, name = tempfile.mkstemp(prefix=".new-", dir=folder)
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_head(key, code) + code)
        os.replace(name, folder / key)
        _thin_out(folder)
    except OSError:
        with suppress(OSError):
            os.unlink(name)


def state() -> str:
    """Where code is kept, or why it is not, in words."""
    try:
        folder = _folder()
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} may not be written to")
    except OSError as e:
        why = str(e) if e.errno is None else f"{e.strerror}: {e.filename}"
        return f"compiled kernels are not kept on disk ({why}); every process makes its own"
    return f"compiled kernels are kept in {folder}"


def _head(key: str, code: bytes) -> bytes:
    return MAGIC + hashlib.sha256(key.encode() + code).digest()


def _folder() -> Path:
    """Made where it is missing. Raises OSError where there is none that may be trusted."""
    named = os.environ.get(SWITCH, "")
    if named.lower() in OFF:
        raise PermissionError(f"{SWITCH}={named}")
    if os.name != "posix":
        raise PermissionError("only where files have an owner")
    if named:
        folder = Path(named).expanduser()
    else:
        caches = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(caches) if caches else Path("~/.cache").expanduser()) / "nosquare" / "code"
    folder = Path(os.path.realpath(folder))
    for part in (*reversed(folder.parents), folder):  # each of them private, whatever the umask
        if not part.is_dir():
            with suppress(FileExistsError):
                part.mkdir(mode=0o700)
    for part in (folder, *folder.parents):
        _check(part, os.stat(part), shared=part != folder)
    return folder


def _check(path: Path, found: os.stat_result, shared: bool = False) -> None:
    """Raise PermissionError where others could have written to it. `shared`: a folder where nobody
    may touch what is another's will do."""
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to user {found.st_uid}")
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others and not (shared and found.st_mode & stat.S_ISVTX):
        raise PermissionError(f"others may write to {path}")


def _read(path: Path) -> bytes:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # what is no file may wait
    handle = os.open(path, flags)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} is no file")
        _check(path, found)
        return file.read()


def _thin_out(folder: Path) -> None:
    """Delete the older half where there are too many."""
    names = os.listdir(folder)
    if len(names) > FILES_KEPT:
        for path in sorted((folder / name for name in names), key=_age)[: len(names) // 2]:
            with suppress(OSError):
                os.unlink(path)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # somebody else has deleted it
        return 0.0
