"""Gathers the persistent parameters after a step, with one collective for each dtype.

Stock gathers each of them by a collective of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


def gather(params: Sequence[Any], group: Any) -> int:
    """Gather partitioned parameters from the ranks of a group; how many collectives that took.

    Parameters that are not plainly partitioned over the group (quantised, with a secondary
    partition, on NVMe, gathered already) are left to DeepSpeed.
    """
    if ds_comm.get_world_size(group=group) == 1:
        return 0  # nothing travels, stock only hands over
    by_dtype: dict[torch.dtype, list[Any]] = {}
    for param in params:
        if _is_plain(param):
            by_dtype.setdefault(param.ds_tensor.dtype, []).append(param)
    for members in by_dtype.values():
        _gather_together(members, group)
    return len(by_dtype)


def _is_plain(param: Any) -> bool:
    partition = param.ds_tensor
    return (
        param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        and partition.status == PartitionedParamStatus.AVAILABLE
        and partition.device == param.device
        and not hasattr(partition, "ds_quant_scale")
        and getattr(param, "ds_secondary_tensor", None) is None
    )


def _gather_together(params: Sequence[Any], group: Any) -> None:
    """Parameters of one dtype; afterwards each has memory of its own, as stock leaves it."""
    own = torch.cat([param.ds_tensor.view(-1) for param in params])
    world_size = ds_comm.get_world_size(group=group)
    rows = own.new_empty(world_size * own.numel())
    ds_comm.allgather_fn(rows, own, group=group)
    table = rows.view(world_size, own.numel())
    begin = 0
    for param in params:
        numel = param.ds_tensor.ds_numel
        chunks = table[:, begin : begin + numel].reshape(-1)
        param.data = chunks[: param.ds_numel].view(param.ds_shape)
        param.ds_status = ZeroParamStatus.AVAILABLE
        begin += numel
