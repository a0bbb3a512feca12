"""The "z3ext" logger: lines on rank 0, and shown where the application set up no logging."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import z3ext
from z3ext import _log


@contextlib.contextmanager
def bare() -> Iterator[io.StringIO]:
    """An application without logging: no handler anywhere; yields its standard error.

    Within the test, since pytest adds handlers of its own just before it.
    """
    with pytest.MonkeyPatch.context() as patch:
        stderr = io.StringIO()
        patch.setattr("sys.stderr", stderr)
        patch.setattr(logging.root, "handlers", [])
        patch.setattr(_log.logger, "handlers", [])
        root_level, level = logging.root.level, _log.logger.level
        try:
            yield stderr
        finally:
            logging.root.setLevel(root_level)
            _log.logger.setLevel(level)


def test_lines_are_shown() -> None:
    with bare() as stderr:
        for _ in range(3):
            _log.show_lines()
        _log.log_rank0(logging.INFO, "first")
        _log.log_rank0(logging.WARNING, "second")
    assert stderr.getvalue() == "z3ext: first\nz3ext: second\n"


def test_lines_are_shown_once_when_logging_is_set_up_later() -> None:
    with bare() as stderr:
        _log.show_lines()
        own = io.StringIO()
        logging.basicConfig(level=logging.INFO, stream=own, format="app %(message)s")
        _log.log_rank0(logging.INFO, "line")
    assert stderr.getvalue() + own.getvalue() in ("z3ext: line\n", "app line\n")


def test_the_applications_logging_stays() -> None:
    with bare() as stderr:
        own = io.StringIO()
        logging.basicConfig(level=logging.WARNING, stream=own, format="app %(message)s")
        _log.show_lines()
        _log.log_rank0(logging.INFO, "quiet")
        _log.log_rank0(logging.WARNING, "loud")
        assert _log.logger.handlers == []
    assert own.getvalue() == "app loud\n"
    assert stderr.getvalue() == ""


@pytest.mark.parametrize(
    ("rank", "lines"), [("0", 1), ("1", 0), ("17", 0), ("", 1), ("x", 1), (None, 1)]
)
def test_launchers_rank(
    rank: str | None, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    _log.log_rank0(logging.WARNING, "line")
    assert [record.getMessage() for record in caplog.records] == ["line"] * lines


@pytest.mark.usefixtures("own_group")
def test_the_groups_rank_wins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "3")
    _log.log_rank0(logging.WARNING, "rank 0 here")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    _log.log_rank0(logging.WARNING, "rank 1 here")
    assert [record.getMessage() for record in caplog.records] == ["rank 0 here"]


def test_lines_of_the_patch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for each event."""
    import deepspeed

    torch.ops.z3ext.pack_  # noqa: B018  (loads the library: where it is compiled, that is said)
    with caplog.at_level(logging.INFO, "z3ext"):
        handle = z3ext.patch_deepspeed()
        assert caplog.messages == [f"patched DeepSpeed {deepspeed.__version__}"]
        z3ext.patch_deepspeed()
        assert len(caplog.messages) == 1
        z3ext.patch_deepspeed(mode="all_reduce")
        assert "already patched with mode='auto'" in caplog.messages[1]
        handle.undo()
        monkeypatch.setenv("Z3EXT_DISABLE", "1")
        z3ext.patch_deepspeed()
    assert len(caplog.messages) == 3
    assert "Z3EXT_DISABLE=1 is set" in caplog.messages[2]
