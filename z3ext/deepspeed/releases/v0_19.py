"""DeepSpeed 0.19: what z3ext knows of its sources, and how they behave.

Since 0.19.2 an average is rounded once; since 0.19.3 buckets know their process group; since
0.19.8 the loss scale is updated after the norms, and any dtype's step is skipped for inf or nan.
"""

from __future__ import annotations

from dataclasses import replace

from z3ext.deepspeed.names import PRIVATE
from z3ext.deepspeed.releases import policies
from z3ext.deepspeed.releases.buckets import BucketPerDtype, BucketPerDtypeAndGroup
from z3ext.deepspeed.releases.release import Release, hashes

_SHARED = {
    "_check_overflow": "322e102a0960100c",
    "_create_fp32_partitions": "d3ffae717963124c",
    "_overflow_clean_up": "360be175ed5ff4cb",
    "_post_step": "b2500f1c2ce7b5f8",
    "_prepare_sub_group": "8fd818ae69e776b5",
    "_release_sub_group": "945c90f58d54bd35",
    "_swappable_optimizer_subgroup": "ebbfe979fb77e1cf",
    "_update_scale": "9725845f77f38510",
    "backward_prologue": "015f9f06ce0f4b2a",
    "check_overflow": "e624e458c9749597",
    "get_param_comm_dtype": "5279ce7b7eaaba7f",
    "has_overflow": "a31822c7787f9069",
    "independent_gradient_partition_epilogue": "e7cba1addb0c0827",
    "initialize_optimizer_states": "7b6494cbf0dac622",
    "offload_states": "df664649954c4360",
    "reload_states": "87ec481a0de3a562",
    "reset_cpu_buffers": "5aa88663b94c3618",
    "set_grad_positions": "7d3e05600fc60b04",
    "unscale_and_clip_grads": "ae4ec321851e6635",
    "zero_grad": "22bf53f48d4787d7",
}

_0 = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "fb61d521037d694c",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "dd55a73b231db61b",
    f"{PRIVATE}__avg_scatter_grads": "079524fc7145b9ca",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "31f9eb26375978c7",
    "_constant_buffered_norm2": "43487c8b1e1d0f4c",
    "_get_norm_groups": "e218dd04533c4a6c",
    "_model_parallel_all_reduce": "3940145039afd5f3",
    "_overflow_check_and_loss_scale_update": "e1b059fec0be5394",
    "_pre_step": "84fab226a82c6db4",
    "_prepare_fp32_grad_for_sub_group": "7ef55a24cbb86eca",
    "_setup_for_real_optimizer": "5991fc7c0cc2505a",
    "complete_grad_norm_calculation_for_cpu_offload": "ff44c57abcb6f300",
    "get_grad_norm_direct": "f1340ca978cf2ca6",
    "partition_grads": "00ccd5af345f3d42",
    "reduce_independent_p_g_buckets_and_remove_grads": "785f3d1eeed91514",
    "reduce_ready_partitions_and_remove_grads": "ba788e68d1deb338",
    "step": "1b206f78ba6975be",
}

_1 = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "fb61d521037d694c",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "dd55a73b231db61b",
    f"{PRIVATE}__avg_scatter_grads": "079524fc7145b9ca",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "31f9eb26375978c7",
    "_constant_buffered_norm2": "43487c8b1e1d0f4c",
    "_get_norm_groups": "e218dd04533c4a6c",
    "_model_parallel_all_reduce": "3940145039afd5f3",
    "_overflow_check_and_loss_scale_update": "e1b059fec0be5394",
    "_pre_step": "84fab226a82c6db4",
    "_prepare_fp32_grad_for_sub_group": "7ef55a24cbb86eca",
    "_setup_for_real_optimizer": "5991fc7c0cc2505a",
    "complete_grad_norm_calculation_for_cpu_offload": "ff44c57abcb6f300",
    "get_grad_norm_direct": "f1340ca978cf2ca6",
    "partition_grads": "00ccd5af345f3d42",
    "reduce_independent_p_g_buckets_and_remove_grads": "785f3d1eeed91514",
    "reduce_ready_partitions_and_remove_grads": "be81e9761c2def75",
    "step": "1b206f78ba6975be",
}

