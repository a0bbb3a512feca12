"""Fixtures that every test may use: the seed, the device and the implementations of the ops."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

SEED = int(os.environ.get("Z3EXT_TEST_SEED") or secrets.randbits(31))
os.environ["Z3EXT_TEST_SEED"] = str(SEED)  # for xdist's workers


def pytest_report_header() -> str:
    return f"Z3EXT_TEST_SEED={SEED}"


#: Folders and files whose tests measure, have time limits or start ranks.
ALONE = ("clients", "ratios", "training", "test_demo.py", "test_lock.py", "test_interrupted.py")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not {*ALONE}.isdisjoint(item.path.relative_to(Path(__file__).parent).parts):
            item.add_marker("alone")
    if os.environ.get("Z3EXT_TEST_ALL") != "1":
        left_out = [item for item in items if item.get_closest_marker("all_only")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def torch_extensions(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One folder for what DeepSpeed compiles in the ranks, which takes half a minute.

    Not the user's: a lock that a killed build left there would block DeepSpeed for ever.
    """
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.mktemp("torch_extensions"))


@pytest.fixture
def seed() -> int:
    """The seed of this run's random inputs; Z3EXT_TEST_SEED sets it."""
    print(f"Z3EXT_TEST_SEED={SEED}")  # pytest shows it beside a failure
    return SEED


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """A CPU generator that starts at the seed in every test, so that a test repeats alone."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn. Without a GPU the CUDA tier is skipped, or fails if it is required."""
    if request.param == "cuda" and not torch.cuda.is_available():
        if os.environ.get("Z3EXT_REQUIRE_CUDA") == "1":
            pytest.fail("Z3EXT_REQUIRE_CUDA=1 but torch sees no CUDA device")
        pytest.skip("no CUDA device; Z3EXT_REQUIRE_CUDA=1 makes this a failure")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(scope="session", params=["native", "reference"])
def ops(request: pytest.FixtureRequest) -> Any:
    """The ops by name: the library's (torch.ops.z3ext) and the pure-torch reference."""
    if request.param == "reference":
        return importlib.import_module("z3ext.reference")
    if os.environ.get("Z3EXT_REFERENCE") == "1":
        pytest.skip("Z3EXT_REFERENCE=1: the reference stands in for the native library")
    importlib.import_module("z3ext")
    return torch.ops.z3ext


@pytest.fixture
def own_group(tmp_path: Path) -> Iterator[str]:
    """The name of a gloo process group with this process as its only rank."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group.group_name
    finally:
        dist.destroy_process_group()
