"""Segment norms equal torch's own norm of each segment, bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import oracle
import pytest
import torch
from torch import Tensor

from z3ext import norms as norms_module
from z3ext.norms import OrderedNorms, SegmentNorms, TorchNorms, TreeNorms, segment_norms

STORED = (torch.float16, torch.bfloat16, torch.float32)
CPU = torch.device("cpu")


@pytest.fixture(params=["measured", "torch"])
def way(request: pytest.FixtureRequest) -> SegmentNorms:
    """The way chosen for the CPU at hand, and the one that is always right."""
    return segment_norms(CPU) if request.param == "measured" else TorchNorms()


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def bounds_of(numels: Sequence[int]) -> Tensor:
    return torch.tensor(list(itertools.accumulate(numels, initial=0)), dtype=torch.int64)


def check(way: SegmentNorms, segments: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Segments side by side in one buffer, against torch's norm of each partition by itself."""
    buf = torch.cat([torch.empty(0), *segments]).to(dtype)
    bounds = bounds_of([segment.numel() for segment in segments])
    flag, norms = way(buf, bounds)
    edges = bounds.tolist()
    partitions = [buf[begin:end] for begin, end in itertools.pairwise(edges)]
    expected = [partition.to(torch.float64).norm(2) for partition in partitions]
    assert norms.dtype == torch.float64
    assert norms.shape == (len(segments),)
    assert flag.shape == ()
    assert flag.dtype == torch.bool
    oracle.assert_bits(norms, torch.stack(expected) if expected else torch.empty(0).double())
    assert bool(flag) == bool(oracle.nonfinite(buf).any())


def spread(numel: int, generator: torch.Generator, low: float, high: float) -> Tensor:
    """Normal values times powers of ten, so that the order of a sum shows in its last bits."""
    exponents = torch.empty(numel).uniform_(low, high, generator=generator)
    return torch.randn(numel, generator=generator) * 10.0**exponents


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_every_small_size(
    way: SegmentNorms, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """1..300 elements; a segment begins at every alignment, as a partition does in its buffer."""
    check(way, [spread(n, generator, -4, 2) for n in range(1, 301)], dtype)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_large_sizes(way: SegmentNorms, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Random sizes to 200 000, past the size at which torch and the op use threads."""
    sizes = torch.randint(1, 200_000, (4,), generator=generator).tolist()
    for numel in (*sizes, 32_767, 32_768, 32_769, 131_072):
        check(way, [spread(numel, generator, -4, 2)], dtype)
    check(way, [spread(numel, generator, -4, 2) for numel in sizes], dtype)


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_subnormal_and_huge(
    way: SegmentNorms, dtype: torch.dtype, generator: torch.Generator
) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    segments = []
    for numel in (1, 3, 8, 33, 1001):
        steps = torch.randint(1, 5, (numel,), generator=generator).double()
        segments += [steps * smallest, steps * (info.max / 5)]
        segments.append(torch.cat((segments[-1], segments[-2])))
    check(way, [segment.to(dtype) for segment in segments], dtype)


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite(
    way: SegmentNorms, bad: float, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """One bad element spoils its segment's norm and no other."""
    for numel, place in ((1, 0), (5, 4), (64, 63), (300, 17), (300, 299)):
        middle = torch.randn(numel, generator=generator)
        middle[place] = bad
        check(way, [torch.randn(9, generator=generator), middle, torch.ones(3)], dtype)
    check(way, [torch.tensor([math.inf, math.nan, 1.0])], dtype)


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_zeros(way: SegmentNorms, dtype: torch.dtype) -> None:
    """Minus zeros have the norm +0.0."""
    check(way, [torch.full((numel,), -0.0) for numel in (1, 4, 9)], dtype)
    check(way, [torch.zeros(7), torch.tensor([-0.0, 0.0])], dtype)


@pytest.mark.parametrize("numels", [(), (0,), (0, 0), (3, 0, 5), (0, 4), (4, 0), (0, 4, 0, 0, 2)])
def test_empty_segments(way: SegmentNorms, numels: tuple[int, ...]) -> None:
    check(way, [torch.full((numel,), 2.5) for numel in numels], torch.float32)


def test_random_segments(way: SegmentNorms, generator: torch.Generator) -> None:
    for _ in range(30):
        count = int(torch.randint(0, 20, (1,), generator=generator))
        numels = torch.randint(0, 90, (count,), generator=generator).tolist()
        check(way, [spread(numel, generator, -9, 9) for numel in numels], torch.float32)


# --- the choice ----------------------------------------------------------------------------------


@pytest.fixture
def measured_anew() -> Iterator[None]:
    norms_module._measured_lanes.cache_clear()
    yield
    norms_module._measured_lanes.cache_clear()


@pytest.mark.usefixtures("measured_anew")
def test_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    monkeypatch.setattr(norms_module, "_norms_with", lambda lanes, samples: [0.0])
    way = segment_norms(CPU)
    assert isinstance(way, TorchNorms)
    check(way, [spread(41, generator, -4, 2)], torch.bfloat16)


@pytest.mark.usefixtures("measured_anew")
@pytest.mark.parametrize("lanes", norms_module._LANES)
def test_takes_the_lanes_that_fit(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = norms_module._norms_with

    def only_one_fits(asked: int, samples: Sequence[Tensor]) -> list[float]:
        fitting = [float(sample.to(torch.float64).norm(2)) for sample in samples]
        return fitting if asked == lanes else measure(asked, samples)[:-1]

    monkeypatch.setattr(norms_module, "_norms_with", only_one_fits)
    way = segment_norms(CPU)
    assert isinstance(way, OrderedNorms)
    assert way._lanes == lanes


def test_the_measurement_tells_lanes_apart() -> None:
    """With the samples of the measurement no two lane counts give the same norms."""
    generator = torch.Generator().manual_seed(0)
    samples = [spread(numel, generator, -6, 6) for numel in (31, 255, 4099)]
    found = [tuple(norms_module._norms_with(lanes, samples)) for lanes in norms_module._LANES]
    assert len(set(found)) == len(norms_module._LANES)


@pytest.mark.usefixtures("measured_anew")
def test_default_device_and_dtype_do_not_matter() -> None:
    """They are the application's; measuring and norms stay on the buffer's device, in float64."""
    expected = segment_norms(CPU)
    buf, bounds = torch.tensor([3.0, 4.0]), bounds_of([2])
    norms_module._measured_lanes.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            way = segment_norms(CPU)
            _, norms = way(buf, bounds)
    finally:
        torch.set_default_dtype(torch.float32)
    assert type(way) is type(expected)
    assert norms.device == CPU
    assert norms.tolist() == [5.0]


def test_cuda_takes_the_tree() -> None:
    assert isinstance(segment_norms(torch.device("cuda", 0)), TreeNorms)


def test_tree_norms(device: torch.device, generator: torch.Generator) -> None:
    """Close to torch's norm to the last bits of float64, and the same at every call."""
    segments = [spread(numel, generator, -4, 2) for numel in (1, 5, 0, 300, 40_000)]
    buf = torch.cat(segments).to(device)
    bounds = bounds_of([segment.numel() for segment in segments])
    flag, norms = TreeNorms()(buf, bounds)
    assert norms.device == buf.device
    assert not flag
    expected = torch.stack([segment.double().norm(2) for segment in segments])
    torch.testing.assert_close(norms.cpu(), expected, rtol=1e-14, atol=0.0)
    oracle.assert_bits(TreeNorms()(buf, bounds)[1], norms)
