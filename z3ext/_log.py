"""The "z3ext" logger: one line per event, on rank 0."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # takes no parameter before Python 3.11

logger = logging.getLogger("z3ext")


def _rank() -> int:
    """This process's rank: torch.distributed's, else the launcher's, else 0."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


class _WhereNobodyListens(_StreamHandler):
    """Writes to standard error, unless the application has set up logging, now or later."""

    def emit(self, record: logging.LogRecord) -> None:
        others = [handler for handler in logger.handlers if handler is not self]
        if not others and not (logger.propagate and logging.getLogger().handlers):
            super().emit(record)


def show_lines() -> None:
    """Let INFO lines reach standard error where the application set up no logging itself."""
    if logger.hasHandlers():
        return
    handler = _WhereNobodyListens()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def log_rank0(level: int, text: str) -> None:
    """Log one line on rank 0 and nothing elsewhere."""
    if _rank() == 0:
        logger.log(level, text)
