"""Where a flat buffer is not finite: for the one step in many that is skipped, not for speed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from z3ext import ops


class NonFinite(NamedTuple):
    """What of a tensor is not finite: the first such element, and how many are inf and nan."""

    element: int
    infs: int
    nans: int


def nonfinite_segments(flat: Tensor, bounds: Tensor) -> list[int]:
    """Indices of the segments that hold an inf or a nan, ascending.

    Args:
        flat: 1-D, contiguous, fp16, bf16 or fp32: the squares of a finite segment have a finite
            float64 sum.
        bounds: int64 ``[n + 1]`` on CPU, from 0 to ``flat.numel()``.
    """
    _, sumsq = ops.segment_check(flat, bounds, 1)
    found: list[int] = sumsq.isfinite().logical_not().nonzero().flatten().tolist()
    return found


def count_nonfinite(values: Tensor) -> NonFinite:
    """What of a 1-D tensor that holds an inf or a nan is not finite."""
    bad = values.isfinite().logical_not()
    first = int(bad.to(torch.uint8).argmax())
    return NonFinite(first, int(values.isinf().sum()), int(values.isnan().sum()))
