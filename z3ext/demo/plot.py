"""The demo's result as a picture: the two loss curves, and where a step's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from z3ext.demo import timing
from z3ext.demo.results import DemoResult, Side

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_STOCK_COLOUR = "#E69F00"
_Z3EXT_COLOUR = "#0072B2"
_PHASE_COLOURS = {
    timing.COMPUTE: "#BBBBBB",
    timing.GRADIENT: "#D55E00",
    timing.UPDATE: "#009E73",
    timing.REFRESH: "#56B4E9",
}
_SMALLEST_LABELLED_SHARE = 0.04  # of the tallest bar; a thinner segment is labelled at its side


def draw(result: DemoResult, path: Path) -> None:
    """Writes the picture to ``path``; its suffix selects the format."""
    # Not through pyplot, which looks for a display.
    figure = Figure(figsize=(12.5, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    figure.suptitle(
        f"ZeRO-3 training of a byte-level BERT ({result.tensors} parameter tensors, fp16, "
        f"{result.ranks} {'ranks' if result.ranks != 1 else 'rank'} on {result.device}): "
        "stock DeepSpeed and z3ext",
        fontsize=12.5,
    )
    _draw_losses(left, result)
    _draw_phases(right, result)
    figure.savefig(path, dpi=130)


def _draw_losses(axes: Axes, result: DemoResult) -> None:
    numbers = range(1, result.steps + 1)
    axes.plot(
        numbers, result.stock.losses, color=_STOCK_COLOUR, linewidth=6, alpha=0.75, label="stock"
    )
    axes.plot(numbers, result.z3ext.losses, color=_Z3EXT_COLOUR, linewidth=1.6, label="with z3ext")
    if result.z3ext.skipped:
        axes.plot(
            result.z3ext.skipped,
            [result.z3ext.losses[number - 1] for number in result.z3ext.skipped],
            linestyle="none",
            marker="x",
            markersize=8,
            color="black",
            label="update skipped (fp16 overflow)",
        )
    verdict = "identical bit for bit" if result.comparison.identical else "NOT identical"
    axes.set_title(f"Loss, norm and weights: {verdict}", fontsize=11.5)
    axes.set_xlabel("step")
    axes.set_ylabel("masked-byte loss, mean over ranks (nats)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_phases(axes: Axes, result: DemoResult) -> None:
    sides = (result.stock, result.z3ext)
    tallest = max(sum(side.phases_ms.values()) for side in sides)
    for position, side in enumerate(sides):
        _draw_bar(axes, position, side, tallest, labelled=position == 0)
    rates = [f"{side.samples_per_second:.1f} samples/s" for side in sides]
    names = ("stock", "with z3ext")
    axes.set_xticks(range(2), [f"{name}\n{rate}" for name, rate in zip(names, rates, strict=True)])
    axes.set_xlim(-0.6, 1.75)
    axes.set_ylim(0, tallest * 1.32)  # room for the legend above the bars
    axes.set_ylabel("milliseconds per step (medians)")
    axes.set_title("Where a step's time goes", fontsize=11.5)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, ncols=2, loc="upper center", fontsize=9)
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)


def _draw_bar(axes: Axes, position: int, side: Side, tallest: float, labelled: bool) -> None:
    bottom = 0.0
    beside_from = 0.0  # labels beside the bar keep at least one line's distance
    for phase in timing.PHASES:
        value = side.phases_ms[phase]
        colour = _PHASE_COLOURS[phase]
        axes.bar(
            position,
            value,
            bottom=bottom,
            width=0.55,
            color=colour,
            edgecolor="white",
            label=phase if labelled else None,
        )
        middle = bottom + value / 2
        if value >= _SMALLEST_LABELLED_SHARE * tallest:
            axes.text(position, middle, f"{value:.0f}", ha="center", va="center", fontsize=10)
        else:
            height = max(middle, beside_from)
            axes.text(position + 0.3, height, f"{value:.1f}", va="center", fontsize=9)
            beside_from = height + 0.035 * tallest
        bottom += value
