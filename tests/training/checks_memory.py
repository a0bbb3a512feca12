"""Peak memory of backward and of the step, against stock's in the same run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .case import BASE_CONFIG, BF16, FP16, Check, gas, merged, sgd, zero
from .models import Draw, Mlp
from .modes_run import seeded

#: Bytes that may wait in this check; the models' gradients are several times that.
LIMIT = 1 << 20
#: Small tensors: the padded scalars, tables, flags.
SLACK = 64 << 10

_MODEL = partial(Mlp, 500, 510, 490, 520, 500, 30, 1)


def _peak(work: Callable[[], object]) -> int:
    """The most bytes that the work held at a time, of those that torch gave it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        work()
    events = [e for e in taken.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _peaks(config: Any, patched: bool, world: int) -> dict[str, int]:
    """By phase and step, the peak of an engine; the first steps know no plan yet."""
    import deepspeed
    import torch

    import z3ext

    rank = torch.distributed.get_rank()
    model = seeded(_MODEL)
    full = merged(BASE_CONFIG, zero(reduce_bucket_size=600_000), config)
    dtype = torch.float16 if "fp16" in full else torch.bfloat16
    if patched:
        z3ext.patch_deepspeed()
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=full)
    peaks = {}
    try:
        for step in range(3):
            for micro in range(full["gradient_accumulation_steps"]):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                loss = engine(*model.batch(Draw(generator, dtype, step, micro, rank, world)))
                peaks[f"backward {step} {micro}"] = _peak(partial(engine.backward, loss))
                peaks[f"step {step} {micro}"] = _peak(engine.step)
                del loss
        if patched and not z3ext.status(engine).served:
            raise AssertionError(f"not served: {z3ext.status(engine)}")
    finally:
        z3ext.unpatch_deepspeed()
        engine.destroy()
    return peaks


def _memory(config: Any, world: int) -> list[str]:
    """Backward: at most stock's and what may wait. The step: below stock's, where it does anything.

    SGD allocates nothing, so that the optimizer's own temporaries hide nothing.
    """
    from z3ext import pending

    for patched in (False, True):
        _peaks(config, patched, world)  # what a process allocates once
    stock = _peaks(config, False, world)
    before = pending.PENDING_BYTES, pending.LARGE_BYTES
    pending.PENDING_BYTES, pending.LARGE_BYTES = LIMIT, LIMIT
    try:
        found = _peaks(config, True, world)
    finally:
        pending.PENDING_BYTES, pending.LARGE_BYTES = before
    problems = []
    for name, most in stock.items():
        allowed = _allowed(name, most)
        print(f"memory, {name}: stock {most}, z3ext {found[name]}, allowed {allowed}")
        if found[name] > allowed:
            problems.append(f"{name}: {found[name]} bytes, stock {most}, allowed {allowed}")
    return problems


def _allowed(phase: str, stock: int) -> int:
    if phase.startswith("backward"):
        return stock + SLACK + LIMIT
    return stock - SLACK if stock > 2 * SLACK else stock


def _check(name: str, config: Any) -> Check:
    return Check(f"memory_{name}", partial(_memory, config), (1, 2, 3))


CHECKS: list[Check] = [
    _check("all_reduce_bf16", merged(BF16, gas(2))),
    _check("all_reduce_fp16", FP16),
    _check("reduce_scatter_bf16", merged(BF16, gas(2), zero(reduce_scatter=True))),
    _check("reduce_scatter_fp16", merged(FP16, zero(reduce_scatter=True))),
    _check(
        "not_contiguous_bf16",
        merged(BF16, zero(reduce_scatter=True, contiguous_gradients=False)),
    ),
]
