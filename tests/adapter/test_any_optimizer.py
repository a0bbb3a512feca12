"""z3ext breaks no script: an optimizer that it cannot look at is left to DeepSpeed's methods."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm

from z3ext.deepspeed import adopt
from z3ext.deepspeed.installation import Installation
from z3ext.deepspeed.releases import RELEASES
from z3ext.deepspeed.stage3 import ServedPath, StockPath

from .optimizers import Optimizer

#: The sources are not what is tried here.
RELEASE = dataclasses.replace(RELEASES[-1], methods={}, functions={})
#: With how many arguments each replaced method is called.
ARGUMENTS = dict(zip(RELEASE.replaced, (0, 1, 1, 1, 0, 0, 1, 2, 1, 1, 1), strict=True))

Call = tuple[str, tuple[Any, ...]]


@dataclasses.dataclass
class Patched:
    """An optimizer of a patched class, and which of the class's own methods were called."""

    optimizer: Any
    calls: list[Call]
    installation: Installation


@pytest.fixture
def patched(own_group: str, monkeypatch: pytest.MonkeyPatch) -> Patched:
    monkeypatch.setattr(ds_comm, "get_world_size", lambda group=None: 1)
    calls: list[Call] = []

    def recorder(name: str) -> Any:
        def method(self: Any, *args: Any) -> str:
            calls.append((name, args))
            return f"stock's {name}"

        return method

    methods = {name: recorder(name) for name in RELEASE.replaced}
    cls: Any = type("DeepSpeedZeroOptimizer_Stage3", (), methods)
    optimizer = cls()
    vars(optimizer).update(vars(Optimizer(dist.group.WORLD, 1)))
    installation = Installation(cls, RELEASE, "auto", print)
    for name, method in installation._replacements.items():
        setattr(cls, name, method)
    return Patched(optimizer, calls, installation)


def test_served(patched: Patched) -> None:
    """Nothing is gone: what follows is due to what is."""
    assert isinstance(patched.installation.adoptions.of(patched.optimizer), ServedPath)


def assert_stock(patched: Patched, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    optimizer = patched.optimizer
    expected: list[Call] = []
    with caplog.at_level(logging.INFO, "z3ext"):
        for name, count in ARGUMENTS.items():
            args = tuple(range(count))
            found = getattr(optimizer, name)(*args)
            assert found in (None, f"stock's {name}")
            expected.append((name, args or ((True,) if name == "has_overflow" else ())))
    assert patched.calls == expected
    decision = vars(optimizer)[adopt.ATTRIBUTE]
    assert isinstance(decision, StockPath)
    assert decision.reason == reason
    assert patched.installation.adoptions.outlook(optimizer) == (reason, "stock", "")
    assert caplog.messages == [f"not served: {reason}; DeepSpeed's own methods run"]


@pytest.mark.parametrize(
    "name",
    [
        "contiguous_gradients",
        "offload_optimizer",
        "swap_optimizer",
        "all2all_process_group",
        "model_parallel_group",
        "grad_partitions_flat_buffer",
        "fp32_partitioned_groups_flat",
        "reduce_and_partition_stream",
        "module",
        "_grad_acc_hooks",
        "_leaf_module_hooks",
        "reduce_scatter",
        "fp16_groups",
        "dp_process_group",
    ],
)
def test_attribute_is_gone(patched: Patched, name: str, caplog: pytest.LogCaptureFixture) -> None:
    del vars(patched.optimizer)[name]
    cause = f"'DeepSpeedZeroOptimizer_Stage3' object has no attribute '{name}'"
    assert_stock(patched, caplog, f"looking at it failed with AttributeError: {cause}")


def test_attribute_is_another(patched: Patched, caplog: pytest.LogCaptureFixture) -> None:
    patched.optimizer.fp32_partitioned_groups_flat = 2
    cause = "'int' object is not iterable"
    assert_stock(patched, caplog, f"looking at it failed with TypeError: {cause}")


@pytest.mark.parametrize("name", ["ds_numel", "partition_numel", "dtype"])
def test_attribute_of_a_parameter_is_gone(
    patched: Patched, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Bare:
        def __getattr__(self, asked: str) -> Any:
            if asked == name:
                raise AttributeError(f"no {name}")
            return getattr(whole, asked)

    whole = patched.optimizer.fp16_groups[-1][-1]
    patched.optimizer.fp16_groups[-1][-1] = Bare()
    patched.optimizer.contiguous_gradients = name != "dtype"
    assert_stock(patched, caplog, f"looking at it failed with AttributeError: no {name}")


def test_bucket_without_its_buffer(patched: Patched, caplog: pytest.LogCaptureFixture) -> None:
    del patched.optimizer.ipg_buckets[torch.bfloat16].buffer
    cause = "'types.SimpleNamespace' object has no attribute 'buffer'"
    assert_stock(patched, caplog, f"looking at it failed with AttributeError: {cause}")
