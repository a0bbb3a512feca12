"""Checks of the mode that the user asks for, and of what is counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .case import BF16, FP16, Check, adamw, gas, merged, zero
from .checks_fingerprint import messages
from .compare import differences
from .models import Mlp, Toy
from .modes_run import Seen, not_close, seeded, train

# --- the mode ------------------------------------------------------------------------------------


def _status_problems(seen: Seen, mode: str) -> list[str]:
    status = seen.statuses[-1]
    if not status.served or status.mode != mode:
        return [f"expected to be served by {mode}, got {status}"]
    return [] if status.buckets > 0 else ["no bucket was reduced"]


def _line_problems(seen: Seen, wanted: str) -> list[str]:
    import torch

    lines = [line for line in seen.lines if line.startswith("serving")]
    expected = [wanted] if torch.distributed.get_rank() == 0 else []
    return [] if lines == expected else [f"logged {lines}, expected {expected}"]


def _mode_against_the_config(world: int) -> list[str]:
    """Either path in place of the config's: close to stock, and the log says what was asked."""
    problems: list[str] = []
    for mode, other in (("all_reduce", "reduce_scatter"), ("reduce_scatter", "all_reduce")):
        config = merged(zero(reduce_scatter=other == "reduce_scatter"), gas(2))
        stock, seen = (train(seeded(Mlp), config, m) for m in (None, mode))
        found = not_close(stock.records, seen.records, 1e-6) + _status_problems(seen, mode)
        found += _line_problems(
            seen,
            f"serving a ZeRO stage 3 optimizer on the {mode} path, by mode='{mode}' in place of "
            f"the config's {other}, world size {world}",
        )
        problems += [f"{mode}: {problem}" for problem in found]
    return problems


def _mode_in_half_precision(world: int) -> list[str]:
    """fp16 and bf16 gradients sum in another order: finite, and close for their precision."""
    problems: list[str] = []
    for name, dtype, limit in (("fp16", FP16, 1e-2), ("bf16", BF16, 6e-2)):
        for mode, scattered in (("all_reduce", True), ("reduce_scatter", False)):
            config = merged(dtype, zero(reduce_scatter=scattered), gas(2))
            stock, seen = (train(seeded(Mlp), config, m) for m in (None, mode))
            found = not_close(stock.records, seen.records, limit) + _status_problems(seen, mode)
            problems += [f"{name} {mode}: {problem}" for problem in found]
    return problems


def _mode_of_the_config(world: int) -> list[str]:
    """The path that the config asks for anyway, by name and by "auto": stock's bits."""
    problems: list[str] = []
    for path, scattered in (("all_reduce", False), ("reduce_scatter", True)):
        config = zero(reduce_scatter=scattered)
        stock = train(seeded(Mlp), config, None, optimizer=adamw)
        for mode in ("auto", path):
            seen = train(seeded(Mlp), config, mode, optimizer=adamw)
            found = differences(stock.records, seen.records) + _status_problems(seen, path)
            found += _line_problems(
                seen,
                f"serving a ZeRO stage 3 optimizer on the {path} path, world size {world}",
            )
            problems += [f"{path} by {mode!r}: {problem}" for problem in found]
    return problems


def _mode_without_contiguous_gradients(world: int) -> list[str]:
    """An all-reduce has no buffer then: declined with the remedy. A reduce-scatter needs none."""
    problems: list[str] = []
    for scattered in (False, True):
        config = zero(reduce_scatter=scattered, contiguous_gradients=False)
        stock, declined, served = (
            train(seeded(Mlp), config, mode) for mode in (None, "all_reduce", "reduce_scatter")
        )
        status = declined.statuses[-1]
        if status.served or status.mode != "stock" or status.buckets or status.collectives:
            problems.append(f"expected to be declined, got {status}")
        problems += [
            f"the reason {status.reason!r} lacks {piece!r}"
            for piece in ("mode='all_reduce'", '"contiguous_gradients": true')
            if piece not in status.reason
        ]
        problems += differences(stock.records, declined.records)
        problems += _status_problems(served, "reduce_scatter")
        problems += differences(stock.records, served.records)
    return problems


