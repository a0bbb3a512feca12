"""The demo's result as a table."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from z3ext.demo import timing
from z3ext.demo.results import DemoResult, Side

_WIDTHS = (44, 17, 17, 9)
_DIFFERENT = "DIFFERENT"
_NOISY = 0.2  # the middle half's width, as a share of the median


def _row(label: str, stock: str = "", served: str = "", ratio: str = "") -> str:
    cells = (stock, served, ratio)
    line = f"{label:<{_WIDTHS[0]}}"
    line += "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS[1:], strict=True))
    return line.rstrip()


def _verdict(first: int | None) -> str:
    return "identical" if first is None else f"{_DIFFERENT} (first at step {first})"


def _times(better: float, worse: float) -> str:
    return f"{better / worse:.2f} x" if worse else ""


def _steps(numbers: Sequence[int]) -> str:
    return str(len(numbers))


def _setting(result: DemoResult) -> list[str]:
    model = f"{result.tensors} parameter tensors, {result.parameters:,} parameters"
    ranks = f"{result.ranks} {'ranks' if result.ranks != 1 else 'rank'}"
    text = f"{result.files} files ({result.text_bytes / 1e6:.1f} MB)"
    return [
        f"Byte-level BERT, {model}; ZeRO stage 3, fp16, AdamW",
        f"{ranks} on {result.device} ({result.backend}), "
        + f"{result.batch} x {result.length} bytes per rank and step",
        f"Text: {text} of Python {platform.python_version()}'s standard library",
    ]


def table(result: DemoResult) -> str:
    """The two trainings side by side; the last line sums up."""
    stock, served, comparison = result.stock, result.z3ext, result.comparison
    rule = "-" * sum(_WIDTHS)
    lines = [
        *_setting(result),
        "",
        _row("", "stock", "with z3ext", "better"),
        rule,
        _row(
            f"loss after {result.steps} steps",
            f"{stock.losses[-1]:.4f}",
            f"{served.losses[-1]:.4f}",
        ),
        _row(
            "loss scale then",
            f"{stock.loss_scales[-1]:g}",
            f"{served.loss_scales[-1]:g}",
        ),
        _row("steps skipped by overflow until then", _steps(stock.skipped), _steps(served.skipped)),
        rule,
        f"bit for bit, over {comparison.steps} steps on every rank:",
        *(
            _row(f"  every {name}", _verdict(first))
            for name, first in comparison.first_different.items()
        ),
        _row(
            "  final fp32 weights",
            f"{_DIFFERENT} ({comparison.different_weights:,} elements)"
            if comparison.different_weights
            else "identical",
        ),
        rule,
        _row(
            "samples per second",
            f"{stock.samples_per_second:.2f}",
            f"{served.samples_per_second:.2f}",
            _times(served.samples_per_second, stock.samples_per_second),
        ),
        "milliseconds per step (medians of blocks in turn):",
        *(
            _row(
                f"  {name}",
                f"{stock.phases_ms[name]:.1f}",
                f"{served.phases_ms[name]:.1f}",
                _times(stock.phases_ms[name], served.phases_ms[name]),
            )
            for name in timing.PHASES
        ),
        _row("  gradient path, middle half of the steps", _half(stock), _half(served)),
        _row(
            "collectives per step in the gradient path",
            str(stock.gradient_collectives),
            str(served.gradient_collectives),
            _times(stock.gradient_collectives, served.gradient_collectives),
        ),
        _row(
            "other collectives per step",
            str(sum(stock.collectives.values()) - stock.gradient_collectives),
            str(sum(served.collectives.values()) - served.gradient_collectives),
        ),
        rule,
        _row("z3ext.status(engine).served", "", str(result.status["served"])),
        _row("z3ext.status(engine).reason", "", str(result.status["reason"] or "-")),
        rule,
        *_noise(stock, served),
        _summary(result),
    ]
    return "\n".join(lines)


def _half(side: Side) -> str:
    first, third = side.gradient_half_ms
    return f"{first:.0f} to {third:.0f}"


def _noise(*sides: Side) -> list[str]:
    """A warning where times vary too much to be compared."""
    spread = max(
        (s.gradient_half_ms[1] - s.gradient_half_ms[0]) / s.phases_ms[timing.GRADIENT]
        for s in sides
    )
    if spread <= _NOISY:
        return []
    return [
        f"NOTE: the gradient path's times spread by {spread:.0%}: something else runs on this "
        "machine, so read no speed-up from them"
    ]


def _summary(result: DemoResult) -> str:
    if not result.status["served"]:
        return f"FAILED: z3ext declined this engine: {result.status['reason']}"
    if not result.comparison.identical:
        return "FAILED: training with z3ext differs from stock DeepSpeed, see above"
    before = result.stock.phases_ms[timing.GRADIENT]
    after = result.z3ext.phases_ms[timing.GRADIENT]
    return (
        f"Same bits, and the gradient path took {after:.1f} ms a step instead of {before:.1f} ms."
    )
