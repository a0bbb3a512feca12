"""Checks of what z3ext says about a step that is skipped."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .case import BASE_CONFIG, BF16, FP16, FP16_STATIC, Check, gas, merged, sgd, zero
from .checks_fingerprint import messages
from .models import Draw, Toy
from .modes_run import seeded

#: The poisoned one is p1, whose middle element is number 10: [2, 2] of its shape.
_SHAPES = [(3, 5), (5, 4), (7,)]
_NAME, _INDEX = "p1", (2, 2)


@dataclasses.dataclass
class _Seen:
    """What one training left, on one rank."""

    after: list[Any] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)
    skipped: list[bool] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    given: list[Any] = dataclasses.field(default_factory=list)
    errors: list[Any] = dataclasses.field(default_factory=list)
    status: Any = None


def _train(
    config: Mapping[str, Any],
    poison: Callable[[int, int, int], float | None],
    on_nonfinite: Any = "skip",
    steps: int = 3,
    constant: float | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> _Seen:
    """``poison(step, micro, rank)``: the value that is planted, if any."""
    import deepspeed
    import torch

    import z3ext

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    full = merged(BASE_CONFIG, config)
    dtype = torch.float16 if "fp16" in full else torch.bfloat16 if "bf16" in full else torch.float32
    model = seeded(lambda: Toy(*_SHAPES, poisoned=1, constant=constant))
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=full)
    seen = _Seen()
    if prepare is not None:
        prepare(model)
    try:
        with messages() as records:
            z3ext.patch_deepspeed(
                on_nonfinite=seen.given.append if on_nonfinite == "call" else on_nonfinite
            )
            for step in range(steps):
                seen.scales.append(float(engine.optimizer.loss_scale))
                for micro in range(full["gradient_accumulation_steps"]):
                    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
                    draw = Draw(
                        generator, dtype, step, micro, rank, world, poison(step, micro, rank)
                    )
                    engine.backward(engine(*model.batch(draw)))
                    try:
                        engine.step()
                    except z3ext.NonFiniteGradientError as error:
                        seen.errors.append(error)
                seen.skipped.append(bool(engine.optimizer.overflow))
                seen.after.append(z3ext.last_overflow(engine))
            seen.scales.append(float(engine.optimizer.loss_scale))
            seen.status = z3ext.status(engine)
            seen.lines = [r.getMessage() for r in records if "skipped" in r.getMessage()]
    finally:
        z3ext.unpatch_deepspeed()
        engine.destroy()
    return seen


def _line_problems(seen: _Seen, wanted: list[str]) -> list[str]:
    import torch

    expected = wanted if torch.distributed.get_rank() == 0 else []
    return [] if seen.lines == expected else [f"logged {seen.lines}, expected {expected}"]


_DTYPES: dict[str, dict[str, Any]] = {"fp16": FP16, "bf16": BF16, "fp32": {}}
_PATHS = {
    "all_reduce": zero(reduce_scatter=False),
    "reduce_scatter": zero(reduce_scatter=True),
    "not_contiguous": zero(reduce_scatter=True, contiguous_gradients=False),
}


def _planted(dtype: str, world: int) -> list[str]:
    """An inf or a nan of the last rank in the second micro-step of the second step."""
    problems: list[str] = []
    values = {"inf": math.inf, "nan": math.nan}
    sub_groups = (1_000_000_000, 10)
    for path, kind, size in itertools.product(_PATHS, values, sub_groups):

        def poison(step: int, micro: int, rank: int, value: float = values[kind]) -> float | None:
            return value if (step, micro, rank) == (1, 1, world - 1) else None

        config = merged(_DTYPES[dtype], gas(3), _PATHS[path], zero(sub_group_size=size))
        seen = _train(config, poison)
        found = [] if seen.skipped == [False, True, False] else [f"skipped {seen.skipped}"]
        scales = (seen.scales[1], seen.scales[2]) if dtype == "fp16" else None
        expected = {
            "step": 2,
            "parameter": _NAME,
            "index": _INDEX,
            "infs": int(kind == "inf"),
            "nans": int(kind == "nan"),
            "parameters": 1,
            "ranks": (world - 1,),
            "micro_step": 1,
            "loss_scale": scales,
        }
        if seen.after[0] is not None or seen.after[1] != seen.after[2]:
            found.append(f"last_overflow {seen.after}")
        if dataclasses.asdict(seen.after[1]) != expected:
            found.append(f"{seen.after[1]!r}, expected {expected}")
        scale = "; loss scale {:g} -> {:g}".format(*scales) if scales else ""
        found += _line_problems(
            seen,
            [
                f"step 2 skipped: 1 {kind} in the gradient of {_NAME}, first at {list(_INDEX)}; "
                f"from rank {world - 1}, micro-step 1{scale}"
            ],
        )
        if (seen.status.steps, seen.status.skipped) != (3, 1):
            found.append(f"counted {seen.status}")
        problems += [f"{path} {kind} {size}: {problem}" for problem in found]
    return problems


def _only_after_the_sum(world: int) -> list[str]:
    """Two micro-steps of 40,000 each are finite in fp16, and their sum is not."""
    problems: list[str] = []
    for path, options in _PATHS.items():
        config = merged(FP16_STATIC, gas(2), options)
        # 40,000 = constant * scale / micro-steps.
        seen = _train(config, lambda *_: None, constant=40_000 * 2 / 128, steps=1)
        overflow = seen.after[0]
        if overflow is None or overflow.ranks != () or overflow.micro_step is not None:
            problems.append(f"{path}: {overflow!r}")
            continue
        (*_, last) = _SHAPES
        expected = ("p2", (0,), math.prod(last), 0, 3)
        found = (
            *(overflow.parameter, overflow.index),
            *(overflow.infs, overflow.nans, overflow.parameters),
        )
        if found != expected:
            problems.append(f"{path}: {found}, expected {expected}")
        problems += _line_problems(
            seen,
            [
                "step 1 skipped: 7 inf in the gradient of p2, first at [0] (and in 2 more "
                "parameters); only after the sum: every rank's own gradients are finite; "
                "loss scale 128 -> 128"
            ],
        )
    return problems


def _on_every_rank(world: int) -> list[str]:
    seen = _train(FP16_STATIC, lambda step, _, rank: math.nan if step == 0 else None)
    overflow = seen.after[0]
    wanted = (tuple(range(world)), 0, 0, 1)
    found = (overflow.ranks, overflow.micro_step, overflow.infs, overflow.nans)
    return [] if found == wanted else [f"{found}, expected {wanted}"]


def _filled_by_deepspeed(world: int) -> list[str]:
    """With a hook on a parameter no pack sees the gradients."""

    def prepare(model: Any) -> None:
        model.p0.register_post_accumulate_grad_hook(lambda param: None)

    seen = _train(BF16, lambda step, *_: math.inf if step == 1 else None, prepare=prepare)
    overflow = seen.after[1]
    if overflow is None or overflow.ranks is not None or overflow.parameter != _NAME:
        return [f"{overflow!r}"]
    line = (
        f"step 2 skipped: 1 inf in the gradient of {_NAME}, first at {list(_INDEX)}; the rank is "
        "not known, since DeepSpeed filled the buckets"
    )
    return _line_problems(seen, [line])


def _raises(world: int) -> list[str]:
    """On every rank, with the step skipped: training can go on."""
    import z3ext

    seen = _train(FP16, lambda step, *_: math.inf if step == 1 else None, on_nonfinite="raise")
    if len(seen.errors) != 1 or seen.skipped != [False, True, False]:
        return [f"errors {seen.errors}, skipped {seen.skipped}"]
    (error,) = seen.errors
    wanted = f"z3ext: {seen.after[1]}"
    problems = [] if str(error) == wanted else [f"{error}, expected {wanted}"]
    if not isinstance(error, z3ext.NonFiniteGradientError) or error.overflow != seen.after[1]:
        problems.append(f"{error!r}")
    return problems


def _calls(world: int) -> list[str]:
    seen = _train(BF16, lambda step, *_: math.inf if step % 2 else None, "call", steps=4)
    wanted = [seen.after[1], seen.after[3]]
    steps = [overflow.step for overflow in seen.given]
    return [] if seen.given == wanted and steps == [2, 4] else [f"called with {seen.given}"]


def _many(world: int) -> list[str]:
    """A line for each of the first five, then for every 2^n-th."""
    import torch

    seen = _train(BF16, lambda *_: math.inf, steps=18)
    if torch.distributed.get_rank() != 0:
        return [] if not seen.lines else [f"logged {seen.lines}"]
    steps = [int(line.split()[1]) for line in seen.lines]
    tails = [line.rpartition("micro-step 0")[2] for line in seen.lines]
    wanted = [""] * 5 + [" (8 overflows by now)", " (16 overflows by now)"]
    return [] if (steps, tails) == ([1, 2, 3, 4, 5, 8, 16], wanted) else [f"{seen.lines}"]


def _at_the_minimum(world: int) -> list[str]:
    """Where DeepSpeed gives up by an exception, the line is there before it."""
    import torch

    config = merged(FP16, {"fp16": {"initial_scale_power": 0}})
    try:
        with messages() as records:
            _train(config, lambda *_: math.inf)
    except Exception as error:
        if "already at minimum" not in str(error):
            raise
    else:
        return ["DeepSpeed did not raise: the check is void"]
    lines = [r.getMessage() for r in records if "skipped" in r.getMessage()]
    wanted = f"in the gradient of {_NAME}, first at {list(_INDEX)}; from ranks 0, 1, micro-step 0"
    if torch.distributed.get_rank() != 0:
        return [f"logged {lines}"] if lines else []
    return [] if len(lines) == 1 and wanted in lines[0] else [f"logged {lines}"]


def _check(name: str, run: Callable[[int], list[str]], *worlds: int) -> Check:
    return Check(f"diagnosis_{name}", run, worlds)


CHECKS: list[Check] = [
    *(_check(f"planted_{dtype}", partial(_planted, dtype), 1, 2, 3) for dtype in _DTYPES),
    _check("only_after_the_sum", _only_after_the_sum, 1, 2, 3),
    _check("on_every_rank", _on_every_rank, 2),
    _check("filled_by_deepspeed", _filled_by_deepspeed, 2),
    _check("raises", _raises, 1, 2),
    _check("calls", _calls, 2),
    _check("many", _many, 1, 2),
    _check("at_the_minimum", _at_the_minimum, 2),
]
