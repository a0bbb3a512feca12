"""The life of a gradient bucket on the all-reduce path: add -> pack -> reduce -> unpack.

Knows torch and process groups, and no training framework. The bucket's layout is parameter-major:
each gradient is contiguous, in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from z3ext import ops
from z3ext.collectives import SumOverRanks
from z3ext.layout import parameter_major
from z3ext.streams import BucketStream

#: Bytes of gradients that may wait to be packed together: bounds the extra memory.
PENDING_BYTES = 32 << 20
#: A gradient of this many bytes or more is packed at once: one launch for it costs nothing.
LARGE_BYTES = 4 << 20


@dataclass
class Counters:
    """What one engine's gradient path did so far."""

    buckets: int = 0
    packs: int = 0
    collectives: int = 0
    bytes_reduced: int = 0


class Scaling(NamedTuple):
    """How gradients become averages: before the sum, and of this rank's slice after it."""

    divisors: tuple[float, ...]
    multipliers: tuple[float, ...]


@dataclass
class _Contents:
    """What a bucket holds: the numels in arrival order, and the gradients not packed yet."""

    numels: list[int] = field(default_factory=list)
    numel: int = 0
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (parameter, gradient)
    pending_offsets: list[int] = field(default_factory=list)
    pending_bytes: int = 0


class BucketReducer:
    """One bucket at a time: gradients come in, this rank's slices of their sum go out.

    Args:
        over: the process group.
        stream: where the bucket's work runs.
        counters: shared by all buckets of an engine.
    """

    def __init__(self, over: SumOverRanks, stream: BucketStream, counters: Counters) -> None:
        self._over = over
        self._stream = stream
        self._counters = counters
        self._contents = _Contents()
        self._flag: Tensor | None = None

    @property
    def count(self) -> int:
        """Gradients in the bucket."""
        return len(self._contents.numels)

    @property
    def numels(self) -> Sequence[int]:
        """Their numels, in the order of arrival."""
        return self._contents.numels

    def clear(self) -> None:
        """Forget the contents, reduced or not."""
        self._contents = _Contents()

    def add(self, param: Tensor, buffer: Tensor, divisors: Sequence[float]) -> None:
        """Take ``param.grad`` into the bucket; once packed, ``param.grad`` is None.

        Small gradients wait until there are enough of them for one launch.

        Args:
            param: its gradient is dense, of fp16, bf16 or fp32, on buffer's device.
            buffer: the bucket's memory: 1-D, contiguous, large enough for the gradients so far and
                this one. Read when something is packed, so it may be another one for each bucket.
            divisors: see ``ops.pack_``; the same for all gradients of a bucket.

        Raises:
            RuntimeError: from ``ops.pack_``, for a gradient that it refuses.
        """
        grad = param.grad
        if grad is None:
            raise RuntimeError(
                "z3ext: a parameter without gradient was added to a bucket; expected one whose "
                "backward has run; add it from its gradient hook"
            )
        contents = self._contents
        self._stream.note_writer()
        contents.pending.append((param, grad))
        contents.pending_offsets.append(contents.numel)
        contents.numels.append(grad.numel())
        contents.numel += grad.numel()
        contents.pending_bytes += grad.nbytes
        if grad.nbytes >= LARGE_BYTES or contents.pending_bytes >= PENDING_BYTES:
            self._pack(buffer, divisors)

    def reduce(
        self,
        buffer: Tensor,
        scaling: Scaling,
        partitions: Tensor,
        dst_offsets: Sequence[int | None],
        accumulate: bool,
    ) -> None:
        """Sum the bucket over the ranks, store this rank's slices, and empty the bucket.

        Args:
            buffer: the memory given to ``add``.
            scaling: its divisors are those given to ``add``.
            partitions: this rank's flat partition buffer: 1-D, contiguous, fp16, bf16 or fp32.
            dst_offsets: for each gradient the element of ``partitions`` where its slice belongs,
                None to leave the partition as it is.
            accumulate: add to the partitions in place of overwriting them and their padding.
        """
        self._pack(buffer, scaling.divisors)
        contents = self._contents
        with self._stream.active():
            bucket = buffer[: contents.numel]
            if self._over.all_reduce_(bucket):
                self._counters.collectives += 1
                self._counters.bytes_reduced += bucket.nbytes
            layout = parameter_major(contents.numels, self._over.world_size, self._over.rank)
            kept = [i for i, offset in enumerate(dst_offsets) if offset is not None]
            ops.unpack_(
                bucket,
                partitions,
                [layout.src_offsets[i] for i in kept],
                [offset for offset in dst_offsets if offset is not None],
                [layout.numels[i] for i in kept],
                [layout.padded_numels[i] for i in kept],
                scaling.multipliers,
                accumulate,
            )
        self._counters.buckets += 1
        self.clear()

    def _pack(self, buffer: Tensor, divisors: Sequence[float]) -> None:
        contents = self._contents
        if not contents.pending:
            return
        pending, offsets = contents.pending, contents.pending_offsets
        grads = [grad for _, grad in pending]
        self._stream.wait_for_writers(grads)
        with self._stream.active():
            ops.pack_(grads, offsets, buffer, self._flag_on(buffer.device), divisors)
        self._counters.packs += 1
        contents.pending, contents.pending_offsets, contents.pending_bytes = [], [], 0
        for param, grad in pending:
            if param.grad is grad:
                param.grad = None

    def _flag_on(self, device: torch.device) -> Tensor:
        """Local diagnosis only: a sum can overflow though every addend is finite."""
        if self._flag is None or self._flag.device != device:
            self._flag = torch.zeros((), dtype=torch.bool, device=device)
        return self._flag
