"""Names in DeepSpeed's ZeRO stage 3 that z3ext uses, and which of its modules it needs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

#: What Python puts before the names of the class's private methods.
PRIVATE = "_DeepSpeedZeroOptimizer_Stage3"
ADD_GRAD = f"{PRIVATE}__add_grad_to_ipg_bucket"
REDUCE_BUCKET = f"{PRIVATE}__reduce_and_partition_ipg_grads"
READY = "reduce_ready_partitions_and_remove_grads"
PREPARE = "_prepare_fp32_grad_for_sub_group"

#: What z3ext imports from DeepSpeed besides the methods that it replaces, by module.
NEEDED: dict[str, tuple[str, ...]] = {
    "deepspeed.accelerator": ("get_accelerator",),
    "deepspeed.comm": (
        "all_reduce",
        "allgather_fn",
        "comms_logger",
        "get_rank",
        "get_world_size",
        "reduce_scatter_fn",
    ),
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": ("PartitionedParamStatus",),
    "deepspeed.runtime.zero.partition_parameters": ("ZeroParamStatus", "print_rank_0"),
    "deepspeed.runtime.zero.stage3": ("DeepSpeedZeroOptimizer_Stage3", "print_rank_0"),
    "deepspeed.runtime.zero.utils": ("assert_ints_same_as_other_ranks",),
    "deepspeed.utils.nvtx": ("enable_nvtx",),
}


def missing() -> Iterator[str]:
    """What of ``NEEDED`` the DeepSpeed at hand has not, by full name."""
    for path, names in NEEDED.items():
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise  # something else than the module itself is missing
            yield path
            continue
        # Not hasattr: a name that the module makes up when asked cannot be replaced there.
        yield from (f"{path}.{name}" for name in names if name not in vars(module))
