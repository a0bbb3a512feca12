"""unscale_: one float32 product per element, in place too."""

from __future__ import annotations

import itertools
from typing import Any

import oracle
import pytest
import torch
from inputs import (
    ALIGNMENT,
    NONFINITE,
    SIZES,
    STORED,
    all_patterns,
    draw,
    name,
    poisoned,
    shifted,
    special,
)
from torch import Tensor

SCALES = (1.0, 1 / 3, 2.0**-16, 2.0**-140, 1e-30, 3e38, 0.0, -7.0)


def check_unscale(ops: Any, partition: Tensor, scale: Tensor, out: Tensor) -> None:
    expected = oracle.unscale(partition.cpu(), scale.item())
    before = None if out.data_ptr() == partition.data_ptr() else partition.clone()
    assert ops.unscale_(partition, scale, out) is None
    oracle.assert_bits(out, expected)
    if before is not None:
        oracle.assert_bits(partition, before)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64], ids=name)
@pytest.mark.parametrize("dtype", STORED, ids=name)
def test_values(
    ops: Any,
    device: torch.device,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    """A float64 scale is rounded to float32 first: 1/3 shows the difference."""
    bad = torch.tensor(NONFINITE, dtype=dtype)
    partition = torch.cat((special(dtype), bad, draw(4000, dtype, generator))).to(device)
    for scale, shape in itertools.product(SCALES, ((), (1,))):
        out = torch.full((partition.numel(),), 0.5, device=device)
        scale_tensor = torch.full(shape, scale, dtype=scale_dtype, device=device)
        check_unscale(ops, partition, scale_tensor, out)


@pytest.mark.parametrize("dtype", STORED, ids=name)
def test_sizes_and_alignment(
    ops: Any, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    scale = torch.tensor(1 / 3, device=device)
    values = draw(max(SIZES), dtype, generator)
    for size in SIZES:
        check_unscale(ops, values[:size].to(device), scale, poisoned(size, torch.float32, device))
    shifts = itertools.product(
        range(ALIGNMENT // dtype.itemsize), range(ALIGNMENT // 4), (1, 9, 45, 130)
    )
    for src_shift, dst_shift, size in shifts:
        storage = poisoned(size + 20, torch.float32, device)
        out = storage[dst_shift : dst_shift + size]
        check_unscale(ops, shifted(values[:size], src_shift, device), scale, out)
        poison = poisoned(size + 20, torch.float32)
        for edge in (slice(0, dst_shift), slice(dst_shift + size, None)):
            assert torch.equal(oracle.bits(storage[edge]), oracle.bits(poison[edge]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_every_bit_pattern(ops: Any, device: torch.device, dtype: torch.dtype) -> None:
    out = torch.full((1 << 16,), 0.5, device=device)
    check_unscale(ops, all_patterns(dtype).to(device), torch.tensor(0.1, device=device), out)


def test_in_place(ops: Any, device: torch.device, generator: torch.Generator) -> None:
    scale = torch.tensor(1 / 3, device=device)
    for size in SIZES:
        values = draw(size, torch.float32, generator).to(device)
        check_unscale(ops, values, scale, values)
        values = draw(size, torch.float32, generator).to(device)
        check_unscale(ops, values, scale, values.view(-1))
