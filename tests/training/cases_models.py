"""Cases that vary the model: shapes, sharing, freezing, checkpointing, use of parameters."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .case import BF16, FP16, Case, gas, merged, sgd, zero
from .models import (
    Branchy,
    ChannelsLast,
    Experts,
    Lora,
    Mlp,
    Moe,
    Tied,
    Toy,
    TrainingModel,
    ViewGrad,
)

if TYPE_CHECKING:
    from .run import Run


def _mark_experts(model: TrainingModel) -> None:
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, [Experts])


def _freeze_after_two_steps(run: Run) -> None:
    """A layer is frozen in the middle of training: its gradients stop coming."""
    for step in range(run.case.steps):
        if step == 2:
            first = next(iter(run.model.blocks))  # type: ignore[arg-type]
            first.requires_grad_(False)
        run.step(step)


_SMALL = ((1,), (5,), (7, 3), (1,), (2,))
_REENTRANT = partial(Mlp, checkpointing="reentrant")
_NON_REENTRANT = partial(Mlp, checkpointing="non_reentrant")
#: 50 x 40 elements fill the bucket of 2,000, 40 x 60 do not fit in it.
_LARGE = partial(Mlp, 50, 40, 60, 1)

CASES: list[Case] = [
    Case("smaller_than_world", partial(Toy, *_SMALL), gas(2), core=True),
    Case("smaller_than_world_fp16", partial(Toy, *_SMALL), merged(FP16, gas(2)), sgd, core=True),
    Case("one_parameter_one_element", partial(Toy, (1,)), BF16, sgd, core=True),
    Case("tied_weights", Tied, BF16, core=True),
    Case("tied_weights_small_bucket", Tied, merged(zero(reduce_bucket_size=70), gas(3))),
    Case("frozen_layers", partial(Mlp, frozen=(0, 2)), merged(BF16, gas(2)), core=True),
    Case("frozen_after_init", Mlp, merged(BF16, gas(2)), drive=_freeze_after_two_steps, steps=4),
    Case("lora_on_frozen_bf16", Lora),
    Case("reentrant_checkpoint", _REENTRANT, merged(BF16, gas(2)), core=True),
    Case("reentrant_checkpoint_small_bucket", _REENTRANT, zero(reduce_bucket_size=20)),
    Case("non_reentrant_checkpoint", _NON_REENTRANT, merged(BF16, gas(2))),
    Case("non_reentrant_checkpoint_small_bucket", _NON_REENTRANT, zero(reduce_bucket_size=20)),
    Case("view_gradients", ViewGrad, core=True),
    Case("view_gradients_fp16", ViewGrad, merged(FP16, gas(2))),
    Case("channels_last_gradients", ChannelsLast, merged(BF16, gas(2))),
    Case("large_parameters", partial(_LARGE, bias=False), BF16, core=True),
    Case("large_parameters_with_bias", _LARGE, merged(FP16, gas(2))),
    Case("wide_fp32_partitions", partial(Mlp, 33, 47, 29, 3, bias=False), gas(2), core=True),
    Case("unused_layer_on_odd_steps", Branchy, BF16, core=True, steps=5),
    Case("unused_layer_on_odd_steps_fp16", Branchy, merged(FP16, zero(sub_group_size=10)), steps=5),
    # M4: a parameter that only the first step uses keeps its stale partition.
    Case(
        "unused_after_first_step",
        partial(Toy, (4,), (5,), unused=[(s, -1, 1) for s in (1, 2)]),
        optimizer=sgd,
        steps=3,
    ),
    # M2: each rank uses one of two parameters of one shape.
    Case(
        "different_parameters_per_rank",
        partial(Toy, (8,), (8,), unused=[(-1, 0, 1), (-1, 1, 0), (-1, 2, 1)]),
        optimizer=sgd,
        min_world=2,
    ),
    # M1: the arrival order differs between ranks, which stock mixes up silently.
    Case(
        "different_order_per_rank",
        partial(Toy, (8,), (8,), reverse_odd_ranks=True),
        optimizer=sgd,
        min_world=2,
        core=True,
    ),
    Case("moe_leaf_module", Moe, BF16, prepare=_mark_experts, core=True),
    Case(
        "moe_leaf_module_gas2",
        Moe,
        merged(FP16, gas(2), zero(reduce_bucket_size=40)),
        prepare=_mark_experts,
    ),
    Case("two_shapes_of_micro_batch", partial(Mlp, rows=(3, 8)), merged(BF16, gas(2))),
]
