"""Gradients whose memory is not their own, and hooks that read, change or replace a gradient.

DeepSpeed copies a gradient in its hook; z3ext lets it wait, so that it must notice what may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from z3ext import pending

from .case import BF16, FP16, Case, gas, merged, sgd, zero
from .models import Draw, Mlp, TrainingModel

if TYPE_CHECKING:
    from .run import Run

_NUMEL = 24


# --- one memory for several gradients -------------------------------------------------------------


def _torch_workspace(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def _numpy_workspace(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory that torch did not allocate; each gradient is a storage of its own there."""
    return torch.from_numpy(torch.zeros(numel).numpy())


class _Dot(torch.autograd.Function):
    """<c, weight>, whose backward writes each gradient into one cached workspace."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, c: Tensor, workspace: Tensor, own: bool) -> Tensor:
        ctx.c, ctx.workspace, ctx.own = c, workspace, own
        return (weight * c).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        torch.mul(ctx.c, grads[0], out=ctx.workspace)
        # Through numpy no count of torch's says that the memory is shared.
        memory = torch.from_numpy(ctx.workspace.numpy()) if ctx.own else ctx.workspace
        return memory.view(4, -1), None, None, None


class CachedWorkspace(TrainingModel):
    """Several parameters whose gradients are written one after the other into one workspace."""

    def __init__(self, make: Callable[[int, torch.dtype], Tensor], count: int = 5) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(4, _NUMEL // 4)) for _ in range(count)
        )
        self.make = make
        self.workspace: Tensor | None = None

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        return tuple(draw.normal(4, _NUMEL // 4) for _ in self.weights)

    def forward(self, *coefficients: Tensor) -> Tensor:
        if self.workspace is None:
            self.workspace = self.make(_NUMEL, coefficients[0].dtype).view(4, -1)
        own = self.make is _numpy_workspace
        dot: Any = _Dot.apply
        loss = torch.zeros(())
        for weight, c in zip(self.weights, coefficients, strict=True):
            loss = loss + dot(weight, c, self.workspace, own).float()
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


# --- hooks beside DeepSpeed's ---------------------------------------------------------------------


def _hook(param: Any, hook: Callable[[Tensor], None]) -> None:
    param.register_post_accumulate_grad_hook(hook)


def _double(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2.0)


def _replace(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


def _double_second_first(model: TrainingModel) -> None:
    """Hooks that run before DeepSpeed's."""
    for name, param in model.named_parameters():
        if name.startswith("second"):
            _hook(param, _double)


def _hooked(hook: Callable[[Tensor], None], limits: tuple[int, int], run: Run) -> None:
    """Hooks that run after DeepSpeed's, on every second parameter."""
    large, waiting = pending.LARGE_BYTES, pending.PENDING_BYTES
    pending.LARGE_BYTES, pending.PENDING_BYTES = limits
    try:
        for i, param in enumerate(run.model.parameters()):
            if i % 2 == 0:
                _hook(param, hook)
        for step in range(run.case.steps):
            run.step(step)
            for name, param in run.model.named_parameters():
                run.record(f"step {step} {name} has a gradient", param.grad is not None)
    finally:
        pending.LARGE_BYTES, pending.PENDING_BYTES = large, waiting


def _read(limits: tuple[int, int], run: Run) -> None:
    """What a hook after DeepSpeed's finds in param.grad."""
    names = {id(param): name for name, param in run.model.named_parameters()}
    seen = 0

    def read(param: Tensor) -> None:
        nonlocal seen
        seen += 1
        run.record(f"hook {seen} {names[id(param)]}", param.grad)

    _hooked(read, limits, run)


_LIMITS = {"waiting": (1 << 22, 1 << 25), "large": (40, 1 << 25), "full": (1 << 22, 100)}


def _hook_cases() -> Iterator[Case]:
    for name, limits in _LIMITS.items():
        yield Case(f"hook_reads_{name}", Mlp, BF16, drive=partial(_read, limits))
        yield Case(
            f"hook_changes_{name}",
            Mlp,
            merged(BF16, gas(2)),
            drive=partial(_hooked, _double, limits),
        )
        yield Case(f"hook_replaces_{name}", Mlp, drive=partial(_hooked, _replace, limits))
        yield Case(
            f"hook_changes_a_shared_gradient_{name}",
            SharedGradients,
            optimizer=sgd,
            drive=partial(_hooked, _double, limits),
        )


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
        "shared_gradients_changed_before",
        SharedGradients,
        optimizer=sgd,
        prepare=_double_second_first,
        core=True,
    ),
    *_hook_cases(),
]


def _on_other_paths() -> Iterator[Case]:
    for case in BASIC:
        for suffix, options in (
            ("reduce_scatter", {"reduce_scatter": True}),
            ("not_contiguous", {"reduce_scatter": True, "contiguous_gradients": False}),
        ):
            yield replace(
                case,
                name=f"{case.name}__{suffix}",
                config=merged(case.config, zero(**options)),
                full_worlds=(2, 3),
                core_worlds=(1,),
            )


CASES: list[Case] = [*BASIC, *_on_other_paths()]
