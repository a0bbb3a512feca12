"""all_reduce_ and reduce_scatter_: plain sums over the group that a name stands for."""

from __future__ import annotations

import importlib
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from inputs import assert_refused, is_native, poisoned

WORLD_SIZE = 2


def rank_main(rank: int, implementation: str, store: str) -> None:
    """One of two ranks. Rank r gives (r + 1) * k; small integers, so every dtype sums exactly."""
    torch.set_num_threads(1)
    module = importlib.import_module(implementation)
    ops = module if implementation == "z3ext.reference" else torch.ops.z3ext
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    world = dist.group.WORLD
    assert world is not None
    alone = [dist.new_group([r]) for r in range(WORLD_SIZE)][rank]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for numel in (1, 12, 40):
            ramp = torch.arange(numel * WORLD_SIZE, dtype=torch.float32)
            buf = (ramp * (rank + 1)).to(dtype)
            output = poisoned(numel, dtype)
            ops.reduce_scatter_(buf, output, world.group_name)
            assert torch.equal(output, (3 * ramp)[rank * numel :][:numel].to(dtype))
            assert torch.equal(buf, (ramp * (rank + 1)).to(dtype))
            ops.all_reduce_(buf, world.group_name)
            assert torch.equal(buf, (3 * ramp).to(dtype))
            ops.all_reduce_(buf, alone.group_name)
            assert torch.equal(buf, (3 * ramp).to(dtype))
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks(ops: Any, tmp_path: Path) -> None:
    implementation = "z3ext" if is_native(ops) else "z3ext.reference"
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank_main, args=(rank, implementation, f"{tmp_path}/store"))
        for rank in range(WORLD_SIZE)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        process.kill()  # only a rank that hangs is still there
    assert [process.exitcode for process in ranks] == [0] * WORLD_SIZE


def test_one_rank(ops: Any, own_group: str) -> None:
    buf = torch.arange(6.0)
    ops.all_reduce_(buf, own_group)
    assert buf.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    output = poisoned(6, torch.float32)
    ops.reduce_scatter_(buf, output, own_group)
    assert torch.equal(output, buf)


def test_no_such_group(ops: Any) -> None:
    buf, output = torch.ones(6), poisoned(3, torch.float32)
    pieces = "group_name 'nobody' names no live process group", "init_process_group"
    assert_refused(lambda: ops.all_reduce_(buf, "nobody"), "all_reduce_", pieces, [buf])
    assert_refused(
        lambda: ops.reduce_scatter_(buf, output, "nobody"), "reduce_scatter_", pieces, [output]
    )


@pytest.mark.usefixtures("own_group")
def test_group_that_was_destroyed(ops: Any) -> None:
    group = dist.new_group([0])
    name = group.group_name
    dist.destroy_process_group(group)
    buf = torch.ones(6)
    assert_refused(
        lambda: ops.all_reduce_(buf, name), "all_reduce_", ["names no live process group"], [buf]
    )


def test_refused(ops: Any, own_group: str) -> None:
    buf = torch.ones(12)

    def refuse(input: torch.Tensor, output: torch.Tensor, *pieces: str) -> None:
        assert_refused(
            lambda: ops.reduce_scatter_(input, output, own_group),
            "reduce_scatter_",
            pieces,
            [input, output],
        )

    def refuse_all_reduce(buf: torch.Tensor, *pieces: str) -> None:
        assert_refused(lambda: ops.all_reduce_(buf, own_group), "all_reduce_", pieces, [buf])

    refuse_all_reduce(buf[::2], "buf is not a dense contiguous tensor")
    refuse_all_reduce(buf.int(), "buf is int32", "expected a floating-point tensor")
    refuse(buf[::2], poisoned(6, torch.float32), "input is not a dense contiguous tensor")
    refuse(buf[:6], buf.clone()[::2], "output is not a dense contiguous tensor")
    refuse(buf, torch.ones(12).int(), "output is int32", "expected a floating-point tensor")
    refuse(buf, torch.ones(5), "input has 12 elements and output 5 in a group of 1 ranks")
    refuse(buf, buf.half(), "input is float32 on cpu but output is float16 on cpu")
