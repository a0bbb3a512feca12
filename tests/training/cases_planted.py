"""Cases whose patched run is spoilt on purpose: the harness has to find the difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .case import BF16, FP16, Case, zero
from .models import Mlp

if TYPE_CHECKING:
    from .run import Run


def _lowest_weight_bit(run: Run) -> None:
    """Flips the lowest bit of one fp32 weight on the last rank."""
    if run.rank == run.world - 1:
        flat = run.optimizer.fp32_partitioned_groups_flat[0].detach()
        flat.view(torch.int32)[0] ^= 1


def _moment_bit(run: Run) -> None:
    """Flips the lowest bit of one first moment on the last rank."""
    if run.rank == run.world - 1:
        flat = run.optimizer.fp32_partitioned_groups_flat[0]
        run.optimizer.optimizer.state[flat]["exp_avg"].view(torch.int32)[0] ^= 1


def _norm_type(run: Run) -> None:
    """Turns the recorded norm into a Python float of the same value."""
    name = f"step {run.case.steps - 1} grad norm"
    run.records[name] = float(run.records[name])


def _gradient_sign_of_zero(run: Run) -> None:
    """Turns a zero of the recorded gradients into a negative zero."""
    buffer = run.records["step 0 gradient partitions"]
    buffer[0] = -0.0
    run.records["step 0 gradient partitions"] = buffer


def _zero_gradients(run: Run) -> None:
    for step in range(run.case.steps):
        run.step(step)
        run.records[f"step {step} gradient partitions"].zero_()


CASES: list[Case] = [
    Case("planted_weight_bit", Mlp, BF16, plant=_lowest_weight_bit),
    Case("planted_moment_bit", Mlp, FP16, plant=_moment_bit),
    Case("planted_norm_type", Mlp, zero(sub_group_size=40), plant=_norm_type),
    Case("planted_sign_of_zero", Mlp, drive=_zero_gradients, plant=_gradient_sign_of_zero),
]
