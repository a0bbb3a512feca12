"""Loads the native library, or the pure-torch reference, when an op is first used.

``import z3ext`` puts a stand-in at ``torch.ops.z3ext``; the first attribute access there loads the
library and puts torch's own namespace back in its place.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import types
from pathlib import Path
from typing import Any

import torch

from z3ext import _build
from z3ext._fakes import FAKES
from z3ext._log import log_rank0, show_lines

NAMESPACE = "z3ext"

_lock = threading.RLock()
_loading = False
_loaded = False
# An interrupted load goes on where it stopped: torch takes each registration once.
_registered = False
_faked: set[str] = set()
_own_namespace: Any = None  # torch's, which the stand-in hides until the ops are there
_reference_library: torch.library.Library | None = None  # lives as long as its registrations


class _LazyNamespace(types.ModuleType):
    """Stands at ``torch.ops.z3ext`` until an op is asked for."""

    def __getattr__(self, name: str) -> Any:
        # Inspection (copy, notebooks, hasattr(x, "__wrapped__")) must not start a compiler.
        if name.startswith("_"):
            raise AttributeError(name)
        load()
        return getattr(_own_namespace, name)


def install_lazy_namespace() -> None:
    """Put the stand-in at ``torch.ops.z3ext``, unless the ops are loaded already."""
    global _own_namespace
    if not _loaded and _own_namespace is None:
        _own_namespace = getattr(torch.ops, NAMESPACE)
        setattr(torch.ops, NAMESPACE, _LazyNamespace(f"torch.ops.{NAMESPACE}"))


def load() -> None:
    """Register the ops with torch; later calls return at once.

    Another thread that asks for an op meanwhile waits. Z3EXT_REFERENCE=1 registers the pure-torch
    reference in place of the native library.

    Raises:
        z3ext.BuildError: the library can't be found, compiled or loaded; the text says why and what
            to do.
    """
    global _loaded, _loading, _registered
    with _lock:
        # torch itself looks at the namespace, in this thread, while it registers an op there.
        if _loaded or _loading:
            return
        _loading = True
        try:
            if not _registered:
                if os.environ.get("Z3EXT_REFERENCE") == "1":
                    _register_reference()
                    show_lines()
                    log_rank0(logging.WARNING, "Z3EXT_REFERENCE=1: plain torch serves, slowly")
                else:
                    _load_native()
                _registered = True
            _register_fakes()
            if _own_namespace is not None:
                setattr(torch.ops, NAMESPACE, _own_namespace)
            _loaded = True
        finally:
            _loading = False


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
    try:
        for schema in schemas(_build.source_dir() / "ops.cpp"):
            name = schema.partition("(")[0]
            library.define(schema)
            library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
    except BaseException:
        library._destroy()  # what is registered stays so, unless it is taken back here
        raise
    _reference_library = library


# --- fakes ---------------------------------------------------------------------------------------


def _register_fakes() -> None:
    for name, fake in FAKES.items():
        if name not in _faked:
            torch.library.register_fake(f"z3ext::{name}", fake)
            _faked.add(name)
