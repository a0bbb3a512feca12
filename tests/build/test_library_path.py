"""library_path: what it finds, compiles, repairs and says. The sources are tiny ones."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
from build_support import (
    LIBRARY_PATH,
    Bench,
    answer_of,
    counting_compiler,
    environment,
    finish,
    make_bench,
    program,
    real_compiler,
    runs,
    start_tiny,
    start_together,
    tiny_sources,
)

from z3ext import _build, _cache

STEPS = 3  # two sources are compiled, one library is linked


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return make_bench(tmp_path, monkeypatch)


def children(cache: Path) -> list[str]:
    return sorted(path.name for folder in cache.iterdir() for path in folder.iterdir())


# --- compiled once -------------------------------------------------------------------------------


def test_compiles_once_and_says_so(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "z3ext")
    library = _build.library_path()
    assert answer_of(library) == 7
    assert runs(bench.tools) == STEPS
    first, second = caplog.messages
    assert first.startswith("compiling the native library (CPU) with ")
    assert first.endswith(f" into {library.parent} ...")
    assert second.startswith("compiled in ")
    caplog.clear()
    assert _build.library_path() == library
    assert runs(bench.tools) == STEPS
    assert not caplog.messages


def test_only_this_user_may_enter_the_cache(bench: Bench) -> None:
    folder = _build.library_path().parent
    for path in (bench.cache, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not [name for name in children(bench.cache) if name.startswith("work-")]


def test_eight_processes_compile_once(bench: Bench) -> None:
    compiler = counting_compiler(bench.tools, delay_s=0.5)
    env = environment(bench.cache, CXX=str(compiler), Z3EXT_TEST_SOURCES=str(bench.sources))
    outputs = [finish(process) for process in start_together(8, LIBRARY_PATH, env)]
    assert len({out for out, _ in outputs}) == 1
    assert answer_of(Path(outputs[0][0].split(maxsplit=1)[1].strip())) == 7
    assert runs(bench.tools) == STEPS
    assert sum("compiled in" in err for _, err in outputs) == 1


def test_a_failure_is_not_repeated_by_those_that_waited(bench: Bench, tmp_path: Path) -> None:
    fake = program(
        tmp_path / "c++",
        f"""case " $* " in
*" -o "*) echo run >> '{tmp_path}/runs'; sleep 5; echo 'out of registers'; exit 1;;
esac
exec {real_compiler()} "$@\"""",
    )
    code = "try:\n    _build.library_path()\nexcept _build.BuildError as error:\n    print(error)\n"
    env = environment(
        bench.cache, CXX=str(fake), Z3EXT_TEST_SOURCES=str(bench.sources), MAX_JOBS="1"
    )
    outputs = [finish(process)[0] for process in start_together(3, code, env)]
    assert all("out of registers" in out for out in outputs)
    assert runs(tmp_path) == 1


# --- what asks for another library ---------------------------------------------------------------


def test_changed_sources_are_compiled(bench: Bench) -> None:
    old = _build.library_path()
    (bench.sources / "answer.h").write_text("constexpr int kHalf = 20;\nint half();\n")
    new = _build.library_path()
    assert new.parent != old.parent
    assert (answer_of(old), answer_of(new)) == (7, 23)


def test_another_torch_another_folder(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _build.library_path()
    monkeypatch.setattr("torch.__version__", "2.99.0")
    new = _build.library_path()
    assert new.parent != old.parent
    assert new.parent.name.startswith("torch-2.99.0-")


def test_a_replaced_compiler_compiles_again(bench: Bench) -> None:
    _build.library_path()
    compiler = counting_compiler(bench.tools)
    compiler.write_text(compiler.read_text() + "\n# a newer one\n")
    _build.library_path()
    assert runs(bench.tools) == 2 * STEPS


def test_a_library_outlives_its_compiler(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _build.library_path()
    (bench.tools / "c++").unlink()
    assert _build.library_path() == library
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(bench.tools))
    assert _build.library_path() == library


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "missing", "record"])
def test_a_damaged_library_is_compiled_again(bench: Bench, how: str) -> None:
    library = _build.library_path()
    content = library.read_bytes()
    record = next(library.parent.glob("*.json"))
    # A new file each time: this process may have the old one mapped.
    library.unlink()
    if how == "cut":
        library.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        middle = len(content) // 2
        library.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif how == "empty":
        library.touch()
    elif how == "record":
        library.write_bytes(content)
        record.write_text('{"library":')
    again = _build.library_path()
    assert runs(bench.tools) == 2 * STEPS
    assert answer_of(again) == 7


def test_what_a_killed_build_left_is_removed(bench: Bench) -> None:
    folder = _build.library_path().parent
    left = folder / "work-left"
    left.mkdir()
    (left / "half.o").touch()
    next(folder.glob("*.json")).unlink()
    _build.library_path()
    assert not left.exists()


def test_a_killed_build_blocks_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = counting_compiler(bench.tools / "slow", delay_s=5)
    env = environment(bench.cache, CXX=str(slow), Z3EXT_TEST_SOURCES=str(bench.sources))
    builder = start_tiny(LIBRARY_PATH, env)
    deadline = time.monotonic() + 60
    while runs(bench.tools / "slow") == 0:
        assert time.monotonic() < deadline, "the build has not begun"
        time.sleep(0.02)
    builder.kill()
    builder.communicate()
    monkeypatch.setenv("Z3EXT_BUILD_TIMEOUT", "4")  # less than what the killed build still needs
    assert answer_of(_build.library_path()) == 7
    assert runs(bench.tools) == STEPS


# --- places --------------------------------------------------------------------------------------


def test_paths_with_odd_characters(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "a b: $c 'd"
    folder = tiny_sources(odd / "sources", answer=9)
    monkeypatch.setattr(_build, "source_dir", lambda: folder)
    monkeypatch.setenv("Z3EXT_CACHE_DIR", str(odd / "cache"))
    monkeypatch.setenv("MAX_JOBS", "2")
    assert answer_of(_build.library_path()) == 9


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("Z3EXT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert _cache.cache_root() == tmp_path / "home" / ".cache" / "z3ext"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the XDG specification disregards
    assert _cache.cache_root() == tmp_path / "home" / ".cache" / "z3ext"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _cache.cache_root() == tmp_path / "xdg" / "z3ext"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("Z3EXT_CACHE_DIR", "own")
    assert _cache.cache_root() == tmp_path / "own"


def test_headers_in_cpath_do_not_come_before_torch_s(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPATH may hold another torch or pybind11; a header of its own is still found there."""
    other = tmp_path / "other"
    (other / "c10" / "macros").mkdir(parents=True)
    (other / "c10" / "macros" / "Macros.h").write_text("#error another torch's\n")
    (other / "own.h").write_text("constexpr int kOwn = 4;\n")
    (bench.sources / "ops.cpp").write_text(
        "#include <c10/macros/Macros.h>\n#include <own.h>\n"
        'extern "C" int z3ext_answer() { return kOwn; }\n'
    )
    monkeypatch.setenv("CPATH", str(other))
    assert answer_of(_build.library_path()) == 4
