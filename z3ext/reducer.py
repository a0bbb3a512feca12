"""The life of a gradient bucket: add -> pack -> reduce -> unpack.

Knows torch and process groups, and no training framework. This file has what all buckets have in
common; ``all_reduce_bucket`` and ``reduce_scatter_bucket`` are the two ways to reduce one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from z3ext.partitions import Partitions, Scaling


@dataclass
class Counters:
    """What one engine's gradient path did so far."""

    buckets: int = 0
    packs: int = 0
    collectives: int = 0
    bytes_reduced: int = 0
    steps: int = 0
    skipped: int = 0


class GradientBucket(Protocol):
    """One bucket at a time: gradients come in, this rank's slices of their sum go out.

    ``buffer``, in every method, is the bucket's memory: 1-D, contiguous, on the gradients' device,
    large enough for all gradients of the bucket; None for a bucket that keeps its gradients as they
    are until it is full. It may be another one for each bucket, not for the calls of one.
    """

    #: What names the parameters in the bucket, and their gradients' numels, in the order of
    #: arrival; other lists after ``clear`` and ``reduce``. Attributes, since every hook reads them.
    keys: list[int]
    numels: list[int]

    flags: LocalFlags

    def clear(self) -> None:
        """Forget the contents, reduced or not."""
        ...

    def add(self, param: Tensor, grad: Tensor, key: int) -> bool:
        """Take a gradient into the bucket; whether it is time to ``pack``.

        Args:
            param: ``param.grad`` is ``grad``.
            grad: dense, of fp16, bf16 or fp32.
            key: names the parameter, the same on every rank.
        """
        ...

    def pack(self, buffer: Tensor | None, divisors: Sequence[float]) -> None:
        """Pack the gradients that wait, in one launch; their ``param.grad`` is None then.

        Args:
            buffer: see above.
            divisors: see ``ops.pack_``; the same for all gradients of a bucket.

        Raises:
            RuntimeError: from the pack op, for a gradient that it refuses.
        """
        ...

    def reduce(
        self, buffer: Tensor | None, scaling: Scaling, partitions: Partitions, accumulate: bool
    ) -> None:
        """Sum the bucket over the ranks, store this rank's slices, and empty the bucket.

        Args:
            buffer: see above.
            scaling: its divisors are those given to ``pack``.
            partitions: where this rank's slices go.
            accumulate: add to the partitions in place of overwriting them.
        """
        ...


class LocalFlags:
    """Whether a stored value was inf or nan on this rank, by micro-step of one optimizer step.

    A diagnosis only: a sum can overflow though every addend is finite.
    """

    def __init__(self) -> None:
        self._flags: dict[int, Tensor] = {}
        self._micro_step = 0

    def begin(self, micro_step: int) -> None:
        """The ``micro_step``-th backward of a step begins; the 0th forgets the step before."""
        if micro_step == 0:
            self._flags = {}
        self._micro_step = micro_step

    def on(self, device: torch.device) -> Tensor:
        """This micro-step's flag, a 0-dim bool, for ops on that device."""
        flag = self._flags.get(self._micro_step)
        if flag is None or flag.device != device:
            flag = torch.zeros((), dtype=torch.bool, device=device)
            self._flags[self._micro_step] = flag
        return flag

    def first(self) -> int | None:
        """The first micro-step whose flag is set; None when there is none. Reads the device."""
        return next((step for step in sorted(self._flags) if bool(self._flags[step])), None)
