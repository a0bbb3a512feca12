"""pack_rows_: every element of the bucket, for every world size, gradient size and dtype pair."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from inputs import (
    ALIGNMENT,
    NONFINITE,
    STORED,
    all_patterns,
    draw,
    name,
    new_flag,
    places,
    poisoned,
    shifted,
    special,
)
from test_pack import DIVISORS, all_pairs
from torch import Tensor

WORLD_SIZES = (*range(1, 10), 64, 512)


def chunk_numel(numel: int, world_size: int) -> int:
    return -(-numel // world_size)


def row_places(grads: Sequence[Tensor], world_size: int, gap: int = 3) -> tuple[list[int], int]:
    """Chunk offsets with unused elements around every chunk, and the row's size."""
    return places([chunk_numel(grad.numel(), world_size) for grad in grads], gap)


def check_rows(
    ops: Any,
    grads: Sequence[Tensor],
    world_size: int,
    dst: torch.dtype,
    divisors: Sequence[float] = (),
    *,
    gap: int = 3,
    shift: int = 0,
    beyond: int = 5,
) -> None:
    """One call against the oracle: every bit of the bucket and beyond its rows, and the flag."""
    device = grads[0].device if grads else torch.device("cpu")
    offsets, row_numel = row_places(grads, world_size, gap)
    storage = poisoned(shift + world_size * row_numel + beyond, dst, device)
    before = storage.cpu().clone()
    bucket, flag = storage[shift:], new_flag(device)
    ops.pack_rows_(list(grads), offsets, row_numel, world_size, bucket, flag, list(divisors))
    sources = [grad.cpu() for grad in grads]
    expected, bad = oracle.pack_rows(
        sources, offsets, row_numel, world_size, before[shift:], divisors, device.type
    )
    oracle.assert_bits(bucket, *expected)
    assert torch.equal(oracle.bits(storage[:shift]), oracle.bits(before[:shift]))
    assert flag.item() is bad


def ragged_sizes(world_size: int) -> list[int]:
    """Around the multiples of the world size, and around a vector's elements per rank."""
    edges = [k * world_size + d for k in (0, 1, 2, 3, 7, 8, 9, 33) for d in (-1, 0, 1)]
    return sorted({0, 1, 2, 5, *(size for size in edges if size >= 0)})


@all_pairs
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ragged_sizes(
    ops: Any,
    device: torch.device,
    world_size: int,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    grads = [draw(size, src, generator).to(device) for size in ragged_sizes(world_size)]
    check_rows(ops, grads, world_size, dst, [3.0])
    check_rows(ops, grads, world_size, dst, gap=0, beyond=0)
    for grad in grads:
        check_rows(ops, [grad], world_size, dst, [3.0], gap=1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64, 512])
