"""What library_path says when no library can be had, and what it leaves then."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from build_support import (
    Bench,
    answer_of,
    make_bench,
    program,
    real_compiler,
    runs,
    tiny_sources,
)

from z3ext import _build, _cache, _compile, _toolchain
from z3ext._toolchain import BuildError


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return make_bench(tmp_path, monkeypatch)


def children(cache: Path) -> list[str]:
    return sorted(path.name for folder in cache.iterdir() for path in folder.iterdir())


def test_a_failed_compilation_shows_the_compiler_s_words(bench: Bench) -> None:
    (bench.sources / "ops.cpp").write_text("int broken( { return no_such_name; }\n")
    with pytest.raises(BuildError) as error:
        _build.library_path()
    text = str(error.value)
    assert f"torch is {torch.__version__}; z3ext was tested with torch 2.6 to 2.15" in text
    assert "take a torch of that range" in text
    assert "ops.cpp" in text
    assert "error:" in text
    log = Path(text.split("The whole log is ")[1].split(";", maxsplit=1)[0])
    assert "FAILED" in log.read_text()
    assert "Z3EXT_REFERENCE=1" in text
    assert not [name for name in children(bench.cache) if name.startswith(("work-", "libz3ext"))]
    # The next process tries again, and forgets the failure.
    tiny_sources(bench.sources.parent / "good")
    shutil.copy(bench.sources.parent / "good" / "ops.cpp", bench.sources / "ops.cpp")
    assert answer_of(_build.library_path()) == 7


def test_only_the_end_of_long_output_is_shown(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = program(
        tmp_path / "c++",
        f"""case " $* " in *" -o "*) seq 1 100 | sed 's/^/line /'; exit 1;; esac
exec {real_compiler()} "$@\"""",
    )
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("MAX_JOBS", "1")
    with pytest.raises(BuildError) as error:
        _build.library_path()
    shown = [line for line in str(error.value).splitlines() if line.startswith("line ")]
    assert shown == [f"line {number}" for number in range(61, 101)]


def test_a_compilation_without_end(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = program(
        tmp_path / "c++",
        f"""case " $* " in *" -o "*) echo $$ > '{tmp_path}/pid'; exec sleep 600;; esac
exec {real_compiler()} "$@\"""",
    )
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("Z3EXT_BUILD_TIMEOUT", "2")
    started = time.monotonic()
    with pytest.raises(BuildError, match=r"took longer than 2 s \(Z3EXT_BUILD_TIMEOUT\)"):
        _build.library_path()
    assert time.monotonic() - started < 20
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the compiler still runs"
        time.sleep(0.05)


@pytest.mark.parametrize("asked", ["soon", "0", "-1", "inf", "nan"])
def test_a_time_limit_that_is_none(
    bench: Bench, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("Z3EXT_BUILD_TIMEOUT", asked)
    with pytest.raises(BuildError, match=f"Z3EXT_BUILD_TIMEOUT is '{asked}'"):
        _build.library_path()


def test_no_tool_no_library(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(bench.sources))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        _build.library_path()


def test_a_cache_folder_that_cannot_be_made(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file in its place: root may write to any folder.
    (tmp_path / "file").touch()
    monkeypatch.setenv("Z3EXT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError) as error:
        _build.library_path()
    assert f"the cache folder {tmp_path}/file/cache/torch-" in str(error.value)
    assert "set Z3EXT_CACHE_DIR" in str(error.value)
    assert "Z3EXT_REFERENCE=1" in str(error.value)
    assert runs(bench.tools) == 0


def test_a_cache_that_is_only_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _build.library_path()

    def refuse(*args: object) -> None:
        raise AssertionError("wrote to the cache")

    monkeypatch.setattr(_cache, "make_folder", refuse)
    monkeypatch.setattr(_cache, "locked", refuse)
    assert _build.library_path() == library


def test_a_full_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_compile, "compile_library", fail)
    with pytest.raises(BuildError, match=r"No space left on device.*Z3EXT_CACHE_DIR"):
        _build.library_path()


def test_missing_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "_PACKAGE", tmp_path / "z3ext")
    with pytest.raises(BuildError) as error:
        _build.source_dir()
    assert f"{tmp_path}/z3ext/csrc and {tmp_path}/csrc" in str(error.value)
    assert "Z3EXT_REFERENCE=1" in str(error.value)


# --- CUDA ----------------------------------------------------------------------------------------


@pytest.fixture
def no_toolkit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> str:
    """A torch built with CUDA, without its toolkit. The reason."""
    monkeypatch.setattr("torch.version.cuda", "13.0")

    def fail(version: str) -> None:
        raise _toolchain.ToolkitProblem("no nvcc anywhere")

    monkeypatch.setattr(_toolchain, "find_toolkit", fail)
    monkeypatch.setattr("z3ext._architectures.gpu_capabilities", list)
    return "no nvcc anywhere"


def test_without_toolkit_and_gpu_the_cuda_kernels_are_left_out(
    bench: Bench, no_toolkit: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "z3ext")
    assert answer_of(_build.library_path()) == 7
    assert caplog.messages[0].startswith("the CUDA kernels are left out")
    assert no_toolkit in caplog.messages[0]


def test_a_gpu_without_toolkit_is_an_error(
    bench: Bench, no_toolkit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _build.library_path()  # without a GPU there is a library, which must not serve one
    monkeypatch.setattr("z3ext._architectures.gpu_capabilities", lambda: [(9, 0)])
    with pytest.raises(BuildError) as error:
        _build.library_path()
    assert no_toolkit in str(error.value)
    assert "install the CUDA 13.0 toolkit and set CUDA_HOME to it" in str(error.value)
    assert "Z3EXT_REFERENCE=1" in str(error.value)
