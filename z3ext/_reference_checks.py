"""The argument checks of the pure-torch reference, with the native ops' texts.

Each check runs before its op writes anything. A text names the op, the argument and its index, the
value found, the value expected and the remedy. pack_ and pack_rows_ have theirs in
_reference_pack_checks.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STORED = (torch.float16, torch.bfloat16, torch.float32)
_READABLE = (*STORED, torch.float64)
_MAX_FACTORS = 4
_LANES = (1, 2, 4, 8)
_FLOAT32_LARGEST = torch.finfo(torch.float32).max
_FLOAT32_SMALLEST = 2.0**-149  # subnormal


def error(op: str, text: str) -> RuntimeError:
    return RuntimeError(f"z3ext::{op}: {text}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_dense(op: str, name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise error(op, f"{name} is sparse; expected a dense tensor; pass its dense form")


def check_readable(op: str, buf: Tensor) -> None:
    check_dense(op, "buf", buf)
    if buf.dtype not in _READABLE:
        raise error(
            op,
            f"buf is {dtype_name(buf.dtype)}; expected float16, bfloat16, float32 or float64; "
            "cast it first",
        )
    if not buf.is_contiguous():
        raise error(
            op, "buf is not contiguous; expected a contiguous tensor; pass buf.contiguous()"
        )


def check_flat_storage(op: str, name: str, tensor: Tensor) -> None:
    check_dense(op, name, tensor)
    if tensor.dtype not in STORED:
        raise error(
            op,
            f"{name} is {dtype_name(tensor.dtype)}; expected float16, bfloat16 or float32; "
            "cast it first",
        )
    if tensor.dim() != 1:
        raise error(op, f"{name} has {tensor.dim()} dimensions; expected 1; pass {name}.view(-1)")
    if not tensor.is_contiguous():
        raise error(
            op,
            f"{name} is not contiguous (stride {tensor.stride(0)}); expected a contiguous tensor; "
            "pass a contiguous buffer",
        )


def check_same_device(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise error(
            op,
            f"{name} is on {tensor.device} but {other_name} is on {other.device}; "
            "move both to one device",
        )


def check_writable(op: str, name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise error(
            op,
            f"{name} requires grad, and the op writes to it; expected a tensor that autograd does "
            f"not follow; pass {name}.detach(), or call the op under torch.no_grad()",
        )


def check_flag(op: str, flag: Tensor, other_name: str, other: Tensor) -> None:
    check_dense(op, "flag", flag)
    remedy = "make it with torch.zeros((), dtype=torch.bool)"
    if flag.dtype != torch.bool:
        raise error(op, f"flag is {dtype_name(flag.dtype)}; expected bool; {remedy}")
    if flag.numel() != 1:
        raise error(op, f"flag has {flag.numel()} elements; expected 1; {remedy}")
    check_same_device(op, "flag", flag, other_name, other)
    check_writable(op, "flag", flag)
    if shares_memory(flag, other):
        raise error(
            op,
            f"flag shares memory with {other_name}; expected separate memory; {remedy}",
        )


def check_factors(op: str, name: str, factors: Sequence[float], *, is_divisor: bool) -> None:
    if len(factors) > _MAX_FACTORS:
        raise error(
            op,
            f"got {len(factors)} {name}; expected at most {_MAX_FACTORS}; "
            "apply the others before the call",
        )
    for i, factor in enumerate(factors):
        # Kernels take factors as float32: 1e300 is inf there, and 1e-60 is zero.
        usable = _FLOAT32_SMALLEST if is_divisor else 0.0
        if not usable <= abs(factor) <= _FLOAT32_LARGEST:
            raise error(
                op,
                f"{name}[{i}] is {factor:g}; expected a finite{' non-zero' * is_divisor} float32; "
                "check the world size and the predivide factor",
            )


def check_same_length(
    op: str, name: str, items: Sequence[object], other_name: str, others: Sequence[object]
) -> None:
    if len(items) != len(others):
        raise error(
            op, f"got {len(items)} {name} but {len(others)} {other_name}; pass one for each"
        )


def check_disjoint(
    op: str, begins: Sequence[int], sizes: Sequence[int], describe: Callable[[int, int], str]
) -> None:
    """No two half-open ranges overlap; ``describe(later index, earlier index)`` names a pair."""
    order = sorted((i for i in range(len(begins)) if sizes[i]), key=lambda i: begins[i])
    for before, after in itertools.pairwise(order):
        if begins[after] < begins[before] + sizes[before]:
            raise error(op, describe(max(before, after), min(before, after)))


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the byte ranges that two strided tensors span overlap."""
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False

    def end(tensor: Tensor) -> int:
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        return tensor.data_ptr() + (last + 1) * tensor.element_size()

    return a.data_ptr() < end(b) and b.data_ptr() < end(a)


