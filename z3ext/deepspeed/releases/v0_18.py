"""DeepSpeed 0.18: what z3ext knows of its sources, and how they behave.

Since 0.18.3 a backward begins with ``backward_prologue``, not within ``backward``.
"""

from __future__ import annotations

from dataclasses import replace

from z3ext.deepspeed.names import PRIVATE
from z3ext.deepspeed.releases import policies
from z3ext.deepspeed.releases.buckets import BucketPerDtype
from z3ext.deepspeed.releases.release import Release, hashes

_SHARED = {
    f"{PRIVATE}__avg_scatter_grads": "23296444ac81b104",
    "_check_overflow": "322e102a0960100c",
    "_constant_buffered_norm2": "43487c8b1e1d0f4c",
    "_get_norm_groups": "20fe543dac141c68",
    "_model_parallel_all_reduce": "3940145039afd5f3",
    "_overflow_check_and_loss_scale_update": "901b724e16e4aa48",
    "_overflow_clean_up": "360be175ed5ff4cb",
    "_post_step": "3b740d2524f93911",
    "_prepare_fp32_grad_for_sub_group": "a974034035998ef1",
    "_prepare_sub_group": "65951d4ebb82b25e",
    "_release_sub_group": "3204105b92813f00",
    "_swappable_optimizer_subgroup": "ebbfe979fb77e1cf",
    "_update_scale": "9725845f77f38510",
    "check_overflow": "e624e458c9749597",
    "complete_grad_norm_calculation_for_cpu_offload": "ff44c57abcb6f300",
    "get_grad_norm_direct": "696749f38b7d68ec",
    "get_param_comm_dtype": "5279ce7b7eaaba7f",
    "has_overflow": "293a38e392b90ae2",
    "offload_states": "7bc324f44461e0d2",
    "reduce_independent_p_g_buckets_and_remove_grads": "785f3d1eeed91514",
    "reduce_ready_partitions_and_remove_grads": "ba788e68d1deb338",
    "reload_states": "87ec481a0de3a562",
    "reset_cpu_buffers": "5aa88663b94c3618",
    "set_grad_positions": "7d3e05600fc60b04",
    "step": "7455335a75f7005d",
    "unscale_and_clip_grads": "1cfd4e7b5abee91f",
}

_BACKWARD = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "727e4f35e02abf06 7490218a2cb5d237",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "d7ec7e6125060bd4",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "6a76e997db87aeb1 3853c535c68587e4",
    "_create_fp32_partitions": "5c9fd5d5611e1431 ffa63acf0342877f",
    "_pre_step": "3e0f18128a71b639",
    "_setup_for_real_optimizer": "b6da7d050a017dd2",
    "backward": "87d99f518ca7c699 d8ca20c1137dcf12",
    "independent_gradient_partition_epilogue": "9903c65832962435",
    "initialize_optimizer_states": "69d082b6567fbdac",
    "partition_grads": "d2b0f0c2ea352971",
    "zero_grad": "cb9bc1a8864dead7",
}

_PROLOGUE = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": "7490218a2cb5d237 c79f7a5fcce3f9d9",
    f"{PRIVATE}__avg_scatter_contiguous_grads": "d7ec7e6125060bd4 c8da17f46534085b",
    f"{PRIVATE}__reduce_and_partition_ipg_grads": "3853c535c68587e4",
    "_create_fp32_partitions": "33557c4444c06c19 d3ffae717963124c",
    "_pre_step": "3e0f18128a71b639 84fab226a82c6db4",
    "_setup_for_real_optimizer": "b6da7d050a017dd2 5991fc7c0cc2505a",
    "backward_prologue": "015f9f06ce0f4b2a",
    "independent_gradient_partition_epilogue": "9903c65832962435 d933d2f4bb461c85",
    "initialize_optimizer_states": "69d082b6567fbdac 7b6494cbf0dac622",
    "partition_grads": "65b577e656f5dc81",
    "zero_grad": "cb9bc1a8864dead7 7d7645966036c720",
}

_FUNCTIONS = {
    "assert_ints_same_as_other_ranks": "0c0b75789144d48f",
    "mask_nan_or_inf_with_val_inplace": "11592259edc35572",
    "reduce_scatter_coalesced": "b79736e28debb4ae",
}

_V0 = Release(
    name="0.18.0 to 0.18.2",
    methods=hashes(_SHARED, _BACKWARD),
    functions=hashes(_FUNCTIONS),
    bucket_fields=("buffer", "buffer_meta", "params", "elements"),
    begin="backward",
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

_V3 = replace(
    _V0,
    name="0.18.3 to 0.18.9",
    methods=hashes(_SHARED, _PROLOGUE),
    begin="backward_prologue",
)

RELEASES = (_V0, _V3)
