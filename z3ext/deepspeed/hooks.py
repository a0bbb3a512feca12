"""Hooks beside DeepSpeed's that may look at gradients before they are reduced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.nn.modules import module as torch_module

from z3ext import ops


class HookWatch:
    """Finds the hooks that run once a gradient is complete, apart from DeepSpeed's own.

    Those of ``register_post_accumulate_grad_hook``, those on a parameter's AccumulateGrad node and
    the backward hooks of modules. Tensor hooks are not among them: they get their gradient as an
    argument, before it is accumulated.

    Args:
        optimizer: the ZeRO stage 3 optimizer, with its hooks installed.
        own_node_hooks: its own hooks stand on the AccumulateGrad nodes.
    """

    def __init__(self, optimizer: Any, own_node_hooks: bool) -> None:
        self._module = optimizer.module
        self._params = list(itertools.chain.from_iterable(optimizer.fp16_groups))
        handles = itertools.chain(optimizer._grad_acc_hooks, optimizer._leaf_module_hooks)
        self._own = frozenset(handle.id for handle in handles)  # unique in the process
        # A node's hooks can be asked for only by the handle of one of them.
        self._own_of_nodes = optimizer._grad_acc_hooks if own_node_hooks else None

    def first(self) -> str:
        """The first such hook, named for the user; "" when there is none."""
        return next(itertools.chain(self._of_params(), self._of_nodes(), self._of_modules()), "")

    def _of_params(self) -> Iterator[str]:
        own = self._own
        for i, param in enumerate(self._params):
            hooks = param._post_accumulate_grad_hooks  # torch has no public name for them
            if hooks and not own.issuperset(hooks):
                yield f"parameter {i}, of shape {_shape(param)}, has a post-accumulate hook"

    def _of_nodes(self) -> Iterator[str]:
        if self._own_of_nodes is not None:
            hooks_of = (handle.hooks_dict_ref() or () for handle in self._own_of_nodes)
            if not all(self._own.issuperset(hooks) for hooks in hooks_of):
                yield "a parameter has a hook on its AccumulateGrad node"
            return
        i = ops.first_node_hook(self._params)
        if i >= 0:
            shape = _shape(self._params[i])
            yield f"parameter {i}, of shape {shape}, has a hook on its AccumulateGrad node"

    def _of_modules(self) -> Iterator[str]:
        if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
            yield "a backward hook is registered for all modules"
        own = self._own
        for name, module in self._module.named_modules():
            hooks = module._backward_hooks
            if module._backward_pre_hooks or (hooks and not own.issuperset(hooks)):
                yield f"module {name or type(module).__name__!r} has a backward hook"


def _shape(param: Any) -> list[int]:
    return list(getattr(param, "ds_shape", param.shape))
