"""One training by a given mode, with what it left: for checks_modes.py and checks_refresh.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .case import BASE_CONFIG, merged, momentum
from .models import Draw, TrainingModel

STAGE3 = "_DeepSpeedZeroOptimizer_Stage3"
SEED = 20_240


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def _log() -> Iterator[list[str]]:
    """The lines that z3ext logs on this rank."""
    logger, handler = logging.getLogger("z3ext"), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@dataclass
class Seen:
    """What one training left: values by name, the status after each step, the log."""

    records: dict[str, Any] = field(default_factory=dict)
    statuses: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    gathers: list[int] = field(default_factory=list)
    sub_groups: int = 0
    persistent: int = 0


def _gradients(optimizer: Any, model: Any, world: int, rank: int) -> dict[str, Any]:
    """This rank's real part of every gradient partition."""
    partitions = getattr(optimizer, f"{STAGE3}__param_id_to_grad_partition")
    found = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            chunk = -(-param.ds_numel // world)
            real = max(0, min(chunk, param.ds_numel - rank * chunk))
            found[f"{name} gradient"] = partitions[param.ds_id].narrow(0, 0, real).clone()
    return found


def _count_gathers(optimizer: Any, seen: Seen) -> None:
    """Note the all-gathers of each ``_post_step``, as c10d's own operators."""
    from torch.profiler import ProfilerActivity, profile

    original = optimizer._post_step

    def counted(*args: Any) -> None:
        with profile(activities=[ProfilerActivity.CPU]) as taken:
            original(*args)
        names = [event.name for event in taken.events() or ()]
        seen.gathers.append(
            sum(name.startswith("c10d::") and "allgather" in name for name in names)
        )

    optimizer._post_step = counted


def train(
    model: TrainingModel,
    config: Mapping[str, Any],
    mode: str | None,
    *,
    optimizer: Callable[[TrainingModel], Any] = momentum,
    steps: int = 3,
    poison_at: int | None = None,
    refresh: bool = False,
) -> Seen:
    """Train on this rank's own batches, by the given mode or, for None, by DeepSpeed alone."""
    import deepspeed
    import torch

    import z3ext

    from .run import state_records

    seen, full = Seen(), merged(BASE_CONFIG, config)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dtype = torch.float16 if "fp16" in full else torch.bfloat16 if "bf16" in full else torch.float32
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=full)
    zero3 = engine.optimizer
    try:
        with _log() as seen.lines:
            if mode is not None:
                z3ext.patch_deepspeed(mode=mode)
            if refresh:
                _count_gathers(zero3, seen)
            seen.sub_groups = len(zero3.fp16_groups)
            seen.persistent = len(zero3.persistent_parameters)
            for step in range(steps):
                for micro in range(full["gradient_accumulation_steps"]):
                    generator = torch.Generator().manual_seed(SEED + 100 * step + 10 * micro + rank)
                    poison = float("inf") if step == poison_at and rank == world - 1 else None
                    draw = Draw(generator, dtype, step, micro, rank, world, poison)
                    loss = engine(*model.batch(draw))
                    seen.records[f"loss {step} {micro}"] = loss.detach().clone()
                    engine.backward(loss)
                    engine.step()
                gradients = _gradients(zero3, model, world, rank)
                seen.records.update({f"{n} {step}": v for n, v in gradients.items()})
                seen.records[f"overflow {step}"] = bool(zero3.overflow)
                seen.statuses.append(z3ext.status(engine))
                if refresh:
                    params: list[tuple[str, Any]] = list(model.named_parameters())
                    for name, param in params:
                        seen.records[f"{name} after {step}"] = param.data.clone()
                        seen.records[f"{name} state {step}"] = str(param.ds_status)
            seen.records.update(state_records(zero3, model))
    finally:
        z3ext.unpatch_deepspeed()
        engine.destroy()
    return seen


def seeded(make: Callable[[], TrainingModel]) -> TrainingModel:
    import torch

    torch.manual_seed(SEED)
    return make()


def not_close(stock: dict[str, Any], other: dict[str, Any], limit: float) -> list[str]:
    """Tensors apart by more than ``limit`` of their largest magnitude, or not finite."""
    import torch

    problems = [f"{name} is missing" for name in stock.keys() - other.keys()]
    for name, value in stock.items():
        found = other.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(found, torch.Tensor):
            continue
        if not bool(found.isfinite().all()):
            problems.append(f"{name} is not finite")
        elif value.numel() and value.is_floating_point():
            apart = (value.double() - found.double()).abs().max()
            if apart > limit * value.double().abs().max():
                problems.append(f"{name} is {float(apart)} apart from stock's")
    return problems
