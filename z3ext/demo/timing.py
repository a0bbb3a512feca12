"""Where a step's time goes: the demo's own adapter to DeepSpeed's internals.

The same measurement serves stock DeepSpeed and z3ext. A clock holds a stack of phases, and time
always counts for the innermost open one, so no time is counted twice and the phases add up to
the whole step. The training loop opens the phases around forward, backward and ``step``; inside
them, methods of the optimizer *instance* open narrower ones.

Only methods that z3ext does not replace are timed. It replaces methods of the optimizer's class
and declines an optimizer whose instance overrides them, so a timer there would change what is
measured. The gradient path is therefore taken from both ends:

* during backward, ``reduce_ready_partitions_and_remove_grads`` (autograd's hook, once for each
  parameter) and ``independent_gradient_partition_epilogue`` enclose all of it;
* ``step`` as a whole counts as gradient path, except for the calls inside it that are something
  else: the update by the wrapped optimizer and the handling of the fp16 parameters. What is
  left is the overflow check, the norm, the loss-scale update, the fp32 gradient and the
  unscaling.

Both include the time that a rank waits for its peers in a collective.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

COMPUTE = "forward and backward"
GRADIENT = "gradient path"
UPDATE = "optimizer update"
REFRESH = "parameter refresh and other"
PHASES = (COMPUTE, GRADIENT, UPDATE, REFRESH)

_TIMED_METHODS = {
    "reduce_ready_partitions_and_remove_grads": GRADIENT,
    "independent_gradient_partition_epilogue": GRADIENT,
    "step": GRADIENT,
    "_partition_all_parameters": REFRESH,
    "zero_grad": REFRESH,
    "_optimizer_step": UPDATE,
    "_reassign_or_swap_out_partitioned_parameters": REFRESH,
    "_release_sub_group": REFRESH,
    "_post_step": REFRESH,
}

_GRADIENT_COLLECTIVES = ("allreduce", "reduce_scatter", "reduce_", "alltoall")


class PhaseClock:
    """Adds up seconds by phase between :meth:`start` and :meth:`stop`.

    Args:
        synchronize: called before every reading of the time, so that work queued on a device
            counts for the phase that queued it; None where work is done when the call returns.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self.running = False
        self._synchronize = synchronize
        self._stack: list[str] = []
        self._seconds: dict[str, float] = {}
        self._since = 0.0

    def start(self) -> None:
        """Sets every phase to zero and opens the outermost one, `REFRESH`."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._stack = [REFRESH]
        if self._synchronize is not None:
            self._synchronize()
        self._since = time.perf_counter()
        self.running = True

    def stop(self) -> dict[str, float]:
        """Ends the measurement and returns the seconds of each phase."""
        self._charge()
        self.running = False
        return self._seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charges the time in the body to ``name``, but for phases opened inside it."""
        if not self.running:
            yield
            return
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def _charge(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
        now = time.perf_counter()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now


def _timed(owner: Any, name: str, clock: PhaseClock, phase: str) -> Callable[..., Any]:
    @functools.wraps(getattr(type(owner), name))
    def call(*args: Any, **kwargs: Any) -> Any:
        # Looked up at each call: whatever is installed on the class is what runs.
        method = getattr(type(owner), name)
        if not clock.running:
            return method(owner, *args, **kwargs)
        with clock.phase(phase):
            return method(owner, *args, **kwargs)

    return call


def time_optimizer(optimizer: Any, clock: PhaseClock) -> None:
    """Puts ``clock`` around the phases inside one ZeRO stage 3 optimizer, for good.

    Raises:
        AttributeError: this version of DeepSpeed has no method of one of the expected names.
    """
    for name, phase in _TIMED_METHODS.items():
        setattr(optimizer, name, _timed(optimizer, name, clock, phase))


def count_collectives(run: Callable[[], None]) -> dict[str, int]:
    """How often each collective was called while ``run()`` ran, by c10d's name for it.

    Every collective passes torch's dispatcher as an op ``c10d::<name>``, whether Python
    (stock) or C++ (z3ext) called it, so the profiler sees both alike. A wrapper around
    ``torch.distributed`` would only see Python's.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {
        event.key.removeprefix("c10d::"): int(event.count)
        for event in profile.key_averages()
        if event.key.startswith("c10d::")
    }


def gradient_collectives(counts: dict[str, int]) -> int:
    """The collectives of the gradient path: reductions, overflow check and norm.

    ZeRO stage 3 fetches parameters by all-gathers, which are the only others in a step.
    """
    return sum(
        count
        for name, count in counts.items()
        if name.lstrip("_").startswith(_GRADIENT_COLLECTIVES)
    )
