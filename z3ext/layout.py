"""Where gradients stand in a bucket, and which part of each belongs to a rank. Ints only, no torch.

ZeRO-3 cuts a parameter into ``world_size`` chunks of ``ceil(numel / world_size)`` elements; the
last chunks may be short or empty, and the partition buffer pads them to a full chunk.

The layout here is parameter-major, for the all-reduce path: each gradient is contiguous in the
bucket, in arrival order. All numels and offsets count elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Slice(NamedTuple):
    """Elements ``[start, start + numel)`` of a flattened parameter."""

    start: int
    numel: int


@dataclass(frozen=True)
class ParameterMajorLayout:
    """A bucket of whole gradients, and one rank's slice of each; tuples have an entry per gradient.

    offsets: where each gradient begins in the bucket.
    total: elements of all gradients together.
    src_offsets: where this rank's slice of each gradient begins in the bucket.
    numels: real elements of each slice, 0 for a rank past the parameter's end.
    padded_numels: elements that each slice takes in the partition buffer.
    """

    offsets: tuple[int, ...]
    total: int
    src_offsets: tuple[int, ...]
    numels: tuple[int, ...]
    padded_numels: tuple[int, ...]


def partition_numel(numel: int, world_size: int) -> int:
    """Elements of one rank's chunk, padding included: ``ceil(numel / world_size)``.

    Raises ValueError for a negative numel or a world size below 1.
    """
    if numel < 0:
        raise ValueError(f"numel is {numel}; expected 0 or more")
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; expected 1 or more")
    return -(-numel // world_size)


def rank_slice(numel: int, world_size: int, rank: int) -> Slice:
    """The elements of a parameter that ``rank`` owns, without padding.

    Raises ValueError as partition_numel does, and for a rank outside ``[0, world_size)``.
    """
    chunk = partition_numel(numel, world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; expected 0 <= rank < world_size = {world_size}")
    start = min(rank * chunk, numel)
    return Slice(start, min(chunk, numel - start))


def parameter_major(numels: Sequence[int], world_size: int, rank: int) -> ParameterMajorLayout:
    """Lay gradients of these numels out one after the other, and find ``rank``'s slices of them.

    Raises ValueError as rank_slice does, naming the index of the numel.
    """
    for i, numel in enumerate(numels):
        if numel < 0:
            raise ValueError(f"numels[{i}] is {numel}; expected 0 or more")
    rank_slice(0, world_size, rank)  # checks both even when the list is empty
    slices = [rank_slice(numel, world_size, rank) for numel in numels]
    *offsets, total = accumulate(numels, initial=0)
    return ParameterMajorLayout(
        offsets=tuple(offsets),
        total=total,
        src_offsets=tuple(
            offset + piece.start for offset, piece in zip(offsets, slices, strict=True)
        ),
        numels=tuple(piece.numel for piece in slices),
        padded_numels=tuple(partition_numel(numel, world_size) for numel in numels),
    )
