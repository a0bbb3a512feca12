"""Compiles the native library: writes a build.ninja and runs ninja on it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from z3ext import _torch_version
from z3ext._toolchain import Compiler, CudaToolkit, build_error

LIBRARY_NAME = "libz3ext.so"
_OUTPUT_LINES = 40
_END_LIMIT_S = 10
_SAY_EVERY_S = 15.0
_STEP = re.compile(r"^\[(\d+)/(\d+)\] ", re.MULTILINE)

# -ffp-contract=off: a contracted multiply-add would skip a rounding that the ops promise.
_CXX_FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra")
_NVCC_FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-Xcompiler", "-fPIC,-ffp-contract=off,-Wall")
_LINK_FLAGS = ("-shared", "-Wl,--no-undefined")
FLAGS = (*_CXX_FLAGS, *_NVCC_FLAGS, *_LINK_FLAGS)


@dataclass(frozen=True)
class Job:
    """One compilation, in an empty ``folder``; the ``log`` may lie elsewhere.

    ``toolkit`` is None where CUDA is left out; ``codes`` are then empty, else as
    ``_architectures.compiled_codes`` returns them.
    """

    sources: Path
    folder: Path
    log: Path
    ninja: str
    compiler: Compiler
    toolkit: CudaToolkit | None
    codes: str


def compile_library(job: Job, limit_s: float, say_progress: Callable[[str], None]) -> Path:
    """Compiles and links the library, and returns its path in the job's folder.

    ``say_progress`` is called with a line of text every 15 seconds.

    Raises:
        BuildError: a command failed, or all of it took longer than ``limit_s`` seconds.
    """
    job.folder.joinpath("build.ninja").write_text(_build_file(job), encoding="utf-8")
    try:
        status = _run_ninja(job, limit_s, say_progress)
    except subprocess.TimeoutExpired as cause:
        raise build_error(
            f"the compilation took longer than {limit_s:g} s (Z3EXT_BUILD_TIMEOUT)",
            "set Z3EXT_BUILD_TIMEOUT to more seconds",
        ) from cause
    if status != 0:
        raise build_error(
            f"the compilation with {job.compiler.label} failed:\n"
            + _failure(job.log.read_text(encoding="utf-8", errors="replace"))
            + f"\n{_torch_version.described()}. The whole log is {job.log}",
            "mend what the compiler says, set CXX to another compiler, take a torch of that range",
        )
    return job.folder / LIBRARY_NAME


# Ends ninja when this process ends, killed or not, and ninja ends its compilers: nothing goes on to
# write into a folder that the next process removes. Set in a process between, since a function
# that runs between fork and exec could hang where torch has threads.
_TETHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def _run_ninja(job: Job, limit_s: float, say_progress: Callable[[str], None]) -> int:
    ninja = [job.ninja, "-C", str(job.folder), "-j", str(_parallel_jobs())]
    command = [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), *ninja]
    with job.log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # a Ctrl-C is for this process, which ends ninja then
        )
        try:
            return _wait(process, job.log, limit_s, say_progress)
        finally:
            _end(process)


def _wait(
    process: subprocess.Popen[bytes], log: Path, limit_s: float, say_progress: Callable[[str], None]
) -> int:
    """The exit status; now and then says how far it is."""
    began = time.monotonic()
    while True:
        left = limit_s - (time.monotonic() - began)
        try:
            return process.wait(timeout=max(0.0, min(left, _SAY_EVERY_S)))
        except subprocess.TimeoutExpired:
            waited = time.monotonic() - began
            if waited >= limit_s:
                raise
            steps = _STEP.findall(log.read_text(encoding="utf-8", errors="replace"))
            done = f"{steps[-1][0]} of {steps[-1][1]} steps" if steps else "nothing yet"
            say_progress(f"compiling: {done} done in {waited:.0f} s")


def _end(ninja: subprocess.Popen[bytes]) -> None:
    """Ends ninja where it still runs."""
    if ninja.poll() is not None:
        return
    # A kill of its process group would miss the compilers: each is in a group of its own, and
    # ninja, when asked to end, ends them.
    ninja.terminate()
    try:
        ninja.wait(timeout=_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        ninja.kill()
        ninja.wait()


def _parallel_jobs() -> int:
    asked = os.environ.get("MAX_JOBS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0))


def _environment() -> dict[str, str]:
    """This process's environment, but nothing in CPATH comes before torch's headers."""
    environment = dict(os.environ)
    environment["NINJA_STATUS"] = "[%f/%t] "
    folders = [environment.pop("CPATH", ""), environment.get("CPLUS_INCLUDE_PATH", "")]
    if folders[0]:
        environment["CPLUS_INCLUDE_PATH"] = ":".join(filter(None, folders))
    return environment


def _failure(log: str) -> str:
    """The first failed command of a ninja log and the end of its output."""
    match = re.search(r"^FAILED: .*?(?=^\[\d+/\d+\] |^ninja: |\Z)", log, re.MULTILINE | re.DOTALL)
    lines = (match[0] if match else log).rstrip().splitlines()
    head = lines[:2] if match else []  # what was made, and the command
    return "\n".join([*head, *lines[len(head) :][-_OUTPUT_LINES:]])


# --- build.ninja ---------------------------------------------------------------------------------


def _build_file(job: Job) -> str:
    torch_root = Path(torch.__file__).parent
    headers = (torch_root / "include", torch_root / "include/torch/csrc/api/include")
    shared = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for folder in (*headers, *([job.toolkit.include] if job.toolkit else [])):
        shared += ["-isystem", str(folder)]
    cxx = [*job.compiler.command, *_CXX_FLAGS, *shared]
    link = [*job.compiler.command, *_LINK_FLAGS]
    libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    sources = [*sorted(job.sources.glob("*.cpp")), *sorted(job.sources.glob("cpu/*.cpp"))]
    rules = [_rule("cxx", cxx, "-c $in -o $out")]
    if job.toolkit:
        nvcc = [str(job.toolkit.nvcc), "-ccbin", job.compiler.program, *_NVCC_FLAGS, *shared]
        rules.append(_rule("nvcc", [*nvcc, *_gencodes(job.codes)], "-c $in -o $out"))
        sources += [p for p in sorted(job.sources.glob("cuda/*")) if p.suffix in (".cu", ".cpp")]
        folder = job.toolkit.library
        # torch has loaded its own libcudart by then; the rpath is for one that holds it inside.
        libraries += ["-ltorch_cuda", "-lc10_cuda", f"-L{folder}", f"-Wl,-rpath,{folder}"]
        libraries.append("-lcudart")
    rules.append(_rule("link", link, f"$in {_command(libraries)} -o $out"))
    objects = []
    edges = []
    for source in sources:
        name = "-".join(source.relative_to(job.sources).parts) + ".o"
        rule = "nvcc" if source.suffix == ".cu" else "cxx"
        edges.append(f"build {name}: {rule} {_path(source)}\n")
        objects.append(name)
    edges.append(f"build {LIBRARY_NAME}: link {' '.join(objects)}\n")
    return "".join(["ninja_required_version = 1.5\n", *rules, *edges])


def _rule(name: str, command: Sequence[str], rest: str) -> str:
    return f"rule {name}\n  command = {_command(command)} {rest}\n  description = {name} $out\n"


def _command(words: Sequence[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def _path(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def _gencodes(codes: str) -> list[str]:
    arguments = []
    for code in codes.split():
        virtual = code.replace("sm_", "compute_")
        arguments.append(f"-gencode=arch={virtual},code={code}")
    return arguments
