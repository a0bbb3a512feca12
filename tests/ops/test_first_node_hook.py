"""first_node_hook: which parameter has a hook on its AccumulateGrad node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from z3ext import ops, reference


def _params(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(i + 1)) for i in range(count)]


def _node(param: Tensor) -> Any:
    edge: Any = torch.autograd.graph.get_gradient_edge(param)
    return edge.node


@pytest.mark.parametrize("hooked", [(0,), (3,), (6,), (5, 2)])
def test_finds_the_first(hooked: tuple[int, ...]) -> None:
    params = _params(7)
    nodes = [_node(param) for param in params]
    assert ops.first_node_hook(params) == -1
    for i in hooked:
        nodes[i].register_hook(lambda *_: None)
    assert ops.first_node_hook(params) == min(hooked)


def test_other_hooks_are_not_its_matter() -> None:
    params = _params(3)
    nodes = [_node(param) for param in params]
    nodes[0].register_prehook(lambda *_: None)
    params[1].register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    params[2].register_post_accumulate_grad_hook(lambda param: None)  # type: ignore[no-untyped-call]
    sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
    assert ops.first_node_hook(params) == -1


def test_a_node_that_is_gone_has_no_hooks() -> None:
    params = _params(2)
    _node(params[1]).register_hook(lambda *_: None)
    assert ops.first_node_hook(params) == -1


def test_tensors_that_are_no_parameters() -> None:
    leaf = torch.zeros(2)
    requires_none = nn.Parameter(torch.zeros(2), requires_grad=False)
    assert ops.first_node_hook([leaf, requires_none]) == -1
    assert ops.first_node_hook([]) == -1


def test_reference_cannot_see_them() -> None:
    params = _params(1)
    node = _node(params[0])
    node.register_hook(lambda *_: None)
    assert reference.first_node_hook(params) == -1