def _mode_unknown(world: int) -> list[str]:
    import z3ext

    problems: list[str] = []
    for mode in ("allreduce", "", "stock"):
        try:
            z3ext.patch_deepspeed(mode=mode)
        except ValueError as error:
            wanted = (f"mode is {mode!r}", "'auto', 'all_reduce', 'reduce_scatter'")
            problems += [f"{error} lacks {piece}" for piece in wanted if piece not in str(error)]
        else:
            problems.append(f"no ValueError for mode={mode!r}")
        if z3ext.is_patched():
            problems.append(f"patched by mode={mode!r}")
            z3ext.unpatch_deepspeed()
    return problems


# --- counts --------------------------------------------------------------------------------------

#: Six gradients of 40 elements, two to a bucket of 100: three buckets whatever their order.
_FORTIES = [(40,)] * 6
_PER_BACKWARD = 3


def _mode_asked_for_again(world: int) -> list[str]:
    """A second call with another mode changes nothing, and says so."""
    import z3ext

    with z3ext.patch_deepspeed(mode="reduce_scatter") as handle:
        with messages() as seen:
            again = z3ext.patch_deepspeed(mode="all_reduce")
            same = z3ext.patch_deepspeed(mode="reduce_scatter")
        problems = [] if again is handle and same is handle else ["another handle"]
    found = [record.getMessage() for record in seen if "mode='all_reduce'" in record.getMessage()]
    return problems + ([] if len(found) == 1 == len(seen) else [f"log lines: {seen}"])


def _count_problems(seen: Seen, world: int, micros: int, bucket_bytes: int) -> list[str]:
    """After step n: its buckets, one collective for each of them, and one for the step."""
    problems: list[str] = []
    for step, status in enumerate(seen.statuses, 1):
        buckets = _PER_BACKWARD * micros * step
        issued = buckets + step if world > 1 else 0
        moved = buckets * bucket_bytes if world > 1 else 0
        found = (status.buckets, status.collectives, status.bytes_reduced)
        if found != (buckets, issued, moved):
            problems.append(f"step {step}: {found}, expected {(buckets, issued, moved)}: {status}")
    return problems


def _collectives(dtype: Mapping[str, Any], world: int) -> list[str]:
    """One more collective a step than buckets, whatever the sub-groups and accumulation."""
    problems: list[str] = []
    size = 2 if dtype else 4
    for scattered, sub_group, micros in itertools.product(
        (False, True), (1_000_000_000, 20), (1, 2)
    ):
        options = zero(reduce_scatter=scattered, reduce_bucket_size=100, sub_group_size=sub_group)
        config = merged(dtype, options, gas(micros))
        seen = train(seeded(lambda: Toy(*_FORTIES)), config, "auto")
        padded = -(-40 // world) * world if scattered else 40
        found = _count_problems(seen, world, micros, 2 * padded * size)
        if (seen.sub_groups > 1) is not (sub_group == 20):
            found.append(f"there are {seen.sub_groups} sub-groups")
        problems += [f"{scattered=} {sub_group=} {micros=}: {problem}" for problem in found]
    return problems


def _collectives_of_skipped_steps(world: int) -> list[str]:
    """A step that an overflow skips has its one collective as well."""
    options = zero(reduce_bucket_size=100, sub_group_size=20)
    seen = train(
        seeded(lambda: Toy(*_FORTIES)), merged(FP16, options), "auto", steps=4, poison_at=1
    )
    found = [seen.records[f"overflow {step}"] for step in range(4)]
    problems = [] if found == [False, True, False, False] else [f"overflows: {found}"]
    return problems + _count_problems(seen, world, 1, 160)


def _check(name: str, run: Callable[[int], list[str]], *worlds: int) -> Check:
    return Check(f"modes_{name}", run, worlds)


CHECKS: list[Check] = [
    _check("against_the_config", _mode_against_the_config, 1, 2, 3),
    _check("in_half_precision", _mode_in_half_precision, 3),
    _check("of_the_config", _mode_of_the_config, 2),
    _check("without_contiguous_gradients", _mode_without_contiguous_gradients, 1, 2),
    _check("unknown", _mode_unknown, 1),
    _check("asked_for_again", _mode_asked_for_again, 1),
    _check("collectives_fp32", partial(_collectives, {}), 1, 2, 3),
    _check("collectives_fp16", partial(_collectives, FP16), 2),
    _check("collectives_bf16", partial(_collectives, BF16), 3),
    _check("collectives_of_skipped_steps", _collectives_of_skipped_steps, 1, 2),
]
