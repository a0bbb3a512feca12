"""How a release keeps its gradient buckets, and how z3ext reads and counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from z3ext.deepspeed.names import PRIVATE

_FLAT_BUFFER = f"{PRIVATE}__ipg_bucket_flat_buffer"


class BucketAccess(Protocol):
    """A bucket has ``params``, ``elements`` and ``buffer``, as DeepSpeed's ``IPGBucketZ3``."""

    def of(self, optimizer: Any) -> Mapping[torch.dtype, Any]:
        """The buckets by the dtype in which their gradients are communicated.

        Empty where something else than DeepSpeed's optimizer reduces the gradients.
        """
        ...

    def memory(self, bucket: Any) -> Tensor | None:
        """DeepSpeed's memory of a bucket; asking for it allocates nothing."""
        ...

    def added(self, bucket: Any, elements: int, group: Any) -> None:
        """A parameter was appended to ``bucket.params``; ``elements`` are now in the bucket."""
        ...

    def emptied(self, bucket: Any) -> None:
        """The bucket was reduced."""
        ...

    def dtype(self, optimizer: Any, arguments: Sequence[Any]) -> torch.dtype:
        """Which bucket DeepSpeed's reduction is called for, by its arguments."""
        ...

    def arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """With which arguments DeepSpeed's reduction is called for a bucket."""
        ...

    def defect(self, mode: str) -> str:
        """Why z3ext must not fill the buckets on a path; "" when it may."""
        ...


class BucketPerDtype:
    """``optimizer.ipg_buckets``: an ``IPGBucketZ3`` for each communication dtype."""

    def of(self, optimizer: Any) -> Mapping[torch.dtype, Any]:
        buckets: Mapping[torch.dtype, Any] = optimizer.ipg_buckets
        return buckets

    def memory(self, bucket: Any) -> Tensor | None:
        memory: Tensor | None = bucket.buffer
        return memory

    def added(self, bucket: Any, elements: int, group: Any) -> None:
        bucket.elements = elements

    def emptied(self, bucket: Any) -> None:
        bucket.params.clear()
        bucket.elements = 0

    def dtype(self, optimizer: Any, arguments: Sequence[Any]) -> torch.dtype:
        dtype: torch.dtype = arguments[0]
        return dtype

    def arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        return (dtype,)

    def defect(self, mode: str) -> str:
        return ""


class BucketPerDtypeAndGroup(BucketPerDtype):
    """With the process group of the parameters in it."""

    def added(self, bucket: Any, elements: int, group: Any) -> None:
        bucket.process_group = group
        bucket.elements = elements

    def emptied(self, bucket: Any) -> None:
        bucket.clear_params()


class BucketThatCountsOn(BucketPerDtype):
    """``elements`` is never set back (0.17.2): gradients soon go past the bucket, one by one.

    Until then the all-reduce path reads the bucket's memory from its begin, where earlier gradients
    stand, and so trains on those. To be equal z3ext leaves that path's buckets to DeepSpeed.
    """

    def emptied(self, bucket: Any) -> None:
        bucket.params.clear()

    def defect(self, mode: str) -> str:
        if mode != "all_reduce":
            return ""
        return "this DeepSpeed never sets its bucket's count back and reduces old gradients again"


class OneBucket:
    """Fields of the optimizer; the memory has the optimizer's dtype, whatever is communicated."""

    def of(self, optimizer: Any) -> Mapping[torch.dtype, Any]:
        # destroy() deletes the memory or sets it to None, but for a config that has none.
        if optimizer.contiguous_gradients and getattr(optimizer, _FLAT_BUFFER, None) is None:
            return {}
        return {optimizer.communication_data_type: _OptimizersBucket(optimizer)}

    def memory(self, bucket: Any) -> Tensor | None:
        memory: Tensor | None = bucket.memory
        return memory

    def added(self, bucket: Any, elements: int, group: Any) -> None:
        bucket.count(elements)

    def emptied(self, bucket: Any) -> None:
        bucket.clear_params()

    def dtype(self, optimizer: Any, arguments: Sequence[Any]) -> torch.dtype:
        dtype: torch.dtype = optimizer.communication_data_type
        return dtype

    def arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        return ()

    def defect(self, mode: str) -> str:
        return ""


class _OptimizersBucket:
    """An optimizer's own fields, read like an ``IPGBucketZ3``."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._counted = (0, 0)  # parameters, and the elements of their gradients
        self._wire: Tensor | None = None

    @property
    def params(self) -> list[Any]:
        params: list[Any] = self._optimizer.params_in_ipg_bucket
        return params

    @property
    def elements(self) -> int:
        # DeepSpeed adds up the parameters each time; what z3ext added is counted already.
        params, elements = self._counted
        if params == len(self.params):
            return elements
        total: int = self._optimizer.elements_in_ipg_bucket
        return total

    @property
    def memory(self) -> Tensor | None:
        """DeepSpeed's, in the optimizer's dtype."""
        memory: Tensor | None = getattr(self._optimizer, _FLAT_BUFFER, None)
        return memory

    @property
    def buffer(self) -> Tensor | None:
        """The bucket's memory, in the dtype of communication.

        Where that is another one than the optimizer's, DeepSpeed casts the bucket to memory of its
        own, for the time of the reduction: so does this.
        """
        memory, dtype = self.memory, self._optimizer.communication_data_type
        if memory is None or memory.dtype == dtype:
            return memory
        if self._wire is None:
            self._wire = torch.empty_like(memory, dtype=dtype)
        return self._wire

    def count(self, elements: int) -> None:
        self._counted = (len(self.params), elements)

    def clear_params(self) -> None:
        self.params.clear()
        self._counted = (0, 0)
        self._wire = None
