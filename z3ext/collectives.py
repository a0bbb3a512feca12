"""The sum over a process group, as one of a few policies that are chosen once per engine."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from z3ext import ops


class SumOverRanks(Protocol):
    """Sums a contiguous buffer in place over the ranks of one process group."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        ...

    def all_reduce_(self, buf: Tensor) -> bool:
        """Sum ``buf`` over the group; whether a collective was issued."""
        ...

    def reduce_scatter_(self, rows: Tensor, row: Tensor) -> bool:
        """Sum ``rows``, one for each rank, and leave this rank's in ``row``, a view of ``rows``.

        The other rows hold anything afterwards. Whether a collective was issued.
        """
        ...


class OneRank:
    """A group of one: the sum is what it was, and no collective is issued."""

    rank = 0
    world_size = 1

    def all_reduce_(self, buf: Tensor) -> bool:
        return False

    def reduce_scatter_(self, rows: Tensor, row: Tensor) -> bool:
        return False


class NativeSum:
    """c10d's collectives, issued from C++ by the group's name.

    Both raise RuntimeError once the group is destroyed: a group that is made later may have its
    name, but not its ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._group = group
        self._name = group.group_name

    def all_reduce_(self, buf: Tensor) -> bool:
        self._check_alive("all_reduce_")
        ops.all_reduce_(buf, self._name)
        return True

    def reduce_scatter_(self, rows: Tensor, row: Tensor) -> bool:
        self._check_alive("reduce_scatter_")
        ops.reduce_scatter_(rows, row, self._name)
        return True

    def _check_alive(self, op: str) -> None:
        try:
            dist.get_backend(self._group)
        except (ValueError, TypeError, AssertionError) as cause:  # by torch's version
            raise RuntimeError(
                f"z3ext::{op}: the process group '{self._name}' was destroyed; expected the group "
                "that the engine was made with; make a new engine after destroy_process_group"
            ) from cause


# A ring all-reduce cuts its buffer into segments, and the order in which the ranks' values are
# added depends on the segment. gloo cuts into twice as many segments as there are ranks.
_SEGMENTS_PER_RANK = 2


def sum_scalars(values: Tensor, over: SumOverRanks) -> tuple[Tensor, bool]:
    """Sum several scalars at once with the bits of one all-reduce for each.

    A scalar reduced alone stands in the ring's first segment. So the values are put at the front of
    a buffer so long that they all stand in the first segment.

    Args:
        values: 1-D, contiguous; left as it is.

    Returns:
        The sums, shaped like ``values``, and whether a collective was issued.
    """
    count = values.numel()
    if over.world_size == 1 or count == 0:
        return values, False
    padded = values.new_zeros(count * _SEGMENTS_PER_RANK * over.world_size)
    padded[:count] = values
    issued = over.all_reduce_(padded)
    return padded[:count], issued
