"""Runs the selected cases, one launch per world size, and hands each test its result."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from .launcher import Result, run_world
from .registry import ENTRIES


class Results:
    """Results of every selected (world, case), produced world by world when first asked for."""

    def __init__(self, wanted: dict[int, list[str]], seed: int, folder: Path) -> None:
        self._wanted = wanted
        self._folder = folder
        self._by_world: dict[int, dict[str, Result]] = {}
        self.seed = seed

    def get(self, world: int, case: str) -> Result:
        if world not in self._by_world:
            self._by_world[world] = run_world(
                world,
                sorted(self._wanted[world], key=list(ENTRIES).index),
                self.seed,
                self._folder / f"world{world}",
            )
        return self._by_world[world][case]

    def check(self, world: int, case: str) -> None:
        """Fail unless every rank reported, and none a problem."""
        result = self.get(world, case)
        print(f"Z3EXT_TEST_SEED={self.seed}")  # pytest shows it beside a failure
        if result.lines:
            pytest.fail("\n".join([f"{case}, world {world}:", *result.lines]), pytrace=False)
        if result.skipped:
            pytest.skip(result.skipped)
        assert sorted(result.problems) == list(range(world)), "a rank did not report"


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The session's results; Z3EXT_TEST_SEED repeats a run."""
    wanted: dict[int, list[str]] = {}
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if {"world", "case"} <= params.keys():
            names = wanted.setdefault(params["world"], [])
            if params["case"] not in names:
                names.append(params["case"])
    seed = int(os.environ.get("Z3EXT_TEST_SEED", secrets.randbelow(2**31)))
    return Results(wanted, seed, tmp_path_factory.mktemp("training"))
