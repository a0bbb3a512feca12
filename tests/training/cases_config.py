"""Cases that vary the DeepSpeed config on one MLP."""

from __future__ import annotations

from functools import partial
from typing import Any

from . import features
from .case import (
    BF16,
    FP16,
    FP16_STATIC,
    Case,
    gas,
    merged,
    momentum,
    sgd,
    two_groups,
    zero,
)
from .models import Mlp, Toy

COMM_FP32: dict[str, Any] = {"communication_data_type": "fp32"}
COMM_BF16: dict[str, Any] = {"communication_data_type": "bf16"}
COMM_FP16: dict[str, Any] = {"communication_data_type": "fp16"}
ACCUMULATE_FP32: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
AUTOCAST: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


def clip(value: float) -> dict[str, Any]:
    return {"gradient_clipping": value}


def predivide(factor: float) -> dict[str, Any]:
    return {"gradient_predivide_factor": factor}


def _mlp(name: str, *config: dict[str, Any], **fields: Any) -> Case:
    return Case(name, Mlp, merged({}, *config), **fields)


def _bucket(elements: int, *shapes: tuple[int, ...], **fields: Any) -> Case:
    """Buckets around the parameter sizes: M13 and M14 of the measured behaviour."""
    sizes = "_".join(str(shape[0]) for shape in shapes)
    return Case(
        f"bucket_{elements}_params_{sizes}",
        partial(Toy, *shapes),
        merged(zero(reduce_bucket_size=elements), gas(2)),
        **fields,
    )


_M13 = ((3,), (16,), (5,), (16,), (2,))

CASES: list[Case] = [
    _mlp("fp32", core=True),
    _mlp("bf16", BF16, core=True),
    _mlp("fp16", FP16, steps=6, core=True),
    _mlp("fp16_static", FP16_STATIC),
    _mlp("fp32_gas3", gas(3)),
    _mlp("bf16_gas3", BF16, gas(3), core=True),
    _mlp("fp16_gas3", FP16, gas(3)),
    _mlp("fp32_sgd", optimizer=sgd),
    _mlp("bf16_momentum", BF16, optimizer=momentum),
    # Data types.
    _mlp("bf16_accumulate_fp32_gas3", BF16, ACCUMULATE_FP32, gas(3), core=True),
    _mlp("bf16_comm_fp32_gas3", BF16, COMM_FP32, gas(3)),
    _mlp("bf16_accumulate_and_comm_fp32_gas3", BF16, ACCUMULATE_FP32, COMM_FP32, gas(3)),
    _mlp("fp16_comm_fp32", FP16, COMM_FP32, gas(2)),
    _mlp("fp16_accumulate_fp32_gas3", FP16, ACCUMULATE_FP32, gas(3)),
    _mlp("fp16_comm_bf16", FP16, COMM_BF16),
    _mlp("fp32_comm_bf16_gas2", COMM_BF16, gas(2)),
    _mlp("fp32_comm_fp16", COMM_FP16),
    _mlp("autocast_bf16", AUTOCAST, gas(2), served=None, needs=features.AUTOCAST),
    # Clipping.
    _mlp("fp32_no_clip", clip(0.0)),
    _mlp("fp32_clip_0.1", clip(0.1)),
    _mlp("bf16_no_clip", BF16, clip(0.0)),
    _mlp("bf16_clip_0.1", BF16, clip(0.1)),
    _mlp("fp16_no_clip", FP16, clip(0.0), steps=6),
    _mlp("fp16_clip_0.1", FP16, clip(0.1), steps=6),
    # Sub-groups and parameter groups.
    _mlp("sub_groups", BF16, zero(sub_group_size=40), gas(2), core=True),
    _mlp("sub_group_per_parameter", zero(sub_group_size=1), clip(0.1)),
    _mlp("two_param_groups", BF16, optimizer=two_groups),
    _mlp("two_param_groups_sub_groups", FP16, zero(sub_group_size=20), optimizer=two_groups),
    # Persistent parameters: all, and only the small ones.
    _mlp("persistent_all", BF16, zero(stage3_param_persistence_threshold=1_000_000), gas(2)),
    _mlp("persistent_small", zero(stage3_param_persistence_threshold=20)),
    # Scaling of the gradients.
    _mlp("predivide_2", BF16, predivide(2.0), gas(2), core=True),
    _mlp("predivide_3", predivide(3.0)),
    _mlp("predivide_4_comm_fp32", BF16, predivide(4.0), COMM_FP32),
    _mlp("prescale", BF16, {"prescale_gradients": True}),
    _mlp("prescale_predivide_2", FP16, {"prescale_gradients": True}, predivide(2.0)),
    # Buckets.
    *(_bucket(n, *_M13) for n in (8, 15, 16, 17, 100)),
    _bucket(16, (4,), (40,), (4,), (4,), core=True),
    _bucket(1, (1,), (2,), (1,)),
    # Overlap, checks, what a user may also have on.
    _mlp("overlap_comm", BF16, zero(overlap_comm=True), gas(2), core=True),
    _mlp("sanity_checks", BF16, zero(enable_sanity_checks=True), needs=features.SANITY_CHECKS),
    _mlp("small_prefetch", zero(stage3_prefetch_bucket_size=1, stage3_max_live_parameters=1)),
]
