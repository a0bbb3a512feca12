"""Gradients whose memory is not their own.

DeepSpeed copies a gradient in its hook; z3ext lets it wait, so that it must notice what may change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .case import BF16, FP16, Case, gas, merged, scattered, sgd, zero
from .models import Draw, TrainingModel

_NUMEL = 24


# --- one memory for several gradients -------------------------------------------------------------


#: Gives the same memory at every call, as a tensor.
Workspace = Callable[[], Tensor]


def _torch_workspace(numel: int, dtype: torch.dtype) -> Workspace:
    kept = torch.zeros(numel, dtype=dtype)
    return lambda: kept


def _numpy_workspace(numel: int, dtype: torch.dtype) -> Workspace:
    """Memory that torch did not allocate: each tensor has a storage of its own there."""
    kept = torch.zeros(numel).numpy()
    return lambda: torch.from_numpy(kept)


def _storage_workspace(numel: int, dtype: torch.dtype) -> Workspace:
    """Kept without a tensor: torch counts the storage's Python object once."""
    kept = torch.zeros(numel, dtype=dtype).untyped_storage()
    return lambda: torch.empty(0, dtype=dtype).set_(kept, 0, (numel,))  # type: ignore[call-overload]


class _Dot(torch.autograd.Function):
    """<c, weight>, whose backward writes each gradient into one cached workspace."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, c: Tensor, workspace: Workspace) -> Tensor:
        ctx.c, ctx.workspace = c, workspace
        return (weight * c).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return torch.mul(ctx.c, grads[0], out=ctx.workspace().view(4, -1)), None, None


class CachedWorkspace(TrainingModel):
    """Several parameters whose gradients are written one after the other into one workspace."""

    def __init__(self, make: Callable[[int, torch.dtype], Workspace], count: int = 5) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(4, _NUMEL // 4)) for _ in range(count)
        )
        self.make = make
        self.workspace: Workspace | None = None

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        return tuple(draw.normal(4, _NUMEL // 4) for _ in self.weights)

    def forward(self, *coefficients: Tensor) -> Tensor:
        if self.workspace is None:
            self.workspace = self.make(_NUMEL, coefficients[0].dtype)
        dot: Any = _Dot.apply
        loss = torch.zeros(())
        for weight, c in zip(self.weights, coefficients, strict=True):
            loss = loss + dot(weight, c, self.workspace).float()
        return loss


class SharedGradients(TrainingModel):
    """Pairs of parameters whose gradients are two views of one memory."""

    def __init__(self, pairs: int = 3) -> None:
        super().__init__()
        self.first = nn.ParameterList(nn.Parameter(torch.zeros(6, 4)) for _ in range(pairs))
        self.second = nn.ParameterList(nn.Parameter(torch.zeros(4, 6)) for _ in range(pairs))

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        return tuple(draw.normal(_NUMEL) for _ in self.first)

    def forward(self, *coefficients: Tensor) -> Tensor:
        loss = torch.zeros(())
        for a, b, c in zip(self.first, self.second, coefficients, strict=True):
            loss = loss + ((a.view(-1) + b.view(-1)) * c).float().sum()
        return loss


BASIC: list[Case] = [
    Case("cached_workspace", partial(CachedWorkspace, _torch_workspace), optimizer=sgd, core=True),
    Case("cached_workspace_fp16", partial(CachedWorkspace, _torch_workspace), FP16, sgd),
    Case("numpy_workspace", partial(CachedWorkspace, _numpy_workspace), optimizer=sgd, core=True),
    Case(
        "cached_workspace_two_buckets",
        partial(CachedWorkspace, _torch_workspace),
        merged(gas(2), zero(reduce_bucket_size=60)),
    ),
    Case("shared_gradients", SharedGradients, merged(BF16, gas(2))),
    Case(
        "storage_workspace", partial(CachedWorkspace, _storage_workspace), optimizer=sgd, core=True
    ),
]


CASES: list[Case] = [*BASIC, *(case for basic in BASIC for case in scattered(basic))]
