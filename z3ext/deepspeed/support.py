"""Which ZeRO stage 3 optimizers z3ext serves, and the reason where it does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from z3ext.deepspeed.fingerprint import fingerprint, resolve
from z3ext.deepspeed.names import PRIVATE, READY
from z3ext.deepspeed.recognise import unknown_functions
from z3ext.deepspeed.releases.policies import group_of_the_parameters
from z3ext.deepspeed.releases.release import Release
from z3ext.layout import partition_numel

#: DeepSpeed measures an offloaded partition in parts of this size.
_MEASURED_AT_ONCE = 250_000_000
_STORED = (torch.float16, torch.bfloat16, torch.float32)

#: A condition that stands for "not served", and the reason that the user reads.
_Refusal = tuple[Callable[[Any], bool], str]

#: An override of these that calls DeepSpeed's own, or does its work, is as right: they are replaced
#: for speed, or to be called early.
_SHORT_CUTS = (
    "backward",
    "backward_prologue",
    READY,
    "_update_scale",
    "_overflow_clean_up",
    "_post_step",
)

#: Methods that stock calls from those replaced and z3ext does not: an override would be passed by.
_BYPASSED = (
    f"{PRIVATE}__avg_scatter_grads",
    "reduce_independent_p_g_buckets_and_remove_grads",
    "_apply_autoep_folding_tp_correction",
    f"{PRIVATE}__avg_scatter_contiguous_grads",
    "partition_grads",
    "get_grad_norm_direct",
    "_model_parallel_all_reduce",
)


def _has(optimizer: Any, name: str) -> bool:
    """Whether a feature is on; a release without the field is one without the feature."""
    value = getattr(optimizer, name, None)
    return value is not None and value is not False


def _ranks_in(group: Any) -> int:
    """The ranks of an optional group."""
    return 1 if group is None else len(dist.get_process_group_ranks(group))


_CONFIG_REFUSALS: tuple[_Refusal, ...] = (
    (lambda o: bool(o.swap_optimizer), "the optimizer's states are swapped to NVMe"),
    (lambda o: _has(o, "zenflow"), "ZenFlow is on"),
    (lambda o: _has(o, "use_muon"), "the optimizer is Muon"),
    (lambda o: o.all2all_process_group is not None, "gradients are quantised (qgZ)"),
    (lambda o: _has(o, "autoep_folding_tp_group"), "AutoEP folding is on"),
    (
        lambda o: _ranks_in(o.model_parallel_group) > 1,
        "there is a model-parallel group of several ranks",
    ),
)


def is_destroyed(optimizer: Any, release: Release) -> bool:
    """Whether ``engine.destroy()`` was called; DeepCompile drops the buckets and the hooks."""
    return not release.buckets.of(optimizer) and bool(optimizer._grad_acc_hooks)


def refusal(
    optimizer: Any,
    cls: type,
    release: Release,
    replacements: Mapping[str, object],
    mode: str = "auto",
) -> str:
    """Why z3ext leaves one optimizer to DeepSpeed's own methods; "" when it serves it.

    Args:
        optimizer: an instance of ``cls`` or of a subclass.
        cls: ``DeepSpeedZeroOptimizer_Stage3``, patched.
        release: the family of releases that it belongs to.
        replacements: what is installed on ``cls``, by name.
        mode: the mode that the user asked for.
    """
    reasons = itertools.chain(
        _overrides(optimizer, cls, release, replacements),
        (reason for applies, reason in _CONFIG_REFUSALS if applies(optimizer)),
        _unserved_life(optimizer, release),
        _unserved_class(optimizer),
        _unserved_layout(optimizer, mode),
        _unserved_buffers(optimizer, release),
        _unserved_parameters(optimizer),
    )
    return next(reasons, "")


def _overrides(
    optimizer: Any, cls: type, release: Release, replacements: Mapping[str, object]
) -> Iterator[str]:
    """Another tool, or a subclass, put a method of its own where z3ext's or a known one belongs.

    Looked at here and not only when DeepSpeed was patched: the tool may have come later.
    """
    for name, hashes in release.methods.items():
        if name in _SHORT_CUTS:
            continue
        shown = name.removeprefix(PRIVATE)
        if name in vars(optimizer) and (name in replacements or name in _BYPASSED):
            yield f"{shown} is overridden on the optimizer instance"
        if name in replacements:
            if resolve(type(optimizer), name) is not replacements[name]:
                yield f"{type(optimizer).__name__} overrides {shown}"
        elif fingerprint(resolve(cls, name)) not in hashes:
            yield f"{shown} was replaced after z3ext.patch_deepspeed()"
        elif (
            type(optimizer) is not cls and fingerprint(resolve(type(optimizer), name)) not in hashes
        ):
            yield f"{type(optimizer).__name__} overrides {shown}"
    for name in unknown_functions(release, cls):
        yield f"{name} was replaced after z3ext.patch_deepspeed()"


def _unserved_life(optimizer: Any, release: Release) -> Iterator[str]:
    if is_destroyed(optimizer, release):
        yield "the engine was destroyed"
    elif not release.buckets.of(optimizer):
        yield "DeepCompile reduces the gradients"


def _unserved_class(optimizer: Any) -> Iterator[str]:
    name = type(optimizer).__name__
    if "MiCS" in name:
        yield "MiCS is on (mics_shard_size)"
    if "SuperOffload" in name:
        yield "SuperOffload is on"


def _unserved_layout(optimizer: Any, mode: str) -> Iterator[str]:
    if optimizer.contiguous_gradients:
        return
    if mode == "all_reduce":
        yield (
            "mode='all_reduce' needs a bucket buffer; set \"contiguous_gradients\": true in "
            "zero_optimization"
        )
    # Stock then concatenates the gradients as they are, and torch.cat promotes mixed dtypes.
    params = itertools.chain.from_iterable(optimizer.fp16_groups)
    if any(param.dtype != optimizer.dtype for param in params):
        yield "contiguous_gradients is false and the parameters have several dtypes"


def _unserved_buffers(optimizer: Any, release: Release) -> Iterator[str]:
    partitions = optimizer.grad_partitions_flat_buffer
    if partitions is None or partitions.dtype not in _STORED:
        yield f"gradients are accumulated in {optimizer.gradient_accumulation_dtype}"
        return
    offloaded = bool(optimizer.offload_optimizer)
    device = partitions.device
    if device.type not in ("cpu", "cuda"):
        yield f"the gradients are on {device}; z3ext has kernels for cpu and cuda"
    for dtype, bucket in release.buckets.of(optimizer).items():
        if dtype not in _STORED:
            yield f"gradients are communicated in {dtype}"
        elif release.rounding(optimizer, dtype) and dtype != torch.float32:
            # Stock casts to and fro between them, differently for a partition with padding.
            yield f"gradients are communicated in {dtype} and parameters are {optimizer.dtype}"
        memory = release.buckets.memory(bucket)
        if memory is not None and memory.device != device and not offloaded:
            yield f"the bucket is on {memory.device} and the partitions on {device}"
    for flat in optimizer.fp32_partitioned_groups_flat:
        if flat is None or flat.dtype != torch.float32:
            yield "master weights are not float32"


def _unserved_parameters(optimizer: Any) -> Iterator[str]:
    group = group_of_the_parameters(optimizer)
    # The overflow flag goes over the data-parallel group, everything else over the partition group;
    # they are different objects as a rule, of the same ranks.
    ranks = dist.get_process_group_ranks(group)
    if ranks != dist.get_process_group_ranks(optimizer.dp_process_group):
        yield "parameters are partitioned over other ranks than the data-parallel group's"
    for param in itertools.chain.from_iterable(optimizer.fp16_groups):
        if getattr(param, "ds_process_group", optimizer.dp_process_group) != group:
            yield "parameters are partitioned over different process groups"
        if getattr(param, "ds_zero_placement_family", "replicated") == "autoep_expert":
            yield "AutoEP experts are partitioned over groups of their own"
        grad_dtype = getattr(param, "grad_dtype", None)
        if grad_dtype is not None and grad_dtype not in _STORED:
            yield f"a parameter's gradient is in {grad_dtype} (grad_dtype)"
        if optimizer.offload_optimizer and param.partition_numel() > _MEASURED_AT_ONCE:
            yield f"a parameter's offloaded partition has more than {_MEASURED_AT_ONCE} elements"
        if param.partition_numel() != partition_numel(param.ds_numel, len(ranks)):
            yield f"a parameter of {param.ds_numel} elements is not cut into {len(ranks)} chunks"
