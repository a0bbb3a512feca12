"""One answer on every rank, though each rank looks for itself.

A rank that takes part in z3ext's collectives while another takes part in DeepSpeed's waits for
ever. So the ranks of a group agree before the first one, through the group's store: that needs no
collective, and a rank that never comes is noticed.
"""

from __future__ import annotations

import collections
import logging
import time
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

from z3ext._log import log_rank0

#: Seconds that a rank waits for the others; below the shortest time limit of c10d's groups, 600 s.
PATIENCE_SECONDS = 300.0
#: Seconds after which rank 0 says in the log that it waits.
_QUIET_SECONDS = 10.0
_LONGEST_PAUSE = 0.2
_ACCEPTED = "accepted"
_NAMED_RANKS = 8

# How often a group agreed on a subject in this process. Never reset: a store may outlive its group,
# and then still has the answers that an earlier group of that name gave.
_rounds: collections.Counter[tuple[str, str]] = collections.Counter()


class Agreement(Protocol):
    """How the ranks of one group come to one answer."""

    def reach(self, objection: str, plan: str) -> str:
        """Why not; "" when no rank objects. The same kind of answer on every rank.

        Args:
            objection: this rank's own; "" for none.
            plan: what this rank would do; a rank with another plan is an objection.
        """
        ...


class Alone:
    """No other rank is there to ask."""

    def reach(self, objection: str, plan: str) -> str:
        return objection


class StoreAgreement:
    """Through the store of a process group.

    Args:
        store: the group's.
        name: of this agreement, the same on every rank.
        rank, world_size: in the group.
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._world_size = world_size

    def reach(self, objection: str, plan: str) -> str:
        first_plan = self._keep("plan", plan)
        if not objection and first_plan != plan:
            objection = f"its path is {plan} where another rank's is {first_plan}"
        if objection:
            self._keep("answer", f"rank {self._rank} declined: {objection}")
            return objection
        self._store.set(self._key(f"rank{self._rank}"), "here")
        if self._store.add(self._key("accepting"), 1) == self._world_size:
            self._keep("answer", _ACCEPTED)
        answer = self._answer()
        return "" if answer == _ACCEPTED else answer

    def _answer(self) -> str:
        """Waits for it in turns: a waiting call would keep the store from torch's own threads."""
        began, pause, quiet = time.monotonic(), 0.001, True
        while not self._store.check([self._key("answer")]):
            waited = time.monotonic() - began
            if waited > PATIENCE_SECONDS:
                return self._keep("answer", self._missing())
            if quiet and waited > _QUIET_SECONDS:
                quiet = False
                log_rank0(
                    logging.WARNING,
                    "waiting for the other ranks to come to their first backward; "
                    "z3ext.patch_deepspeed() has to be called on every rank",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        answer: bytes = self._store.get(self._key("answer"))
        return answer.decode()

    def _missing(self) -> str:
        ranks = [
            r for r in range(self._world_size) if not self._store.check([self._key(f"rank{r}")])
        ]
        named = ", ".join(map(str, ranks[:_NAMED_RANKS]))
        more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
        return (
            f"of the ranks, {named}{more} did not answer within {PATIENCE_SECONDS:g} s; "
            "call z3ext.patch_deepspeed() on every rank"
        )

    def _keep(self, key: str, value: str) -> str:
        """Set a key unless a rank was first; the value that stays."""
        kept: bytes = self._store.compare_set(self._key(key), "", value)
        return kept.decode()

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"


def agreement_of(group: Any, subject: str) -> Agreement:
    """The next agreement of a process group on a subject, which has the same name on every rank."""
    world_size = dist.get_world_size(group)
    # A fake group has one process, whatever its world size.
    if world_size == 1 or dist.get_backend(group) == "fake":
        return Alone()
    round_ = _rounds[group.group_name, subject]
    _rounds[group.group_name, subject] += 1
    name = f"z3ext/{group.group_name}/{subject}/{round_}"
    return StoreAgreement(_store_of(group), name, dist.get_rank(group), world_size)


def _store_of(group: Any) -> Store:
    if hasattr(group, "get_group_store"):
        store: Store = group.get_group_store()
        return store
    c10d: Any = dist.distributed_c10d  # torch before 2.8 has no public way to a store
    default: Store = c10d._get_default_store()
    return default
