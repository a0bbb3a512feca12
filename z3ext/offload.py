"""Partitions in host memory, beside the fp32 gradients on which a CPU optimizer steps.

The sum over the ranks is where the gradients are. What a bucket gave to one run of neighbouring
parameters is measured there and moved at once: not parameter by parameter, and never back.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from z3ext import ops
from z3ext.norms import SegmentNorms
from z3ext.partitions import FlatPartitions, Scaling, Slices


class Run(NamedTuple):
    """Slices that are neighbours in the flat buffer: elements ``[begin, begin + sum(numels))``."""

    begin: int
    numels: list[int]

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def places(self) -> list[int]:
        """Where each slice begins in the flat buffer."""
        return list(itertools.accumulate(self.numels[:-1], initial=self.begin))


def runs_of(slices: Slices) -> list[Run]:
    """The slices, in the order of the flat buffer, in as few runs as there can be."""
    runs: list[Run] = []
    end = -1
    for begin, numel in sorted(zip(slices.dst_offsets, slices.padded_numels, strict=True)):
        if begin != end:
            runs.append(Run(begin, []))
        runs[-1].numels.append(numel)
        end = begin + numel
    return runs


class HostMemory(Protocol):
    """How slices of a reduced bucket come to the flat buffer in host memory."""

    #: Whether ``measured`` is to be called after every ``store``, not for the norms' sake alone.
    measures_always: bool

    def store(
        self, reduced: Tensor, slices: Slices, scaling: Scaling, accumulate: bool
    ) -> Iterator[tuple[Run, Tensor]]:
        """Store the slices as ``Partitions.store``; each run with its values, near the bucket."""
        ...

    def measured(self, run: Run, norms: Tensor) -> None:
        """The norms of a run's slices, on the bucket's device."""
        ...

    def forget(self) -> None:
        """Something else wrote to the flat buffer."""
        ...

    def overflow(self) -> Tensor:
        """Whether the flat buffer holds an inf or a nan: 0-dim bool."""
        ...


class SameMemory:
    """The gradients are in host memory themselves: nothing is moved."""

    measures_always = False

    def __init__(self, flat: Callable[[], Tensor]) -> None:
        self._flat = flat

    def store(
        self, reduced: Tensor, slices: Slices, scaling: Scaling, accumulate: bool
    ) -> Iterator[tuple[Run, Tensor]]:
        flat = self._flat()
        FlatPartitions(flat).store(reduced, slices, scaling, accumulate)
        for run in runs_of(slices):
            yield run, flat[run.begin : run.begin + run.numel]

    def measured(self, run: Run, norms: Tensor) -> None:
        pass

    def forget(self) -> None:
        pass

    def overflow(self) -> Tensor:
        return ops.flat_overflow(self._flat())


class StagedMemory:
    """The gradients are on a device: a run goes over in one transfer, and back to be added to.

    Args:
        flat: the flat buffer, asked for at each use.
        begins: where the partition of each parameter begins in it, ascending.
        device: the buckets'.
        finite: whether all that the flat buffer holds already is known to be finite.
    """

    measures_always = True  # so that the overflow flag needs no read of host memory

    def __init__(
        self,
        flat: Callable[[], Tensor],
        begins: Sequence[int],
        device: torch.device,
        finite: bool,
    ) -> None:
        self._flat = flat
        self._begins = begins
        self._bad: Tensor | None = None  # by parameter; None: host memory is read at every step
        if finite:
            self._bad = torch.zeros(len(begins), dtype=torch.bool, device=device)

    def store(
        self, reduced: Tensor, slices: Slices, scaling: Scaling, accumulate: bool
    ) -> Iterator[tuple[Run, Tensor]]:
        flat = self._flat()
        runs = runs_of(slices)
        total = sum(run.numel for run in runs)
        staging = torch.empty(total, dtype=flat.dtype, device=reduced.device)
        pieces = torch.split(staging, [run.numel for run in runs])
        if accumulate:
            for run, piece in zip(runs, pieces, strict=True):
                piece.copy_(flat[run.begin : run.begin + run.numel], non_blocking=True)
        order = {place: at for at, place in _places(runs)}
        offsets = [order[place] for place in slices.dst_offsets]
        staged = slices._replace(dst_offsets=offsets)
        FlatPartitions(staging).store(reduced, staged, scaling, accumulate)
        for run, piece in zip(runs, pieces, strict=True):
            flat[run.begin : run.begin + run.numel].copy_(piece, non_blocking=True)
            yield run, piece

    def measured(self, run: Run, norms: Tensor) -> None:
        if self._bad is not None:
            first = bisect.bisect_right(self._begins, run.begin) - 1  # past empty partitions
            # A float64 norm of values that are finite in fp32 is finite.
            self._bad.narrow(0, first, len(run.numels)).copy_(norms.isfinite().logical_not())

    def forget(self) -> None:
        self._bad = None

    def overflow(self) -> Tensor:
        return ops.flat_overflow(self._flat()) if self._bad is None else self._bad.any()


def _places(runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
    """Where each slice begins in the staging memory, and in the flat buffer."""
    at = 0
    for run in runs:
        for place, numel in zip(run.places, run.numels, strict=True):
            yield at, place
            at += numel


class OffloadedPartitions:
    """``Partitions`` for an optimizer that steps on the CPU.

    Args:
        memory: how slices come to the flat buffer.
        norms: how segments are measured, on the buckets' device.
        taken: called with where slices begin in the flat buffer and their norms (float64, 0-dim),
            at the last micro-step of an optimizer step; with None for norms at others.
        grads: where each sub-group begins in the flat buffer, and its fp32 gradient.
        at_boundary: whether this is the last micro-step.
    """

    def __init__(
        self,
        memory: HostMemory,
        norms: SegmentNorms,
        taken: Callable[[list[int], Sequence[Tensor] | None], None],
        grads: Sequence[tuple[int, Tensor]],
        at_boundary: bool,
    ) -> None:
        self._memory = memory
        self._norms = norms
        self._taken = taken
        self._grads = grads
        self._at_boundary = at_boundary

    def store(self, reduced: Tensor, slices: Slices, scaling: Scaling, accumulate: bool) -> None:
        for run, values in self._memory.store(reduced, slices, scaling, accumulate):
            norms = None
            if self._at_boundary or self._memory.measures_always:
                bounds = list(itertools.accumulate(run.numels, initial=0))
                segments = torch.tensor(bounds, dtype=torch.int64, device="cpu")
                _, norms = self._norms(values, segments)
                self._memory.measured(run, norms)
            if norms is not None and self._at_boundary:
                self._copy_to_grads(run.begin, values)
                self._taken(run.places, norms.unbind())
            else:
                self._taken(run.places, None)

    def _copy_to_grads(self, begin: int, values: Tensor) -> None:
        """One cast and transfer for what of the values belongs to a sub-group."""
        end = begin + values.numel()
        for first, grad in self._grads:
            low, high = max(begin, first), min(end, first + grad.numel())
            if low < high:
                source = values[low - begin : high - begin]
                if source.device != grad.device:  # cast where it is fast, as DeepSpeed does
                    source = source.to(grad.dtype)
                grad[low - first : high - first].copy_(source, non_blocking=True)
