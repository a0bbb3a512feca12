"""Inputs for the op tests: random and special values, misaligned copies, poisoned outputs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

STORED = (torch.float16, torch.bfloat16, torch.float32)
READABLE = (*STORED, torch.float64)
NONFINITE = (math.inf, -math.inf, math.nan)
# Around the edges of vectors (8, 16, 32 elements), of unrolled steps and of chunks.
SIZES = (
    *(0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129),
    *(1023, 1024, 1025, 4095, 4096, 4097, 65535, 65536, 65537),
)
SMALL_SIZES = tuple(size for size in SIZES if size <= 4097)
ALIGNMENT = 16  # bytes that a vector access could want

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_native(ops: Any) -> bool:
    return ops is not sys.modules.get("z3ext.reference")


def name(dtype: torch.dtype) -> str:
    """For test ids."""
    return str(dtype).removeprefix("torch.")


def from_bits(patterns: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements with these bit patterns."""
    return patterns.to(_INTEGERS[dtype.itemsize]).view(dtype)


def all_patterns(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit dtype once: nans, infs, subnormals, both zeros."""
    return from_bits(torch.arange(1 << 16), dtype)


def draw(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Finite values: half of them random bit patterns, half of a size that gradients have."""
    integer = _INTEGERS[dtype.itemsize]
    info = torch.iinfo(integer)
    patterns = torch.randint(info.min, info.max, (numel,), dtype=integer, generator=generator)
    values = patterns.view(dtype)
    scale = 10.0 ** torch.empty(numel).uniform_(-9, 4, generator=generator)
    usual = (torch.randn(numel, generator=generator) * scale).to(dtype)
    wanted = torch.rand(numel, generator=generator) < 0.5
    wanted &= ~oracle.nonfinite(values)
    usual = torch.where(oracle.nonfinite(usual), torch.ones_like(usual), usual)
    return torch.where(wanted, values, usual)


def special(dtype: torch.dtype) -> Tensor:
    """Both zeros, the ends of the subnormals and of the finite values, and some between."""
    info = torch.finfo(dtype)
    ends = [0.0, info.smallest_normal, info.max, 1.0, 3.0, info.max / 2]
    subnormal = [info.smallest_normal * info.eps, info.smallest_normal * (1 - info.eps)]
    values = torch.tensor([*ends, *subnormal], dtype=torch.float64)
    return torch.cat((values, -values)).to(dtype)


def shifted(values: Tensor, shift: int, device: torch.device) -> Tensor:
    """A copy whose first element stands `shift` elements after an aligned address."""
    storage = torch.empty(values.numel() + shift, dtype=values.dtype, device=device)
    copy = storage[shift:]
    copy.copy_(values)
    return copy


def poisoned(numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An output before the op: nans with a payload that no arithmetic makes."""
    quiet_nan = {torch.float16: 0x7E2A, torch.bfloat16: 0x7FEA}.get(dtype, 0x7FC02A2A)
    return from_bits(torch.full((numel,), quiet_nan), dtype).to(device)


def new_flag(device: torch.device, value: bool = False) -> Tensor:
    return torch.full((), value, dtype=torch.bool, device=device)


def places(sizes: Sequence[int], gap: int = 3) -> tuple[list[int], int]:
    """Offsets one after the other with `gap` unused elements before each and after the last."""
    offsets, end = [], gap
    for size in sizes:
        offsets.append(end)
        end += size + gap
    return offsets, end


def assert_refused(
    call: Callable[[], object], op: str, pieces: Sequence[str], outputs: Sequence[Tensor]
) -> None:
    """The call raises with a text that holds the pieces, and leaves every bit of the outputs."""
    before = [oracle.bits(output).clone() for output in outputs]
    with pytest.raises(RuntimeError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(f"z3ext::{op}: "), text
    for piece in (*pieces, "; "):  # a remedy follows a semicolon
        assert piece in text, f"no {piece!r} in {text!r}"
    for output, bits in zip(outputs, before, strict=True):
        assert torch.equal(oracle.bits(output), bits)
