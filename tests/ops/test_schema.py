"""What torch requires of an op: a true schema, a fake that agrees, use under torch.compile."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import new_flag

from z3ext import reference

Sample = Callable[[torch.device], tuple[Any, ...]]


def _ones(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(numel, dtype=dtype, device=device)


SLICES = [0, 9], [2, 20], [5, 7], [6, 7]

SAMPLES: dict[str, list[Sample]] = {
    "flat_overflow": [
        lambda d: (_ones(9, torch.float16, d),),
        lambda d: (_ones(0, torch.float64, d),),
        lambda d: (_ones(12, torch.bfloat16, d).view(3, 4),),
    ],
    "flat_overflow_": [
        lambda d: (new_flag(d), _ones(9, torch.float32, d)),
        lambda d: (new_flag(d), torch.full((3,), torch.inf, device=d)),
    ],
    "pack_": [
        lambda d: (
            [_ones(6, torch.float32, d).view(2, 3).t(), _ones(4, torch.bfloat16, d)],
            [0, 8],
            _ones(13, torch.float16, d),
            new_flag(d),
            [2.0, 3.0],
        ),
        lambda d: ([], [], _ones(5, torch.float16, d), new_flag(d), []),
    ],
    "pack_rows_": [
        lambda d: (
            [_ones(6, torch.float32, d).view(2, 3).t(), _ones(1, torch.bfloat16, d)],
            [1, 4],
            6,
            3,
            _ones(20, torch.float16, d),
            new_flag(d),
            [2.0, 3.0],
        ),
        lambda d: ([], [], 2, 2, _ones(5, torch.float16, d), new_flag(d), []),
    ],
    "unpack_": [
        lambda d: (_ones(20, torch.float16, d), _ones(30, torch.float32, d), *SLICES, [3.0], False),
        lambda d: (_ones(20, torch.float32, d), _ones(30, torch.float16, d), *SLICES, [], True),
    ],
    "segment_check": [
        lambda d: (_ones(20, torch.bfloat16, d), torch.tensor([0, 3, 3, 20]), 4),
        lambda d: (_ones(0, torch.float32, d), torch.tensor([0]), 1),
    ],
    "unscale_": [
        lambda d: (
            _ones(20, torch.bfloat16, d),
            torch.tensor(0.5, device=d),
            _ones(20, torch.float32, d),
        ),
    ],
    "first_node_hook": [
        lambda d: ([_ones(2, torch.float32, d).requires_grad_(), _ones(0, torch.float16, d)],),
        lambda d: ([],),
    ],
}


@pytest.fixture(scope="module")
def library() -> Any:
    importlib.import_module("z3ext")  # puts torch.ops.z3ext in place
    return torch.ops.z3ext


@pytest.mark.parametrize("op", SAMPLES)
def test_opcheck(library: Any, device: torch.device, op: str) -> None:
    for sample in SAMPLES[op]:
        torch.library.opcheck(getattr(library, op).default, sample(device))


@pytest.mark.parametrize(
    ("op", "numels"), [("all_reduce_", (6,)), ("reduce_scatter_", (6, 6))], ids=str
)
def test_opcheck_of_collectives(
    library: Any, own_group: str, op: str, numels: tuple[int, ...]
) -> None:
    buffers = [torch.ones(numel) for numel in numels]
    torch.library.opcheck(getattr(library, op).default, (*buffers, own_group))


SCHEMAS = {
    "flat_overflow": "(Tensor buf) -> Tensor",
    "flat_overflow_": "(Tensor(a!) flag, Tensor buf) -> ()",
    "pack_": "(Tensor[] grads, int[] offsets, Tensor(a!) bucket, Tensor(b!) flag, "
    "float[] divisors) -> ()",
    "pack_rows_": "(Tensor[] grads, int[] chunk_offsets, int row_numel, int world_size, "
    "Tensor(a!) bucket, Tensor(b!) flag, float[] divisors) -> ()",
    "unpack_": "(Tensor bucket, Tensor(a!) partitions, int[] src_offsets, int[] dst_offsets, "
    "int[] numels, int[] padded_numels, float[] multipliers, bool accumulate) -> ()",
    "segment_check": "(Tensor buf, Tensor offsets, int lanes) -> (Tensor, Tensor)",
    "unscale_": "(Tensor partition, Tensor scale, Tensor(a!) out) -> ()",
    "all_reduce_": "(Tensor(a!) buf, str group_name) -> ()",
    "reduce_scatter_": "(Tensor input, Tensor(a!) output, str group_name) -> ()",
    "first_node_hook": "(Tensor[] params) -> int",
}


@pytest.mark.parametrize("op", SCHEMAS)
def test_schema(library: Any, op: str) -> None:
    schema = str(getattr(library, op).default._schema)
    assert schema == f"z3ext::{op}{SCHEMAS[op]}"


@pytest.mark.parametrize("op", SCHEMAS)
def test_reference_has_the_signature(op: str) -> None:
    """Same argument names in the same order, so that a keyword call means the same."""
    declared = torch._C.parse_schema(f"z3ext::{op}{SCHEMAS[op]}")
    parameters = inspect.signature(getattr(reference, op)).parameters
    assert list(parameters) == [argument.name for argument in declared.arguments]