def check_unpack(
    bucket: Tensor,
    partitions: Tensor,
    src_offsets: Sequence[int],
    dst_offsets: Sequence[int],
    numels: Sequence[int],
    padded_numels: Sequence[int],
    multipliers: Sequence[float],
) -> None:
    op = "unpack_"
    check_same_length(op, "src_offsets", src_offsets, "dst_offsets", dst_offsets)
    check_same_length(op, "src_offsets", src_offsets, "numels", numels)
    check_same_length(op, "src_offsets", src_offsets, "padded_numels", padded_numels)
    check_flat_storage(op, "bucket", bucket)
    check_flat_storage(op, "partitions", partitions)
    check_same_device(op, "partitions", partitions, "bucket", bucket)
    check_writable(op, "partitions", partitions)
    check_factors(op, "multipliers", multipliers, is_divisor=False)
    if shares_memory(bucket, partitions):
        raise error(
            op,
            "partitions shares memory with bucket; expected separate memory; "
            "allocate partitions apart from the bucket",
        )
    for i, (src, dst, numel, padded_numel) in enumerate(
        zip(src_offsets, dst_offsets, numels, padded_numels, strict=True)
    ):
        if not 0 <= numel <= padded_numel:
            raise error(
                op,
                f"numels[{i}] is {numel} and padded_numels[{i}] is {padded_numel}; expected "
                "0 <= numels[i] <= padded_numels[i]; pass the partition's numel as padded_numels",
            )
        if src < 0 or numel > bucket.numel() - src:
            raise error(
                op,
                f"slice {i} begins at src_offsets[{i}] = {src} with {numel} elements but bucket "
                f"has {bucket.numel()} elements; pass offsets inside the bucket",
            )
        if dst < 0 or padded_numel > partitions.numel() - dst:
            raise error(
                op,
                f"slice {i} begins at dst_offsets[{i}] = {dst} with {padded_numel} padded elements "
                f"but partitions has {partitions.numel()} elements; pass offsets inside partitions",
            )

    def describe(i: int, j: int) -> str:
        return (
            f"slice {i} at [{dst_offsets[i]}, {dst_offsets[i] + padded_numels[i]}) of partitions "
            f"overlaps slice {j} at [{dst_offsets[j]}, {dst_offsets[j] + padded_numels[j]}); "
            "give every slice a place of its own"
        )

    check_disjoint(op, dst_offsets, padded_numels, describe)


def check_segments(buf: Tensor, offsets: Tensor, lanes: int) -> None:
    op = "segment_check"
    check_readable(op, buf)
    if lanes not in _LANES:
        raise error(
            op,
            f"lanes is {lanes}; expected 1, 2, 4 or 8; "
            "pass 1 when the summation order is of no concern",
        )
    check_dense(op, "offsets", offsets)
    if (
        offsets.dtype != torch.int64
        or offsets.device.type != "cpu"
        or offsets.dim() != 1
        or offsets.numel() < 1
        or not offsets.is_contiguous()
    ):
        raise error(
            op,
            f"offsets is {dtype_name(offsets.dtype)} on {offsets.device} with {offsets.dim()} "
            f"dimensions and {offsets.numel()} elements; expected a contiguous 1-D int64 tensor "
            "on cpu with at least 1 element; pass the n + 1 boundaries of the n segments",
        )
    bounds: list[int] = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != buf.numel():
        raise error(
            op,
            f"offsets run from {bounds[0]} to {bounds[-1]}; expected 0 to {buf.numel()}, "
            "the elements of buf; every element belongs to one segment",
        )
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if end < begin:
            raise error(
                op,
                f"offsets[{i + 1}] is {end}, below offsets[{i}] = {begin}; "
                "expected non-decreasing offsets; sort the segments",
            )


def check_unscale(partition: Tensor, scale: Tensor, out: Tensor) -> None:
    op = "unscale_"
    check_flat_storage(op, "partition", partition)
    check_flat_storage(op, "out", out)
    if out.dtype != torch.float32:
        raise error(
            op, f"out is {dtype_name(out.dtype)}; expected float32; allocate out as float32"
        )
    if out.numel() != partition.numel():
        raise error(
            op,
            f"out has {out.numel()} elements but partition has {partition.numel()}; "
            "expected the same number; allocate out like partition",
        )
    check_same_device(op, "out", out, "partition", partition)
    check_dense(op, "scale", scale)
    if scale.dtype not in (torch.float32, torch.float64):
        raise error(
            op, f"scale is {dtype_name(scale.dtype)}; expected float32 or float64; cast it first"
        )
    if scale.numel() != 1:
        raise error(
            op,
            f"scale has {scale.numel()} elements; expected 1; "
            "pass one factor for the whole partition",
        )
    check_same_device(op, "scale", scale, "partition", partition)
    check_writable(op, "out", out)
    if shares_memory(scale, out):
        raise error(
            op,
            "scale shares memory with out; expected separate memory; pass a clone of scale",
        )
    same = partition.dtype == torch.float32 and partition.data_ptr() == out.data_ptr()
    if not same and shares_memory(partition, out):
        raise error(
            op,
            "out overlaps partition in part; expected the same float32 memory or separate memory; "
            "pass partition itself or a new tensor",
        )


def check_communicated(op: str, name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise error(
            op,
            f"{name} is not a dense contiguous tensor; expected one; pass {name}.contiguous()",
        )
    if not tensor.is_floating_point():
        raise error(
            op,
            f"{name} is {dtype_name(tensor.dtype)}; expected a floating-point tensor; "
            "cast it first",
        )
