"""The reduce-scatter bucket on its own: rows, sum and unpack against float64 arithmetic."""

from __future__ import annotations

import oracle
import pytest
import torch
from bucket_support import (
    NO_SCALING,
    POISON,
    STORED,
    OtherRanks,
    Turn,
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
from rows_support import (
    KNOWN,
    check,
    check_tens,
    in_pairs,
    limits,
    make,
    make_tens,
    one_by_one,
    row_total,
)
from torch import Tensor

from z3ext.collectives import OneRank
from z3ext.partitions import FlatPartitions, Scaling
from z3ext.reduce_scatter_bucket import ReduceScatterBucket, plan_rows
from z3ext.reducer import Counters
from z3ext.streams import HostOrder

__all__ = ["in_pairs", "one_by_one"]  # fixtures, found by name

# --- values --------------------------------------------------------------------------------------

NUMELS = (1, 7, 0, 64, 3, 130, 2, 33)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("waiting", [1, 100, 1 << 20])
def test_against_the_oracle(
    generator: torch.Generator,
    waiting: int,
    world_size: int,
    dtype: torch.dtype,
    accumulate: bool,
) -> None:
    """Several sets through one bucket, each with other buffers, gradients and scaling."""
    scalings = (
        Scaling((float(world_size),), ()),
        Scaling((3.0, float(world_size)), (3.0,)),
        NO_SCALING,
    )
    numels = dict(zip(random_keys(len(NUMELS), generator), NUMELS, strict=True))
    first = next(iter(numels))
    for rank in range(world_size):
        size = row_total(NUMELS, world_size)
        made = make(group_of(rank, world_size, size, dtype, generator), numels, dtype)
        orders = [list(numels)] * 2
        for left_out in (0, 0, 2):
            rest = [key for key in random_keys(len(numels), generator) if key != first]
            orders.append([first, *rest[left_out:]])
        for i, order in enumerate(orders):
            here = {key: numels[key] for key in order}
            room = size if i % 2 else sum(here.values())
            scaling = scalings[i % 3]
            with limits(waiting, waiting):
                turn = made.turn(room, scaling, accumulate, STORED[i % 3])
                check(made, parameters(here, generator), turn)
        assert made.counters.buckets == len(orders)
        assert made.counters.collectives == (len(orders) if world_size > 1 else 0)


def test_random_lists(generator: torch.Generator) -> None:
    """Random sets, numels, orders, limits, worlds and buffers through one bucket each time."""

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    for _ in range(40):
        world_size = 1 + draw(5)
        largest = {key: draw(40) for key in random_keys(1 + draw(10), generator)}
        dtype = STORED[draw(3)]
        size = row_total(list(largest.values()), world_size)
        over = group_of(draw(world_size), world_size, size, dtype, generator)
        made = make(over, largest, dtype)
        keys = list(largest)
        for _ in range(8):
            if draw(3) == 0:
                keys = [list(largest)[i] for i in torch.randperm(len(largest), generator=generator)]
            here = {key: largest[key] for key in keys if key == keys[0] or draw(6)}
            if draw(4) == 0:
                changed = keys[draw(len(keys))]
                here[changed] = draw(largest[changed] + 1)
            room = (None, sum(here.values()), size)[draw(3)]
            with limits(1 + draw(200), 1 + draw(200)):
                turn = made.turn(room, Scaling((3.0,), ()), draw(2) == 1, STORED[draw(3)])
                check(made, parameters(here, generator), turn)


@pytest.mark.usefixtures("one_by_one")
def test_partitions_past_the_end_and_padding_stay(generator: torch.Generator) -> None:
    """Neither a slice without elements nor the padding of a short one is written."""
    numels = {3: 2, 1: 1, 2: 3, 8: 7}
    for rank in range(5):
        made = make(OtherRanks(rank, [torch.ones(25)] * 4), numels)
        for accumulate in (False, True):
            turn = made.turn(13, Scaling((5.0,), ()), accumulate)
            check(made, parameters(numels, generator, [torch.float32]), turn)
            for key, numel in numels.items():
                _, real = slice_of(numel, 5, rank)
                end = made.begins[key] + chunk_of(numel, 5) + 1
                rest = turn.partitions[made.begins[key] + real : end]
                assert rest.tolist() == [POISON] * (end - made.begins[key] - real)


def test_only_empty_gradients(generator: torch.Generator) -> None:
    """A row has no elements; then the same set with one that has some leaves that plan."""
    made = make(group_of(1, 3, 9, torch.float32, generator), {4: 7, 2: 0})
    for second in (0, 0, 7):
        check(made, parameters({2: 0, 4: second}, generator), made.turn(9))


@pytest.mark.usefixtures("one_by_one")
def test_ranks_in_different_orders(generator: torch.Generator) -> None:
    """What one rank sends is laid out alike whatever the order on each: the sums agree."""
    numels = {6: 11, 1: 4, 9: 25, 3: 2}
    orders = [(6, 1, 9, 3), (3, 9, 1, 6), (1, 6, 3, 9)]
    grads = [grads_of(parameters(numels, generator, [torch.float32])) for _ in orders]
    sent: list[Tensor] = []
    for _ in range(2):  # without plans, then by them: the sent rows come from a first pass
        buckets = sent if len(sent) == len(orders) else [torch.zeros(60)] * len(orders)
        sent = []
        for rank, order in enumerate(orders):
            others = [bucket for i, bucket in enumerate(buckets) if i != rank]
            over = OtherRanks(rank, others)
            made = make(over, numels)
            for _ in range(2):
                params = parameters({key: numels[key] for key in order}, generator, [torch.float32])
                for key, param in params.items():
                    param.grad = grads[rank][key].clone()
                turn = made.turn(48)
                check(made, params, turn)
            oracle.assert_bits(over.seen[0], over.seen[1])
            sent.append(over.seen[0])
            for key, numel in numels.items() if buckets[0].any() else ():
                start, real = slice_of(numel, 3, rank)
                total = sum(grads[i][key][start : start + real].double() for i in range(3))
                begin = made.begins[key]
                torch.testing.assert_close(
                    turn.partitions[begin : begin + real].double(), total, rtol=1e-6, atol=1e-6
                )


# --- counts and gradients ------------------------------------------------------------------------


def test_counters(generator: torch.Generator) -> None:
    """One set of counters for two buckets; bytes are those of the rows, padding included."""
    over = OtherRanks(0, [torch.zeros(100)])
    counters = Counters()
    for dtype, numels in ((torch.float32, {0: 5, 1: 6}), (torch.bfloat16, {2: 7})):
        begins, total = destinations(numels, 2)
        turn = Turn(torch.empty(90, dtype=dtype), Scaling((2.0,), ()), torch.zeros(total), False)
        bucket = ReduceScatterBucket(over, HostOrder(), begins, counters, dtype)
        send(bucket, parameters(numels, generator), turn)
    assert counters == Counters(buckets=2, packs=2, collectives=2, bytes_reduced=12 * 4 + 8 * 2)
    assert [seen.numel() for seen in over.seen] == [12, 8]


@pytest.mark.usefixtures("in_pairs")
def test_clear(generator: torch.Generator) -> None:
    """Nothing of the old contents, packed or not, is in the next bucket; plans stay."""
    made = make_tens(generator)
    for turn in range(3):
        params = parameters(dict.fromkeys((50, 10, 60), 10), generator, [torch.float32])
        buffer = torch.full((72,), torch.nan)
        for key, param in params.items():
            if made.bucket.add(param, grad_of(param), key):
                made.bucket.pack(buffer, (3.0,))
        assert [param.grad is None for param in params.values()] == [True, True, False]
        made.bucket.clear()
        assert (made.bucket.keys, made.bucket.numels) == ([], [])
        assert params[60].grad is not None
        assert made.counters.buckets == turn
        check_tens(made, KNOWN, generator)


def test_packing_nothing() -> None:
    made = make(OneRank(), {0: 3})
    made.bucket.pack(torch.empty(3), ())
    made.bucket.pack(None, ())
    assert made.counters == Counters()


@pytest.mark.parametrize(
    ("grad", "pieces"),
    [
        (torch.ones(4, dtype=torch.float64), ("grads[1] is float64", "cast it first")),
        (torch.ones(4).to_sparse(), ("grads[1] is sparse", "dense")),
    ],
    ids=["float64", "sparse"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["at the sum", "at a pack"])
@pytest.mark.parametrize("known", [False, True], ids=["no plan", "plan"])
@pytest.mark.parametrize("room", [9, None], ids=["buffer", "no buffer"])
def test_refused(
    grad: Tensor,
    pieces: tuple[str, ...],
    packed: bool,
    known: bool,
    room: int | None,
    generator: torch.Generator,
) -> None:
    """The error names the gradient; bucket, partitions, counters and gradients are as before."""
    made = make(OneRank(), {0: 3, 1: 4})
    if known:
        check(made, parameters({0: 3, 1: 4}, generator), made.turn(room))
    counters = Counters(**vars(made.counters))
    good = parameters({0: 3}, generator, [torch.float32])[0]
    bad = torch.zeros(grad.shape, dtype=grad.dtype, requires_grad=True)
    bad.grad = grad
    kept, turn = good.grad, made.turn(room)
    with pytest.raises(RuntimeError, match=r"z3ext::pack_(rows_)?: ") as caught:
        made.bucket.add(good, grad_of(good), 0)
        made.bucket.add(bad, grad, 1)
        if packed:
            made.bucket.pack(turn.buffer, ())
        partitions = FlatPartitions(turn.partitions)
        made.bucket.reduce(turn.buffer, turn.scaling, partitions, turn.accumulate)
    for piece in pieces:
        assert piece in str(caught.value)
    assert good.grad is kept
    assert bad.grad is grad
    assert turn.buffer is None or turn.buffer.isnan().all()
    assert turn.partitions.tolist() == [POISON] * made.partition_numel
    assert made.counters == counters
    made.bucket.clear()
    check(made, {0: good}, made.turn(room))


@pytest.mark.usefixtures("one_by_one")
def test_too_large_for_the_buffer(generator: torch.Generator) -> None:
    """Without a plan the buffer holds the gradients one after the other, or says what is wrong."""
    made = make(OneRank(), {0: 3, 1: 40})
    params = parameters({0: 3, 1: 40}, generator, [torch.float32])
    turn = made.turn(9)
    assert turn.buffer is not None
    made.bucket.add(params[0], grad_of(params[0]), 0)
    made.bucket.pack(turn.buffer, ())
    made.bucket.add(params[1], grad_of(params[1]), 1)
    with pytest.raises(RuntimeError, match=r"z3ext::pack_: grads\[0\] has 40 elements at offset 3"):
        made.bucket.pack(turn.buffer, ())
    assert params[1].grad is not None
    assert turn.buffer[3:].isnan().all()
    assert made.counters == Counters(packs=1)


# --- the plan itself -----------------------------------------------------------------------------


def test_plan_rows() -> None:
    """Three ranks; keys in their own order, whatever the order of the mapping."""
    numels = {7: 8, 2: 0, 4: 1, 3: 6}
    begins = {7: 100, 2: 200, 4: 300, 3: 400}
    found = [plan_rows(numels, begins, 3, rank) for rank in range(3)]
    for plan in found:
        assert plan.numels == numels
        assert plan.offsets == {2: 0, 3: 0, 4: 2, 7: 3}
        assert plan.row_numel == 6
        assert plan.holds([2, 3, 4, 7], [0, 6, 1, 8])
        assert plan.holds([7, 4, 2, 3], [8, 1, 0, 6])
        assert not plan.holds([2, 3, 4], [0, 6, 1])
        assert not plan.holds([2, 3, 4, 7, 9], [0, 6, 1, 8, 1])
        assert not plan.holds([2, 3, 4, 9], [0, 6, 1, 8])
        assert not plan.holds([2, 3, 4, 7], [0, 6, 1, 9])
    assert [plan.src_offsets for plan in found] == [[0, 2, 3], [0, 3], [0, 3]]
    assert [plan.dst_offsets for plan in found] == [[400, 300, 100], [400, 100], [400, 100]]
    assert [plan.slices for plan in found] == [[2, 1, 3], [2, 3], [2, 2]]


@pytest.mark.parametrize("planned", [False, True], ids=["sequence", "rows"])
def test_a_pack_that_failed_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, planned: bool
) -> None:
    """Out of memory in the op: nothing was written, so the same gradients are packed later."""
    begins, buffer = {0: 0, 1: 3}, torch.full((7,), -1.0)
    bucket = ReduceScatterBucket(OneRank(), HostOrder(), begins, Counters(), torch.float32)
    for turn in range(1 + planned):
        last = turn == planned
        partitions = torch.full((7,), -1.0)
        for key, numel in ((0, 3), (1, 4)):
            param = torch.zeros(numel, requires_grad=True)
            param.grad = torch.full((numel,), key + 1.0)
            bucket.add(param, param.grad, key)
            if last and key == 0:
                for name in ("pack_", "pack_rows_"):
                    monkeypatch.setattr(f"z3ext.ops.{name}", _out_of_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    bucket.pack(buffer, ())
                monkeypatch.undo()
                bucket.pack(buffer, ())
        bucket.reduce(buffer, Scaling((), ()), FlatPartitions(partitions), False)
        assert partitions.tolist() == [1.0] * 3 + [2.0] * 4


def _out_of_memory(*args: object) -> None:
    raise torch.OutOfMemoryError("planted")
