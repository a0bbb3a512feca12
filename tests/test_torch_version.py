"""Which torch is refused at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import z3ext

IMPORT = """
import sys, torch
own = torch.ops.z3ext
torch.__version__ = torch.torch_version.TorchVersion(sys.argv[1])
try:
    import z3ext
except ImportError as error:
    assert torch.ops.z3ext is own
    assert not [name for name in sys.modules if name in ("z3ext._build", "z3ext._library")]
    print(error)
"""


def said_at_import(version: str) -> str:
    path = [str(Path(z3ext.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, version],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu124"])
def test_an_older_torch_is_refused(version: str) -> None:
    assert said_at_import(version) == (
        f"z3ext: torch is {version}, expected 2.6 or newer; install such a torch "
        "(tested: 2.6 to 2.15)"
    )


@pytest.mark.parametrize("version", ["2.6.0a0+ecf3bae40a.nv25.01", "2.16.0", "3.0.0"])
def test_served_and_newer_ones_are_not(version: str) -> None:
    """A newer one may do: the first use finds out."""
    assert not said_at_import(version)
