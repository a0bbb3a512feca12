"""What an optimizer that is offloaded to the CPU does with the gradients, up to ``step()``.

DeepSpeed keeps the partitions and the fp32 gradients in host memory. At the last micro-step it
takes each parameter's norm and copies its partition to the fp32 gradient, which ``step()`` unscales
in place; a parameter that is not reduced then keeps the fp32 gradient that it had (a known fault).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from z3ext import ops
from z3ext.collectives import SumOverRanks, sum_scalars
from z3ext.deepspeed.names import PREPARE
from z3ext.deepspeed.releases.release import Release
from z3ext.norms import segment_norms
from z3ext.offload import HostMemory, OffloadedPartitions, SameMemory, StagedMemory
from z3ext.partitions import Partitions
from z3ext.reducer import Counters
from z3ext.streams import BucketStream

Method = Callable[..., Any]


class OffloadStep:
    """The counterpart of ``GradientStep`` for ``offload_optimizer: {device: cpu}``.

    Args:
        optimizer: the ZeRO stage 3 optimizer.
        stock: DeepSpeed's own methods, by name.
        release: the family of releases at hand.
        over: the sum over ``Release.group``.
        stream: where the partitions are written.
        counters: the engine's.
    """

    def __init__(
        self,
        optimizer: Any,
        stock: Mapping[str, Method],
        release: Release,
        over: SumOverRanks,
        stream: BucketStream,
        counters: Counters,
    ) -> None:
        self._optimizer = optimizer
        self._stock = stock
        self._release = release
        self._over = over
        self._stream = stream
        self._counters = counters
        self._device = torch.device(get_accelerator().current_device_name())
        params = list(itertools.chain.from_iterable(optimizer.fp16_groups))
        numels = (param.partition_numel() for param in params)
        begins = list(itertools.accumulate(numels, initial=0))[:-1]
        self._params = dict(zip(begins, params, strict=True))
        counts = [sum(param.partition_numel() for param in g) for g in optimizer.fp16_groups]
        self._group_begins = list(itertools.accumulate(counts, initial=0))[:-1]
        self._norms = segment_norms(self._device)
        self._memory: HostMemory = (
            SameMemory(self._flat) if self._device.type == "cpu" else self._staged(begins)
        )

    def _staged(self, begins: Sequence[int]) -> StagedMemory:
        # DeepSpeed may have left something there before z3ext was asked.
        finite = not bool(ops.flat_overflow(self._flat()))
        return StagedMemory(self._flat, begins, self._device, finite)

    def _flat(self) -> Tensor:
        flat: Tensor = self._optimizer.grad_partitions_flat_buffer
        return flat

    def partitions(self) -> Partitions:
        """Where the slices of the next bucket go."""
        optimizer = self._optimizer
        masters = optimizer.fp32_partitioned_groups_flat
        grads = [(b, m.grad) for b, m in zip(self._group_begins, masters, strict=True)]
        at_boundary = self._release.at_boundary(optimizer)
        return OffloadedPartitions(self._memory, self._norms, self._take, grads, at_boundary)

    def _take(self, places: list[int], norms: Sequence[Tensor] | None) -> None:
        optimizer = self._optimizer
        params = [self._params[place] for place in places]
        self._release.reduced_ids(optimizer).update(param.ds_id for param in params)
        if norms is not None:
            ids = (optimizer.get_param_id(param) for param in params)
            # Stock takes the root of the norm's square, which is that norm: both round correctly.
            optimizer.norm_for_param_grads.update(zip(ids, norms, strict=True))

    def forget(self) -> None:
        """A bucket was reduced; nothing was taken before its time."""

    def stock_reduces(self) -> None:
        """DeepSpeed's own methods write to the partitions."""
        self._memory.forget()

    def has_overflow(self) -> bool:
        """Whether any rank's partitions hold an inf or a nan; one collective, one host read."""
        optimizer = self._optimizer
        with self._stream.active():
            bad = self._memory.overflow().to(self._device)
            bad = bad.logical_or(optimizer.inf_or_nan_tracker.any().to(self._device))
            optimizer.inf_or_nan_tracker.zero_()
        if not get_accelerator().resolves_data_dependency():
            get_accelerator().default_stream().wait_stream(optimizer.reduce_and_partition_stream)
        sums, issued = sum_scalars(bad.to(torch.float64).view(1), self._over)
        self._counters.collectives += issued
        return bool(sums[0].item() > 0)

    def norm_groups(self) -> list[Tensor]:
        """In place of ``_get_norm_groups``: each sub-group's norm, float32 and 0-dim, on CPU."""
        known = self._optimizer.norm_for_param_grads
        ids = self._optimizer.get_param_id
        totals = []
        for group in self._optimizer.fp16_groups:
            totals.append(_sum_of_squares([known[i] for i in map(ids, group) if i in known]))
        # As stock: rounded to fp32 before the sum over the ranks.
        own = torch.tensor(totals, dtype=torch.float32, device=self._device)
        sums, issued = sum_scalars(own, self._over)
        self._counters.collectives += issued
        masked = torch.tensor(-1.0, dtype=torch.float32, device=self._device)
        roots = (sums[i].clone() ** (1.0 / 2.0) for i in range(len(totals)))
        return [self._release.mask_norm(root, masked).cpu() for root in roots]

    def prepare(self, sub_group: int) -> None:
        """DeepSpeed calls it for no offloaded optimizer."""
        self._stock[PREPARE](self._optimizer, sub_group)

    def unscale(self, sub_group: int, total_norm: Any) -> None:
        """The fp32 gradient is there already: stock multiplies it in place, in one pass."""
        self._stock["unscale_and_clip_grads"](self._optimizer, sub_group, total_norm)


def _sum_of_squares(norms: Sequence[Tensor]) -> float:
    """Added one by one in float64, as stock does."""
    if not norms:
        return 0.0
    device = norms[0].device
    values: list[float] = torch.stack([n.to(device, torch.float64) for n in norms]).tolist()
    total = 0.0
    for value in values:
        total += value * value
    return total
