"""Ranks end with the demo, whatever happens to one of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from z3ext.demo import ranks
from z3ext.demo.ranks import RankFailure, run_ranks

_GREET = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:])
"""
_FAIL = """
import os, sys, time
open(os.path.join(os.environ["NOTES"], os.environ["RANK"]), "w").write(str(os.getpid()))
if os.environ["RANK"] == "1":
    while not os.path.exists(os.path.join(os.environ["NOTES"], "0")):
        time.sleep(0.05)
    print("the reason")
    sys.exit(5)
time.sleep(600)
"""


@pytest.fixture
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with the parameter as its text, which the ranks can run; notes go to NOTES."""
    (tmp_path / "planted_rank.py").write_text(request.param, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTES", str(tmp_path))
    return "planted_rank"


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("module", [_GREET], indirect=True)
def test_every_rank_runs_with_its_number(module: str, tmp_path: Path) -> None:
    run_ranks(module, ["--steps", "1"], 3, tmp_path, 60.0, cpu=True)
    for rank in range(3):
        text = (tmp_path / f"rank{rank}.log").read_text(encoding="utf-8")
        assert text.startswith(f"rank {rank} of 3 ['--steps', '1'")
        assert ("--progress-fd" in text) == (rank == 0)


@pytest.mark.parametrize("module", [_FAIL], indirect=True)
def test_a_failed_rank_ends_the_others(module: str, tmp_path: Path) -> None:
    with pytest.raises(
        RankFailure, match=r"rank 1 ended with exit code 5(.|\n)*the reason"
    ) as caught:
        run_ranks(module, [], 2, tmp_path, 60.0, cpu=True)
    assert caught.value.exit_code == 5
    assert not _alive(int((tmp_path / "0").read_text()))


@pytest.mark.parametrize("module", ["import time; time.sleep(600)"], indirect=True)
def test_the_time_limit_ends_all(module: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match="did not end within 1 s") as caught:
        run_ranks(module, [], 2, tmp_path, 1.0, cpu=True)
    assert caught.value.exit_code is None
    assert time.monotonic() - started < 30


def test_terminate_is_an_interrupt_and_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), ranks._terminate_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is before


def test_environment_of_a_rank(tmp_path: Path) -> None:
    environment = ranks.rank_environment(1, 2, 1234, tmp_path, cpu=True)
    assert environment["RANK"] == environment["LOCAL_RANK"] == "1"
    assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert environment["OMP_NUM_THREADS"] == "1"
