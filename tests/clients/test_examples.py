"""The frameworks around DeepSpeed: every example, stock against z3ext, the same to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

pytest.importorskip("deepspeed")

from training.launcher import free_port

HERE = Path(__file__).absolute().parent
EXAMPLES = HERE.parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
WORLD = 2
SECONDS = 240


def run(name: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each rank wrote, by side: for "stock" the example trained by DeepSpeed alone."""
    sides = ("stock", "z3ext")
    for side in sides:
        (folder / side).mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(HERE / "run_example.py"), str(EXAMPLES / f"{name}.py"), str(folder)]
    command += [str(free_port()) for _ in sides]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=SECONDS)
        finally:
            if process.poll() is None:
                # The launcher ends its ranks, each of which has a session of its own.
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)
    text = (folder / "log").read_text(errors="replace")
    assert code == 0, text[-4000:]
    return {s: [torch.load(folder / s / f"{rank}.pt") for rank in range(WORLD)] for s in sides}


@pytest.mark.parametrize("name", NAMES)
def test_same_bits_as_stock(name: str, tmp_path: Path) -> None:
    sides = run(name, tmp_path)
    stock, found = sides["stock"], sides["z3ext"]
    for rank in range(WORLD):
        assert stock[rank]["status"]["reason"] == "Z3EXT_DISABLE=1 is set"
        assert found[rank]["status"]["served"], found[rank]["status"]
        assert found[rank]["status"]["packs"] > 0
        before, after = stock[rank]["records"], found[rank]["records"]
        assert before.keys() == after.keys()
        assert any(key.endswith("fp32") for key in before)
        for key, value in before.items():
            if isinstance(value, torch.Tensor):
                oracle.assert_bits(after[key], value)


@pytest.mark.parametrize("name", NAMES)
def test_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 40
