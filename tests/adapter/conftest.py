"""DeepSpeed in this process, on the CPU, without ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Read when deepspeed is imported, which the tests of this folder do first.
os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Every test starts and ends with DeepSpeed as it was."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    import z3ext

    before = dict(vars(DeepSpeedZeroOptimizer_Stage3))
    yield
    z3ext.unpatch_deepspeed()
    after = vars(DeepSpeedZeroOptimizer_Stage3)
    assert after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())
