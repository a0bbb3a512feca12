"""What the in-place ops write to: versions for autograd, and memory that nothing else has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import assert_refused, new_flag
from torch import Tensor

from z3ext import _build, _library

#: By op: its tensors by name, the names that it writes to, and a call with the tensors.
Tensors = dict[str, Tensor]
Case = tuple[Tensors, tuple[str, ...], Callable[[Any, Tensors], object]]


def _cases(device: torch.device) -> dict[str, Case]:
    def ones(numel: int) -> Tensor:
        return torch.ones(numel, device=device)

    flag = new_flag(device)
    return {
        "flat_overflow_": (
            {"buf": ones(9), "flag": flag},
            ("flag",),
            lambda ops, t: ops.flat_overflow_(t["flag"], t["buf"]),
        ),
        "pack_": (
            {"grad": ones(4), "bucket": ones(9), "flag": flag},
            ("bucket", "flag"),
            lambda ops, t: ops.pack_([t["grad"]], [2], t["bucket"], t["flag"], [2.0]),
        ),
        "pack_rows_": (
            {"grad": ones(4), "bucket": ones(9), "flag": flag},
            ("bucket", "flag"),
            lambda ops, t: ops.pack_rows_([t["grad"]], [1], 4, 2, t["bucket"], t["flag"], [2.0]),
        ),
        "unpack_": (
            {"bucket": ones(9), "partitions": ones(9)},
            ("partitions",),
            lambda ops, t: ops.unpack_(
                t["bucket"], t["partitions"], [0], [1], [4], [5], [2.0], False
            ),
        ),
        "unscale_": (
            {"partition": ones(9), "scale": ones(1), "out": ones(9)},
            ("out",),
            lambda ops, t: ops.unscale_(t["partition"], t["scale"], t["out"]),
        ),
    }


def _collectives(group: str) -> dict[str, Case]:
    return {
        "all_reduce_": (
            {"buf": torch.ones(6)},
            ("buf",),
            lambda ops, t: ops.all_reduce_(t["buf"], group),
        ),
        "reduce_scatter_": (
            {"input": torch.ones(6), "output": torch.ones(6)},
            ("output",),
            lambda ops, t: ops.reduce_scatter_(t["input"], t["output"], group),
        ),
    }


NAMES = tuple(_cases(torch.device("cpu")))
COLLECTIVES = tuple(_collectives(""))


def _check_versions(ops: Any, case: Case) -> None:
    tensors, written, call = case
    before = {name: tensor._version for name, tensor in tensors.items()}
    call(ops, tensors)
    raised = {name for name, tensor in tensors.items() if tensor._version > before[name]}
    assert raised == set(written)


def _check_grad_mode(ops: Any, op: str, case: Case) -> None:
    tensors, written, call = case
    for name in written:
        if not tensors[name].is_floating_point():
            continue
        for value in (
            torch.ones_like(tensors[name]).requires_grad_(),  # a leaf
            torch.ones_like(tensors[name]).requires_grad_() * 1,  # one with a history
        ):
            given = {**tensors, name: value}
            text = f"{name} requires grad", ".detach()"
            assert_refused(functools.partial(call, ops, given), op, text, list(given.values()))
            with torch.no_grad():
                call(ops, given)


@pytest.mark.parametrize("op", NAMES)
def test_versions(ops: Any, device: torch.device, op: str) -> None:
    _check_versions(ops, _cases(device)[op])


@pytest.mark.parametrize("op", COLLECTIVES)
def test_versions_of_collectives(ops: Any, own_group: str, op: str) -> None:
    tensors, written, call = _collectives(own_group)[op]
    before = {name: tensors[name]._version for name in written}
    call(ops, tensors)
    assert all(tensors[name]._version > before[name] for name in written)


@pytest.mark.parametrize("op", NAMES)
def test_requires_grad(ops: Any, device: torch.device, op: str) -> None:
    _check_grad_mode(ops, op, _cases(device)[op])


@pytest.mark.parametrize("op", COLLECTIVES)
def test_requires_grad_of_collectives(ops: Any, own_group: str, op: str) -> None:
    _check_grad_mode(ops, op, _collectives(own_group)[op])


def test_a_backward_notices_the_write(ops: Any, device: torch.device) -> None:
    weight = torch.ones(9, device=device, requires_grad=True)
    saved = torch.full((9,), 3.0, device=device)
    loss = (weight * saved).sum()
    ops.pack_([torch.zeros(4, device=device)], [0], saved, new_flag(device), [])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def _flag_within(tensor: Tensor) -> Tensor:
    """One byte of the tensor's own memory, as a bool."""
    return tensor.view(torch.uint8).view(torch.bool)[5:6]


@pytest.mark.parametrize("op", ["flat_overflow_", "pack_", "pack_rows_"])
def test_flag_within_the_buffer(ops: Any, device: torch.device, op: str) -> None:
    tensors, _, call = _cases(device)[op]
    buffer = "buf" if op == "flat_overflow_" else "bucket"
    tensors[buffer].zero_()
    given = {**tensors, "flag": _flag_within(tensors[buffer])}
    text = f"flag shares memory with {buffer}", "separate memory"
    assert_refused(lambda: call(ops, given), op, text, [tensors[buffer]])


def test_scale_within_out(ops: Any, device: torch.device) -> None:
    tensors, _, call = _cases(device)["unscale_"]
    given = {**tensors, "scale": tensors["out"][8:]}
    text = "scale shares memory with out", "clone"
    assert_refused(lambda: call(ops, given), "unscale_", text, [tensors["out"]])


def test_every_op_that_writes_is_here() -> None:
    written = [s for s in _library.schemas(_build.source_dir() / "ops.cpp") if "!)" in s]
    assert sorted(s.partition("(")[0] for s in written) == sorted((*NAMES, *COLLECTIVES))
