"""The same bits from any number of threads, and from several Python threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import oracle
import pytest
import torch
from inputs import draw, new_flag, places, poisoned
from torch import Tensor

SIZES = (100_003, 0, 7, 70_001, 33, 4_097)


class Work:
    """Each op once over the same inputs, into outputs of its own."""

    def __init__(self, ops: Any, device: torch.device, generator: torch.Generator) -> None:
        self.ops, self.device = ops, device
        self.grads = [draw(size, torch.float32, generator).to(device) for size in SIZES]
        self.offsets, self.total = places(SIZES)
        self.bucket = draw(self.total, torch.bfloat16, generator).to(device)
        self.partitions = draw(self.total, torch.float32, generator).to(device)
        self.bounds = torch.tensor([0, *accumulate(SIZES)])
        self.scale = torch.tensor(1 / 3, device=device)

    def run(self) -> list[Tensor]:
        packed, flag = poisoned(self.total, torch.float16, self.device), new_flag(self.device)
        self.ops.pack_(self.grads, self.offsets, packed, flag, [3.0])
        rows, rows_flags = [], []
        for world_size in (3, 5, 1000, 4096):
            chunks = [-(-size // world_size) for size in SIZES]
            offsets, row_numel = places(chunks)
            rows.append(poisoned(world_size * row_numel, torch.float16, self.device))
            rows_flags.append(new_flag(self.device))
            self.ops.pack_rows_(
                self.grads, offsets, row_numel, world_size, rows[-1], rows_flags[-1], [3.0]
            )
        summed = self.partitions.clone()
        sizes, slices = list(SIZES), (self.offsets, self.offsets, list(SIZES))
        self.ops.unpack_(self.bucket, summed, *slices, sizes, [3.0], True)
        bad, sums = self.ops.segment_check(self.bucket[: sum(SIZES)], self.bounds, 4)
        scaled = poisoned(self.total, torch.float32, self.device)
        self.ops.unscale_(self.bucket, self.scale, scaled)
        overflow = self.ops.flat_overflow(self.bucket)
        results = [packed, flag, *rows, *rows_flags, summed, bad, sums, scaled, overflow]
        return [result.cpu() for result in results]


@pytest.fixture
def work(ops: Any, device: torch.device, generator: torch.Generator) -> Work:
    return Work(ops, device, generator)


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(oracle.bits(result), oracle.bits(wanted))


def test_thread_counts(work: Work) -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(work.run())
    finally:
        torch.set_num_threads(before)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_python_threads(work: Work) -> None:
    expected = work.run()
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: work.run(), range(12)):
            assert_same(results, expected)
