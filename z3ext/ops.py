"""Typed functions over ``torch.ops.z3ext``; docs/architecture.md has each op's contract.

Offsets and numels count elements. Every function raises ``RuntimeError`` for a wrong argument, with
a text that names the op, the argument and its index, the value found, the value expected and the
remedy; nothing is written then. The first call loads the native library (see z3ext._library).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor


def flat_overflow(buf: Tensor) -> Tensor:
    """Whether a contiguous fp16, bf16, fp32 or fp64 tensor holds an inf or a nan: 0-dim bool."""
    return cast(Tensor, torch.ops.z3ext.flat_overflow(buf))


def flat_overflow_(flag: Tensor, buf: Tensor) -> None:
    """``flag |= flat_overflow(buf)``; ``flag`` is bool with one element on buf's device."""
    torch.ops.z3ext.flat_overflow_(flag, buf)


def pack_(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    bucket: Tensor,
    flag: Tensor,
    divisors: Sequence[float],
) -> None:
    """Store each gradient at its offset of a flat bucket: cast to its dtype, then divided.

    ``grads``: fp16, bf16 or fp32, any strides. ``bucket``: 1-D contiguous fp16, bf16 or fp32.
    ``flag`` (bool, one element) is set when a stored value is inf or nan.
    """
    torch.ops.z3ext.pack_(grads, offsets, bucket, flag, divisors)


def pack_rows_(
    grads: Sequence[Tensor],
    chunk_offsets: Sequence[int],
    row_numel: int,
    world_size: int,
    bucket: Tensor,
    flag: Tensor,
    divisors: Sequence[float],
) -> None:
    """``pack_`` for a reduce-scatter: the bucket is ``world_size`` rows of ``row_numel`` elements.

    Each gradient is cut into ``world_size`` chunks of ``ceil(numel / world_size)`` elements. Chunk
    r goes to row r at the gradient's ``chunk_offsets`` entry; past the gradient's end it is zeros.
    Elements that belong to no chunk are left as they are, so that several calls can fill a bucket.
    """
    torch.ops.z3ext.pack_rows_(grads, chunk_offsets, row_numel, world_size, bucket, flag, divisors)


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
    """Copy slices of a bucket into the flat partitions and zero their padding, or add them.

    ``bucket`` and ``partitions``: 1-D contiguous, each of fp16, bf16 or fp32, apart in memory.
    """
    torch.ops.z3ext.unpack_(
        bucket,
        partitions,
        src_offsets,
        dst_offsets,
        numels,
        padded_numels,
        multipliers,
        accumulate,
    )


def segment_check(buf: Tensor, offsets: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    """Overflow flag (0-dim bool) and the float64 sum of squares of each segment, in one read.

    ``offsets``: the n + 1 boundaries, int64 on CPU. ``lanes``: the order of the sum on CPU, see
    z3ext.norms.
    """
    return cast("tuple[Tensor, Tensor]", torch.ops.z3ext.segment_check(buf, offsets, lanes))


def unscale_(partition: Tensor, scale: Tensor, out: Tensor) -> None:
    """``out = float32(partition) * float32(scale)``; ``scale`` is one element on its device."""
    torch.ops.z3ext.unscale_(partition, scale, out)


def all_reduce_(buf: Tensor, group_name: str) -> None:
    """Sum a contiguous buffer in place over the c10d group with that name."""
    torch.ops.z3ext.all_reduce_(buf, group_name)


def reduce_scatter_(input: Tensor, output: Tensor, group_name: str) -> None:
    """Sum ``input`` over the group; ``output`` gets this rank's row of it."""
    torch.ops.z3ext.reduce_scatter_(input, output, group_name)


def first_node_hook(params: Sequence[Tensor]) -> int:
    """Index of the first parameter with a hook on its AccumulateGrad node; -1 when there is none.

    Post hooks alone: those that run once the gradient is complete. The pure-torch reference cannot
    see them and returns -1.
    """
    return cast(int, torch.ops.z3ext.first_node_hook(params))
