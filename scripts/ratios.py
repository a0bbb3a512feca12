"""Kernel times against stock DeepSpeed's torch expressions: CPU, one thread, one process.

Every round times stock's way and z3ext's way one after the other, so that a noisy machine disturbs
both alike. A ratio is taken within a round; the table has the median and the range of the rounds.
Prints a markdown table. ``--check`` also enforces flat_overflow's two targets.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import z3ext  # noqa: F401  (puts the ops at torch.ops.z3ext)
from z3ext import memory, norms

OVERFLOW_NUMEL = 50_000_000
SMALLEST_RATIO = 25.0  # flat_overflow: how many times as fast as stock
LARGEST_OF_READ = 1.5  # flat_overflow: its time over that of the fastest plain read

_WORLD = 2
_LOSS_SCALE = 1024.0
_REPEATS = 5  # of the faster way, per round
_ABSENT_WORD = 0x7F807F80  # two fp16 nans: no finite buffer has it, so a search reads everything


@dataclass(frozen=True)
class Kernel:
    """One row of the table.

    Attributes:
        name: the op.
        stock: what stock DeepSpeed does, in words.
        bytes: that must move at the least: every input read once, every output written once.
        run_stock, run_z3ext: one call of either way.
    """

    name: str
    stock: str
    bytes: int
    run_stock: Callable[[], object]
    run_z3ext: Callable[[], object]


@dataclass(frozen=True)
class Measurement:
    """Seconds of both ways, one value per round."""

    kernel: Kernel
    stock: list[float]
    z3ext: list[float]

    @property
    def ratios(self) -> list[float]:
        return [before / after for before, after in zip(self.stock, self.z3ext, strict=True)]


def bert_shapes(
    layers: int = 12, hidden: int = 768, vocabulary: int = 30_522, positions: int = 512
) -> list[tuple[int, ...]]:
    """The shapes of BERT's parameters, by default those of the base model (110 million)."""
    norm = [(hidden,), (hidden,)]
    square = [(hidden, hidden), (hidden,)]
    layer = [*square * 4, *norm, (4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden)]
    layer += [(hidden,), *norm]
    embeddings = [(vocabulary, hidden), (positions, hidden), (2, hidden), *norm]
    return [*embeddings, *layer * layers, *square, *norm, (vocabulary,)]


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The median time of ``repeats`` calls."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure(kernel: Kernel, rounds: int) -> Measurement:
    """Times both ways in turn, after one call of each that is not counted."""
    kernel.run_stock()
    kernel.run_z3ext()
    stock, served = [], []
    for _ in range(rounds):
        stock.append(seconds(kernel.run_stock, 1))
        served.append(seconds(kernel.run_z3ext, _REPEATS))
    return Measurement(kernel, stock, served)


# --- the kernels ---------------------------------------------------------------------------------


def overflow_kernel(buf: Tensor) -> Kernel:
    """``buf``: finite fp16."""
    return Kernel(
        name="flat_overflow",
        stock="`isinf(b).any() \\| isnan(b).any()`",
        bytes=buf.numel() * buf.element_size(),
        run_stock=lambda: torch.isinf(buf).any() | torch.isnan(buf).any(),
        run_z3ext=lambda: torch.ops.z3ext.flat_overflow(buf),
    )


def pack_kernel(grads: Sequence[Tensor]) -> Kernel:
    """``grads``: fp32, packed into an fp16 bucket and divided by the world size."""
    numels = [grad.numel() for grad in grads]
    offsets = list(itertools.accumulate(numels[:-1], initial=0))
    bucket = torch.zeros(sum(numels), dtype=torch.float16)
    flag = torch.zeros((), dtype=torch.bool)

    def stock() -> None:
        for grad, offset in zip(grads, offsets, strict=True):
            bucket.narrow(0, offset, grad.numel()).view_as(grad).copy_(grad)
        bucket.div_(float(_WORLD))

    return Kernel(
        name="pack_ (fp32 to fp16, one division)",
        stock="`copy_` for each gradient, `div_`",
        bytes=sum(numels) * (4 + 2),
        run_stock=stock,
        run_z3ext=lambda: torch.ops.z3ext.pack_(grads, offsets, bucket, flag, [float(_WORLD)]),
    )


def check_kernel(partitions: Sequence[Tensor], flat: Tensor) -> Kernel:
    """``partitions``: one rank's fp16 partitions, consecutive views of ``flat``."""
    ends = itertools.accumulate((part.numel() for part in partitions), initial=0)
    bounds = torch.tensor(list(ends))
    policy = norms.segment_norms(flat.device)

    def stock() -> Tensor:
        flag = torch.isinf(flat).any() | torch.isnan(flat).any()
        each = [part.to(torch.float64).norm(2) for part in partitions]
        return torch.where(flag, -1.0, torch.stack(each).pow(2).sum())

    return Kernel(
        name="segment_check (overflow and norms)",
        stock="as flat_overflow, then `double().norm(2)` for each partition",
        bytes=flat.numel() * flat.element_size(),
        run_stock=stock,
        run_z3ext=lambda: policy(flat, bounds),
    )


def unscale_kernel(partitions: Sequence[Tensor], flat: Tensor) -> Kernel:
    """``partitions``: one rank's fp16 partitions, consecutive views of ``flat``."""
    scale = torch.tensor(1.0 / _LOSS_SCALE)
    weights = torch.empty(flat.numel(), dtype=torch.float32)

    def served() -> None:
        # Training allocates the fp32 gradient in every step, as stock does.
        out = memory.empty_like(weights)
        torch.ops.z3ext.unscale_(flat, scale, out)

    return Kernel(
        name="unscale_ (fp16 to fp32)",
        stock="flatten, cast, `mul_`",
        bytes=flat.numel() * (2 + 4),
        run_stock=lambda: torch.cat(list(partitions)).to(torch.float32).mul_(1.0 / _LOSS_SCALE),
        run_z3ext=served,
    )


