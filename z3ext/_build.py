"""Finds the native library: the one compiled at install, one in the cache, or compiles it now."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import time
from pathlib import Path

import torch

from z3ext import _architectures, _cache, _compile, _toolchain
from z3ext._log import log_rank0, logger, show_lines
from z3ext._toolchain import BuildError, build_error

__all__ = ["BuildError", "library_path", "prebuild", "source_dir"]

_PACKAGE = Path(__file__).resolve().parent
_PREBUILT = _PACKAGE / "_prebuilt"
_PREBUILT_NAME = "library"
_FAILURE_NAME = "failure.txt"
_DEFAULT_LIMIT_S = 1800.0  # with CUDA, on a machine that is busy with other work


def source_dir() -> Path:
    """The folder of the C++ sources: inside the installed package, beside it in a checkout.

    Raises:
        BuildError: neither is there.
    """
    candidates = (_PACKAGE / "csrc", _PACKAGE.parent / "csrc")
    for folder in candidates:
        if (folder / "ops.cpp").is_file():
            return folder
    places = " and ".join(str(folder) for folder in candidates)
    raise build_error(f"the C++ sources are missing: looked in {places}", "install z3ext again")


def library_path() -> Path:
    """The path of a library for this torch, to hand to ``torch.ops.load_library``.

    The library that was compiled at install is taken if it was compiled for this torch, else one
    from the cache; else it is compiled, which takes about a minute. Processes that ask at the same
    time compile once.

    Raises:
        BuildError: it cannot be compiled; the text says what was looked for, where, and the remedy.
    """
    gpus = _architectures.gpu_capabilities()
    request = _request(source_dir())
    prebuilt = _prebuilt(request, gpus)
    if prebuilt is not None:
        return prebuilt
    if torch.version.cuda is not None:
        request["codes"] = _architectures.wanted(gpus)
    folder = _cache.cache_root() / _folder_name(request)
    tools = _toolchain.tools_key(with_cuda=torch.version.cuda is not None)
    # A library outlives the compiler that made it.
    has_compiler, has_nvcc = _toolchain.tools_present()
    any_tools = not has_compiler or (torch.version.cuda is not None and not has_nvcc)
    found = _cache.find_library(folder, tools, any_tools)
    if found is not None:
        return found
    try:
        return _compile_once(folder, tools, any_tools, request, gpus)
    except OSError as cause:
        remedy = "free space there, set Z3EXT_CACHE_DIR to another folder"
        raise build_error(f"the cache folder {folder} does not work: {cause}", remedy) from cause


def _compile_once(
    folder: Path,
    tools: str,
    any_tools: bool,
    request: dict[str, str],
    gpus: list[tuple[int, int]],
) -> Path:
    """Compiles into a folder of the cache, unless another process does or did."""
    _cache.make_folder(folder)
    failure = folder / _FAILURE_NAME
    before = _stamp(failure)
    with _cache.locked(folder / "lock", _limit_s(), _say_waiting) as exclusive:
        found = _cache.find_library(folder, tools, any_tools)
        if found is not None:
            return found
        if _stamp(failure) not in (None, before):
            # It failed while this process waited; it would fail again, once per waiting process.
            raise BuildError(failure.read_text(encoding="utf-8"))
        return _compile_into(folder, tools, request, gpus, exclusive)


def prebuild(folder: Path) -> None:
    """Compiles the library for this torch into a folder: the package's ``_prebuilt``, at install.

    Raises:
        BuildError: it cannot be compiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    gpus = _architectures.gpu_capabilities()
    _compile_into(folder, _PREBUILT_NAME, _request(source_dir()), gpus, exclusive=True)
    (folder / f"{_PREBUILT_NAME}.log").unlink()


# --- what a library is for -----------------------------------------------------------------------


def _request(sources: Path) -> dict[str, str]:
    """What a library must have been compiled from and for."""
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "cuda": str(torch.version.cuda),
        "abi": str(int(torch.compiled_with_cxx11_abi())),
        "machine": platform.machine(),
        "sources": _sources_hash(sources),
    }


