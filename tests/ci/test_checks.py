"""CI's checks of itself find what they are there for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

PASSED = '<testcase classname="a" name="runs"/><testcase name="aarch64"/>'
NO_GPU = '<testcase classname="a" name="gpu"><skipped message="no CUDA device"/></testcase>'
UNKNOWN = '<testcase classname="a" name="x"><skipped message="no idea"/></testcase>'
UNKNOWN_RAN = '<testcase classname="a" name="x"/>'
IN_CTEST = (
    '<testcase name="Cpu/avx512" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION"/>'
    "<system-out>this machine has no avx512</system-out></testcase>"
)


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_checks", ROOT / ".ci" / "checks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ci_checks"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _skips(checks: ModuleType, folder: Path, **tiers: str) -> str:
    for name in checks.EXPECTED:
        cases = tiers.get(name.split(".")[0].replace("-", "_"), PASSED)
        (folder / name).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    absent = folder / "absent.txt"
    absent.write_text("# a comment\n\nno CUDA device :: there is no GPU\nno avx512 :: old\n")
    found: str = checks.check_skips(absent, folder)
    return found


def test_declared_skips_pass(checks: ModuleType, tmp_path: Path) -> None:
    text = _skips(checks, tmp_path, pytest=PASSED + NO_GPU, ctest=PASSED + IN_CTEST)
    assert "1 skipped: there is no GPU" in text and "1 skipped: old" in text


def test_another_skip_fails(checks: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(checks.CheckFailure, match=r"not declared in .*: a::x: no idea"):
        _skips(checks, tmp_path, pytest=PASSED + UNKNOWN)


def test_a_skip_that_another_tier_ran_passes(checks: ModuleType, tmp_path: Path) -> None:
    _skips(checks, tmp_path, pytest=PASSED + UNKNOWN, cuda_build=UNKNOWN_RAN)


@pytest.mark.parametrize("cases", ["", NO_GPU])
def test_a_tier_without_a_passed_test_fails(checks: ModuleType, tmp_path: Path, cases: str) -> None:
    with pytest.raises(checks.CheckFailure, match=r"cuda-build.xml: no test '' passed"):
        _skips(checks, tmp_path, cuda_build=cases)


def test_a_part_that_cmake_left_out_fails(checks: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(checks.CheckFailure, match=r"ctest.xml: no test 'aarch64' passed"):
        _skips(checks, tmp_path, ctest=UNKNOWN_RAN)


def test_a_file_that_was_not_collected_fails(checks: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "build"
    folder.mkdir(parents=True)
    (folder / "test_a.py").touch()
    ran = '<testcase classname="tests.build.test_a" name="runs"/>'
    (tmp_path / "a.xml").write_text(f"<testsuite>{PASSED}{ran}</testsuite>")
    assert "each of the 1 files" in checks.check_files(tmp_path / "tests", tmp_path)
    (folder / "test_b.py").touch()
    with pytest.raises(checks.CheckFailure, match=r"\['.*/tests/build/test_b.py'\]"):
        checks.check_files(tmp_path / "tests", tmp_path)
    in_a_class = '<testcase classname="tests.build.test_b.TestIt" name="runs"/>'
    (tmp_path / "b.xml").write_text(f"<testsuite>{in_a_class}</testsuite>")
    assert "each of the 2 files" in checks.check_files(tmp_path / "tests", tmp_path)


def test_readme_command_that_did_not_run_fails(checks: ModuleType, tmp_path: Path) -> None:
    readme, ran = tmp_path / "README.md", tmp_path / "ran.txt"
    readme.write_text("```console\n$ make demo\noutput\n```\n\n```console\n$ make test\n```\n")
    ran.write_text("make test\nmake demo\n")
    assert "2 commands" in checks.check_readme(readme, ran)
    ran.write_text("make demo-other\nmake test\n")
    with pytest.raises(checks.CheckFailure, match=r"\['make demo'\]"):
        checks.check_readme(readme, ran)


def test_total_counts_every_file(checks: ModuleType, tmp_path: Path) -> None:
    failed = '<testcase name="f"><failure/></testcase>'
    (tmp_path / "a.xml").write_text(f"<testsuite>{PASSED}{failed}</testsuite>")
    (tmp_path / "b.xml").write_text(f"<testsuite>{PASSED}{NO_GPU}</testsuite>")
    assert checks.total(tmp_path) == "4 passed, 1 failed, 1 skipped"


def test_the_projects_own_readme_has_its_two_commands(checks: ModuleType) -> None:
    told = checks.readme_commands(ROOT / "README.md")
    assert {"make demo", "make test", "pip install ."} <= set(told)
