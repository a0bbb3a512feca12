"""Partitions in host memory: over a device the same values as without one, in few transfers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from z3ext.norms import TorchNorms, TreeNorms
from z3ext.offload import OffloadedPartitions, SameMemory, StagedMemory, runs_of
from z3ext.partitions import Scaling, Slices

CHUNKS = (30, 1, 50, 7, 64, 16, 8)
BEGINS = (0, 30, 31, 81, 88, 152, 168)
TOTAL = 176
#: Two sub-groups: parameters 0 to 3, then 4 to 6.
SUB_GROUPS = ((0, 88), (88, 88))


def slices_of(params: Sequence[int], short: int = 0) -> Slices:
    """Parameters in their order of arrival; ``short`` elements of each chunk are padding."""
    chunks = [CHUNKS[i] for i in params]
    sources = [sum(chunks[:k]) for k in range(len(chunks))]
    numels = [max(chunk - short, 1) for chunk in chunks]
    return Slices(sources, [BEGINS[i] for i in params], numels, numels)


@pytest.mark.parametrize(
    ("params", "short", "expected"),
    [
        ((6, 5, 4, 3), 0, [(81, [7, 64, 16, 8])]),
        ((0, 2, 6), 0, [(0, [30]), (31, [50]), (168, [8])]),
        ((1, 0), 2, [(0, [28]), (30, [1])]),
        ((), 0, []),
    ],
)
def test_runs(params: Sequence[int], short: int, expected: list[Any]) -> None:
    assert runs_of(slices_of(params, short)) == expected


class Taken:
    """What the caller is told."""

    def __init__(self) -> None:
        self.norms: dict[int, float] = {}
        self.without: set[int] = set()

    def __call__(self, places: list[int], norms: Sequence[Tensor] | None) -> None:
        if norms is None:
            self.without.update(places)
        else:
            self.norms.update(zip(places, map(float, norms), strict=True))


@pytest.mark.parametrize("boundary", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("params", "short"), [((6, 5, 4, 3), 0), ((0, 2, 6, 3), 0), ((4, 5, 0), 3)]
)
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_both_ways_are_one(
    params: Sequence[int],
    short: int,
    accumulate: bool,
    boundary: bool,
    bad: float | None,
    generator: torch.Generator,
) -> None:
    """The staging memory is on the CPU here; no step of it depends on the device."""
    reduced = torch.randn(TOTAL, generator=generator).to(torch.bfloat16)
    if bad is not None:
        reduced[sum(CHUNKS[i] for i in params[:-1])] = bad
    old = torch.randn(TOTAL, generator=generator).to(torch.bfloat16)
    old_grads = torch.randn(TOTAL, generator=generator)
    found = []
    for staged in (False, True):
        flat, taken = old.clone(), Taken()
        whole = old_grads.clone()
        grads = [(begin, whole[begin : begin + numel]) for begin, numel in SUB_GROUPS]
        cpu = torch.device("cpu")
        buffer = itertools.repeat(flat).__next__
        memory = StagedMemory(buffer, BEGINS, cpu, finite=True) if staged else SameMemory(buffer)
        partitions = OffloadedPartitions(memory, TorchNorms(), taken, grads, boundary)
        partitions.store(reduced.clone(), slices_of(params, short), Scaling((), (3.0,)), accumulate)
        assert bool(memory.overflow()) is (bad is not None)
        memory.forget()
        assert bool(memory.overflow()) is (bad is not None)
        found.append((flat, whole, taken))
    (flat, whole, taken), (flat2, whole2, taken2) = found
    assert torch.equal(flat.view(torch.int16), flat2.view(torch.int16))
    assert torch.equal(whole.view(torch.int32), whole2.view(torch.int32))
    assert taken.without == taken2.without == (set() if boundary else {BEGINS[i] for i in params})
    assert repr(taken.norms) == repr(taken2.norms)
    # Against the definition, parameter by parameter.
    written = torch.zeros(TOTAL, dtype=torch.bool)
    slices = slices_of(params, short)
    for source, begin, numel, _ in zip(*slices, strict=True):
        part = slice(begin, begin + numel)
        value = (reduced[source : source + numel].double() * 3).to(torch.bfloat16)
        expected = (value.double() + old[part].double()).to(torch.bfloat16) if accumulate else value
        torch.testing.assert_close(flat[part], expected, rtol=0, atol=0, equal_nan=True)
        if boundary:
            torch.testing.assert_close(
                whole[part], flat[part].float(), rtol=0, atol=0, equal_nan=True
            )
            torch.testing.assert_close(
                torch.tensor(taken.norms[begin]).double(),
                flat[part].double().norm(2),
                equal_nan=True,
            )
            written[part] = True
    assert torch.equal(whole[~written], old_grads[~written])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_was_bad_before_counts(bad: float) -> None:
    """The partitions were written by DeepSpeed, before z3ext served the optimizer."""
    flat = torch.zeros(TOTAL)
    flat[40] = bad
    memory = StagedMemory(itertools.repeat(flat).__next__, BEGINS, torch.device("cpu"), False)
    grads = [(begin, torch.zeros(numel)) for begin, numel in SUB_GROUPS]
    partitions = OffloadedPartitions(memory, TorchNorms(), Taken(), grads, True)
    partitions.store(torch.ones(TOTAL), slices_of((6, 5)), Scaling((), ()), False)
    assert bool(memory.overflow())
    partitions.store(torch.ones(TOTAL), slices_of((2,)), Scaling((), ()), False)
    assert not bool(memory.overflow())


# --- transfers, counted on fake tensors -----------------------------------------------------------


class Move(NamedTuple):
    """One copy between host and device."""

    to_device: bool
    nbytes: int


class Moves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every copy between host and device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Move] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        source = {
            torch.ops.aten.copy_.default: lambda: args[1],
            torch.ops.aten._to_copy.default: lambda: args[0],
        }.get(function)
        if source is not None and source().device != result.device:
            self.found.append(Move(result.device == DEVICE, source().nbytes))
        return result


#: A device of which torch makes fake tensors wherever it is built; CUDA it refuses on a CPU build.
DEVICE = torch.device("lazy", 0)
ORDER = tuple(reversed(range(len(CHUNKS))))


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def moved_by_stock(micro_step: int, boundary: bool, monkeypatch: pytest.MonkeyPatch) -> list[Move]:
    """DeepSpeed's own ``partition_grads`` on parameters that are cut over one rank."""
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    monkeypatch.setattr(
        stage3,
        "get_accelerator",
        lambda: SimpleNamespace(
            on_accelerator=lambda tensor: tensor.device == DEVICE,
            is_synchronized_device=lambda: True,
        ),
    )
    flat = torch.zeros(TOTAL, dtype=torch.bfloat16)
    parts: list[Any] = [
        SimpleNamespace(ds_id=i, ds_numel=n, grad=None, partition_numel=lambda n=n: n)
        for i, n in enumerate(CHUNKS)
    ]
    cls = stage3.DeepSpeedZeroOptimizer_Stage3
    optimizer: Any = cls.__new__(cls)
    place = {i: [b >= 88, b - 88 * (b >= 88), CHUNKS[i]] for i, b in enumerate(BEGINS)}
    vars(optimizer).update(
        micro_step_id=micro_step,
        gradient_accumulation_dtype=torch.bfloat16,
        offload_optimizer=True,
        swap_optimizer=False,
        is_gradient_accumulation_boundary=lambda: boundary,
        _get_param_partition_rank=lambda param: 0,
        _offload_boundary_param_ids=set(),
        norm_for_param_grads={},
        grad_position=place,
        get_param_id=lambda param: param.ds_id,
        _constant_buffered_norm2=lambda buffer: buffer,
        _swappable_optimizer_subgroup=lambda i: False,
        master_weights_and_grads_dtype=torch.float32,
        fp32_partitioned_groups_flat=[SimpleNamespace(grad=torch.zeros(88)) for _ in range(2)],
        _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition={
            i: flat[b : b + CHUNKS[i]] for i, b in enumerate(BEGINS)
        },
    )
    averages = [torch.empty(CHUNKS[i], dtype=torch.bfloat16, device=DEVICE) for i in ORDER]
    moves = Moves()
    with moves:
        optimizer.partition_grads([parts[i] for i in ORDER], averages)
    return moves.found


