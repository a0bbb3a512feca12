"""pack_: lists of gradients, their strides, and the flag."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from inputs import NONFINITE, STORED, draw, name, new_flag, places, poisoned
from test_pack import check_pack


def test_empty_list(ops: Any, device: torch.device) -> None:
    check_pack(ops, [], [], poisoned(7, torch.float16, device), [2.0])
    check_pack(ops, [], [], poisoned(0, torch.float16, device))


@pytest.mark.parametrize("empty_at", [(0,), (1,), (3,), (0, 1, 3), (0, 1, 2, 3)])
def test_empty_tensors(
    ops: Any, device: torch.device, empty_at: tuple[int, ...], generator: torch.Generator
) -> None:
    sizes = [0 if i in empty_at else 20 + i for i in range(4)]
    grads = [draw(size, torch.bfloat16, generator).to(device) for size in sizes]
    offsets, end = places(sizes)
    check_pack(ops, grads, offsets, poisoned(end, torch.float16, device), [3.0])


def test_empty_tensor_inside_another_place(ops: Any, device: torch.device) -> None:
    """Nothing is stored for it, so it overlaps nothing; the end of the bucket is a place too."""
    grads = [torch.ones(10, device=device), *(torch.ones(0, 4, device=device) for _ in range(2))]
    check_pack(ops, grads, [0, 5, 10], poisoned(10, torch.float32, device))


def test_many_tensors_of_mixed_dtypes(
    ops: Any, device: torch.device, generator: torch.Generator
) -> None:
    """More tensors than one launch's table could hold, laid out in random order."""
    sizes = torch.randint(0, 60, (1000,), generator=generator).tolist()
    grads = [draw(size, STORED[i % 3], generator).to(device) for i, size in enumerate(sizes)]
    offsets, end = places(sizes, gap=1)
    order = torch.randperm(1000, generator=generator).tolist()
    check_pack(
        ops,
        [grads[i] for i in order],
        [offsets[i] for i in order],
        poisoned(end, torch.float16, device),
        [4.0],
    )


def test_adjacent_tensors(ops: Any, device: torch.device, generator: torch.Generator) -> None:
    sizes = [5, 1, 64, 33, 2, 70000, 3]
    grads = [draw(size, torch.float32, generator).to(device) for size in sizes]
    offsets = [0, *itertools.accumulate(sizes)]
    check_pack(ops, grads, offsets[:-1], poisoned(offsets[-1], torch.bfloat16, device), [3.0])


@pytest.mark.parametrize("dst", STORED, ids=name)
@pytest.mark.parametrize("src", STORED, ids=name)
def test_strides(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Stored in row-major order, whatever the strides, also beside contiguous gradients."""
    flat = draw(4 * 3 * 10 * 14, src, generator).to(device)
    square = flat[: 40 * 42].view(40, 42)
    image = flat.view(4, 3, 10, 14).contiguous(memory_format=torch.channels_last)
    grads = [
        flat[:50],
        square.t(),
        flat[:7].view(7, 1).expand(7, 9),
        flat[5].expand(33),
        image,
        flat[::2],
        square[3:20, 5:33],
        flat.view(4, 3, 10, 14).permute(2, 0, 3, 1),
        flat[9],  # 0-dim
        flat[50:99],
    ]
    offsets, end = places([grad.numel() for grad in grads])
    check_pack(ops, grads, offsets, poisoned(end, dst, device), [3.0])
    for grad in grads:
        check_pack(ops, [grad], [1], poisoned(grad.numel() + 2, dst, device))


def test_large_transposed(ops: Any, device: torch.device, generator: torch.Generator) -> None:
    grad = draw(301 * 290, torch.bfloat16, generator).view(301, 290).to(device)
    check_pack(ops, [grad.t()], [5], poisoned(301 * 290 + 9, torch.bfloat16, device), [3.0])


@pytest.mark.parametrize("dst", STORED, ids=name)
@pytest.mark.parametrize("src", STORED, ids=name)
def test_flag_sees_one_bad_value(
    ops: Any,
    device: torch.device,
    src: torch.dtype,
    dst: torch.dtype,
    generator: torch.Generator,
) -> None:
    """First, last, in the tail or only in the last tensor; and no bad value, no flag."""
    sizes = [3, 4097, 0, 65, 70001, 17]
    grads = [torch.rand(size, generator=generator).to(src).to(device) for size in sizes]
    offsets, end = places(sizes)
    bucket = poisoned(end, dst, device)

    def flag_after(bad: float | None, tensor: int, position: int) -> bool:
        kept = grads[tensor][position].clone()
        if bad is not None:
            grads[tensor][position] = bad
        flag = new_flag(device)
        ops.pack_(grads, offsets, bucket, flag, [2.0])
        grads[tensor][position] = kept
        return bool(flag.item())

    assert not flag_after(None, 0, 0)
    for bad, position in itertools.product(NONFINITE, (0, -1)):
        for tensor in (0, 1, 3, 4, 5):
            assert flag_after(bad, tensor, position), (bad, tensor, position)
    assert flag_after(torch.inf, 4, 35000)


def test_flag_sees_what_only_the_cast_makes_infinite(ops: Any, device: torch.device) -> None:
    for value, dst, bad in (
        (70000.0, torch.float16, True),
        (65504.0, torch.float16, False),
        (3.4e38, torch.bfloat16, True),
        (3.4e38, torch.float32, False),
    ):
        for size in (1, 40):
            grad = torch.zeros(size, device=device)
            grad[-1] = value
            flag = new_flag(device)
            ops.pack_([grad], [0], poisoned(size, dst, device), flag, [])
            assert flag.item() is bad, (value, dst)


def test_flag_sees_what_only_the_division_makes_infinite(ops: Any, device: torch.device) -> None:
    flag = new_flag(device)
    grad = torch.tensor([1.0, 40000.0], dtype=torch.float16, device=device)
    ops.pack_([grad], [0], poisoned(2, torch.float16, device), flag, [0.5])
    assert flag.item()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_flag_stays_true(ops: Any, device: torch.device, shape: tuple[int, ...]) -> None:
    flag = torch.ones(shape, dtype=torch.bool, device=device)
    ops.pack_([torch.ones(40, device=device)], [0], poisoned(40, torch.float16, device), flag, [])
    assert flag.item()
    ops.pack_([], [], poisoned(40, torch.float16, device), flag, [])
    assert flag.item()


def test_flag_inside_a_larger_tensor(ops: Any, device: torch.device) -> None:
    flags = torch.zeros(5, dtype=torch.bool, device=device)
    grad = torch.full((9,), torch.nan, device=device)
    ops.pack_([grad], [0], poisoned(9, torch.float16, device), flags[3:4], [])
    assert flags.tolist() == [False, False, False, True, False]


def test_gradients_are_only_read(
    ops: Any, device: torch.device, generator: torch.Generator
) -> None:
    grads = [draw(90, dtype, generator).to(device) for dtype in STORED]
    kept = [grad.clone() for grad in grads]
    offsets, end = places([90] * 3)
    ops.pack_(grads, offsets, poisoned(end, torch.float16, device), new_flag(device), [3.0])
    assert all(torch.equal(grad, copy) for grad, copy in zip(grads, kept, strict=True))


def test_gradient_that_requires_grad(ops: Any, device: torch.device) -> None:
    grad = torch.ones(5, device=device, requires_grad=True)
    bucket = poisoned(5, torch.float32, device)
    ops.pack_([grad], [0], bucket, new_flag(device), [])
    assert bucket.tolist() == [1.0] * 5
    assert bucket.grad_fn is None
