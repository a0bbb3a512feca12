"""pack_ refuses wrong arguments before it writes anything, with a text that names them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from inputs import assert_refused, is_native, new_flag, poisoned
from torch import Tensor

STORED_NAMES = "expected float16, bfloat16 or float32"


class Case:
    """Three good gradients of 10 elements for a bucket of 40; a test spoils one argument."""

    def __init__(self, ops: Any, device: torch.device) -> None:
        self.op = ops.pack_
        self.grads = [torch.full((10,), torch.nan, device=device) for _ in range(3)]
        self.offsets = [0, 10, 20]
        self.bucket = poisoned(40, torch.float16, device)
        self.flag = new_flag(device)
        self.divisors = [2.0]

    def refuse(self, *pieces: str, unchanged: Sequence[Tensor] = ()) -> None:
        assert_refused(
            lambda: self.op(self.grads, self.offsets, self.bucket, self.flag, self.divisors),
            "pack_",
            pieces,
            [self.bucket, self.flag, *unchanged],
        )


@pytest.fixture
def case(ops: Any, device: torch.device) -> Case:
    return Case(ops, device)


def test_the_case_is_good(case: Case) -> None:
    case.op(case.grads, case.offsets, case.bucket, case.flag, case.divisors)
    assert case.flag.item()


def test_list_lengths(case: Case) -> None:
    case.offsets = [0, 10]
    case.refuse("got 3 grads but 2 offsets")
    case.offsets = [0, 10, 20, 30]
    case.refuse("got 3 grads but 4 offsets")
    case.grads = []
    case.refuse("got 0 grads but 4 offsets")


def test_bucket(case: Case, device: torch.device) -> None:
    case.bucket = torch.ones(40, dtype=torch.float64, device=device)
    case.refuse("bucket is float64", STORED_NAMES)
    case.bucket = torch.ones(40, dtype=torch.int32, device=device)
    case.refuse("bucket is int32", STORED_NAMES)
    case.bucket = torch.ones(4, 10, device=device)
    case.refuse("bucket has 2 dimensions", "expected 1", "bucket.view(-1)")
    case.bucket = torch.ones((), device=device)
    case.refuse("bucket has 0 dimensions")
    case.bucket = torch.ones(80, device=device)[::2]
    case.refuse("bucket is not contiguous (stride 2)")


def test_flag(case: Case, device: torch.device) -> None:
    case.flag = torch.zeros((), dtype=torch.float32, device=device)
    case.refuse("flag is float32", "expected bool")
    case.flag = torch.zeros(3, dtype=torch.bool, device=device)
    case.refuse("flag has 3 elements", "expected 1")
    case.flag = torch.zeros(0, dtype=torch.bool, device=device)
    case.refuse("flag has 0 elements", "expected 1")


def test_number_of_divisors(case: Case) -> None:
    case.divisors = [2.0] * 5
    case.refuse("got 5 divisors", "expected at most 4")


@pytest.mark.parametrize(
    ("divisor", "text"),
    [
        (0.0, "0"),
        (-0.0, "-0"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        # Not as float32, which is what a kernel divides by.
        (1e300, "1e+300"),
        (1e-60, "1e-60"),
    ],
)
def test_divisor(case: Case, divisor: float, text: str) -> None:
    case.divisors = [2.0, divisor]
    case.refuse(f"divisors[1] is {text}", "expected a finite non-zero")


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.complex64])
def test_gradient_dtype(case: Case, place: int, dtype: torch.dtype) -> None:
    case.grads[place] = torch.ones(10, dtype=dtype, device=case.bucket.device)
    case.refuse(f"grads[{place}] is {str(dtype).removeprefix('torch.')}", STORED_NAMES)


def test_sparse_gradient(case: Case) -> None:
    case.grads[1] = case.grads[1].to_sparse()
    case.refuse("grads[1] is sparse", "expected a dense gradient")


def test_only_a_sparse_gradient(case: Case) -> None:
    case.grads, case.offsets = [case.grads[1].to_sparse()], [0]
    case.refuse("grads[0] is sparse", "expected a dense gradient")


@pytest.mark.parametrize("offset", [-1, -(2**62)])
def test_negative_offset(case: Case, offset: int) -> None:
    case.offsets[1] = offset
    case.refuse(f"offsets[1] is {offset}", "expected 0 or more")


@pytest.mark.parametrize("offset", [31, 40, 41, 2**62, 2**63 - 1])
def test_outside_the_bucket(case: Case, offset: int) -> None:
    case.offsets[2] = offset
    case.refuse(f"grads[2] has 10 elements at offset {offset} but bucket has 40 elements")


def test_larger_than_the_bucket(case: Case, device: torch.device) -> None:
    case.grads, case.offsets = [torch.ones(41, device=device)], [0]
    case.refuse("grads[0] has 41 elements at offset 0 but bucket has 40 elements")


def test_overlap(case: Case) -> None:
    case.offsets = [0, 15, 20]
    case.refuse("grads[2] at [20, 30) overlaps grads[1] at [15, 25)")
    case.offsets = [20, 5, 14]
    case.refuse("grads[2] at [14, 24) overlaps grads[1] at [5, 15)")
    case.offsets = [7, 30, 7]
    case.refuse("grads[2] at [7, 17) overlaps grads[0] at [7, 17)")


def test_overlap_inside(case: Case) -> None:
    case.grads[1] = case.grads[1][:2]
    case.offsets = [0, 4, 20]
    case.refuse("grads[1] at [4, 6) overlaps grads[0] at [0, 10)")


def test_shared_memory(case: Case, device: torch.device) -> None:
    case.bucket = torch.ones(40, device=device)
    for view in (
        case.bucket[:10],
        case.bucket[35:],
        case.bucket[20:40].view(4, 5).t(),
        case.bucket[::4],
        case.bucket[3].expand(10),
        case.bucket.view(torch.float16)[70:],
    ):
        case.grads[1] = view
        case.offsets = [0, 20, 10]
        case.refuse("grads[1] shares memory with bucket", "expected separate memory")


def test_neighbour_in_one_storage_is_fine(ops: Any, device: torch.device) -> None:
    storage = torch.zeros(40, device=device)
    storage[20:] = 3.0
    ops.pack_([storage[20:]], [0], storage[:20], new_flag(device), [])
    assert (storage == 3.0).all()


def other_device(ops: Any, device: torch.device) -> torch.device:
    if device.type == "cuda":
        return torch.device("cpu")
    if is_native(ops):
        pytest.skip("a second device with kernels is needed; the CUDA tier has one")
    return torch.device("meta")


def test_gradient_on_another_device(ops: Any, case: Case, device: torch.device) -> None:
    other = other_device(ops, device)
    case.grads[2] = case.grads[2].to(other)
    case.refuse(f"grads[2] is on {other} but bucket is on {device}", "move the gradient")


def test_flag_on_another_device(ops: Any, case: Case, device: torch.device) -> None:
    flag, other = case.flag, other_device(ops, device)
    case.flag = torch.zeros((), dtype=torch.bool, device=other)
    pieces = f"flag is on {other} but bucket is on {device}", "move both to one device"
    if other.type == "meta":  # has no bits to compare
        with pytest.raises(RuntimeError, match=pieces[0]):
            case.op(case.grads, case.offsets, case.bucket, case.flag, case.divisors)
    else:
        case.refuse(*pieces, unchanged=[flag])
