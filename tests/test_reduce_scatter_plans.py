"""When the reduce-scatter bucket goes by a plan, when it leaves it, and whose memory it uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from bucket_support import POISON, STORED, grad_of, group_of, parameters, send
from rows_support import (
    KNOWN,
    TENS,
    calls,
    check,
    check_tens,
    in_pairs,
    limits,
    make,
    make_tens,
    one_by_one,
    row_total,
)
from torch import Tensor

from z3ext.collectives import OneRank
from z3ext.partitions import Scaling
from z3ext.streams import HostOrder

__all__ = ["calls", "in_pairs", "one_by_one"]  # fixtures, found by name

# --- plans ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_pairs")
def test_first_bucket_then_by_plan(
    generator: torch.Generator, calls: list[tuple[str, int]]
) -> None:
    """One after the other, then laid out in rows; the next one goes to its rows in one pass."""
    made = make_tens(generator)
    keys = list(TENS)[:5]
    check_tens(made, keys, generator)
    assert calls == [("pack_", 2), ("pack_", 2), ("pack_", 1), ("pack_rows_", 5)]
    for _ in range(2):
        calls.clear()
        check_tens(made, keys, generator)
        assert calls == [("pack_rows_", 2), ("pack_rows_", 2), ("pack_rows_", 1)]
    assert made.counters.packs == 9


def test_all_waits_until_the_end(generator: torch.Generator, calls: list[tuple[str, int]]) -> None:
    """Gradients that all wait for the sum need no plan: one pass from the first bucket on."""
    made = make_tens(generator)
    for _ in range(2):
        check_tens(made, list(TENS), generator)
    assert calls == [("pack_rows_", 6)] * 2
    assert made.counters.packs == 2


@pytest.mark.usefixtures("in_pairs")
def test_another_order_goes_by_the_plan(
    generator: torch.Generator, calls: list[tuple[str, int]]
) -> None:
    made = make_tens(generator)
    check_tens(made, [50, 10, 40, 20], generator)
    calls.clear()
    for order in ([50, 20, 10, 40], [50, 40, 20, 10]):
        check_tens(made, order, generator)
    assert calls == [("pack_rows_", 2)] * 4


@pytest.mark.usefixtures("in_pairs")
def test_plans_by_what_came_first(generator: torch.Generator, calls: list[tuple[str, int]]) -> None:
    """Buckets in turn each find their own plan."""
    made = make_tens(generator)
    for turn in range(3):
        calls.clear()
        check_tens(made, [50, 10], generator)
        check_tens(made, [40, 20, 30], generator)
        assert ("pack_" in dict(calls)) is (turn == 0)


@pytest.mark.usefixtures("in_pairs")
@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        pytest.param(
            [50, 10, 40],
            # The third waits for the sum, where the two in rows are put in a sequence before it.
            [("pack_rows_", 2), ("pack_", 2), ("pack_", 1), ("pack_rows_", 3)],
            id="the last is missing",
        ),
        pytest.param(
            [50, 40, 20],
            [("pack_rows_", 2), ("pack_", 2), ("pack_", 1), ("pack_rows_", 3)],
            id="one between is missing",
        ),
        pytest.param(
            [50, 10],
            [("pack_rows_", 2), ("pack_", 2), ("pack_rows_", 2)],
            id="all that came is packed",
        ),
        pytest.param([50], [("pack_rows_", 1)], id="only the first, which waits"),
        pytest.param(
            [50, 10, 40, 20, 30],
            [("pack_rows_", 2), ("pack_rows_", 2), ("pack_", 4), ("pack_", 1), ("pack_rows_", 5)],
            id="one more at the end",
        ),
        pytest.param(
            [50, 10, 30, 40, 20],
            [("pack_rows_", 2), ("pack_", 2), ("pack_", 2), ("pack_", 1), ("pack_rows_", 5)],
            id="one more midway",
        ),
        pytest.param(
            [50, 60, 30],
            [("pack_", 2), ("pack_", 1), ("pack_rows_", 3)],
            id="another set from the first pack on",
        ),
    ],
)
def test_leaving_the_plan(
    generator: torch.Generator,
    calls: list[tuple[str, int]],
    keys: list[int],
    wanted: list[tuple[str, int]],
) -> None:
    """Another set than planned, met before or after some of it is packed; then it is the plan."""
    for world_size in (1, 2, 3, 5):
        made = make_tens(generator, world_size)
        check_tens(made, KNOWN, generator)
        calls.clear()
        check_tens(made, keys, generator)
        assert calls == wanted
        calls.clear()
        check_tens(made, keys, generator)
        assert {name for name, _ in calls} == {"pack_rows_"}
        assert sum(count for _, count in calls) == len(keys)
        check_tens(made, KNOWN, generator)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("changed", KNOWN)
@pytest.mark.parametrize("numel", [0, 9, 11, 20])
def test_a_numel_that_changed(generator: torch.Generator, changed: int, numel: int) -> None:
    """The planned keys with other numels: the plan is left and what stood in rows survives."""
    made = make_tens(generator)
    check_tens(made, KNOWN, generator)
    numels = {key: numel if key == changed else 10 for key in KNOWN}
    for _ in range(2):
        turn = made.turn(60, Scaling((3.0,), ()))
        check(made, parameters(numels, generator, [torch.float32]), turn)
    check_tens(made, KNOWN, generator)


@pytest.mark.usefixtures("one_by_one")
def test_ragged_and_empty_pieces_are_put_back(generator: torch.Generator) -> None:
    """Rows with padding and chunks without elements, put in a sequence when the plan is left."""
    numels = {8: 7, 1: 0, 5: 1, 3: 16, 2: 9}
    for dtype in STORED:
        for world_size in (1, 2, 3, 4, 5):
            for rank in range(world_size):
                size = row_total(list(numels.values()), world_size)
                made = make(group_of(rank, world_size, size, dtype, generator), numels, dtype)
                for keys in ([8, 1, 5, 3], [8, 1, 5, 2, 3], [8, 1, 5]):
                    room = sum(numels[key] for key in keys)
                    here = parameters({key: numels[key] for key in keys}, generator)
                    check(made, here, made.turn(max(room, size - 5), Scaling((3.0,), (2.0,))))


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_without_a_buffer(
    generator: torch.Generator, calls: list[tuple[str, int]], world_size: int
) -> None:
    """Gradients stay where they are until the sum, and are packed in one pass then."""
    made = make_tens(generator, world_size)
    for turn in range(2):
        calls.clear()
        params = parameters(TENS, generator)
        kept = [param.grad for param in params.values()]
        for key, param in params.items():
            assert made.bucket.add(param, grad_of(param), key)
            made.bucket.pack(None, (3.0,))
        assert [param.grad for param in params.values()] == kept
        assert calls == []
        assert made.counters.packs == turn
        made.bucket.clear()
        check(made, params, made.turn(None, Scaling((3.0,), ())))
        assert calls == [("pack_rows_", len(TENS))]


@pytest.mark.usefixtures("one_by_one")
def test_rows_longer_than_the_buffer(
    generator: torch.Generator, calls: list[tuple[str, int]]
) -> None:
    """Padding makes the rows too long for the buffer, so that they have memory of their own."""
    numels = {i: 1 + i % 2 for i in range(6)}
    made = make(group_of(2, 4, 24, torch.float32, generator), numels)
    for turn in range(3):
        calls.clear()
        check(made, parameters(numels, generator, [torch.float32]), made.turn(9))
        wanted = [("pack_", 1)] * 6 + [("pack_rows_", 6)] if turn == 0 else [("pack_rows_", 1)] * 6
        assert calls == wanted
    left_out = {key: numels[key] for key in (0, 1, 2, 4)}
    check(made, parameters(left_out, generator, [torch.float32]), made.turn(9))


@pytest.mark.usefixtures("one_by_one")
def test_rows_in_the_buffer_leave_its_rest(generator: torch.Generator) -> None:
    """By plan the rows stand at the buffer's front, and nothing behind them is touched."""
    made = make(OneRank(), {1: 4, 2: 5})
    for _ in range(2):
        turn = made.turn(12)
        check(made, parameters({1: 4, 2: 5}, generator, [torch.float32]), turn)
        assert turn.buffer is not None
        assert turn.buffer[9:].isnan().all()
        assert not turn.buffer[:9].isnan().any()


