"""z3ext.collectives on real gloo groups: bit for bit what torch.distributed gives."""

from __future__ import annotations

import faulthandler
import multiprocessing
from pathlib import Path

import oracle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from z3ext.collectives import NativeSum, OneRank, SumOverRanks, sum_scalars

COUNTS = (*range(1, 10), 33, 100)


def random_scalars(count: int, generator: torch.Generator) -> Tensor:
    """float64 of very different sizes and both signs, so that the order of a sum shows."""
    exponents = torch.empty(count, dtype=torch.float64).uniform_(-12, 12, generator=generator)
    return torch.randn(count, dtype=torch.float64, generator=generator) * 10.0**exponents


def check_scalars(over: SumOverRanks, generator: torch.Generator) -> None:
    for count in COUNTS:
        values = random_scalars(count, generator)
        special = torch.tensor([0.0, -0.0, torch.inf, torch.nan, -torch.inf, 1e308])
        for given in (values, special[: min(count, 6)].double()):
            before = given.clone()
            alone = [value.clone().view(1) for value in given]
            for value in alone:
                dist.all_reduce(value)
            sums, issued = sum_scalars(given, over)
            assert issued is True
            oracle.assert_bits(sums, torch.cat(alone))
            oracle.assert_bits(given, before)
    sums, issued = sum_scalars(torch.empty(0, dtype=torch.float64), over)
    assert (issued, sums.shape) == (False, (0,))


def check_native_sum(over: SumOverRanks, generator: torch.Generator) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for numel in (1, 2, 3, 5, 7, 64, 1001, 70_003):
            exponents = torch.empty(numel).uniform_(-3, 2, generator=generator)
            values = (torch.randn(numel, generator=generator) * 10.0**exponents).to(dtype)
            expected = values.clone()
            dist.all_reduce(expected)
            assert over.all_reduce_(values) is True
            oracle.assert_bits(values, expected)


def check_reduce_scatter(over: SumOverRanks, generator: torch.Generator) -> None:
    """This rank's row in place, as torch.distributed has it in memory apart."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for numel in (1, 2, 3, 5, 7, 64, 1001, 23_001):
            shape = (over.world_size * numel,)
            exponents = torch.empty(shape).uniform_(-3, 2, generator=generator)
            rows = (torch.randn(shape, generator=generator) * 10.0**exponents).to(dtype)
            expected = torch.full((numel,), torch.nan, dtype=dtype)
            dist.reduce_scatter_tensor(expected, rows.clone())
            row = rows[over.rank * numel :][:numel]
            assert over.reduce_scatter_(rows, row) is True
            oracle.assert_bits(row, expected)


def check_subgroups(rank: int, world_size: int, generator: torch.Generator) -> None:
    """Rank and world size are those within the group; only its members add up."""
    members = list(range(1, world_size))
    group = dist.new_group(members)
    if rank == 0:
        return
    over = NativeSum(group)
    assert (over.rank, over.world_size) == (members.index(rank), len(members))
    buf = torch.randn(37, generator=generator)
    expected = buf.clone()
    dist.all_reduce(expected, group=group)
    assert over.all_reduce_(buf) is True
    oracle.assert_bits(buf, expected)
    rows = torch.randn(len(members) * 37, generator=generator)
    expected = torch.empty(37)
    dist.reduce_scatter_tensor(expected, rows.clone(), group=group)
    row = rows[over.rank * 37 :][:37]
    assert over.reduce_scatter_(rows, row) is True
    oracle.assert_bits(row, expected)


def rank_main(rank: int, world_size: int, seed: int, store: str) -> None:
    faulthandler.dump_traceback_later(100, exit=True)  # says where a rank hangs, before its end
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    over = NativeSum(dist.group.WORLD)
    assert (over.rank, over.world_size) == (rank, world_size)
    generator = torch.Generator().manual_seed(seed + rank)
    check_scalars(over, generator)
    check_native_sum(over, generator)
    check_reduce_scatter(over, generator)
    check_subgroups(rank, world_size, generator)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks(world_size: int, seed: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank_main, args=(rank, world_size, seed, f"{tmp_path}/store"))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        process.kill()  # only a rank that hangs is still there
        process.join()
    assert [process.exitcode for process in ranks] == [0] * world_size


# --- without ranks -------------------------------------------------------------------------------


class Recorder:
    """Adds one to what it is given, and keeps a copy of that."""

    rank = 1

    def __init__(self, world_size: int, issues: bool = True) -> None:
        self.world_size = world_size
        self.issues = issues
        self.seen: list[Tensor] = []

    def all_reduce_(self, buf: Tensor) -> bool:
        self.seen.append(buf.clone())
        buf += 1.0
        return self.issues

    def reduce_scatter_(self, rows: Tensor, row: Tensor) -> bool:
        raise AssertionError("scalars are summed by an all-reduce")


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_scalars_fill_the_first_segment(world_size: int, count: int) -> None:
    over = Recorder(world_size)
    values = torch.arange(1.0, count + 1, dtype=torch.float64)
    sums, issued = sum_scalars(values, over)
    assert issued is True
    assert torch.equal(sums, values + 1.0)
    (sent,) = over.seen
    assert sent.dtype == torch.float64
    assert sent.numel() >= 2 * world_size * count
    assert torch.equal(sent[:count], values)
    assert not sent[count:].any()


def test_scalars_of_other_dtypes_and_policies() -> None:
    over = Recorder(2, issues=False)
    sums, issued = sum_scalars(torch.ones(3, dtype=torch.float32), over)
    assert issued is False
    assert sums.dtype == torch.float32
    assert sums.tolist() == [2.0, 2.0, 2.0]


def test_one_rank() -> None:
    over = OneRank()
    assert (over.rank, over.world_size) == (0, 1)
    buf = torch.tensor([1.0, -0.0, torch.inf])
    before = buf.clone()
    assert over.all_reduce_(buf) is False
    assert over.reduce_scatter_(buf, buf[:]) is False
    oracle.assert_bits(buf, before)
    sums, issued = sum_scalars(buf, over)
    assert issued is False
    oracle.assert_bits(sums, before)


def test_native_sum_of_a_group_of_one(own_group: str) -> None:
    """A group of one has a collective all the same: only OneRank leaves it out."""
    assert dist.group.WORLD is not None
    over = NativeSum(dist.group.WORLD)
    assert (over.rank, over.world_size) == (0, 1)
    buf = torch.tensor([1.0, -2.0])
    assert over.all_reduce_(buf) is True
    assert over.reduce_scatter_(buf, buf[:]) is True
    assert buf.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("again", [False, True], ids=["destroyed", "made_again"])
def test_native_sum_of_a_group_that_is_gone(tmp_path: Path, again: bool) -> None:
    """Also where a later group has its name: that one may have other ranks."""

    def make(store: str) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/{store}", rank=0, world_size=1
        )

    make("first")
    assert dist.group.WORLD is not None
    over, name = NativeSum(dist.group.WORLD), dist.group.WORLD.group_name
    dist.destroy_process_group()
    if again:
        make("second")
        assert dist.group.WORLD.group_name == name
    try:
        buf = torch.tensor([1.0, -2.0])
        text = r"z3ext::{}: the process group .* was destroyed; .*make a new engine"
        with pytest.raises(RuntimeError, match=text.format("all_reduce_")):
            over.all_reduce_(buf)
        with pytest.raises(RuntimeError, match=text.format("reduce_scatter_")):
            over.reduce_scatter_(buf, buf[:])
        assert buf.tolist() == [1.0, -2.0]
    finally:
        if again:
            dist.destroy_process_group()
