"""What the adapter asks of the DeepSpeed at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from z3ext.deepspeed.names import ADD_GRAD, PREPARE, READY, REDUCE_BUCKET
from z3ext.deepspeed.releases.buckets import BucketAccess

#: By name, the hashes (z3ext.deepspeed.fingerprint) of sources that behave alike.
Hashes = Mapping[str, frozenset[str]]


def hashes(*tables: Mapping[str, str]) -> Hashes:
    """The tables together; hashes of one name stand in one string, with blanks between them."""
    return {name: frozenset(text.split()) for table in tables for name, text in table.items()}


@dataclass(frozen=True)
class Release:
    """A family of releases that behave alike on the gradient path.

    name: the releases, as a user reads them.
    methods: what z3ext replaces, passes by or counts on in ``DeepSpeedZeroOptimizer_Stage3``.
    functions: the same, of functions that the class's module calls by name.
    bucket_fields: of ``IPGBucketZ3``; None where there is no such class.
    begin: the method with which every backward begins.
    group: the process group over which an optimizer's gradients are reduced and measured.
    buckets: how the gradient buckets are reached, and counted.
    rounding: the dtype, for gradients communicated in a dtype, to which an average is rounded
        before it is accumulated; None for no rounding of its own.
    mask_norm: the norm, 0-dim, that stands for a norm; another one where it is inf or nan.
    is_complete: whether a parameter's gradient may go to the bucket when its hook fires.
    is_postponed: whether the reduction waits for the end of several backwards.
    checks_order: whether the ranks compare a bucket's parameters before they reduce it.
    at_boundary: whether the micro-step is the last one before the optimizer steps.
    reduced_ids: the ``ds_id`` of what was reduced since the last step, for a set to be added to.
    clears_gradients: whether preparing a sub-group's fp32 gradient clears every ``param.grad``.
    own_node_hooks: DeepSpeed's own hook stands on a parameter's AccumulateGrad node.
    """

    name: str
    methods: Hashes
    functions: Hashes
    bucket_fields: tuple[str, ...] | None
    begin: str
    group: Callable[[Any], Any]
    buckets: BucketAccess
    rounding: Callable[[Any, torch.dtype], torch.dtype | None]
    mask_norm: Callable[[Tensor, Tensor], Tensor]
    is_complete: Callable[[Any], bool]
    is_postponed: Callable[[Any], bool]
    checks_order: Callable[[Any], bool]
    at_boundary: Callable[[Any], bool]
    reduced_ids: Callable[[Any], set[int]]
    clears_gradients: bool
    own_node_hooks: bool

    @property
    def replaced(self) -> tuple[str, ...]:
        """The methods that z3ext replaces."""
        return (
            self.begin,
            READY,
            ADD_GRAD,
            REDUCE_BUCKET,
            "has_overflow",
            "_get_norm_groups",
            PREPARE,
            "unscale_and_clip_grads",
            "_update_scale",
            "_overflow_clean_up",
            "_post_step",
        )
