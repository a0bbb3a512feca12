"""The ranks of a group agree through a store: threads with one store stand for the ranks."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # not in its __all__
    FileStore,
    HashStore,
    Store,
)

from z3ext import agreement
from z3ext.agreement import Alone, StoreAgreement, agreement_of


def reach(
    votes: Sequence[tuple[str, str] | None],
    store: Store | None = None,
    name: str = "n",
    delays: Sequence[float] = (),
) -> list[str]:
    """Each rank's answer to its (objection, plan); a rank whose vote is None never comes."""
    shared = HashStore() if store is None else store
    answers = ["unanswered"] * len(votes)

    def rank_main(rank: int, objection: str, plan: str) -> None:
        time.sleep(delays[rank] if delays else 0.0)
        answers[rank] = StoreAgreement(shared, name, rank, len(votes)).reach(objection, plan)

    ranks = [
        threading.Thread(target=rank_main, args=(rank, *vote))
        for rank, vote in enumerate(votes)
        if vote is not None
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(timeout=60)
    return answers


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_all_accept(world_size: int, seed: int) -> None:
    draw = random.Random(seed)
    delays = [draw.uniform(0, 0.1) for _ in range(world_size)]
    assert reach([("", "all_reduce")] * world_size, delays=delays) == [""] * world_size


@pytest.mark.parametrize("delays", [(0.0, 0.2, 0.0), (0.2, 0.0, 0.1)])
def test_one_objects(delays: tuple[float, ...]) -> None:
    answers = reach([("", "p"), ("it is so (key)", "p"), ("", "p")], delays=delays)
    assert answers[1] == "it is so (key)"
    assert answers[0] == answers[2] == "rank 1 declined: it is so (key)"


def test_several_object() -> None:
    """The others tell of one of them; each tells its own reason."""
    answers = reach([("zero", "p"), ("one", "p"), ("", "p")])
    assert answers[:2] == ["zero", "one"]
    assert answers[2] in ("rank 0 declined: zero", "rank 1 declined: one")


def test_other_plans() -> None:
    answers = reach([("", "all_reduce"), ("", "reduce_scatter")], delays=(0.0, 0.1))
    assert answers[1] == "its path is reduce_scatter where another rank's is all_reduce"
    assert answers[0] == f"rank 1 declined: {answers[1]}"


def test_rank_that_never_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agreement, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(agreement, "_QUIET_SECONDS", 0.1)
    store = HashStore()
    with caplog.at_level(logging.WARNING, "z3ext"):
        answers = reach([("", "p"), None, ("", "p"), None], store)
    assert answers[0] == answers[2]
    for piece in ("of the ranks, 1, 3 did not answer", "0.5 s", "patch_deepspeed() on every rank"):
        assert piece in answers[0]
    assert "waiting for the other ranks" in caplog.text
    # One that comes after all hears the same.
    late = StoreAgreement(store, "n", 1, 4).reach("", "p")
    assert late == answers[0]


def test_many_missing_ranks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PATIENCE_SECONDS", 0.05)
    answer = StoreAgreement(HashStore(), "n", 0, 40).reach("", "p")
    assert "1, 2, 3, 4, 5, 6, 7, 8 and 31 more did not answer" in answer


def test_names_are_apart() -> None:
    store = HashStore()
    assert reach([("no", "p"), ("", "p")], store, "first")[1] == "rank 0 declined: no"
    assert reach([("", "q"), ("", "q")], store, "second") == ["", ""]


def test_alone() -> None:
    assert Alone().reach("", "p") == ""
    assert Alone().reach("why", "p") == "why"


def test_of_a_group(own_group: str) -> None:
    assert isinstance(agreement_of(dist.group.WORLD, "engine0"), Alone)


def test_name_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that outlives its group still has the answers given in an earlier life."""
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    names = []
    for _ in range(2):
        store = FileStore(f"{tmp_path}/store", 1)
        dist.init_process_group(
            "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20)
        )
        try:
            for subject in ("engine0", "engine9", "engine0"):
                made = agreement_of(dist.group.WORLD, subject)
                assert isinstance(made, StoreAgreement)
                names.append(made._name)
        finally:
            dist.destroy_process_group()
    assert len(set(names)) == 6
