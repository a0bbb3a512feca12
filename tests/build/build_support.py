"""What the build tests share: sources that compile in no time, fake tools, fresh interpreters."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import z3ext
from z3ext import _build

# Set in a fresh interpreter before ``code``: the sources are those of Z3EXT_TEST_SOURCES.
_TINY = """
import os, pathlib, sys, time
import torch
from z3ext import _build
torch.version.cuda = None
_build.source_dir = lambda: pathlib.Path(os.environ["Z3EXT_TEST_SOURCES"])
"""

_LEFT_OUT = (
    *("Z3EXT_PREBUILD", "Z3EXT_REFERENCE", "Z3EXT_BUILD_TIMEOUT"),
    *("CXX", "CPATH", "PYTHONPATH", "RANK"),
)

LIBRARY_PATH = "print('library', _build.library_path())"


def tiny_sources(folder: Path, answer: int = 7) -> Path:
    """Sources like csrc's in shape, whose library has one function; they need no torch header."""
    (folder / "cpu").mkdir(parents=True)
    (folder / "ops.cpp").write_text(
        '#include "answer.h"\nextern "C" int z3ext_answer() { return half() + kHalf; }\n'
    )
    (folder / "answer.h").write_text(f"constexpr int kHalf = {answer} - 3;\nint half();\n")
    (folder / "cpu" / "half.cpp").write_text('#include "../answer.h"\nint half() { return 3; }\n')
    return folder


def answer_of(library: Path) -> int:
    """What the library of ``tiny_sources`` answers."""
    return int(ctypes.CDLL(str(library)).z3ext_answer())


def program(path: Path, script: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def real_compiler() -> str:
    """The compiler behind the fakes."""
    found = shutil.which("c++") or shutil.which("g++")
    assert found is not None, "the build tests need a C++ compiler"
    return found


def counting_compiler(folder: Path, delay_s: float = 0.0) -> Path:
    """A c++ that writes one line to ``folder``/runs for everything that it compiles or links."""
    return program(
        folder / "c++",
        f"""case " $* " in
*" -o "*) echo run >> '{folder}/runs'; sleep {delay_s};;
esac
exec {real_compiler()} "$@\"""",
    )


def runs(folder: Path) -> int:
    """How often the compiler of ``counting_compiler`` compiled or linked."""
    path = folder / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


@dataclass(frozen=True)
class Bench:
    """``sources``: tiny ones; ``cache``: not made yet; ``tools``: of a compiler that counts."""

    sources: Path
    cache: Path
    tools: Path


def make_bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Lets library_path see tiny sources, an empty cache, CXX, and a torch without CUDA."""
    bench = Bench(tiny_sources(folder / "sources"), folder / "cache", folder / "tools")
    monkeypatch.setattr(_build, "source_dir", lambda: bench.sources)
    monkeypatch.setattr(_build, "_PREBUILT", folder / "_prebuilt")
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setenv("Z3EXT_CACHE_DIR", str(bench.cache))
    monkeypatch.setenv("CXX", str(counting_compiler(bench.tools)))
    monkeypatch.delenv("Z3EXT_BUILD_TIMEOUT", raising=False)
    return bench


def environment(cache: Path | None = None, **changes: str) -> dict[str, str]:
    """This process's environment without what changes a build, and with ``changes``."""
    kept = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    if cache is not None:
        kept["Z3EXT_CACHE_DIR"] = str(cache)
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


def start_python(
    code: str, env: dict[str, str], python: str | Path = sys.executable, cwd: Path | None = None
) -> subprocess.Popen[str]:
    """A fresh interpreter that runs ``code``."""
    return subprocess.Popen(
        [str(python), "-c", code],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_tiny(code: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """A fresh interpreter with ``_build`` imported, whose sources are Z3EXT_TEST_SOURCES."""
    return start_own(_TINY + code, env)


def start_together(count: int, code: str, env: dict[str, str]) -> list[subprocess.Popen[str]]:
    """Like ``start_tiny``, several times; all run ``code`` once the last has imported torch."""
    ready = Path(env["Z3EXT_TEST_SOURCES"]).parent / "ready"
    ready.mkdir()
    wait = f"""
ready = pathlib.Path({str(ready)!r})
(ready / str(os.getpid())).touch()
while len(list(ready.iterdir())) < {count}:
    time.sleep(0.01)
"""
    return [start_tiny(wait + code, env) for _ in range(count)]


def start_own(code: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """A fresh interpreter that imports the z3ext that this one imports."""
    return start_python(code, {**env, "PYTHONPATH": str(Path(z3ext.__file__).parents[1])})


def finish(process: subprocess.Popen[str], limit_s: float = 300) -> tuple[str, str]:
    """Standard output and standard error of a process that has to succeed."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, out + err
    return out, err


def run(command: list[str | Path], env: dict[str, str], cwd: Path, limit_s: float = 300) -> str:
    """The output of a command that has to succeed."""
    finished = subprocess.run(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout
