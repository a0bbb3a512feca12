"""Prints what z3ext makes of this interpreter's DeepSpeed, as one line of JSON.

release_probe.py            versions; the family that serves it, or why z3ext declines it
release_probe.py FAMILY     also the hash and the source of everything that the family names
"""

from __future__ import annotations

import inspect
import json
import platform
import sys
from typing import Any

import torch


def _source(function: object) -> str:
    """The innermost function's text: decorators of DeepSpeed's hide it from ``inspect``."""
    from z3ext.deepspeed import fingerprint

    layers = list(fingerprint._layers(function))
    return inspect.getsource(layers[-1].__code__) if layers else ""


def _sources(family: str) -> dict[str, list[str]]:
    from deepspeed.runtime.zero import stage3

    from z3ext.deepspeed.fingerprint import fingerprint, resolve
    from z3ext.deepspeed.releases import RELEASES

    cls = stage3.DeepSpeedZeroOptimizer_Stage3
    release = next(r for r in RELEASES if r.name == family)
    found = {name: resolve(cls, name) for name in release.methods}
    found |= {name: vars(stage3).get(name) for name in release.functions}
    table = {name: [fingerprint(f), _source(f)] for name, f in found.items()}
    bucket = vars(stage3).get("IPGBucketZ3")
    if bucket is not None:
        table["IPGBucketZ3"] = ["(its fields)", inspect.getsource(bucket)]
    return table


def _found() -> dict[str, Any]:
    try:
        import deepspeed
        from deepspeed.runtime.zero import stage3
    except Exception as error:
        return {"importable": False, "reason": f"{type(error).__name__}: {error}"}
    import z3ext
    from z3ext.deepspeed.patch import UnsupportedDeepSpeedError
    from z3ext.deepspeed.recognise import closest

    cls = stage3.DeepSpeedZeroOptimizer_Stage3
    release, unknown = closest(cls)
    reason = ""
    try:
        z3ext.patch_deepspeed(strict=True).undo()
    except UnsupportedDeepSpeedError as error:
        reason = str(error).removeprefix("z3ext: declined: ")
    found = {"importable": True, "deepspeed": deepspeed.__version__, "reason": reason}
    found |= {"family": release.name, "unknown": unknown}
    if len(sys.argv) > 1:
        found["sources"] = _sources(sys.argv[1])
    return found


if __name__ == "__main__":
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print("\n" + json.dumps({**versions, **_found()}))
