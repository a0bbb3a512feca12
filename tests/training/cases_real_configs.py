"""What real configs turn on beside the gradient path: groups of ranks, ZeRO++, engines that go."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import z3ext

from .case import BF16, FP16, Case, Poison, gas, merged, train, zero
from .models import Draw, Mlp, TrainingModel, mean_square

if TYPE_CHECKING:
    from .run import Run

#: Persistent parameters beside partitioned ones: DeepSpeed gathers the former after each step.
SOME_PERSISTENT: dict[str, Any] = zero(stage3_param_persistence_threshold=20)
#: ZeRO++: a second copy of the weights inside each pair of ranks.
HPZ: dict[str, Any] = zero(zero_hpz_partition_size=2)
QWZ: dict[str, Any] = zero(zero_quantized_weights=True)
#: What the integrations of trainers write, as far as a CPU has it.
AS_TRAINERS_DO: dict[str, Any] = {
    "wall_clock_breakdown": True,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 3},
    },
    "zero_optimization": {
        "overlap_comm": True,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_max_reuse_distance": 100,
        "round_robin_gradients": True,
        "allgather_sequential": True,
    },
}
OFFLOAD_PARAM: dict[str, Any] = zero(offload_param={"device": "cpu", "pin_memory": False})


class Lion(torch.optim.Optimizer):
    """An optimizer that DeepSpeed does not know (Chen et al. 2023)."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                average = state.setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(average.lerp(param.grad, 0.1).sign_(), alpha=-group["lr"])
                average.lerp_(param.grad, 0.01)


def lion(model: TrainingModel) -> torch.optim.Optimizer:
    return Lion([p for p in model.parameters() if p.requires_grad])


class Dropping(TrainingModel):
    """A dropout between two layers: evaluation differs from training, which draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(13, 2)

    def batch(self, draw: Draw) -> tuple[Any, ...]:
        return (draw.normal(3, 7),)

    def forward(self, x: Tensor) -> Tensor:
        return mean_square(self.last(self.dropout(torch.tanh(self.first(x)))))


# --- engines beside the one that Run makes --------------------------------------------------------


def _engine(run: Run, model: TrainingModel, **arguments: Any) -> Any:
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=run.case.optimizer(model),
        **{"config": run.case.full_config, **arguments},
    )
    return engine


def _take(run: Run, model: TrainingModel, **arguments: Any) -> None:
    """Destroys the engine and goes on with another one, for what Run has no argument for."""
    run.engine.destroy()
    run.model = model
    run.engine = _engine(run, model, **arguments)
    run.optimizer = run.engine.optimizer


def _train(run: Run, first: int = 0) -> None:
    for step in range(first, first + run.case.steps):
        run.step(step)


# --- groups of ranks ------------------------------------------------------------------------------


def _reset(module: Any, **values: Any) -> None:
    vars(module).update(values)


def _hpz(run: Run) -> None:
    """DeepSpeed keeps the group of the second partition for the life of the process."""
    from deepspeed.utils import groups

    run.at_close.append(partial(_reset, groups, _ZERO_PARAM_INTRA_PARALLEL_GROUP=None))
    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            run.forward_backward(step, micro)
            params: list[Any] = list(run.model.parameters())
            second = sum(p.ds_secondary_tensor is not None for p in params)
            if not second:
                raise AssertionError("no parameter has a second partition: hpZ is not on")
            run.record(f"step {step} micro {micro} second partitions", second)
            run.engine.step()
        run.record_step(step)


def _ulysses(run: Run) -> None:
    """Sequence parallelism of two ranks, by DeepSpeed's own mpu."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu
    from deepspeed.utils import groups

    mpu.initialize_sequence_parallel(sequence_parallel_size=2)
    none = {"_SEQUENCE_PARALLEL_GROUP": None, "_SEQUENCE_DATA_PARALLEL_GROUP": None}
    run.at_close.append(partial(_reset, mpu, **none))
    run.at_close.append(partial(_reset, groups, mpu=None))
    _take(run, run.case.model(), mpu=mpu)
    run.record("sequence parallel size", run.optimizer.sequence_parallel_size)
    _train(run)


