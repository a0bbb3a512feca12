"""The gradient path of one ZeRO stage 3 optimizer: thin, it hands over to buckets and the step.

It keeps every attribute that stock code reads (a bucket's params, elements and process group,
averaged_gradients, param.grad) as stock keeps it, and reads every buffer anew, since
offload_states, reload_states and checkpoint loading replace them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.utils import assert_ints_same_as_other_ranks
from torch import Tensor

from z3ext._log import log_rank0
from z3ext.deepspeed import refresh
from z3ext.deepspeed.diagnosis import Diagnosis, Found, Origin
from z3ext.deepspeed.gradient_step import GradientStep
from z3ext.deepspeed.hooks import HookWatch
from z3ext.deepspeed.names import ADD_GRAD, PREPARE, PRIVATE, READY, REDUCE_BUCKET
from z3ext.deepspeed.offload import OffloadStep
from z3ext.deepspeed.paths import ReductionPath, stock_reduces_by
from z3ext.deepspeed.releases.policies import group_of_the_parameters
from z3ext.deepspeed.releases.release import Release
from z3ext.ownership import owns_memory
from z3ext.reducer import Counters
from z3ext.streams import BucketStream

Method = Callable[..., Any]

_LEFT = "it can read a gradient before the reduction, so DeepSpeed's methods fill the buckets"


class GradientPath(Protocol):
    """What stands behind the replaced methods of one optimizer."""

    #: What of the path is left to DeepSpeed although it is served, and why; else "".
    note: str

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        """``Release.begin``: a backward begins, no gradient has come yet."""
        ...

    def ready(self, param: Any) -> None:
        """``reduce_ready_partitions_and_remove_grads``: a parameter's gradient is complete."""
        ...

    def add_grad(self, param: Any) -> None:
        """``__add_grad_to_ipg_bucket``: the bucket has room for the gradient."""
        ...

    def reduce_bucket(self, *args: Any) -> None:
        """``__reduce_and_partition_ipg_grads``: reduce, store this rank's slices."""
        ...

    def has_overflow(self, partition_gradients: bool) -> Any:
        """``has_overflow``: whether a rank's partitions hold an inf or a nan."""
        ...

    def norm_groups(self) -> Any:
        """``_get_norm_groups``: each sub-group's norm."""
        ...

    def prepare(self, sub_group: int) -> None:
        """``_prepare_fp32_grad_for_sub_group``: the fp32 gradient's memory."""
        ...

    def unscale(self, sub_group: int, total_norm: Any) -> None:
        """``unscale_and_clip_grads``: the fp32 gradient's values."""
        ...

    def update_scale(self, has_overflow: bool) -> None:
        """``_update_scale``: the loss scale after a step that is taken, or skipped."""
        ...

    def clean_up(self, prev_scale: Any) -> None:
        """``_overflow_clean_up``: the last thing that a skipped step does."""
        ...

    def post_step(self, timer_names: Any) -> None:
        """``_post_step``: gather the persistent parameters, then DeepSpeed's bookkeeping."""
        ...


class StockPath:
    """An optimizer that is not served: DeepSpeed's own methods, and the reason."""

    mode = "stock"
    note = ""

    def __init__(
        self, optimizer: Any, stock: Mapping[str, Method], begin: str, reason: str
    ) -> None:
        self.reason = reason
        self._optimizer = optimizer
        self._stock = stock
        self._begin = begin

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        return self._stock[self._begin](self._optimizer, *args, **kwargs)

    def ready(self, param: Any) -> None:
        self._stock[READY](self._optimizer, param)

    def add_grad(self, param: Any) -> None:
        self._stock[ADD_GRAD](self._optimizer, param)

    def reduce_bucket(self, *args: Any) -> None:
        self._stock[REDUCE_BUCKET](self._optimizer, *args)

    def has_overflow(self, partition_gradients: bool) -> Any:
        return self._stock["has_overflow"](self._optimizer, partition_gradients)

    def norm_groups(self) -> Any:
        return self._stock["_get_norm_groups"](self._optimizer)

    def prepare(self, sub_group: int) -> None:
        self._stock[PREPARE](self._optimizer, sub_group)

    def unscale(self, sub_group: int, total_norm: Any) -> None:
        self._stock["unscale_and_clip_grads"](self._optimizer, sub_group, total_norm)

    def update_scale(self, has_overflow: bool) -> None:
        self._stock["_update_scale"](self._optimizer, has_overflow)

    def clean_up(self, prev_scale: Any) -> None:
        self._stock["_overflow_clean_up"](self._optimizer, prev_scale)

    def post_step(self, timer_names: Any) -> None:
        self._stock["_post_step"](self._optimizer, timer_names)


