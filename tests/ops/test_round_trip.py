"""pack_ or pack_rows_, then every rank's unpack_, give the gradients back for any world size."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import STORED, draw, name, new_flag, poisoned

from z3ext.layout import parameter_major


@pytest.mark.parametrize("dtype", STORED, ids=name)
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    # The fixtures hold no state that an example changes.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
@given(
    numels=st.lists(st.integers(0, 70) | st.sampled_from([127, 128, 1025]), max_size=12),
    world_size=st.integers(1, 8),
    data_seed=st.integers(0, 2**31),
)
def test_pack_then_unpack(
    ops: Any,
    device: torch.device,
    dtype: torch.dtype,
    numels: list[int],
    world_size: int,
    data_seed: int,
) -> None:
    generator = torch.Generator().manual_seed(data_seed)
    grads = [draw(numel, dtype, generator).to(device) for numel in numels]
    layouts = [parameter_major(numels, world_size, rank) for rank in range(world_size)]
    bucket = poisoned(layouts[0].total, dtype, device)
    flag = new_flag(device)
    ops.pack_(grads, list(layouts[0].offsets), bucket, flag, [])
    assert not flag.item()

    gathered: list[list[torch.Tensor]] = [[] for _ in numels]
    for layout in layouts:
        *dst_offsets, total = accumulate(layout.padded_numels, initial=0)
        partitions = poisoned(total, dtype, device)
        ops.unpack_(
            bucket,
            partitions,
            list(layout.src_offsets),
            dst_offsets,
            list(layout.numels),
            list(layout.padded_numels),
            [],
            False,
        )
        for chunks, begin, numel in zip(gathered, dst_offsets, layout.padded_numels, strict=True):
            chunks.append(partitions[begin : begin + numel])
    for grad, chunks in zip(grads, gathered, strict=True):
        whole = torch.cat(chunks)
        oracle.assert_bits(whole[: grad.numel()], grad)
        assert (oracle.bits(whole[grad.numel() :]) == 0).all()


@pytest.mark.parametrize("dtype", STORED, ids=name)
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
@given(
    numels=st.lists(st.integers(0, 70) | st.sampled_from([127, 128, 1025]), max_size=12),
    world_size=st.integers(1, 8) | st.sampled_from([64, 200]),
    data_seed=st.integers(0, 2**31),
)
def test_pack_rows_then_unpack(
    ops: Any,
    device: torch.device,
    dtype: torch.dtype,
    numels: list[int],
    world_size: int,
    data_seed: int,
) -> None:
    """One rank's row has its chunks where unpack_ finds them, padding included."""
    generator = torch.Generator().manual_seed(data_seed)
    grads = [draw(numel, dtype, generator).to(device) for numel in numels]
    chunks = [-(-numel // world_size) for numel in numels]
    *chunk_offsets, row_numel = accumulate(chunks, initial=0)
    bucket, flag = poisoned(world_size * row_numel, dtype, device), new_flag(device)
    ops.pack_rows_(grads, chunk_offsets, row_numel, world_size, bucket, flag, [])
    assert not flag.item()

    rows = []
    for row in bucket.view(world_size, row_numel):
        partitions = poisoned(row_numel, dtype, device)
        slices = chunk_offsets, chunk_offsets, chunks, chunks
        ops.unpack_(row, partitions, *slices, [], False)
        rows.append(partitions)
    for grad, begin, chunk in zip(grads, chunk_offsets, chunks, strict=True):
        whole = torch.cat([row[begin : begin + chunk] for row in rows])
        oracle.assert_bits(whole[: grad.numel()], grad)
        assert (oracle.bits(whole[grad.numel() :]) == 0).all()
