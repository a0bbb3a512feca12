"""Where this rank's slices of a reduced bucket go."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from z3ext import ops


class Slices(NamedTuple):
    """This rank's slices of a bucket, as ``ops.unpack_`` wants them; none is empty."""

    src_offsets: list[int]
    dst_offsets: list[int]
    numels: list[int]
    padded_numels: list[int]


class Scaling(NamedTuple):
    """How gradients become averages.

    divisors: of each gradient, before the sum.
    multipliers: of this rank's slices, after it.
    rounding: the dtype to which the slices are rounded before they are stored; None to round them
        to the partitions' alone.
    """

    divisors: tuple[float, ...]
    multipliers: tuple[float, ...]
    rounding: torch.dtype | None = None


class Partitions(Protocol):
    """This rank's partitions of all parameters, one after the other in a flat buffer."""

    def store(self, reduced: Tensor, slices: Slices, scaling: Scaling, accumulate: bool) -> None:
        """Copy slices of a reduced bucket to their places, or add them.

        Args:
            reduced: the bucket, 1-D, contiguous; what stands in it is lost.
            slices: where the slices are, in it and in the flat buffer.
            scaling: of its divisors none is used.
            accumulate: add to the partitions in place of overwriting them.
        """
        ...


class FlatPartitions:
    """The flat buffer is where the buckets are.

    Args:
        flat: 1-D, contiguous, fp16, bf16 or fp32.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def store(self, reduced: Tensor, slices: Slices, scaling: Scaling, accumulate: bool) -> None:
        multipliers = scaling.multipliers
        if scaling.rounding is not None:
            for multiplier in multipliers:
                reduced *= multiplier
            reduced, multipliers = reduced.to(scaling.rounding), ()
        ops.unpack_(reduced, self._flat, *slices, multipliers, accumulate)
