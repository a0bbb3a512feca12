"""What z3ext did for one engine, as a value."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from z3ext.reducer import Counters


@dataclass(frozen=True)
class Status:
    """The state of one engine's gradient path.

    served: z3ext serves this engine now.
    reason: why not; empty when it is served.
    mode: "all_reduce" or "reduce_scatter" when served, else "stock".
    buckets: buckets reduced by z3ext since the engine was made.
    packs: launches that packed gradients into a bucket.
    collectives: collectives issued for buckets, overflow checks and norms; none at world size 1.
    bytes_reduced: bytes of the buckets that were reduced, on this rank.
    steps: optimizer steps while z3ext served the engine, skipped ones included.
    skipped: those that were skipped because a gradient was not finite.
    note: what of the last backward was left to DeepSpeed although the engine is served, and why;
        empty when nothing was.
    """

    served: bool
    reason: str
    mode: str
    buckets: int = 0
    packs: int = 0
    collectives: int = 0
    bytes_reduced: int = 0
    steps: int = 0
    skipped: int = 0
    note: str = ""


# Counts are kept by optimizer, not by adapter, so that they go on when it is patched again.
_counters: weakref.WeakKeyDictionary[Any, Counters] = weakref.WeakKeyDictionary()


def counters_of(optimizer: Any) -> Counters:
    """What z3ext did for this optimizer since it was made."""
    return _counters.setdefault(optimizer, Counters())
