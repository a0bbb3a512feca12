"""Starts the ranks of one world size, watches over them and collects each case's result."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

#: Seconds until every rank has joined; the first launch also compiles native code.
STARTUP_LIMIT = 420.0
#: Seconds that one case may take.
CASE_LIMIT = 75.0
#: Seconds for the other ranks to notice that one has left.
GRACE = 3.0
#: Launches of one world size before the cases that are left count as not run.
MAX_LAUNCHES = 8
LOG_LINES = 45
#: What gloo's errors have in common when a peer is gone.
LOST_PEER = "gloo/transport"


@dataclass
class Result:
    """What the ranks reported for one case: rank -> problems, rank -> status; why skipped."""

    problems: dict[int, list[str]] = field(default_factory=dict)
    status: dict[int, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    skipped: str = ""

    @property
    def lines(self) -> list[str]:
        """Every problem, one a line, with its rank."""
        return [f"rank {r}: {p}" for r in sorted(self.problems) for p in self.problems[r]]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _import_path() -> str:
    """What this process imports from, for the ranks: this package and z3ext are found alike."""
    package = __package__ or ""
    root = str(Path(__file__).absolute().parents[len(package.split("."))])
    return os.pathsep.join([root, *(os.path.abspath(p) for p in sys.path)])


@functools.cache
def _ranks() -> ForkServerContext:
    """Forks ranks from one process, whose imports take longer than most launches would."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", f"{__package__}.worker"])
    needed = {
        "DS_ACCELERATOR": "cpu",  # read when DeepSpeed is imported
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": _import_path(),
        "PYTHONUNBUFFERED": "1",
    }
    before = dict(os.environ)
    os.environ.update(needed)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _rank(spec: str, log: str, env: dict[str, str]) -> None:
    """One rank, in a process and a session of its own."""
    os.setsid()
    with open(log, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(env)
    os.chdir(Path(spec).parent)
    from .worker import main

    sys.exit(main(spec))


class Launch:
    """One set of ranks running a list of cases in one process group."""

    def __init__(self, world: int, cases: Sequence[str], seed: int, out: Path) -> None:
        self.world = world
        self.cases = list(cases)
        self.out = out
        out.mkdir(parents=True)
        spec = out / "spec.json"
        spec.write_text(json.dumps({"cases": self.cases, "out": str(out), "seed": seed}))
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }
        self.processes = []
        for rank in range(world):
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = (str(spec), str(out / f"rank{rank}.log"), own)
            self.processes.append(_ranks().Process(target=_rank, args=arguments, daemon=True))
            self.processes[rank].start()

    def kill(self) -> None:
        """Kills every rank with all that it started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()  # one that has no group of its own yet
            process.join()

    def _dump_stacks(self) -> None:
        """Has every rank write the stacks of its threads into its log."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGUSR1)
        time.sleep(1.0)

    def events(self, rank: int) -> list[dict[str, Any]]:
        path = self.out / f"rank{rank}.jsonl"
        if not path.exists():
            return []
        complete = path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in complete.splitlines()]

    def log_tail(self, rank: int) -> str:
        text = (self.out / f"rank{rank}.log").read_text(errors="replace")
        return "\n".join([n for n in text.splitlines() if "FutureWarning" not in n][-LOG_LINES:])

    def watch(self) -> str:
        """Waits for the end; returns why it ended early, or "" when every rank finished."""
        progress = [-1] * self.world
        moved = time.monotonic()
        left_at: float | None = None
        while True:
            time.sleep(0.1)
            codes = [p.exitcode for p in self.processes]
            if all(code == 0 for code in codes):
                return ""
            failed = [(r, code) for r, code in enumerate(codes) if code not in (None, 0)]
            now = time.monotonic()
            if failed and left_at is None:
                left_at = now
            if failed and (None not in codes or now - (left_at or now) > GRACE):
                return "; ".join(f"rank {r} ended with code {code}" for r, code in failed)
            sizes = [
                path.stat().st_size if (path := self.out / f"rank{r}.jsonl").exists() else -1
                for r in range(self.world)
            ]
            if sizes != progress:
                progress, moved = sizes, now
            limit = STARTUP_LIMIT if -1 in sizes else CASE_LIMIT
            if now - moved > limit:
                self._dump_stacks()
                return f"no rank moved for {limit:.0f} s: killed"

    def _explain(self, result: Result, why: str) -> None:
        """Adds why the launch stopped, and the logs of the ranks that left no traceback."""
        for rank in range(self.world):
            reported = result.problems.get(rank)
            if not reported:
                result.problems[rank] = [f"the launch stopped here: {why}\n{self.log_tail(rank)}"]
            elif LOST_PEER in reported[0]:
                # Another rank left first: its report tells, this one's traceback does not.
                result.problems[rank] = [reported[0].strip().splitlines()[-1][:200]]

    def run(self) -> tuple[dict[str, Result], str]:
        """Runs to the end; returns the results of the cases that ended, and why it stopped."""
        try:
            why = self.watch()
        finally:
            self.kill()
        results: dict[str, Result] = {}
        done = dict.fromkeys(self.cases, 0)
        for rank in range(self.world):
            for event in self.events(rank):
                if event["event"] not in ("done", "raised"):
                    continue
                result = results.setdefault(event["case"], Result())
                result.problems[rank] = event["problems"]
                result.status[rank] = event.get("status", {})
                result.skipped = event.get("skipped", "")
                result.seconds = max(result.seconds, event.get("seconds", 0.0))
                done[event["case"]] += event["event"] == "done"
        unfinished = [name for name in self.cases if done[name] < self.world]
        # The first case that some rank did not finish ended the launch; later ones run again.
        for name in unfinished[1:]:
            results.pop(name, None)
        if why and unfinished:
            self._explain(results.setdefault(unfinished[0], Result()), why)
        return results, why


def run_world(world: int, cases: Sequence[str], seed: int, out: Path) -> dict[str, Result]:
    """Runs every case at one world size, starting again after a case that ended the ranks."""
    results: dict[str, Result] = {}
    why = ""
    for attempt in range(MAX_LAUNCHES):
        left = [name for name in cases if name not in results]
        if not left:
            return results
        found, why = Launch(world, left, seed, out / f"launch{attempt}").run()
        results.update(found)
    for name in cases:
        problem = f"not run: {MAX_LAUNCHES} launches ended early, the last one: {why}"
        results.setdefault(name, Result(problems={0: [problem]}))
    return results
