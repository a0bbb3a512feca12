"""Runs an example in this rank, stock and with z3ext; writes the weights each engine is left with.

torchrun ... run_example.py EXAMPLE FOLDER PORT PORT    one free port for each side
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import runpy
import sys
from pathlib import Path

import torch


def run(script: str, folder: Path) -> None:
    sys.argv = [script]
    left = runpy.run_path(script, run_name="__main__")  # keeps the example's objects alive

    from deepspeed import DeepSpeedEngine
    from training.run import state_records

    import z3ext

    engines = [o for o in gc.get_objects() if isinstance(o, DeepSpeedEngine)]
    assert left
    assert len(engines) == 1, f"{len(engines)} DeepSpeed engines"
    engine = engines[0]
    records = state_records(engine.optimizer, engine.module)
    status = dataclasses.asdict(z3ext.status(engine))
    torch.save({"records": records, "status": status}, folder / f"{os.environ['RANK']}.pt")


def main() -> int:
    script, folder, *ports = sys.argv[1:]
    # Each run is a process of its own, but the imports, most of its time, are done once.
    for module in ("deepspeed", "training.run", "accelerate", "peft", "transformers.trainer"):
        importlib.import_module(module)
    for side, port in zip(("stock", "z3ext"), ports, strict=True):
        child = os.fork()
        if child == 0:
            os.environ["Z3EXT_DISABLE"] = "1" if side == "stock" else "0"
            # A store of its own: the other side's still holds where that side's ranks were.
            os.environ.update(MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")
            run(script, Path(folder) / side)
            return 0
        _, status = os.waitpid(child, 0)
        if status != 0:
            print(f"{side}: exit code {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
