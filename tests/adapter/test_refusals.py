"""Every reason for which an optimizer is left to DeepSpeed, on an object with just the fields."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

from z3ext.agreement import Alone
from z3ext.deepspeed import adopt, support
from z3ext.deepspeed.names import PRIVATE
from z3ext.deepspeed.releases import RELEASES
from z3ext.deepspeed.stage3 import StockPath
from z3ext.deepspeed.support import _BYPASSED, _SHORT_CUTS

from .optimizers import WORLD, Optimizer

RELEASE = RELEASES[-1]
REPLACED = RELEASE.replaced


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", list)


#: The class above has none of the methods, and none of them counts as another's.
ABSENT: dict[str, Any] = dict.fromkeys(RELEASE.methods)


def refusal(optimizer: Any, mode: str = "auto", replacements: Mapping[str, object] = ABSENT) -> str:
    return support.refusal(optimizer, Stage3, RELEASE, replacements, mode)


@pytest.mark.parametrize("mode", ["auto", "all_reduce", "reduce_scatter"])
def test_served(mode: str) -> None:
    assert refusal(Optimizer(), mode) == ""


def test_served_variants() -> None:
    """Fields that name nothing unusual: no sub-group, stage-1-like parameters, fp32."""
    optimizer = Optimizer()
    for param in optimizer.params:
        del param.ds_process_group, param.ds_zero_placement_family
        vars(param)["grad_dtype"] = torch.float32
    assert refusal(optimizer) == ""
    optimizer.fp16_groups = [[]]
    assert refusal(optimizer) == ""
    optimizer.reduce_scatter = True
    optimizer.contiguous_gradients = False
    assert refusal(optimizer) == ""
    optimizer.zero_hpz_partition_size = 2
    optimizer.model_parallel_group = (1,)
    assert refusal(optimizer) == ""


def test_offloaded_partitions() -> None:
    """Their memory is the CPU's, that of the bucket the accelerator's."""
    optimizer = Optimizer()
    _bucket(torch.bfloat16, torch.zeros(1, device="meta"))(optimizer)
    assert "bucket is on meta" in refusal(optimizer)
    optimizer.offload_optimizer = True
    assert refusal(optimizer) == ""


def _fields(**values: Any) -> Callable[[Optimizer], None]:
    return lambda optimizer: vars(optimizer).update(values)


def _param(**values: Any) -> Callable[[Optimizer], None]:
    """Change the last parameter: every one is looked at."""
    return lambda optimizer: vars(optimizer.params[-1]).update(values)


def _bucket(dtype: torch.dtype, buffer: Any) -> Callable[[Optimizer], None]:
    return lambda o: o.ipg_buckets.update({dtype: SimpleNamespace(buffer=buffer)})


def _meta(optimizer: Optimizer) -> None:
    optimizer.grad_partitions_flat_buffer = torch.zeros(8, device="meta")


REFUSED: list[tuple[Callable[[Optimizer], None], str]] = [
    (_fields(swap_optimizer=True), "swapped to NVMe"),
    (_fields(zenflow=True), "ZenFlow"),
    (_fields(use_muon=True), "Muon"),
    (_fields(all2all_process_group=WORLD), "quantised (qgZ)"),
    (_fields(ipg_buckets={}, _grad_acc_hooks=[]), "DeepCompile"),
    (_fields(ipg_buckets={}), "the engine was destroyed"),
    (_fields(autoep_folding_tp_group=WORLD), "AutoEP folding"),
    (_fields(model_parallel_group=WORLD), "model-parallel group of several ranks"),
    (
        _fields(grad_partitions_flat_buffer=torch.zeros(8).double(), gradient_accumulation_dtype=8),
        "accumulated in 8",
    ),
    (_meta, "gradients are on meta"),
    (_bucket(torch.float64, None), "communicated in torch.float64"),
    (_bucket(torch.float16, torch.zeros(1, device="meta")), "bucket is on meta"),
    (_fields(fp32_partitioned_groups_flat=[torch.zeros(5).half()]), "not float32"),
    (_fields(fp32_partitioned_groups_flat=[torch.zeros(5), None]), "not float32"),
    (_fields(dp_process_group=(0, 1)), "other ranks than the data-parallel"),
    (_param(ds_process_group=(0, 2)), "different process groups"),
    (_param(ds_zero_placement_family="autoep_expert"), "AutoEP experts"),
    (_param(grad_dtype=torch.float64), "gradient is in torch.float64 (grad_dtype)"),
    (_param(chunk=4), "of 7 elements is not cut into 3 chunks"),
]


@pytest.mark.parametrize(("change", "cause"), REFUSED, ids=[cause for _, cause in REFUSED])
def test_refused(change: Callable[[Optimizer], None], cause: str) -> None:
    optimizer = Optimizer()
    change(optimizer)
    assert cause in refusal(optimizer)


def test_all_reduce_needs_contiguous_gradients() -> None:
    optimizer = Optimizer()
    optimizer.contiguous_gradients = False
    assert refusal(optimizer) == ""
    assert refusal(optimizer, "reduce_scatter") == ""
    found = refusal(optimizer, "all_reduce")
    assert "mode='all_reduce'" in found
    assert '"contiguous_gradients": true in zero_optimization' in found


def test_mixed_dtypes_without_a_bucket_buffer() -> None:
    optimizer = Optimizer()
    optimizer.params[-1].dtype = torch.float32
    assert refusal(optimizer) == ""
    optimizer.contiguous_gradients = False
    assert "contiguous_gradients is false" in refusal(optimizer)
    assert "several dtypes" in refusal(optimizer)


@pytest.mark.parametrize(
    ("name", "cause"),
    [("MiCS_Optimizer", "mics_shard_size"), ("SuperOffloadOptimizer_Stage3", "SuperOffload")],
)
def test_other_classes(name: str, cause: str) -> None:
    assert cause in refusal(type(name, (Optimizer,), {})())


# --- overrides -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*REPLACED, *_BYPASSED} - set(_SHORT_CUTS)))
def test_method_on_the_instance(name: str) -> None:
    optimizer = Optimizer()
    assert refusal(optimizer) == ""
    vars(optimizer)[name] = lambda: None
    shown = name.removeprefix(PRIVATE)
    assert refusal(optimizer) == f"{shown} is overridden on the optimizer instance"


@pytest.mark.parametrize("name", sorted(set(REPLACED) - set(_SHORT_CUTS)))
def test_subclass_overrides_a_replaced_method(name: str) -> None:
    plain: Any = type("Plain", (Stage3,), {})
    replacements = {other: vars(Stage3)[other] for other in REPLACED}
    optimizer = plain.__new__(plain)
    vars(optimizer).update(vars(Optimizer()))
    assert refusal(optimizer, replacements=replacements) == ""
    overriding: Any = type("Overriding", (Stage3,), {name: lambda self: None})
    optimizer = overriding.__new__(overriding)
    vars(optimizer).update(vars(Optimizer()))
    expected = f"Overriding overrides {name.removeprefix(PRIVATE)}"
    assert refusal(optimizer, replacements=replacements) == expected


def test_subclass_overrides_a_method_that_is_relied_on() -> None:
    override = {"get_param_comm_dtype": lambda self, param: None}
    overriding: Any = type("Overriding", (Stage3,), override)
    optimizer = overriding.__new__(overriding)
    assert refusal(optimizer, replacements={}) == "Overriding overrides get_param_comm_dtype"


@pytest.mark.parametrize("name", sorted(set(RELEASE.methods) - set(REPLACED)))
def test_method_replaced_later(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tool that came after patch_deepspeed()."""
    replacements = {other: vars(Stage3)[other] for other in REPLACED}
    optimizer = Stage3.__new__(Stage3)
    vars(optimizer).update(vars(Optimizer()))
    assert refusal(optimizer, replacements=replacements) == ""
    monkeypatch.setattr(Stage3, name, lambda self, *args: None)
    expected = f"{name.removeprefix(PRIVATE)} was replaced after z3ext.patch_deepspeed()"
    assert refusal(optimizer, replacements=replacements) == expected


