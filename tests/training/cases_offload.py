"""Cases whose optimizer steps on the CPU (``offload_optimizer``)."""

from __future__ import annotations

from functools import partial
from math import inf, nan
from typing import Any

import torch

from .case import BF16, FP16, FP16_STATIC, Case, Poison, gas, merged, sgd, two_groups, zero
from .cases_config import ACCUMULATE_FP32, COMM_FP32, clip
from .cases_lifecycle import write_gradients
from .models import Draw, Mlp, Toy, TrainingModel
from .run import Run

#: Stock's reduction on the CPU, without and with DeepSpeed's own optimizer for it.
CPU: dict[str, Any] = zero(offload_optimizer={"device": "cpu", "pin_memory": False})
_PINNED: dict[str, Any] = zero(offload_optimizer={"device": "cpu", "pin_memory": True})
_RATIO: dict[str, Any] = zero(offload_optimizer={"device": "cpu", "ratio": 0.5})
_CPU_PARAMS: dict[str, Any] = zero(offload_param={"device": "cpu", "pin_memory": False})
_SCATTER: dict[str, Any] = zero(reduce_scatter=True)
_NOT_CONTIGUOUS: dict[str, Any] = zero(reduce_scatter=True, contiguous_gradients=False)


def cpu_adam(model: TrainingModel) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for the CPU, compiled at its first use."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01
    )
    return optimizer


def compile_cpu_adam() -> None:
    """Takes longer than a case may."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)


class FirstMicroOnly(Toy):
    """M8: p1 is used in the first micro-batch of each step alone."""

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        order, first, second, *others = super().batch(draw)
        return (order, first, second if draw.micro == 0 else None, *others)


def _record_gradients(run: Run) -> None:
    """Train, and look at the fp32 gradients before each step."""
    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            run.forward_backward(step, micro)
            for i, flat in enumerate(run.optimizer.fp32_partitioned_groups_flat):
                run.record(f"step {step} micro {micro} fp32 gradient {i}", flat.grad)
            run.engine.step()
        run.record_step(step)


def _case(name: str, *config: dict[str, Any], **fields: Any) -> Case:
    model = fields.pop("model", Mlp)
    fields = {"drive": _record_gradients, "full_worlds": (2, 3), **fields}
    return Case(f"offload_{name}", model, merged(CPU, *config), **fields)


_EVEN = partial(Mlp, 12, 24, 12, probe=12)
_M5 = partial(Toy, (4,), (5,), unused=[(1, -1, 1)], poisoned=1)
_M8 = partial(FirstMicroOnly, (6,), (9,), (7, 3))

CASES: list[Case] = [
    _case("fp32", clip(0.1)),
    _case("bf16_gas2", BF16, gas(2), clip(0.1), full_worlds=(1, 2, 3)),
    _case("bf16_gas2_scatter", BF16, gas(2), _SCATTER, full_worlds=(1, 2, 3)),
    _case("bf16_not_contiguous", BF16, gas(2), _NOT_CONTIGUOUS),
    _case("fp16_scale_grows", FP16, _SCATTER, steps=6),
    _case("pinned", BF16, _PINNED, gas(3), _SCATTER),
    _case("accumulate_fp32", BF16, ACCUMULATE_FP32, gas(3)),
    _case("comm_fp32", BF16, COMM_FP32, gas(2), _SCATTER),
    _case("comm_and_accumulate_fp32", BF16, COMM_FP32, ACCUMULATE_FP32, gas(2)),
    _case("sub_groups", BF16, zero(sub_group_size=40), gas(2), clip(0.1)),
    _case("two_param_groups", FP16, zero(sub_group_size=20), _SCATTER, optimizer=two_groups),
    _case("params_too", BF16, _CPU_PARAMS, gas(2), _SCATTER),
    _case("overlap_comm", BF16, zero(overlap_comm=True), gas(2), _SCATTER),
    _case("no_clip", BF16, clip(0.0)),
    _case("predivide", BF16, {"gradient_predivide_factor": 4.0}, gas(2)),
    # DeepSpeed's own optimizer, and half of the sub-groups left on the device (Twin-Flow).
    _case("cpu_adam", BF16, gas(2), _SCATTER, optimizer=cpu_adam, compiles=compile_cpu_adam),
    _case(
        "ratio",
        BF16,
        _RATIO,
        zero(sub_group_size=40),
        gas(2),
        optimizer=cpu_adam,
        compiles=compile_cpu_adam,
    ),
    # Skipped steps, and what stays in the partitions after one.
    _case(
        "fp16_inf_while_accumulating",
        FP16,
        gas(2),
        poisons=(Poison(1, inf, 0, 0), Poison(3, nan, -1)),
        steps=5,
        skips=2,
    ),
    _case("fp16_stale_inf", FP16_STATIC, model=_M5, poisons=(Poison(0, inf),), steps=3, skips=2),
    _case("norm_beyond_fp32", model=partial(Toy, (9,), (3,), constant=3e38), steps=2, skips=2),
    # Known faults of stock: M8, M4 and M24.
    _case("first_micro_only", BF16, gas(2), model=_M8, optimizer=sgd),
    _case("first_micro_only_scatter", BF16, gas(2), _SCATTER, model=_M8),
    _case("set_gradients", BF16, gas(2), clip(0.1), model=_EVEN, drive=write_gradients),
    # Left to stock: larger than the bucket.
    _case(
        "larger_than_bucket",
        BF16,
        zero(reduce_bucket_size=16),
        gas(2),
        noted=None,
        model=partial(Toy, (4,), (40,), (4,), (4,)),
    ),
]
