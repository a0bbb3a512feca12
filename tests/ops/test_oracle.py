"""The oracle itself, on values worked out by hand."""

from __future__ import annotations

import math

import oracle
import pytest
import torch

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (65519.99, HALF, 65504.0),
        (65520.0, HALF, math.inf),
        (-70000.0, HALF, -math.inf),
        (2049.0, HALF, 2048.0),  # a tie goes to the even significand
        (2051.0, HALF, 2052.0),
        (2.0**-25, HALF, 0.0),
        (1.01 * 2.0**-25, HALF, 2.0**-24),
        (3 * 2.0**-25, HALF, 2.0**-23),
        (257.0, BFLOAT, 256.0),
        (259.0, BFLOAT, 260.0),
        (3.4e38, BFLOAT, math.inf),
        (2.0**-134, BFLOAT, 0.0),
        (16777217.0, FLOAT, 16777216.0),
        (2.0**-149, FLOAT, 2.0**-149),
        (2.0**128, FLOAT, math.inf),
        (math.inf, FLOAT, math.inf),
    ],
)
def test_round_to(value: float, dtype: torch.dtype, expected: float) -> None:
    assert oracle.round_to(torch.tensor([value], dtype=torch.float64), dtype).item() == expected


def test_round_to_keeps_the_sign_of_zero_and_nan() -> None:
    values = torch.tensor([-0.0, -1e-300, math.nan], dtype=torch.float64)
    rounded = oracle.round_to(values, HALF)
    assert rounded[:2].signbit().all()
    assert rounded[2].isnan()


def test_a_chain_of_divisions_rounds_after_each() -> None:
    # 3 / 7 in bfloat16 is 0.427734375; a fifth of that is 0.08544921875 after rounding.
    value = torch.tensor([3.0], dtype=torch.float64)
    assert oracle.divide(value, [7.0], BFLOAT, "cpu").item() == 0.427734375
    assert oracle.divide(value, [7.0, 5.0], BFLOAT, "cpu").item() == 0.08544921875


def test_sum_in_order() -> None:
    # 2**53 swallows a 1.0 that meets it alone.
    terms = [2.0**53, 1.0, 1.0, 1.0]
    assert oracle.sum_in_order(terms, 1) == 2.0**53
    assert oracle.sum_in_order(terms, 2) == 2.0**53 + 2.0
    assert oracle.sum_in_order(terms, 8) == 2.0**53


def test_pack_rows() -> None:
    grads = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0])]
    bucket = torch.full((14,), 9.0)
    stored, bad = oracle.pack_rows(grads, [1, 3], 4, 3, bucket, [2.0])
    rows = [9.0, 0.5, 1.0, 2.5], [9.0, 1.5, 2.0, 0.0], [9.0, 0.0, 0.0, 0.0], [9.0, 9.0]
    assert stored.buffer.tolist() == [value for row in rows for value in row]
    assert stored.written.tolist() == [False, True, True, True] * 3 + [False, False]
    assert not bad
