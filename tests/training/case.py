"""What one training case is: a model, a config, a way to drive it and what is expected of z3ext."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from . import features
from .models import TrainingModel
from .selection import selected_worlds

if TYPE_CHECKING:
    from .run import Run

EVERY_RANK = -1
LAST_RANK = -2

#: Worlds that run every case, and worlds that run the core ones.
FULL_WORLDS = (1, 2, 3)
CORE_WORLDS = (4,)


@dataclass(frozen=True)
class Poison:
    """One non-finite (or huge) gradient element. rank: a rank, EVERY_RANK or LAST_RANK."""

    step: int
    value: float
    rank: int = LAST_RANK
    micro: int = 0

    def hits(self, step: int, micro: int, rank: int, world: int) -> bool:
        wanted = world - 1 if self.rank == LAST_RANK else self.rank
        return step == self.step and micro == self.micro and wanted in (EVERY_RANK, rank)


def adamw(model: TrainingModel) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, in one group."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.01)


def sgd(model: TrainingModel) -> torch.optim.Optimizer:
    """Plain SGD with lr 1: the weights are minus the sum of the gradients that it saw."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)


def momentum(model: TrainingModel) -> torch.optim.Optimizer:
    """SGD with momentum."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def two_groups(model: TrainingModel) -> torch.optim.Optimizer:
    """AdamW in two groups: matrices with weight decay, vectors with another rate and none."""
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.dim() > 1]
    vectors = [p for p in params if p.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0, "lr": 3e-2},
        ],
        lr=1e-2,
    )


def merged(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of base with the changes merged in, nested mappings key by key."""
    out = copy.deepcopy(dict(base))
    for change in changes:
        for key, value in change.items():
            if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
                out[key] = merged(out[key], value)
            else:
                out[key] = copy.deepcopy(value)
    return out


BASE_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "steps_per_print": 1_000_000,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3,
        "reduce_scatter": False,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_bucket_size": 2_000,
        "stage3_param_persistence_threshold": 0,
    },
}

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
#: A dynamic scale that grows within a test: it starts at 4 and doubles after two good steps.
FP16: dict[str, Any] = {
    "fp16": {"enabled": True, "initial_scale_power": 2, "loss_scale_window": 2, "hysteresis": 1}
}
FP16_STATIC: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 128.0}}


def zero(**options: Any) -> dict[str, Any]:
    """Config changes inside `zero_optimization`."""
    return {"zero_optimization": options}


def gas(steps: int) -> dict[str, Any]:
    """Config change: gradient accumulation steps."""
    return {"gradient_accumulation_steps": steps}


def train(run: Run) -> None:
    """The usual loop: forward, backward and step for every micro-batch."""
    for step in range(run.case.steps):
        run.step(step)


@dataclass(frozen=True)
class Case:
    """One training that stock and z3ext have to agree on bit for bit.

    served: whether z3ext is expected to serve it (False: declined with a reason, None: either).
    noted: the last backward's buckets are left to DeepSpeed, by status(engine).note (None:
    either).
    full_worlds: the world sizes that run it; core_worlds: those that run it too if it is core
    (selection.py says which of them `make test` leaves to `make test-all`).
    patched_by_drive: the drive switches the patch itself (`run.patcher`). min_world: the smallest
    world that makes sense. skips: the steps that the stock run has to skip, so that an overflow
    case cannot pass without an overflow (an older DeepSpeed checks fp16 alone). needs: what of
    features.py a DeepSpeed must have to run it. plant: spoils the patched run, so that the harness
    has to find a difference (its own test). compiles: called before the first case, for what takes
    long.
    """

    name: str
    model: Callable[[], TrainingModel]
    config: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[TrainingModel], torch.optim.Optimizer] = adamw
    drive: Callable[[Run], None] = train
    prepare: Callable[[TrainingModel], None] | None = None
    steps: int = 4
    poisons: tuple[Poison, ...] = ()
    served: bool | None = True
    noted: bool | None = False
    core: bool = False
    patched_by_drive: bool = False
    min_world: int = 1
    full_worlds: tuple[int, ...] = FULL_WORLDS
    core_worlds: tuple[int, ...] = CORE_WORLDS
    skips: int = 0
    needs: str = ""
    plant: Callable[[Run], None] | None = None
    compiles: Callable[[], None] | None = None

    @property
    def full_config(self) -> dict[str, Any]:
        return merged(BASE_CONFIG, self.config)

    @property
    def micros(self) -> int:
        return int(self.full_config["gradient_accumulation_steps"])

    @property
    def dtype(self) -> torch.dtype:
        if self.config.get("fp16", {}).get("enabled"):
            return torch.float16
        return torch.bfloat16 if self.config.get("bf16", {}).get("enabled") else torch.float32

    @property
    def needed(self) -> set[str]:
        """The features of features.py without which it is skipped."""
        zero = self.full_config["zero_optimization"]
        all_reduce = zero["contiguous_gradients"] and not zero["reduce_scatter"]
        # Where a bucket is reduced again and again, so is what overflowed: how often is chance.
        again = {features.EMPTIES_BUCKETS} if self.skips and all_reduce else set[str]()
        return {self.needs, *again} - {""}

    def worlds(self) -> tuple[int, ...]:
        """The world sizes that this case runs at in this session."""
        every = {*self.full_worlds, *(self.core_worlds if self.core else ())}
        every = {world for world in every if world >= self.min_world}
        return tuple(sorted(selected_worlds(self.name, self.core, every)))


def scattered(case: Case) -> Iterator[Case]:
    """A case on the two paths that reduce by reduce-scatter."""
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


@dataclass(frozen=True)
class Check:
    """A function that runs in every rank and returns what is wrong (nothing: the check passed)."""

    name: str
    run: Callable[[int], list[str]]
    at_worlds: tuple[int, ...] = (1,)

    def worlds(self) -> tuple[int, ...]:
        return self.at_worlds
