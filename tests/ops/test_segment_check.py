"""segment_check: the sums' order bit for bit, their value, and the flag."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from inputs import (
    NONFINITE,
    READABLE,
    SIZES,
    SMALL_SIZES,
    STORED,
    draw,
    name,
)
from torch import Tensor

LANES = (1, 2, 4, 8)


def bounds(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int64)


def values_to_sum(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Finite, and small enough for a float64 square."""
    values = draw(numel, dtype, generator)
    if dtype == torch.float64:
        values = torch.randn(numel, dtype=dtype, generator=generator)
    return values


def norm_lanes(generator: torch.Generator) -> int | None:
    """The lanes whose order gives torch's CPU norm here, if any of those offered does."""
    matching = set(LANES)
    for _ in range(20):  # by chance, two orders often round to the same norm
        values = torch.randn(1003, generator=generator).double()
        terms, wanted = oracle.squares(values), values.norm(2).item()
        matching &= {n for n in LANES if math.sqrt(oracle.sum_in_order(terms, n)) == wanted}
    return matching.pop() if len(matching) == 1 else None


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", READABLE, ids=name)
def test_order_on_cpu(ops: Any, dtype: torch.dtype, lanes: int, generator: torch.Generator) -> None:
    sizes = SIZES if lanes == 4 else SMALL_SIZES
    buf = values_to_sum(sum(sizes), dtype, generator)
    flag, sums = ops.segment_check(buf, bounds(sizes), lanes)
    assert flag.dtype == torch.bool
    assert flag.shape == ()
    assert not flag.item()
    assert sums.dtype == torch.float64
    terms, begin, expected = oracle.squares(buf), 0, []
    for size in sizes:
        expected.append(oracle.sum_in_order(terms[begin : begin + size], lanes))
        begin += size
    oracle.assert_bits(sums, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", STORED, ids=name)
def test_equals_the_norm_of_torch_on_cpu(
    ops: Any, dtype: torch.dtype, threads: int, generator: torch.Generator
) -> None:
    lanes = norm_lanes(generator)
    if lanes is None:
        pytest.skip("torch's CPU norm adds in no order that segment_check offers here")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in (*SIZES, 1 << 20):
            values = draw(size, dtype, generator)
            _, sums = ops.segment_check(values, bounds([size]), lanes)
            # Not sums.sqrt(): torch's vectorised float64 sqrt is not always correctly rounded.
            assert math.sqrt(sums.item()) == values.double().norm(2).item(), size
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", READABLE, ids=name)
def test_value(
    ops: Any, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    sizes = [0, *SMALL_SIZES, 0, 0, 70001, 0]
    buf = values_to_sum(sum(sizes), dtype, generator)
    flag, sums = ops.segment_check(buf.to(device), bounds(sizes), 4)
    again = ops.segment_check(buf.to(device), bounds(sizes), 4)[1]
    assert torch.equal(sums, again)
    assert sums.device == flag.device == device
    assert not flag.item()
    parts = torch.split(buf, sizes)
    for size, part, total in zip(sizes, parts, sums.tolist(), strict=True):
        assert math.isclose(total, math.fsum(oracle.squares(part)), rel_tol=1e-12), size


def test_many_segments(ops: Any, device: torch.device, generator: torch.Generator) -> None:
    sizes = torch.randint(0, 40, (2000,), generator=generator).tolist()
    sizes[:2] = sizes[-2:] = [0, 0]
    buf = draw(sum(sizes), torch.bfloat16, generator)
    _, sums = ops.segment_check(buf.to(device), bounds(sizes), 4)
    wanted = [math.fsum(oracle.squares(part)) for part in torch.split(buf, sizes)]
    torch.testing.assert_close(
        sums.cpu(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_no_segments(ops: Any, device: torch.device) -> None:
    for sizes in ([], [0], [0, 0, 0]):
        flag, sums = ops.segment_check(torch.zeros(0, device=device), bounds(sizes), 4)
        assert not flag.item()
        assert sums.tolist() == [0.0] * len(sizes)
        assert sums.dtype == torch.float64


@pytest.mark.parametrize("dtype", READABLE, ids=name)
def test_bad_value_at_every_end(
    ops: Any, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """The flag is set, the segment's sum is inf or nan, and the other sums are as they were."""
    sizes = [5, 0, 4097, 70001, 33]
    offsets = bounds(sizes)
    buf = values_to_sum(sum(sizes), dtype, generator).to(device)
    clean = ops.segment_check(buf, offsets, 4)[1].tolist()
    for segment, bad in itertools.product((0, 2, 3, 4), NONFINITE):
        begin, end = offsets[segment : segment + 2].tolist()
        for position in (begin, end - 1):
            kept = buf[position].clone()
            buf[position] = bad
            flag, sums = ops.segment_check(buf, offsets, 4)
            buf[position] = kept
            assert flag.item(), (segment, position, bad)
            found = sums.tolist()
            same = math.isnan(found[segment]) if math.isnan(bad) else found[segment] == math.inf
            assert same, (segment, position, bad)
            assert found[:segment] + found[segment + 1 :] == clean[:segment] + clean[segment + 1 :]


def test_sum_that_only_float64_holds(ops: Any, device: torch.device) -> None:
    """The squares of the largest float32 values, and a float64 sum that is itself infinite."""
    largest = torch.finfo(torch.float32).max
    flag, sums = ops.segment_check(torch.full((9,), largest, device=device), bounds([9]), 4)
    assert not flag.item()
    assert sums.item() == 9 * largest**2
    buf = torch.full((9,), 1e200, dtype=torch.float64, device=device)
    flag, sums = ops.segment_check(buf, bounds([9]), 4)
    assert not flag.item()
    assert sums.item() == math.inf


@pytest.mark.parametrize("dtype", READABLE, ids=name)
def test_buffer_is_only_read(ops: Any, device: torch.device, dtype: torch.dtype) -> None:
    buf = torch.arange(1, 100, device=device).to(dtype)
    kept = buf.clone()
    ops.segment_check(buf, bounds([40, 59]), 4)
    assert torch.equal(buf, kept)
