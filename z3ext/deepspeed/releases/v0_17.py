"""DeepSpeed 0.17: what z3ext knows of its sources, and how they behave.

Since 0.17.2 there is a bucket for each dtype; 0.17.2 itself counts its elements wrongly.
"""

from __future__ import annotations

from dataclasses import replace

from z3ext.deepspeed.names import PRIVATE
from z3ext.deepspeed.releases import policies
from z3ext.deepspeed.releases.buckets import BucketPerDtype, BucketThatCountsOn, OneBucket
from z3ext.deepspeed.releases.release import Release, hashes

_SHARED = {
    "_check_overflow": "322e102a0960100c",
    "_constant_buffered_norm2": "43487c8b1e1d0f4c",
    "_create_fp32_partitions": "b737f6b9951340b2",
    "_get_norm_groups": "20fe543dac141c68",
    "_model_parallel_all_reduce": "3940145039afd5f3",
    "_overflow_check_and_loss_scale_update": "901b724e16e4aa48",
    "_overflow_clean_up": "360be175ed5ff4cb",
    "_prepare_fp32_grad_for_sub_group": "a974034035998ef1",
    "_prepare_sub_group": "65951d4ebb82b25e",
    "_release_sub_group": "3204105b92813f00",
    "_swappable_optimizer_subgroup": "ebbfe979fb77e1cf",
    "_update_scale": "9725845f77f38510",
    "check_overflow": "e624e458c9749597",
    "complete_grad_norm_calculation_for_cpu_offload": "ff44c57abcb6f300",
    "get_grad_norm_direct": "696749f38b7d68ec",
    "has_overflow": "293a38e392b90ae2",
    "initialize_optimizer_states": "69d082b6567fbdac",
    "reduce_ready_partitions_and_remove_grads": "ba788e68d1deb338",
    "reset_cpu_buffers": "5aa88663b94c3618",
    "step": "7455335a75f7005d",
    "unscale_and_clip_grads": "1cfd4e7b5abee91f",
    "zero_grad": "cb9bc1a8864dead7",
}

_ONE_BUCKET = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "439428939ea3b2f8",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "72c0cc0bf6963c22",
    f"{PRIVATE}__avg_scatter_grads": "73ce474b98d65d1b",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "86b2584fbc51f090",
    "_post_step": "3f8d3f8168d62a37",
    "_pre_step": "4c1cd2919292bc52",
    "_setup_for_real_optimizer": "81b0ee41301f092e",
    "backward": "105ceae71ddb4823",
    "independent_gradient_partition_epilogue": "6a6ae7a1b4b2a6d2",
    "offload_states": "63cb0be16b15248b",
    "partition_grads": "7307acf694ff3092",
    "reduce_independent_p_g_buckets_and_remove_grads": "e770d36e89b80d89",
    "reload_states": "2929867018e1ad46",
    "set_grad_positions": "f5ad1a14a4ea15c0",
}

_COUNTS_ON = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "727e4f35e02abf06",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "d7ec7e6125060bd4",
    f"{PRIVATE}__avg_scatter_grads": "23296444ac81b104",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "116d630b8d7a71c3",
    "_post_step": "3f8d3f8168d62a37",
    "_pre_step": "4c1cd2919292bc52",
    "_setup_for_real_optimizer": "73992a2a190fbb81",
    "backward": "105ceae71ddb4823",
    "get_param_comm_dtype": "cf65f4326c1fdab9",
    "independent_gradient_partition_epilogue": "45a26d2cee53e563",
    "offload_states": "36312a301aa114cc",
    "partition_grads": "7307acf694ff3092",
    "reduce_independent_p_g_buckets_and_remove_grads": "785f3d1eeed91514",
    "reload_states": "87ec481a0de3a562",
    "set_grad_positions": "f5ad1a14a4ea15c0",
}

_BUCKETS = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "727e4f35e02abf06",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "d7ec7e6125060bd4",
    f"{PRIVATE}__avg_scatter_grads": "23296444ac81b104",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "e79ec030b009ba65",
    "_post_step": "3f8d3f8168d62a37 3b740d2524f93911",
    "_pre_step": "4c1cd2919292bc52 3e0f18128a71b639",
    "_setup_for_real_optimizer": "73992a2a190fbb81 b6da7d050a017dd2",
    "backward": "105ceae71ddb4823 7234e8edb9e2ccf6",
    "get_param_comm_dtype": "cf65f4326c1fdab9",
    "independent_gradient_partition_epilogue": "45a26d2cee53e563 9903c65832962435",
    "offload_states": "36312a301aa114cc 7bc324f44461e0d2",
    "partition_grads": "7307acf694ff3092 d2b0f0c2ea352971",
    "reduce_independent_p_g_buckets_and_remove_grads": "785f3d1eeed91514",
    "reload_states": "87ec481a0de3a562",
    "set_grad_positions": "f5ad1a14a4ea15c0 7d3e05600fc60b04",
}

_CHECKED = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "727e4f35e02abf06",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "d7ec7e6125060bd4",
    f"{PRIVATE}__avg_scatter_grads": "23296444ac81b104",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "6a76e997db87aeb1",
    "_post_step": "3b740d2524f93911",
    "_pre_step": "3e0f18128a71b639",
    "_setup_for_real_optimizer": "b6da7d050a017dd2",
    "backward": "87d99f518ca7c699",
    "get_param_comm_dtype": "5279ce7b7eaaba7f",
    "independent_gradient_partition_epilogue": "9903c65832962435",
    "offload_states": "7bc324f44461e0d2",
    "partition_grads": "d2b0f0c2ea352971",
    "reduce_independent_p_g_buckets_and_remove_grads": "785f3d1eeed91514",
    "reload_states": "87ec481a0de3a562",
    "set_grad_positions": "7d3e05600fc60b04",
}

_FUNCTIONS = {
    "assert_ints_same_as_other_ranks": "a15ea1bbe92c2d13 0c0b75789144d48f",
    "mask_nan_or_inf_with_val_inplace": "11592259edc35572",
    "reduce_scatter_coalesced": "b79736e28debb4ae",
}

_V0 = Release(
    name="0.17.0 and 0.17.1",
    methods=hashes(_SHARED, _ONE_BUCKET),
    functions=hashes(_FUNCTIONS),
    bucket_fields=None,
    begin="backward",
    group=policies.data_parallel_group,
    buckets=OneBucket(),
    rounding=policies.rounds_to_the_parameters,
    mask_norm=policies.minus_one,
    is_complete=policies.marked_complete,
    is_postponed=policies.never,
    checks_order=policies.never,
    at_boundary=policies.boundary_attribute,
    reduced_ids=policies.not_kept,
    clears_gradients=True,
    own_node_hooks=False,
)

_V2 = replace(
    _V0,
    name="0.17.2",
    methods=hashes(_SHARED, _COUNTS_ON),
    bucket_fields=("buffer", "buffer_meta", "params", "elements"),
    buckets=BucketThatCountsOn(),
)

_V3 = replace(
    _V2,
    name="0.17.3 to 0.17.5",
    methods=hashes(_SHARED, _BUCKETS),
    buckets=BucketPerDtype(),
)

_V6 = replace(
    _V3,
    name="0.17.6",
    methods=hashes(_SHARED, _CHECKED),
    checks_order=policies.by_config,
)

RELEASES = (_V0, _V2, _V3, _V6)