def kernels(generator: torch.Generator) -> Iterator[Kernel]:
    """Every row; each kernel's data is made when it is reached."""
    yield overflow_kernel(_finite_half(OVERFLOW_NUMEL, generator))
    shapes = bert_shapes()
    yield pack_kernel([torch.randn(shape, generator=generator) for shape in shapes])
    numels = [-(-torch.Size(shape).numel() // _WORLD) for shape in shapes]
    flat = _finite_half(sum(numels), generator)
    partitions = torch.split(flat, numels)
    yield check_kernel(partitions, flat)
    yield unscale_kernel(partitions, flat)


def _finite_half(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=generator).half()


# --- the fastest plain read ----------------------------------------------------------------------


def plain_reads(buf: Tensor) -> dict[str, Callable[[], object]]:
    """Ways to read every byte of ``buf`` once and keep nothing; its size is a multiple of 8."""
    int64, int32, fp32 = (buf.view(d) for d in (torch.int64, torch.int32, torch.float32))
    numbers = int64.numpy()
    libc = ctypes.CDLL(None)
    address = ctypes.c_void_p(buf.data_ptr())
    size = buf.numel() * buf.element_size()
    # Without a type ctypes would cut a returned pointer to an int: harmless, but say it right.
    libc.wmemchr.restype = ctypes.c_void_p
    return {
        "torch sum of int64": lambda: int64.sum(),
        "torch max of int64": lambda: int64.max(),
        "torch max of int32": lambda: int32.max(),
        "torch amax of fp32": lambda: fp32.amax(),
        "numpy sum of int64": lambda: numbers.sum(),
        "numpy max of int64": lambda: numbers.max(),
        "C memcmp with itself": lambda: libc.memcmp(address, address, ctypes.c_size_t(size)),
        "C wmemchr, absent word": lambda: libc.wmemchr(
            address, ctypes.c_int32(_ABSENT_WORD), ctypes.c_size_t(size // 4)
        ),
    }


def compare_reads(buf: Tensor, rounds: int) -> tuple[str, list[float]]:
    """``(name, ratios)``: the fastest read, and flat_overflow's time over it in each round."""
    reads = plain_reads(buf)
    taken: dict[str, list[float]] = {name: [] for name in reads}
    checked = []
    for _ in range(rounds):
        checked.append(seconds(lambda: torch.ops.z3ext.flat_overflow(buf), _REPEATS))
        for name, run in reads.items():
            taken[name].append(seconds(run, _REPEATS))
    fastest = min(reads, key=lambda name: statistics.median(taken[name]))
    return fastest, [own / read for own, read in zip(checked, taken[fastest], strict=True)]


# --- the report ----------------------------------------------------------------------------------


def _spread(values: Sequence[float], digits: int) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def row(found: Measurement) -> str:
    """One line of the markdown table."""
    kernel, own = found.kernel, statistics.median(found.z3ext)
    cells = (
        kernel.name,
        kernel.stock,
        f"{kernel.bytes / 1e6:.0f}",
        f"{1e3 * statistics.median(found.stock):.1f}",
        f"{1e3 * own:.1f}",
        f"{kernel.bytes / own / 1e9:.1f}",
        _spread(found.ratios, 1),
    )
    return f"| {' | '.join(cells)} |"


HEADER = """\
| op | stock | MB that must move | stock, ms | z3ext, ms | z3ext, GB/s | times as fast (range) |
|---|---|---:|---:|---:|---:|---:|"""


def check_overflow(rounds: int, generator: torch.Generator) -> list[str]:
    """The targets of flat_overflow that were missed, in words; prints what was measured."""
    buf = _finite_half(OVERFLOW_NUMEL, generator)
    ratio = statistics.median(measure(overflow_kernel(buf), rounds).ratios)
    name, ratios = compare_reads(buf, rounds)
    of_read = statistics.median(ratios)
    print(f"flat_overflow: {ratio:.1f} times as fast as stock (at least {SMALLEST_RATIO:g})")
    print(f"flat_overflow: {of_read:.2f} times as long as {name} (at most {LARGEST_OF_READ:g})")
    missed = []
    if ratio < SMALLEST_RATIO:
        missed.append(f"only {ratio:.1f} times as fast as stock, not {SMALLEST_RATIO:g}")
    if of_read > LARGEST_OF_READ:
        missed.append(f"{of_read:.2f} times as long as {name}, not {LARGEST_OF_READ:g}")
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, or with ``--check`` the two targets; 1 when one of those is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each comparison")
    parser.add_argument("--check", action="store_true", help="only check flat_overflow's targets")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    if options.check:
        missed = check_overflow(options.rounds, generator)
        for text in missed:
            print(f"MISSED: flat_overflow is {text}", file=sys.stderr)
        return 1 if missed else 0
    print(HEADER)
    for kernel in kernels(generator):
        print(row(measure(kernel, options.rounds)), flush=True)
    name, ratios = compare_reads(_finite_half(OVERFLOW_NUMEL, generator), options.rounds)
    print(f"\nflat_overflow takes {_spread(ratios, 2)} times as long as the fastest plain")
    print(f"read of the same bytes ({name}).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
