"""Hooks beside DeepSpeed's that read, change or replace a gradient before it is reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.modules.module import register_module_full_backward_hook

from z3ext import pending

from .case import BF16, FP16, Case, gas, merged, scattered, sgd, zero
from .cases_sharing import SharedGradients
from .models import Mlp, TrainingModel

if TYPE_CHECKING:
    from .run import Run

Hook = Callable[[Any], None]
Place = Callable[["Run", Hook], None]

# --- what a hook does with a parameter's gradient -------------------------------------------------


def _third(param: Any) -> None:
    """A factor that rounds: it shows whether the gradient is divided already, and its dtype."""
    if param.grad is not None:
        param.grad.mul_(1 / 3)


def _third_of_the_second(model: TrainingModel) -> None:
    """Hooks that run before DeepSpeed's."""
    for name, param in model.named_parameters():
        if name.startswith("second"):
            _after_accumulation(param, _third)


def _replace(param: Any) -> None:
    if param.grad is not None:
        param.grad = param.grad * 0.5


def _replace_data(param: Any) -> None:
    if param.grad is not None:
        param.grad.data = param.grad.data * 0.5


# --- where the hook stands ------------------------------------------------------------------------


def _on_params(run: Run, hook: Hook) -> None:
    """After DeepSpeed's, on every second parameter."""
    for param in list(run.model.parameters())[::2]:
        _after_accumulation(param, hook)


def _after_accumulation(param: Any, hook: Hook) -> Any:
    return param.register_post_accumulate_grad_hook(hook)


def _on_another_param(run: Run, hook: Hook) -> None:
    """Each hook looks at every parameter, whatever the one that it stands on."""
    params = list(run.model.parameters())

    def look(_: Any) -> None:
        for param in params:
            hook(param)

    _after_accumulation(params[0], look)


def _on_nodes(run: Run, hook: Hook) -> None:
    """On the AccumulateGrad nodes; each forward makes new ones, alive while somebody holds them."""
    nodes: dict[int, Any] = {}

    def register(module: Any, _: Any) -> None:
        for param in module.parameters(recurse=False):
            node = nodes[id(param)] = param.expand_as(param).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, param=param: hook(param))

    for module in run.model.modules():
        module.register_forward_pre_hook(register)  # after DeepSpeed's, which gathers


def _on_modules(run: Run, hook: Hook) -> None:
    params = list(run.model.parameters())

    def look(*_: Any) -> None:
        for param in params:
            hook(param)

    for module in run.model.modules():
        if not list(module.children()):
            module.register_full_backward_hook(look)


def _on_all_modules(run: Run, hook: Hook) -> None:
    params = list(run.model.parameters())

    def look(*_: Any) -> None:
        for param in params:
            hook(param)

    handle: Any = register_module_full_backward_hook(look)
    run.at_close.append(handle.remove)


def _on_rank_0(run: Run, hook: Hook) -> None:
    if run.rank == 0:
        _on_params(run, hook)


_PLACES: dict[str, Place] = {
    "params": _on_params,
    "another_param": _on_another_param,
    "nodes": _on_nodes,
    "modules": _on_modules,
    "all_modules": _on_all_modules,
}

# --- drives ---------------------------------------------------------------------------------------


def _packed(limits: tuple[int, int], drive: Callable[[Run], None], run: Run) -> None:
    """With other limits to what waits: a gradient is packed in its hook, or with the next ones."""
    before = pending.LARGE_BYTES, pending.PENDING_BYTES
    pending.LARGE_BYTES, pending.PENDING_BYTES = limits
    try:
        drive(run)
    finally:
        pending.LARGE_BYTES, pending.PENDING_BYTES = before


def _hooked(place: Place, hook: Hook, run: Run) -> None:
    place(run, hook)
    for step in range(run.case.steps):
        run.step(step)
        for name, param in run.model.named_parameters():
            run.record(f"step {step} {name} has a gradient", param.grad is not None)


