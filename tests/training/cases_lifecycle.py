"""Cases in which the user does something between the usual calls, or patches at odd moments."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import features
from .case import BF16, FP16, Case, gas, merged, zero
from .models import Mlp

if TYPE_CHECKING:
    from .run import Run

UNMANAGED: dict[str, Any] = {"managed_gradient_accumulation": False}


def _two_backwards(run: Run) -> None:
    """Two forward-backward pairs before one step, with gradient_accumulation_steps 1."""
    for step in range(run.case.steps):
        run.forward_backward(step, 0)
        run.forward_backward(step, 1)
        run.engine.step()
        run.record_step(step)


def _direct_backward(run: Run) -> None:
    """engine.scale(loss).backward() in place of engine.backward(loss)."""
    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            loss = run.engine(*run.batch(step, micro))
            run.record(f"step {step} micro {micro} loss", loss)
            run.engine.scale(loss).backward()
            run.engine.step()
        run.record_step(step)


def _coalesced(run: Run) -> None:
    """Two micro-batches inside engine.coalesce_grad_reduction(), which reduces once on exit."""
    for step in range(run.case.steps):
        with run.engine.coalesce_grad_reduction():
            run.forward_backward(step, 0)
            run.forward_backward(step, 1)
        run.engine.step()
        run.record_step(step)


def _no_sync(run: Run) -> None:
    """engine.no_sync() is refused by stage 3; training goes on after it."""
    try:
        with run.engine.no_sync():
            run.record("no_sync", "entered")
    except AssertionError as error:
        run.record("no_sync", str(error))
    for step in range(run.case.steps):
        run.step(step)


def _manual_boundary(run: Run) -> None:
    """The user sets the accumulation boundary: three micro-batches, one engine.step()."""
    for step in range(run.case.steps):
        for micro in range(3):
            run.engine.set_gradient_accumulation_boundary(micro == 2)
            run.forward_backward(step, micro)
        run.engine.step()
        run.record_step(step)


def _zero_grad_between(run: Run) -> None:
    """zero_grad() of the engine and of the optimizer between a backward and the next forward."""
    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            run.forward_backward(step, micro)
            run.engine.step()
            if micro == 0:
                run.engine.zero_grad()
                if step % 2 == 0:
                    run.optimizer.zero_grad()
        run.record_step(step)


def _read_gradients(run: Run) -> None:
    """safe_get_full_grad and safe_get_local_grad between backward and step, and after it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_local_grad

    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            run.forward_backward(step, micro)
            for name, param in run.model.named_parameters():
                run.record(f"step {step} micro {micro} {name} grad", safe_get_full_grad(param))
                local = safe_get_local_grad(param)
                run.record(f"step {step} micro {micro} {name} local grad", local)
            run.engine.step()
        run.record_step(step)
        for name, param in run.model.named_parameters():
            run.record(f"step {step} {name} grad after", safe_get_full_grad(param))
            run.record(f"step {step} {name} fp32", safe_get_full_fp32_param(param))


def write_gradients(run: Run) -> None:
    """safe_set_full_grad and safe_set_local_grad between backward and step."""
    from deepspeed.utils import (
        safe_get_full_grad,
        safe_get_local_grad,
        safe_set_full_grad,
        safe_set_local_grad,
    )

    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            run.forward_backward(step, micro)
            if micro == run.case.micros - 1:
                for k, (_, param) in enumerate(run.model.named_parameters()):
                    grad = safe_get_full_grad(param)
                    safe_set_full_grad(param, grad * 2 + k)
                    if k % 2:
                        safe_set_local_grad(param, safe_get_local_grad(param) * 0.5)
            run.engine.step()
        run.record_step(step)


def _poison_by_set(run: Run) -> None:
    """A non-finite value written by safe_set_full_grad is an overflow too."""
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    for step in range(run.case.steps):
        run.forward_backward(step)
        if step == 1:
            param = run.model.get_parameter("probe.weight")
            safe_set_full_grad(param, torch.full_like(safe_get_full_grad(param), float("inf")))
        run.engine.step()
        run.record_step(step)


def _offload_states(run: Run, pin_memory: bool) -> None:
    """offload_states and reload_states replace the gradient and bucket buffers between steps."""
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    moved = [
        OffloadStateTypeEnum.lp_params,
        OffloadStateTypeEnum.lp_grads,
        OffloadStateTypeEnum.contiguous_grad_buffer,
    ]
    for step in range(run.case.steps):
        run.step(step)
        run.engine.offload_states(
            include=moved, device=OffloadDeviceEnum.cpu, pin_memory=pin_memory
        )
        run.engine.reload_states()


def _offload_states_pinned(run: Run) -> None:
    _offload_states(run, True)


def _offload_states_unpinned(run: Run) -> None:
    _offload_states(run, False)


def _replace_buckets(optimizer: Any) -> None:
    if hasattr(optimizer, "ipg_buckets"):
        for bucket in optimizer.ipg_buckets.values():
            bucket.buffer = torch.empty_like(bucket.buffer)
        return
    # Before 0.17.2 there is one, and the optimizer's field is its memory.
    name = "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer"
    setattr(optimizer, name, torch.empty_like(getattr(optimizer, name)))


def _replace_buffers(run: Run) -> None:
    """The storage of the gradient partitions and the bucket is replaced between micro-batches."""
    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            flat = run.optimizer.grad_partitions_flat_buffer
            flat.set_(flat.clone())
            offset = 0
            partitions = run.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
            for param in (p for group in run.optimizer.fp16_groups for p in group):
                partitions[param.ds_id] = flat.narrow(0, offset, param.partition_numel())
                offset += param.partition_numel()
            _replace_buckets(run.optimizer)
            run.forward_backward(step, micro)
            run.engine.step()
        run.record_step(step)


