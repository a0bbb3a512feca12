"""What the tests of the reduce-scatter bucket share: one bucket against float64 arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from bucket_support import (
    NO_SCALING,
    POISON,
    OtherRanks,
    Turn,
    add_others,
    chunk_of,
    destinations,
    grads_of,
    group_of,
    parameters,
    send,
    slice_of,
)
from torch import Tensor

from z3ext import ops
from z3ext import pending as pending_module
from z3ext.collectives import SumOverRanks
from z3ext.partitions import Scaling
from z3ext.reduce_scatter_bucket import ReduceScatterBucket
from z3ext.reducer import Counters
from z3ext.streams import BucketStream, HostOrder


@dataclass
class Made:
    bucket: ReduceScatterBucket
    over: SumOverRanks
    begins: dict[int, int]
    counters: Counters
    partition_numel: int
    dtype: torch.dtype

    def turn(
        self,
        size: int | None,
        scaling: Scaling = NO_SCALING,
        accumulate: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> Turn:
        """A buffer of that size, or none, and partitions, all of them poisoned."""
        buffer = None if size is None else torch.full((size,), math.nan, dtype=self.dtype)
        partitions = torch.full((self.partition_numel,), POISON, dtype=dtype)
        return Turn(buffer, scaling, partitions, accumulate)


def make(
    over: SumOverRanks,
    numels: Mapping[int, int],
    dtype: torch.dtype = torch.float32,
    stream: BucketStream | None = None,
) -> Made:
    """A bucket for parameters of at most these numels, by key."""
    begins, total = destinations(numels, over.world_size)
    counters = Counters()
    bucket = ReduceScatterBucket(over, stream or HostOrder(), begins, counters, dtype)
    return Made(bucket, over, begins, counters, total, dtype)


def check(made: Made, params: Mapping[int, Tensor], turn: Turn) -> None:
    """Send one bucket; compare the rows that were summed and every element of the partitions."""
    world_size, rank = made.over.world_size, made.over.rank
    grads = grads_of(params)
    offsets, slices, row_numel = [], [], 0
    for key in sorted(grads):
        offsets.append(row_numel)
        _, numel = slice_of(grads[key].numel(), world_size, rank)
        if numel:
            slices.append((row_numel, made.begins[key], numel, numel))
        row_numel += chunk_of(grads[key].numel(), world_size)
    rows = torch.full((world_size * row_numel,), math.nan, dtype=made.dtype)
    divisors = turn.scaling.divisors
    in_order = [grads[key] for key in sorted(grads)]
    stored, _ = oracle.pack_rows(in_order, offsets, row_numel, world_size, rows, divisors)
    row = stored.buffer[rank * row_numel : (rank + 1) * row_numel]
    total = add_others(row, made.over, rank * row_numel)
    before, multipliers = turn.partitions.clone(), turn.scaling.multipliers
    expected = oracle.unpack(total, before, slices, multipliers, turn.accumulate)
    send(made.bucket, params, turn)
    oracle.assert_bits(turn.partitions, expected.buffer, expected.written)
    if isinstance(made.over, OtherRanks):
        oracle.assert_bits(made.over.seen[-1], stored.buffer)


def row_total(numels: Sequence[int], world_size: int) -> int:
    """Elements of all rows together."""
    return world_size * sum(chunk_of(numel, world_size) for numel in numels)


@contextmanager
def limits(pending: int, large: int) -> Iterator[None]:
    """Bytes that may wait, and bytes that are large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending_module, "PENDING_BYTES", pending)
        patch.setattr(pending_module, "LARGE_BYTES", large)
        yield


@pytest.fixture
def one_by_one() -> Iterator[None]:
    """Every gradient with elements is packed as it comes."""
    with limits(1, 1):
        yield


@pytest.fixture
def in_pairs() -> Iterator[None]:
    """Packed whenever 80 bytes wait: two float32 gradients of ten elements."""
    with limits(80, 1000):
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each pack as (name of the op, number of gradients)."""
    made: list[tuple[str, int]] = []

    def counted(name: str, op: Callable[..., None]) -> Callable[..., None]:
        def call(grads: Sequence[Tensor], *args: Any) -> None:
            made.append((name, len(grads)))
            op(grads, *args)

        return call

    for name in ("pack_", "pack_rows_"):
        monkeypatch.setattr(ops, name, counted(name, getattr(ops, name)))
    return made


TENS = dict.fromkeys((50, 10, 40, 20, 30, 60), 10)
KNOWN = [50, 10, 40, 20]


def check_tens(made: Made, keys: Sequence[int], generator: torch.Generator) -> Turn:
    """A bucket of float32 gradients, of ten elements each unless the key is of another size."""
    turn = made.turn(72, Scaling((3.0,), ()))
    params = parameters({key: TENS[key] for key in keys}, generator, [torch.float32])
    check(made, params, turn)
    return turn


def make_tens(generator: torch.Generator, world_size: int = 3) -> Made:
    over = group_of(world_size - 1, world_size, 100, torch.float32, generator)
    return make(over, dict.fromkeys(TENS, 20))
