"""Finding the compiler, ninja and the CUDA toolkit, with fakes in their place."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
from build_support import program, real_compiler

from z3ext import _toolchain
from z3ext._toolchain import BuildError, ToolkitProblem


def macros(text: str) -> str:
    """A script for a compiler that predefines these macros."""
    return f"cat <<'END'\n{text}\nEND"


GCC_9 = macros("#define __GNUC__ 9\n#define __GNUC_MINOR__ 5\n#define __GNUC_PATCHLEVEL__ 0")
CLANG = macros(
    "#define __GNUC__ 4\n#define __clang_major__ 17\n#define __clang_minor__ 0\n"
    "#define __clang_patchlevel__ 6"
)


@pytest.fixture(autouse=True)
def no_ambient_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)


# --- the compiler --------------------------------------------------------------------------------


def test_the_compiler_on_path_and_its_version() -> None:
    compiler = _toolchain.find_compiler()
    assert compiler.command == (real_compiler(),)
    kind, _, version = compiler.label.partition(" ")
    assert kind in ("g++", "clang++")
    assert int(version.split(".")[0]) >= 10


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError) as error:
        _toolchain.find_compiler()
    text = str(error.value)
    assert f"no C++ compiler: looked for c++ and g++ on PATH={tmp_path}" in text
    assert "CXX" in text
    assert "Z3EXT_REFERENCE=1" in text


def test_a_compiler_that_cxx_names_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-c++ -m64")
    with pytest.raises(BuildError, match="the compiler that CXX names, 'no-such-c\\+\\+ -m64'"):
        _toolchain.find_compiler()


def test_a_compiler_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = program(tmp_path / "c++", "echo 'license expired' >&2; exit 3")
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(BuildError) as error:
        _toolchain.find_compiler()
    assert f"{fake} does not run: exit status 3: license expired" in str(error.value)


def test_a_compiler_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path / "c++", GCC_9)))
    with pytest.raises(BuildError, match=r"g\+\+ 9\.5\.0 \(.*/c\+\+\) is too old: .*C\+\+20"):
        _toolchain.find_compiler()


def test_clang_is_told_from_gcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path / "c++", CLANG)))
    assert _toolchain.find_compiler().label == "clang++ 17.0.6"


def test_a_launcher_in_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = program(tmp_path / "cache", 'exec "$@"')
    monkeypatch.setenv("CXX", f"{launcher} {real_compiler()} -m64")
    compiler = _toolchain.find_compiler()
    assert compiler.command == (str(launcher), real_compiler(), "-m64")
    assert compiler.program == real_compiler()


def test_the_compiler_keeps_its_path_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = program(tmp_path / "bin" / "c++", CLANG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "bin/c++")
    assert _toolchain.compiler_command() == (str(fake),)


# --- ninja ---------------------------------------------------------------------------------------


def test_the_package_ninja_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("ninja")
    package.BIN_DIR = str(tmp_path / "package")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ninja", package)
    other = program(tmp_path / "path" / "ninja", "exit 0")
    monkeypatch.setenv("PATH", str(other.parent))
    assert _toolchain.find_ninja() == str(other)
    own = program(tmp_path / "package" / "ninja", "exit 0")
    assert _toolchain.find_ninja() == str(own)


def test_no_ninja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError) as error:
        _toolchain.find_ninja()
    assert f"the Python package ninja (not installed) and on PATH={tmp_path}" in str(error.value)
    assert "pip install ninja" in str(error.value)
    assert "Z3EXT_REFERENCE=1" in str(error.value)


# --- CUDA ----------------------------------------------------------------------------------------


def toolkit(root: Path, version: str = "13.0", targets: bool = False) -> Path:
    """A toolkit with a fake nvcc, header and library; the root's path."""
    script = f"""case "$1" in
--version) echo "Cuda compilation tools, release {version}, V{version}.88";;
--list-gpu-code) printf 'sm_80\\nsm_90\\n';;
--dryrun) test -f "$2" && printf '#$ _HERE_={root}/bin\\n#$ TOP={root}/bin/..\\n' >&2;;
esac"""
    program(root / "bin" / "nvcc", script)
    base = root / "targets/x86_64-linux" if targets else root
    for name in ("include/cuda_runtime_api.h", "lib/libcudart.so"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).touch()
    return root


