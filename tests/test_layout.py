"""The parameter-major layout, against the definition of DeepSpeed's partitions."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z3ext.layout import Slice, parameter_major, partition_numel, rank_slice

numels = st.integers(0, 300) | st.integers(0, 1 << 45)
world_sizes = st.integers(1, 64)
properties = settings(deadline=None, database=None)


@pytest.mark.parametrize(
    ("numel", "world_size", "expected"),
    [(0, 1, 0), (0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (8, 4, 2), (10, 3, 4), (7, 1, 7)],
)
def test_partition_numel(numel: int, world_size: int, expected: int) -> None:
    assert partition_numel(numel, world_size) == expected


@pytest.mark.parametrize(
    ("numel", "world_size", "expected"),
    [
        (10, 3, [(0, 4), (4, 4), (8, 2)]),
        (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (1, 3, [(0, 1), (1, 0), (1, 0)]),
        (0, 2, [(0, 0), (0, 0)]),
        (6, 1, [(0, 6)]),
    ],
)
def test_rank_slice(numel: int, world_size: int, expected: list[tuple[int, int]]) -> None:
    found = [rank_slice(numel, world_size, rank) for rank in range(world_size)]
    assert found == [Slice(*pair) for pair in expected]


@properties
@given(numel=numels, world_size=world_sizes)
def test_slices_cut_a_parameter_into_chunks(numel: int, world_size: int) -> None:
    """One after the other, every element once; only the end of the list may be short or empty."""
    chunk = partition_numel(numel, world_size)
    assert chunk * world_size - numel in range(world_size)
    end = 0
    for rank in range(world_size):
        piece = rank_slice(numel, world_size, rank)
        assert piece.start == end
        assert 0 <= piece.numel <= chunk
        end += piece.numel
        assert piece.numel == chunk or end == numel
    assert end == numel


def test_parameter_major_by_hand() -> None:
    layout = parameter_major([5, 0, 1, 8], world_size=4, rank=2)
    assert layout.offsets == (0, 5, 5, 6)
    assert layout.total == 14
    assert layout.src_offsets == (4, 5, 6, 10)
    assert layout.numels == (1, 0, 0, 2)
    assert layout.padded_numels == (2, 0, 1, 2)


@properties
@given(numels=st.lists(numels, max_size=20), world_size=world_sizes)
def test_every_rank_together_covers_the_bucket(numels: list[int], world_size: int) -> None:
    layouts = [parameter_major(numels, world_size, rank) for rank in range(world_size)]
    for layout in layouts:
        assert layout.offsets == tuple(sum(numels[:i]) for i in range(len(numels)))
        assert layout.total == sum(numels)
        assert layout.padded_numels == tuple(partition_numel(n, world_size) for n in numels)
    for i, numel in enumerate(numels):
        covered = layouts[0].offsets[i]
        for layout in layouts:
            assert layout.src_offsets[i] == covered
            covered += layout.numels[i]
        assert covered == layouts[0].offsets[i] + numel


def test_no_gradients() -> None:
    layout = parameter_major([], world_size=2, rank=1)
    assert layout.total == 0
    assert layout.offsets == layout.numels == layout.src_offsets == layout.padded_numels == ()


def test_layout_is_frozen() -> None:
    layout = parameter_major([3], world_size=1, rank=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.total = 4  # type: ignore[misc]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="numel is -1; expected 0 or more"):
        partition_numel(-1, 2)
    for world_size in (0, -3):
        with pytest.raises(ValueError, match=f"world_size is {world_size}; expected 1 or more"):
            partition_numel(4, world_size)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank is {rank}; expected 0 <= rank"):
            rank_slice(4, 2, rank)
        with pytest.raises(ValueError, match=f"rank is {rank}; expected 0 <= rank"):
            parameter_major([], 2, rank)
    with pytest.raises(ValueError, match=r"numels\[1\] is -5; expected 0 or more"):
        parameter_major([3, -5], 2, 0)
    with pytest.raises(ValueError, match="world_size is 0"):
        parameter_major([], 0, 0)
