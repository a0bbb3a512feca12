"""Which way to take the norms of segments equals torch's own norm, bit for bit.

Stock DeepSpeed takes ``partition.to(float64).norm(2)`` of every parameter. On CPU torch adds the
squares in as many interleaved sums as its vectors have float64 lanes, which differs between builds
of torch; so the order is measured once, never assumed. Where no known order fits, torch's own norm
is taken. On CUDA the op's tree is deterministic, but not torch's: norms agree there to the last
bits of float64, not exactly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from z3ext import ops

_LANES = (4, 8, 2, 1)  # 4: AVX2, the usual vector of torch's float64 reductions


class SegmentNorms(Protocol):
    """``(flag, norms)`` of the segments of a flat buffer.

    ``flag``: 0-dim bool, any inf or nan in the buffer. ``norms``: float64 ``[n]``. Both on buf's
    device.
    """

    def __call__(self, buf: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """``bounds``: int64 ``[n + 1]`` on CPU, from 0 to ``buf.numel()``."""
        ...


class OrderedNorms:
    """CPU: one read, with the square sums in torch's order."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes

    def __call__(self, buf: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        flag, sumsq = ops.segment_check(buf, bounds, self._lanes)
        # math.sqrt rounds correctly, as the scalar root inside torch's norm does; torch's
        # vectorised sqrt of a float64 tensor does not on every build.
        return flag, torch.tensor(_roots(sumsq), dtype=torch.float64, device="cpu")


class TreeNorms:
    """CUDA: one read, with the square sums in the kernel's own fixed order."""

    def __call__(self, buf: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        flag, sumsq = ops.segment_check(buf, bounds, 1)
        return flag, sumsq.sqrt()


class TorchNorms:
    """Torch's own norm of each segment: right on every build, several reads."""

    def __call__(self, buf: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        edges: list[int] = bounds.tolist()
        segments = buf.tensor_split(edges[1:-1]) if len(edges) > 1 else ()
        norms = [segment.to(torch.float64).norm(2) for segment in segments]
        empty = torch.empty(0, dtype=torch.float64, device=buf.device)
        return ops.flat_overflow(buf), torch.stack(norms) if norms else empty


def segment_norms(device: torch.device) -> SegmentNorms:
    """The fastest way on this device whose norms are torch's own."""
    if device.type != "cpu":
        return TreeNorms()
    lanes = _measured_lanes()
    return TorchNorms() if lanes is None else OrderedNorms(lanes)


def _roots(sumsq: Tensor) -> list[float]:
    values: list[float] = sumsq.tolist()
    return [math.sqrt(value) for value in values]


@functools.cache
def _measured_lanes() -> int | None:
    """The lane count whose sums give the bits of torch's norm, None if there is no such count."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    # Lengths around vectors and blocks; values of very different sizes, so that the order shows.
    like = torch.empty(0, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
    samples = [
        like.new_empty(numel).normal_(generator=generator)
        * 10.0 ** like.new_empty(numel).uniform_(-6, 6, generator=generator)
        for numel in (1, 2, 3, 5, 7, 9, 31, 64, 255, 1000, 4099, 40_003, 140_001)
    ]
    expected = [float(sample.to(torch.float64).norm(2)) for sample in samples]
    return next((lanes for lanes in _LANES if _norms_with(lanes, samples) == expected), None)


def _norms_with(lanes: int, samples: Sequence[Tensor]) -> list[float]:
    norms = []
    for sample in samples:
        bounds = torch.tensor([0, sample.numel()], dtype=torch.int64, device="cpu")
        _, sumsq = ops.segment_check(sample, bounds, lanes)
        norms.extend(_roots(sumsq))
    return norms
