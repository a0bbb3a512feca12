"""Small ways in which releases differ; each ``Release`` names the ones that hold for it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor


def data_parallel_group(optimizer: Any) -> Any:
    """Of all parameters alike."""
    return optimizer.dp_process_group


def group_of_the_parameters(optimizer: Any) -> Any:
    """That of the first parameter; it has the data-parallel group's ranks, as another object."""
    params = itertools.chain.from_iterable(optimizer.fp16_groups)
    return getattr(next(params, None), "ds_process_group", optimizer.dp_process_group)


def rounds_once(optimizer: Any, dtype: torch.dtype) -> torch.dtype | None:
    """An average goes straight to ``gradient_accumulation_dtype``."""
    return None


def rounds_to_the_parameters(optimizer: Any, dtype: torch.dtype) -> torch.dtype | None:
    """An average is cast to the dtype of the parameters first."""
    parameters: torch.dtype = optimizer.dtype
    if parameters in (dtype, torch.float32):
        return None  # it is of that dtype, or loses nothing there
    if optimizer.gradient_accumulation_dtype == parameters:
        return None  # cast there anyway
    return parameters


def minus_one(norm: Tensor, mask: Tensor) -> Tensor:
    """-1.0 where the norm is inf or nan."""
    return torch.where(norm.isnan().logical_or(norm.isinf()), mask, norm)


def nan_by_product(norm: Tensor, mask: Tensor) -> Tensor:
    """Meant as ``minus_one``, but 0 times inf is nan."""
    bad = norm.isnan().logical_or(norm.isinf())
    return bad * mask + bad.logical_not() * norm


def marked_complete(param: Any) -> bool:
    """Where one parameter's gradient comes in parts, the user marks the last one."""
    return bool(getattr(param, "ds_grad_is_ready", True))


def always_complete(param: Any) -> bool:
    """The release knows no gradient in parts."""
    return True


def while_coalescing(optimizer: Any) -> bool:
    """``engine.coalesce_grad_reduction`` gathers several backwards."""
    return bool(optimizer._coalesce_grad_reduction)


def never(optimizer: Any) -> bool:
    """The release has no such config."""
    return False


def by_config(optimizer: Any) -> bool:
    """``enable_sanity_checks``."""
    return bool(optimizer.enable_sanity_checks)


def boundary_attribute(optimizer: Any) -> bool:
    """The engine sets it."""
    return bool(optimizer.is_gradient_accumulation_boundary)


def boundary_method(optimizer: Any) -> bool:
    """The engine tells the optimizer, which is asked."""
    return bool(optimizer.is_gradient_accumulation_boundary())


def not_kept(optimizer: Any) -> set[int]:
    """Nobody asks what was reduced."""
    return set()


def kept_for_the_step(optimizer: Any) -> set[int]:
    """An offloaded optimizer without a boundary of its own looks there at the step."""
    ids: set[int] = optimizer._offload_boundary_param_ids
    return ids
