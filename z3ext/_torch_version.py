"""Which torch z3ext serves and was tested with. Imported first: it refuses an older one.

The package requires no version of torch, so that pip never replaces the one that is there.
"""

from __future__ import annotations

import re

import torch

_OLDEST = "2.6"
_TESTED = f"{_OLDEST} to 2.15"


def _refuse_older() -> None:
    """Compares two numbers alone: 2.6.0a0+nv, as NVIDIA's containers have it, is a 2.6 here."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found and (int(found[1]), int(found[2])) < tuple(map(int, _OLDEST.split("."))):
        raise ImportError(
            f"z3ext: torch is {torch.__version__}, expected {_OLDEST} or newer; install such a "
            f"torch (tested: {_TESTED})"
        )


def described() -> str:
    """The torch that is here, beside those that z3ext was tested with."""
    return f"torch is {torch.__version__}; z3ext was tested with torch {_TESTED}"


_refuse_older()
