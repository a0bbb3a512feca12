"""One pure-torch function per op of z3ext: same signature, same bits, same errors.

They serve where no compiler is at hand (``Z3EXT_REFERENCE=1``) and run on any device. The contract
of each op (shapes, dtypes, rounding points) stands in ``docs/architecture.md``. Every argument is
checked before anything is written; a wrong one raises ``RuntimeError`` with the native op's text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from z3ext._reference_checks import (
    check_communicated,
    check_flag,
    check_readable,
    check_segments,
    check_unpack,
    check_unscale,
    check_writable,
    dtype_name,
    error,
)
from z3ext._reference_pack_checks import check_pack, check_pack_rows

# segment_check keeps a float64 running sum per element of a block; this bounds them to 8 MiB.
_BLOCK_NUMEL = 1 << 20


# --- the ops -------------------------------------------------------------------------------------


@torch.no_grad()
def flat_overflow(buf: Tensor) -> Tensor:
    """Whether ``buf`` (contiguous, any shape) holds an inf or a nan: 0-dim bool on its device."""
    check_readable("flat_overflow", buf)
    return _any_nonfinite(buf)


def flat_overflow_(flag: Tensor, buf: Tensor) -> None:
    """``flag |= flat_overflow(buf)``; ``flag`` is bool with one element on buf's device."""
    check_readable("flat_overflow_", buf)
    check_flag("flat_overflow_", flag, "buf", buf)
    with torch.no_grad():
        flag.logical_or_(_any_nonfinite(buf))


def pack_(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    bucket: Tensor,
    flag: Tensor,
    divisors: Sequence[float],
) -> None:
    """Cast each gradient to the bucket's dtype, divide it, store it at its offset, flag inf, nan.

    ``offsets`` count elements of ``bucket``; gradients are laid out in row-major order whatever
    their strides; each division rounds to the bucket's dtype.
    """
    check_pack(grads, offsets, bucket, flag, divisors)
    with torch.no_grad():
        for grad, offset in zip(grads, offsets, strict=True):
            place = bucket[offset : offset + grad.numel()]
            place.view(grad.shape).copy_(grad)
            for divisor in divisors:
                if divisor != 1.0:
                    place.div_(divisor)
            flag.logical_or_(_any_nonfinite(place))