def wrapper(folder: Path, root: Path) -> Path:
    """A wrapper of the toolkit's nvcc, in a folder without a toolkit."""
    return program(folder / "nvcc", f"exec '{root}/bin/nvcc' \"$@\"")


def only_on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), "/usr/bin", "/bin"]))


def test_a_wrapper_leads_to_its_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = toolkit(tmp_path / "cuda with a space")
    nvcc = wrapper(tmp_path / "bin", root)
    only_on_path(monkeypatch, nvcc.parent)
    found = _toolchain.find_toolkit("13.0")
    assert found == _toolchain.CudaToolkit(
        nvcc, "13.0", root / "include", root / "lib", ("80", "90")
    )


def test_a_toolkit_with_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = toolkit(tmp_path / "cuda", targets=True)
    only_on_path(monkeypatch, root / "bin")
    found = _toolchain.find_toolkit("13.0")
    assert found.include == root / "targets/x86_64-linux/include"
    assert found.library == root / "targets/x86_64-linux/lib"


def test_cuda_home_comes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = toolkit(tmp_path / "home")
    only_on_path(monkeypatch, toolkit(tmp_path / "path") / "bin")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert _toolchain.find_toolkit("13.2").nvcc == home / "bin" / "nvcc"


def test_cuda_home_without_nvcc_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = toolkit(tmp_path / "path")
    only_on_path(monkeypatch, root / "bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    assert _toolchain.find_toolkit("13.0").nvcc == root / "bin" / "nvcc"


def test_another_major_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = toolkit(tmp_path / "cuda", version="12.8")
    only_on_path(monkeypatch, root / "bin")
    with pytest.raises(ToolkitProblem, match=r"CUDA 13\.0, but .*/bin/nvcc is of CUDA 12\.8"):
        _toolchain.find_toolkit("13.0")


@pytest.mark.parametrize("name", ["include/cuda_runtime_api.h", "lib/libcudart.so"])
def test_a_toolkit_without_the_runtime(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = toolkit(tmp_path / "cuda")
    (root / name).unlink()
    only_on_path(monkeypatch, root / "bin")
    with pytest.raises(ToolkitProblem) as error:
        _toolchain.find_toolkit("13.0")
    assert f"lacks {Path(name).name}: looked in {root}/" in str(error.value)


def test_an_nvcc_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = program(tmp_path / "bin" / "nvcc", "echo 'no license' >&2; exit 1")
    only_on_path(monkeypatch, nvcc.parent)
    with pytest.raises(ToolkitProblem, match=r"bin/nvcc does not run: exit status 1: no license"):
        _toolchain.find_toolkit("13.0")


def test_no_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(_toolchain, "_DEFAULT_CUDA", str(tmp_path / "cuda"))
    with pytest.raises(ToolkitProblem) as error:
        _toolchain.find_toolkit("13.0")
    assert "CUDA_HOME (not set)" in str(error.value)
    assert f"PATH={tmp_path} or in {tmp_path}/cuda" in str(error.value)


def test_the_usual_place_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = toolkit(tmp_path / "cuda")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(_toolchain, "_DEFAULT_CUDA", str(root))
    assert _toolchain.nvcc_path() == root / "bin" / "nvcc"
    first = wrapper(tmp_path, root)
    assert _toolchain.nvcc_path() == first


# --- what a tool is ------------------------------------------------------------------------------


def test_the_key_changes_with_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = program(tmp_path / "c++", CLANG)
    monkeypatch.setenv("CXX", str(fake))
    before = _toolchain.tools_key(with_cuda=False)
    assert _toolchain.tools_key(with_cuda=False) == before
    program(fake, CLANG + "\n# a newer one")
    assert _toolchain.tools_key(with_cuda=False) != before
    fake.unlink()
    assert _toolchain.tools_present()[0] is False
    _toolchain.tools_key(with_cuda=False)
