"""What is said about a skipped step, checked inside the ranks (checks_diagnosis.py)."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from .checks_diagnosis import CHECKS
from .conftest import Results
from .registry import parameters

PAIRS = parameters(CHECKS)


@pytest.mark.parametrize(
    ("world", "case"), PAIRS, ids=[f"{case}-world{world}" for world, case in PAIRS]
)
def test_diagnosis(world: int, case: str, results: Results) -> None:
    results.check(world, case)
