"""pip install, import and first use in fresh environments, with the sources that are shipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import torch
from build_support import environment, finish, run, start_python, tiny_sources

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("csrc", "z3ext", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "csrc").rglob("*.*")
    if path.suffix in (".cpp", ".h", ".cu", ".cuh") and path.parent.name != "tests"
)

FIRST_USE = """
import torch, z3ext
print(z3ext.__file__)
print(torch.ops.z3ext.flat_overflow(torch.tensor([1.0, float("inf")])).item())
print(torch.ops.z3ext.flat_overflow(torch.tensor([1.0, 2.0])).item())
"""


@pytest.fixture(scope="module")
def cache() -> Path | None:
    """The cache that holds the library already where other tests of this run compiled it."""
    asked = os.environ.get("Z3EXT_CACHE_DIR")
    return Path(asked).absolute() if asked else None


@pytest.fixture(scope="module")
def compiled(cache: Path | None, checkout: Path) -> str:
    """PYTHONPATH of a checkout whose library is in the cache."""
    env = environment(cache, PYTHONPATH=str(checkout))
    finish(start_python(FIRST_USE, env, cwd=checkout.parent), limit_s=1800)
    return str(checkout)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is shipped, since an installation writes into the folder it starts from."""
    folder = tmp_path_factory.mktemp("checkout dir")
    ignored = shutil.ignore_patterns("__pycache__", "_prebuilt")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "tests" / "ops", folder / "tests" / "ops", ignore=ignored)
    return folder


def new_environment(folder: Path, with_torch: bool) -> Path:
    """The interpreter of a new environment; torch is that of this one, and so is pip then."""
    own = ["--without-pip"] if with_torch else []  # torch brings a newer setuptools than venv
    run([sys.executable, "-m", "venv", *own, folder], environment(), cwd=folder.parent)
    python = folder / "bin" / "python"
    if with_torch:
        share_packages(python)
    return python


def share_packages(python: Path) -> None:
    """Lets an environment see this one's packages but for z3ext, after its own."""
    [site] = python.parent.parent.glob("lib/python*/site-packages")
    shared = python.parent.parent / "shared"
    shared.mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith(("z3ext", "__editable__")):
            (shared / path.name).symlink_to(path)
    (site / "shared.pth").write_text(f"{shared}\n")


def pip(python: Path, *arguments: str, cwd: Path, **changes: str) -> str:
    command: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return run(command, environment(None, **changes), cwd, limit_s=1800)


def installed_files(python: Path) -> list[str]:
    """What is in an environment's site-packages, pip and its like aside."""
    [site] = python.parent.parent.glob("lib/python*/site-packages")
    return sorted(
        str(path.relative_to(site))
        for path in site.rglob("*")
        if path.is_file() and "z3ext" in str(path.relative_to(site))
    )


def library_files(python: Path) -> list[str]:
    return [name for name in installed_files(python) if name.endswith((".so", ".o"))]


# --- import and second use -----------------------------------------------------------------------

_QUIET_IMPORT = """
import os, subprocess, sys
import torch
def refuse(*args, **kwargs):
    raise AssertionError(f"started a process: {args}")
subprocess.Popen.__init__ = os.fork = os.posix_spawn = os.system = refuse
before = set(sys.modules)
import z3ext
new = set(sys.modules) - before
unwanted = [n for n in new if n.split(".")[0] in ("deepspeed", "ninja") or "cpp_extension" in n]
assert not unwanted, unwanted
assert not torch.cuda.is_initialized()
"""


