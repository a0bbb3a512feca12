"""unpack_: values, padding and sums, for every dtype pair, size, alignment and bit pattern."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from inputs import (
    ALIGNMENT,
    SIZES,
    SMALL_SIZES,
    STORED,
    all_patterns,
    draw,
    name,
    places,
    poisoned,
    special,
)
from torch import Tensor

MULTIPLIERS: tuple[list[float], ...] = ([], [1.0], [3.0], [0.1, 3.0], [2.0, 1.0, 0.5, 7.0], [-0.0])

all_pairs = pytest.mark.parametrize(
    ("src", "dst"), list(itertools.product(STORED, STORED)), ids=name
)
both_modes = pytest.mark.parametrize("accumulate", [False, True], ids=["copy", "add"])


def check_unpack(
    ops: Any,
    bucket: Tensor,
    partitions: Tensor,
    slices: Sequence[tuple[int, int, int, int]],
    multipliers: Sequence[float] = (),
    accumulate: bool = False,
) -> None:
    """One call against the oracle; a slice is (src offset, dst offset, numel, padded numel)."""
    before, source = partitions.cpu().clone(), bucket.cpu().clone()
    columns = [list(column) for column in zip(*slices, strict=True)] or [[], [], [], []]
    ops.unpack_(bucket, partitions, *columns, list(multipliers), accumulate)
    expected = oracle.unpack(source, before, slices, multipliers, accumulate)
    oracle.assert_bits(partitions, *expected)
    assert torch.equal(oracle.bits(bucket), oracle.bits(source))


def outputs(
    numel: int, dtype: torch.dtype, device: torch.device, accumulate: bool, seed: torch.Generator
) -> Tensor:
    """What stands in the partitions before: poison, or values that can be added to."""
    return draw(numel, dtype, seed).to(device) if accumulate else poisoned(numel, dtype, device)


@both_modes
@all_pairs
def test_every_size(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    accumulate: bool,
    generator: torch.Generator,
) -> None:
    """All sizes in one call, with paddings of 0 to 4 elements; then each size alone."""
    sizes = SIZES if src == dst else (*SMALL_SIZES, 65537)
    src_offsets, src_end = places(sizes)
    padded = [size + i % 5 for i, size in enumerate(sizes)]
    dst_offsets, dst_end = places(padded, gap=2)
    bucket = draw(src_end, src, generator).to(device)
    slices = list(zip(src_offsets, dst_offsets, sizes, padded, strict=True))
    partitions = outputs(dst_end, dst, device, accumulate, generator)
    check_unpack(ops, bucket, partitions, slices, [3.0], accumulate)
    for size in SMALL_SIZES:
        partitions = outputs(size + 6, dst, device, accumulate, generator)
        check_unpack(ops, bucket, partitions, [(1, 1, size, size + 4)], [], accumulate)


@both_modes
@all_pairs
def test_alignment(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    accumulate: bool,
    generator: torch.Generator,
) -> None:
    slices, src_end, dst_end = [], 0, 0
    shifts = itertools.product(
        range(ALIGNMENT // src.itemsize), range(ALIGNMENT // dst.itemsize), (1, 9, 45, 130)
    )
    for src_shift, dst_shift, size in shifts:
        slices.append((src_end + src_shift, dst_end + dst_shift, size, size + 3))
        src_end += (src_shift + size) // ALIGNMENT * ALIGNMENT + ALIGNMENT
        dst_end += (dst_shift + size + 3) // ALIGNMENT * ALIGNMENT + ALIGNMENT
    bucket = draw(src_end, src, generator).to(device)
    partitions = outputs(dst_end, dst, device, accumulate, generator)
    check_unpack(ops, bucket, partitions, slices, [3.0], accumulate)


@both_modes
@all_pairs
def test_multipliers(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    accumulate: bool,
    generator: torch.Generator,
) -> None:
    bucket = torch.cat((special(src), draw(3000, src, generator))).to(device)
    numel = bucket.numel()
    for multipliers in MULTIPLIERS:
        partitions = outputs(numel + 9, dst, device, accumulate, generator)
        check_unpack(ops, bucket, partitions, [(0, 5, numel, numel + 2)], multipliers, accumulate)


@pytest.mark.parametrize("dst", STORED, ids=name)
@pytest.mark.parametrize("src", [torch.float16, torch.bfloat16], ids=name)
def test_every_bit_pattern(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    bucket = all_patterns(src).to(device)
    numel = bucket.numel()
    for multipliers in ([], [3.0, 7.0]):
        partitions = torch.full((numel,), 0.5, dtype=dst, device=device)
        check_unpack(ops, bucket, partitions, [(0, 0, numel, numel)], multipliers)
    partitions = draw(numel, dst, generator).to(device)
    check_unpack(ops, bucket, partitions, [(0, 0, numel, numel)], [], accumulate=True)


@both_modes
def test_large(
    ops: Any, device: torch.device, accumulate: bool, generator: torch.Generator
) -> None:
    numel = 1 << 20
    bucket = draw(numel + 5, torch.float16, generator).to(device)
    partitions = outputs(numel + 9, torch.float32, device, accumulate, generator)
    check_unpack(ops, bucket, partitions, [(5, 3, numel, numel + 2)], [2.0], accumulate)


def test_padding_longer_than_the_slice(ops: Any, device: torch.device) -> None:
    """A rank past the parameter's end owns padding only; all of it is +0."""
    bucket = torch.ones(8, device=device)
    partitions = poisoned(100_000, torch.bfloat16, device)
    slices = [(8, 1, 0, 70), (8, 80, 0, 0), (3, 90, 2, 90_000)]
    check_unpack(ops, bucket, partitions, slices)
    assert (oracle.bits(partitions[1:71]) == 0).all()
    assert (oracle.bits(partitions[92:90_090]) == 0).all()


