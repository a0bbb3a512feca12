"""What ZeRO stage 3 does with the gradients at ``step()``: overflow check, norms, unscale."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from z3ext import memory, ops
from z3ext.collectives import SumOverRanks, sum_scalars
from z3ext.deepspeed.names import PREPARE
from z3ext.deepspeed.releases.release import Release
from z3ext.norms import segment_norms
from z3ext.partitions import FlatPartitions, Partitions
from z3ext.reducer import Counters
from z3ext.streams import BucketStream

Method = Callable[..., Any]


class GradientStep:
    """Check, norms and unscale of one optimizer, each in one pass over the flat partitions.

    Args:
        optimizer: the ZeRO stage 3 optimizer.
        stock: DeepSpeed's own methods, by name.
        release: the family of releases at hand.
        over: the sum over ``Release.group``.
        stream: where the partitions were written.
        counters: the engine's.
    """

    def __init__(
        self,
        optimizer: Any,
        stock: dict[str, Method],
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
        self._segment_norms = segment_norms(optimizer.grad_partitions_flat_buffer.device)
        self._counters = counters
        groups: list[list[Any]] = optimizer.fp16_groups
        numels = [param.partition_numel() for param in itertools.chain.from_iterable(groups)]
        self._bounds = list(itertools.accumulate(numels, initial=0))
        self._bounds_tensor = torch.tensor(self._bounds, dtype=torch.int64, device="cpu")
        #: For each sub-group, the first and the end of its parameters in fp16_groups' order.
        counts = itertools.accumulate(map(len, groups), initial=0)
        self._spans = list(itertools.pairwise(counts))
        self._norm_groups: list[Tensor] | None = None
        self._unscaled_later: dict[int, Tensor] = {}

    # --- overflow and norms -----------------------------------------------------------------------

    def has_overflow(self) -> bool:
        """Whether any rank's partitions hold an inf or a nan; keeps the norms for this step.

        One read of the buffer, one collective, one host read.
        """
        sums = self._measure()
        # Only the fp16 step asks here and takes the norms right after; elsewhere the gradients may
        # change between the two.
        takes_norms = self._optimizer.dtype == torch.float16 and self._has_gradients()
        self._norm_groups = self._norms_of(sums) if takes_norms else None
        return bool(sums[-1].item() > 0)

    def norm_groups(self) -> list[Tensor]:
        """In place of ``_get_norm_groups``: each sub-group's norm, float64 and 0-dim, or -1.0."""
        norms, self._norm_groups = self._norm_groups, None
        if norms is not None:
            return norms
        if not self._has_gradients():  # a step without backward: stock's own error
            stock_norms: list[Tensor] = self._stock["_get_norm_groups"](self._optimizer)
            return stock_norms
        return self._norms_of(self._measure())

    def partitions(self) -> Partitions:
        """Where the slices of the next bucket go."""
        return FlatPartitions(self._optimizer.grad_partitions_flat_buffer)

    def stock_reduces(self) -> None:
        """DeepSpeed's own methods write to the partitions: they are read anew at the step."""

    def forget(self) -> None:
        """The partitions changed: norms taken before no longer hold."""
        self._norm_groups = None

    def _has_gradients(self) -> bool:
        averaged = self._optimizer.averaged_gradients
        return all(averaged.get(i) is not None for i in range(len(self._spans)))

    def _measure(self) -> Tensor:
        """Over all ranks: each sub-group's sum of squared norms, then how many ranks overflowed."""
        optimizer = self._optimizer
        flat = optimizer.grad_partitions_flat_buffer
        with self._stream.active():
            bad, norms = self._segment_norms(flat, self._bounds_tensor)
            self._replace_foreign(norms)
            squares = norms.pow(2.0)
            # torch.sum of the same values in the same order as stock's, sub-group by sub-group.
            parts = [squares[begin:end].sum() for begin, end in self._spans]
            parts.append(bad.logical_or(optimizer.inf_or_nan_tracker.any()).to(torch.float64))
            optimizer.inf_or_nan_tracker.zero_()
        if not get_accelerator().resolves_data_dependency():
            get_accelerator().default_stream().wait_stream(optimizer.reduce_and_partition_stream)
        sums, issued = sum_scalars(torch.stack(parts), self._over)
        self._counters.collectives += issued
        return sums

    def _norms_of(self, sums: Tensor) -> list[Tensor]:
        # Stock's own expressions, so that type, dtype and bits are stock's.
        masked = torch.tensor(-1.0, device=self._optimizer.device, dtype=torch.float)
        totals = [sums[i].clone() ** (1.0 / 2.0) for i in range(len(self._spans))]
        return [self._release.mask_norm(total, masked) for total in totals]

    def _replace_foreign(self, norms: Tensor) -> None:
        """A gradient that is not the parameter's partition is measured by itself, as stock would.

        Stock puts zeros for a parameter that was frozen after ``deepspeed.initialize``.
        """
        averaged = self._optimizer.averaged_gradients
        for i, (begin, _) in enumerate(self._spans):
            grads = averaged.get(i) or ()
            for k in self._foreign(i, grads):
                norms[begin + k] = grads[k].to(norms.device).to(torch.float64).norm(2.0)

    def _foreign(self, sub_group: int, grads: Any) -> list[int]:
        """Indices of the gradients that do not stand at their place in the flat buffer."""
        flat = self._optimizer.grad_partitions_flat_buffer
        base, size = flat.data_ptr(), flat.element_size()
        begin, end = self._spans[sub_group]
        places = self._bounds[begin:end]
        return [
            k
            for k, (grad, place) in enumerate(zip(grads, places, strict=False))
            if grad.data_ptr() != base + place * size
        ]

    # --- unscale ----------------------------------------------------------------------------------

    def prepare(self, sub_group: int) -> None:
        """In place of ``_prepare_fp32_grad_for_sub_group``: the memory, filled by ``unscale``."""
        optimizer = self._optimizer
        grads = optimizer.averaged_gradients[sub_group]
        weights = optimizer.fp32_partitioned_groups_flat[sub_group]
        begin, end = (self._bounds[edge] for edge in self._spans[sub_group])
        self._unscaled_later.pop(sub_group, None)
        if grads is None or self._foreign(sub_group, grads) or weights.numel() != end - begin:
            self._stock[PREPARE](optimizer, sub_group)
            return
        partition = optimizer.grad_partitions_flat_buffer[begin:end]
        if len(grads) == 1 and partition.dtype == weights.dtype:
            # Stock's flatten and cast both return the partition itself here, so that it is unscaled
            # in place, where safe_get_full_grad sees it.
            weights.grad = partition
        else:
            weights.grad = memory.empty_like(weights)
        self._unscaled_later[sub_group] = partition
        if self._release.clears_gradients:
            optimizer.zero_grad(set_to_none=True)
        optimizer.averaged_gradients[sub_group] = None

    def unscale(self, sub_group: int, total_norm: Any) -> None:
        """In place of ``unscale_and_clip_grads``: partition to fp32 gradient in one pass."""
        optimizer = self._optimizer
        partition = self._unscaled_later.pop(sub_group, None)
        if partition is None:
            self._stock["unscale_and_clip_grads"](optimizer, sub_group, total_norm)
            return
        combined_scale = optimizer.loss_scale
        if optimizer.clip_grad > 0.0:
            clip = ((total_norm / optimizer.loss_scale) + 1e-6) / optimizer.clip_grad
            combined_scale = torch.clamp(clip, min=1.0) * optimizer.loss_scale
        scale = 1.0 / combined_scale
        if not isinstance(scale, Tensor):
            scale = torch.full((), scale, dtype=torch.float64, device=partition.device)
        grad = optimizer.fp32_partitioned_groups_flat[sub_group].grad
        ops.unscale_(partition, scale.to(partition.device), grad)
