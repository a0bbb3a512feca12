"""The library's sources compile without a warning."""

from __future__ import annotations

from z3ext import _build


def test_no_warning() -> None:
    """In the log of the compilation: its flags are those of CMake with Z3EXT_WERROR."""
    logs = list(_build.library_path().parent.glob("*.log"))
    assert logs
    for log in logs:
        text = log.read_text()
        assert "cxx ops.cpp.o" in text
        assert "warning:" not in text, text
