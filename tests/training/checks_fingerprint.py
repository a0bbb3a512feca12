"""Checks of the fingerprints: a method that z3ext does not know stays DeepSpeed's own."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .case import BASE_CONFIG, FP16, Check, adamw, merged
from .checks_undo import STAGE3, changed
from .compare import differences
from .models import Mlp

#: A method that the patch replaces, spelled as it stands in vars(cls).
TARGETS = (
    "reduce_ready_partitions_and_remove_grads",
    "partition_grads",
    "has_overflow",
    "_get_norm_groups",
    "_prepare_fp32_grad_for_sub_group",
    "unscale_and_clip_grads",
    "_post_step",
    "_DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket",
    "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
)


def _optimizer_class() -> Any:
    return importlib.import_module(STAGE3).DeepSpeedZeroOptimizer_Stage3


@contextlib.contextmanager
def _foreign_method(target: str) -> Iterator[Any]:
    """Binds another function, which calls the original one, at the optimizer class."""
    cls = _optimizer_class()
    original = vars(cls)[target]

    def foreign(self: Any, *args: Any, **kwargs: Any) -> Any:
        foreign.calls += 1  # type: ignore[attr-defined]
        return original(self, *args, **kwargs)

    foreign.calls = 0  # type: ignore[attr-defined]
    setattr(cls, target, foreign)
    try:
        yield foreign
    finally:
        setattr(cls, target, original)


@contextlib.contextmanager
def messages() -> Iterator[list[logging.LogRecord]]:
    """The records that reach the "z3ext" logger."""
    seen: list[logging.LogRecord] = []

    class _Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    handler = _Keep()
    log = logging.getLogger("z3ext")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield seen
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _training(look: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Three fp16 steps from fixed seeds; the losses, norms and final weights."""
    import deepspeed
    import torch

    from .run import state_records

    torch.manual_seed(5)
    model = Mlp()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=merged(BASE_CONFIG, FP16)
    )
    generator = torch.Generator().manual_seed(6 + torch.distributed.get_rank())
    records: dict[str, Any] = {}
    try:
        for step in range(3):
            shapes = ((3, 7), (3, 1), (11,))
            batch = [torch.randn(*s, generator=generator).half() for s in shapes]
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            records[f"step {step} loss"] = loss.detach().clone()
            records[f"step {step} norm"] = engine.get_global_grad_norm()
        records.update(state_records(engine.optimizer, model))
        if look is not None:
            look(engine)
    finally:
        engine.destroy()
    return records


def _short(target: str) -> str:
    return target.rpartition("__")[2] if target.startswith("_DeepSpeed") else target


def _declined(target: str) -> Callable[[int], list[str]]:
    def check(world: int) -> list[str]:
        """Declined with one warning that names symbol and version; training is stock's."""
        import deepspeed

        import z3ext

        problems: list[str] = []
        stock = _training()
        with _foreign_method(target) as foreign:
            before = dict(vars(_optimizer_class()))
            with messages() as seen:
                handle = z3ext.patch_deepspeed()
            try:
                bound = changed(before, dict(vars(_optimizer_class())))
                problems += [f"{n} was replaced all the same" for n in bound]
                if z3ext.is_patched():
                    problems.append("is_patched() is True")
                warnings = [r for r in seen if r.levelno >= logging.WARNING]
                # Every rank runs this, and only rank 0 logs.
                import torch

                wanted = 1 if torch.distributed.get_rank() == 0 else 0
                texts = [r.getMessage() for r in warnings]
                if len(texts) != wanted:
                    problems.append(f"expected {wanted} warning, got {texts}")
                for text in texts:
                    for word in (_short(target), deepspeed.__version__):
                        if word not in text:
                            problems.append(f"the warning does not name {word}: {text}")

                def look(engine: Any) -> None:
                    status = z3ext.status(engine)
                    if status.served or not status.reason:
                        problems.append(f"expected declined with a reason: {status}")

                problems += differences(stock, _training(look))
                if not foreign.calls:
                    problems.append("DeepSpeed's own (foreign) method was not called")
            finally:
                handle.undo()
            left = changed(before, dict(vars(_optimizer_class())))
            problems += [f"{n} is another object after undo" for n in left]
        return problems

    check.__name__ = f"_declined_{_short(target)}"
    return check


