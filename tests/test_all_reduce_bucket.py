"""The all-reduce bucket on its own: pack, sum and unpack against float64 arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import oracle
import pytest
import torch
from bucket_support import (
    NO_SCALING,
    POISON,
    STORED,
    OtherRanks,
    Turn,
    add_others,
    chunk_of,
    destinations,
    grad_of,
    grads_of,
    group_of,
    parameters,
    random_keys,
    send,
    slice_of,
)
from torch import Tensor

from z3ext import pending as pending_module
from z3ext.all_reduce_bucket import AllReduceBucket
from z3ext.collectives import OneRank, SumOverRanks
from z3ext.partitions import FlatPartitions, Scaling
from z3ext.reducer import Counters
from z3ext.streams import HostOrder


class Made(NamedTuple):
    bucket: AllReduceBucket
    over: SumOverRanks
    begins: dict[int, int]
    counters: Counters
    partition_numel: int


def make(over: SumOverRanks, numels: Mapping[int, int]) -> Made:
    """A bucket for parameters of these numels, by key."""
    begins, total = destinations(numels, over.world_size)
    counters = Counters()
    bucket = AllReduceBucket(over, HostOrder(), begins, counters)
    return Made(bucket, over, begins, counters, total)


def check(made: Made, params: Mapping[int, Tensor], turn: Turn) -> None:
    """Send one bucket and compare every element of the partitions."""
    buffer, scaling, partitions, accumulate = turn
    assert buffer is not None
    world_size, rank = made.over.world_size, made.over.rank
    grads = grads_of(params)
    offsets, slices, end = [], [], 0
    for key, grad in grads.items():
        offsets.append(end)
        start, numel = slice_of(grad.numel(), world_size, rank)
        if numel:  # a slice without elements is left alone
            padded_numel = chunk_of(grad.numel(), world_size)
            slices.append((end + start, made.begins[key], numel, padded_numel))
        end += grad.numel()
    packed = oracle.pack(list(grads.values()), offsets, buffer, scaling.divisors)[0].buffer
    total = add_others(packed[:end], made.over)
    expected = oracle.unpack(total, partitions, slices, scaling.multipliers, accumulate)
    send(made.bucket, params, turn)
    oracle.assert_bits(partitions, expected.buffer, expected.written)
    if isinstance(made.over, OtherRanks):
        oracle.assert_bits(made.over.seen[-1], packed[:end])
    assert torch.equal(oracle.bits(buffer[end:]), oracle.bits(packed[end:]))


NUMELS = (1, 7, 0, 64, 3, 130, 2, 33)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_against_the_oracle(
    generator: torch.Generator, world_size: int, dtype: torch.dtype, accumulate: bool
) -> None:
    """Several sets through one bucket, each with other buffers, gradients and scaling."""
    scalings = (
        Scaling((float(world_size),), ()),
        Scaling((3.0, float(world_size)), (3.0,)),
        NO_SCALING,
    )
    for rank in range(world_size):
        over = group_of(rank, world_size, sum(NUMELS), dtype, generator)
        every = dict(zip(random_keys(len(NUMELS), generator), NUMELS, strict=True))
        made = make(over, every)
        for turn, scaling in enumerate(scalings):
            order = torch.randperm(len(every), generator=generator).tolist()[: 8 - turn]
            numels = {key: every[key] for key in [list(every)[i] for i in order]}
            size = sum(numels.values()) + turn
            check(
                made,
                parameters(numels, generator),
                Turn(
                    torch.full((size,), math.nan, dtype=dtype),
                    scaling,
                    torch.full((made.partition_numel,), POISON, dtype=STORED[turn]),
                    accumulate,
                ),
            )
        assert made.counters.buckets == len(scalings)
        assert made.counters.packs == len(scalings)
        assert made.counters.collectives == (len(scalings) if world_size > 1 else 0)


def test_the_same_bucket_again(generator: torch.Generator) -> None:
    """Plans are kept by what came first: same sets, another order, another set, and back."""
    numels = {9: 13, 4: 5, 7: 22}
    over = group_of(1, 3, 48, torch.float32, generator)
    made = make(over, {**numels, 2: 8})
    orders = [(9, 4, 7), (9, 4, 7), (9, 7, 4), (9, 2, 4, 7), (9,), (9, 4, 7), (4, 9, 7)]
    every = {**numels, 2: 8}
    for order in orders:
        partitions = torch.full((made.partition_numel,), POISON)
        params = parameters({key: every[key] for key in order}, generator)
        turn = Turn(torch.full((48,), math.nan), Scaling((3.0,), ()), partitions, False)
        check(made, params, turn)


def test_another_order_of_equal_numels(generator: torch.Generator) -> None:
    """The numels alone do not tell where a slice belongs."""
    numels = dict.fromkeys((6, 2, 4), 9)
    made = make(group_of(1, 2, 27, torch.float32, generator), numels)
    for order in ((6, 2, 4), (6, 4, 2), (6, 2, 4)):
        partitions = torch.full((made.partition_numel,), POISON)
        turn = Turn(torch.full((27,), math.nan), NO_SCALING, partitions, False)
        check(made, parameters(dict.fromkeys(order, 9), generator), turn)


def test_a_numel_that_changed(generator: torch.Generator) -> None:
    """The same keys with other numels do not go by the old plan."""
    made = make(group_of(0, 2, 40, torch.float32, generator), {1: 30, 2: 30})
    for second in (9, 10, 30):
        partitions = torch.full((made.partition_numel,), POISON)
        turn = Turn(torch.full((40,), math.nan), NO_SCALING, partitions, False)
        check(made, parameters({1: 10, 2: second}, generator), turn)


def test_sizes_below_the_world_size(generator: torch.Generator) -> None:
    """Past a parameter's end a rank's partition stays, padding included."""
    numels = {3: 2, 1: 1, 2: 3}
    for rank in range(5):
        made = make(OtherRanks(rank, [torch.ones(8) for _ in range(4)]), numels)
        partitions = torch.full((7,), POISON)
        params = parameters(numels, generator, [torch.float32])
        check(made, params, Turn(torch.empty(6), Scaling((5.0,), ()), partitions, False))
        untouched = [k for k in range(7) if k not in (1, 3, 5) or rank >= numels[[3, 1, 2][k // 2]]]
        assert partitions[untouched].tolist() == [POISON] * len(untouched)


def test_short_slices_are_padded_with_zeros(generator: torch.Generator) -> None:
    """The last rank with elements: its padding is zeroed, or left alone by accumulation."""
    made = make(OtherRanks(2, [torch.ones(7)] * 2), {1: 7})
    for accumulate, padding in ((True, [POISON, POISON]), (False, [0.0, 0.0])):
        partitions = torch.full((5,), POISON)
        params = parameters({1: 7}, generator, [torch.float32])
        check(made, params, Turn(torch.empty(7), NO_SCALING, partitions, accumulate))
        assert partitions[2:4].tolist() == padding
        assert partitions[[0, 4]].tolist() == [POISON, POISON]


def test_random_lists(generator: torch.Generator) -> None:
    """Random numels, orders, limits and worlds."""

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    for _ in range(40):
        world_size = 1 + draw(5)
        keys = random_keys(1 + draw(12), generator)
        numels = {key: draw(40) for key in keys}
        dtype, size = STORED[draw(3)], sum(numels.values())
        made = make(group_of(draw(world_size), world_size, size, dtype, generator), numels)
        partitions = torch.randn(made.partition_numel, generator=generator).to(STORED[draw(3)])
        buffer = torch.full((size + draw(3),), math.nan, dtype=dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pending_module, "PENDING_BYTES", 1 + draw(300))
            patch.setattr(pending_module, "LARGE_BYTES", 1 + draw(300))
            turn = Turn(buffer, Scaling((float(world_size),), ()), partitions, draw(2) == 1)
            check(made, parameters(numels, generator), turn)


# --- when gradients are packed -------------------------------------------------------------------


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 bytes may wait; 40 bytes are large."""
    monkeypatch.setattr(pending_module, "PENDING_BYTES", 64)
    monkeypatch.setattr(pending_module, "LARGE_BYTES", 40)


