"""Cases with non-finite gradients: skipped steps, the loss scale, stale values."""

from __future__ import annotations

from functools import partial
from math import inf, nan
from typing import TYPE_CHECKING, Any

from .case import (
    BF16,
    EVERY_RANK,
    FP16,
    FP16_STATIC,
    Case,
    Poison,
    gas,
    merged,
    sgd,
    train,
    zero,
)
from .models import Mlp, Toy

if TYPE_CHECKING:
    from .run import Run


def _train_until_it_raises(run: Run) -> None:
    """M22: the scaler raises once the scale is at its minimum; the message is recorded."""
    for step in range(run.case.steps):
        try:
            run.step(step)
        except Exception as error:
            run.record(f"step {step} raised", f"{type(error).__name__}: {error}")
            return
    raise AssertionError("the loss scaler was expected to raise")


def _sequence_parallel(run: Run) -> None:
    run.optimizer.sequence_parallel_size = 2
    train(run)


def _scale(**options: Any) -> dict[str, Any]:
    return merged(FP16, {"fp16": options})


def _mlp(name: str, config: dict[str, Any], *poisons: Poison, **fields: Any) -> Case:
    """Every poisoned step is skipped, unless the fields say otherwise."""
    skips = len({p.step for p in poisons})
    return Case(name, Mlp, config, poisons=poisons, **{"steps": 5, "skips": skips, **fields})


def _m5(config: dict[str, Any], value: float) -> dict[str, Any]:
    """M5: p1 is poisoned in step 0 and not used in step 1, where its partition is still bad."""
    model = partial(Toy, (4,), (5,), unused=[(1, -1, 1)], poisoned=1)
    return {
        "model": model,
        "config": config,
        "poisons": (Poison(0, value),),
        "steps": 3,
        "skips": 2,
    }


#: M18: +inf on one rank meets -inf on the other.
_OPPOSITE = (Poison(1, inf, 0), Poison(1, -inf, 1))
_STATIC_1: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 1.0}}
#: M10: 60000 on every rank is still finite after the division.
_HUGE = partial(Toy, (9,), (3,), constant=60000.0)

CASES: list[Case] = [
    _mlp("fp16_inf_first_step", FP16, Poison(0, inf), core=True),
    _mlp("fp16_inf_first_rank", FP16, Poison(1, inf, 0)),
    _mlp("fp16_nan_middle_step", FP16, Poison(2, nan), core=True),
    _mlp("fp16_minus_inf_consecutive_steps", FP16, Poison(1, -inf), Poison(2, -inf)),
    _mlp("fp16_inf_every_step", _scale(initial_scale_power=8), *(Poison(s, inf) for s in range(5))),
    _mlp("fp16_opposite_inf", FP16, *_OPPOSITE, min_world=2, core=True),
    _mlp("fp16_inf_every_rank", FP16, Poison(1, inf, EVERY_RANK)),
    _mlp("fp16_hysteresis", _scale(hysteresis=2), Poison(1, inf), Poison(2, nan), Poison(3, inf)),
    _mlp("fp16_static_overflow", FP16_STATIC, Poison(1, nan)),
    _mlp("fp16_first_micro_of_three", merged(FP16, gas(3)), Poison(1, inf, micro=0)),
    _mlp("fp16_last_micro_of_three", merged(FP16, gas(3)), Poison(1, nan, micro=2), core=True),
    _mlp("fp16_overflow_sub_groups", merged(FP16, gas(2), zero(sub_group_size=15)), Poison(1, inf)),
    _mlp(
        "fp16_overflow_comm_fp32",
        merged(FP16, {"communication_data_type": "fp32"}),
        Poison(1, -inf),
    ),
    _mlp(
        "fp16_overflow_accumulate_fp32",
        merged(FP16, gas(2), {"data_types": {"grad_accum_dtype": "fp32"}}),
        Poison(1, inf),
    ),
    _mlp(
        "fp16_min_scale",
        _scale(initial_scale_power=1, min_loss_scale=1),
        *(Poison(s, inf) for s in range(5)),
        drive=_train_until_it_raises,
        skips=1,
    ),
    Case("fp16_large_but_finite", _HUGE, _STATIC_1, sgd, core=True),
    # Every micro-batch is finite; their sum in the fp16 accumulator is not.
    Case(
        "fp16_overflow_by_accumulation",
        partial(_HUGE, constant=30000.0),
        merged(gas(3), {"fp16": {"enabled": True, "loss_scale": 4.0}}),
        sgd,
        core=True,
        skips=4,
    ),
    # The scale drops until the scaled gradients fit. A sixth step would tell when it grows again,
    # which differs between releases.
    Case(
        "fp16_scale_too_high",
        partial(_HUGE, constant=100.0),
        _scale(initial_scale_power=12),
        sgd,
        steps=5,
        skips=3,
    ),
    # sequence_parallel_size 2 halves the divisor: every addend is finite, their sum is not, or
    # only its cast to the fp16 partition is not.
    Case(
        "fp16_overflow_by_sum", _HUGE, _STATIC_1, sgd, drive=_sequence_parallel, skips=4, core=True
    ),
    Case(
        "fp16_overflow_by_cast",
        _HUGE,
        merged(_STATIC_1, {"communication_data_type": "fp32"}),
        sgd,
        drive=_sequence_parallel,
        skips=4,
    ),
    # Values at the ends of the ranges.
    Case("fp16_underflow", partial(_HUGE, constant=6e-8), merged(_STATIC_1, gas(3)), sgd),
    Case("fp32_denormal", partial(_HUGE, constant=1.1e-41), gas(3), sgd, core=True),
    Case("bf16_denormal", partial(_HUGE, constant=1.1e-39), merged(BF16, gas(2)), sgd),
    Case("fp32_norm_beyond_fp32", partial(_HUGE, constant=3e38), {}, sgd, core=True),
    Case("negative_zero", partial(_HUGE, constant=-0.0), gas(2), sgd),
    Case("fp16_stale_inf", **_m5(FP16_STATIC, inf), optimizer=sgd),
    Case("bf16_stale_nan", **_m5(BF16, nan), optimizer=sgd),
    # M9: bf16 and fp32 skip too, by the norm (features.SKIPS_ANY_DTYPE).
    _mlp("bf16_nan_last_rank", BF16, Poison(1, nan), core=True),
    _mlp("bf16_inf_first_step", BF16, Poison(0, inf)),
    _mlp("bf16_consecutive_steps", BF16, Poison(1, inf), Poison(2, -inf), Poison(3, nan)),
    _mlp("bf16_opposite_inf", BF16, *_OPPOSITE, min_world=2),
    _mlp(
        "bf16_overflow_sub_groups",
        merged(BF16, gas(3), zero(sub_group_size=15)),
        Poison(1, nan, micro=1),
    ),
    _mlp("fp32_nan", {}, Poison(1, nan, 0)),
    _mlp("fp32_inf_gas2", gas(2), Poison(2, inf, micro=1), core=True),
]