_2 = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "fb61d521037d694c",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "8cbf72958135550b",
    f"{PRIVATE}__avg_scatter_grads": "b89d7ae0dce8476c",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "31f9eb26375978c7",
    "_constant_buffered_norm2": "43487c8b1e1d0f4c",
    "_get_norm_groups": "e218dd04533c4a6c",
    "_model_parallel_all_reduce": "3940145039afd5f3",
    "_overflow_check_and_loss_scale_update": "e1b059fec0be5394",
    "_pre_step": "84fab226a82c6db4",
    "_prepare_fp32_grad_for_sub_group": "7ef55a24cbb86eca",
    "_setup_for_real_optimizer": "5991fc7c0cc2505a",
    "complete_grad_norm_calculation_for_cpu_offload": "ff44c57abcb6f300",
    "get_grad_norm_direct": "f1340ca978cf2ca6",
    "partition_grads": "00ccd5af345f3d42",
    "reduce_independent_p_g_buckets_and_remove_grads": "785f3d1eeed91514",
    "reduce_ready_partitions_and_remove_grads": "be81e9761c2def75",
    "step": "1b206f78ba6975be",
}

_3 = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "b0bb3880277715a5",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "c03ca8309e3de9a5",
    f"{PRIVATE}__avg_scatter_grads": "0db574dd40f8ae4f",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "44703712e5fb1abe",
    "_constant_buffered_norm2": "43487c8b1e1d0f4c",
    "_get_norm_groups": "e218dd04533c4a6c",
    "_get_param_partition_group": "32a3ee251b393e80",
    "_get_param_partition_rank": "61b7766c564996fb",
    "_gradient_averaging_world_size": "7518b60ff4de09e4",
    "_model_parallel_all_reduce": "3940145039afd5f3",
    "_overflow_check_and_loss_scale_update": "e1b059fec0be5394",
    "_pre_step": "84fab226a82c6db4",
    "_prepare_fp32_grad_for_sub_group": "7bf4a457416febe9",
    "_setup_for_real_optimizer": "5991fc7c0cc2505a",
    "complete_grad_norm_calculation_for_cpu_offload": "544f6aceaab548e8",
    "get_grad_norm_direct": "6724925f0faccd44",
    "partition_grads": "e5dc2d96907f3cc7",
    "reduce_independent_p_g_buckets_and_remove_grads": "0cb59525cd7fe65a",
    "reduce_ready_partitions_and_remove_grads": "be81e9761c2def75",
    "step": "1b206f78ba6975be",
}

_5 = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "b0bb3880277715a5",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "c03ca8309e3de9a5",
    f"{PRIVATE}__avg_scatter_grads": "0db574dd40f8ae4f",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "44703712e5fb1abe",
    "_constant_buffered_norm2": "43487c8b1e1d0f4c",
    "_get_norm_groups": "e218dd04533c4a6c",
    "_get_param_partition_group": "32a3ee251b393e80",
    "_get_param_partition_rank": "61b7766c564996fb",
    "_gradient_averaging_world_size": "7518b60ff4de09e4",
    "_model_parallel_all_reduce": "3940145039afd5f3",
    "_offload_grad_partition_at_boundary": "8ce283533e6d5e44",
    "_overflow_check_and_loss_scale_update": "e1b059fec0be5394",
    "_pre_step": "d6bf55b2add3b81c",
    "_prepare_fp32_grad_for_sub_group": "7bf4a457416febe9",
    "_setup_for_real_optimizer": "21504ef43b48b157",
    "_swap_out_offload_fp32_gradients": "97ec81acda549e35",
    "complete_grad_norm_calculation_for_cpu_offload": "544f6aceaab548e8",
    "get_grad_norm_direct": "6724925f0faccd44",
    "partition_grads": "c246f5b8bd51788f",
    "reduce_independent_p_g_buckets_and_remove_grads": "0cb59525cd7fe65a",
    "reduce_ready_partitions_and_remove_grads": "be81e9761c2def75",
    "step": "1b206f78ba6975be",
}

_6 = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "b0bb3880277715a5",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "c03ca8309e3de9a5",
    f"{PRIVATE}__avg_scatter_grads": "0db574dd40f8ae4f",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "44703712e5fb1abe",
    "_constant_buffered_norm2": "c904acb24debf887",
    "_get_norm_groups": "e218dd04533c4a6c",
    "_get_param_partition_group": "32a3ee251b393e80",
    "_get_param_partition_rank": "61b7766c564996fb",
    "_gradient_averaging_world_size": "7518b60ff4de09e4",
    "_model_parallel_all_reduce": "3940145039afd5f3",
    "_offload_grad_partition_at_boundary": "8ce283533e6d5e44",
    "_overflow_check_and_loss_scale_update": "e1b059fec0be5394",
    "_pre_step": "d6bf55b2add3b81c",
    "_prepare_fp32_grad_for_sub_group": "7bf4a457416febe9",
    "_setup_for_real_optimizer": "21504ef43b48b157",
    "_swap_out_offload_fp32_gradients": "97ec81acda549e35",
    "complete_grad_norm_calculation_for_cpu_offload": "544f6aceaab548e8",
    "get_grad_norm_direct": "f5b5c9958a1e8a39 6f1b0ea7d1f41169",
    "partition_grads": "c246f5b8bd51788f",
    "reduce_independent_p_g_buckets_and_remove_grads": "0cb59525cd7fe65a",
    "reduce_ready_partitions_and_remove_grads": "be81e9761c2def75",
    "step": "1b206f78ba6975be",
}

