"""What one run of the demo found, as it travels from rank 0 to the table and the picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Side:
    """One of the two trainings.

    Attributes:
        losses: mean over the ranks, one per training step.
        norms: global gradient norm before clipping, one per training step; inf where skipped.
        loss_scales: after each training step.
        skipped: the training steps, from 1, that were skipped because a gradient overflowed.
        samples_per_second: over all ranks, from the median step of the timing phase.
        phases_ms: milliseconds by phase of `timing.PHASES`, medians of the timing phase.
        gradient_half_ms: the gradient path's first and third quartile, in the same way.
        collectives: calls of each collective in one step, by c10d's name.
        gradient_collectives: those of them that belong to the gradient path.
    """

    losses: list[float]
    norms: list[float]
    loss_scales: list[float]
    skipped: list[int]
    samples_per_second: float
    phases_ms: dict[str, float]
    gradient_half_ms: tuple[float, float]
    collectives: dict[str, int]
    gradient_collectives: int


def _side(fields: Mapping[str, Any]) -> Side:
    return Side(**{**fields, "gradient_half_ms": tuple(fields["gradient_half_ms"])})


@dataclass(frozen=True)
class Comparison:
    """Bit-for-bit comparison of the two trainings on every rank, timing phase included.

    Attributes:
        steps: how many steps of each side were compared.
        first_different: by quantity ("loss", "gradient norm", "loss scale"), the first step,
            from 1, at which some rank saw a difference; None where there is none.
        different_weights: fp32 weights that differ at the end, over all ranks.
    """

    steps: int
    first_different: dict[str, int | None]
    different_weights: int

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return self.different_weights == 0 and not any(self.first_different.values())


@dataclass(frozen=True)
class DemoResult:
    """Everything that the table, the picture and ``--json`` show.

    Attributes:
        device: "cpu" or the GPU's name.
        files: files of the standard library that were read, over all ranks.
        text_bytes: their bytes that were used.
        tensors: the model's parameter tensors.
        parameters: their elements.
        status: ``z3ext.status(engine)`` at the end, field by field.
        seconds: wall time of the ranks, from the first engine to the last step.
    """

    device: str
    backend: str
    ranks: int
    files: int
    text_bytes: int
    tensors: int
    parameters: int
    steps: int
    batch: int
    length: int
    stock: Side
    z3ext: Side
    comparison: Comparison
    status: dict[str, Any]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether z3ext served the engine and changed no bit."""
        return bool(self.status["served"]) and self.comparison.identical

    def save(self, path: Path) -> None:
        """Writes JSON; a loss or norm that is not finite becomes Infinity or NaN there."""
        text = json.dumps(dataclasses.asdict(self), indent=2, default=str)
        path.write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> DemoResult:
        """Reads what :meth:`save` wrote."""
        fields: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return DemoResult(
            **{
                **fields,
                "stock": _side(fields["stock"]),
                "z3ext": _side(fields["z3ext"]),
                "comparison": Comparison(**fields["comparison"]),
            }
        )
