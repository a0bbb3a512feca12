"""Every case and check by name, in the order in which a launch runs them."""

from __future__ import annotations

from .case import Case, Check
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
from .checks_agreement import CHECKS as AGREEMENT_CHECKS
from .checks_diagnosis import CHECKS as DIAGNOSIS_CHECKS
from .checks_fingerprint import CHECKS as FINGERPRINT_CHECKS
from .checks_memory import CHECKS as MEMORY_CHECKS
from .checks_modes import CHECKS as MODES_CHECKS
from .checks_refresh import CHECKS as REFRESH_CHECKS
from .checks_undo import CHECKS as UNDO_CHECKS


def _collect() -> dict[str, Case | Check]:
    entries: dict[str, Case | Check] = {}
    groups: tuple[list[Case] | list[Check], ...] = (
        PLANTED_CASES,
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
        UNDO_CHECKS,
        FINGERPRINT_CHECKS,
        MODES_CHECKS,
        REFRESH_CHECKS,
        AGREEMENT_CHECKS,
        DIAGNOSIS_CHECKS,
        MEMORY_CHECKS,
    )
    for group in groups:
        for entry in group:
            if entry.name in entries:
                raise ValueError(f"two cases are called {entry.name!r}")
            entries[entry.name] = entry
    return entries


ENTRIES = _collect()


def parameters(*groups: list[Case] | list[Check]) -> list[tuple[int, str]]:
    """(world, name) pairs of the groups, world by world."""
    pairs = [(w, entry.name) for group in groups for entry in group for w in entry.worlds()]
    return sorted(pairs, key=lambda pair: pair[0])