@pytest.mark.usefixtures("in_pairs")
def test_a_buffer_that_was_replaced(
    generator: torch.Generator, calls: list[tuple[str, int]]
) -> None:
    """Each bucket goes by its own buffer, of another size or none; the old one is left alone."""
    made = make_tens(generator)
    check_tens(made, KNOWN, generator)
    old: list[Tensor] = []
    for size in (72, 48, 40, None, 100):
        calls.clear()
        turn = made.turn(size, Scaling((3.0,), ()))
        check(made, parameters(dict.fromkeys(KNOWN, 10), generator, [torch.float32]), turn)
        assert {name for name, _ in calls} == {"pack_rows_"}
        assert all(buffer.eq(POISON).all() for buffer in old)
        if turn.buffer is not None:
            old.append(turn.buffer.fill_(POISON))


class OwnStream(HostOrder):
    """Notes whether the bucket's stream is the current one."""

    def __init__(self) -> None:
        self.depth = 0

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def active(self) -> AbstractContextManager[object]:
        return self._entered()


@pytest.mark.parametrize("waiting", [1, 1 << 20])
@pytest.mark.parametrize("room", [None, 9])
def test_own_memory_belongs_to_the_stream(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, room: int | None, waiting: int
) -> None:
    """Memory that is freed after the sum must be that of the stream that works on it.

    The allocator hands freed memory to the stream that it was allocated on, at once.
    """
    stream, outside, empty = OwnStream(), [], torch.empty
    numels = {i: 1 + i % 2 for i in range(6)}
    made = make(group_of(1, 4, 24, torch.float32, generator), numels, stream=stream)

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        if not stream.depth:
            outside.append(args)
        found: Tensor = empty(*args, **kwargs)
        return found

    for _ in range(2):
        turn = made.turn(room)
        params = parameters(numels, generator)
        monkeypatch.setattr(torch, "empty", noted)
        with limits(waiting, waiting):
            send(made.bucket, params, turn)
        monkeypatch.undo()
    assert outside == []
