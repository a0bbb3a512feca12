"""scripts/ratios.py: its table, and the two targets of flat_overflow."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "ratios.py"
ATTEMPTS = 3  # other work on the machine can spoil one


@pytest.fixture(scope="module")
def ratios() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ratios", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ratios"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(1000)
def test_flat_overflow_reaches_its_targets() -> None:
    """At least 25 times as fast as stock, at most 1.5 times as long as a plain read."""
    outputs = []
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "--check"],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode == 0:
            return
        outputs.append(done.stdout + done.stderr)
    pytest.fail(f"missed in each of {ATTEMPTS} attempts:\n" + "\n".join(outputs))


def test_bert_has_its_known_size(ratios: ModuleType) -> None:
    shapes = ratios.bert_shapes()
    # google's bert-base-uncased with its masked-language head and tied output weights
    assert sum(torch.Size(shape).numel() for shape in shapes) == 109_514_298
    assert len(shapes) == 5 + 12 * 16 + 5


def test_both_ways_of_each_kernel_agree(ratios: ModuleType, generator: torch.Generator) -> None:
    """The two columns of the table are the same computation."""
    buf = torch.randn(1003, generator=generator).half()
    overflow = ratios.overflow_kernel(buf)
    for bad in (None, float("inf"), float("-inf"), float("nan")):
        if bad is not None:
            buf[-1] = bad
        assert bool(overflow.run_stock()) == bool(overflow.run_z3ext()) == (bad is not None)

    flat = torch.randn(300, generator=generator).half()
    partitions = torch.split(flat, [7, 200, 93])
    check = ratios.check_kernel(partitions, flat)
    flag, each = check.run_z3ext()
    assert not bool(flag)
    assert check.run_stock().item() == pytest.approx(each.pow(2).sum().item(), rel=1e-12)


def test_every_plain_read_reads_everything(ratios: ModuleType) -> None:
    reads = ratios.plain_reads(torch.ones(1 << 16, dtype=torch.float16))
    found = {name: run() for name, run in reads.items()}
    assert int(found["C memcmp with itself"]) == 0
    assert found["C wmemchr, absent word"] is None, "the word was found, so the search stopped"
    assert int(found["torch sum of int64"]) == int(found["numpy sum of int64"])


@pytest.mark.parametrize("missed", ["SMALLEST_RATIO", "LARGEST_OF_READ"])
def test_check_fails_on_a_missed_target(
    ratios: ModuleType, monkeypatch: pytest.MonkeyPatch, missed: str
) -> None:
    monkeypatch.setattr(ratios, "OVERFLOW_NUMEL", 1 << 20)
    monkeypatch.setattr(ratios, "SMALLEST_RATIO", 0.0)
    monkeypatch.setattr(ratios, "LARGEST_OF_READ", 1e9)
    threads = torch.get_num_threads()
    try:
        assert ratios.main(["--check", "--rounds", "1"]) == 0
        monkeypatch.setattr(ratios, missed, 1e9 if missed == "SMALLEST_RATIO" else 0.0)
        assert ratios.main(["--check", "--rounds", "1"]) == 1
    finally:
        torch.set_num_threads(threads)
