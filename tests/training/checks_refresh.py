"""Checks of the refresh after a step: the persistent parameters in one all-gather per dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .case import BF16, FP16, Check, adamw, merged, zero
from .compare import differences
from .models import Lora, Mlp, Tied, TrainingModel
from .modes_run import seeded, train


def _frozen_mlp() -> TrainingModel:
    return Mlp(frozen=(1,))


_PERSISTENT = zero(stage3_param_persistence_threshold=100_000)
_REFRESHED: tuple[tuple[str, Callable[[], TrainingModel], Mapping[str, Any], int], ...] = (
    ("fp32", Mlp, {}, 1),
    ("fp16, an overflow", Mlp, FP16, 1),
    ("bf16, reduce-scatter", Mlp, merged(BF16, zero(reduce_scatter=True)), 1),
    ("frozen layers", _frozen_mlp, BF16, 1),
    ("tied weights", Tied, BF16, 1),
    ("two dtypes", Lora, {}, 2),
    ("several sub-groups", Mlp, zero(sub_group_size=20), 1),
)


def _persistent_parameters(world: int) -> list[str]:
    """One all-gather per dtype after a step, and every parameter's bits are stock's."""
    problems: list[str] = []
    for name, model, config, dtypes in _REFRESHED:
        poison_at = 1 if "overflow" in name else None
        stock, seen = (
            train(
                seeded(model),
                merged(config, _PERSISTENT),
                mode,
                optimizer=adamw,
                poison_at=poison_at,
                refresh=True,
            )
            for mode in (None, "auto")
        )
        found = differences(stock.records, seen.records)
        if not seen.statuses[-1].served:
            found.append(f"not served: {seen.statuses[-1]}")
        # A skipped step ends before the refresh.
        steps = 3 if poison_at is None else 2
        if stock.gathers != [stock.persistent] * steps or stock.persistent <= dtypes:
            found.append(f"stock: {stock.gathers} gathers for {stock.persistent} parameters")
        if seen.gathers != [dtypes] * steps:
            found.append(f"{seen.gathers} gathers, expected {dtypes} at each step")
        problems += [f"{name}: {problem}" for problem in found]
    return problems


def _persistent_and_partitioned(world: int) -> list[str]:
    """Parameters above the threshold stay partitioned: only the persistent ones are gathered."""
    config = merged(BF16, zero(stage3_param_persistence_threshold=20))
    stock, seen = (
        train(seeded(Mlp), config, mode, optimizer=adamw, refresh=True) for mode in (None, "auto")
    )
    problems = differences(stock.records, seen.records)
    if not 0 < seen.persistent < len(list(Mlp().parameters())):
        problems.append(f"{seen.persistent} parameters are persistent")
    if seen.gathers != [1] * 3:
        problems.append(f"{seen.gathers} gathers, expected one at each step")
    return problems


def _no_refresh_alone(world: int) -> list[str]:
    """At world size 1, and without persistent parameters, nothing is gathered after a step."""
    problems: list[str] = []
    for config in (_PERSISTENT, {}) if world == 1 else ({},):
        stock, seen = (
            train(seeded(Mlp), config, mode, optimizer=adamw, refresh=True)
            for mode in (None, "auto")
        )
        problems += differences(stock.records, seen.records)
        if any(seen.gathers):
            problems.append(f"{seen.gathers} gathers, expected none")
    return problems


def _check(name: str, run: Callable[[int], list[str]], *worlds: int) -> Check:
    return Check(f"refresh_{name}", run, worlds)


CHECKS: list[Check] = [
    _check("persistent_parameters", _persistent_parameters, 2, 3),
    _check("persistent_and_partitioned", _persistent_and_partitioned, 3),
    _check("no_refresh_alone", _no_refresh_alone, 1, 2),
]
