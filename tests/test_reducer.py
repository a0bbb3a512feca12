"""The bucket's life on its own: pack, sum and unpack against float64 arithmetic, without ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import oracle
import pytest
import torch
from torch import Tensor

from z3ext import reducer as reducer_module
from z3ext.collectives import OneRank, SumOverRanks
from z3ext.layout import parameter_major
from z3ext.reducer import BucketReducer, Counters, Scaling
from z3ext.streams import HostOrder

STORED = (torch.float16, torch.bfloat16, torch.float32)
POISON = -123.0


class OtherRanks:
    """This rank's place in a group whose other ranks' buckets are known."""

    def __init__(self, rank: int, others: Sequence[Tensor]) -> None:
        self.rank = rank
        self.world_size = len(others) + 1
        self.others = others
        self.seen: list[Tensor] = []

    def all_reduce_(self, buf: Tensor) -> bool:
        self.seen.append(buf.clone())
        for other in self.others:
            buf += other[: buf.numel()]
        return True


class Made(NamedTuple):
    reducer: BucketReducer
    counters: Counters


def make(over: SumOverRanks) -> Made:
    counters = Counters()
    return Made(BucketReducer(over, HostOrder(), counters), counters)


def parameters(
    numels: Sequence[int], generator: torch.Generator, dtypes: Sequence[torch.dtype] = STORED
) -> list[Tensor]:
    """1-D parameters with gradients: dtypes in turn, every third gradient a strided view."""
    found = []
    for i, numel in enumerate(numels):
        dtype = dtypes[i % len(dtypes)]
        grad = torch.randn(numel, generator=generator).to(dtype)
        if i % 3 == 2:
            grad = torch.stack((grad, grad), 1)[:, 0]
        param = torch.zeros(numel, dtype=dtype, requires_grad=True)
        param.grad = grad
        found.append(param)
    return found


def grads_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the gradients."""
    return [param.grad.clone() for param in params if param.grad is not None]


def sum_of(grads: Sequence[Tensor], over: SumOverRanks, scaling: Scaling, buffer: Tensor) -> Tensor:
    """The summed bucket: packed by the oracle, then the other ranks' values added in turn."""
    offsets = [sum(grad.numel() for grad in grads[:i]) for i in range(len(grads))]
    bucket = oracle.pack(grads, offsets, buffer, scaling.divisors)[0].buffer
    for other in over.others if isinstance(over, OtherRanks) else ():
        total = bucket.double() + other[: bucket.numel()].double()
        rounded = oracle.round_to(oracle.round_to(total, torch.float32), bucket.dtype)
        bucket = rounded.to(bucket.dtype)
    return bucket


def check_bucket(
    made: Made,
    over: SumOverRanks,
    params: Sequence[Tensor],
    buffer: Tensor,
    partitions: Tensor,
    scaling: Scaling,
    offsets: Sequence[int | None],
    accumulate: bool,
) -> None:
    """Send one bucket through the reducer and compare every element of the partitions."""
    grads = grads_of(params)
    layout = parameter_major([g.numel() for g in grads], over.world_size, over.rank)
    slices = [
        (layout.src_offsets[i], offset, layout.numels[i], layout.padded_numels[i])
        for i, offset in enumerate(offsets)
        if offset is not None
    ]
    total = sum_of(grads, over, scaling, buffer)
    expected = oracle.unpack(total, partitions, slices, scaling.multipliers, accumulate)
    for param in params:
        made.reducer.add(param, buffer, scaling.divisors)
    assert list(made.reducer.numels) == [grad.numel() for grad in grads]
    made.reducer.reduce(buffer, scaling, partitions, offsets, accumulate)
    oracle.assert_bits(partitions, expected.buffer, expected.written)
    assert made.reducer.count == 0
    assert all(param.grad is None for param in params)


