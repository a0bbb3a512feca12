"""Install and undo: all or nothing, idempotent, every attribute restored to the same object.

Imports no DeepSpeed before it is asked to, and lets nothing that goes wrong while it looks at the
DeepSpeed at hand reach the user's script.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from z3ext import _library
from z3ext._log import log_rank0, show_lines
from z3ext.deepspeed import names
from z3ext.deepspeed.diagnosis import Reaction, last_overflow_of, reaction
from z3ext.deepspeed.paths import MODES
from z3ext.deepspeed.recognise import closest, describe
from z3ext.deepspeed.releases import RELEASES
from z3ext.deepspeed.status import Status, counters_of
from z3ext.overflow import Overflow

if TYPE_CHECKING:
    from z3ext.deepspeed.installation import Installation

_STAGE3 = "deepspeed.runtime.zero.stage3"
_CLASS = "DeepSpeedZeroOptimizer_Stage3"


class UnsupportedDeepSpeedError(RuntimeError):
    """``patch_deepspeed(strict=True)`` met a DeepSpeed that z3ext does not serve."""


class PatchHandle:
    """What ``patch_deepspeed`` returns: undoes the patch, by ``undo()`` or as a context manager.

    A handle of a patch that was declined or disabled has nothing to undo.
    """

    def undo(self) -> None:
        """Restore every attribute of DeepSpeed to the identical object; a second call does nothing.

        Raises:
            RuntimeError: called within a backward pass, or something else was patched over z3ext.
        """
        patched = _current.patched
        if patched is not None and self is patched.handle:
            patched.installation.remove()
            _current.patched = None
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


@dataclasses.dataclass(frozen=True)
class _Patched:
    """What is installed now."""

    options: _Options
    installation: Installation
    handle: PatchHandle


class _Current:
    """What is installed, and why not when nothing is."""

    patched: _Patched | None = None
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
    if _current.patched is not None:
        _say_untaken(_current.patched.options, wanted)
        return _current.patched.handle
    if os.environ.get("Z3EXT_DISABLE") == "1":
        _current.reason = "Z3EXT_DISABLE=1 is set"
        log_rank0(logging.WARNING, "Z3EXT_DISABLE=1 is set: DeepSpeed is left alone")
        return PatchHandle()
    version = _version()
    looked = _look(wanted, version)
    if isinstance(looked, str):
        return _declined(looked, strict)
    _library.load()  # compiles here, not in the middle of the first backward
    try:
        looked.install()
    except Exception as error:  # all of it is undone
        return _declined(f"declined: patching DeepSpeed {version} {_failed(error)}", strict)
    _current.patched = _Patched(wanted, looked, PatchHandle())
    log_rank0(logging.INFO, f"patched DeepSpeed {version}")
    return _current.patched.handle


def _declined(reason: str, strict: bool) -> PatchHandle:
    """DeepSpeed stays as it is, and the log, or an error, says why."""
    _current.reason = reason
    if strict:
        raise UnsupportedDeepSpeedError(f"z3ext: {reason}")
    log_rank0(logging.WARNING, reason)
    return PatchHandle()


def _version() -> str:
    """The version of DeepSpeed, imported here.

    Raises:
        ImportError: there is none.
    """
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ImportError(
            "z3ext.patch_deepspeed() found no DeepSpeed in this Python environment; expected "
            f"DeepSpeed {_served()}; pip install deepspeed, or leave the call out",
            name="deepspeed",
        ) from None
    return str(vars(deepspeed).get("__version__", "of unknown version"))


def _look(options: _Options, version: str) -> Installation | str:
    """What to install, or why DeepSpeed is left alone."""
    advice = f"its own methods stay; z3ext serves DeepSpeed {_served()}"
    try:
        gone = list(names.missing())
        if gone:
            return f"declined: DeepSpeed {version} has no {', '.join(gone)}, so {advice}"
        cls: type = getattr(importlib.import_module(_STAGE3), _CLASS)
        release, unknown = closest(cls)
        if unknown:
            found = describe(cls, unknown)
            return (
                f"declined: DeepSpeed {version} has {found}, so {advice}, or undo what replaced "
                "a method"
            )
        # Only now: with names missing its modules could not be imported.
        from z3ext.deepspeed.installation import Installation

        return Installation(cls, release, options.mode, reaction(options.on_nonfinite))
    except Exception as error:  # whatever it is, the script trains well without z3ext
        return f"declined: looking at DeepSpeed {version} {_failed(error)}; {advice}"


def _failed(error: Exception) -> str:
    """In one line, whatever the exception's text is."""
    return " ".join(f"failed with {type(error).__name__}: {error}".split())


def _served() -> str:
    return f"{RELEASES[0].name.split()[0]} to {RELEASES[-1].name.split()[-1]}"


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
    if _current.patched is not None:
        _current.patched.handle.undo()


def is_patched() -> bool:
    """See ``z3ext.is_patched``."""
    return _current.patched is not None


def status(engine: Any) -> Status:
    """See ``z3ext.status``."""
    try:
        return _status(engine)
    except Exception as error:  # an optimizer unlike those that z3ext serves
        return Status(False, f"looking at the engine {_failed(error)}", "stock")


def _status(engine: Any) -> Status:
    optimizer = getattr(engine, "optimizer", None)
    if not any(cls.__name__ == _CLASS for cls in type(optimizer).__mro__):
        found = type(optimizer).__name__
        reason = f"the engine's optimizer is {found}; expected a ZeRO stage 3 optimizer"
        return Status(False, reason, "stock")
    counts = dataclasses.asdict(counters_of(optimizer))
    if _current.patched is None:
        return Status(False, _current.reason, "stock", **counts)
    reason, mode, note = _current.patched.installation.adoptions.outlook(optimizer)
    return Status(not reason, reason, mode, note=note, **counts)


def last_overflow(engine: Any) -> Overflow | None:
    """See ``z3ext.last_overflow``."""
    return last_overflow_of(engine.optimizer)