def add(made: Made, params: Mapping[int, Tensor], buffer: Tensor) -> list[int]:
    """The number of packs after each gradient."""
    packs = []
    for key, param in params.items():
        if made.bucket.add(param, grad_of(param), key):
            made.bucket.pack(buffer, (1.0,))
        packs.append(made.counters.packs)
    return packs


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("sizes", "packs"),
    [
        ((4, 4, 4, 4), [0, 0, 0, 1]),
        ((4, 4, 4, 3, 1), [0, 0, 0, 0, 1]),
        ((9, 9, 9), [0, 1, 1]),
        ((10,), [1]),
        ((1, 2, 10, 3), [0, 0, 1, 1]),
        ((10, 10, 10), [1, 2, 3]),
        ((0, 0, 0), [0, 0, 0]),
    ],
)
def test_packs(sizes: tuple[int, ...], packs: list[int], generator: torch.Generator) -> None:
    """float32: gradients wait until 64 bytes are together; one of 40 bytes takes them along."""
    numels = dict(enumerate(sizes))
    params = parameters(numels, generator, [torch.float32])
    grads = list(grads_of(params).values())
    made, buffer = make(OneRank(), numels), torch.full((sum(sizes) + 2,), POISON)
    end, before = 0, 0
    for key, param in params.items():
        found = add(made, {key: param}, buffer)
        assert found == packs[key : key + 1]
        if found == [before]:
            assert param.grad is not None
            continue
        # All that waited is in the bucket now, and only that.
        end, before = key + 1, found[0]
        assert [params[i].grad for i in range(end)] == [None] * end
        assert torch.equal(buffer[: sum(sizes[:end])], torch.cat(grads[:end]))
        assert buffer[sum(sizes[:end]) :].tolist() == [POISON] * (sum(sizes[end:]) + 2)
    for key in range(end, len(sizes)):
        assert torch.equal(grad_of(params[key]), grads[key])


