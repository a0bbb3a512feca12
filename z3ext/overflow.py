"""What an overflow was, as a value: which parameter, where, on which rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Overflow:
    """One optimizer step that was skipped because its gradients were not finite.

    step: optimizer steps since z3ext served the engine, from 1, skipped ones included.
    parameter: the full name of the affected parameter that comes last in the model's order, where
        backward begins: from there an inf or a nan spreads to the others.
    index: the first such element, in the parameter's own shape.
    infs, nans: how many elements of that parameter's averaged gradient are of each kind.
    parameters: how many parameters are affected.
    ranks: the ranks of the partition group whose own gradients, before the sum, were not finite;
        empty when only the sum was not; None where DeepSpeed's own methods filled the buckets.
    micro_step: the first micro-step, from 0, in which a rank's own gradients were not finite; None
        when ``ranks`` is empty or None.
    loss_scale: before and after the step; None in bf16 and fp32.
    """

    step: int
    parameter: str
    index: tuple[int, ...]
    infs: int
    nans: int
    parameters: int
    ranks: tuple[int, ...] | None
    micro_step: int | None
    loss_scale: tuple[float, float] | None

    def __str__(self) -> str:
        """One line for the log."""
        kinds = [f"{n} {kind}" for n, kind in ((self.infs, "inf"), (self.nans, "nan")) if n]
        others = self.parameters - 1
        spread = f" (and in {others} more parameter{'s' * (others > 1)})" if others else ""
        scale = ""
        if self.loss_scale is not None:
            scale = "; loss scale {:g} -> {:g}".format(*self.loss_scale)
        return (
            f"step {self.step} skipped: {' and '.join(kinds)} in the gradient of {self.parameter}, "
            f"first at {list(self.index)}{spread}; {self._origin()}{scale}"
        )

    def _origin(self) -> str:
        if self.ranks is None:
            return "the rank is not known, since DeepSpeed filled the buckets"
        if not self.ranks:
            return "only after the sum: every rank's own gradients are finite"
        plural = "s" * (len(self.ranks) > 1)
        return f"from rank{plural} {', '.join(map(str, self.ranks))}, micro-step {self.micro_step}"


class NonFiniteGradientError(RuntimeError):
    """A step was skipped under ``patch_deepspeed(on_nonfinite="raise")``.

    overflow: what was found.
    """

    def __init__(self, overflow: Overflow) -> None:
        super().__init__(f"z3ext: {overflow}")
        self.overflow = overflow
