"""flat_overflow and flat_overflow_: any inf or nan, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import oracle
import pytest
import torch
from inputs import (
    ALIGNMENT,
    NONFINITE,
    READABLE,
    SIZES,
    all_patterns,
    assert_refused,
    draw,
    name,
    new_flag,
    shifted,
    special,
)


@pytest.mark.parametrize("dtype", READABLE, ids=name)
def test_finite_values(
    ops: Any, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    values = draw(max(SIZES), dtype, generator)
    ends = special(dtype)
    values[: ends.numel()] = ends
    buf = values.to(device)
    for size in SIZES:
        result = ops.flat_overflow(buf[:size])
        assert result.dtype == torch.bool
        assert result.shape == ()
        assert result.device == device
        assert not result.item(), size


@pytest.mark.parametrize("dtype", READABLE, ids=name)
def test_bad_value_at_every_end(
    ops: Any, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    sizes = (1, 2, 17, 65, 1023, 4097, 65537, 150001)
    buf = draw(max(sizes), dtype, generator).to(device)
    for size, bad in itertools.product(sizes, NONFINITE):
        middle = int(torch.randint(size, (), generator=generator))
        for position in {0, size - 1, middle, size // 2}:
            kept = buf[position].clone()
            buf[position] = bad
            assert ops.flat_overflow(buf[:size]).item(), (size, position, bad)
            buf[position] = kept


@pytest.mark.parametrize("dtype", READABLE, ids=name)
def test_alignment(
    ops: Any, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """A bad value just outside is not read; one at either end is seen."""
    for shift, size in itertools.product(range(ALIGNMENT // dtype.itemsize), (1, 5, 31, 70)):
        storage = shifted(draw(size + 2, dtype, generator), shift, device)
        storage[0] = storage[-1] = torch.nan
        buf = storage[1:-1]
        assert not ops.flat_overflow(buf).item(), (shift, size)
        for position in (0, size - 1):
            buf[position] = torch.inf
            assert ops.flat_overflow(buf).item(), (shift, size, position)
            buf[position] = 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_every_bit_pattern(ops: Any, device: torch.device, dtype: torch.dtype) -> None:
    patterns = all_patterns(dtype)
    bad = oracle.nonfinite(patterns)
    assert not ops.flat_overflow(patterns[~bad].to(device)).item()
    buf = torch.zeros(67, dtype=dtype, device=device)
    for i, pattern in enumerate(patterns[bad].to(device)):
        buf[i % 67] = pattern
        assert ops.flat_overflow(buf).item(), pattern
        buf[i % 67] = 0


def test_signalling_nan(ops: Any, device: torch.device) -> None:
    single = torch.tensor([0x7F800001, -0x007FFFFF], dtype=torch.int32).view(torch.float32)
    double = torch.tensor([0x7FF0000000000001], dtype=torch.int64).view(torch.float64)
    for values in (single[:1], single[1:], double):
        assert ops.flat_overflow(values.to(device)).item()


def test_shapes(ops: Any, device: torch.device) -> None:
    buf = torch.zeros(3, 4, 5, device=device)
    assert not ops.flat_overflow(buf).item()
    buf[2, 3, 4] = torch.inf
    assert ops.flat_overflow(buf).item()
    assert ops.flat_overflow(torch.tensor(torch.nan, device=device)).item()
    assert not ops.flat_overflow(torch.zeros(0, 3, device=device)).item()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", READABLE, ids=name)
def test_flag_is_ored(
    ops: Any, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    finite = torch.ones(100, dtype=dtype, device=device)
    bad = finite.clone()
    bad[99] = -torch.inf
    flag = torch.zeros(shape, dtype=torch.bool, device=device)
    for buf, expected in ((finite, False), (finite[:0], False), (bad, True), (finite, True)):
        assert ops.flat_overflow_(flag, buf) is None
        assert flag.item() is expected


def test_flag_inside_a_larger_tensor(ops: Any, device: torch.device) -> None:
    flags = torch.zeros(5, dtype=torch.bool, device=device)
    ops.flat_overflow_(flags[2], torch.full((9,), torch.nan, device=device))
    assert flags.tolist() == [False, False, True, False, False]


def test_refused(ops: Any, device: torch.device) -> None:
    flag = new_flag(device)
    good = torch.full((4,), torch.inf, device=device)

    def refuse(buf: torch.Tensor, *pieces: str) -> None:
        assert_refused(lambda: ops.flat_overflow(buf), "flat_overflow", pieces, [])
        assert_refused(lambda: ops.flat_overflow_(flag, buf), "flat_overflow_", pieces, [flag])

    refuse(good.int(), "buf is int32", "expected float16, bfloat16, float32 or float64")
    refuse(good.view(2, 2).t(), "buf is not contiguous", "buf.contiguous()")
    refuse(torch.ones(8, device=device)[::2], "buf is not contiguous")

    def refuse_flag(flag: torch.Tensor, *pieces: str) -> None:
        assert_refused(lambda: ops.flat_overflow_(flag, good), "flat_overflow_", pieces, [flag])

    refuse_flag(torch.zeros(1, dtype=torch.uint8, device=device), "flag is uint8; expected bool")
    refuse_flag(torch.zeros(2, dtype=torch.bool, device=device), "flag has 2 elements; expected 1")
    refuse_flag(torch.zeros(0, dtype=torch.bool, device=device), "flag has 0 elements; expected 1")
