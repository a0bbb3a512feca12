"""The cases of the all-reduce path again, on the paths that end in a reduce-scatter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .case import Case, merged, zero
from .cases_config import CASES as CONFIG_CASES
from .cases_lifecycle import CASES as LIFECYCLE_CASES
from .cases_models import CASES as MODEL_CASES
from .cases_overflow import CASES as OVERFLOW_CASES

_FULL_WORLDS = (2, 3)
_CORE_WORLDS = (1, 4, 8)

#: M7: sequence_parallel_size scales on the all-reduce path only, so that nothing overflows here.
_NO_OVERFLOW = ("fp16_overflow_by_sum", "fp16_overflow_by_cast")

#: safe_set_full_grad fails in DeepSpeed where a partition is padded, as it is with 8 ranks.
_EVEN_SIZES = ("write_gradients",)

#: contiguous_gradients false: parameters of several dtypes are declined.
_DECLINED_NOT_CONTIGUOUS = ("lora_on_frozen_bf16",)


def _allowed(case: Case) -> bool:
    """DeepSpeed refuses predivide factors and prescaling together with reduce_scatter."""
    config = case.full_config
    return "gradient_predivide_factor" not in config and "prescale_gradients" not in config


def _reduce_scatter() -> Iterator[Case]:
    cases = (*CONFIG_CASES, *MODEL_CASES, *OVERFLOW_CASES, *LIFECYCLE_CASES)
    for case in filter(_allowed, cases):
        yield replace(
            case,
            name=f"{case.name}__reduce_scatter",
            config=merged(case.config, zero(reduce_scatter=True)),
            skips=0 if case.name in _NO_OVERFLOW else case.skips,
            full_worlds=_FULL_WORLDS,
            core_worlds=(1, 4) if case.name in _EVEN_SIZES else _CORE_WORLDS,
        )


def _not_contiguous() -> Iterator[Case]:
    """Both values of reduce_scatter lead to a reduce-scatter of the gradients as they are."""
    for case in (*CONFIG_CASES, *MODEL_CASES, *OVERFLOW_CASES):
        scattered = case.core and _allowed(case)
        if not scattered and _allowed(case):
            continue
        yield replace(
            case,
            name=f"{case.name}__not_contiguous",
            config=merged(case.config, zero(reduce_scatter=scattered, contiguous_gradients=False)),
            served=False if case.name in _DECLINED_NOT_CONTIGUOUS else case.served,
            skips=0 if case.name in _NO_OVERFLOW else case.skips,
            full_worlds=_FULL_WORLDS,
            core_worlds=(),
        )


CASES: list[Case] = [*_reduce_scatter(), *_not_contiguous()]
