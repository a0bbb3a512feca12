"""What of a flat buffer is not finite: planted, and found again."""

from __future__ import annotations

import math

import pytest
import torch

from z3ext.nonfinite import NonFinite, count_nonfinite, nonfinite_segments

NUMELS = [3, 0, 17, 1, 40]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("bad", [(), (0,), (3,), (2, 4), (0, 2, 3, 4)])
def test_segments(
    dtype: torch.dtype, value: float, bad: tuple[int, ...], generator: torch.Generator
) -> None:
    bounds = torch.tensor([0, *NUMELS]).cumsum(0)
    largest = torch.finfo(dtype).max
    flat = torch.randn(sum(NUMELS), generator=generator).to(dtype)
    flat[::5] = largest  # finite, and so are the sums of its squares
    for segment in bad:
        place = torch.randint(NUMELS[segment], (), generator=generator)
        flat[bounds[segment] + place] = value
    assert nonfinite_segments(flat, bounds) == list(bad)


def test_counts(generator: torch.Generator) -> None:
    values = torch.randn(50, generator=generator)
    places = torch.randperm(50, generator=generator)[:9]
    values[places[:4]] = math.nan
    values[places[4:6]] = math.inf
    values[places[6:]] = -math.inf
    assert count_nonfinite(values) == NonFinite(int(places.min()), 5, 4)