@pytest.mark.parametrize("name", RELEASE.functions)
def test_function_replaced_later(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = Optimizer()
    monkeypatch.setattr(stage3, name, lambda *args: None)
    assert refusal(optimizer) == f"{name} was replaced after z3ext.patch_deepspeed()"


# --- the decision --------------------------------------------------------------------------------


def test_decided_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One warning for each optimizer that is not served, and one attribute, which goes again."""
    asked: list[object] = []

    def refuse(optimizer: object) -> str:
        asked.append(optimizer)
        return "the reason (its_key)"

    adoptions = adopt.Adoptions({}, RELEASE, refuse, lambda optimizer: Alone(), "auto", print)
    first, second = Optimizer(), Optimizer()
    names = set(vars(first))
    with caplog.at_level(logging.INFO, "z3ext"):
        for optimizer in (first, second, first, second):
            decision = adoptions.of(optimizer)
            assert isinstance(decision, StockPath)
            assert decision.reason == "the reason (its_key)"
    assert asked == [first, second]
    line = "not served: the reason (its_key); DeepSpeed's own methods run"
    assert [record.getMessage() for record in caplog.records] == [line, line]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert set(vars(first)) - names == {adopt.ATTRIBUTE}
    adoptions.release_all()
    assert set(vars(first)) == set(vars(second)) == names
    adoptions.of(first)
    assert asked == [first, second, first]
