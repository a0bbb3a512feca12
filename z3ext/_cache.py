"""Folders with compiled libraries, and the lock under which one process fills them.

A library lies beside its record, ``<tools>.json``, which names it and holds its hash. The record is
put in place last and in one step, so that a reader sees a whole library or none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from z3ext._toolchain import build_error

_POLL_S = 0.05
_SAY_AFTER_S = 2.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def cache_root() -> Path:
    """Z3EXT_CACHE_DIR, else z3ext in XDG_CACHE_HOME, else ~/.cache/z3ext."""
    asked = os.environ.get("Z3EXT_CACHE_DIR")
    if asked:
        return Path(asked).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "z3ext")
    try:
        return Path.home() / ".cache" / "z3ext"
    except RuntimeError as cause:
        raise build_error(
            "this user has no home directory for the cache", "set Z3EXT_CACHE_DIR to a folder"
        ) from cause


# --- libraries and their records -----------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One compiled library. ``codes``: the GPU codes in it, "" without CUDA kernels."""

    library: str
    sha256: str
    request: dict[str, str]
    compiler: str
    codes: str


def read_record(path: Path) -> Record | None:
    """The record in a file; None where the file is missing or damaged."""
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def sound_library(folder: Path, record: Record) -> Path | None:
    """The library of a record, if its content is what was recorded."""
    path = folder / record.library
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return path if hashlib.sha256(content).hexdigest() == record.sha256 else None


def find_library(folder: Path, tools: str, any_tools: bool) -> Path | None:
    """A sound library in a folder.

    Args:
        tools: the key of the tools at hand.
        any_tools: take the newest of other tools where there is none of these.
    """
    records = [folder / f"{tools}.json"]
    if any_tools:
        with contextlib.suppress(OSError):
            others = [(path.stat().st_mtime, path) for path in folder.glob("*.json")]
            records += [path for _, path in sorted(others, reverse=True)]
    for path in records:
        record = read_record(path)
        library = sound_library(folder, record) if record else None
        if library is not None:
            return library
    return None


def store_library(
    built: Path, folder: Path, name: str, request: dict[str, str], compiler: str, codes: str
) -> Path:
    """Moves a library into a folder under the name of its content, and writes ``name``.json.

    ``built`` must lie on the folder's file system.
    """
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    record = Record(f"libz3ext-{digest[:16]}.so", digest, request, compiler, codes)
    library = folder / record.library
    os.replace(built, library)
    written = built.with_suffix(".json")
    written.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    os.replace(written, folder / f"{name}.json")
    return library


@contextlib.contextmanager
def work_folder(folder: Path, exclusive: bool) -> Iterator[Path]:
    """A new folder inside ``folder``, removed at the end.

    With ``exclusive`` no other process works here: what a killed one left is removed too.
    """
    if exclusive:
        for left in folder.glob("work-*"):
            shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix="work-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Makes a folder of the cache, for this user alone, and sees that it can be written to.

    Raises:
        BuildError: it cannot.
    """
    try:
        # mkdir's mode does not reach the parents that it makes.
        for path in (*reversed(folder.parents), folder):
            path.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as cause:
        raise build_error(
            f"the cache folder {folder} cannot be written to: {cause}",
            "make it writable, set Z3EXT_CACHE_DIR to a folder that is",
        ) from cause


# --- the lock ------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path, limit_s: float, say_waiting: Callable[[str], None]) -> Iterator[bool]:
    """Holds the lock file; the kernel frees it when the holder dies, however it dies.

    Args:
        path: the lock file.
        limit_s: seconds to wait for another holder.
        say_waiting: called once with a line of text when the wait gets long.

    Yields:
        Whether the lock is held: False on a file system without locks.

    Raises:
        BuildError: another process still holds it after ``limit_s`` seconds.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        held = _acquire(descriptor, path, limit_s, say_waiting)
        if held:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield held
    finally:
        os.close(descriptor)


def _acquire(
    descriptor: int, path: Path, limit_s: float, say_waiting: Callable[[str], None]
) -> bool:
    started = time.monotonic()
    said = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as cause:
            if cause.errno in _NO_LOCKS:
                return False
            if cause.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        waited = time.monotonic() - started
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        if waited > limit_s:
            raise build_error(
                f"waited {limit_s:g} s for {holder}, which compiles the library and holds {path}",
                "end that process, set Z3EXT_BUILD_TIMEOUT to more seconds",
            )
        if waited > _SAY_AFTER_S and not said:
            said = True
            say_waiting(f"waiting for {holder}, which compiles the native library ({path})")
        time.sleep(_POLL_S)
