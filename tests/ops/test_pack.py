"""pack_: the values stored, for every dtype pair, size, alignment and bit pattern."""

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
    new_flag,
    places,
    poisoned,
    shifted,
    special,
)
from torch import Tensor

DIVISORS: tuple[list[float], ...] = (
    [],
    [1.0],
    [3.0],
    [2.0, 3.0],
    [1.0, 3.0, 1.0],
    [8.0],
    [2.0, 4.0, 8.0, 0.5],
    [3.0, 7.0, 11.0],
    [-3.0],
    [0.1],  # not exact in float32
)

all_pairs = pytest.mark.parametrize(
    ("src", "dst"), list(itertools.product(STORED, STORED)), ids=name
)


def check_pack(
    ops: Any,
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    bucket: Tensor,
    divisors: Sequence[float] = (),
) -> None:
    """One call against the oracle: every bit of the bucket, and the flag."""
    before = bucket.cpu().clone()
    flag = new_flag(bucket.device)
    ops.pack_(list(grads), list(offsets), bucket, flag, list(divisors))
    sources = [grad.cpu() for grad in grads]
    expected, bad = oracle.pack(sources, offsets, before, divisors, bucket.device.type)
    oracle.assert_bits(bucket, *expected)
    assert flag.item() is bad


@all_pairs
def test_every_size(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    sizes = SIZES if src == dst else (*SMALL_SIZES, 65537)
    grads = [draw(size, src, generator).to(device) for size in sizes]
    offsets, end = places(sizes)
    check_pack(ops, grads, offsets, poisoned(end, dst, device))
    for grad in grads:
        check_pack(ops, [grad], [1], poisoned(grad.numel() + 2, dst, device), [3.0])


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
    ids=name,
)
def test_large(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    grad = draw((1 << 20) + 5, src, generator)[5:].to(device)
    check_pack(ops, [grad], [7], poisoned((1 << 20) + 9, dst, device), [3.0])


@all_pairs
def test_alignment(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Every pair of source and destination alignments, in one list and one by one."""
    grads, offsets, end = [], [], 0
    shifts = itertools.product(
        range(ALIGNMENT // src.itemsize), range(ALIGNMENT // dst.itemsize), (1, 9, 45, 130)
    )
    for src_shift, dst_shift, size in shifts:
        grads.append(shifted(draw(size, src, generator), src_shift, device))
        offsets.append(end + dst_shift)
        end += (dst_shift + size) // ALIGNMENT * ALIGNMENT + ALIGNMENT
    check_pack(ops, grads, offsets, poisoned(end, dst, device), [3.0])
    bucket = poisoned(end, dst, device)
    flag = new_flag(device)
    for grad, offset in zip(grads, offsets, strict=True):
        ops.pack_([grad], [offset], bucket, flag, [3.0])
    expected, _ = oracle.pack(
        [grad.cpu() for grad in grads], offsets, poisoned(end, dst), [3.0], device.type
    )
    oracle.assert_bits(bucket, *expected)


@all_pairs
def test_divisors(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    grad = torch.cat((special(src), draw(4000, src, generator))).to(device)
    for divisors in DIVISORS:
        check_pack(ops, [grad], [2], poisoned(grad.numel() + 5, dst, device), divisors)


@pytest.mark.parametrize("dst", STORED, ids=name)
@pytest.mark.parametrize("src", [torch.float16, torch.bfloat16], ids=name)
def test_every_bit_pattern(
    ops: Any, device: torch.device, src: torch.dtype, dst: torch.dtype
) -> None:
    patterns = all_patterns(src).to(device)
    # Not a nan before, so that a nan expected is a nan written.
    for divisors in ([], [3.0], [3.0, 7.0]):
        bucket = torch.full((patterns.numel(),), 0.5, dtype=dst, device=device)
        check_pack(ops, [patterns], [0], bucket, divisors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_each_division_rounds(dtype: torch.dtype, ops: Any, device: torch.device) -> None:
    """Dividing by 3 and then 7 differs from dividing by 21, and both are as the oracle says."""
    patterns = all_patterns(dtype)
    patterns = patterns[~oracle.nonfinite(patterns)]
    results = []
    for divisors in ([3.0, 7.0], [21.0]):
        bucket = poisoned(patterns.numel(), dtype, device)
        check_pack(ops, [patterns.to(device)], [0], bucket, divisors)
        results.append(bucket.cpu())
    assert (results[0] != results[1]).sum() > 1000


def test_the_cast_comes_before_the_division(ops: Any, device: torch.device) -> None:
    grad = torch.tensor([70000.0, 65504.0, 65519.0], device=device)
    bucket = poisoned(3, torch.float16, device)
    flag = new_flag(device)
    ops.pack_([grad], [0], bucket, flag, [2.0])
    assert bucket.tolist() == [torch.inf, 32752.0, 32752.0]
    assert flag.item()


@pytest.mark.parametrize("dst", STORED, ids=name)
def test_values_that_underflow(
    ops: Any, device: torch.device, dst: torch.dtype, generator: torch.Generator
) -> None:
    """From twice the smallest normal value down to less than half the smallest subnormal."""
    info = torch.finfo(dst)
    exponent = torch.empty(5000, dtype=torch.float64).uniform_(-26, 1, generator=generator)
    sign = torch.randint(0, 2, (5000,), generator=generator) * 2 - 1
    grad = (sign * info.smallest_normal * 2.0**exponent).float().to(device)
    for divisors in ([], [3.0], [4.0, 3.0]):
        bucket = poisoned(5000, dst, device)
        check_pack(ops, [grad], [0], bucket, divisors)
        assert (bucket == 0).any()
        assert ((bucket != 0) & (bucket.abs() < info.smallest_normal)).any()
