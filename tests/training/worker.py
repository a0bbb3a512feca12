"""One rank of a launch: runs the given cases in turn and writes one JSON line per event.

The launcher forks the ranks from a process that has imported this module. The spec is a JSON file
of `cases` (names), `out` (a folder), `seed`. Rank and world size come from the environment, as
torchrun sets them. A case that raises ends the process, since the other ranks may be inside a
collective; the launcher starts again with what is left.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import json
import logging
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import logger as deepspeed_logger

import z3ext  # noqa: F401  (registers torch.ops.z3ext)

from . import features
from .case import Case
from .registry import ENTRIES
from .run import run_case

#: A collective that waits longer than this has lost its peers.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


def _wait_for_every_gather() -> None:
    """Before 0.19.8 DeepSpeed waits for the last of several gathers: right on a GPU, not in gloo.

    Without this stock differs from stock now and then, where parameters are persistent.
    """
    if "launch_handles[-1].wait()" not in inspect.getsource(partition_parameters):
        return
    gather = deepspeed.comm.all_gather_into_tensor

    def gather_and_wait(*args: Any, **kwargs: Any) -> Any:
        handle = gather(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle

    deepspeed.comm.all_gather_into_tensor = gather_and_wait


def main(spec_path: str) -> int:
    spec = json.loads(Path(spec_path).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the launcher asks for the stacks of a hung rank
    torch.set_num_threads(1)
    deepspeed_logger.setLevel(logging.WARNING)
    # The first use compiles the library, which no rank should do while others wait for it.
    torch.ops.z3ext.flat_overflow(torch.zeros(1))
    # DeepSpeed refuses fp16 on CPU by a capability flag; the arithmetic itself is there.
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    # Compiled at every start in a fresh cache, for inference alone.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="gloo", auto_mpi_discovery=False, timeout=COLLECTIVE_TIMEOUT, verbose=False
    )
    entries = [ENTRIES[name] for name in spec["cases"]]
    for compiles in {e.compiles for e in entries if isinstance(e, Case) and e.compiles}:
        compiles()
    _wait_for_every_gather()
    absent = features.absent()  # before anything is patched
    scratch = Path(spec["out"]) / "scratch"
    with (Path(spec["out"]) / f"rank{rank}.jsonl").open("a") as out:

        def tell(**event: Any) -> None:
            out.write(json.dumps(event) + "\n")
            out.flush()

        tell(event="ready")
        for name in spec["cases"]:
            tell(event="start", case=name)
            started = time.monotonic()
            status: dict[str, Any] = {}
            try:
                entry = ENTRIES[name]
                lacking = sorted(entry.needed & absent) if isinstance(entry, Case) else []
                if lacking:
                    reason = f"DeepSpeed {deepspeed.__version__} has no {', '.join(lacking)}"
                    tell(event="done", case=name, problems=[], skipped=reason)
                    continue
                if isinstance(entry, Case):
                    case_scratch = scratch / name
                    problems, status = run_case(entry, rank, world, spec["seed"], case_scratch)
                else:
                    problems = entry.run(world)
            except Exception:
                tell(event="raised", case=name, problems=[traceback.format_exc()])
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(17)
            seconds = round(time.monotonic() - started, 3)
            # DeepSpeed collects garbage for every engine, most of the time of a small training:
            # what is alive between cases (imports, what DeepSpeed keeps) need not be looked at.
            gc.collect()
            gc.freeze()
            tell(event="done", case=name, problems=problems, status=status, seconds=seconds)
    torch.distributed.destroy_process_group()
    return 0
