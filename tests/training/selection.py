"""Which cases run at which world sizes: by default a part, with Z3EXT_TEST_ALL=1 all of them.

The part (`make test`) is chosen so that every kind of thing runs, but not every pair of kinds:

- every basic case once, at world 2, on its own path (all-reduce);
- every core case also on both paths that reduce by reduce-scatter, at world 3, where the parts are
  uneven and padded;
- the KEYSTONES, one for each kind of thing that depends on the world or the path, at every world:
  alone (1), at 3 and 4 by all-reduce, at 2, 4 and 8 by reduce-scatter;
- every planted difference at world 2, and every check at all of its worlds.

The rest (`make test-all`) is these cases at the other worlds and on the other paths.
"""

from __future__ import annotations

import os

EVERYTHING = os.environ.get("Z3EXT_TEST_ALL") == "1"

KEYSTONES = (
    "fp32",
    "fp16",  # a loss scale that grows
    "bf16_accumulate_fp32_gas3",  # several dtypes, accumulation
    "predivide_2",
    "sub_groups",
    "bucket_16_params_4_40_4_4",  # more than a bucket
    "smaller_than_world_fp16",  # more ranks than elements
    "wide_fp32_partitions",  # uneven parts, padding
    "frozen_layers",
    "reentrant_checkpoint",
    "moe_leaf_module",
    "different_order_per_rank",
    "fp16_last_micro_of_three",  # an overflow while accumulating
    "fp16_overflow_by_sum",  # an overflow that only the sum over the ranks has
    "bf16_nan_last_rank",
    "undone_and_patched_again",
    "cached_workspace",  # gradients that share memory
    "hooks_come_and_go",
    "hpz_and_qwz",  # two pairs of ranks
)

_ALL_REDUCE = ""
_CORE = {_ALL_REDUCE: {2}, "reduce_scatter": {3}, "not_contiguous": {3}}
_OTHER = {_ALL_REDUCE: {2}, "reduce_scatter": set[int](), "not_contiguous": set[int]()}
_KEYSTONE = {_ALL_REDUCE: {1, 2, 3, 4}, "reduce_scatter": {1, 2, 3, 4, 8}, "not_contiguous": {2, 3}}


def selected_worlds(name: str, core: bool, worlds: set[int]) -> set[int]:
    """Those of a case's worlds that run. A name is a basic case's, or that with __PATH."""
    if EVERYTHING:
        return worlds
    basic, _, path = name.partition("__")
    rule = _KEYSTONE if basic in KEYSTONES else _CORE if core else _OTHER
    return worlds & rule[path]
