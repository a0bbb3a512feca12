"""DeepSpeed 0.16: what z3ext knows of its sources, and how they behave.

0.15.4 has the sources of 0.16.0.
The bucket is a set of the optimizer's fields, in the dtype of the parameters.
"""

from __future__ import annotations

from dataclasses import replace

from z3ext.deepspeed.names import PRIVATE
from z3ext.deepspeed.releases import policies
from z3ext.deepspeed.releases.buckets import OneBucket
from z3ext.deepspeed.releases.release import Release, hashes

_SHARED = {
    "_check_overflow": "322e102a0960100c",
    "_constant_buffered_norm2": "43487c8b1e1d0f4c",
    "_create_fp32_partitions": "b737f6b9951340b2",
    "_model_parallel_all_reduce": "3940145039afd5f3",
    "_overflow_clean_up": "360be175ed5ff4cb",
    "_pre_step": "4c1cd2919292bc52",
    "_update_scale": "9725845f77f38510",
    "check_overflow": "e624e458c9749597",
    "initialize_optimizer_states": "69d082b6567fbdac",
    "reduce_independent_p_g_buckets_and_remove_grads": "bf6f4fe845a396ad",
    "reduce_ready_partitions_and_remove_grads": "ba788e68d1deb338",
    "reset_cpu_buffers": "5aa88663b94c3618",
    "set_grad_positions": "f5ad1a14a4ea15c0",
}

_NODE_HOOKS = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "d997f81373945e3c",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "fff0422bad5ec4a1",
    f"{PRIVATE}__avg_scatter_grads": "06a84706aa8cc448 fdadc5fa99c92187",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "e5c3e126f5eac94e",
    "_get_norm_groups": "fbd0272b80c47aa3",
    "_overflow_check_and_loss_scale_update": "3dc544ed1d288bfc f4740782c2bbb56b",
    "_post_step": "19a0a8ac3ff97e79",
    "_prepare_fp32_grad_for_sub_group": "89041fba6ccca55c",
    "_prepare_sub_group": "5d9727489810eca0",
    "_release_sub_group": "989cb12cc5149926",
    "_setup_for_real_optimizer": "215b37bd9aea99a4",
    "_swappable_optimizer_subgroup": "74fa3c12b52e310f",
    "backward": "ad70ceda5876fbdb",
    "complete_grad_norm_calculation_for_cpu_offload": "dbc808a6abf82372",
    "get_grad_norm_direct": "911ae6c729c8d6a5",
    "has_overflow": "2b195d761cc9f4a4",
    "independent_gradient_partition_epilogue": "12c0c8f6360a5e22",
    "offload_states": "1d3aee223ba6bd9b",
    "partition_grads": "79b3eaec41678ca6",
    "reload_states": "7e848883f32062c7",
    "step": "6aba27f9e64199ca",
    "unscale_and_clip_grads": "b37d0a006620d5b7",
    "zero_grad": "bdd2455c6f5868b4",
}

_NAN_NORM = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "d997f81373945e3c 439428939ea3b2f8",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "fff0422bad5ec4a1 72c0cc0bf6963c22",
    f"{PRIVATE}__avg_scatter_grads": "fdadc5fa99c92187 73ce474b98d65d1b",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "e5c3e126f5eac94e 86b2584fbc51f090",
    "_get_norm_groups": "fbd0272b80c47aa3 20fe543dac141c68",
    "_overflow_check_and_loss_scale_update": "f4740782c2bbb56b 901b724e16e4aa48",
    "_post_step": "19a0a8ac3ff97e79 3f8d3f8168d62a37",
    "_prepare_fp32_grad_for_sub_group": "89041fba6ccca55c a974034035998ef1",
    "_prepare_sub_group": "5d9727489810eca0 65951d4ebb82b25e",
    "_release_sub_group": "989cb12cc5149926 3204105b92813f00",
    "_setup_for_real_optimizer": "81b0ee41301f092e",
    "_swappable_optimizer_subgroup": "74fa3c12b52e310f",
    "backward": "ad70ceda5876fbdb 105ceae71ddb4823",
    "complete_grad_norm_calculation_for_cpu_offload": "dbc808a6abf82372",
    "get_grad_norm_direct": "911ae6c729c8d6a5 f5065a4d839b616f",
    "has_overflow": "2b195d761cc9f4a4 293a38e392b90ae2",
    "independent_gradient_partition_epilogue": "12c0c8f6360a5e22 6a6ae7a1b4b2a6d2",
    "offload_states": "1d3aee223ba6bd9b",
    "partition_grads": "81f57ce81186216f ad8d9fde76c01003",
    "reload_states": "7e848883f32062c7 2929867018e1ad46",
    "step": "9086ecf597c37405 7455335a75f7005d",
    "unscale_and_clip_grads": "b37d0a006620d5b7 1cfd4e7b5abee91f",
    "zero_grad": "bdd2455c6f5868b4 cb9bc1a8864dead7",
}

