"""pack_rows_ refuses wrong arguments before it writes anything, with a text that names them."""

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
    """Three good gradients of 10 elements for 4 rows of 10; a test spoils one argument.

    Each gradient has chunks of 3 elements.
    """

    def __init__(self, ops: Any, device: torch.device) -> None:
        self.op = ops.pack_rows_
        self.grads = [torch.full((10,), torch.nan, device=device) for _ in range(3)]
        self.chunk_offsets = [0, 3, 6]
        self.row_numel, self.world_size = 10, 4
        self.bucket = poisoned(41, torch.float16, device)
        self.flag = new_flag(device)
        self.divisors = [2.0]

    def call(self) -> None:
        self.op(
            self.grads,
            self.chunk_offsets,
            self.row_numel,
            self.world_size,
            self.bucket,
            self.flag,
            self.divisors,
        )

    def refuse(self, *pieces: str, unchanged: Sequence[Tensor] = ()) -> None:
        assert_refused(
            self.call,
            "pack_rows_",
            pieces,
            [self.bucket, self.flag, *unchanged],
        )


@pytest.fixture
def case(ops: Any, device: torch.device) -> Case:
    return Case(ops, device)


def test_the_case_is_good(case: Case) -> None:
    case.call()
    assert case.flag.item()


def test_list_lengths(case: Case) -> None:
    case.chunk_offsets = [0, 3]
    case.refuse("got 3 grads but 2 chunk_offsets")
    case.chunk_offsets = [0, 3, 6, 9]
    case.refuse("got 3 grads but 4 chunk_offsets")
    case.grads = []
    case.refuse("got 0 grads but 4 chunk_offsets")


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
    case.grads, case.chunk_offsets = [case.grads[1].to_sparse()], [0]
    case.refuse("grads[0] is sparse", "expected a dense gradient")


@pytest.mark.parametrize("world_size", [0, -1, 2**31, 2**63 - 1, -(2**63)])
def test_world_size(case: Case, world_size: int) -> None:
    case.world_size = world_size
    case.refuse(f"world_size is {world_size}", "expected 1 to 2147483647")


@pytest.mark.parametrize("row_numel", [-1, -(2**63)])
def test_negative_row(case: Case, row_numel: int) -> None:
    case.row_numel = row_numel
    case.refuse(f"row_numel is {row_numel}", "expected 0 or more")


@pytest.mark.parametrize(
    ("row_numel", "world_size"),
    # The products of the last three do not fit int64; two of them are small when they wrap.
    [(11, 4), (9, 5), (42, 1), (2**62, 4), (2**33, 2**31 - 1), (2**63 - 1, 2)],
)
def test_rows_outside_the_bucket(case: Case, row_numel: int, world_size: int) -> None:
    case.row_numel, case.world_size = row_numel, world_size
    text = f"row_numel is {row_numel} and world_size is {world_size} but bucket has 41 elements"
    case.refuse(text, "expected at least row_numel * world_size", "pass a larger bucket")
    case.grads, case.chunk_offsets = [], []
    case.refuse(text)


@pytest.mark.parametrize("offset", [-1, -(2**63)])
def test_negative_offset(case: Case, offset: int) -> None:
    case.chunk_offsets[1] = offset
    case.refuse(f"chunk_offsets[1] is {offset}", "expected 0 or more")


@pytest.mark.parametrize("offset", [8, 10, 11, 2**62, 2**63 - 1])
def test_outside_the_row(case: Case, offset: int) -> None:
    case.chunk_offsets[2] = offset
    text = f"grads[2] has chunks of 3 elements at offset {offset} but a row has 10 elements"
    case.refuse(text, "pass a larger row_numel")


def test_an_empty_gradient_stands_in_the_row_too(case: Case, device: torch.device) -> None:
    case.grads[2] = torch.ones(0, device=device)
    case.chunk_offsets[2] = 10
    case.call()
    case.chunk_offsets[2] = 11
    case.refuse("grads[2] has chunks of 0 elements at offset 11 but a row has 10 elements")


def test_larger_than_the_rows(case: Case, device: torch.device) -> None:
    case.grads, case.chunk_offsets = [torch.ones(41, device=device)], [0]
    case.refuse("grads[0] has chunks of 11 elements at offset 0 but a row has 10 elements")


def test_overlap(case: Case) -> None:
    case.chunk_offsets = [0, 5, 7]
    case.refuse("grads[2] at [7, 10) of a row overlaps grads[1] at [5, 8)")
    case.chunk_offsets = [6, 2, 4]
    case.refuse("grads[2] at [4, 7) of a row overlaps grads[1] at [2, 5)")
    case.chunk_offsets = [1, 7, 1]
    case.refuse("grads[2] at [1, 4) of a row overlaps grads[0] at [1, 4)")


def test_overlap_inside(case: Case) -> None:
    case.grads[1] = case.grads[1][:2]  # chunks of 1 element
    case.chunk_offsets = [0, 1, 6]
    case.refuse("grads[1] at [1, 2) of a row overlaps grads[0] at [0, 3)")


def test_shared_memory(case: Case, device: torch.device) -> None:
    case.bucket = torch.ones(50, device=device)
    for view in (
        case.bucket[:10],
        case.bucket[41:],  # beyond the rows
        case.bucket[20:40].view(4, 5).t()[:2],
        case.bucket[::4][:10],
        case.bucket[3].expand(10),
        case.bucket.view(torch.float16)[90:],
    ):
        case.grads[1] = view
        case.refuse("grads[1] shares memory with bucket", "expected separate memory")


def test_neighbour_in_one_storage_is_fine(ops: Any, device: torch.device) -> None:
    storage = torch.zeros(40, device=device)
    storage[20:] = 3.0
    ops.pack_rows_([storage[20:]], [0], 10, 2, storage[:20], new_flag(device), [])
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
            case.call()
    else:
        case.refuse(*pieces, unchanged=[flag])
