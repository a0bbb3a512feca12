"""The lock of a cache folder: held by the living, freed by the dead."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from build_support import environment, start_own

from z3ext import _cache
from z3ext._toolchain import BuildError

_HOLD = """
import pathlib, time
from z3ext import _cache
with _cache.locked(pathlib.Path({path!r}), 5, print) as held:
    assert held
    print("held", flush=True)
    time.sleep(600)
"""


def start_holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock from now on."""
    holder = start_own(_HOLD.format(path=str(path)), environment())
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def nothing(text: str) -> None:
    raise AssertionError(f"waited: {text}")


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = start_holder(path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert path.exists()
    with _cache.locked(path, 1, nothing) as held:
        assert held


def test_a_living_holder_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    holder = start_holder(path)
    monkeypatch.setattr(_cache, "_SAY_AFTER_S", 0.3)
    said: list[str] = []
    started = time.monotonic()
    try:
        with pytest.raises(BuildError) as error, _cache.locked(path, 1, said.append):
            raise AssertionError("two hold the lock")
    finally:
        end(holder)
    assert 1 <= time.monotonic() - started < 10
    assert f"waited 1 s for process {holder.pid} on " in str(error.value)
    assert str(path) in str(error.value)
    assert "Z3EXT_BUILD_TIMEOUT" in str(error.value)
    assert "Z3EXT_REFERENCE=1" in str(error.value)
    assert len(said) == 1
    assert f"waiting for process {holder.pid} on " in said[0]


def test_the_lock_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with _cache.locked(path, 1, nothing) as held:
            assert held
            with pytest.raises(BuildError, match=f"waited 0.1 s for process {os.getpid()} on"):
                _cache.locked(path, 0.1, nothing).__enter__()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with _cache.locked(tmp_path / "lock", 1, nothing) as held:
        assert not held
