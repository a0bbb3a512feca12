"""Install and undo: all or nothing, idempotent, every attribute restored to the same object."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3, IPGBucketZ3

from z3ext import _library
from z3ext._log import log_rank0, show_lines
from z3ext.agreement import Agreement, agreement_of
from z3ext.deepspeed import support
from z3ext.deepspeed.adopt import Adoptions, counters_of
from z3ext.deepspeed.diagnosis import Reaction, last_overflow_of, reaction
from z3ext.deepspeed.fingerprint import PRIVATE, REPLACED, unknown_symbols
from z3ext.deepspeed.paths import MODES
from z3ext.deepspeed.quiet import Quiet
from z3ext.deepspeed.status import Status
from z3ext.overflow import Overflow

Method = Callable[..., Any]


class UnsupportedDeepSpeedError(RuntimeError):
    """``patch_deepspeed(strict=True)`` met a DeepSpeed whose sources it does not know."""


class PatchHandle:
    """What ``patch_deepspeed`` returns: undoes the patch, by ``undo()`` or as a context manager.

    A handle of a patch that was declined or disabled has nothing to undo.
    """

    def __init__(self, installation: _Installation | None = None) -> None:
        self._installation = installation

    def undo(self) -> None:
        """Restore every attribute of DeepSpeed to the identical object; a second call does nothing.

        Raises:
            RuntimeError: called within a backward pass, or something else was patched over z3ext.
        """
        if self._installation is not None and self._installation is _current.installation:
            self._installation.remove()
            _current.installation = None
            _current.reason = "z3ext.patch_deepspeed() was undone"

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


@dataclasses.dataclass(frozen=True)
class _Options:
    """What the user asked for."""

    mode: str
    on_nonfinite: str | Reaction


class _Installation:
    """The methods on the optimizer class, z3ext's and stock's."""

    def __init__(self, options: _Options) -> None:
        self.options = options
        react = reaction(options.on_nonfinite)
        self.stock: dict[str, Method] = {
            name: vars(DeepSpeedZeroOptimizer_Stage3)[name] for name in REPLACED
        }
        self.adoptions = Adoptions(self.stock, self._refusal, _agreement, options.mode, react)
        self.replacements = _replacements(self.adoptions, self.stock)
        self.quiet = Quiet()
        self.handle = PatchHandle(self)

    def _refusal(self, optimizer: Any) -> str:
        return support.refusal(
            optimizer, DeepSpeedZeroOptimizer_Stage3, self.replacements, self.options.mode
        )

    def install(self) -> None:
        for name, method in self.replacements.items():
            setattr(DeepSpeedZeroOptimizer_Stage3, name, method)
        self.quiet.install()

    def remove(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "z3ext: undo() was called within a backward pass; expected no backward to be "
                "running; call it after engine.backward()"
            )
        for name, method in self.replacements.items():
            if vars(DeepSpeedZeroOptimizer_Stage3).get(name) is not method:
                raise RuntimeError(
                    f"z3ext: {name.removeprefix(PRIVATE)} was replaced by something else after "
                    "patch_deepspeed(); expected z3ext's own method there; undo that first"
                )
        for name, method in self.stock.items():
            setattr(DeepSpeedZeroOptimizer_Stage3, name, method)
        self.quiet.remove()
        self.adoptions.release_all()


def _agreement(optimizer: Any) -> Agreement:
    # DeepSpeed numbers the parameters of a process, in the same order on every rank.
    number = getattr(support.first_parameter(optimizer), "ds_id", "")
    return agreement_of(support.partition_group(optimizer), f"engine{number}")


def _replacements(adoptions: Adoptions, stock: dict[str, Method]) -> dict[str, Method]:
    """What stands on the class: each hands over to the path of its optimizer."""

    def begin_backward(self: Any) -> None:
        adoptions.of(self).begin()  # every rank is at the same place: no gradient has come yet

    def ready(self: Any, param: Any) -> None:
        adoptions.of(self).ready(param)

    def add_grad(self: Any, param: Any) -> None:
        adoptions.of(self).add_grad(param)

    def reduce_bucket(self: Any, communication_data_type: torch.dtype) -> None:
        adoptions.of(self).reduce_bucket(communication_data_type)

    @torch.no_grad()
    def has_overflow(self: Any, partition_gradients: bool = True) -> Any:
        return adoptions.of(self).has_overflow(partition_gradients)

    @torch.no_grad()
    def norm_groups(self: Any) -> Any:
        return adoptions.of(self).norm_groups()

    @torch.no_grad()
    def prepare(self: Any, sub_group_id: int) -> None:
        adoptions.of(self).prepare(sub_group_id)

    @torch.no_grad()
    def unscale(self: Any, sub_group_id: int, total_norm: Any) -> None:
        adoptions.of(self).unscale(sub_group_id, total_norm)

    def update_loss_scale(self: Any) -> bool:
        return adoptions.of(self).update_loss_scale()

    @torch.no_grad()
    def post_step(self: Any, timer_names: Any) -> None:
        adoptions.of(self).post_step(timer_names)

    methods: tuple[Method, ...] = (
        begin_backward,
        ready,
        add_grad,
        reduce_bucket,
        has_overflow,
        norm_groups,
        prepare,
        unscale,
        update_loss_scale,
        post_step,
    )
    return {
        name: _named_like(stock[name], method)
        for name, method in zip(REPLACED, methods, strict=True)
    }


def _named_like(stock: Method, method: Method) -> Method:
    """Name, docstring and module of the stock method, so that tracebacks and profiles read alike.

    Without ``__wrapped__``: inspection must not take the replacement for the stock method.
    """
    functools.update_wrapper(method, stock)
    vars(method).pop("__wrapped__", None)
    return method


class _Current:
    """What is installed now, and why not when nothing is."""

    installation: _Installation | None = None
    reason: str = "z3ext.patch_deepspeed() was not called"


_current = _Current()


def patch(
    mode: str = "auto", strict: bool = False, on_nonfinite: str | Reaction = "skip"
) -> PatchHandle:
    """See ``z3ext.patch_deepspeed``."""
    show_lines()
    if mode not in MODES:
        raise ValueError(f"z3ext: mode is {mode!r}; expected one of {', '.join(map(repr, MODES))}")
    reaction(on_nonfinite)
    wanted = _Options(mode, on_nonfinite)
    if _current.installation is not None:
        _say_untaken(_current.installation.options, wanted)
        return _current.installation.handle
    if os.environ.get("Z3EXT_DISABLE") == "1":
        _current.reason = "Z3EXT_DISABLE=1 is set"
        log_rank0(logging.WARNING, "Z3EXT_DISABLE=1 is set: DeepSpeed is left alone")
        return PatchHandle()
    unknown = unknown_symbols(DeepSpeedZeroOptimizer_Stage3, IPGBucketZ3)
    reason = support.known_version(unknown, deepspeed.__version__)
    if reason:
        _current.reason = reason
        if strict:
            raise UnsupportedDeepSpeedError(f"z3ext: {reason}")
        log_rank0(logging.WARNING, reason)
        return PatchHandle()
    _library.load()  # compiles here, not in the middle of the first backward
    installation = _Installation(wanted)
    installation.install()
    _current.installation = installation
    log_rank0(logging.INFO, f"patched DeepSpeed {deepspeed.__version__}")
    return installation.handle


def _say_untaken(installed: _Options, wanted: _Options) -> None:
    for name, value in vars(wanted).items():
        found = vars(installed)[name]
        if found != value:
            log_rank0(
                logging.WARNING,
                f"already patched with {name}={found!r}: {name}={value!r} is not taken; "
                "call z3ext.unpatch_deepspeed() first",
            )


def unpatch() -> None:
    """See ``z3ext.unpatch_deepspeed``."""
    if _current.installation is not None:
        _current.installation.handle.undo()


def is_patched() -> bool:
    """See ``z3ext.is_patched``."""
    return _current.installation is not None


def status(engine: Any) -> Status:
    """See ``z3ext.status``."""
    optimizer = getattr(engine, "optimizer", None)
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        found = type(optimizer).__name__
        reason = f"the engine's optimizer is {found}; expected a ZeRO stage 3 optimizer"
        return Status(False, reason, "stock")
    counts = dataclasses.asdict(counters_of(optimizer))
    if _current.installation is None:
        return Status(False, _current.reason, "stock", **counts)
    reason, mode, note = _current.installation.adoptions.outlook(optimizer)
    return Status(not reason, reason, mode, note=note, **counts)


def last_overflow(engine: Any) -> Overflow | None:
    """See ``z3ext.last_overflow``."""
    return last_overflow_of(engine.optimizer)
