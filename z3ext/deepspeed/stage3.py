"""The replacement methods of the ZeRO stage 3 optimizer: thin, they hand over to the reducer.

One adapter serves one optimizer. It keeps every attribute that stock code reads (the bucket's
params, elements and process group, averaged_gradients, param.grad) as stock keeps it, and reads
every buffer anew, since offload_states, reload_states and checkpoint loading replace them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.utils import assert_ints_same_as_other_ranks

from z3ext.collectives import SumOverRanks
from z3ext.deepspeed.fingerprint import ADD_GRAD, PRIVATE, REDUCE_BUCKET
from z3ext.deepspeed.gradient_step import GradientStep
from z3ext.deepspeed.support import partition_group
from z3ext.reducer import BucketReducer, Counters, Scaling
from z3ext.streams import BucketStream

Method = Callable[..., Any]


class Stage3Adapter:
    """The gradient path of one optimizer.

    Args:
        optimizer: a ``DeepSpeedZeroOptimizer_Stage3`` that ``support.refusal`` lets pass.
        stock: DeepSpeed's own methods, by name.
        over: the sum over ``support.partition_group(optimizer)``.
        stream: where bucket work runs.
        step: the check, norm and unscale at the step.
    """

    def __init__(
        self,
        optimizer: Any,
        stock: dict[str, Method],
        over: SumOverRanks,
        stream: BucketStream,
        step: GradientStep,
        counters: Counters,
    ) -> None:
        self._optimizer = optimizer
        self._stock = stock
        self._over = over
        self._group = partition_group(optimizer)
        self._stream = stream
        self.step = step
        self.counters = counters
        self._reducers = {
            dtype: BucketReducer(over, stream, counters) for dtype in optimizer.ipg_buckets
        }
        self._holds_data = {
            param.ds_id: param.partition_numel() * over.rank < param.ds_numel
            for param in itertools.chain.from_iterable(optimizer.fp16_groups)
        }

    def add_grad(self, param: Any) -> None:
        """In place of ``__add_grad_to_ipg_bucket``: note the gradient, pack when there are enough.

        A gradient larger than the whole bucket is left to stock, which reduces it by itself; so is
        a bucket that stock began.
        """
        optimizer = self._optimizer
        dtype = optimizer.get_param_comm_dtype(param)
        bucket, reducer = optimizer.ipg_buckets[dtype], self._reducers[dtype]
        if not bucket.params:
            reducer.clear()  # _pre_step drops what a reentrant backward left behind
        numel = param.grad.numel()
        fits = bucket.elements + numel <= optimizer.reduce_bucket_size
        if not fits or reducer.count != len(bucket.params):
            self._stock[ADD_GRAD](optimizer, param)
            return
        reducer.add(param, bucket.buffer, self._scaling().divisors)
        bucket.params.append(param)
        bucket.process_group = self._group
        bucket.elements += numel

    def reduce_bucket(self, dtype: torch.dtype) -> None:
        """In place of ``__reduce_and_partition_ipg_grads``: reduce, store this rank's slices."""
        optimizer = self._optimizer
        bucket, reducer = optimizer.ipg_buckets[dtype], self._reducers[dtype]
        params = bucket.params
        if not params:
            return
        if reducer.count != len(params):
            self._stock[REDUCE_BUCKET](optimizer, dtype)
            return
        _check_params(params, reducer.numels)
        self._limit_events()
        self.step.forget()
        with self._stream.active():
            if optimizer.enable_sanity_checks:
                assert_ints_same_as_other_ranks([param.ds_id for param in params])
            reducer.reduce(
                bucket.buffer,
                self._scaling(),
                optimizer.grad_partitions_flat_buffer,
                self._destinations(params),
                accumulate=optimizer.micro_step_id != 0,
            )
            bucket.clear_params()
            if not get_accelerator().handles_memory_backpressure():
                event = get_accelerator().Event()
                event.record()
                optimizer.param_reduce_events.append(event)

    def discard_buckets(self) -> int:
        """Empty the buckets that hold gradients already divided; how many gradients were dropped.

        Stock could not go on with them. Between a backward and the next one there are none, but for
        what a reentrant backward left behind, which stock drops at the step as well.
        """
        dropped = 0
        for dtype, reducer in self._reducers.items():
            bucket = self._optimizer.ipg_buckets.get(dtype)
            if bucket is not None and reducer.count and reducer.count == len(bucket.params):
                dropped += reducer.count
                bucket.clear_params()
            reducer.clear()
        return dropped

    def _scaling(self) -> Scaling:
        """The factors of stock's ``__avg_scatter_contiguous_grads``, in its order."""
        optimizer, world_size = self._optimizer, self._over.world_size
        factor = optimizer.gradient_predivide_factor
        average = world_size / float(optimizer.sequence_parallel_size)
        if not optimizer.postscale_gradients:
            return Scaling((average,), ())
        # Stock leaves the multiplication out where the factor is the world size.
        multipliers = (factor,) if factor != world_size else ()
        return Scaling((factor, average), multipliers)

    def _destinations(self, params: list[Any]) -> list[int | None]:
        """Where each parameter's partition begins in the flat buffer; None where it has no data."""
        flat = self._optimizer.grad_partitions_flat_buffer
        partitions = getattr(self._optimizer, f"{PRIVATE}__param_id_to_grad_partition")
        base, size = flat.data_ptr(), flat.element_size()
        return [
            (partitions[param.ds_id].data_ptr() - base) // size
            if self._holds_data[param.ds_id]
            else None
            for param in params
        ]

    def _limit_events(self) -> None:
        """Stock's limit to the reductions in flight."""
        events = self._optimizer.param_reduce_events
        while events and events[0].query():
            events.popleft()
        if len(events) > self._optimizer.max_param_reduce_events:
            events.popleft().synchronize()


def _check_params(params: list[Any], numels: Any) -> None:
    """Stock's own checks of a bucket, with its exceptions."""
    for param, numel in zip(params, numels, strict=True):
        if numel != param.ds_numel:
            raise RuntimeError(
                f"z3ext: a gradient has {numel} elements but its parameter has {param.ds_numel}; "
                "expected the same number; a hook must not change a gradient's size"
            )
    if len({param.ds_id for param in params}) != len(params):
        raise AssertionError(
            "z3ext: a parameter is in the bucket twice; expected each gradient once before the "
            "bucket is reduced; a parameter's hook fired twice in one backward"
        )
