"""Modes, counts and the refresh, checked inside the ranks (checks_modes.py, checks_refresh.py)."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from .checks_modes import CHECKS as MODES_CHECKS
from .checks_refresh import CHECKS as REFRESH_CHECKS
from .conftest import Results
from .registry import parameters

PAIRS = parameters(MODES_CHECKS, REFRESH_CHECKS)


@pytest.mark.parametrize(
    ("world", "case"), PAIRS, ids=[f"{case}-world{world}" for world, case in PAIRS]
)
def test_modes(world: int, case: str, results: Results) -> None:
    results.check(world, case)
