"""Ranks that differ: one is declined, not patched or patched otherwise, and no rank waits."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

from .case import BASE_CONFIG, BF16, FP16, Check, adamw, merged, zero
from .compare import differences
from .models import Draw, Mlp
from .modes_run import seeded


def _training(rank: int, world: int, config: Any, prepare: Callable[[Any], None]) -> dict[str, Any]:
    """Three steps from fixed seeds; losses, norms, weights and the status that was left."""
    import deepspeed
    import torch

    import z3ext

    from .run import state_records

    model = seeded(Mlp)
    full = merged(BASE_CONFIG, config)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=full)
    records: dict[str, Any] = {}
    dtype = torch.float16 if "fp16" in full else torch.bfloat16
    try:
        prepare(engine)
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * step + rank)
            loss = engine(*model.batch(Draw(generator, dtype, step, 0, rank, world)))
            records[f"loss {step}"] = loss.detach().clone()
            engine.backward(loss)
            engine.step()
            records[f"norm {step}"] = engine.get_global_grad_norm()
        records.update(state_records(engine.optimizer, model))
        records["status"] = z3ext.status(engine)
    finally:
        z3ext.unpatch_deepspeed()
        engine.destroy()
    return records


def _problems(
    config: Any, prepare: Callable[[int, Any], None], reasons: dict[str, str]
) -> list[str]:
    """Against stock, on every rank. reasons: "first" of rank 0 and "others" of the others."""
    import torch

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    stock = _training(rank, world, config, lambda engine: None)
    found = _training(rank, world, config, partial(prepare, rank))
    stock.pop("status")
    status: Any = found.pop("status")
    problems = differences(stock, found)
    wanted = reasons["first" if rank == 0 else "others"]
    if status.served or wanted not in status.reason or status.mode != "stock":
        problems.append(f"expected to be declined because {wanted!r}, got {status}")
    if status.packs:
        problems.append(f"{status.packs} packs by an engine that is not served")
    return problems


def _overridden_on_rank_0(method: str, config: Any, world: int) -> list[str]:
    """A tool changed one method of the optimizer on rank 0 alone."""
    import z3ext

    def prepare(rank: int, engine: Any) -> None:
        z3ext.patch_deepspeed()
        if rank == 0:
            original = getattr(type(engine.optimizer), method)
            setattr(engine.optimizer, method, types.MethodType(original, engine.optimizer))

    reason = f"{method} is overridden on the optimizer instance"
    return _problems(config, prepare, {"first": reason, "others": f"rank 0 declined: {reason}"})


def _modes_differ(world: int) -> list[str]:
    import z3ext

    def prepare(rank: int, engine: Any) -> None:
        z3ext.patch_deepspeed(mode="all_reduce" if rank == 0 else "reduce_scatter")

    # Whoever comes first names the path.
    reason = "where another rank's is"
    return _problems(BF16, prepare, {"first": reason, "others": reason})


def _patched_on_rank_0_alone(disabled: bool, world: int) -> list[str]:
    """The others never answer, so that rank 0 gives up and trains as they do."""
    import os

    import z3ext
    from z3ext import agreement

    def prepare(rank: int, engine: Any) -> None:
        if rank == 0:
            z3ext.patch_deepspeed()
        elif disabled:
            os.environ["Z3EXT_DISABLE"] = "1"
            z3ext.patch_deepspeed()

    patience, agreement.PATIENCE_SECONDS = agreement.PATIENCE_SECONDS, 2.0
    others = "Z3EXT_DISABLE=1" if disabled else "patch_deepspeed()"
    try:
        reasons = {"first": "did not answer within 2 s", "others": others}
        return _problems(FP16, prepare, reasons)
    finally:
        agreement.PATIENCE_SECONDS = patience
        os.environ.pop("Z3EXT_DISABLE", None)


def _status_on_one_rank(world: int) -> list[str]:
    """status() before the first backward decides nothing: rank 0 may ask alone."""
    import deepspeed
    import torch

    import z3ext

    rank = torch.distributed.get_rank()
    model = seeded(Mlp)
    z3ext.patch_deepspeed()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=merged(BASE_CONFIG, BF16)
    )
    problems = []
    try:
        if rank == 0 and not z3ext.status(engine).served:
            problems.append(f"before: {z3ext.status(engine)}")
        generator = torch.Generator().manual_seed(rank)
        engine.backward(engine(*model.batch(Draw(generator, torch.bfloat16, 0, 0, rank, world))))
        engine.step()
        if not z3ext.status(engine).served:
            problems.append(f"after: {z3ext.status(engine)}")
        engine.destroy()
        status = z3ext.status(engine)
        if "destroyed" not in status.reason:
            problems.append(f"of a destroyed engine: {status}")
    finally:
        z3ext.unpatch_deepspeed()
        engine.destroy()
    return problems


def _check(name: str, run: Callable[[int], list[str]], *worlds: int) -> Check:
    return Check(f"agreement_{name}", run, worlds)


_SCATTERED = zero(reduce_scatter=True)

CHECKS: list[Check] = [
    _check("norms_overridden", partial(_overridden_on_rank_0, "_get_norm_groups", BF16), 2, 3),
    _check("overflow_overridden", partial(_overridden_on_rank_0, "has_overflow", FP16), 2),
    _check(
        "overridden_scattered",
        partial(_overridden_on_rank_0, "_get_norm_groups", merged(BF16, _SCATTERED)),
        2,
    ),
    _check("modes_differ", _modes_differ, 2),
    _check("patched_on_one", partial(_patched_on_rank_0_alone, False), 2, 3),
    _check("disabled_on_others", partial(_patched_on_rank_0_alone, True), 2),
    _check("status_on_one", _status_on_one_rank, 1, 2),
]
