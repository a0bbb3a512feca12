"""Fakes: what the ops return, for torch.compile and FakeTensor.

A fake has no memory and no values to look at; of the ops' checks it makes the one that torch asks
of every fake, that the devices are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _check_devices(op: str, name: str, tensor: Tensor, **others: Tensor) -> None:
    for other_name, other in others.items():
        if other.device != tensor.device:
            raise RuntimeError(
                f"z3ext::{op}: {other_name} is on {other.device} but {name} is on "
                f"{tensor.device}; move both to one device"
            )


def _check_grads(op: str, grads: Sequence[Tensor], bucket: Tensor) -> None:
    for i, grad in enumerate(grads):
        if grad.device != bucket.device:
            raise RuntimeError(
                f"z3ext::{op}: grads[{i}] is on {grad.device} but bucket is on {bucket.device}; "
                "move the gradient to the bucket's device"
            )


def _flat_overflow(buf: Tensor) -> Tensor:
    return buf.new_empty((), dtype=torch.bool)


def _flat_overflow_(flag: Tensor, buf: Tensor) -> None:
    _check_devices("flat_overflow_", "buf", buf, flag=flag)


def _pack_(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    bucket: Tensor,
    flag: Tensor,
    divisors: Sequence[float],
) -> None:
    _check_devices("pack_", "bucket", bucket, flag=flag)
    _check_grads("pack_", grads, bucket)


def _pack_rows_(
    grads: Sequence[Tensor],
    chunk_offsets: Sequence[int],
    row_numel: int,
    world_size: int,
    bucket: Tensor,
    flag: Tensor,
    divisors: Sequence[float],
) -> None:
    _check_devices("pack_rows_", "bucket", bucket, flag=flag)
    _check_grads("pack_rows_", grads, bucket)


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
    _check_devices("unpack_", "bucket", bucket, partitions=partitions)


def _segment_check(buf: Tensor, offsets: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    if offsets.device.type not in ("cpu", "meta"):
        raise RuntimeError(
            f"z3ext::segment_check: offsets is on {offsets.device}; expected cpu; pass the n + 1 "
            "boundaries of the n segments"
        )
    sumsq = buf.new_empty((offsets.numel() - 1,), dtype=torch.float64)
    return buf.new_empty((), dtype=torch.bool), sumsq


def _unscale_(partition: Tensor, scale: Tensor, out: Tensor) -> None:
    _check_devices("unscale_", "partition", partition, out=out, scale=scale)


def _all_reduce_(buf: Tensor, group_name: str) -> None:
    pass


def _reduce_scatter_(input: Tensor, output: Tensor, group_name: str) -> None:
    _check_devices("reduce_scatter_", "input", input, output=output)


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
}
