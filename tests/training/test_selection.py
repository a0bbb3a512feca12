"""What `make test` runs: a part of the matrix that leaves out no case and no world size."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from .case import Case
from .registry import ENTRIES, parameters
from .selection import KEYSTONES

CASES = [entry for entry in ENTRIES.values() if isinstance(entry, Case)]


def test_every_basic_case_runs() -> None:
    idle = [case.name for case in CASES if "__" not in case.name and not case.worlds()]
    assert not idle


def test_keystones_run_at_every_world() -> None:
    by_name = {case.name: case for case in CASES}
    assert all(by_name[name].core for name in KEYSTONES)
    ran = {pair for pair in parameters(CASES) if pair[1].partition("__")[0] in KEYSTONES}
    assert {world for world, _ in ran} == {1, 2, 3, 4, 8}
    assert {name.partition("__")[2] for _, name in ran} == {"", "reduce_scatter", "not_contiguous"}