def test_import_compiles_nothing(checkout: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    env = environment(cache, PYTHONPATH=str(checkout), PATH=os.devnull)
    out, err = finish(start_python(_QUIET_IMPORT, env, cwd=tmp_path))
    assert out == ""
    assert "z3ext" not in err
    assert not cache.exists()


_SECOND_USE = """
import os, subprocess, sys, time
import torch
def refuse(*args, **kwargs):
    raise AssertionError(f"started a process: {args}")
subprocess.Popen.__init__ = os.fork = os.posix_spawn = os.system = refuse
started = time.perf_counter()
import z3ext
buffer = torch.tensor([1.0, float("nan")])
assert torch.ops.z3ext.flat_overflow(buffer).item()
seconds = time.perf_counter() - started
assert "torch.utils.cpp_extension" not in sys.modules
print(seconds)
"""


@pytest.mark.alone
def test_second_use_takes_less_than_a_second(
    compiled: str, cache: Path | None, tmp_path: Path
) -> None:
    env = environment(cache, PYTHONPATH=compiled)
    # The best of three: other work on the machine is no fault of this code.
    seconds = [float(finish(start_python(_SECOND_USE, env, cwd=tmp_path))[0]) for _ in range(3)]
    print("second use, seconds over `import torch`:", seconds)
    assert min(seconds) < 1.0


# --- archives ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def archives(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    out = tmp_path_factory.mktemp("archives")
    for kind in ("sdist", "wheel"):
        code = (
            f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
        )
        run([sys.executable, "-c", code, out], environment(), cwd=checkout)
    return out


def test_the_wheel_has_sources_and_no_tests(archives: Path) -> None:
    [wheel] = archives.glob("*.whl")
    assert wheel.name == "z3ext-0.1.0-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"z3ext/{name}" for name in SOURCES} <= names
    assert {"z3ext/__init__.py", "z3ext/py.typed", "z3ext/deepspeed/patch.py"} <= names
    assert any(name.endswith("/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"z3ext", "z3ext-0.1.0.dist-info"}
    assert not [name for name in names if "test" in name or name.endswith(".so")]


def test_the_source_distribution_has_sources_and_no_tests(archives: Path) -> None:
    [path] = archives.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(SOURCES) <= names
    assert {"LICENSE", "README.md", "setup.py", "pyproject.toml", "z3ext/py.typed"} <= names
    assert not [name for name in names if "test" in name or name.endswith(".so")]


# --- pip -----------------------------------------------------------------------------------------


def test_install_use_and_uninstall_with_isolation(
    checkout: Path, compiled: str, cache: Path | None, tmp_path: Path
) -> None:
    """The environment has no torch while z3ext is installed: building must not need it."""
    python = new_environment(tmp_path / "venv", with_torch=False)
    pip(python, "install", "--no-deps", str(checkout), cwd=tmp_path)
    files = installed_files(python)
    assert {f"z3ext/{name}" for name in SOURCES} <= set(files)
    assert not library_files(python)
    share_packages(python)
    out, err = finish(start_python(FIRST_USE, environment(cache), python, cwd=tmp_path))
    assert out.splitlines() == [
        next(
            str(path) for path in tmp_path.glob("venv/lib/python*/site-packages/z3ext/__init__.py")
        ),
        "True",
        "False",
    ]
    assert "compil" not in err  # the checkout's library: the sources are the same
    assert [name for name in installed_files(python) if "__pycache__" not in name] == [
        name for name in files if "__pycache__" not in name
    ]
    pip(python, "uninstall", "--yes", "z3ext", cwd=tmp_path)
    assert not installed_files(python)


def test_install_without_isolation(checkout: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path / "venv", with_torch=True)
    out = pip(python, "install", "--no-build-isolation", str(checkout), cwd=tmp_path)
    assert "Successfully installed z3ext-0.1.0" in out
    assert not library_files(python)
    assert {f"z3ext/{name}" for name in SOURCES} <= set(installed_files(python))


@pytest.mark.parametrize("version", ["1.13.1", "2.6.0a0+nv25.1", "99.0"])
def test_installing_leaves_torch_as_it_is(checkout: Path, tmp_path: Path, version: str) -> None:
    """pip may take nothing from an index here, so it would fail where it wanted another torch."""
    python = new_environment(tmp_path / "venv", with_torch=True)
    [site] = python.parent.parent.glob("lib/python*/site-packages")
    metadata = site / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    arguments = ("install", "--no-build-isolation", "--no-index", str(checkout))
    # The settings of this machine's pip may ask for another torch: constraints.
    out = pip(python, *arguments, cwd=tmp_path, PIP_CONFIG_FILE=os.devnull)
    assert "Successfully installed z3ext-0.1.0\n" in out
    assert f"({version})" in out  # pip looked at this torch


def test_an_earlier_build_s_files_are_not_packed(checkout: Path, tmp_path: Path) -> None:
    left = checkout / "build" / "lib" / "z3ext" / "csrc" / "removed.cpp"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("int removed;\n")
    python = new_environment(tmp_path / "venv", with_torch=True)
    pip(python, "install", "--no-build-isolation", "--no-deps", str(checkout), cwd=tmp_path)
    assert "z3ext/csrc/cpu/ops_cpu.cpp" in installed_files(python)
    assert "z3ext/csrc/removed.cpp" not in installed_files(python)


def test_an_editable_install_finds_the_checkout(
    checkout: Path, compiled: str, cache: Path | None, tmp_path: Path
) -> None:
    python = new_environment(tmp_path / "venv", with_torch=True)
    arguments = ("install", "--no-build-isolation", "--no-deps", "--editable", str(checkout))
    pip(python, *arguments, cwd=tmp_path)
    out, err = finish(start_python(FIRST_USE, environment(cache), python, cwd=tmp_path))
    assert out.splitlines() == [str(checkout / "z3ext" / "__init__.py"), "True", "False"]
    assert "compil" not in err


def test_prebuild_needs_torch(checkout: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path / "venv", with_torch=False)
    finished = subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", str(checkout)],
        env=environment(Z3EXT_PREBUILD="1"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode != 0
    text = finished.stdout + finished.stderr
    assert "install torch and run `pip install . --no-build-isolation`" in text


@pytest.fixture
def small_checkout(checkout: Path, tmp_path: Path) -> Path:
    """One whose library is compiled in no time."""
    small = tmp_path / "checkout"
    shutil.copytree(checkout, small, ignore=shutil.ignore_patterns("csrc", "build"))
    tiny_sources(small / "csrc")
    return small


USE_SMALL = """
from z3ext import _build
import ctypes, z3ext
print(z3ext.__file__)
print(ctypes.CDLL(str(_build.library_path())).z3ext_answer())
"""


@pytest.mark.parametrize(
    ("sources", "use", "answers"),
    [
        ("small_checkout", USE_SMALL, ["7"]),
        pytest.param("checkout", FIRST_USE, ["True", "False"], marks=pytest.mark.all_only),
    ],
)
def test_prebuild(
    sources: str, use: str, answers: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The library comes with the package: neither a compiler nor a cache is needed afterwards."""
    checkout = request.getfixturevalue(sources)
    python = new_environment(tmp_path / "venv", with_torch=True)
    started = time.monotonic()
    arguments = ("install", "--no-build-isolation", "--no-deps", "--verbose", str(checkout))
    out = pip(python, *arguments, cwd=tmp_path, Z3EXT_PREBUILD="1")
    print(f"pip install with Z3EXT_PREBUILD=1: {time.monotonic() - started:.0f} s")
    assert "compiled in" in out
    assert "z3ext-0.1.0-py3-none-linux" in out
    [library] = library_files(python)
    assert library.startswith("z3ext/_prebuilt/libz3ext-")
    cache = tmp_path / "cache"
    env = environment(cache, PATH=os.devnull)
    out, err = finish(start_python(use, env, python, cwd=tmp_path))
    assert out.splitlines()[1:] == answers
    assert "z3ext" not in err
    assert not cache.exists()
    pip(python, "uninstall", "--yes", "z3ext", cwd=tmp_path)
    assert not installed_files(python)
