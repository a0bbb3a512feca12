"""The hooks that autograd runs when a parameter's gradient is complete."""

from __future__ import annotations

from typing import Any


def has_other_hooks(param: Any) -> bool:
    """Whether DeepSpeed's is not the only one: another may run after it, and read ``param.grad``.

    Seen are hooks of ``register_post_accumulate_grad_hook``, for whose list torch has no public
    name; not those on the parameter's AccumulateGrad node.
    """
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    return hooks is not None and len(hooks) > 1