def test_default_limits(generator: torch.Generator) -> None:
    """A gradient of 4 MiB goes at once, one of a byte less waits; 32 MiB may wait."""
    numels = {0: (1 << 20) - 1, 1: 1 << 20}
    params = parameters(numels, generator, [torch.float32])
    assert add(make(OneRank(), numels), params, torch.empty(3 << 20)) == [0, 1]
    assert pending_module.PENDING_BYTES == 32 << 20


def test_gradients_that_wait_are_bounded(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """Bytes of param.grad that are still there never exceed the limit."""
    monkeypatch.setattr(pending_module, "PENDING_BYTES", 1000)
    monkeypatch.setattr(pending_module, "LARGE_BYTES", 200)
    numels = dict(enumerate(torch.randint(0, 120, (300,), generator=generator).tolist()))
    params = parameters(numels, generator)
    made, buffer = make(OneRank(), numels), torch.empty(sum(numels.values()))
    most = 0
    for key, param in params.items():
        add(made, {key: param}, buffer)
        added = [params[k] for k in range(key + 1)]
        waiting = sum(p.grad.nbytes for p in added if p.grad is not None)
        assert waiting < 1000
        most = max(most, waiting)
    assert most > 500


@pytest.mark.usefixtures("small_limits")
def test_a_gradient_that_was_replaced_is_left_alone(generator: torch.Generator) -> None:
    numels = {0: 3, 1: 4, 2: 10}
    params = parameters(numels, generator, [torch.float32])
    given = list(grads_of(params).values())
    made, buffer = make(OneRank(), numels), torch.empty(17)
    add(made, {0: params[0], 1: params[1]}, buffer)
    replacement = torch.full((3,), 5.0)
    params[0].grad, params[1].grad = replacement, None
    add(made, {2: params[2]}, buffer)
    assert params[0].grad is replacement
    assert [params[1].grad, params[2].grad] == [None, None]
    assert torch.equal(buffer, torch.cat(given))


def test_packing_nothing(generator: torch.Generator) -> None:
    made = make(OneRank(), {0: 3})
    made.bucket.pack(torch.empty(3), ())
    made.bucket.pack(None, ())
    assert made.counters == Counters()


def test_clear(generator: torch.Generator) -> None:
    """Nothing of the old contents is in the next bucket, and its gradients stay where they are."""
    made = make(OneRank(), {0: 4, 1: 5, 2: 2, 3: 3})
    buffer = torch.full((9,), POISON)
    old = parameters({0: 4, 1: 5}, generator)
    add(made, old, buffer)
    made.bucket.clear()
    assert (made.bucket.keys, made.bucket.numels) == ([], [])
    assert all(param.grad is not None for param in old.values())
    assert made.counters == Counters()
    new = parameters({2: 2, 3: 3}, generator, [torch.float32])
    check(made, new, Turn(buffer, NO_SCALING, torch.zeros(made.partition_numel), True))
    assert buffer[5:].tolist() == [POISON] * 4


def test_counters(generator: torch.Generator) -> None:
    """One set of counters for two buckets; bytes are those of the bucket, not the buffer."""
    over = OtherRanks(0, [torch.zeros(100)])
    counters = Counters()
    for dtype, numels in ((torch.float32, {0: 5, 1: 6}), (torch.bfloat16, {2: 7})):
        begins, total = destinations(numels, 2)
        turn = Turn(torch.empty(90, dtype=dtype), Scaling((2.0,), ()), torch.zeros(total), False)
        bucket = AllReduceBucket(over, HostOrder(), begins, counters)
        send(bucket, parameters(numels, generator), turn)
    assert counters == Counters(buckets=2, packs=2, collectives=2, bytes_reduced=11 * 4 + 7 * 2)
    assert [seen.numel() for seen in over.seen] == [11, 7]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad", "pieces"),
    [
        (torch.ones(4, dtype=torch.float64), ("grads[1] is float64", "cast it first")),
        (torch.ones(4).to_sparse(), ("grads[1] is sparse", "dense")),
        (torch.ones(40), ("grads[1] has 40 elements at offset 3", "larger bucket")),
    ],
    ids=["float64", "sparse", "too large"],
)
def test_refused(grad: Tensor, pieces: tuple[str, ...], generator: torch.Generator) -> None:
    """The error names the gradient; bucket, partitions, counters and gradients are as before."""
    made = make(OneRank(), {0: 3, 1: grad.numel()})
    good = parameters({0: 3}, generator, [torch.float32])[0]
    bad = torch.zeros(grad.shape, dtype=grad.dtype, requires_grad=True)
    bad.grad = grad
    kept, buffer = good.grad, torch.full((9,), POISON)
    partitions = torch.full((made.partition_numel,), POISON)
    with pytest.raises(RuntimeError, match=r"z3ext::pack_: ") as caught:
        add(made, {0: good, 1: bad}, buffer)
        made.bucket.reduce(buffer, NO_SCALING, FlatPartitions(partitions), accumulate=False)
    for piece in pieces:
        assert piece in str(caught.value)
    assert good.grad is kept
    assert bad.grad is grad
    assert buffer.tolist() == [POISON] * 9
    assert partitions.tolist() == [POISON] * made.partition_numel
    assert made.counters == Counters()
    made.bucket.clear()
    check(made, {0: good}, Turn(buffer, NO_SCALING, partitions, False))


def test_no_memory(generator: torch.Generator) -> None:
    made = make(OneRank(), {0: 3})
    params = parameters({0: 3}, generator)
    made.bucket.add(params[0], grad_of(params[0]), 0)
    message = "z3ext: an all-reduce bucket has no memory; .* set contiguous_gradients to true"
    with pytest.raises(RuntimeError, match=message):
        made.bucket.pack(None, ())
    assert params[0].grad is not None
