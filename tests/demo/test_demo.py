"""The whole demo with few steps: served, and the same bits as stock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from z3ext.demo import __main__ as demo
from z3ext.demo.results import DemoResult


@pytest.mark.timeout(1200)  # it may have to compile the library first
def test_demo_ends_identical(tmp_path: Path) -> None:
    options = ("--steps", "3", "--rounds", "1")
    environment = dict(os.environ, DS_ACCELERATOR="cpu")
    done = subprocess.run(
        [sys.executable, "-m", "z3ext.demo", *options, "--json", "demo.json"],
        check=False,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = DemoResult.load(tmp_path / "demo.json")
    assert result.passed and result.ranks == 2 and result.steps == 3
    assert result.comparison.steps > result.steps  # the timing phase is compared too
    assert result.z3ext.gradient_collectives <= result.stock.gradient_collectives
    assert done.stdout.count("identical") == 4
    assert "training, z3ext" in done.stderr, "no progress bar"
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--ranks", "0"], "--ranks must be at least 1, not 0"),
        (["--output", "/no/such/folder/a.png"], "there is no folder /no/such/folder"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        demo.main(arguments)
    assert problem in capsys.readouterr().err