def _sources_hash(sources: Path) -> str:
    hashed = hashlib.sha256("\n".join(_compile.FLAGS).encode())
    for folder in (sources, sources / "cpu", sources / "cuda"):
        for path in sorted(folder.glob("*.*")):
            if path.suffix in (".cpp", ".h", ".cu", ".cuh"):
                content = path.read_bytes()
                hashed.update(f"{path.relative_to(sources)} {len(content)}\n".encode())
                hashed.update(content)
    return hashed.hexdigest()[:16]


def _folder_name(request: dict[str, str]) -> str:
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    version = re.sub(r"[^\w.+-]", "_", torch.__version__)
    return f"torch-{version}-{key[:16]}"


def _prebuilt(request: dict[str, str], gpus: list[tuple[int, int]]) -> Path | None:
    """The library that was compiled at install, if it fits."""
    record = _cache.read_record(_PREBUILT / f"{_PREBUILT_NAME}.json")
    if record is None:
        return None
    library = _cache.sound_library(_PREBUILT, record)
    reasons = [
        f"it was compiled for {name} {record.request.get(name)}, but here is {value}"
        for name, value in request.items()
        if record.request.get(name) != value
    ]
    if not _architectures.serves(record.codes, gpus):
        reasons.append(f"it has kernels for {record.codes or 'no GPU'}, here are {gpus}")
    if library is None:
        reasons.append("it is damaged")
    if reasons:
        show_lines()
        log_rank0(logging.INFO, f"the library compiled at install is not used: {reasons[0]}")
        return None
    return library


# --- compiling -----------------------------------------------------------------------------------


def _compile_into(
    folder: Path, name: str, request: dict[str, str], gpus: list[tuple[int, int]], exclusive: bool
) -> Path:
    """Compiles into a folder. ``name``: the record's; ``exclusive``: no other process writes there.

    A failure is left there as text too, for processes that wait for this one.
    """
    show_lines()
    limit_s = _limit_s()
    started = time.monotonic()
    failure = folder / _FAILURE_NAME
    try:
        compiler = _toolchain.find_compiler()
        ninja = _toolchain.find_ninja()
        toolkit = _toolkit(gpus)
        codes = _architectures.compiled_codes(gpus, toolkit.codes) if toolkit else ""
        kind = f"CPU and CUDA {toolkit.version}: {codes}" if toolkit else "CPU"
        text = "compiling the native library (%s) with %s into %s ..."
        logger.info(text, kind, compiler.label, folder)
        log = folder / f"{name}.log"
        with _cache.work_folder(folder, exclusive) as work:
            job = _compile.Job(source_dir(), work, log, ninja, compiler, toolkit, codes)
            built = _compile.compile_library(job, limit_s, logger.info)
            library = _cache.store_library(built, folder, name, request, compiler.label, codes)
    except BuildError as error:
        failure.write_text(str(error), encoding="utf-8")
        raise
    failure.unlink(missing_ok=True)
    logger.info("compiled in %.0f s", time.monotonic() - started)
    return library


def _toolkit(gpus: list[tuple[int, int]]) -> _toolchain.CudaToolkit | None:
    """The toolkit to compile the CUDA kernels with; None where they are left out."""
    if torch.version.cuda is None:
        if torch.cuda.is_available():
            logger.info("the CUDA kernels are left out: torch is not built with CUDA")
        return None
    try:
        return _toolchain.find_toolkit(torch.version.cuda)
    except _toolchain.ToolkitProblem as problem:
        if gpus:
            remedy = f"install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME to it"
            raise build_error(str(problem), remedy) from problem
        logger.info("the CUDA kernels are left out, and no GPU is visible: %s", problem)
        return None


def _limit_s() -> float:
    """Seconds that a compilation may take, and the wait for another process's."""
    asked = os.environ.get("Z3EXT_BUILD_TIMEOUT", "").strip()
    try:
        seconds = float(asked or _DEFAULT_LIMIT_S)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        remedy = "set it to a positive number of seconds"
        raise build_error(f"Z3EXT_BUILD_TIMEOUT is {asked!r}, expected seconds", remedy)
    return seconds


def _say_waiting(text: str) -> None:
    show_lines()
    log_rank0(logging.INFO, text)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Another value after the file was written again."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
