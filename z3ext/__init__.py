"""Fused gradient path for DeepSpeed ZeRO stage 3.

    import z3ext
    z3ext.patch_deepspeed()          # before deepspeed.initialize

Importing compiles nothing, imports no DeepSpeed and touches no GPU; it raises ImportError where
torch is older than 2.6. ``torch.ops.z3ext`` has the operators; the first use of one loads, and
where needed compiles, the native library.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from z3ext import _torch_version  # noqa: F401  # before anything that an old torch lacks
from z3ext._build import BuildError
from z3ext._library import install_lazy_namespace
from z3ext.overflow import NonFiniteGradientError, Overflow

if TYPE_CHECKING:
    from collections.abc import Callable

    from z3ext.deepspeed.patch import PatchHandle
    from z3ext.deepspeed.status import Status

__version__ = "0.1.0"
__all__ = [
    "BuildError",
    "NonFiniteGradientError",
    "Overflow",
    "__version__",
    "is_patched",
    "last_overflow",
    "patch_deepspeed",
    "status",
    "unpatch_deepspeed",
]

install_lazy_namespace()


def patch_deepspeed(
    mode: str = "auto",
    strict: bool = False,
    on_nonfinite: str | Callable[[Overflow], None] = "skip",
) -> PatchHandle:
    """Replace DeepSpeed ZeRO stage 3's gradient path by fused kernels, in this process.

    Called before or after ``deepspeed.initialize``: an engine that exists already is served from
    its next backward. An engine whose config is not served trains exactly as without z3ext; one log
    line on rank 0 says why, and so does ``status(engine)``. Called again it changes nothing and
    returns the same handle. Compiles the native library where that has not been done yet.

    Args:
        mode: "auto" follows the config: the same bits as DeepSpeed without z3ext. "all_reduce" or
            "reduce_scatter" asks for the other collective on purpose.
        strict: raise where DeepSpeed's sources are unknown, in place of a warning.
        on_nonfinite: what follows when a step is skipped because a gradient is not finite, after
            the line in the log that names the parameter. "skip": nothing. "raise": ``step()``
            raises ``z3ext.NonFiniteGradientError``, with the step skipped. A callable is called
            with a ``z3ext.Overflow``. On every rank alike.

    Returns:
        A handle: ``undo()`` restores DeepSpeed to what it was; so does leaving its ``with`` block.

    Raises:
        ValueError: an unknown mode or on_nonfinite.
        ImportError: DeepSpeed is not installed.
        z3ext.BuildError: the native library cannot be built; DeepSpeed is left alone.
        z3ext.deepspeed.patch.UnsupportedDeepSpeedError: strict, and the sources are unknown.
    """
    from z3ext.deepspeed.patch import patch

    return patch(mode=mode, strict=strict, on_nonfinite=on_nonfinite)


def unpatch_deepspeed() -> None:
    """Undo ``patch_deepspeed``; nothing happens when DeepSpeed is not patched.

    Raises:
        RuntimeError: called within a backward pass, or something else was patched over z3ext.
    """
    if is_patched():
        from z3ext.deepspeed.patch import unpatch

        unpatch()


def is_patched() -> bool:
    """Whether z3ext's methods are installed on DeepSpeed in this process."""
    # None as well while another thread is importing the module.
    asked: Any = getattr(sys.modules.get("z3ext.deepspeed.patch"), "is_patched", None)
    return asked is not None and bool(asked())


def status(engine: Any) -> Status:
    """What z3ext does for a DeepSpeed engine: served or why not, and counts since it was made.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
    """
    from z3ext.deepspeed.patch import status as status_of

    return status_of(engine)


def last_overflow(engine: Any) -> Overflow | None:
    """The last step of a DeepSpeed engine that was skipped while z3ext served it; else None.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
    """
    from z3ext.deepspeed.patch import last_overflow as last_overflow_of

    return last_overflow_of(engine)
