"""segment_check and unscale_ refuse wrong arguments, with a text that names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import assert_refused, poisoned
from torch import Tensor


class TestSegmentCheck:
    @pytest.fixture
    def buf(self, device: torch.device) -> Tensor:
        return torch.ones(20, device=device)

    def refuse(self, ops: Any, buf: Tensor, offsets: Tensor, lanes: int, *pieces: str) -> None:
        assert_refused(lambda: ops.segment_check(buf, offsets, lanes), "segment_check", pieces, [])

    def test_buf(self, ops: Any, buf: Tensor) -> None:
        offsets = torch.tensor([0, 20])
        self.refuse(ops, buf.int(), offsets, 4, "buf is int32", "expected float16")
        self.refuse(ops, buf.view(4, 5).t(), offsets, 4, "buf is not contiguous")

    @pytest.mark.parametrize("lanes", [0, 3, 5, 16, -1])
    def test_lanes(self, ops: Any, buf: Tensor, lanes: int) -> None:
        offsets = torch.tensor([0, 20])
        self.refuse(ops, buf, offsets, lanes, f"lanes is {lanes}", "expected 1, 2, 4 or 8")

    def test_kind_of_offsets(self, ops: Any, buf: Tensor) -> None:
        good = torch.tensor([0, 20])
        expected = "1-D int64 tensor on cpu"
        self.refuse(ops, buf, good.int(), 4, "offsets is int32", expected)
        self.refuse(ops, buf, good.view(1, 2), 4, "with 2 dimensions", expected)
        self.refuse(ops, buf, good[:0], 4, "and 0 elements", expected)
        strided = torch.tensor([0, 7, 20, 9])[::2]
        self.refuse(ops, buf, strided, 4, "expected a contiguous", expected)

    def test_device_of_offsets(self, ops: Any, buf: Tensor, device: torch.device) -> None:
        if device.type == "cpu":
            pytest.skip("a second device is needed; the CUDA tier has one")
        offsets = torch.tensor([0, 20], device=device)
        self.refuse(ops, buf, offsets, 4, f"offsets is int64 on {device}", "on cpu")

    @pytest.mark.parametrize("bounds", [[1, 20], [0, 19], [0, 21], [0], [-1, 20], [20, 0]])
    def test_ends_of_offsets(self, ops: Any, buf: Tensor, bounds: list[int]) -> None:
        text = f"offsets run from {bounds[0]} to {bounds[-1]}", "expected 0 to 20"
        self.refuse(ops, buf, torch.tensor(bounds), 4, *text)

    @pytest.mark.parametrize("bounds", [[0, 8, 7, 20], [0, -1, 5, 20], [0, 5, 21, 20]])
    def test_order_of_offsets(self, ops: Any, buf: Tensor, bounds: list[int]) -> None:
        wrong = next(i for i in range(1, 4) if bounds[i] < bounds[i - 1])
        self.refuse(
            ops,
            buf,
            torch.tensor(bounds),
            4,
            f"offsets[{wrong}] is {bounds[wrong]}",
            f"offsets[{wrong - 1}] = {bounds[wrong - 1]}",
            "expected non-decreasing",
        )


class TestUnscale:
    @pytest.fixture
    def partition(self, device: torch.device) -> Tensor:
        return torch.ones(20, device=device)

    @pytest.fixture
    def scale(self, device: torch.device) -> Tensor:
        return torch.tensor(0.5, device=device)

    @pytest.fixture
    def out(self, device: torch.device) -> Tensor:
        return poisoned(20, torch.float32, device)

    def refuse(self, ops: Any, *args: Any) -> None:
        partition, scale, out, *pieces = args
        assert_refused(
            lambda: ops.unscale_(partition, scale, out), "unscale_", pieces, [partition, out]
        )

    def test_partition(self, ops: Any, partition: Tensor, scale: Tensor, out: Tensor) -> None:
        self.refuse(ops, partition.double(), scale, out, "partition is float64")
        self.refuse(ops, partition.int(), scale, out, "partition is int32")
        self.refuse(ops, partition.view(4, 5), scale, out, "partition has 2 dimensions")
        self.refuse(ops, partition[::2], scale, out[:10], "partition is not contiguous")

    def test_out(self, ops: Any, partition: Tensor, scale: Tensor, out: Tensor) -> None:
        self.refuse(ops, partition, scale, out.half(), "out is float16; expected float32")
        self.refuse(ops, partition, scale, out.double(), "out is float64")
        self.refuse(ops, partition, scale, out.view(4, 5), "out has 2 dimensions")
        self.refuse(ops, partition[:10], scale, out[::2], "out is not contiguous")
        self.refuse(ops, partition, scale, out[:19], "out has 19 elements but partition has 20")

    def test_scale(self, ops: Any, partition: Tensor, scale: Tensor, out: Tensor) -> None:
        self.refuse(ops, partition, scale.half(), out, "scale is float16")
        self.refuse(ops, partition, scale.int(), out, "expected float32 or float64")
        self.refuse(ops, partition, scale.expand(2), out, "scale has 2 elements; expected 1")
        self.refuse(ops, partition, scale.view(1)[:0], out, "scale has 0 elements; expected 1")

    def test_partial_overlap(self, ops: Any, scale: Tensor, device: torch.device) -> None:
        storage = torch.ones(40, device=device)
        text = "out overlaps partition in part"
        self.refuse(ops, storage[:20], scale, storage[1:21], text)
        self.refuse(ops, storage[19:39], scale, storage[:20], text)
        half = storage.view(torch.float16)
        self.refuse(ops, half[:20], scale, storage[:20], text)  # same start, other element size
        ops.unscale_(storage[:20], scale, storage[20:])
        assert (storage[20:] == 0.5).all()

    def test_devices(
        self, ops: Any, partition: Tensor, scale: Tensor, out: Tensor, device: torch.device
    ) -> None:
        if device.type == "cpu":
            pytest.skip("a second device is needed; the CUDA tier has one")
        self.refuse(
            ops, partition, scale.cpu(), out, f"scale is on cpu but partition is on {device}"
        )
        self.refuse(ops, partition, scale, out.cpu(), f"out is on cpu but partition is on {device}")