def _read(place: Place, run: Run) -> None:
    """What is in param.grad whenever a hook runs."""
    names = {id(param): name for name, param in run.model.named_parameters()}
    seen = 0

    def read(param: Tensor) -> None:
        nonlocal seen
        seen += 1
        run.record(f"hook {seen} {names[id(param)]}", param.grad)

    _hooked(place, read, run)


def _for_two_steps(run: Run) -> None:
    """Hooks that come and go: the first and the last step are without them."""
    params = list(run.model.parameters())
    run.step(0)
    handles = [_after_accumulation(param, _third) for param in params[1:]]
    run.step(1)
    run.step(2)
    for handle in handles:
        handle.remove()
    run.step(3)


def _outcome(run: Run, step: int) -> str:
    """What a backward comes to: an error that stock raises belongs to the same training."""
    try:
        run.forward_backward(step)
    except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
        return type(error).__name__
    return "no error"


def _drop(param: Any) -> None:
    param.grad = None


def _dropping(run: Run) -> None:
    """A hook that takes the gradient away."""
    _on_params(run, _drop)
    run.record("outcome", _outcome(run, 0))


def _raise(_: Any) -> None:
    raise ValueError("a user's hook")


def _raising(register: Callable[[Any], Any], run: Run) -> None:
    """A hook that raises in the midst of a backward, and what becomes of the next one."""
    params = list(run.model.parameters())
    handle = register(params[len(params) // 2])
    run.record("outcome", _outcome(run, 0))
    handle.remove()
    run.record("next outcome", _outcome(run, 1))


#: The limits of ``pending`` with which every gradient would be packed in its hook.
_AT_ONCE = (40, 1 << 25)


def _basic() -> Iterator[Case]:
    for name, place in _PLACES.items():
        read, change = partial(_read, place), partial(_hooked, place, _third)
        yield Case(
            f"hook_reads_{name}", Mlp, BF16, drive=partial(_packed, _AT_ONCE, read), noted=True
        )
        yield Case(
            f"hook_changes_{name}",
            Mlp,
            merged(FP16, gas(2)),
            drive=partial(_packed, _AT_ONCE, change),
            noted=True,
        )
    for name, hook in (("replaces", _replace), ("replaces_data", _replace_data)):
        yield Case(f"hook_{name}", Mlp, drive=partial(_hooked, _on_params, hook), noted=True)
    yield Case(
        "hook_changes_a_shared_gradient",
        SharedGradients,
        optimizer=sgd,
        drive=partial(_hooked, _on_params, _third),
        noted=True,
    )
    yield Case(
        "hook_changes_before_deepspeeds",
        SharedGradients,
        optimizer=sgd,
        prepare=_third_of_the_second,
        noted=True,
    )
    yield Case(
        "hook_changes_with_fp32_communication",
        Mlp,
        merged(BF16, {"communication_data_type": "fp32"}),
        drive=partial(_hooked, _on_modules, _third),
        noted=True,
    )
    yield Case(
        "hook_changes_two_buckets",
        Mlp,
        merged(BF16, zero(reduce_bucket_size=60)),
        drive=partial(_hooked, _on_params, _third),
        noted=True,
    )
    yield Case("hook_on_rank_0", Mlp, BF16, drive=partial(_hooked, _on_rank_0, _third), noted=None)
    yield Case("hooks_come_and_go", Mlp, merged(BF16, gas(2)), drive=_for_two_steps, core=True)
    yield Case("hook_drops", Mlp, drive=_dropping, noted=True)
    for name, register in (
        ("post_accumulate", lambda p: p.register_post_accumulate_grad_hook(_raise)),
        ("tensor", lambda p: p.register_hook(_raise)),
    ):
        yield Case(f"hook_raises_{name}", Mlp, drive=partial(_raising, register), noted=None)


BASIC: list[Case] = list(_basic())

CASES: list[Case] = [*BASIC, *(case for basic in BASIC for case in scattered(basic))]
