"""Names what made a step overflow. Runs when a step is skipped, and costs nothing when none is."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from z3ext._log import log_rank0
from z3ext.nonfinite import NonFinite, count_nonfinite, nonfinite_segments
from z3ext.overflow import NonFiniteGradientError, Overflow

#: Called on every rank with what was found.
Reaction = Callable[[Overflow], None]

_SHOWN = 5  # overflows in one line each, before only every 2^n-th is shown


class Origin(NamedTuple):
    """Where one rank's own gradients, before the sum, were not finite.

    known: False where DeepSpeed's own methods filled a bucket.
    micro_step: the first such micro-step; None when there is none.
    """

    known: bool
    micro_step: int | None


class Found(NamedTuple):
    """What one rank finds in its partitions, and in its own gradients."""

    segments: list[int]
    last: NonFinite | None
    origin: Origin


# By optimizer, not by adapter, so that it stays when it is undone and patched again.
_last: weakref.WeakKeyDictionary[Any, Overflow] = weakref.WeakKeyDictionary()


def last_overflow_of(optimizer: Any) -> Overflow | None:
    """The optimizer's last overflow while z3ext served it."""
    return _last.get(optimizer)


def reaction(on_nonfinite: str | Reaction) -> Reaction:
    """What follows an overflow besides the line in the log.

    Raises:
        ValueError: neither "skip" nor "raise" nor a callable.
    """
    if callable(on_nonfinite):
        return on_nonfinite
    if on_nonfinite == "skip":
        return _skip
    if on_nonfinite == "raise":
        return _raise
    raise ValueError(
        f"z3ext: on_nonfinite is {on_nonfinite!r}; expected 'skip', 'raise' or a callable that "
        "takes a z3ext.Overflow"
    )


def _skip(overflow: Overflow) -> None:
    pass


def _raise(overflow: Overflow) -> None:
    raise NonFiniteGradientError(overflow)


class Diagnosis:
    """Looks into the partitions of one optimizer whose step is skipped.

    Args:
        optimizer: the ZeRO stage 3 optimizer.
        group: its partition group.
        react: called last.
    """

    def __init__(self, optimizer: Any, group: Any, react: Reaction) -> None:
        self._optimizer = optimizer
        self._group = group
        self._react = react
        self._params = list(itertools.chain.from_iterable(optimizer.fp16_groups))
        chunks = (param.partition_numel() for param in self._params)
        bounds = list(itertools.accumulate(chunks, initial=0))
        self._bounds = torch.tensor(bounds, dtype=torch.int64, device="cpu")
        self._count = 0

    def look(self, origin: Origin) -> Found:
        """This rank's part, before DeepSpeed drops the gradients."""
        flat: Tensor = self._optimizer.grad_partitions_flat_buffer
        segments = nonfinite_segments(flat, self._bounds)
        if not segments:
            return Found(segments, None, origin)
        begin, end = self._bounds[segments[-1] :][:2].tolist()
        found = count_nonfinite(flat[begin:end])
        before = dist.get_rank(self._group) * (end - begin)
        return Found(segments, found._replace(element=before + found.element), origin)

    def tell(self, here: Found, step: int, loss_scale_before: float) -> None:
        """Bring the ranks' parts together, write one line on rank 0, and react."""
        everywhere = self._gather(here)
        affected = {segment for found in everywhere for segment in found.segments}
        if not affected:
            return  # a hook of the user's, or another tool, asked for the skip
        worst = max(affected)
        parts = [found.last for found in everywhere if found.segments[-1:] == [worst]]
        seen = [part for part in parts if part is not None]
        ranks = [r for r, found in enumerate(everywhere) if found.origin.micro_step is not None]
        micro_steps = [everywhere[rank].origin.micro_step for rank in ranks]
        known = all(found.origin.known for found in everywhere)
        param = self._params[worst]
        half = self._optimizer.dtype == torch.float16
        overflow = Overflow(
            step=step,
            parameter=self._name(param),
            index=_unravel(min(part.element for part in seen), param.ds_shape),
            infs=sum(part.infs for part in seen),
            nans=sum(part.nans for part in seen),
            parameters=len(affected),
            ranks=tuple(ranks) if known or ranks else None,
            micro_step=min((m for m in micro_steps if m is not None), default=None),
            loss_scale=(loss_scale_before, float(self._optimizer.loss_scale)) if half else None,
        )
        _last[self._optimizer] = overflow
        self._count += 1
        if self._count <= _SHOWN:
            log_rank0(logging.WARNING, str(overflow))
        elif self._count & (self._count - 1) == 0:
            log_rank0(logging.WARNING, f"{overflow} ({self._count} overflows by now)")
        self._react(overflow)

    def _name(self, param: Any) -> str:
        # Not the optimizer's param_names: before 0.18 it has none.
        names = (n for n, p in self._optimizer.module.named_parameters() if p is param)
        return next(names, f"parameter {param.ds_id}")

    def _gather(self, here: Found) -> list[Found]:
        world_size = dist.get_world_size(self._group)
        # A fake group has one process, whatever its world size.
        if world_size == 1 or dist.get_backend(self._group) == "fake":
            return [here]
        everywhere: list[Any] = [None] * world_size
        dist.all_gather_object(everywhere, here, group=self._group)
        return everywhere


def _unravel(element: int, shape: Any) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        element, place = divmod(element, size)
        index.append(place)
    return tuple(reversed(index))