def test_accumulating_keeps_the_padding(ops: Any, device: torch.device) -> None:
    bucket = torch.ones(8, device=device)
    partitions = torch.full((40,), 5.0, device=device)
    check_unpack(ops, bucket, partitions, [(0, 2, 4, 30)], accumulate=True)
    assert partitions.tolist() == [5.0, 5.0, *[6.0] * 4, *[5.0] * 34]


def test_accumulating_rounds_to_the_partitions(ops: Any, device: torch.device) -> None:
    """512 + 2 is a tie in bfloat16 and goes to even; float32 keeps it."""
    for dtype, expected in ((torch.bfloat16, 512.0), (torch.float32, 514.0)):
        partitions = torch.full((50,), 512.0, dtype=dtype, device=device)
        bucket = torch.full((50,), 2.0, dtype=torch.bfloat16, device=device)
        ops.unpack_(bucket, partitions, [0], [0], [50], [50], [], True)
        assert (partitions == expected).all()


def test_the_value_is_cast_before_it_is_added(ops: Any, device: torch.device) -> None:
    """1 + 2**-8 rounds to 1 in bfloat16; the uncast sum, 256 + 1 + 2**-8, would round to 258."""
    bucket = torch.full((40,), 1.0 + 2.0**-8, device=device)
    partitions = torch.full((40,), 256.0, dtype=torch.bfloat16, device=device)
    check_unpack(ops, bucket, partitions, [(0, 0, 40, 40)], accumulate=True)
    assert (partitions == 256.0).all()


def test_nothing_to_do(ops: Any, device: torch.device) -> None:
    bucket = torch.ones(3, device=device)
    check_unpack(ops, bucket, poisoned(4, torch.float16, device), [])
    check_unpack(ops, bucket, poisoned(4, torch.float16, device), [(3, 4, 0, 0), (0, 0, 0, 0)])
    check_unpack(ops, bucket[:0], poisoned(0, torch.float16, device), [(0, 0, 0, 0)])


def test_one_source_for_two_slices(ops: Any, device: torch.device) -> None:
    """Sources may overlap: only the places written must not."""
    bucket = torch.arange(50.0, device=device)
    check_unpack(
        ops, bucket, poisoned(99, torch.float32, device), [(3, 50, 40, 41), (0, 0, 50, 50)]
    )


def test_many_slices(ops: Any, device: torch.device, generator: torch.Generator) -> None:
    sizes = torch.randint(0, 60, (1000,), generator=generator).tolist()
    src_offsets, src_end = places(sizes, gap=0)
    dst_offsets, dst_end = places([size + size % 3 for size in sizes], gap=1)
    slices = [
        (src_offsets[i], dst_offsets[i], sizes[i], sizes[i] + sizes[i] % 3)
        for i in torch.randperm(1000, generator=generator).tolist()
    ]
    bucket = draw(src_end, torch.bfloat16, generator).to(device)
    check_unpack(ops, bucket, poisoned(dst_end, torch.float16, device), slices, [3.0])
