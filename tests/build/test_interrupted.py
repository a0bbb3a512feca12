"""A compilation that takes long, or whose process is ended: what is said, and what is left."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from build_support import Bench, environment, make_bench, program, real_compiler, start_tiny

from z3ext import _build, _compile

_FULL_S = 20.0


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return make_bench(tmp_path, monkeypatch)


def _compiler_without_end(folder: Path) -> Path:
    """Tells its process id, then never ends."""
    return program(
        folder / "c++",
        f"""case " $* " in *" -o "*) echo $$ >> '{folder}/pids'; exec sleep 600;; esac
exec {real_compiler()} "$@\"""",
    )


def _is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until(condition: object, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + _FULL_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_compiler_outlives_the_process(
    bench: Bench, tmp_path: Path, end: signal.Signals
) -> None:
    env = environment(
        bench.cache,
        Z3EXT_TEST_SOURCES=str(bench.sources),
        CXX=str(_compiler_without_end(tmp_path)),
    )
    process = start_tiny("_build.library_path()", env)
    pids = tmp_path / "pids"
    try:
        _wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), "no compiler ran")
        compilers = [int(line) for line in pids.read_text().splitlines()]
        assert all(map(_is_running, compilers))
        process.send_signal(end)
        process.communicate(timeout=_FULL_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode != 0
    _wait_until(lambda: not any(map(_is_running, compilers)), f"{compilers} still run")
    assert _build.library_path().exists()  # and the next process compiles


def test_a_long_compilation_says_how_far_it_is(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = program(
        tmp_path / "c++",
        f"""case " $* " in *" -o "*) sleep 1;; esac
exec {real_compiler()} "$@\"""",
    )
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setenv("MAX_JOBS", "1")
    monkeypatch.setattr(_compile, "_SAY_EVERY_S", 0.25)
    caplog.set_level("INFO", "z3ext")
    _build.library_path()
    said = [text for text in caplog.messages if text.startswith("compiling: ")]
    assert said[0] == "compiling: nothing yet done in 0 s"
    found = [re.fullmatch(r"compiling: (\d) of 3 steps done in \d+ s", text) for text in said]
    steps = [int(match[1]) for match in found if match]
    assert steps == sorted(steps)
    assert {1, 2} <= set(steps) <= {0, 1, 2, 3}