def _strict(world: int) -> list[str]:
    """strict=True raises, names the symbol and leaves everything as it was."""
    import z3ext

    with _foreign_method("partition_grads"):
        before = dict(vars(_optimizer_class()))
        try:
            z3ext.patch_deepspeed(strict=True).undo()
        except Exception as error:
            problems = [] if "partition_grads" in str(error) else [f"does not name it: {error}"]
        else:
            problems = ["strict=True did not raise"]
        if z3ext.is_patched():
            problems.append("is_patched() is True after the error")
            z3ext.unpatch_deepspeed()
        left = changed(before, dict(vars(_optimizer_class())))
        return problems + [f"{n} is another object after the error" for n in left]


def _strict_on_known_sources(world: int) -> list[str]:
    import z3ext

    with z3ext.patch_deepspeed(strict=True):
        return [] if z3ext.is_patched() else ["not patched"]


def _known_again(world: int) -> list[str]:
    """After a decline, with the original method back, the patch goes on."""
    import z3ext

    with _foreign_method("has_overflow"):
        z3ext.patch_deepspeed().undo()
    with z3ext.patch_deepspeed():
        return [] if z3ext.is_patched() else ["still declined although the sources are known again"]


def _overriding_subclass(world: int) -> list[str]:
    """An optimizer of a subclass that overrides a target is declined, others are served."""
    import z3ext

    cls = _optimizer_class()
    stage3: Any = importlib.import_module(STAGE3)
    calls: list[int] = []

    class Overriding(cls):  # type: ignore[misc, valid-type]
        def partition_grads(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super().partition_grads(*args, **kwargs)

    problems: list[str] = []

    def look(engine: Any) -> None:
        status = z3ext.status(engine)
        if type(engine.optimizer) is not Overriding:
            problems.append("the engine did not take the subclass: the check is void")
        if status.served or not status.reason:
            problems.append(f"expected declined with a reason: {status}")

    stock = _training()
    with z3ext.patch_deepspeed():
        stage3.DeepSpeedZeroOptimizer_Stage3 = Overriding
        try:
            problems += differences(stock, _training(look))
        finally:
            stage3.DeepSpeedZeroOptimizer_Stage3 = cls
    if not calls:
        problems.append("the overriding method was not called")
    return problems


def _replaced_later(target: str, world: int) -> list[str]:
    """By a tool that comes after patch_deepspeed(): its method is called, as without z3ext."""
    import z3ext

    problems: list[str] = []

    def look(engine: Any) -> None:
        status = z3ext.status(engine)
        if status.served or _short(target) not in status.reason:
            problems.append(f"expected declined for {target}: {status}")

    stock = _training()
    with z3ext.patch_deepspeed(), _foreign_method(target) as foreign:
        problems += differences(stock, _training(look))
    if not foreign.calls:
        problems.append(f"the later {target} was passed by")
    return problems


def _disabled(world: int) -> list[str]:
    """Z3EXT_DISABLE=1: nothing is patched, and the log says so."""
    import torch

    import z3ext

    before = dict(vars(_optimizer_class()))
    old = os.environ.get("Z3EXT_DISABLE")
    os.environ["Z3EXT_DISABLE"] = "1"
    try:
        with messages() as seen:
            handle = z3ext.patch_deepspeed()
        bound = changed(before, dict(vars(_optimizer_class())))
        problems = [f"{n} was replaced" for n in bound]
        if z3ext.is_patched():
            problems.append("is_patched() is True")
        logged = [r.getMessage() for r in seen if "Z3EXT_DISABLE" in r.getMessage()]
        if torch.distributed.get_rank() == 0 and len(logged) != 1:
            problems.append(f"expected one message that names Z3EXT_DISABLE, got {logged}")
        handle.undo()
    finally:
        del os.environ["Z3EXT_DISABLE"]
        if old is not None:
            os.environ["Z3EXT_DISABLE"] = old
    with z3ext.patch_deepspeed():
        if not z3ext.is_patched():
            problems.append("not patched after Z3EXT_DISABLE was taken away")
    return problems


def _check(run: Callable[[int], list[str]], *worlds: int) -> Check:
    return Check(f"fingerprint{run.__name__}", run, worlds or (1,))


CHECKS: list[Check] = [
    *(
        _check(_declined(target), *((1, 2) if target == "has_overflow" else (1,)))
        for target in TARGETS
    ),
    _check(_strict),
    _check(_strict_on_known_sources),
    _check(_known_again),
    _check(_overriding_subclass),
    *(
        Check(f"fingerprint_replaced_later_{target}", partial(_replaced_later, target), (1, 2))
        for target in ("partition_grads", "get_grad_norm_direct", "has_overflow")
    ),
    _check(_disabled, 1, 2),
]
