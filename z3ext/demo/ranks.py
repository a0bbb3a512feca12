"""Starts the demo's ranks as processes of this machine and ends them all, whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5.0
_LOG_LINES = 40


class RankFailure(Exception):
    """A rank ended with an error or none ended in time.

    Attributes:
        exit_code: of the first rank that failed; None when the time was up.
    """

    def __init__(self, message: str, exit_code: int | None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environment(
    rank: int, world_size: int, port: int, folder: Path, cpu: bool
) -> dict[str, str]:
    """The environment of one rank, based on this process's own."""
    environment = dict(os.environ)
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
    )
    # A lock that a killed build left in the user's cache would block DeepSpeed for ever.
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(folder / "torch_extensions"))
    if cpu:
        environment["DS_ACCELERATOR"] = "cpu"
    else:
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS repeats its sums exactly
    return environment


def run_ranks(
    module: str, arguments: Sequence[str], world_size: int, folder: Path, limit: float, cpu: bool
) -> None:
    """Runs ``python -m module`` once for each rank and waits for all of them.

    Rank 0 gets a copy of this process's standard error as ``--progress-fd``; everything else
    that ranks print goes to ``folder/rank<N>.log``. All ranks are gone when this returns or
    raises, on Ctrl-C and SIGTERM too.

    Args:
        limit: seconds after which the ranks are ended.
        cpu: whether the ranks must not use a GPU.

    Raises:
        RankFailure: a rank failed, or the limit passed. The message holds the end of the log.
        KeyboardInterrupt: Ctrl-C or SIGTERM.
    """
    port = free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    with _terminate_as_interrupt():
        try:
            for rank in range(world_size):
                ranks.append(_start(module, arguments, rank, world_size, port, folder, cpu))
            _wait(ranks, folder, limit)
        finally:
            _end(ranks)


def _start(
    module: str,
    arguments: Sequence[str],
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    cpu: bool,
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, *arguments]
    shared: list[int] = []
    if rank == 0:
        shared.append(os.dup(2))
        command += ["--progress-fd", str(shared[0])]
    try:
        with (folder / f"rank{rank}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                env=rank_environment(rank, world_size, port, folder, cpu),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=shared,
                start_new_session=True,  # one signal reaches a rank and all it started
            )
    finally:
        for descriptor in shared:
            os.close(descriptor)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, limit: float) -> None:
    deadline = time.monotonic() + limit
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                raise RankFailure(
                    f"rank {rank} ended with exit code {code}; the end of its log:\n"
                    + log_tail(folder / f"rank{rank}.log"),
                    code,
                )
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise RankFailure(
                f"the ranks did not end within {limit:.0f} s (--limit); the end of rank 0's log:\n"
                + log_tail(folder / "rank0.log"),
                None,
            )
        time.sleep(_POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what is left of the ranks and of the processes that they started."""
    for sign, grace in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, None)):
        for process in ranks:
            try:
                os.killpg(process.pid, sign)
            except (ProcessLookupError, PermissionError):
                continue  # the whole group is gone
        deadline = None if grace is None else time.monotonic() + grace
        for process in ranks:
            try:
                process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


def log_tail(path: Path, lines: int = _LOG_LINES) -> str:
    """The last lines of a log, indented."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt in the body, so that ``finally`` clauses run."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
