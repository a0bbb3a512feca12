"""One rank of the demo: trains twice, times both engines in turn, compares every bit.

Started by `z3ext.demo.ranks`, once for each rank, with the usual RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT in the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from tqdm import tqdm

import z3ext
from z3ext.demo import timing
from z3ext.demo.corpus import Corpus, load_corpus, masked_batch
from z3ext.demo.model import (
    BATCH,
    LENGTH,
    build_engine,
    master_weights,
    parameter_counts,
    prepare_accelerator,
)
from z3ext.demo.results import Comparison, DemoResult, Side

EXIT_DECLINED = 3  # z3ext doesn't serve this engine; the reason is in the result file

_SEED = 20240229
_STEPS_PER_BLOCK = 5  # of the timing; after the first, every second one with the phase clock on
_T = TypeVar("_T")


class Declined(Exception):
    """z3ext left the engine to stock DeepSpeed; the message is its reason."""


@dataclass(frozen=True)
class _Step:
    """What one rank saw in one step. ``phases`` is empty where the clock was off."""

    loss: float
    norm: float
    loss_scale: float
    skipped: bool
    seconds: float
    phases: dict[str, float]


@dataclass
class _Run:
    """One engine, how to install what it is trained with, and its steps so far."""

    name: str
    install: Callable[[], AbstractContextManager[Any]]
    clock: timing.PhaseClock
    engine: Any = None
    steps: list[_Step] = field(default_factory=list)

    def step(self, corpus: Corpus, device: torch.device, clocked: bool = False) -> None:
        """One training step; its data depends on the rank and the step's number only."""
        seed = (_SEED + len(self.steps)) * dist.get_world_size() + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        inputs, labels = masked_batch(corpus, BATCH, LENGTH, generator)
        inputs, labels = inputs.to(device), labels.to(device)
        skipped_before = int(self.engine.skipped_steps)
        _synchronize(device)
        started = time.perf_counter()
        if clocked:
            self.clock.start()
        with self.clock.phase(timing.COMPUTE):
            loss = self.engine(input_ids=inputs, labels=labels).loss
            self.engine.backward(loss)
        self.engine.step()
        _synchronize(device)
        phases = self.clock.stop() if clocked else {}
        seconds = time.perf_counter() - started
        self.steps.append(
            _Step(
                loss=loss.item(),
                norm=float(self.engine.get_global_grad_norm()),
                loss_scale=float(self.engine.optimizer.loss_scale),
                skipped=int(self.engine.skipped_steps) > skipped_before,
                seconds=seconds,
                phases=phases,
            )
        )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gather(value: _T) -> list[_T]:
    """``value`` of every rank, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _train(run: _Run, steps: int, corpus: Corpus, device: torch.device, bar: tqdm[Any]) -> None:
    with run.install():
        run.engine = build_engine(_SEED, device)
        timing.time_optimizer(run.engine.optimizer, run.clock)
        for _ in range(steps):
            run.step(corpus, device)
            bar.set_postfix_str(f"rank 0's loss {run.steps[-1].loss:.3f}", refresh=False)
            bar.update()
            if run.name == "z3ext" and len(run.steps) == 1:
                _require_served(run.engine)


def _require_served(engine: Any) -> None:
    refusals = [reason for served, reason in _gather(_service(engine)) if not served]
    if refusals:
        raise Declined(refusals[0])


def _service(engine: Any) -> tuple[bool, str]:
    status = z3ext.status(engine)
    return bool(status.served), str(status.reason)


def _time_in_turn(
    runs: Sequence[_Run], rounds: int, corpus: Corpus, device: torch.device, bar: tqdm[Any]
) -> list[int]:
    """Short blocks of both sides in turn, so that a noisy machine disturbs both alike.

    Every second round goes the other way round. Returns the numbers, from 0, of the timed steps:
    all but the first of each block, which pays for the change of sides.
    """
    timed: list[int] = []
    for number in range(rounds):
        for run in runs if number % 2 == 0 else runs[::-1]:
            with run.install():
                dist.barrier()
                for index in range(_STEPS_PER_BLOCK):
                    run.step(corpus, device, clocked=index % 2 == 1)
                    bar.update()
        last = len(runs[0].steps)
        timed += range(last - _STEPS_PER_BLOCK + 1, last)
    return timed


def _profile(
    run: _Run, corpus: Corpus, device: torch.device
) -> tuple[dict[str, int], dict[str, Any]]:
    """``(collectives, status)`` of one more step; the status is "declined" outside the patch."""
    with run.install():
        collectives = timing.count_collectives(lambda: run.step(corpus, device))
        return collectives, dataclasses.asdict(z3ext.status(run.engine))


def _compare(runs: Sequence[_Run]) -> Comparison:
    """Bit for bit: floats by their hexadecimal form, which tells -0.0 from 0.0."""
    quantities: dict[str, Callable[[_Step], str]] = {
        "loss": lambda step: step.loss.hex(),
        "gradient norm": lambda step: step.norm.hex(),
        "loss scale": lambda step: f"{step.loss_scale.hex()} {step.skipped}",
    }
    here: dict[str, int | None] = {}
    for name, bits in quantities.items():
        pairs = zip(*(map(bits, run.steps) for run in runs), strict=True)
        here[name] = next((n for n, (a, b) in enumerate(pairs, start=1) if a != b), None)
    weights = zip(*(master_weights(run.engine) for run in runs), strict=True)
    different = sum(
        int((a.view(torch.int32) != b.view(torch.int32)).sum().item()) for a, b in weights
    )
    everywhere = _gather((here, different))
    return Comparison(
        steps=len(runs[0].steps),
        first_different={
            name: min(
                (n for found, _ in everywhere if (n := found[name]) is not None), default=None
            )
            for name in quantities
        },
        different_weights=sum(count for _, count in everywhere),
    )


def _middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


def _side(run: _Run, steps: int, timed: Sequence[int], collectives: dict[str, int]) -> Side:
    losses = _gather([step.loss for step in run.steps[:steps]])
    measured = [run.steps[number] for number in timed]
    # A skipped step ends before the update; the median is over whole steps if there are any.
    measured = [step for step in measured if not step.skipped] or measured
    plain = [step.seconds for step in measured if not step.phases]
    clocked = [step.phases for step in measured if step.phases]
    trained = run.steps[:steps]
    return Side(
        losses=[statistics.fmean(values) for values in zip(*losses, strict=True)],
        norms=[step.norm for step in trained],
        loss_scales=[step.loss_scale for step in trained],
        skipped=[number for number, step in enumerate(trained, start=1) if step.skipped],
        samples_per_second=BATCH * dist.get_world_size() / statistics.median(plain),
        phases_ms={
            name: 1e3 * statistics.median(phases[name] for phases in clocked)
            for name in timing.PHASES
        },
        gradient_half_ms=_middle_half([1e3 * phases[timing.GRADIENT] for phases in clocked]),
        collectives=collectives,
        gradient_collectives=timing.gradient_collectives(collectives),
    )


def run_demo(steps: int, rounds: int, device: torch.device, progress: Any) -> DemoResult:
    """Trains, times and compares; every rank of the initialised process group calls it.

    Raises:
        Declined: z3ext doesn't serve the engine.
    """
    started = time.perf_counter()
    corpus = load_corpus(dist.get_rank(), dist.get_world_size())
    synchronize = None if device.type == "cpu" else lambda: _synchronize(device)
    stock = _Run("stock", nullcontext, timing.PhaseClock(synchronize))
    served = _Run("z3ext", z3ext.patch_deepspeed, timing.PhaseClock(synchronize))
    runs = (stock, served)

    def progress_bar(title: str, total: int) -> tqdm[Any]:
        return tqdm(
            desc=f"{title:<22}", total=total, file=progress, disable=progress is None, unit="step"
        )

    for run, title in zip(runs, ("training, stock", "training, z3ext"), strict=True):
        with progress_bar(title, steps) as bar:
            _train(run, steps, corpus, device, bar)
    with progress_bar("timing, both in turn", 2 * rounds * _STEPS_PER_BLOCK) as bar:
        timed = _time_in_turn(runs, rounds, corpus, device, bar)
    profiles = [_profile(run, corpus, device) for run in runs]
    sides = [
        _side(run, steps, timed, collectives)
        for run, (collectives, _) in zip(runs, profiles, strict=True)
    ]
    shares = _gather((corpus.files, corpus.text.numel()))
    tensors, parameters = parameter_counts(stock.engine)
    return DemoResult(
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        backend=str(dist.get_backend()),
        ranks=dist.get_world_size(),
        files=sum(files for files, _ in shares),
        text_bytes=sum(size for _, size in shares),
        tensors=tensors,
        parameters=parameters,
        steps=steps,
        batch=BATCH,
        length=LENGTH,
        stock=sides[0],
        z3ext=sides[1],
        comparison=_compare(runs),
        status=profiles[-1][1],
        seconds=time.perf_counter() - started,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--progress-fd", type=int)
    options = parser.parse_args(arguments)
    progress = None
    if options.progress_fd is not None:
        progress = os.fdopen(options.progress_fd, "w", encoding="utf-8", errors="replace")

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
    prepare_accelerator(device)
    deepspeed.init_distributed("gloo" if device.type == "cpu" else "nccl")
    try:
        result = run_demo(options.steps, options.rounds, device, progress)
    except Declined as declined:
        if dist.get_rank() == 0:
            options.result.write_text(str(declined), encoding="utf-8")
        return EXIT_DECLINED
    if dist.get_rank() == 0:
        result.save(options.result)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
