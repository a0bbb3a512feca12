"""Each case at each world size: stock DeepSpeed and z3ext agree on every bit."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from .cases_config import CASES as CONFIG_CASES
from .cases_hooks import CASES as HOOK_CASES
from .cases_lifecycle import CASES as LIFECYCLE_CASES
from .cases_models import CASES as MODEL_CASES
from .cases_offload import CASES as OFFLOAD_CASES
from .cases_overflow import CASES as OVERFLOW_CASES
from .cases_planted import CASES as PLANTED_CASES
from .cases_real_configs import CASES as REAL_CONFIG_CASES
from .cases_reduce_scatter import CASES as REDUCE_SCATTER_CASES
from .cases_releases import CASES as RELEASE_CASES
from .cases_sharing import CASES as SHARING_CASES
from .conftest import Results
from .registry import parameters


def _ids(pairs: list[tuple[int, str]]) -> list[str]:
    return [f"{case}-world{world}" for world, case in pairs]


SERVED = parameters(
    CONFIG_CASES,
    MODEL_CASES,
    OVERFLOW_CASES,
    OFFLOAD_CASES,
    LIFECYCLE_CASES,
    REDUCE_SCATTER_CASES,
    SHARING_CASES,
    HOOK_CASES,
    RELEASE_CASES,
    REAL_CONFIG_CASES,
)
PLANTED = parameters(PLANTED_CASES)


@pytest.mark.parametrize(("world", "case"), SERVED, ids=_ids(SERVED))
def test_same_bits_as_stock(world: int, case: str, results: Results) -> None:
    results.check(world, case)


@pytest.mark.parametrize(("world", "case"), PLANTED, ids=_ids(PLANTED))
def test_harness_finds_a_planted_difference(world: int, case: str, results: Results) -> None:
    result = results.get(world, case)
    found = result.problems.get(world - 1, [])
    assert len(found) == 1, result.lines
    wanted = {
        "planted_weight_bit": "fp32: 1 of",
        "planted_moment_bit": "exp_avg: 1 of",
        "planted_norm_type": "grad norm: stock Tensor",
        "planted_sign_of_zero": "gradient partitions: 1 of",
    }[case]
    assert wanted in found[0]
