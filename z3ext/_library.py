"""Loads the native library, or the pure-torch reference, when an op is first used.

``import z3ext`` puts a stand-in at ``torch.ops.z3ext``; the first attribute access there loads the
library and puts torch's own namespace back in its place.
"""

from __future__ import annotations

import os
import re
import threading
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from z3ext import _build

NAMESPACE = "z3ext"

_lock = threading.RLock()
_loaded = False
_reference_library: torch.library.Library | None = None  # lives as long as its registrations


class _LazyNamespace(types.ModuleType):
    """Stands at ``torch.ops.z3ext`` until an op is asked for."""

    def __getattr__(self, name: str) -> Any:
        # Inspection (copy, doctest, hasattr(x, "__wrapped__")) must not start a compiler.
        if name.startswith("__"):
            raise AttributeError(name)
        load()
        return getattr(getattr(torch.ops, NAMESPACE), name)


def install_lazy_namespace() -> None:
    """Put the stand-in at ``torch.ops.z3ext``, unless the ops are loaded already."""
    if not _loaded:
        setattr(torch.ops, NAMESPACE, _LazyNamespace(f"torch.ops.{NAMESPACE}"))


def load() -> None:
    """Register the ops with torch; later calls return at once.

    Z3EXT_REFERENCE=1 registers the pure-torch reference in place of the native library.

    Raises:
        z3ext.BuildError: the library can't be found, compiled or loaded; the text says why and what
            to do.
    """
    global _loaded
    with _lock:
        if _loaded:
            return
        # torch's own code asks torch.ops for the namespace while ops are being registered, so the
        # stand-in goes first; torch.ops makes its own namespace then.
        vars(torch.ops).pop(NAMESPACE, None)
        try:
            if os.environ.get("Z3EXT_REFERENCE") == "1":
                _register_reference()
            else:
                _load_native()
            _register_fakes()
        except BaseException:
            vars(torch.ops).pop(NAMESPACE, None)
            install_lazy_namespace()
            raise
        _loaded = True


def _load_native() -> None:
    path = _build.library_path()
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as cause:
        raise _build.BuildError(
            f"z3ext: {path} does not load: {cause}; remove the file, so that it is compiled again, "
            "or set Z3EXT_REFERENCE=1 to use the pure-torch reference"
        ) from cause


# --- the reference behind the same names ---------------------------------------------------------

_DEFINITION = re.compile(r"m\.def\(\s*((?:\"[^\"]*\"\s*)+)\)")


def schemas(source: Path) -> list[str]:
    """Every schema that a ``TORCH_LIBRARY`` block defines, without the namespace."""
    text = source.read_text(encoding="utf-8")
    literals = (re.findall(r"\"([^\"]*)\"", match[1]) for match in _DEFINITION.finditer(text))
    return ["".join(parts) for parts in literals]


def _register_reference() -> None:
    global _reference_library
    from z3ext import reference

    library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
    for schema in schemas(_build.source_dir() / "ops.cpp"):
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
    _reference_library = library


# --- fakes: what the ops return, for torch.compile and FakeTensor --------------------------------


def _flat_overflow(buf: Tensor) -> Tensor:
    return buf.new_empty((), dtype=torch.bool)


def _segment_check(buf: Tensor, offsets: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    sumsq = buf.new_empty((offsets.numel() - 1,), dtype=torch.float64)
    return buf.new_empty((), dtype=torch.bool), sumsq


def _returns_nothing(*args: object) -> None:
    """The in-place ops only write to their arguments."""


def _register_fakes() -> None:
    torch.library.register_fake("z3ext::flat_overflow", _flat_overflow)
    torch.library.register_fake("z3ext::segment_check", _segment_check)
    in_place = (
        *("flat_overflow_", "pack_", "pack_rows_", "unpack_", "unscale_"),
        *("all_reduce_", "reduce_scatter_"),
    )
    for name in in_place:
        torch.library.register_fake(f"z3ext::{name}", _returns_nothing)
