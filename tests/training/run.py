"""One training of a case: builds the engine, drives it and records what it did, bit for bit."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import z3ext

from . import features
from .case import Case
from .compare import differences
from .models import Draw, TrainingModel


def derived_seed(*parts: object) -> int:
    """A 63-bit seed out of the parts, the same in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Patcher:
    """Switches z3ext on and off; does nothing in the stock run."""

    def __init__(self, active: bool) -> None:
        self.active = active
        self._handle: Any = None

    def on(self) -> None:
        if self.active and self._handle is None:
            self._handle = z3ext.patch_deepspeed()
            if not z3ext.is_patched():
                raise AssertionError("patch_deepspeed() returned but is_patched() is False")

    def off(self) -> None:
        if self._handle is not None:
            self._handle.undo()
            self._handle = None
            if z3ext.is_patched():
                raise AssertionError("undo() returned but is_patched() is True")


def _own_part(value: Any, flat: Tensor, offset: int, real: int) -> Any:
    """A parameter's part of an optimizer state that is laid out like the flat partition."""
    if not isinstance(value, Tensor):
        return value
    part = value.narrow(0, offset, real) if value.shape == flat.shape else value
    return part.detach().clone()


def state_records(optimizer: Any, model: torch.nn.Module) -> dict[str, Any]:
    """This rank's part of every weight and optimizer state; the padding holds anything."""
    records: dict[str, Any] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for group_index, group in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[group_index]
        state = optimizer.optimizer.state.get(flat, {})
        for param in group:
            _, offset, numel = optimizer.grad_position[optimizer.get_param_id(param)]
            start = dist.get_rank(param.ds_process_group) * numel
            real = max(0, min(numel, param.ds_numel - start))
            name = names[id(param)]
            records[f"{name} fp32"] = flat.narrow(0, offset, real).detach().clone()
            records[f"{name} model"] = param.ds_tensor.narrow(0, 0, real).detach().clone()
            for key, value in state.items():
                records[f"{name} {key}"] = _own_part(value, flat, offset, real)
    return records


class Run:
    """A case's model and engine with the records taken so far."""

    def __init__(
        self, case: Case, rank: int, world: int, seed: int, scratch: Path, patched: bool
    ) -> None:
        self.case = case
        self.rank = rank
        self.world = world
        self.seed = seed
        self.scratch = scratch
        self.patched = patched
        self.patcher = Patcher(patched)
        self.records: dict[str, Any] = {}
        self.at_close: list[Callable[[], None]] = []
        torch.manual_seed(derived_seed(seed, case.name, "weights"))
        self.model: TrainingModel = case.model()
        if case.prepare is not None:
            case.prepare(self.model)
        if patched and not case.patched_by_drive:
            self.patcher.on()
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=case.optimizer(self.model), config=case.full_config
        )
        self.optimizer = self.engine.optimizer

    def record(self, name: str, value: Any) -> None:
        if name in self.records:
            raise KeyError(f"record {name!r} was taken already")
        self.records[name] = value.detach().clone() if isinstance(value, Tensor) else value

    def batch(self, step: int, micro: int = 0) -> tuple[Any, ...]:
        """The inputs of one micro-batch; they differ by rank, step and micro."""
        generator = torch.Generator().manual_seed(
            derived_seed(self.seed, self.case.name, self.rank, step, micro)
        )
        hits = [p for p in self.case.poisons if p.hits(step, micro, self.rank, self.world)]
        return self.model.batch(
            Draw(
                generator=generator,
                dtype=self.case.dtype,
                step=step,
                micro=micro,
                rank=self.rank,
                world=self.world,
                poison=hits[0].value if hits else None,
            )
        )

    def forward_backward(self, step: int, micro: int = 0) -> None:
        loss = self.engine(*self.batch(step, micro))
        self.record(f"step {step} micro {micro} loss", loss)
        self.engine.backward(loss)

    def step(self, step: int) -> None:
        """All micro-batches of one step, each with its engine.step()."""
        for micro in range(self.case.micros):
            self.forward_backward(step, micro)
            self.engine.step()
        self.record_step(step)

    def record_step(self, step: int) -> None:
        """Norm, overflow, scale and the gradient partitions as they are after the step."""
        self.record(f"step {step} grad norm", self.engine.get_global_grad_norm())
        self.record(f"step {step} overflow", self.optimizer.overflow)
        self.record(f"step {step} skipped steps", self.engine.skipped_steps)
        self.record(f"step {step} loss scale", float(self.optimizer.loss_scale))
        self.record(f"step {step} micro_step_id", self.optimizer.micro_step_id)
        buffer = self.optimizer.grad_partitions_flat_buffer
        if buffer is not None:
            self.record(f"step {step} gradient partitions", buffer)

    def record_state(self) -> None:
        """This rank's part of every weight and optimizer state."""
        for name, value in state_records(self.optimizer, self.model).items():
            self.record(f"final {name}", value)

    def close(self) -> None:
        """Undoes the patch, drops the engine and DeepSpeed's process-wide autocast state."""
        try:
            for undo in self.at_close:
                undo()
            self.patcher.off()
        finally:
            # Before 0.17.2 it deletes this memory, also where a config has none.
            name = "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer"
            vars(self.optimizer).setdefault(name, None)
            self.engine.destroy()
            autocast = sys.modules.get("deepspeed.runtime.torch_autocast")  # since 0.17.2
            if autocast is not None:
                vars(autocast).update(TORCH_AUTOCAST_INITIALIZED=False, TORCH_AUTOCAST_DTYPE=None)
            del self.engine, self.optimizer, self.model
            gc.collect()