@pytest.mark.parametrize("dst", STORED, ids=name)
def test_many_gradients(
    ops: Any,
    device: torch.device,
    world_size: int,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Mixed dtypes, more than one table or buffer holds, in any order, with empty ones."""
    sizes = torch.randint(0, 300, (700,), generator=generator).tolist()
    sizes += [0, 5000, 70_001, 1, 2112, 2112, 2112, 33_000]
    grads = [draw(size, STORED[i % 3], generator).to(device) for i, size in enumerate(sizes)]
    order = torch.randperm(len(grads), generator=generator).tolist()
    check_rows(ops, [grads[i] for i in order], world_size, dst, [4.0], gap=1)
    offsets, row_numel = row_places(grads, world_size)
    bucket, flag = poisoned(world_size * row_numel, dst, device), new_flag(device)
    before = bucket.cpu().clone()
    arguments = [grads[i] for i in order], [offsets[i] for i in order], row_numel, world_size
    ops.pack_rows_(*arguments, bucket, flag, [])
    sources = [grad.cpu() for grad in grads]
    expected, bad = oracle.pack_rows(sources, offsets, row_numel, world_size, before)
    oracle.assert_bits(bucket, *expected)
    assert flag.item() is bad


@all_pairs
def test_long_chunks(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Around the chunk from which on it is converted in place, and around blocks."""
    for world_size, chunk in itertools.product((1, 3), (4095, 4096, 4097, 8191, 8200, 40_000)):
        for missing in (0, 1, chunk - 1, chunk, chunk + 1):
            numel = chunk * world_size - missing
            if numel > 0:
                grads = [draw(size, src, generator).to(device) for size in (7, numel, 7)]
                check_rows(ops, grads, world_size, dst, [3.0])


def test_more_ranks_than_any_gradient_has_elements(
    ops: Any, device: torch.device, generator: torch.Generator
) -> None:
    grads = [draw(size, torch.float32, generator).to(device) for size in (1, 0, 3, 100)]
    for world_size in (101, 1000, 70_000):
        check_rows(ops, grads, world_size, torch.float16, [2.0])


@all_pairs
def test_alignment(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Every pair of source and bucket alignments, with rows that keep or change the alignment."""
    shifts = itertools.product(
        range(ALIGNMENT // src.itemsize), range(ALIGNMENT // dst.itemsize), (0, 3, 8)
    )
    for src_shift, dst_shift, gap in shifts:
        grads = [
            shifted(draw(size, src, generator), src_shift, device) for size in (64, 13, 160, 96)
        ]
        check_rows(ops, grads, 2, dst, [3.0], gap=gap, shift=dst_shift)


@all_pairs
def test_divisors(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    grad = torch.cat((special(src), draw(1000, src, generator))).to(device)
    for divisors in DIVISORS:
        check_rows(ops, [grad], 7, dst, divisors)


@pytest.mark.parametrize("dst", STORED, ids=name)
@pytest.mark.parametrize("src", [torch.float16, torch.bfloat16], ids=name)
def test_every_bit_pattern(
    ops: Any, device: torch.device, src: torch.dtype, dst: torch.dtype
) -> None:
    for world_size in (5, 8):
        # Not a nan before, so that a nan expected is a nan written.
        row_numel = chunk_numel(1 << 16, world_size)
        bucket = torch.full((world_size * row_numel,), 0.5, dtype=dst, device=device)
        before, flag = bucket.cpu().clone(), new_flag(device)
        patterns = all_patterns(src).to(device)
        ops.pack_rows_([patterns], [0], row_numel, world_size, bucket, flag, [3.0])
        expected, _ = oracle.pack_rows(
            [patterns.cpu()], [0], row_numel, world_size, before, [3.0], device.type
        )
        oracle.assert_bits(bucket, *expected)
        assert flag.item()


def test_several_calls_fill_one_bucket(
    ops: Any, device: torch.device, generator: torch.Generator
) -> None:
    """Each call leaves what the others wrote; the flag stays as it was raised."""
    sizes = [20, 0, 33, 7, 4000, 1, 90, 64]
    for world_size in (1, 4, 9):
        grads = [draw(size, torch.float32, generator).to(device) for size in sizes]
        grads[3][2] = torch.inf
        offsets, row_numel = row_places(grads, world_size)
        bucket, flag = poisoned(world_size * row_numel + 9, torch.float16, device), new_flag(device)
        before = bucket.cpu().clone()
        for part in (slice(5, 8), slice(0, 4), slice(4, 5), slice(4, 4)):
            row = row_numel, world_size
            ops.pack_rows_(grads[part], offsets[part], *row, bucket, flag, [2.0])
        sources = [grad.cpu() for grad in grads]
        expected, bad = oracle.pack_rows(
            sources, offsets, row_numel, world_size, before, [2.0], device.type
        )
        oracle.assert_bits(bucket, *expected)
        assert flag.item()
        assert bad


def test_a_bucket_of_no_rows(ops: Any, device: torch.device) -> None:
    empty = torch.ones(0, device=device)
    for numel, world_size in ((0, 1), (0, 2**31 - 1), (6, 4)):
        bucket, flag = poisoned(numel, torch.float16, device), new_flag(device)
        for grads in ([], [empty], [empty, empty]):
            ops.pack_rows_(grads, [0] * len(grads), 0, world_size, bucket, flag, [2.0])
        assert torch.equal(oracle.bits(bucket), oracle.bits(poisoned(numel, torch.float16)))
        assert not flag.item()


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_strides(
    ops: Any, device: torch.device, world_size: int, generator: torch.Generator
) -> None:
    """Cut in row-major order, whatever the strides."""
    flat = draw(4 * 3 * 10 * 14, torch.float32, generator).to(device)
    grads = [
        flat[:50],
        flat[: 40 * 42].view(40, 42).t(),
        flat[5].expand(33),
        flat.view(4, 3, 10, 14).contiguous(memory_format=torch.channels_last),
        flat[::2],
        flat[9],  # 0-dim
    ]
    check_rows(ops, grads, world_size, torch.bfloat16, [3.0])


@all_pairs
def test_flag_sees_one_bad_value(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    sizes = [3, 0, 65, 20_001, 17]
    for world_size in (1, 3, 64):
        grads = [torch.rand(size, generator=generator).to(src).to(device) for size in sizes]
        offsets, row_numel = row_places(grads, world_size)
        bucket = poisoned(world_size * row_numel, dst, device)

        def flag_after() -> bool:
            flag = new_flag(device)
            ops.pack_rows_(grads, offsets, row_numel, world_size, bucket, flag, [2.0])  # noqa: B023
            return bool(flag.item())

        assert not flag_after()  # neither the poison nor the padding counts
        for tensor, position, bad in itertools.product((0, 2, 3, 4), (0, -1), NONFINITE):
            kept = grads[tensor][position].clone()
            grads[tensor][position] = bad
            assert flag_after(), (tensor, position, bad)
            grads[tensor][position] = kept


def test_flag_stays_true(ops: Any, device: torch.device) -> None:
    flag = torch.ones((1,), dtype=torch.bool, device=device)
    bucket = poisoned(40, torch.float16, device)
    ops.pack_rows_([torch.ones(40, device=device)], [0], 10, 4, bucket, flag, [])
    assert flag.item()


def test_gradients_are_only_read(
    ops: Any, device: torch.device, generator: torch.Generator
) -> None:
    grads = [draw(90, dtype, generator).to(device) for dtype in STORED]
    kept = [grad.clone() for grad in grads]
    check_rows(ops, grads, 4, torch.float16, [3.0])
    assert all(torch.equal(grad, copy) for grad, copy in zip(grads, kept, strict=True))


def test_one_rank_is_pack(ops: Any, device: torch.device, generator: torch.Generator) -> None:
    grads = [draw(size, torch.float32, generator).to(device) for size in (5, 4097, 0, 64)]
    offsets, total = row_places(grads, 1)
    buckets = [poisoned(total, torch.float16, device) for _ in range(2)]
    flags = [new_flag(device) for _ in range(2)]
    ops.pack_(grads, offsets, buckets[0], flags[0], [3.0])
    ops.pack_rows_(grads, offsets, total, 1, buckets[1], flags[1], [3.0])
    assert torch.equal(oracle.bits(buckets[0]), oracle.bits(buckets[1]))
    assert flags[0].item() == flags[1].item()