def pack_rows_(
    grads: Sequence[Tensor],
    chunk_offsets: Sequence[int],
    row_numel: int,
    world_size: int,
    bucket: Tensor,
    flag: Tensor,
    divisors: Sequence[float],
) -> None:
    """``pack_`` into a bucket of ``world_size`` rows of ``row_numel`` elements, one for each rank.

    A gradient is cut into ``world_size`` chunks of ``ceil(numel / world_size)`` elements; chunk r
    stands at its ``chunk_offsets`` entry in row r. What a chunk has past the gradient's end is
    zeroed.
    """
    check_pack_rows(grads, chunk_offsets, row_numel, world_size, bucket, flag, divisors)
    with torch.no_grad():
        rows = bucket[: world_size * row_numel].view(world_size, row_numel)
        for grad, offset in zip(grads, chunk_offsets, strict=True):
            chunk = -(-grad.numel() // world_size)
            padded = bucket.new_zeros(world_size * chunk)
            values = padded[: grad.numel()]
            values.view(grad.shape).copy_(grad)
            for divisor in divisors:
                if divisor != 1.0:
                    values.div_(divisor)
            flag.logical_or_(_any_nonfinite(values))
            rows[:, offset : offset + chunk].copy_(padded.view(world_size, chunk))


def unpack_(
    bucket: Tensor,
    partitions: Tensor,
    src_offsets: Sequence[int],
    dst_offsets: Sequence[int],
    numels: Sequence[int],
    padded_numels: Sequence[int],
    multipliers: Sequence[float],
    accumulate: bool,
) -> None:
    """Copy slices of ``bucket`` into ``partitions`` and zero their padding, or add them.

    Offsets and numels count elements. Each multiplication rounds to the bucket's dtype; the cast to
    the partitions' dtype comes after. With ``accumulate`` the padding is left as it is.
    """
    slices = (src_offsets, dst_offsets, numels, padded_numels)
    check_unpack(bucket, partitions, *slices, multipliers)
    with torch.no_grad():
        for src, dst, numel, padded_numel in zip(*slices, strict=True):
            value = bucket[src : src + numel]
            for multiplier in multipliers:
                if multiplier != 1.0:
                    value = value * multiplier
            place = partitions[dst : dst + numel]
            if accumulate:
                place.add_(value.to(partitions.dtype))
            else:
                place.copy_(value)
                partitions[dst + numel : dst + padded_numel].zero_()


@torch.no_grad()
def segment_check(buf: Tensor, offsets: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    """``(flag, sumsq)``: 0-dim bool and float64 ``[n]`` for the n segments that ``offsets`` bound.

    On CPU the sum keeps the native op's order; on other devices it is torch's own float64 sum.
    """
    check_segments(buf, offsets, lanes)
    flat = buf.view(-1)
    sumsq = torch.zeros(offsets.numel() - 1, dtype=torch.float64, device=buf.device)
    for i, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        segment = flat[begin:end]
        if buf.device.type == "cpu":
            sumsq[i] = _sumsq_in_order(segment, lanes)
        else:
            sumsq[i] = segment.double().square().sum()
    return _any_nonfinite(buf), sumsq


def unscale_(partition: Tensor, scale: Tensor, out: Tensor) -> None:
    """``out = float32(partition) * float32(scale)``; ``out`` may be ``partition`` itself (fp32)."""
    check_unscale(partition, scale, out)
    with torch.no_grad():
        torch.mul(partition.float(), scale.reshape(()).float(), out=out)


def all_reduce_(buf: Tensor, group_name: str) -> None:
    """Sum ``buf`` in place over the process group with that name."""
    check_communicated("all_reduce_", "buf", buf)
    check_writable("all_reduce_", "buf", buf)
    group = _find_group("all_reduce_", group_name)
    with torch.no_grad():
        group.allreduce([buf]).wait()
    torch.autograd.graph.increment_version(buf)


def reduce_scatter_(input: Tensor, output: Tensor, group_name: str) -> None:
    """Sum ``input`` over the group and store this rank's row of it in ``output``."""
    op = "reduce_scatter_"
    check_communicated(op, "input", input)
    check_communicated(op, "output", output)
    check_writable(op, "output", output)
    group = _find_group(op, group_name)
    if input.numel() != output.numel() * group.size():
        raise error(
            op,
            f"input has {input.numel()} elements and output {output.numel()} in a group of "
            f"{group.size()} ranks; expected input = output * ranks; pad the input",
        )
    if input.dtype != output.dtype or input.device != output.device:
        raise error(
            op,
            f"input is {dtype_name(input.dtype)} on {input.device} but output is "
            f"{dtype_name(output.dtype)} on {output.device}; expected the same dtype and device; "
            "allocate output like input",
        )
    with torch.no_grad():
        group._reduce_scatter_base(output, input, dist.ReduceScatterOptions()).wait()
    torch.autograd.graph.increment_version(output)


# --- arithmetic ----------------------------------------------------------------------------------


def first_node_hook(params: Sequence[Tensor]) -> int:
    """-1: Python cannot ask for the hooks of an AccumulateGrad node."""
    return -1


def _any_nonfinite(values: Tensor) -> Tensor:
    return torch.isfinite(values).all().logical_not_()


def _sumsq_in_order(segment: Tensor, lanes: int) -> Tensor:
    """Sum of squares by ``lanes`` interleaved accumulators, then their sum, then the tail.

    torch's CPU cumsum adds float64 one after the other, which is the order that is wanted; sum()
    would add pairwise. The tests compare it with a plain loop.
    """
    main = segment.numel() - segment.numel() % lanes
    sums = torch.zeros(lanes, dtype=torch.float64)
    for block in torch.split(segment[:main], _BLOCK_NUMEL):  # a multiple of every lane count
        squares = block.double().square().view(-1, lanes)
        sums = torch.cat((sums.view(1, lanes), squares)).cumsum(0)[-1]
    return torch.cat((sums, segment[main:].double().square())).cumsum(0)[-1]


def _find_group(op: str, group_name: str) -> dist.ProcessGroup:
    # There is no public way from a name to its group.
    c10d: Any = dist.distributed_c10d
    try:
        group: dist.ProcessGroup = c10d._resolve_process_group(group_name)
    except RuntimeError as cause:
        raise error(
            op,
            f"group_name '{group_name}' names no live process group; expected the group_name of "
            "an initialised group; call torch.distributed.init_process_group first, and make a "
            "new engine after destroy_process_group",
        ) from cause
    return group