def _mesh(run: Run) -> None:
    """Sequence parallelism of all ranks, by a device mesh."""
    from deepspeed.utils import groups

    run.at_close.append(partial(_reset, groups, mesh_device=None))
    _take(run, run.case.model(), mesh_param=(run.world // 2, 2))
    run.record("sequence parallel size", run.optimizer.sequence_parallel_size)
    _train(run)


def _group_of(sets: list[list[int]]) -> tuple[Any, list[int]]:
    """This rank's of some groups that every rank makes."""
    made = [(dist.new_group(ranks), ranks) for ranks in sets]
    return next((group, ranks) for group, ranks in made if dist.get_rank() in ranks)


def _mpu(size: int) -> SimpleNamespace:
    """A Megatron-like mpu: `size` neighbours share a model, the rest is data parallelism."""
    world = dist.get_world_size()
    blocks = [list(range(first, first + size)) for first in range(0, world, size)]
    model, model_ranks = _group_of(blocks)
    data, data_ranks = _group_of([list(range(first, world, size)) for first in range(size)])
    return SimpleNamespace(
        get_model_parallel_rank=lambda: model_ranks.index(dist.get_rank()),
        get_model_parallel_world_size=lambda: size,
        get_model_parallel_group=lambda: model,
        get_data_parallel_rank=lambda: data_ranks.index(dist.get_rank()),
        get_data_parallel_world_size=lambda: len(data_ranks),
        get_data_parallel_group=lambda: data,
    )


def _model_parallel(size: int, run: Run) -> None:
    """An mpu whose model-parallel groups have `size` ranks; every second parameter is split."""
    from deepspeed.utils import groups

    run.at_close.append(partial(_reset, groups, mpu=None))
    model = run.case.model()
    for param in list(model.parameters())[::2]:
        vars(param)["tensor_model_parallel"] = True
    _take(run, model, mpu=_mpu(size))
    _train(run)


# --- quantised weights ----------------------------------------------------------------------------


class _Quantizer:
    """In place of DeepSpeed's CUDA kernels: symmetric int8, one scale for each group."""

    Symmetric = 0

    def __init__(self) -> None:
        self.quantised = 0

    def quantize(self, param: Tensor, groups: int, bits: int, kind: int) -> tuple[Tensor, Tensor]:
        self.quantised += 1
        rows = param.float().view(groups, -1)
        scales = rows.abs().amax(1).clamp(min=1e-8) / 127
        return (rows / scales.view(groups, 1)).round().to(torch.int8).view(param.shape), scales

    def dequantize(
        self, values: Tensor, scales: Tensor, groups: int, bits: int, kind: int
    ) -> Tensor:
        rows = values.float().view(groups, -1) * scales.view(groups, 1)
        return rows.half().view(values.shape)


def _quantised(run: Run) -> None:
    """DeepSpeed's quantizer is CUDA's only, so the engine of Run is made without."""
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    quantizer = _Quantizer()
    vars(CUDAQuantizer)["group_size_cache"].clear()
    CUDAQuantizer.quantizer_cuda_module = quantizer
    run.at_close.append(partial(setattr, CUDAQuantizer, "quantizer_cuda_module", None))
    _take(run, run.case.model(), config=merged(run.case.full_config, QWZ))
    drive = _hpz if run.optimizer.zero_hpz_partition_size > 1 else _train
    drive(run)
    if not quantizer.quantised:
        raise AssertionError("no weight was quantised: qwZ is not on")
    run.record("quantised weights", quantizer.quantised)


# --- what a user does between the steps -----------------------------------------------------------


def _changed(run: Run, change: Callable[[Any], Any]) -> None:
    """Rank 0 changes every second parameter.

    One at a time: DeepSpeed starts a collective for each parameter and waits for the last of them,
    which on gloo is no promise for the others.
    """
    for param in list(run.model.parameters())[::2]:
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
            if run.rank == 0:
                change(param)


def _gathered(run: Run) -> None:
    """GatheredParameters: reads all, changes some, between the steps and before a step."""
    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            run.forward_backward(step, micro)
            _changed(run, lambda param: param.mul_(0.75))
            run.engine.step()
        run.record_step(step)
        for name, param in run.model.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                run.record(f"step {step} {name} whole", param)
        _changed(run, lambda param: param.add_(0.125))


def _evaluate(run: Run, name: str, step: int) -> None:
    run.engine.eval()
    with torch.no_grad():
        run.record(f"{name} {step} without grad", run.engine(*run.batch(step)))
    run.record(f"{name} {step} with grad, no backward", run.engine(*run.batch(step)))
    run.engine.train()


def _evaluations(run: Run) -> None:
    """Evaluation after each step, between micro-batches and between backward and step."""
    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            run.forward_backward(step, micro)
            if (step, micro) == (1, 0):
                _evaluate(run, "before engine.step()", step)
            run.engine.step()
            if (step, micro) == (2, 0):
                _evaluate(run, "in the window", step)
        run.record_step(step)
        _evaluate(run, "after step", step)


# --- engines that come and go ---------------------------------------------------------------------


def _check_served(run: Run, engine: Any) -> None:
    if run.patched and not z3ext.status(engine).served:
        raise AssertionError(f"not served: {z3ext.status(engine)}")


def _engines_after_destroy(run: Run) -> None:
    """destroy(), another engine on the same model, destroy(), another on a new one."""
    _train(run)
    for k, model in enumerate((run.model, run.case.model())):
        _check_served(run, run.engine)
        _take(run, model)
        _train(run, first=(k + 1) * run.case.steps)


def _two_engines(run: Run) -> None:
    """Two engines in turn, one destroyed before the end."""
    from .run import state_records

    model = run.case.model()
    other = _engine(run, model)
    for step in range(run.case.steps):
        for micro in range(run.case.micros):
            run.forward_backward(step, micro)
            loss = other(*run.batch(step, micro))
            other.backward(loss)
            run.engine.step()
            other.step()
        run.record_step(step)
        run.record(f"other step {step} grad norm", other.get_global_grad_norm())
        run.record(f"other step {step} skipped", other.skipped_steps)
    _check_served(run, other)
    for name, value in state_records(other.optimizer, model).items():
        run.record(f"other final {name}", value)
    other.destroy()
    _train(run, first=run.case.steps)


def _constructed_partitioned(run: Run) -> None:
    """A model made inside deepspeed.zero.Init."""
    with deepspeed.zero.Init(config_dict_or_path=run.case.full_config, dtype=run.case.dtype):
        model = run.case.model()
    _take(run, model)
    _train(run)


def _saving(run: Run) -> None:
    """Exports the 16-bit weights after each step."""
    for step in range(run.case.steps):
        run.step(step)
        saved = run.engine.save_16bit_model(str(run.scratch), f"{step}.pt")
        run.record(f"step {step} saved", saved)
        run.record(f"step {step} rate", run.engine.get_lr()[0])


def _case(name: str, drive: Any, *config: dict[str, Any], **fields: Any) -> Case:
    fields = {"model": Mlp, "full_worlds": (2, 3), **fields}
    return Case(name, config=merged({}, *config), drive=drive, **fields)


_OF_EIGHTS = partial(Mlp, 32, 32, 32, probe=32)
#: Not in DeepSpeed 0.16.
_HAS_ULYSSES = importlib.util.find_spec("deepspeed.runtime.sequence_parallel") is not None
_ULYSSES = _case("ulysses", _ulysses, BF16, gas(2), SOME_PERSISTENT, full_worlds=(2, 4))

CASES: list[Case] = [
    # Groups of ranks.
    _case("hpz", _hpz, BF16, HPZ, gas(2), SOME_PERSISTENT, full_worlds=(2, 4)),
    _case(
        "hpz_frozen_fp16",
        _hpz,
        FP16,
        HPZ,
        SOME_PERSISTENT,
        model=partial(Mlp, frozen=(1,)),
        poisons=(Poison(1, math.inf),),
        skips=1,
        full_worlds=(2, 4),
    ),
    *([_ULYSSES] if _HAS_ULYSSES else []),
    _case("sequence_parallel_mesh", _mesh, BF16, served=False, full_worlds=(2, 4)),
    _case(
        "model_parallel_of_one",
        partial(_model_parallel, 1),
        FP16,
        gas(2),
        SOME_PERSISTENT,
    ),
    _case(
        "model_parallel_of_two",
        partial(_model_parallel, 2),
        BF16,
        gas(2),
        served=False,
        full_worlds=(2, 4),
    ),
    # Quantised weights: a partition has to be a multiple of 8 elements.
    _case("qwz", _quantised, BF16, gas(2), SOME_PERSISTENT, model=_OF_EIGHTS, full_worlds=(2,)),
    _case(
        "hpz_and_qwz",
        _quantised,
        BF16,
        HPZ,
        gas(2),
        SOME_PERSISTENT,
        model=_OF_EIGHTS,
        full_worlds=(4,),
        core=True,
        core_worlds=(),
    ),
    # Optimizers, configs, ways to make the model.
    _case("third_party_optimizer", train, BF16, gas(2), optimizer=lion),
    _case("trainers_config", _saving, BF16, gas(2), AS_TRAINERS_DO),
    _case("offload_param", train, BF16, gas(2), OFFLOAD_PARAM, SOME_PERSISTENT),
    _case("zero_init", _constructed_partitioned, BF16, gas(2), SOME_PERSISTENT),
    # Between the steps.
    _case("gathered_parameters", _gathered, BF16, gas(2), SOME_PERSISTENT),
    _case("evaluation_between_steps", _evaluations, BF16, gas(2), SOME_PERSISTENT, model=Dropping),
    # Engines that come and go.
    _case("engines_after_destroy", _engines_after_destroy, BF16, gas(2), steps=2),
    _case("two_engines_in_turn", _two_engines, FP16, gas(2), steps=2),
]
