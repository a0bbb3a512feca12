"""One case for any DeepSpeed, also one that z3ext declines: the script goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import z3ext

from .case import BF16, Case, gas, merged, train
from .models import Mlp

if TYPE_CHECKING:
    from .run import Run


def _served_or_not(run: Run) -> None:
    if run.patched:
        run.at_close.append(z3ext.patch_deepspeed().undo)
    train(run)


CASES: list[Case] = [
    Case(
        "served_or_declined",
        Mlp,
        merged(BF16, gas(2)),
        drive=_served_or_not,
        patched_by_drive=True,
        served=None,
        noted=None,
        full_worlds=(2,),
    )
]