_MASKED_NORM = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "439428939ea3b2f8",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "72c0cc0bf6963c22",
    f"{PRIVATE}__avg_scatter_grads": "73ce474b98d65d1b",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "86b2584fbc51f090",
    "_get_norm_groups": "20fe543dac141c68",
    "_overflow_check_and_loss_scale_update": "901b724e16e4aa48",
    "_post_step": "3f8d3f8168d62a37",
    "_prepare_fp32_grad_for_sub_group": "a974034035998ef1",
    "_prepare_sub_group": "65951d4ebb82b25e",
    "_release_sub_group": "3204105b92813f00",
    "_setup_for_real_optimizer": "81b0ee41301f092e",
    "_swappable_optimizer_subgroup": "74fa3c12b52e310f ebbfe979fb77e1cf",
    "backward": "105ceae71ddb4823",
    "complete_grad_norm_calculation_for_cpu_offload": "ff44c57abcb6f300",
    "get_grad_norm_direct": "696749f38b7d68ec",
    "has_overflow": "293a38e392b90ae2",
    "independent_gradient_partition_epilogue": "6a6ae7a1b4b2a6d2",
    "offload_states": "1d3aee223ba6bd9b 63cb0be16b15248b",
    "partition_grads": "7307acf694ff3092",
    "reload_states": "2929867018e1ad46",
    "step": "7455335a75f7005d",
    "unscale_and_clip_grads": "1cfd4e7b5abee91f",
    "zero_grad": "cb9bc1a8864dead7",
}

_FUNCTIONS = {
    "assert_ints_same_as_other_ranks": "9473e57a7b4cf53c a15ea1bbe92c2d13",
    "reduce_scatter_coalesced": "2326f433b161cab0 b79736e28debb4ae",
}

_MASKED_NORM_FUNCTIONS = {
    "mask_nan_or_inf_with_val_inplace": "11592259edc35572",
}

_V0 = Release(
    name="0.15.4 to 0.16.2",
    methods=hashes(_SHARED, _NODE_HOOKS),
    functions=hashes(_FUNCTIONS),
    bucket_fields=None,
    begin="backward",
    group=policies.data_parallel_group,
    buckets=OneBucket(),
    rounding=policies.rounds_to_the_parameters,
    mask_norm=policies.nan_by_product,
    is_complete=policies.always_complete,
    is_postponed=policies.never,
    checks_order=policies.never,
    at_boundary=policies.boundary_attribute,
    reduced_ids=policies.not_kept,
    clears_gradients=True,
    own_node_hooks=True,
)

_V3 = replace(
    _V0,
    name="0.16.3 to 0.16.5",
    methods=hashes(_SHARED, _NAN_NORM),
    own_node_hooks=False,
)

_V6 = replace(
    _V3,
    name="0.16.6 to 0.16.9",
    methods=hashes(_SHARED, _MASKED_NORM),
    functions=hashes(_FUNCTIONS, _MASKED_NORM_FUNCTIONS),
    mask_norm=policies.minus_one,
)

RELEASES = (_V0, _V3, _V6)