def status_fields(engine: Any) -> dict[str, Any]:
    """The fields of z3ext.status(engine) that the cases look at."""
    status = z3ext.status(engine)
    counts = ("buckets", "packs", "collectives", "bytes_reduced")
    return {n: getattr(status, n) for n in ("served", "reason", "mode", "note", *counts)}


def status_problems(case: Case, world: int, status: dict[str, Any]) -> list[str]:
    """What in the status contradicts the case's expectation."""
    wanted = status["served"] if case.served is None else case.served
    noted = case.noted
    if (
        not noted
        and status["mode"] == "all_reduce"
        and features.EMPTIES_BUCKETS in features.absent()
    ):
        noted = None
    problems: list[str] = []
    if status["served"] is not wanted:
        problems.append(f"expected served={wanted}, got {status}")
    elif not wanted:
        problems.extend([] if status["reason"] else ["declined without a reason"])
    elif noted is not None and bool(status["note"]) is not noted:
        problems.append(f"expected noted={noted}, got {status}")
    elif noted is False:
        counts = ["buckets", "packs"] + (["collectives", "bytes_reduced"] if world > 1 else [])
        problems.extend(f"served, but {n} is {status[n]}" for n in counts if not status[n] > 0)
        if world == 1 and status["collectives"]:
            problems.append(f"world size 1, but collectives is {status['collectives']}")
    return problems


@contextlib.contextmanager
def _failing_as_stock() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise StockFailure(f"{type(error).__name__}: {error}") from error


_as_it_is = contextlib.nullcontext


class StockFailure(RuntimeError):
    """DeepSpeed itself cannot train the case."""


def run_case(
    case: Case, rank: int, world: int, seed: int, scratch: Path
) -> tuple[list[str], dict[str, Any]]:
    """Trains the case stock, then patched; returns what differs and the patched run's status."""
    taken: list[dict[str, Any]] = []
    status: dict[str, Any] = {}
    void: list[str] = []
    absent = features.absent()
    checked = case.dtype == torch.float16 or features.SKIPS_ANY_DTYPE not in absent
    skips = case.skips if checked else 0
    for patched in (False, True):
        if z3ext.is_patched():
            raise AssertionError("z3ext was left patched by what ran before")
        folder = scratch / ("patched" if patched else "stock")
        with _as_it_is() if patched else _failing_as_stock():
            run = Run(case, rank, world, seed, folder, patched)
        try:
            with _as_it_is() if patched else _failing_as_stock():
                case.drive(run)
            if patched and case.plant is not None:
                case.plant(run)
            if not patched and run.engine.skipped_steps != skips:
                void.append(f"the stock run skipped {run.engine.skipped_steps} steps, not {skips}")
            if patched:
                status = status_fields(run.engine)
            run.record_state()
            taken.append(run.records)
        finally:
            run.close()
    problems = differences(taken[0], taken[1])
    return void + problems + status_problems(case, world, status), status