def destinations(
    numels: Sequence[int], world_size: int, skipped: Sequence[int] = ()
) -> tuple[list[int | None], int]:
    """An offset for each partition, one unused element apart, and the numel of all together."""
    offsets: list[int | None] = []
    end = 1
    for i, numel in enumerate(numels):
        offsets.append(None if i in skipped else end)
        end += -(-numel // world_size) + 1
    return offsets, end


NUMELS = (1, 7, 0, 64, 3, 130, 2, 33)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_against_the_oracle(
    generator: torch.Generator, world_size: int, dtype: torch.dtype, accumulate: bool
) -> None:
    """Several buckets through one reducer, each with other buffers, gradients and scaling."""
    scalings = (
        Scaling((float(world_size),), ()),
        Scaling((3.0, float(world_size)), (3.0,)),
        Scaling((), ()),
    )
    for rank in range(world_size):
        over: SumOverRanks = OneRank()
        if world_size > 1:
            size = sum(NUMELS) + 16
            others = [torch.randn(size, generator=generator) for _ in range(world_size - 1)]
            over = OtherRanks(rank, [other.to(dtype) for other in others])
        made = make(over)
        for turn, scaling in enumerate(scalings):
            order = torch.randperm(len(NUMELS), generator=generator).tolist()
            numels = [NUMELS[i] for i in order][: 8 - turn]
            skipped = order[:turn]
            offsets, total = destinations(numels, world_size, skipped)
            partitions = torch.full((total,), POISON, dtype=STORED[turn])
            buffer = torch.full((sum(numels) + turn,), math.nan, dtype=dtype)
            params = parameters(numels, generator)
            check_bucket(
                made, over, params, buffer, partitions, scaling, offsets, accumulate=accumulate
            )
        assert made.counters.buckets == len(scalings)
        assert made.counters.packs == len(scalings)
        assert made.counters.collectives == (len(scalings) if world_size > 1 else 0)


def test_sizes_below_the_world_size(generator: torch.Generator) -> None:
    """A rank past a parameter's end: None leaves the partition, an offset zeroes its padding."""
    others = [torch.ones(8) for _ in range(4)]
    for rank in range(5):
        over = OtherRanks(rank, others)
        made = make(over)
        offsets: list[int | None] = [1, None, 5]
        partitions = torch.full((7,), POISON)
        params = parameters((2, 1, 3), generator, [torch.float32])
        check_bucket(
            made,
            over,
            params,
            torch.empty(6),
            partitions,
            Scaling((5.0,), ()),
            offsets,
            accumulate=False,
        )
        untouched = [0, 2, 3, 4, 6]
        assert partitions[untouched].tolist() == [POISON] * len(untouched)
        if rank >= 3:
            assert partitions[[1, 5]].tolist() == [0.0, 0.0]


def test_random_lists(generator: torch.Generator) -> None:
    """Random numels, orders, limits and None destinations."""

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    for _ in range(40):
        world_size = 1 + draw(5)
        numels = [draw(40) for _ in range(1 + draw(12))]
        dtype = STORED[draw(3)]
        others = [torch.randn(sum(numels), generator=generator).to(dtype)] * (world_size - 1)
        over = OtherRanks(draw(world_size), others) if world_size > 1 else OneRank()
        skipped = [i for i in range(len(numels)) if draw(4) == 0]
        offsets, total = destinations(numels, world_size, skipped)
        partitions = torch.randn(total, generator=generator).to(STORED[draw(3)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reducer_module, "PENDING_BYTES", 1 + draw(300))
            patch.setattr(reducer_module, "LARGE_BYTES", 1 + draw(300))
            check_bucket(
                make(over),
                over,
                parameters(numels, generator),
                torch.full((sum(numels),), math.nan, dtype=dtype),
                partitions,
                Scaling((float(world_size),), ()),
                offsets,
                accumulate=draw(2) == 1,
            )


# --- when gradients are packed -------------------------------------------------------------------


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 bytes may wait; 40 bytes are large."""
    monkeypatch.setattr(reducer_module, "PENDING_BYTES", 64)
    monkeypatch.setattr(reducer_module, "LARGE_BYTES", 40)


def add_all(made: Made, params: Sequence[Tensor], buffer: Tensor) -> list[int]:
    """The number of packs after each gradient."""
    packs = []
    for param in params:
        made.reducer.add(param, buffer, (1.0,))
        packs.append(made.counters.packs)
    return packs


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("numels", "packs"),
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
def test_packs(numels: tuple[int, ...], packs: list[int], generator: torch.Generator) -> None:
    """float32: gradients wait until 64 bytes are together; one of 40 bytes takes them along."""
    params = parameters(numels, generator, [torch.float32])
    grads = grads_of(params)
    made, buffer = make(OneRank()), torch.full((sum(numels) + 2,), POISON)
    found, end = [], 0
    for i, param in enumerate(params):
        made.reducer.add(param, buffer, (1.0,))
        found.append(made.counters.packs)
        if not found[-1] or found[-1] == (found[-2] if i else 0):
            assert param.grad is not None
            continue
        # All that waited is in the bucket now, and only that.
        end = i + 1
        assert [p.grad for p in params[:end]] == [None] * end
        assert torch.equal(buffer[: sum(numels[:end])], torch.cat(grads[:end]))
        assert buffer[sum(numels[:end]) :].tolist() == [POISON] * (sum(numels[end:]) + 2)
    assert found == packs
    waiting = [grad for grad in grads_of(params[end:])]
    assert all(torch.equal(a, b) for a, b in zip(waiting, grads[end:], strict=True))


def test_default_limits() -> None:
    """A gradient of 4 MiB goes at once, one of a byte less waits."""
    made, buffer = make(OneRank()), torch.empty(3 << 20)
    params = parameters(((1 << 20) - 1, 1 << 20), torch.Generator().manual_seed(0), [torch.float32])
    assert add_all(made, params, buffer) == [0, 1]
    assert reducer_module.PENDING_BYTES == 32 << 20


def test_gradients_that_wait_are_bounded(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """Bytes of param.grad that are still there never exceed the limit."""
    monkeypatch.setattr(reducer_module, "PENDING_BYTES", 1000)
    monkeypatch.setattr(reducer_module, "LARGE_BYTES", 200)
    numels = torch.randint(0, 120, (300,), generator=generator).tolist()
    params = parameters(numels, generator)
    made, buffer = make(OneRank()), torch.empty(sum(numels))
    most = 0
    for i, param in enumerate(params):
        made.reducer.add(param, buffer, (1.0,))
        waiting = sum(p.grad.nbytes for p in params[: i + 1] if p.grad is not None)
        assert waiting < 1000
        most = max(most, waiting)
    assert most > 500


@pytest.mark.usefixtures("small_limits")
def test_a_gradient_that_was_replaced_is_left_alone(generator: torch.Generator) -> None:
    first, second, large = parameters((3, 4, 10), generator, [torch.float32])
    given = grads_of([first, second])
    made, buffer = make(OneRank()), torch.empty(17)
    made.reducer.add(first, buffer, ())
    made.reducer.add(second, buffer, ())
    replacement = torch.full((3,), 5.0)
    first.grad = replacement
    second.grad = None
    made.reducer.add(large, buffer, ())
    assert first.grad is replacement
    assert second.grad is None
    assert torch.equal(buffer[:7], torch.cat(given))


def test_clear(generator: torch.Generator) -> None:
    """Nothing of the old contents is in the next bucket, and its gradients stay where they are."""
    made, buffer = make(OneRank()), torch.full((9,), POISON)
    old = parameters((4, 5), generator)
    add_all(made, old, buffer)
    made.reducer.clear()
    assert made.reducer.count == 0
    assert list(made.reducer.numels) == []
    assert all(param.grad is not None for param in old)
    assert made.counters == Counters()
    new = parameters((2, 3), generator, [torch.float32])
    offsets, total = destinations((2, 3), 1)
    check_bucket(
        made, OneRank(), new, buffer, torch.zeros(total), Scaling((), ()), offsets, accumulate=True
    )
    assert buffer[5:].tolist() == [POISON] * 4


def test_counters(generator: torch.Generator) -> None:
    """One set of counters, shared by two reducers; bytes are those of the bucket, not the buffer."""
    over = OtherRanks(0, [torch.zeros(100)])
    counters = Counters()
    for dtype, numels in ((torch.float32, (5, 6)), (torch.bfloat16, (7,))):
        reducer = BucketReducer(over, HostOrder(), counters)
        buffer = torch.empty(90, dtype=dtype)
        offsets, total = destinations(numels, 2)
        for param in parameters(numels, generator):
            reducer.add(param, buffer, (2.0,))
        reducer.reduce(buffer, Scaling((2.0,), ()), torch.zeros(total), offsets, accumulate=False)
    assert counters == Counters(buckets=2, packs=2, collectives=2, bytes_reduced=11 * 4 + 7 * 2)
    assert [seen.numel() for seen in over.seen] == [11, 7]


# --- gradients that are refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad", "pieces"),
    [
        (torch.ones(4, dtype=torch.float64), ("grads[1] is float64", "cast it first")),
        (torch.ones(4).to_sparse(), ("grads[1] is sparse", "dense")),
        (torch.ones(40), ("grads[1] has 40 elements at offset 3", "larger bucket")),
        (torch.ones(4, device="meta"), ("grads[1] is on meta", "bucket's device")),
    ],
    ids=["float64", "sparse", "too large", "other device"],
)
def test_refused(grad: Tensor, pieces: tuple[str, ...], generator: torch.Generator) -> None:
    """The error names the gradient; bucket, partitions, counters and gradients are as before."""
    (good,) = parameters((3,), generator, [torch.float32])
    bad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device, requires_grad=True)
    bad.grad = grad
    made, buffer, partitions = make(OneRank()), torch.full((9,), POISON), torch.full((9,), POISON)
    kept = good.grad
    with pytest.raises(RuntimeError, match=r"z3ext::pack_: ") as caught:
        made.reducer.add(good, buffer, ())
        made.reducer.add(bad, buffer, ())
        made.reducer.reduce(buffer, Scaling((), ()), partitions, [0, 4], accumulate=False)
    for piece in pieces:
        assert piece in str(caught.value)
    assert good.grad is kept
    assert bad.grad is grad
    assert buffer.tolist() == [POISON] * 9
    assert partitions.tolist() == [POISON] * 9
    assert made.counters == Counters()
    made.reducer.clear()
    check_bucket(
        made, OneRank(), [good], buffer, partitions, Scaling((), ()), [0], accumulate=False
    )


def test_parameter_without_gradient() -> None:
    made = make(OneRank())
    with pytest.raises(RuntimeError, match="z3ext: a parameter without gradient .*; add it from"):
        made.reducer.add(torch.zeros(3), torch.zeros(3), ())
    assert made.reducer.count == 0
