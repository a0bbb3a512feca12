"""Checks of install and undo: every attribute comes back as the identical object."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .case import BASE_CONFIG, BF16, Check, adamw, gas, merged
from .models import Mlp

STAGE3 = "deepspeed.runtime.zero.stage3"


def _everything() -> dict[str, Any]:
    """name -> object for the optimizer class, its bases and the stage3 module."""
    stage3 = importlib.import_module(STAGE3)
    found = {f"{STAGE3}.{name}": value for name, value in vars(stage3).items()}
    for cls in stage3.DeepSpeedZeroOptimizer_Stage3.__mro__[:-1]:
        found.update({f"{cls.__qualname__}.{name}": v for name, v in vars(cls).items()})
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names that came, went or are bound to another object."""
    missing = object()
    return [
        name
        for name in sorted(before.keys() | after.keys())
        if before.get(name, missing) is not after.get(name, missing)
    ]


def _make_engine() -> Any:
    import deepspeed

    model = Mlp()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=merged(BASE_CONFIG, BF16, gas(2))
    )
    return engine


def _train(engine: Any, steps: int = 1) -> None:
    import torch

    for _ in range(2 * steps):
        x, target, c = torch.randn(3, 7), torch.randn(3, 1), torch.randn(11)
        engine.backward(engine(*(t.bfloat16() for t in (x, target, c))))
        engine.step()


def _undo_restores_class_and_module(world: int) -> list[str]:
    import z3ext

    before = _everything()
    handle = z3ext.patch_deepspeed()
    problems = [] if changed(before, _everything()) else ["the patch changed nothing"]
    if not z3ext.is_patched():
        problems.append("is_patched() is False after patch_deepspeed()")
    handle.undo()
    if z3ext.is_patched():
        problems.append("is_patched() is True after undo()")
    return problems + [f"{n} is another object after undo" for n in changed(before, _everything())]


def _undo_restores_engine(world: int) -> list[str]:
    """An engine patched and undone: same attributes, apart from what training itself rebinds."""
    import z3ext

    engine = _make_engine()
    try:
        _train(engine)
        names = set(vars(engine.optimizer))
        methods = {
            n: v for n, v in vars(engine.optimizer).items() if callable(v) or n.endswith("hooks")
        }
        before = _everything()
        handle = z3ext.patch_deepspeed()
        _train(engine)
        if not z3ext.status(engine).served:
            return [f"expected to be served: {z3ext.status(engine)}"]
        handle.undo()
        after = vars(engine.optimizer)
        problems = [f"optimizer.{n} was added" for n in sorted(set(after) - names)]
        problems += [f"optimizer.{n} is gone" for n in sorted(names - set(after))]
        problems += [
            f"optimizer.{n} is another object" for n, v in methods.items() if after.get(n) is not v
        ]
        problems += [f"{n} is another object" for n in changed(before, _everything())]
        _train(engine)
        return problems
    finally:
        z3ext.unpatch_deepspeed()
        engine.destroy()


def _undo_untouched_instance(world: int) -> list[str]:
    """Patched and undone with no training between: every instance attribute `is` what it was."""
    import z3ext

    engine = _make_engine()
    try:
        _train(engine)
        before = dict(vars(engine.optimizer))
        z3ext.patch_deepspeed().undo()
        after = dict(vars(engine.optimizer))
        return [f"optimizer.{n} changed" for n in changed(before, after)]
    finally:
        engine.destroy()


def _patched_twice(world: int) -> list[str]:
    import z3ext

    before = _everything()
    first = z3ext.patch_deepspeed()
    installed = _everything()
    second = z3ext.patch_deepspeed()
    problems = [] if first is second else ["the second call returned another handle"]
    problems += [
        f"{n} was bound again by the second call" for n in changed(installed, _everything())
    ]
    second.undo()
    problems += [f"{n} is another object after undo" for n in changed(before, _everything())]
    if z3ext.is_patched():
        problems.append("is_patched() is True after one undo of two patches")
    first.undo()
    return problems + [f"{n} changed by a second undo" for n in changed(before, _everything())]


def _patched_again(world: int) -> list[str]:
    import z3ext

    before = _everything()
    problems: list[str] = []
    for turn in range(3):
        handle = z3ext.patch_deepspeed()
        if not z3ext.is_patched() or not changed(before, _everything()):
            problems.append(f"turn {turn}: not patched")
        handle.undo()
        left = changed(before, _everything())
        problems += [f"turn {turn}: {n} is another object after undo" for n in left]
    return problems


def _unpatch_function(world: int) -> list[str]:
    import z3ext

    before = _everything()
    z3ext.unpatch_deepspeed()  # nothing to undo: allowed
    handle = z3ext.patch_deepspeed()
    z3ext.unpatch_deepspeed()
    problems = [f"{n} is another object" for n in changed(before, _everything())]
    if z3ext.is_patched():
        problems.append("is_patched() is True after unpatch_deepspeed()")
    handle.undo()  # a stale handle: allowed, changes nothing
    problems += [f"{n} changed by a stale undo" for n in changed(before, _everything())]
    return problems


def _context_manager(world: int) -> list[str]:
    import z3ext

    before = _everything()
    problems: list[str] = []
    with z3ext.patch_deepspeed() as handle:
        if not z3ext.is_patched():
            problems.append("not patched inside the context manager")
        if not hasattr(handle, "undo"):
            problems.append("the context manager does not give the handle")
    if z3ext.is_patched():
        problems.append("patched after the context manager")
    return problems + [f"{n} is another object" for n in changed(before, _everything())]


def _exception_in_context_manager(world: int) -> list[str]:
    import z3ext

    before = _everything()
    problems: list[str] = []
    try:
        with z3ext.patch_deepspeed():
            raise KeyError("raised inside")
    except KeyError:
        pass
    else:
        problems.append("the context manager swallowed the exception")
    if z3ext.is_patched():
        problems.append("patched after the exception")
    return problems + [f"{n} is another object" for n in changed(before, _everything())]


def _two_engines(world: int) -> list[str]:
    """One engine from before the patch and one from after it are both served, apart."""
    import z3ext

    old = _make_engine()
    new = None
    try:
        with z3ext.patch_deepspeed():
            new = _make_engine()
            _train(old)
            _train(new, steps=2)
            a, b = z3ext.status(old), z3ext.status(new)
            problems = [f"not served: {s}" for s in (a, b) if not s.served]
            if b.buckets <= a.buckets:
                problems.append(f"counts are not per engine: {a.buckets} and {b.buckets} buckets")
            return problems
    finally:
        old.destroy()
        if new is not None:
            new.destroy()


def _check(run: Callable[[int], list[str]], *worlds: int) -> Check:
    return Check(f"undo{run.__name__}", run, worlds or (1,))


CHECKS: list[Check] = [
    _check(_undo_restores_class_and_module),
    _check(_undo_restores_engine, 1, 2),
    _check(_undo_untouched_instance),
    _check(_patched_twice),
    _check(_patched_again),
    _check(_unpatch_function),
    _check(_context_manager),
    _check(_exception_in_context_manager),
    _check(_two_engines, 1, 2),
]