def moved_by_z3ext(micro_step: int, boundary: bool) -> list[Move]:
    flat = torch.zeros(TOTAL, dtype=torch.bfloat16)
    grads = [(begin, torch.zeros(numel)) for begin, numel in SUB_GROUPS]
    memory = StagedMemory(lambda: flat, BEGINS, DEVICE, finite=True)
    partitions = OffloadedPartitions(memory, TreeNorms(), lambda *_: None, grads, boundary)
    reduced = torch.empty(TOTAL, dtype=torch.bfloat16, device=DEVICE)
    moves = Moves()
    with moves:
        partitions.store(reduced, slices_of(ORDER), Scaling((), ()), micro_step != 0)
        memory.overflow()
    return moves.found


def _bytes(moves: Sequence[Move], wanted: Callable[[Move], bool]) -> int:
    return sum(move.nbytes for move in moves if wanted(move))


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("boundary", [False, True])
@pytest.mark.parametrize("micro_step", [0, 1])
def test_transfers(micro_step: int, boundary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One over for the bucket and one for each sub-group's fp32; back only what is added to."""
    stock = moved_by_stock(micro_step, boundary, monkeypatch)
    ours = moved_by_z3ext(micro_step, boundary)
    half, single = 2 * TOTAL, 4 * TOTAL
    params, sub_groups = len(CHUNKS), len(SUB_GROUPS)
    assert len([m for m in stock if not m.to_device]) == params * (1 + boundary)
    assert len([m for m in ours if not m.to_device]) == 1 + sub_groups * boundary
    assert _bytes(stock, lambda m: not m.to_device) == half + single * boundary
    assert _bytes(ours, lambda m: not m.to_device) == half + single * boundary
    # Stock sends every partition back, to measure it.
    assert _bytes(stock, lambda m: m.to_device) == half
    assert len([m for m in stock if m.to_device]) == params
    assert [m for m in ours if m.to_device] == ([Move(True, half)] if micro_step else [])
