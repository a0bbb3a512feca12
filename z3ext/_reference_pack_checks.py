"""The argument checks of the pure-torch pack_ and pack_rows_, with the native ops' texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from z3ext._reference_checks import (
    STORED,
    check_disjoint,
    check_factors,
    check_flag,
    check_flat_storage,
    check_same_length,
    check_writable,
    dtype_name,
    error,
    shares_memory,
)

_MOST_RANKS = 2**31 - 1


def check_grad_device(op: str, i: int, grad: Tensor, bucket: Tensor) -> None:
    if grad.device != bucket.device:
        raise error(
            op,
            f"grads[{i}] is on {grad.device} but bucket is on {bucket.device}; "
            "move the gradient to the bucket's device",
        )


def _check_gradient(op: str, i: int, grad: Tensor, bucket: Tensor) -> None:
    if grad.layout != torch.strided:
        raise error(
            op,
            f"grads[{i}] is sparse; expected a dense gradient; use a dense layer (ZeRO stage 3 "
            "reduces no sparse gradients)",
        )
    check_grad_device(op, i, grad, bucket)
    if grad.dtype not in STORED:
        raise error(
            op,
            f"grads[{i}] is {dtype_name(grad.dtype)}; expected float16, bfloat16 or float32; "
            "cast it first",
        )


def _check_apart(op: str, grads: Sequence[Tensor], bucket: Tensor) -> None:
    for i, grad in enumerate(grads):
        if shares_memory(grad, bucket):
            raise error(
                op,
                f"grads[{i}] shares memory with bucket; expected separate memory; "
                "pass a clone of the gradient",
            )


def check_pack(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    bucket: Tensor,
    flag: Tensor,
    divisors: Sequence[float],
) -> None:
    op = "pack_"
    check_same_length(op, "grads", grads, "offsets", offsets)
    check_flat_storage(op, "bucket", bucket)
    check_writable(op, "bucket", bucket)
    check_flag(op, flag, "bucket", bucket)
    check_factors(op, "divisors", divisors, is_divisor=True)
    for i, (grad, offset) in enumerate(zip(grads, offsets, strict=True)):
        _check_gradient(op, i, grad, bucket)
        if offset < 0:
            raise error(
                op,
                f"offsets[{i}] is {offset}; expected 0 or more; "
                "pass the element where the gradient begins",
            )
        if grad.numel() > bucket.numel() - offset:
            raise error(
                op,
                f"grads[{i}] has {grad.numel()} elements at offset {offset} but bucket has "
                f"{bucket.numel()} elements; pass a larger bucket",
            )
    sizes = [grad.numel() for grad in grads]

    def describe(i: int, j: int) -> str:
        return (
            f"grads[{i}] at [{offsets[i]}, {offsets[i] + sizes[i]}) overlaps grads[{j}] at "
            f"[{offsets[j]}, {offsets[j] + sizes[j]}); give every gradient a place of its own"
        )

    check_disjoint(op, offsets, sizes, describe)
    _check_apart(op, grads, bucket)


def check_pack_rows(
    grads: Sequence[Tensor],
    chunk_offsets: Sequence[int],
    row_numel: int,
    world_size: int,
    bucket: Tensor,
    flag: Tensor,
    divisors: Sequence[float],
) -> None:
    op = "pack_rows_"
    check_same_length(op, "grads", grads, "chunk_offsets", chunk_offsets)
    check_flat_storage(op, "bucket", bucket)
    check_writable(op, "bucket", bucket)
    check_flag(op, flag, "bucket", bucket)
    check_factors(op, "divisors", divisors, is_divisor=True)
    if not 1 <= world_size <= _MOST_RANKS:
        raise error(
            op,
            f"world_size is {world_size}; expected 1 to {_MOST_RANKS}; "
            "pass the number of ranks that share the bucket",
        )
    if row_numel < 0:
        raise error(
            op,
            f"row_numel is {row_numel}; expected 0 or more; pass the elements of one rank's row",
        )
    if row_numel * world_size > bucket.numel():
        raise error(
            op,
            f"row_numel is {row_numel} and world_size is {world_size} but bucket has "
            f"{bucket.numel()} elements; expected at least row_numel * world_size; "
            "pass a larger bucket",
        )
    chunks = [-(-grad.numel() // world_size) for grad in grads]
    for i, (grad, offset) in enumerate(zip(grads, chunk_offsets, strict=True)):
        _check_gradient(op, i, grad, bucket)
        if offset < 0:
            raise error(
                op,
                f"chunk_offsets[{i}] is {offset}; expected 0 or more; "
                "pass the element of a row where the gradient's chunk begins",
            )
        if offset + chunks[i] > row_numel:
            raise error(
                op,
                f"grads[{i}] has chunks of {chunks[i]} elements at offset {offset} but a row has "
                f"{row_numel} elements; pass a larger row_numel",
            )

    def describe(i: int, j: int) -> str:
        return (
            f"grads[{i}] at [{chunk_offsets[i]}, {chunk_offsets[i] + chunks[i]}) of a row overlaps "
            f"grads[{j}] at [{chunk_offsets[j]}, {chunk_offsets[j] + chunks[j]}); "
            "give every gradient a place of its own"
        )

    check_disjoint(op, chunk_offsets, chunks, describe)
    _check_apart(op, grads, bucket)