def _checkpoint(run: Run) -> None:
    """Saves after step 1, goes on, loads it back and trains again from there."""
    folder = str(run.scratch)
    for step in range(run.case.steps):
        run.step(step)
        if step == 1:
            run.engine.save_checkpoint(folder, tag="one")
        if step == 2:
            run.engine.load_checkpoint(folder, tag="one")


def _sequence_parallel(run: Run) -> None:
    """M7: the optimizer's sequence_parallel_size, forced to 2, multiplies the gradients."""
    run.optimizer.sequence_parallel_size = 2
    for step in range(run.case.steps):
        run.step(step)


def _late_patch(run: Run) -> None:
    """The patch comes after deepspeed.initialize and after one stock step."""
    for step in range(run.case.steps):
        if step == 1:
            run.patcher.on()
        run.step(step)


def _patch_after_initialize(run: Run) -> None:
    run.patcher.on()
    for step in range(run.case.steps):
        run.step(step)


def _patch_in_window(run: Run) -> None:
    """The patch comes between two micro-batches of one accumulation window."""
    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            if (step, micro) == (1, 1):
                run.patcher.on()
            run.forward_backward(step, micro)
            run.engine.step()
        run.record_step(step)


def _patch_between_backward_and_step(run: Run) -> None:
    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            run.forward_backward(step, micro)
            if micro == run.case.micros - 1 and step in (0, 2):
                run.patcher.on()
            if micro == run.case.micros - 1 and step in (1, 3):
                run.patcher.off()
            run.engine.step()
        run.record_step(step)
    run.patcher.on()
    run.step(run.case.steps)


def _undo_and_patch_again(run: Run) -> None:
    """On for steps 0 and 1, off for 2, off in the window of 3, on again from 4."""
    run.patcher.on()
    for step in range(run.case.steps):
        if step == 2:
            run.patcher.off()
        for micro in range(run.case.micros):
            if (step, micro) == (3, 1):
                run.patcher.on()
            run.forward_backward(step, micro)
            run.engine.step()
        run.record_step(step)
        if step == 3:
            run.patcher.off()
            run.patcher.on()


def _drive(name: str, drive: Any, *config: dict[str, Any], **fields: Any) -> Case:
    return Case(name, Mlp, merged({}, *config), drive=drive, **fields)


def _setting(name: str, drive: Any, *config: dict[str, Any], **fields: Any) -> Case:
    """safe_set_full_grad fails in DeepSpeed where a partition is padded: sizes divide evenly."""
    even = partial(Mlp, 12, 24, 12, probe=12)
    return Case(name, even, merged({}, *config), drive=drive, **fields)


def _switching(name: str, drive: Any, *config: dict[str, Any], **fields: Any) -> Case:
    return _drive(name, drive, *config, patched_by_drive=True, **fields)


CASES: list[Case] = [
    _drive("two_backwards_per_step", _two_backwards, BF16, core=True),
    _drive("two_backwards_per_step_fp16", _two_backwards, FP16),
    _drive("direct_backward", _direct_backward, FP16, gas(2), needs=features.SCALE),
    _drive("unmanaged_accumulation", _two_backwards, BF16, UNMANAGED, needs=features.UNMANAGED),
    _drive("coalesce_grad_reduction", _coalesced, BF16, core=True, needs=features.COALESCE),
    _drive(
        "coalesce_grad_reduction_small_bucket",
        _coalesced,
        zero(reduce_bucket_size=20),
        needs=features.COALESCE,
    ),
    _drive("no_sync_is_refused", _no_sync),
    _drive("manual_boundary", _manual_boundary, BF16),
    _drive("zero_grad_between_micro_batches", _zero_grad_between, BF16, gas(3), core=True),
    _drive("read_gradients", _read_gradients, BF16, gas(2)),
    _drive("read_gradients_fp16_sub_groups", _read_gradients, FP16, zero(sub_group_size=40)),
    _setting("write_gradients", write_gradients, gas(2), core=True),
    _setting("write_gradients_fp16", write_gradients, FP16, zero(sub_group_size=40)),
    _setting("non_finite_by_set_grad_fp16", _poison_by_set, FP16, skips=1),
    _setting("non_finite_by_set_grad_bf16", _poison_by_set, BF16, skips=1),
    _drive(
        "offload_states_pinned",
        _offload_states_pinned,
        BF16,
        gas(2),
        core=True,
        needs=features.OFFLOAD_STATES,
    ),
    _drive("offload_states_unpinned", _offload_states_unpinned, needs=features.OFFLOAD_STATES),
    _drive("replaced_buffers", _replace_buffers, BF16, gas(2), needs=features.EMPTIES_BUCKETS),
    _drive("load_checkpoint", _checkpoint, BF16, gas(2), steps=5),
    _drive("sequence_parallel_size_2", _sequence_parallel, BF16, gas(2)),
    _switching("patched_after_initialize", _patch_after_initialize, BF16, gas(2), core=True),
    _switching("patched_after_a_step", _late_patch, FP16, gas(2)),
    _switching("patched_in_accumulation_window", _patch_in_window, BF16, gas(3), core=True),
    _switching("patched_in_accumulation_window_fp16", _patch_in_window, FP16, gas(3)),
    _switching(
        "switched_between_backward_and_step", _patch_between_backward_and_step, FP16, gas(2)
    ),
    _switching("undone_and_patched_again", _undo_and_patch_again, BF16, gas(2), steps=6, core=True),
    _switching("undone_and_patched_again_fp16", _undo_and_patch_again, FP16, gas(2), steps=6),
]
