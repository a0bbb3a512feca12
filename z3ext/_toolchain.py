"""Finds what compiles the native library: a C++20 compiler, ninja, and for CUDA nvcc's toolkit."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MIN_GCC = 10  # the first with C++20
_MIN_CLANG = 12
_DEFAULT_CUDA = "/usr/local/cuda"
_ANSWER_LIMIT_S = 60  # a tool that only says its version; long enough for a cold network disk


class BuildError(RuntimeError):
    """The native library cannot be found, compiled or loaded; the text says why and what to do."""


class ToolkitProblem(Exception):
    """There is no CUDA toolkit that fits; the text says what was looked for and where."""


def build_error(problem: str, remedy: str) -> BuildError:
    """A BuildError that names the reference as the way out that is always there."""
    return BuildError(
        f"z3ext: {problem}; {remedy}, or set Z3EXT_REFERENCE=1 to use the pure-torch reference"
    )


def _output(command: Sequence[str | Path]) -> str:
    """Standard output and standard error of a command.

    Raises:
        OSError: it does not start, fails or takes too long.
    """
    try:
        finished = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=_ANSWER_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as cause:
        raise OSError(f"no answer within {_ANSWER_LIMIT_S} s") from cause
    if finished.returncode != 0:
        text = finished.stdout.strip() or "no output"
        raise OSError(f"exit status {finished.returncode}: {text}")
    return finished.stdout


# --- the C++ compiler and ninja ------------------------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    """``command``: what CXX says, as words; ``program``: the compiler in it, without a launcher."""

    command: tuple[str, ...]
    program: str
    label: str  # "g++ 12.2.0"


def compiler_command() -> tuple[str, ...] | None:
    """The C++ compiler as words, the program by its path; None where there is none.

    Starts no process. CXX is taken first and may hold a launcher or flags: ``ccache g++``.
    """
    asked = shlex.split(os.environ.get("CXX", ""))
    for words in [asked] if asked else [["c++"], ["g++"]]:
        program = shutil.which(words[0])
        if program is not None:
            return (os.path.abspath(program), *words[1:])
    return None


def find_compiler() -> Compiler:
    """The C++ compiler and its version.

    Raises:
        BuildError: there is none, it does not run, or it is too old for C++20.
    """
    remedy = "install g++ 10 or newer (Debian: apt-get install g++) or set CXX to such a compiler"
    command = compiler_command()
    asked = os.environ.get("CXX", "").strip()
    if command is None:
        looked_for = f"the compiler that CXX names, {asked!r}," if asked else "c++ and g++"
        problem = f"no C++ compiler: looked for {looked_for} on PATH={os.environ.get('PATH', '')}"
        raise build_error(problem, remedy)
    try:
        macros = _output([*command, "-dM", "-E", "-x", "c++", os.devnull])
    except OSError as cause:
        problem = f"the C++ compiler {shlex.join(command)} does not run: {cause}"
        raise build_error(problem, remedy) from cause
    launched = len(command) > 1 and not command[1].startswith("-")  # "ccache g++"
    program = command[1] if launched else command[0]
    numbers = dict(re.findall(r"#define (__\w+__) (\d+)$", macros, re.MULTILINE))
    clang = "__clang_major__" in numbers
    parts = ("clang_major", "clang_minor", "clang_patchlevel")
    if not clang:
        parts = ("GNUC", "GNUC_MINOR", "GNUC_PATCHLEVEL")
    version = ".".join(numbers.get(f"__{part}__", "0") for part in parts)
    label = f"{'clang++' if clang else 'g++'} {version}"
    if int(version.partition(".")[0]) < (_MIN_CLANG if clang else _MIN_GCC):
        raise build_error(f"{label} ({program}) is too old: the sources are C++20", remedy)
    return Compiler(command, program, label)


def find_ninja() -> str:
    """The path of ninja: the PyPI package's, else the one on PATH.

    Raises:
        BuildError: there is none.
    """
    looked_in = ["the Python package ninja (not installed)"]
    try:
        folder = Path(importlib.import_module("ninja").BIN_DIR)
    except ImportError:
        pass
    else:
        found = shutil.which("ninja", path=str(folder))
        if found is not None:
            return found
        looked_in = [f"the Python package ninja ({folder})"]
    found = shutil.which("ninja")
    if found is None:
        looked_in.append(f"PATH={os.environ.get('PATH', '')}")
        raise build_error(
            f"no ninja: looked in {' and on '.join(looked_in)}", "run `pip install ninja`"
        )
    return found


# --- CUDA ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaToolkit:
    """``codes``: the compute capabilities that nvcc compiles for, such as ("80", "90", "90a")."""

    nvcc: Path
    version: str
    include: Path
    library: Path
    codes: tuple[str, ...]


def nvcc_path() -> Path | None:
    """nvcc of CUDA_HOME, else on PATH, else of /usr/local/cuda; None without. No process starts."""
    home = os.environ.get("CUDA_HOME")
    folders = [f"{home}/bin" if home else "", os.environ.get("PATH", ""), f"{_DEFAULT_CUDA}/bin"]
    for folder in filter(None, folders):
        found = shutil.which("nvcc", path=folder)
        if found is not None:
            return Path(found).absolute()
    return None


def find_toolkit(torch_cuda: str) -> CudaToolkit:
    """The CUDA toolkit for a torch that was built with CUDA ``torch_cuda``, such as "13.0".

    Raises:
        ToolkitProblem: no nvcc, one of another major version, or a toolkit without the runtime.
    """
    nvcc = nvcc_path()
    if nvcc is None:
        home = os.environ.get("CUDA_HOME")
        raise ToolkitProblem(
            f"torch is built with CUDA {torch_cuda}, but there is no nvcc in "
            f"{f'CUDA_HOME={home}' if home else 'CUDA_HOME (not set)'}, on "
            f"PATH={os.environ.get('PATH', '')} or in {_DEFAULT_CUDA}"
        )
    try:
        release = re.search(r"release (\d+\.\d+)", _output([nvcc, "--version"]))
        codes = re.findall(r"sm_(\w+)", _output([nvcc, "--list-gpu-code"]))
        root = _toolkit_root(nvcc)
    except OSError as cause:
        raise ToolkitProblem(f"{nvcc} does not run: {cause}") from cause
    if release is None or not codes:
        raise ToolkitProblem(f"{nvcc} says neither its version nor what it compiles for")
    if release[1].partition(".")[0] != torch_cuda.partition(".")[0]:
        raise ToolkitProblem(
            f"torch is built with CUDA {torch_cuda}, but {nvcc} is of CUDA {release[1]}; the major "
            "versions must be equal"
        )
    include = _folder_with("cuda_runtime_api.h", root, ("include", "targets/*/include"))
    library = _folder_with("libcudart.so", root, ("lib64", "lib", "targets/*/lib"))
    return CudaToolkit(nvcc, release[1], include, library, tuple(codes))


def _toolkit_root(nvcc: Path) -> Path:
    """The toolkit's folder, which is elsewhere when ``nvcc`` is a wrapper."""
    home = os.environ.get("CUDA_HOME")
    if home and nvcc.parent == Path(home, "bin"):
        return Path(home)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cu")
        source.touch()
        top = re.search(r"^#\$ TOP=(.*)$", _output([nvcc, "--dryrun", source]), re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else nvcc.resolve().parent.parent


def _folder_with(name: str, root: Path, patterns: Sequence[str]) -> Path:
    for pattern in patterns:
        for folder in sorted(root.glob(pattern)):
            if (folder / name).is_file():
                return folder
    places = ", ".join(str(root / pattern) for pattern in patterns)
    raise ToolkitProblem(f"the CUDA toolkit lacks {name}: looked in {places}")


# --- what a tool is, without starting it ---------------------------------------------------------


def tools_present() -> tuple[bool, bool]:
    """Whether a C++ compiler and nvcc are at hand."""
    return compiler_command() is not None, nvcc_path() is not None


def tools_key(with_cuda: bool) -> str:
    """A hash of the compilers' paths, sizes and times: another one after a compiler is replaced."""
    programs = list(compiler_command() or ())
    if with_cuda:
        programs.append(str(nvcc_path()))
    described = []
    for word in programs:
        path = shutil.which(word)
        if path is None:
            described.append(word)
            continue
        real = os.path.realpath(path)
        stat = os.stat(real)
        described.append(f"{path} {real} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
