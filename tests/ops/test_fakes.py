"""Fakes, and meta tensors, refuse devices that the op itself would refuse."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import new_flag
from torch import Tensor

META = torch.device("meta")
CPU = torch.device("cpu")


def _ones(device: torch.device) -> Tensor:
    return torch.ones(8, device=device)


#: By op: the argument on the wrong device, the call with it.
WRONG: list[tuple[str, str, Callable[[Any], object]]] = [
    ("flat_overflow_", "flag is on cpu", lambda o: o.flat_overflow_(new_flag(CPU), _ones(META))),
    (
        "pack_",
        "grads[1] is on cpu",
        lambda o: o.pack_(
            [_ones(META), _ones(CPU)], [0, 8], torch.ones(16, device=META), new_flag(META), []
        ),
    ),
    (
        "pack_",
        "flag is on cpu",
        lambda o: o.pack_([_ones(META)], [0], _ones(META), new_flag(CPU), []),
    ),
    (
        "pack_rows_",
        "grads[0] is on cpu",
        lambda o: o.pack_rows_([_ones(CPU)], [0], 4, 2, _ones(META), new_flag(META), []),
    ),
    (
        "unpack_",
        "partitions is on cpu",
        lambda o: o.unpack_(_ones(META), _ones(CPU), [0], [0], [1], [1], [], False),
    ),
    (
        "unscale_",
        "scale is on cpu",
        lambda o: o.unscale_(_ones(META), _ones(CPU)[:1], _ones(META)),
    ),
    ("unscale_", "out is on cpu", lambda o: o.unscale_(_ones(META), _ones(META)[:1], _ones(CPU))),
    (
        "reduce_scatter_",
        "output is on cpu",
        lambda o: o.reduce_scatter_(_ones(META), _ones(CPU), "group"),
    ),
]


@pytest.mark.parametrize(("op", "text", "call"), WRONG, ids=[f"{w[0]}:{w[1]}" for w in WRONG])
def test_devices(op: str, text: str, call: Callable[[Any], object]) -> None:
    importlib.import_module("z3ext")  # puts torch.ops.z3ext in place
    with pytest.raises(RuntimeError) as caught:
        call(torch.ops.z3ext)
    assert str(caught.value).startswith(f"z3ext::{op}: ")
    assert text in str(caught.value)
