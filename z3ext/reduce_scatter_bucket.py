"""A bucket in rank-major order, reduced by one reduce-scatter.

Row r of the bucket has chunk r of every parameter, zero-padded, in the order of the keys: the
layout of DeepSpeed's ``reduce_scatter_coalesced``. So the ranks' orders of arrival may differ.

A gradient's place depends on everything in the bucket, which is known only once it is full. But
buckets repeat from step to step: the plan of a full bucket is used for the next one that begins
with the same parameter, so that gradients go to their rows as they come, in one pass. What really
came is compared with the plan before the sum; where it differs (an unused parameter, another order
of buckets) the rows are laid out anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from z3ext import ops
from z3ext.collectives import SumOverRanks
from z3ext.layout import partition_numel, rank_slice
from z3ext.partitions import Partitions, Scaling, Slices
from z3ext.pending import PendingGradients
from z3ext.reducer import Counters, LocalFlags
from z3ext.streams import BucketStream

_T = TypeVar("_T")


@dataclass(frozen=True)
class RowPlan:
    """Where the chunks of a set of parameters stand in a row; all counts are elements.

    numels, offsets: by key, the parameter's numel and where its chunk begins in a row.
    row_numel: elements of a row.
    src_offsets, dst_offsets, slices: this rank's non-empty slices as ``ops.unpack_`` wants them.
    """

    numels: dict[int, int]
    offsets: dict[int, int]
    row_numel: int
    src_offsets: list[int]
    dst_offsets: list[int]
    slices: list[int]

    def holds(self, keys: Sequence[int], numels: Sequence[int]) -> bool:
        """Whether the plan is for exactly these parameters, in whatever order."""
        if len(keys) != len(self.numels):
            return False
        return all(map(self._numel_is, keys, numels))

    def _numel_is(self, key: int, numel: int) -> bool:
        return self.numels.get(key) == numel


def plan_rows(
    numels: Mapping[int, int], begins: Mapping[int, int], world_size: int, rank: int
) -> RowPlan:
    """Lay out parameters, given by key, in the order of their keys.

    ``begins``: by key, the element of the partition buffer where ``rank``'s slice belongs.
    """
    plan = RowPlan(dict(numels), {}, 0, [], [], [])
    end = 0
    for key in sorted(numels):
        plan.offsets[key] = end
        numel = rank_slice(numels[key], world_size, rank).numel
        if numel:
            plan.src_offsets.append(end)
            plan.dst_offsets.append(begins[key])
            plan.slices.append(numel)
        end += partition_numel(numels[key], world_size)
    return RowPlan(plan.numels, plan.offsets, end, plan.src_offsets, plan.dst_offsets, plan.slices)


@dataclass
class _Contents:
    """What the bucket holds.

    keys, numels: in the order of arrival.
    plan, rows: what gradients are packed by, and the memory of its rows; None before the first
        pack, and where there is no plan.
    sequence: where there is no plan: by key, where the gradient stands in the buffer.
    """

    keys: list[int] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    pending: PendingGradients = field(default_factory=PendingGradients)
    plan: RowPlan | None = None
    rows: Tensor | None = None
    sequence: dict[int, int] = field(default_factory=dict)
    sequence_numel: int = 0

    @property
    def waiting(self) -> list[int]:
        """The keys of the gradients that wait."""
        return self.keys[len(self.keys) - len(self.pending.grads) :]


class ReduceScatterBucket:
    """Rows of chunks, one row for each rank.

    Args:
        over: the process group.
        stream: where the bucket's work runs.
        begins: by key, the element of the partition buffer where this rank's slice belongs.
        counters: shared by all buckets of an engine.
        dtype: what gradients are communicated in: fp16, bf16 or fp32.
    """

    def __init__(
        self,
        over: SumOverRanks,
        stream: BucketStream,
        begins: Mapping[int, int],
        counters: Counters,
        dtype: torch.dtype,
    ) -> None:
        self._over = over
        self._stream = stream
        self._begins = begins
        self._counters = counters
        self._dtype = dtype
        self._plans: dict[int, RowPlan] = {}  # by the key that came first
        self.flags = LocalFlags()
        self.clear()

    def clear(self) -> None:
        self._contents = _Contents()
        self.keys, self.numels = self._contents.keys, self._contents.numels

    def add(self, param: Tensor, grad: Tensor, key: int) -> bool:
        contents = self._contents
        self._stream.note_writer()
        numel = grad.numel()
        contents.keys.append(key)
        contents.numels.append(numel)
        return contents.pending.add(param, grad, numel)

    def pack(self, buffer: Tensor | None, divisors: Sequence[float]) -> None:
        contents = self._contents
        pending = contents.pending
        # Without memory of its own the bucket keeps its gradients until it is full.
        if buffer is None or not pending.grads:
            return
        keys = contents.waiting
        if len(keys) == len(contents.keys):  # the first pack of this bucket
            contents.plan = self._plans.get(keys[0])
        if contents.plan is not None and not _is_planned(contents.plan, keys, pending.grads):
            self._leave_plan(buffer)
        if contents.plan is not None:
            if contents.rows is None:
                contents.rows = self._room(contents.plan, buffer, buffer.device)
            self._pack_rows(keys, pending.grads, contents.plan, contents.rows, divisors)
        else:
            self._pack_sequence(keys, pending.grads, buffer, divisors)
        self._counters.packs += 1
        pending.release()

    def reduce(
        self, buffer: Tensor | None, scaling: Scaling, partitions: Partitions, accumulate: bool
    ) -> None:
        contents = self._contents
        plan = self._plans.get(contents.keys[0])
        if plan is None or not plan.holds(contents.keys, contents.numels):
            numels = dict(zip(contents.keys, contents.numels, strict=True))
            plan = plan_rows(numels, self._begins, self._over.world_size, self._over.rank)
            self._plans[contents.keys[0]] = plan
        rows = self._full_rows(plan, buffer, scaling.divisors)
        with self._stream.active():
            row = rows[self._over.rank * plan.row_numel :][: plan.row_numel]
            if self._over.reduce_scatter_(rows, row):
                self._counters.collectives += 1
                self._counters.bytes_reduced += rows.nbytes
            # Stock leaves the partitions' padding as it is on this path.
            slices = Slices(plan.src_offsets, plan.dst_offsets, plan.slices, plan.slices)
            partitions.store(row, slices, scaling, accumulate)
        self._counters.buckets += 1
        self.clear()

    def _full_rows(self, plan: RowPlan, buffer: Tensor | None, divisors: Sequence[float]) -> Tensor:
        """The bucket in the plan's rows, divided."""
        contents = self._contents
        pending = contents.pending
        keys = contents.waiting
        if len(keys) == len(contents.keys):  # nothing is packed yet
            contents.plan = plan
        if contents.plan is plan:
            device = buffer.device if buffer is not None else pending.grads[0].device
            if contents.rows is None:
                contents.rows = self._room(plan, buffer, device)
            if keys:
                self._pack_rows(keys, pending.grads, plan, contents.rows, divisors)
                self._counters.packs += 1
                pending.release()
            return contents.rows
        memory = _not_none(buffer)
        if contents.plan is not None:  # what came is not what it was packed for
            self._leave_plan(memory)
        self.pack(memory, divisors)
        # As stock does: from one after the other to rows, in memory apart.
        rows = self._room(plan, None, memory.device)
        numels = dict(zip(contents.keys, contents.numels, strict=True))
        packed = [memory[begin : begin + numels[key]] for key, begin in contents.sequence.items()]
        self._pack_rows(list(contents.sequence), packed, plan, rows, ())
        return rows

    # --- packing ----------------------------------------------------------------------------------

    def _pack_rows(
        self,
        keys: Sequence[int],
        grads: Sequence[Tensor],
        plan: RowPlan,
        rows: Tensor,
        divisors: Sequence[float],
    ) -> None:
        offsets = [plan.offsets[key] for key in keys]
        world_size = self._over.world_size
        self._stream.wait_for_writers(grads)
        with self._stream.active():
            flag = self.flags.on(rows.device)
            ops.pack_rows_(grads, offsets, plan.row_numel, world_size, rows, flag, divisors)

    def _pack_sequence(
        self,
        keys: Sequence[int],
        grads: Sequence[Tensor],
        buffer: Tensor,
        divisors: Sequence[float],
    ) -> None:
        contents = self._contents
        numels = (grad.numel() for grad in grads)
        *offsets, end = itertools.accumulate(numels, initial=contents.sequence_numel)
        self._stream.wait_for_writers(grads)
        with self._stream.active():
            ops.pack_(grads, offsets, buffer, self.flags.on(buffer.device), divisors)
        # Only now: a pack that was refused or found no memory can be tried again.
        contents.sequence.update(zip(keys, offsets, strict=True))
        contents.sequence_numel = end

    def _leave_plan(self, buffer: Tensor) -> None:
        """What stands in the rows of a plan that does not hold is put one after the other."""
        contents = self._contents
        plan, rows = _not_none(contents.plan), contents.rows
        if rows is None:
            contents.plan = None
            return
        world_size = self._over.world_size
        keys = contents.keys[: len(contents.keys) - len(contents.pending.grads)]
        with self._stream.active():
            table = rows.view(world_size, plan.row_numel)
            pieces = []
            for key, numel in zip(keys, contents.numels, strict=False):
                begin, chunk = plan.offsets[key], partition_numel(numel, world_size)
                # A copy: the rows stand in the buffer that is written to next.
                piece = table[:, begin : begin + chunk].clone(memory_format=torch.contiguous_format)
                pieces.append(piece.view(-1)[:numel])
        self._pack_sequence(keys, pieces, buffer, ())
        contents.plan = contents.rows = None

    def _room(self, plan: RowPlan, buffer: Tensor | None, device: torch.device) -> Tensor:
        """Memory for the rows: the bucket's own, unless padding makes them too long for it."""
        numel = plan.row_numel * self._over.world_size
        if buffer is not None and numel <= buffer.numel():
            return buffer[:numel]
        with self._stream.active():  # freed after the sum: it must be that stream's memory
            return torch.empty(numel, dtype=self._dtype, device=device)


def _is_planned(plan: RowPlan, keys: Sequence[int], grads: Sequence[Tensor]) -> bool:
    """Whether the plan has a place for each of these gradients."""
    numels = plan.numels
    return all(numels.get(key) == grad.numel() for key, grad in zip(keys, grads, strict=True))


def _not_none(value: _T | None) -> _T:
    if value is None:
        raise AssertionError("z3ext: a bucket lost its memory or its plan")
    return value
