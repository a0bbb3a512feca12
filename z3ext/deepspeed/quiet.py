"""Silences what DeepSpeed prepares and nobody reads: NVTX ranges and lines that are not printed.

In one step of a BERT of 394 parameters stock enters 7,600 NVTX ranges and calls ``print_rank_0``
2,400 times.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.utils import nvtx

#: Set where a profiler listens to NVTX ranges: the first is NVTX's own way to load one.
_LISTENERS = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
_PRINTING: tuple[ModuleType, ...] = (partition_parameters, stage3)


class Quiet:
    """The changes to DeepSpeed's modules, until ``remove``; what was there comes back identical.

    What the user sets meanwhile (``nvtx.enable_nvtx = True``) stays.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[ModuleType, str, Any, Any]] = []

    def install(self) -> None:
        if not any(os.environ.get(name) for name in _LISTENERS):
            self._set(nvtx, "enable_nvtx", False)
        for module in _PRINTING:
            self._set(module, "print_rank_0", _only_what_is_printed(vars(module)["print_rank_0"]))

    def remove(self) -> None:
        for module, name, stock, ours in self._changes:
            if vars(module).get(name) is ours:
                setattr(module, name, stock)
        self._changes.clear()

    def _set(self, module: ModuleType, name: str, value: Any) -> None:
        self._changes.append((module, name, vars(module)[name], value))
        setattr(module, name, value)


def _only_what_is_printed(stock: Callable[..., None]) -> Callable[..., None]:
    """Stock asks for the rank first, whatever becomes of the message."""

    @functools.wraps(stock)
    def print_rank_0(message: Any, debug: bool = False, force: bool = False) -> None:
        if debug or force:
            stock(message, debug, force)

    vars(print_rank_0).pop("__wrapped__")  # inspection must not take it for the stock function
    return print_rank_0