_8 = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "b0bb3880277715a5",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "978691e2f5afe5cd",
    f"{PRIVATE}__avg_scatter_grads": "56b0c8c520ccbf72",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "44703712e5fb1abe",
    "_apply_autoep_folding_tp_correction": "8bb6f571ef04719b",
    "_constant_buffered_norm2": "c904acb24debf887",
    "_get_norm_groups": "cf96a4e6e5b3993a",
    "_get_param_partition_group": "32a3ee251b393e80",
    "_get_param_partition_rank": "61b7766c564996fb",
    "_grad_norm_counts_every_rank": "1c6c6f002343b28a",
    "_gradient_averaging_world_size": "7518b60ff4de09e4",
    "_loss_scale_update_and_overflow_cleanup": "9aee078fc56cfdaf",
    "_model_parallel_all_reduce": "5468b255438d64c9",
    "_offload_grad_partition_at_boundary": "8ce283533e6d5e44",
    "_overflow_check_and_loss_scale_update": "884d46e37b33095a",
    "_pre_step": "d6bf55b2add3b81c",
    "_prepare_fp32_grad_for_sub_group": "64d5bff072b91871",
    "_setup_for_real_optimizer": "21504ef43b48b157",
    "_swap_out_offload_fp32_gradients": "97ec81acda549e35",
    "complete_grad_norm_calculation_for_cpu_offload": "33961d31bbc83775",
    "get_grad_norm_direct": "01ca53b61da142ca",
    "partition_grads": "c246f5b8bd51788f",
    "reduce_independent_p_g_buckets_and_remove_grads": "ed2027bc7246ff6f",
    "reduce_ready_partitions_and_remove_grads": "be81e9761c2def75",
    "step": "ab5b443489fe0a0d",
}

_FUNCTIONS = {
    "assert_ints_same_as_other_ranks": "37e637a6bbe4b1fa",
    "mask_nan_or_inf_with_val_inplace": "11592259edc35572",
    "reduce_scatter_coalesced": "b63144a362c92771",
}

_NORM_DTYPE = {
    "get_norm_dtype": "00bff51e04bd5d16",
}

_V0 = Release(
    name="0.19.0",
    methods=hashes(_SHARED, _0),
    functions=hashes(_FUNCTIONS),
    bucket_fields=("buffer", "buffer_meta", "params", "elements"),
    begin="backward_prologue",
    group=policies.data_parallel_group,
    buckets=BucketPerDtype(),
    rounding=policies.rounds_to_the_parameters,
    mask_norm=policies.minus_one,
    is_complete=policies.marked_complete,
    is_postponed=policies.never,
    checks_order=policies.by_config,
    at_boundary=policies.boundary_attribute,
    reduced_ids=policies.not_kept,
    clears_gradients=True,
    own_node_hooks=False,
)

_V1 = replace(
    _V0,
    name="0.19.1",
    methods=hashes(_SHARED, _1),
    is_postponed=policies.while_coalescing,
)

_V2 = replace(
    _V1,
    name="0.19.2",
    methods=hashes(_SHARED, _2),
    rounding=policies.rounds_once,
)

_V3 = replace(
    _V2,
    name="0.19.3 and 0.19.4",
    methods=hashes(_SHARED, _3),
    bucket_fields=("buffer", "buffer_meta", "params", "elements", "process_group"),
    group=policies.group_of_the_parameters,
    buckets=BucketPerDtypeAndGroup(),
)

_V5 = replace(
    _V3,
    name="0.19.5",
    methods=hashes(_SHARED, _5),
    at_boundary=policies.boundary_method,
    reduced_ids=policies.kept_for_the_step,
)

_V6 = replace(
    _V5,
    name="0.19.6 and 0.19.7",
    methods=hashes(_SHARED, _6),
    functions=hashes(_FUNCTIONS, _NORM_DTYPE),
)

_V8 = replace(
    _V6,
    name="0.19.8",
    methods=hashes(_SHARED, _8),
    clears_gradients=False,
)

RELEASES = (_V0, _V1, _V2, _V3, _V5, _V6, _V8)
