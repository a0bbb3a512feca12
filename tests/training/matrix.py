"""Runs cases with this interpreter's DeepSpeed and prints what came out, as one line of JSON.

    python -m training.matrix WORLD SEED [CASE ...]

Without names: every case that `make test` has at that world size, but for those that compile an op
of DeepSpeed's. The working directory is a folder for the results.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

from .launcher import Result, run_world


def _cases(world: int) -> list[str]:
    from .case import Case
    from .registry import ENTRIES

    cases = [entry for entry in ENTRIES.values() if isinstance(entry, Case)]
    return [c.name for c in cases if world in c.worlds() and not (c.plant or c.compiles)]


def _outcome(result: Result) -> dict[str, Any]:
    """A case that DeepSpeed itself fails in, before z3ext is there, compares nothing."""
    failed = re.search(r"StockFailure: (.*)", "\n".join(result.lines))
    if failed:
        return {"problems": [], "skipped": f"DeepSpeed itself fails with {failed[1][:120]}"}
    return {"problems": result.lines, "skipped": result.skipped}


def main(world: int, seed: int, names: list[str]) -> None:
    results = run_world(world, names or _cases(world), seed, Path.cwd() / "ranks")
    table = {name: _outcome(result) for name, result in results.items()}
    spec = importlib.util.find_spec("deepspeed")
    print("\n" + json.dumps({"deepspeed": spec and spec.origin, "cases": table}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
