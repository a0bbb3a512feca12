"""An optimizer with just the fields that z3ext looks at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

WORLD = (0, 1, 2)  # a process group stands here as the tuple of its ranks


class Param:
    """A parameter of ZeRO stage 3, cut over the ranks of a group."""

    def __init__(self, numel: int, group: Any = WORLD, ranks: int = len(WORLD)) -> None:
        self.ds_id = numel
        self.ds_numel = numel
        self.ds_process_group = group
        self.ds_zero_placement_family = "replicated"
        self.dtype = torch.bfloat16
        self.chunk = -(-numel // ranks)

    def partition_numel(self) -> int:
        return self.chunk


class Optimizer:
    """What the decision on an optimizer looks at, as a served config has it."""

    def __init__(self, group: Any = WORLD, ranks: int = len(WORLD)) -> None:
        self.module = torch.nn.Module()
        self.reduce_scatter = False
        self.contiguous_gradients = True
        self.offload_optimizer = False
        self.swap_optimizer = False
        self.zenflow = False
        self.use_muon = False
        self.all2all_process_group: Any = None
        self.zero_hpz_partition_size = 1
        self.autoep_folding_tp_group: Any = None
        self.model_parallel_group: Any = None
        self.dtype = torch.bfloat16
        self.gradient_accumulation_dtype = torch.bfloat16
        self.dp_process_group: Any = group
        self.fp16_groups = [
            [Param(10, group, ranks), Param(1, group, ranks)],
            [Param(7, group, ranks)],
        ]
        self.grad_partitions_flat_buffer: Any = torch.zeros(18, dtype=torch.bfloat16)
        self.reduce_and_partition_stream = None
        self._grad_acc_hooks: list[Any] = [SimpleNamespace(id=-1)]
        self._leaf_module_hooks: list[Any] = []
        self.ipg_buckets: dict[Any, Any] = {
            torch.bfloat16: SimpleNamespace(buffer=torch.zeros(4)),
            torch.float32: SimpleNamespace(buffer=None),
        }
        self.fp32_partitioned_groups_flat: list[Any] = [torch.zeros(5), torch.zeros(3)]

    @property
    def params(self) -> list[Param]:
        return [param for group in self.fp16_groups for param in group]
