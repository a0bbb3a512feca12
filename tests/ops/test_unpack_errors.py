"""unpack_ refuses wrong arguments before it writes anything, with a text that names them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from inputs import assert_refused, is_native, poisoned

STORED_NAMES = "expected float16, bfloat16 or float32"


class Case:
    """Two good slices of a bucket of 40 for partitions of 30; a test spoils one argument."""

    def __init__(self, ops: Any, device: torch.device, accumulate: bool) -> None:
        self.op = ops.unpack_
        self.accumulate = accumulate
        self.bucket = torch.ones(40, device=device)
        self.partitions = poisoned(30, torch.float16, device)
        self.lists = {
            "src_offsets": [0, 30],
            "dst_offsets": [0, 15],
            "numels": [10, 8],
            "padded_numels": [12, 9],
        }
        self.multipliers = [2.0]

    def call(self) -> None:
        lists = self.lists.values()
        self.op(self.bucket, self.partitions, *lists, self.multipliers, self.accumulate)

    def refuse(self, *pieces: str) -> None:
        assert_refused(self.call, "unpack_", pieces, [self.bucket, self.partitions])


@pytest.fixture(params=[False, True], ids=["copy", "add"])
def case(ops: Any, device: torch.device, request: pytest.FixtureRequest) -> Case:
    return Case(ops, device, request.param)


def test_the_case_is_good(case: Case) -> None:
    case.call()


@pytest.mark.parametrize("argument", ["dst_offsets", "numels", "padded_numels"])
def test_list_lengths(case: Case, argument: str) -> None:
    case.lists[argument].append(0)
    case.refuse(f"got 2 src_offsets but 3 {argument}")
    case.lists[argument] = []
    case.refuse(f"got 2 src_offsets but 0 {argument}")


@pytest.mark.parametrize("argument", ["bucket", "partitions"])
def test_buffers(case: Case, argument: str, device: torch.device) -> None:
    setattr(case, argument, torch.ones(40, dtype=torch.float64, device=device))
    case.refuse(f"{argument} is float64", STORED_NAMES)
    setattr(case, argument, torch.ones(40, dtype=torch.int64, device=device))
    case.refuse(f"{argument} is int64", STORED_NAMES)
    setattr(case, argument, torch.ones(4, 10, device=device))
    case.refuse(f"{argument} has 2 dimensions", "expected 1", f"{argument}.view(-1)")
    setattr(case, argument, torch.ones(120, device=device)[::3])
    case.refuse(f"{argument} is not contiguous (stride 3)")


def test_multipliers(case: Case) -> None:
    case.multipliers = [1.0] * 5
    case.refuse("got 5 multipliers", "expected at most 4")
    for value, text in ((math.nan, "nan"), (-math.inf, "-inf"), (1e39, "1e+39")):
        case.multipliers = [2.0, value]
        case.refuse(f"multipliers[1] is {text}", "expected a finite")


def test_negative_numel(case: Case) -> None:
    case.lists["numels"][1] = -1
    case.refuse("numels[1] is -1 and padded_numels[1] is 9", "0 <= numels[i] <= padded_numels[i]")


def test_numel_above_its_padded_numel(case: Case) -> None:
    case.lists["padded_numels"][0] = 9
    case.refuse("numels[0] is 10 and padded_numels[0] is 9")


@pytest.mark.parametrize("offset", [-1, 33, 41, 2**63 - 1])
def test_source_outside_the_bucket(case: Case, offset: int) -> None:
    case.lists["src_offsets"][1] = offset
    case.refuse(f"src_offsets[1] = {offset} with 8 elements but bucket has 40 elements")


@pytest.mark.parametrize("offset", [-1, 22, 31, 2**63 - 1])
def test_destination_outside_the_partitions(case: Case, offset: int) -> None:
    case.lists["dst_offsets"][1] = offset
    case.refuse(f"dst_offsets[1] = {offset} with 9 padded", "partitions has 30 elements")


def test_only_the_padding_is_outside(case: Case) -> None:
    case.lists["padded_numels"][1] = 16
    case.refuse("dst_offsets[1] = 15 with 16 padded", "partitions has 30 elements")
    case.lists["padded_numels"][1] = 2**63 - 1
    case.refuse(f"dst_offsets[1] = 15 with {2**63 - 1} padded")


def test_overlap(case: Case) -> None:
    case.lists["dst_offsets"] = [0, 11]  # only the padding of slice 0 is hit
    case.refuse("slice 1 at [11, 20)", "overlaps slice 0 at [0, 12)")
    case.lists["dst_offsets"] = [10, 3]
    case.refuse("slice 1 at [3, 12)", "overlaps slice 0 at [10, 22)")


def test_shared_memory(case: Case, device: torch.device) -> None:
    storage = torch.ones(60, device=device)
    case.bucket, case.partitions = storage[:40], storage[30:]
    case.refuse("partitions shares memory with bucket", "expected separate memory")
    case.bucket, case.partitions = storage[:40], storage.view(torch.float16)[:30]
    case.refuse("partitions shares memory with bucket")


def test_neighbours_in_one_storage_are_fine(case: Case, device: torch.device) -> None:
    storage = torch.ones(70, device=device)
    case.bucket, case.partitions = storage[:40], storage[40:]
    case.call()


def test_partitions_on_another_device(ops: Any, case: Case, device: torch.device) -> None:
    if device.type == "cpu":
        if is_native(ops):
            pytest.skip("a second device with kernels is needed; the CUDA tier has one")
        case.bucket = case.bucket.to("meta")
        with pytest.raises(RuntimeError, match="partitions is on cpu but bucket is on meta"):
            case.call()
    else:
        case.bucket = case.bucket.cpu()
        case.refuse(f"partitions is on {device} but bucket is on cpu", "move both to one device")
