"""What the tests of the two buckets share: parameters, a group of known ranks, and the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import oracle
import torch
from torch import Tensor

from z3ext.collectives import OneRank, SumOverRanks
from z3ext.partitions import FlatPartitions, Scaling
from z3ext.reducer import GradientBucket

STORED = (torch.float16, torch.bfloat16, torch.float32)
POISON = -123.0
NO_SCALING = Scaling((), ())


class OtherRanks:
    """This rank's place in a group whose other ranks' buckets are known.

    What a reduce-scatter leaves in the other ranks' rows may be anything: here it is nan.
    """

    def __init__(self, rank: int, others: Sequence[Tensor]) -> None:
        self.rank = rank
        self.world_size = len(others) + 1
        self.others = others
        self.seen: list[Tensor] = []

    def all_reduce_(self, buf: Tensor) -> bool:
        self.seen.append(buf.clone())
        for other in self.others:
            buf += other[: buf.numel()]
        return True

    def reduce_scatter_(self, rows: Tensor, row: Tensor) -> bool:
        begin = self.rank * row.numel()
        assert rows.numel() == self.world_size * row.numel()
        assert row.data_ptr() == rows[begin:].data_ptr()
        self.seen.append(rows.clone())
        total = row.clone()
        for other in self.others:
            total += other[begin : begin + row.numel()]
        rows.fill_(torch.nan)
        row.copy_(total)
        return True


def group_of(
    rank: int, world_size: int, numel: int, dtype: torch.dtype, generator: torch.Generator
) -> SumOverRanks:
    """Random buckets of ``numel`` elements on the other ranks; OneRank where there are none."""
    if world_size == 1:
        return OneRank()
    shape = (world_size - 1, numel)
    return OtherRanks(rank, list(torch.randn(shape, generator=generator).to(dtype)))


def add_others(own: Tensor, over: SumOverRanks, begin: int = 0) -> Tensor:
    """The sum as the group makes it; ``own`` stands at ``begin`` of the other ranks' buckets."""
    for other in over.others if isinstance(over, OtherRanks) else ():
        total = own.double() + other[begin : begin + own.numel()].double()
        rounded = oracle.round_to(oracle.round_to(total, torch.float32), own.dtype)
        own = rounded.to(own.dtype)
    return own


def parameters(
    numels: Mapping[int, int],
    generator: torch.Generator,
    dtypes: Sequence[torch.dtype] = STORED,
) -> dict[int, Tensor]:
    """By key, 1-D parameters with gradients: dtypes in turn, every third gradient a view."""
    found = {}
    for i, (key, numel) in enumerate(numels.items()):
        dtype = dtypes[i % len(dtypes)]
        grad = torch.randn(numel, generator=generator).to(dtype)
        if i % 3 == 2:
            grad = torch.stack((grad, grad), 1)[:, 0]
        found[key] = torch.zeros(numel, dtype=dtype, requires_grad=True)
        found[key].grad = grad
    return found


def grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def grads_of(params: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copies of the gradients, by key."""
    return {key: grad_of(param).clone() for key, param in params.items()}


def chunk_of(numel: int, world_size: int) -> int:
    return -(-numel // world_size)


def slice_of(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Where a rank's slice of a parameter begins, and its real elements."""
    chunk = chunk_of(numel, world_size)
    return rank * chunk, max(0, min(chunk, numel - rank * chunk))


def destinations(numels: Mapping[int, int], world_size: int) -> tuple[dict[int, int], int]:
    """By key, where its partition begins, one unused element apart; the numel of all together."""
    begins, end = {}, 1
    for key, numel in numels.items():
        begins[key] = end
        end += chunk_of(numel, world_size) + 1
    return begins, end


def random_keys(count: int, generator: torch.Generator) -> list[int]:
    """Different keys in no order."""
    return [3 * i + 5 for i in torch.randperm(count, generator=generator).tolist()]


class Turn(NamedTuple):
    """What one bucket is reduced with."""

    buffer: Tensor | None
    scaling: Scaling
    partitions: Tensor
    accumulate: bool


def send(bucket: GradientBucket, params: Mapping[int, Tensor], turn: Turn) -> None:
    """The life of one bucket as a caller drives it; its contents are gone afterwards."""
    for key, param in params.items():
        if bucket.add(param, grad_of(param), key):
            bucket.pack(turn.buffer, turn.scaling.divisors)
    assert bucket.keys == list(params)
    assert bucket.numels == [param.numel() for param in params.values()]
    bucket.reduce(turn.buffer, turn.scaling, FlatPartitions(turn.partitions), turn.accumulate)
    assert (bucket.keys, bucket.numels) == ([], [])
    assert all(param.grad is None for param in params.values())
