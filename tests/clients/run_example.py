"""Runs an example in this rank, then writes the weights that its engine is left with.

torchrun ... run_example.py EXAMPLE FOLDER
"""

from __future__ import annotations

import dataclasses
import gc
import os
import runpy
import sys

import torch


def main() -> None:
    script, folder = sys.argv[1:]
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
    torch.save({"records": records, "status": status}, f"{folder}/{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
