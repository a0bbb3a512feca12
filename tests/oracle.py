"""What each op must compute, in float64 and integer arithmetic on the CPU.

Independent of z3ext: values are rounded here by float64 scaling and exponent arithmetic, not by
torch's casts. Values stay float64, where every fp16, bf16 and fp32 value is exact, until a last
cast to the stored dtype, which is exact too. All tensors given and returned are on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Significand bits, the exponent of the smallest subnormal, and the largest finite value.
_FORMATS = {
    torch.float16: (11, -24, 65504.0),
    torch.bfloat16: (8, -133, (2.0 - 2.0**-7) * 2.0**127),
    torch.float32: (24, -149, (2.0 - 2.0**-23) * 2.0**127),
}
_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bool: torch.uint8,
}
_EXPONENT_MASKS = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}


# --- bits ----------------------------------------------------------------------------------------


def bits(values: Tensor) -> Tensor:
    """The bit patterns, as integers of the same width."""
    return values.detach().cpu().contiguous().view(_INTEGERS.get(values.dtype, values.dtype))


def nonfinite(values: Tensor) -> Tensor:
    """Per element: all exponent bits are set, so it is an inf or a nan."""
    mask = _EXPONENT_MASKS[values.dtype]
    return bits(values) & mask == mask


def assert_bits(actual: Tensor, expected: Tensor, written: Tensor | None = None) -> None:
    """Equal bit for bit; where `written` (default: everywhere) any nan equals any nan."""
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    both_nan = actual.isnan() & expected.isnan()
    if written is not None:
        both_nan &= written
    wrong = ((bits(actual) != bits(expected)) & ~both_nan).flatten()
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements differ, the first at {first}: "
            f"{actual.flatten()[first].item()!r}, expected {expected.flatten()[first].item()!r}"
        )


# --- rounding ------------------------------------------------------------------------------------


def _power_of_two(exponent: Tensor) -> Tensor:
    """2.0**exponent as float64, exact; exponents of normal float64 values only."""
    return (exponent + 1023 << 52).view(torch.float64)


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values rounded to the nearest value of `dtype`, ties to even, kept as float64.

    One rounding only, subnormals included. Past the largest finite value it is inf.
    """
    significand_bits, smallest_exponent, largest = _FORMATS[dtype]
    exponent = (values.view(torch.int64) >> 52 & 0x7FF) - 1022  # value = +-[0.5, 1) * 2**exponent
    last_place = (exponent - significand_bits).clamp_min(smallest_exponent)
    # Scaled so that the last place kept is 1; torch.round takes ties to even. inf and nan stay.
    rounded = torch.round(values * _power_of_two(-last_place)) * _power_of_two(last_place)
    return torch.where(rounded.abs() > largest, rounded * math.inf, rounded)


def _scalar(value: float) -> Tensor:
    """A factor as the kernels take it: float32, here as a 0-dim float64."""
    return round_to(torch.tensor(value, dtype=torch.float64), torch.float32)


def divide(values: Tensor, divisors: Sequence[float], dtype: torch.dtype, device: str) -> Tensor:
    """Divide values of `dtype` by each divisor in turn, in float32, rounding to `dtype` each time.

    A float64 quotient or product of two float32 values rounds to float32 as the exact one does: 53
    bits are more than twice 24 and two. On CUDA a division is a product with the reciprocal.
    """
    for divisor in divisors:
        if device == "cuda":
            quotient = values * round_to(1.0 / _scalar(divisor), torch.float32)
        else:
            quotient = values / _scalar(divisor)
        values = round_to(round_to(quotient, torch.float32), dtype)
    return values


def multiply(values: Tensor, multipliers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Multiply values of `dtype` by each multiplier in turn, rounding to `dtype` each time."""
    for multiplier in multipliers:
        values = round_to(round_to(values * _scalar(multiplier), torch.float32), dtype)
    return values


# --- the ops -------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A buffer as the op must leave it, and which of its elements the op writes."""

    buffer: Tensor
    written: Tensor


def pack(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    bucket: Tensor,
    divisors: Sequence[float] = (),
    device: str = "cpu",
) -> tuple[Stored, bool]:
    """The bucket after pack_, from the bucket before, and whether a stored value is inf or nan."""
    expected = bucket.clone()
    written = torch.zeros(bucket.shape, dtype=torch.bool)
    for grad, offset in zip(grads, offsets, strict=True):
        place = slice(offset, offset + grad.numel())
        values = round_to(grad.reshape(-1).double(), bucket.dtype)
        expected[place] = divide(values, divisors, bucket.dtype, device).to(bucket.dtype)
        written[place] = True
    return Stored(expected, written), bool(nonfinite(expected[written]).any())


def pack_rows(
    grads: Sequence[Tensor],
    chunk_offsets: Sequence[int],
    row_numel: int,
    world_size: int,
    bucket: Tensor,
    divisors: Sequence[float] = (),
    device: str = "cpu",
) -> tuple[Stored, bool]:
    """The bucket after pack_rows_, and whether a stored value is inf or nan.

    Element k of a gradient, or the zero that pads it, has its place computed on its own.
    """
    expected = bucket.clone()
    written = torch.zeros(bucket.shape, dtype=torch.bool)
    for grad, offset in zip(grads, chunk_offsets, strict=True):
        chunk = math.ceil(grad.numel() / world_size)
        values = torch.zeros(chunk * world_size, dtype=torch.float64)
        rounded = round_to(grad.reshape(-1).double(), bucket.dtype)
        values[: grad.numel()] = divide(rounded, divisors, bucket.dtype, device)
        k = torch.arange(values.numel())
        places = k // max(chunk, 1) * row_numel + offset + k % max(chunk, 1)
        assert not written[places].any()
        expected[places] = values.to(bucket.dtype)
        written[places] = True
    return Stored(expected, written), bool(nonfinite(expected[written]).any())


def unpack(
    bucket: Tensor,
    partitions: Tensor,
    slices: Sequence[tuple[int, int, int, int]],
    multipliers: Sequence[float] = (),
    accumulate: bool = False,
) -> Stored:
    """The partitions after unpack_. A slice is (src offset, dst offset, numel, padded numel)."""
    expected = partitions.clone()
    written = torch.zeros(partitions.shape, dtype=torch.bool)
    dtype = partitions.dtype
    for src, dst, numel, padded_numel in slices:
        place = slice(dst, dst + numel)
        values = multiply(bucket[src : src + numel].double(), multipliers, bucket.dtype)
        values = round_to(values, dtype)
        if accumulate:
            total = round_to(partitions[place].double() + values, torch.float32)
            values = round_to(total, dtype)
        else:
            expected[dst + numel : dst + padded_numel] = 0
        expected[place] = values.to(dtype)
        written[place] = True
    return Stored(expected, written)


def squares(values: Tensor) -> list[float]:
    """The float64 squares; exact for fp16, bf16 and fp32 elements."""
    return [value * value for value in values.double().tolist()]


def sum_in_order(terms: Sequence[float], lanes: int) -> float:
    """`lanes` interleaved running sums, added in order, then the terms that fill no row."""
    main = len(terms) - len(terms) % lanes
    totals = []
    for lane in range(lanes):
        total = 0.0
        for term in terms[lane:main:lanes]:
            total += term
        totals.append(total)
    result = totals[0]
    for term in (*totals[1:], *terms[main:]):
        result += term
    return result


def unscale(partition: Tensor, scale: float) -> Tensor:
    """float32(partition) * float32(scale), rounded to float32 once."""
    return round_to(partition.double() * _scalar(scale), torch.float32).to(torch.float32)
