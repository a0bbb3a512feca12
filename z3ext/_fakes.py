"""Fakes: what the ops return, for torch.compile and FakeTensor.

A fake has no memory and no values to look at; of the ops' checks it makes the one that torch asks
of every fake, that the devices are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from z3ext._reference_checks import check_same_device, error
from z3ext._reference_pack_checks import check_grad_device


def _check_pack_devices(op: str, grads: Sequence[Tensor], bucket: Tensor, flag: Tensor) -> None:
    check_same_device(op, "flag", flag, "bucket", bucket)
    for i, grad in enumerate(grads):
        check_grad_device(op, i, grad, bucket)


def _flat_overflow(buf: Tensor) -> Tensor:
    return buf.new_empty((), dtype=torch.bool)


def _flat_overflow_(flag: Tensor, buf: Tensor) -> None:
    check_same_device("flat_overflow_", "flag", flag, "buf", buf)


def _pack_(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    bucket: Tensor,
    flag: Tensor,
    divisors: Sequence[float],
) -> None:
    _check_pack_devices("pack_", grads, bucket, flag)


def _pack_rows_(
    grads: Sequence[Tensor],
    chunk_offsets: Sequence[int],
    row_numel: int,
    world_size: int,
    bucket: Tensor,
    flag: Tensor,
    divisors: Sequence[float],
) -> None:
    _check_pack_devices("pack_rows_", grads, bucket, flag)


def _unpack_(
    bucket: Tensor,
    partitions: Tensor,
    src_offsets: Sequence[int],
    dst_offsets: Sequence[int],
    numels: Sequence[int],
    padded_numels: Sequence[int],
    multipliers: Sequence[float],
    accumulate: bool,
) -> None:
    check_same_device("unpack_", "partitions", partitions, "bucket", bucket)


def _segment_check(buf: Tensor, offsets: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    if offsets.device.type not in ("cpu", "meta"):
        raise error(
            "segment_check",
            f"offsets is on {offsets.device}; expected cpu; pass the n + 1 boundaries of the n "
            "segments",
        )
    sumsq = buf.new_empty((offsets.numel() - 1,), dtype=torch.float64)
    return buf.new_empty((), dtype=torch.bool), sumsq


def _unscale_(partition: Tensor, scale: Tensor, out: Tensor) -> None:
    check_same_device("unscale_", "out", out, "partition", partition)
    check_same_device("unscale_", "scale", scale, "partition", partition)


def _all_reduce_(buf: Tensor, group_name: str) -> None:
    pass


def _reduce_scatter_(input: Tensor, output: Tensor, group_name: str) -> None:
    check_same_device("reduce_scatter_", "output", output, "input", input)


def _first_node_hook(params: Sequence[Tensor]) -> int:
    return -1


FAKES: dict[str, Callable[..., object]] = {
    "flat_overflow": _flat_overflow,
    "flat_overflow_": _flat_overflow_,
    "pack_": _pack_,
    "pack_rows_": _pack_rows_,
    "unpack_": _unpack_,
    "segment_check": _segment_check,
    "unscale_": _unscale_,
    "all_reduce_": _all_reduce_,
    "reduce_scatter_": _reduce_scatter_,
    "first_node_hook": _first_node_hook,
}