class ServedPath:
    """An optimizer that z3ext serves.

    Args:
        optimizer: a ``DeepSpeedZeroOptimizer_Stage3`` that ``support.refusal`` lets pass.
        stock: DeepSpeed's own methods, by name.
        release: the family of releases at hand.
        reduction: how buckets are reduced.
        stream: where bucket work runs.
        step: the check, norm and unscale at the step.
        diagnosis: names what made a step overflow.
        counters: the engine's.
    """

    reason = ""

    def __init__(
        self,
        optimizer: Any,
        stock: Mapping[str, Method],
        release: Release,
        reduction: ReductionPath,
        stream: BucketStream,
        step: GradientStep | OffloadStep,
        diagnosis: Diagnosis,
        counters: Counters,
    ) -> None:
        self.mode = reduction.mode
        self._optimizer = optimizer
        self._stock = stock
        self._release = release
        self._theirs = release.buckets.of(optimizer)
        self._reduction = reduction
        self._bounded = reduction.bounded(optimizer)
        self._stream = stream
        self._step = step
        self._diagnosis = diagnosis
        self._counters = counters
        self._group = release.group(optimizer)
        params = list(itertools.chain.from_iterable(optimizer.fp16_groups))
        ends = itertools.accumulate((param.partition_numel() for param in params), initial=0)
        self._begins = dict(zip((param.ds_id for param in params), ends, strict=False))
        self._buckets = {dtype: reduction.new_bucket(dtype, self._begins) for dtype in self._theirs}
        # One communication dtype, unless torch.autocast is on: no need to ask for each parameter.
        self._only_dtype = next(iter(self._buckets)) if len(self._buckets) == 1 else None
        self._watch = HookWatch(optimizer, release.own_node_hooks)
        self._left = release.buckets.defect(self.mode)
        self._left_now = self._left  # why this backward's buckets are stock's; "" when they aren't
        self.note = ""
        self._found: Found | None = None
        self._stock_filled = False  # a bucket of this optimizer step, so that no flag tells of it

    # --- buckets ----------------------------------------------------------------------------------

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        """Look for hooks that can tell z3ext's buckets from stock's.

        Stock leaves an undivided view of the bucket in ``param.grad`` until the reduction, and what
        a hook changes there counts. z3ext's bucket holds divided values, in rows on one of the
        paths: so where anybody may look, stock's methods fill and reduce the buckets.
        """
        micro_step = self._optimizer.micro_step_id
        if micro_step == 0:
            self._stock_filled = False
        for bucket in self._buckets.values():
            bucket.flags.begin(micro_step)
        watched = self._watch.first()
        self._left_now = f"{watched}: {_LEFT}" if watched else self._left
        if self._left_now and not self.note:
            log_rank0(logging.WARNING, f"{self._left_now}; the step is z3ext's")
        self.note = self._left_now
        return self._stock[self._release.begin](self._optimizer, *args, **kwargs)

    def ready(self, param: Any) -> None:
        optimizer = self._optimizer
        if self._release.is_postponed(optimizer):
            return
        dtype = self._only_dtype or optimizer.get_param_comm_dtype(param)
        elements = self._theirs[dtype].elements
        if elements > 0 and elements + param.ds_numel > optimizer.reduce_bucket_size:
            self._reduce(dtype)
        if self._release.is_complete(param):
            self._add(param, dtype)

    def add_grad(self, param: Any) -> None:
        dtype = self._only_dtype or self._optimizer.get_param_comm_dtype(param)
        self._add(param, dtype)

    def _add(self, param: Any, dtype: torch.dtype) -> None:
        """Note the gradient, pack when there are enough; called for every parameter.

        A gradient larger than the whole bucket is left to stock, which reduces it by itself; so is
        a bucket that stock began, or that somebody watches.
        """
        optimizer = self._optimizer
        theirs, ours = self._theirs[dtype], self._buckets[dtype]
        params, grad = theirs.params, param.grad
        if not params:
            ours.clear()  # _pre_step drops what a reentrant backward left behind
        elements = theirs.elements + grad.numel()
        begins_stocks = not params and self._left_now
        too_large = self._bounded and elements > optimizer.reduce_bucket_size
        if begins_stocks or too_large or len(ours.keys) != len(params):
            self._stock[ADD_GRAD](optimizer, param)
            self._stock_filled = True
            return
        # Stock copies here. What may change before the pack must not wait.
        urgent = not owns_memory(grad) and theirs.buffer is not None
        full = ours.add(param, grad, param.ds_id)
        params.append(param)
        self._release.buckets.added(theirs, elements, self._group)
        if urgent or full:
            self._pack(dtype)

    def _pack(self, dtype: torch.dtype) -> None:
        divisors = self._reduction.scaling(self._optimizer).divisors
        with torch.no_grad():
            self._buckets[dtype].pack(self._theirs[dtype].buffer, divisors)

    def reduce_bucket(self, *args: Any) -> None:
        self._reduce(self._release.buckets.dtype(self._optimizer, args))

    def _reduce(self, dtype: torch.dtype) -> None:
        optimizer, release = self._optimizer, self._release
        theirs, ours = self._theirs[dtype], self._buckets[dtype]
        params = theirs.params
        if not params:
            return
        self._step.forget()
        if len(ours.keys) != len(params):
            self._step.stock_reduces()
            with stock_reduces_by(self.mode, optimizer):
                self._stock[REDUCE_BUCKET](optimizer, *release.buckets.arguments(dtype))
            return
        _check_params(params, ours.keys, ours.numels)
        self._check_places(params)
        self._limit_events()
        with torch.no_grad(), self._stream.active():
            if release.checks_order(optimizer):
                assert_ints_same_as_other_ranks([param.ds_id for param in params])
            ours.reduce(
                theirs.buffer,
                self._reduction.scaling(optimizer)._replace(
                    rounding=release.rounding(optimizer, dtype)
                ),
                self._step.partitions(),
                accumulate=optimizer.micro_step_id != 0,
            )
            for param in params:
                param.grad = None
            release.buckets.emptied(theirs)
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
        for dtype, ours in self._buckets.items():
            theirs = self._theirs.get(dtype)
            if theirs is not None and ours.keys and len(ours.keys) == len(theirs.params):
                dropped += len(ours.keys)
                self._release.buckets.emptied(theirs)
            ours.clear()
        return dropped

    def _check_places(self, params: Sequence[Any]) -> None:
        """The partitions stand one after the other in the flat buffer, as stock lays them out."""
        flat: Tensor = self._optimizer.grad_partitions_flat_buffer
        partitions = getattr(self._optimizer, f"{PRIVATE}__param_id_to_grad_partition")
        for param in (params[0], params[-1]):
            place = flat.data_ptr() + self._begins[param.ds_id] * flat.element_size()
            if partitions[param.ds_id].data_ptr() != place:
                raise RuntimeError(
                    f"z3ext: the gradient partition of parameter {param.ds_id} is not at its place "
                    "in grad_partitions_flat_buffer; expected DeepSpeed's own layout; call "
                    "z3ext.unpatch_deepspeed() before replacing the partitions"
                )

    def _limit_events(self) -> None:
        """Stock's limit to the reductions in flight."""
        events = self._optimizer.param_reduce_events
        while events and events[0].query():
            events.popleft()
        if len(events) > self._optimizer.max_param_reduce_events:
            events.popleft().synchronize()

    # --- the step ---------------------------------------------------------------------------------

    def has_overflow(self, partition_gradients: bool) -> Any:
        if not partition_gradients:
            return self._stock["has_overflow"](self._optimizer, partition_gradients)
        return self._step.has_overflow()

    def norm_groups(self) -> list[Tensor]:
        return self._step.norm_groups()

    def prepare(self, sub_group: int) -> None:
        self._step.prepare(sub_group)

    def unscale(self, sub_group: int, total_norm: Any) -> None:
        self._step.unscale(sub_group, total_norm)

    def update_scale(self, has_overflow: bool) -> None:
        stock = self._stock["_update_scale"]
        if not has_overflow:
            stock(self._optimizer, has_overflow)
            return
        self._counters.steps += 1
        self._counters.skipped += 1
        flags = (bucket.flags.first() for bucket in self._buckets.values())
        first = min((step for step in flags if step is not None), default=None)
        self._found = self._diagnosis.look(Origin(not self._stock_filled, first))
        before = float(self._optimizer.loss_scale)
        try:
            stock(self._optimizer, has_overflow)
        except Exception:  # the loss scale is at its minimum: no clean-up follows
            self._tell(before)
            raise

    def clean_up(self, prev_scale: Any) -> None:
        self._stock["_overflow_clean_up"](self._optimizer, prev_scale)
        self._tell(float(prev_scale))

    def _tell(self, scale_before: float) -> None:
        found, self._found = self._found, None
        if found is not None:
            self._diagnosis.tell(found, self._counters.steps, scale_before)

    def post_step(self, timer_names: Any) -> None:
        self._counters.steps += 1
        optimizer = self._optimizer
        refresh.gather(optimizer.persistent_parameters, group_of_the_parameters(optimizer))
        # Finds nothing left to gather, or what the refresh leaves to it.
        self._stock["_post_step"](optimizer, timer_names)


def _check_params(params: Sequence[Any], keys: Sequence[int], numels: list[int]) -> None:
    """Stock's own checks of a bucket, with its exceptions."""
    expected = [param.ds_numel for param in params]
    if numels != expected:
        found, wanted = next((a, b) for a, b in zip(numels, expected, strict=True) if a != b)
        raise RuntimeError(
            f"z3ext: a gradient has {found} elements but its parameter has {wanted}; "
            "expected the same number; a hook must not change a gradient's size"
        )
    if len(set(keys)) != len(keys):
        raise AssertionError(
            "z3ext: a parameter is in the bucket twice; expected each gradient once before the "
            "bucket is reduced; a parameter's hook fired twice in one backward"
        )
