"""The two ways in which ZeRO stage 3 reduces a bucket, with stock's factors on each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from z3ext.all_reduce_bucket import AllReduceBucket
from z3ext.collectives import SumOverRanks
from z3ext.partitions import Scaling
from z3ext.reduce_scatter_bucket import ReduceScatterBucket
from z3ext.reducer import Counters, GradientBucket
from z3ext.streams import BucketStream


class ReductionPath(Protocol):
    """How one optimizer's buckets are reduced."""

    #: As ``Status.mode`` names it.
    mode: str

    def new_bucket(self, dtype: torch.dtype, begins: Mapping[int, int]) -> GradientBucket:
        """A bucket for gradients communicated in ``dtype``; ``begins`` as the buckets have it."""
        ...

    def bounded(self, optimizer: Any) -> bool:
        """Whether a bucket has memory of its own, so that a larger gradient is left to stock."""
        ...

    def scaling(self, optimizer: Any) -> Scaling:
        """The factors of stock's own reduction, in its order."""
        ...


class AllReducePath:
    """Stock's ``__avg_scatter_contiguous_grads``."""

    mode = "all_reduce"

    def __init__(self, over: SumOverRanks, stream: BucketStream, counters: Counters) -> None:
        self._over = over
        self._stream = stream
        self._counters = counters

    def new_bucket(self, dtype: torch.dtype, begins: Mapping[int, int]) -> GradientBucket:
        return AllReduceBucket(self._over, self._stream, begins, self._counters)

    def bounded(self, optimizer: Any) -> bool:
        return True

    def scaling(self, optimizer: Any) -> Scaling:
        factor = optimizer.gradient_predivide_factor
        average = self._over.world_size / float(optimizer.sequence_parallel_size)
        if not optimizer.postscale_gradients:
            return Scaling((average,), ())
        # Stock leaves the multiplication out where the factor is the world size.
        multipliers = (factor,) if factor != self._over.world_size else ()
        return Scaling((factor, average), multipliers)


class ReduceScatterPath:
    """Stock's ``__avg_scatter_grads`` over ``reduce_scatter_coalesced``.

    Without contiguous_gradients a bucket has no memory, and takes a gradient of any size.
    """

    mode = "reduce_scatter"

    def __init__(self, over: SumOverRanks, stream: BucketStream, counters: Counters) -> None:
        self._over = over
        self._stream = stream
        self._counters = counters

    def new_bucket(self, dtype: torch.dtype, begins: Mapping[int, int]) -> GradientBucket:
        return ReduceScatterBucket(self._over, self._stream, begins, self._counters, dtype)

    def bounded(self, optimizer: Any) -> bool:
        return bool(optimizer.contiguous_gradients)

    def scaling(self, optimizer: Any) -> Scaling:
        factor = optimizer.gradient_predivide_factor
        if not optimizer.postscale_gradients:
            return Scaling((self._over.world_size,), ())
        multipliers = (factor,) if factor != self._over.world_size else ()
        return Scaling((factor, self._over.world_size), multipliers)


MODES = ("auto", "all_reduce", "reduce_scatter")


def config_mode(optimizer: Any) -> str:
    """The path that the config asks stock for: all-reduce needs contiguous gradients as well."""
    all_reduce = optimizer.contiguous_gradients and not optimizer.reduce_scatter
    return "all_reduce" if all_reduce else "reduce_scatter"


@contextlib.contextmanager
def stock_reduces_by(mode: str, optimizer: Any) -> Iterator[None]:
    """DeepSpeed's own reduction within takes the path of that mode, whatever the config says."""
    configured = optimizer.reduce_scatter
    optimizer.reduce_scatter = mode == "reduce_scatter"
    try:
        yield
    finally:
        optimizer.reduce_scatter = configured


def choose_path(
    mode: str, over: SumOverRanks, stream: BucketStream, counters: Counters
) -> ReductionPath:
    """The path of that mode, which is not "auto"."""
    path = AllReducePath if mode == "all_reduce" else ReduceScatterPath
    return path(over, stream, counters)
