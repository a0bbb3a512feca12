"""A bucket in parameter-major order, reduced by one all-reduce."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from z3ext import ops
from z3ext.collectives import SumOverRanks
from z3ext.layout import parameter_major
from z3ext.partitions import Partitions, Scaling, Slices
from z3ext.pending import PendingGradients
from z3ext.reducer import Counters, LocalFlags
from z3ext.streams import BucketStream


class _Plan(NamedTuple):
    """This rank's slices of the gradients that came in a certain order.

    Slices without elements are left out: stock leaves such a partition as it is.
    """

    keys: list[int]
    all_numels: list[int]
    slices: Slices


@dataclass
class _Contents:
    """What the bucket holds.

    keys, numels: in the order of arrival.
    packed_numel: elements in the bucket's memory; the gradients that wait come after them.
    """

    keys: list[int] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    pending: PendingGradients = field(default_factory=PendingGradients)
    packed_numel: int = 0


class AllReduceBucket:
    """Each gradient is contiguous, in the order of arrival, which every rank must share.

    Args:
        over: the process group.
        stream: where the bucket's work runs.
        begins: by key, the element of the partition buffer where this rank's slice belongs.
        counters: shared by all buckets of an engine.
    """

    def __init__(
        self,
        over: SumOverRanks,
        stream: BucketStream,
        begins: Mapping[int, int],
        counters: Counters,
    ) -> None:
        self._over = over
        self._stream = stream
        self._begins = begins
        self._counters = counters
        self._plans: dict[int, _Plan] = {}  # by the key that came first
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
        grads = contents.pending.grads
        if not grads:
            return
        memory = _memory(buffer)
        waiting = contents.numels[-len(grads) :]
        *offsets, end = itertools.accumulate(waiting, initial=contents.packed_numel)
        self._stream.wait_for_writers(grads)
        with self._stream.active():
            flag = self.flags.on(memory.device)
            ops.pack_(grads, offsets, memory, flag, divisors)
        self._counters.packs += 1
        # Only now: a pack that was refused or found no memory can be tried again.
        contents.packed_numel = end
        contents.pending.release()

    def reduce(
        self, buffer: Tensor | None, scaling: Scaling, partitions: Partitions, accumulate: bool
    ) -> None:
        self.pack(buffer, scaling.divisors)
        plan = self._plan()
        with self._stream.active():
            bucket = _memory(buffer)[: self._contents.packed_numel]
            if self._over.all_reduce_(bucket):
                self._counters.collectives += 1
                self._counters.bytes_reduced += bucket.nbytes
            partitions.store(bucket, plan.slices, scaling, accumulate)
        self._counters.buckets += 1
        self.clear()

    def _plan(self) -> _Plan:
        """The plan for what is in the bucket: that of an earlier bucket where it was the same."""
        keys, numels = self._contents.keys, self._contents.numels
        plan = self._plans.get(keys[0])
        if plan is None or plan.keys != keys or plan.all_numels != numels:
            layout = parameter_major(numels, self._over.world_size, self._over.rank)
            kept = [i for i, numel in enumerate(layout.numels) if numel]
            plan = _Plan(
                keys,
                numels,
                Slices(
                    [layout.src_offsets[i] for i in kept],
                    [self._begins[keys[i]] for i in kept],
                    [layout.numels[i] for i in kept],
                    [layout.padded_numels[i] for i in kept],
                ),
            )
            self._plans[keys[0]] = plan
        return plan


def _memory(buffer: Tensor | None) -> Tensor:
    if buffer is None:
        raise RuntimeError(
            "z3ext: an all-reduce bucket has no memory; expected the bucket's flat buffer; "
            "set contiguous_gradients to true"
        )
    return buffer
